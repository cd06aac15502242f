"""Jit functions that the kernels of distillation share: statistics of ``losses.divergences`` and their algebra."""

# mypy: disable-error-code="arg-type"
# In a jit function, the literal float("-inf") is a tensor.

from typing import NamedTuple

import triton
import triton.language as tl

from vocab_parallel_ce.kernels import primitives as ops
from vocab_parallel_ce.losses.divergences import DivergenceOptions, DivergenceStats
from vocab_parallel_ce.spec import LossOptions


class Weights(NamedTuple):
    """The numbers of ``DivergenceOptions``; None if they change nothing."""

    inverse_temperature: float | None
    beta: float | None
    hard_weight: float | None


@triton.jit
def load_logits(pointers, inside):
    """Return the logits in fp32, -inf outside."""
    return tl.load(pointers, inside, other=float("-inf")).to(tl.float32)


@triton.jit
def cooled(shifted, weights):
    """Return ``shifted / T``."""
    if weights.inverse_temperature is not None:
        shifted = shifted * weights.inverse_temperature
    return shifted


@triton.jit
def cross_terms(weight_exp, weight, other):
    """Return ``exp(weight) * (weight - other)``; 0 where ``weight`` is -inf, otherwise inf where ``other`` is."""
    difference = tl.where(weight == float("-inf"), 0.0, weight - other)
    # An exponential of 0 times inf is NaN.
    return tl.where(difference == float("inf"), 1.0, weight_exp) * difference


@triton.jit
def moved(cross, weight_sum, weight_raised, other_raised, decay):
    """Return ``cross`` relative to larger maxima; inf stays."""
    shift = tl.where(weight_sum == 0, 0.0, weight_sum * (ops.bounded(weight_raised) - other_raised))
    return tl.where(cross == float("inf"), cross, (cross + shift) * decay)


@triton.jit
def no_columns(LANES: tl.constexpr):
    """Return the ``DivergenceStats`` of lanes that have seen nothing."""
    zeros = tl.zeros([LANES], tl.float32)
    lowest = tl.full([LANES], float("-inf"), tl.float32)
    return DivergenceStats(lowest, zeros, lowest, zeros, zeros, lowest, zeros)


@triton.jit
def raised_to(stats, student_max, teacher_max, weights, KIND: tl.constexpr):
    """Return the sums relative to larger maxima: ``(student_sum, teacher_sum, cross, hard_sum)``."""
    student_shift = ops.finite_or_zero(student_max)
    teacher_shift = ops.finite_or_zero(teacher_max)
    student_decay = ops.exp_shifted(cooled(stats.student_max - student_shift, weights), 0.0)
    teacher_decay = ops.exp_shifted(cooled(stats.teacher_max - teacher_shift, weights), 0.0)
    cross = stats.cross
    if KIND != "js":
        student_raised = cooled(ops.raised_by(stats.student_max, student_shift), weights)
        teacher_raised = cooled(ops.raised_by(stats.teacher_max, teacher_shift), weights)
        if KIND == "forward":
            cross = moved(cross, stats.teacher_sum, teacher_raised, student_raised, teacher_decay)
        else:
            cross = moved(cross, stats.student_sum, student_raised, teacher_raised, student_decay)
    hard_sum = stats.hard_sum
    if weights.hard_weight is not None:
        hard_sum *= ops.exp_shifted(stats.student_max, student_shift)
    return stats.student_sum * student_decay, stats.teacher_sum * teacher_decay, cross, hard_sum


@triton.jit
def with_tile(stats, student, teacher, inside, weights, KIND: tl.constexpr):
    """Return each lane's statistics with one more tile, at pointers ``student`` and ``teacher``."""
    x, w = load_logits(student, inside), load_logits(teacher, inside)
    student_max = tl.maximum(stats.student_max, tl.max(x, axis=1))
    teacher_max = tl.maximum(stats.teacher_max, tl.max(w, axis=1))
    student_sum, teacher_sum, cross, hard_sum = raised_to(stats, student_max, teacher_max, weights, KIND)
    x_shifted = x - ops.finite_or_zero(student_max)[:, None]
    a = cooled(x_shifted, weights)
    b = cooled(w - ops.finite_or_zero(teacher_max)[:, None], weights)
    a_exp, b_exp = ops.exp_shifted(a, 0.0), ops.exp_shifted(b, 0.0)
    if KIND == "forward":
        cross += tl.sum(cross_terms(b_exp, b, a), axis=1)
    elif KIND == "reverse":
        cross += tl.sum(cross_terms(a_exp, a, b), axis=1)
    if weights.hard_weight is not None:
        hard_sum += tl.sum(ops.exp_shifted(x_shifted, 0.0), axis=1)
    student_sum += tl.sum(a_exp, axis=1)
    teacher_sum += tl.sum(b_exp, axis=1)
    return DivergenceStats(student_max, student_sum, teacher_max, teacher_sum, cross, stats.target, hard_sum)


@triton.jit
def merged(stats, target, weights, KIND: tl.constexpr):
    """Merge statistics over axis 0: lanes, or ranks in their order. ``target`` is merged already."""
    student_max, teacher_max = tl.max(stats.student_max, axis=0), tl.max(stats.teacher_max, axis=0)
    student_sum, teacher_sum, cross, hard_sum = raised_to(stats, student_max, teacher_max, weights, KIND)
    return DivergenceStats(
        student_max,
        tl.sum(student_sum, axis=0),
        teacher_max,
        tl.sum(teacher_sum, axis=0),
        tl.sum(cross, axis=0),
        target,
        tl.sum(hard_sum, axis=0),
    )


@triton.jit
def stats_of_row(stats, row, weights, KIND: tl.constexpr):
    """Return a pointer to the packed statistics of ``row``."""
    return stats + row * (4 + (KIND != "js") + 2 * (weights.hard_weight is not None))


@triton.jit
def merged_ranks(pointers, mask, weights, KIND: tl.constexpr):
    """Merge the packed statistics at ``pointers`` over axis 0; ranks that ``mask`` excludes count as no columns."""
    student_max = tl.load(pointers, mask, other=float("-inf"))
    student_sum = tl.load(pointers + 1, mask, other=0.0)
    teacher_max = tl.load(pointers + 2, mask, other=float("-inf"))
    teacher_sum = tl.load(pointers + 3, mask, other=0.0)
    pointers += 4
    cross = tl.zeros_like(student_sum)
    hard_sum = tl.zeros_like(student_sum)
    target = float("-inf")
    if KIND != "js":
        cross = tl.load(pointers, mask, other=0.0)
        pointers += 1
    if weights.hard_weight is not None:
        target = tl.max(tl.load(pointers, mask, other=float("-inf")), axis=0)
        hard_sum = tl.load(pointers + 1, mask, other=0.0)
    stats = DivergenceStats(student_max, student_sum, teacher_max, teacher_sum, cross, float("-inf"), hard_sum)
    return merged(stats, target, weights, KIND)


@triton.jit
def merged_mixture(mixture, row, ranks, mask, n_rows):
    """Return ``KL(t || m)`` and ``KL(s || m)`` of rows, summed over axis 0, the ranks."""
    pointers = mixture + 2 * (ranks.to(tl.int64) * n_rows + row)
    return tl.sum(tl.load(pointers, mask, other=0.0), axis=0), tl.sum(tl.load(pointers + 1, mask, other=0.0), axis=0)


@triton.jit
def row_loss(stats, of_teacher, of_student, label, divisor, sizes, loss_options, weights, KIND: tl.constexpr):
    """Return the loss of one row or of a vector of rows; ``label`` is None if there are no labels."""
    student_log = tl.log(stats.student_sum)
    teacher_log = tl.log(stats.teacher_sum)
    if KIND == "forward":
        value = stats.cross / stats.teacher_sum - teacher_log + student_log
    elif KIND == "reverse":
        value = stats.cross / stats.student_sum - student_log + teacher_log
    else:
        value = weights.beta * of_teacher + (1 - weights.beta) * of_student
    if weights.hard_weight is not None:
        hard = tl.log(stats.hard_sum) + (stats.student_max - stats.target)
        value = tl.where(weights.hard_weight == 1, 0.0, (1 - weights.hard_weight) * value) + weights.hard_weight * hard
    if label is not None:
        value = ops.at_the_edges(value, label, sizes.vocab_size, loss_options)
    if divisor is not None:
        value = ops.weighted(value, ops.divisor_weight(divisor))
    return value


@triton.jit
def log2_probs(logits, row_max, log2_sum, weights):
    """Return log2 of the probabilities; ``log2_sum`` is that of the row's sum."""
    return cooled(logits - row_max, weights) * 1.4426950408889634 - log2_sum


@triton.jit
def log2_mixture(s, t, weights):
    """Return ``log2(m)``, ``m = beta * t + (1 - beta) * s``, at least that of the least normal number; not NaN."""
    return ops.log2_normal(weights.beta * t + ((1 - weights.beta) * s + 1.1754943508222875e-38))


@triton.jit
def mixture_terms(student, teacher, inside, stats, weights):
    """Return the parts of ``KL(t || m)`` and ``KL(s || m)`` of a tile, per lane, over log(2)."""
    student_log = log2_probs(load_logits(student, inside), stats.student_max, tl.log2(stats.student_sum), weights)
    teacher_log = log2_probs(load_logits(teacher, inside), stats.teacher_max, tl.log2(stats.teacher_sum), weights)
    s, t = tl.exp2(student_log), tl.exp2(teacher_log)
    mixture_log = log2_mixture(s, t, weights)
    # Of -inf the term is 0, of what is outside too.
    of_teacher = t * ops.bounded(teacher_log - mixture_log)
    of_student = s * ops.bounded(student_log - mixture_log)
    return tl.sum(of_teacher, axis=1), tl.sum(of_student, axis=1)


def kernel_options(options: DivergenceOptions) -> tuple[LossOptions, Weights]:
    """Return what kernels take."""
    inverse = None if options.temperature == 1 else 1 / options.temperature
    beta = options.beta if options.divergence == "js" else None
    return LossOptions(ignore_index=options.ignore_index), Weights(inverse, beta, options.hard_weight or None)
