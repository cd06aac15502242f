"""Divergence of a student's distribution from a teacher's, as jit functions: ``losses.divergences`` has the legend.

    forward   KL = cross / teacher_sum - log(teacher_sum) + log(student_sum)     dx_i = (s_i - t_i) / T
    reverse   KL = cross / student_sum - log(student_sum) + log(teacher_sum)     dx_i = s_i (log(s_i / t_i) - KL) / T
    js        beta * KL(t || m) + (1 - beta) * KL(s || m)       dx_i = (1 - beta) s_i (log(s_i / m_i) - KL(s || m)) / T
    with hard_weight h:  (1 - h) * dx_i + h * (softmax(x)_i - [i == y])

The two terms of js are the second exchange. Their walk is bound by arithmetic.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from vocab_parallel_ce.kernels import primitives as ops
from vocab_parallel_ce.losses.divergences import DivergenceOptions, DivergenceStats

SMALL_SHARE = 0.125  # of a mixture: a larger one multiplies the rounding of its logarithm by 8 at most


class KernelOptions(NamedTuple):
    """``DivergenceOptions`` for a kernel; None if off. A kind is what is on: beta is js's, forward has neither."""

    inverse_temperature: float | None
    reverse: int | None
    beta: float | None
    student_share: float | None  # 1 - beta, which fp32 would round
    small_share: float | None  # the smaller of the two, if it is below SMALL_SHARE
    hard_weight: float | None
    ignore_index: int


class Factors(NamedTuple):
    """What the gradients of a row's columns share."""

    student_max: tl.tensor
    teacher_max: tl.tensor
    student_sum: tl.tensor
    teacher_sum: tl.tensor
    offset: tl.tensor  # reverse: KL + log(student_sum) - log(teacher_sum); js: KL(s || m)
    hard_inverse: tl.tensor  # 1 / hard_sum
    weight: tl.tensor  # grad_output / divisor


@triton.jit
def load_logits(pointers, inside):
    """Return the logits in fp32, -inf outside."""
    return tl.load(pointers, inside, other=float("-inf")).to(tl.float32)


@triton.jit
def cooled(shifted, loss_options):
    """Return ``shifted / T``."""
    if loss_options.inverse_temperature is not None:
        shifted = shifted * loss_options.inverse_temperature
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
def plus(total, stats, loss_options):
    """Return ``total`` and ``stats`` together; the maxima of ``stats`` are not larger. The label's logit is total's.

    Fused multiplications are written out, so that every kernel has the same ones.
    """
    student_shift = ops.finite_or_zero(total.student_max)
    teacher_shift = ops.finite_or_zero(total.teacher_max)
    student_decay = ops.exp_shifted(cooled(stats.student_max - student_shift, loss_options), 0.0)
    teacher_decay = ops.exp_shifted(cooled(stats.teacher_max - teacher_shift, loss_options), 0.0)
    cross, hard_sum = total.cross, total.hard_sum
    if loss_options.beta is None:
        student_raised = cooled(ops.raised_by(stats.student_max, student_shift), loss_options)
        teacher_raised = cooled(ops.raised_by(stats.teacher_max, teacher_shift), loss_options)
        if loss_options.reverse is None:
            cross += moved(stats.cross, stats.teacher_sum, teacher_raised, student_raised, teacher_decay)
        else:
            cross += moved(stats.cross, stats.student_sum, student_raised, teacher_raised, student_decay)
    if loss_options.hard_weight is not None:
        hard_sum = tl.fma(stats.hard_sum, ops.exp_shifted(stats.student_max, student_shift), hard_sum)
    student_sum = tl.fma(stats.student_sum, student_decay, total.student_sum)
    teacher_sum = tl.fma(stats.teacher_sum, teacher_decay, total.teacher_sum)
    return DivergenceStats(
        total.student_max, student_sum, total.teacher_max, teacher_sum, cross, total.target, hard_sum
    )


@triton.jit
def record(numbers):
    return DivergenceStats(*numbers)


@triton.jit
def empty(row, place, LANES: tl.constexpr):
    at_label = load_logits(row.logits + place.begin + row.target, row.target >= 0)
    zeros = tl.zeros([LANES], tl.float32)
    lowest = tl.full([LANES], float("-inf"), tl.float32)
    return DivergenceStats(lowest, zeros, lowest, zeros, zeros, zeros + at_label, zeros)


@triton.jit
def load_pair(tile, row):
    """Return a tile's logits of the student and of the teacher."""
    x = load_logits(row.logits + tile.first + tile.at, tile.inside)
    return x, load_logits(row.other + tile.other_first + tile.at, tile.inside)


@triton.jit
def tile(stats, tile, row):
    loss_options = row.loss_options
    x, w = load_pair(tile, row)
    student_max, teacher_max = tl.max(x, axis=1), tl.max(w, axis=1)
    cross, target = tl.zeros_like(student_max), tl.full(student_max.shape, float("-inf"), tl.float32)
    hard_sum = cross
    if stats is not None:
        student_max = tl.maximum(stats.student_max, student_max)
        teacher_max = tl.maximum(stats.teacher_max, teacher_max)
        target = stats.target
    x_shifted = x - ops.finite_or_zero(student_max)[:, None]
    a = cooled(x_shifted, loss_options)
    b = cooled(w - ops.finite_or_zero(teacher_max)[:, None], loss_options)
    a_exp, b_exp = ops.exp_shifted(a, 0.0), ops.exp_shifted(b, 0.0)
    if loss_options.reverse is not None:
        cross = tl.sum(cross_terms(a_exp, a, b), axis=1)
    elif loss_options.beta is None:
        cross = tl.sum(cross_terms(b_exp, b, a), axis=1)
    if loss_options.hard_weight is not None:
        hard_sum = tl.sum(ops.exp_shifted(x_shifted, 0.0), axis=1)
    student_sum, teacher_sum = tl.sum(a_exp, axis=1), tl.sum(b_exp, axis=1)
    total = DivergenceStats(student_max, student_sum, teacher_max, teacher_sum, cross, target, hard_sum)
    if stats is not None:
        total = plus(total, stats, loss_options)
    return total


@triton.jit
def merge_pair(a, b, loss_options):
    zeros = tl.zeros_like(a.student_sum)
    student_max, teacher_max = tl.maximum(a.student_max, b.student_max), tl.maximum(a.teacher_max, b.teacher_max)
    total = DivergenceStats(student_max, zeros, teacher_max, zeros, zeros, tl.maximum(a.target, b.target), zeros)
    return plus(plus(total, b, loss_options), a, loss_options)


@triton.jit
def merge(stats, loss_options):
    zeros = tl.zeros_like(stats.student_sum)
    student_max, teacher_max = tl.max(stats.student_max, axis=1), tl.max(stats.teacher_max, axis=1)
    target = tl.max(stats.target, axis=1)
    total = DivergenceStats(student_max[:, None], zeros, teacher_max[:, None], zeros, zeros, stats.target, zeros)
    raised = plus(total, stats, loss_options)
    student_sum, teacher_sum = tl.sum(raised.student_sum, axis=1), tl.sum(raised.teacher_sum, axis=1)
    cross, hard_sum = tl.sum(raised.cross, axis=1), tl.sum(raised.hard_sum, axis=1)
    return DivergenceStats(student_max, student_sum, teacher_max, teacher_sum, cross, target, hard_sum)


@triton.jit
def fields(loss_options):
    """Return which fields of ``DivergenceStats`` are packed."""
    is_hard = loss_options.hard_weight is not None
    return True, True, True, True, loss_options.beta is None, is_hard, is_hard


@triton.jit
def load(pointers, mask, loss_options, step):
    empty = float("-inf"), 0.0, float("-inf"), 0.0, 0.0, float("-inf"), 0.0
    return DivergenceStats(*ops.load_fields(pointers, mask, fields(loss_options), empty, step))


@triton.jit
def store(pointers, stats, loss_options, step):
    ops.store_fields(pointers, stats, fields(loss_options), step)


@triton.jit
def loss(stats, second, loss_options):
    student_log = tl.log(stats.student_sum)
    teacher_log = tl.log(stats.teacher_sum)
    if loss_options.beta is not None:
        teacher_kl, student_kl = second
        value = tl.fma(loss_options.beta, teacher_kl, loss_options.student_share * student_kl)
    elif loss_options.reverse is not None:
        value = stats.cross / stats.student_sum - student_log + teacher_log
    else:
        value = stats.cross / stats.teacher_sum - teacher_log + student_log
    if loss_options.hard_weight is not None:
        h = loss_options.hard_weight
        hard = tl.log(stats.hard_sum) + (stats.student_max - stats.target)
        value = tl.where(h == 1, 0.0, (1 - h) * value) + h * hard
    return value


@triton.jit
def log2_probs(logits, row_max, log2_sum, loss_options):
    """Return log2 of the probabilities; ``log2_sum`` is that of the row's sum."""
    return cooled(logits - row_max, loss_options) * 1.4426950408889634 - log2_sum


@triton.jit
def log2_mixture(s, t, loss_options):
    """Return ``log2(m)``, ``m = beta * t + (1 - beta) * s``, at least that of the least normal number; not NaN."""
    return ops.log2_normal(loss_options.beta * t + (loss_options.student_share * s + 1.1754943508222875e-38))


@triton.jit
def log2_ratios(student_log, teacher_log, s, t, loss_options):
    """Return ``(log2(s / m), log2(t / m))``; finite, also of -inf and NaN.

    Of a small share q, ``log1p(q * (t / s - 1))`` keeps the digits that the logarithm of the mixture rounds away. Its
    exponent is at most 26 above the one at which q counts as half, and what is beyond it is added.
    """
    if loss_options.small_share is not None:
        share = loss_options.small_share
        is_teachers = loss_options.beta < loss_options.student_share
        apart = ops.bounded(teacher_log) - ops.bounded(student_log)
        apart = tl.where(is_teachers, apart, -apart)
        kept = tl.minimum(apart, tl.minimum(26.0 - tl.log2(share), 126.0))
        grown = tl.exp2(kept) - 1.0
        # Fused as written, and what the sum rounds away from a small one is added to the logarithm.
        ratio = tl.fma(share, grown, 1.0)
        lost = tl.where(ratio < 2.0, tl.fma(share, grown, 1.0 - ratio), 0.0)
        near = tl.fma(lost, 1.4426950408889634, ops.log2_normal(ratio))
        small_ratio, large_ratio = kept - near, -(near + (apart - kept))
        student_ratio = tl.where(is_teachers, large_ratio, small_ratio)
        teacher_ratio = tl.where(is_teachers, small_ratio, large_ratio)
    else:
        mixture_log = log2_mixture(s, t, loss_options)
        student_ratio, teacher_ratio = ops.bounded(student_log - mixture_log), ops.bounded(teacher_log - mixture_log)
    return student_ratio, teacher_ratio


@triton.jit
def mixture(sums, tile, pair):
    """Add a tile's parts of ``KL(t || m)`` and ``KL(s || m)``, over log(2)."""
    row, stats = pair
    loss_options = row.loss_options
    x, w = load_pair(tile, row)
    student_log = log2_probs(x, stats.student_max, tl.log2(stats.student_sum), loss_options)
    teacher_log = log2_probs(w, stats.teacher_max, tl.log2(stats.teacher_sum), loss_options)
    s, t = tl.exp2(student_log), tl.exp2(teacher_log)
    student_ratio, teacher_ratio = log2_ratios(student_log, teacher_log, s, t, loss_options)
    teacher_terms, student_terms = t * teacher_ratio, s * student_ratio  # 0 of -inf, and of what is outside
    total = tl.sum(teacher_terms, axis=1), tl.sum(student_terms, axis=1)
    if sums is not None:
        total = sums[0] + total[0], sums[1] + total[1]
    return total


@triton.jit
def merge_mixture(sums):
    return tl.sum(sums[0], axis=1) * 0.6931471805599453, tl.sum(sums[1], axis=1) * 0.6931471805599453


@triton.jit
def shares(stats, second, weight, live, loss_options):
    """Factors are 0 if the row is not ``live``, and the sums 1."""
    offset = stats.cross
    if loss_options.reverse is not None:
        offset = stats.cross / stats.student_sum  # KL + log(student_sum) - log(teacher_sum)
    if second is not None:
        teacher_kl, student_kl = second
        offset = tl.where(teacher_kl != teacher_kl, teacher_kl, student_kl)  # NaN: log2_ratios hides it
    return Factors(
        tl.where(live, stats.student_max, 0.0),
        tl.where(live, stats.teacher_max, 0.0),
        tl.where(live, stats.student_sum, 1.0),
        tl.where(live, stats.teacher_sum, 1.0),
        tl.where(live, offset, 0.0),
        tl.where(live, 1.0 / stats.hard_sum, 0.0),
        tl.where(live, weight, 0.0),
    )


@triton.jit
def gradient(factors, tile, row):
    loss_options = row.loss_options
    is_target = tile.column == row.target
    x, w = load_pair(tile, row)
    if loss_options.beta is not None:
        student_log = log2_probs(x, factors.student_max, tl.log2(factors.student_sum), loss_options)
        teacher_log = log2_probs(w, factors.teacher_max, tl.log2(factors.teacher_sum), loss_options)
        s, t = tl.exp2(student_log), tl.exp2(teacher_log)
        student_ratio, _ = log2_ratios(student_log, teacher_log, s, t, loss_options)
        log_ratio = student_ratio * 0.6931471805599453
        grad = tl.where(s == 0, 0.0, loss_options.student_share * s * (log_ratio - factors.offset))
    else:
        a, b = cooled(x - factors.student_max, loss_options), cooled(w - factors.teacher_max, loss_options)
        s = ops.exp_shifted(a, 0.0) * (1.0 / factors.student_sum)
        if loss_options.reverse is not None:
            grad = tl.where(s == 0, 0.0, s * (a - b - factors.offset))
        else:
            t = ops.exp_shifted(b, 0.0) * (1.0 / factors.teacher_sum)
            grad = s - tl.where(x == float("-inf"), 0.0, t)
    grad = cooled(grad, loss_options)
    if loss_options.hard_weight is not None:
        h = loss_options.hard_weight
        hard = ops.exp_shifted(x, factors.student_max) * factors.hard_inverse
        hard -= tl.where(is_target & (x != float("-inf")), 1.0, 0.0)
        grad = tl.where(h == 1, 0.0, (1 - h) * grad) + h * hard
    return grad * factors.weight


def kernel_options(options: DivergenceOptions) -> KernelOptions:
    """Return what kernels take."""
    inverse = None if options.temperature == 1 else 1 / options.temperature
    hard_weight = options.hard_weight or None
    if options.divergence != "js":
        reverse = 1 if options.divergence == "reverse" else None
        return KernelOptions(inverse, reverse, None, None, None, hard_weight, options.ignore_index)
    shares = options.beta, 1 - options.beta
    small = max(min(shares), 2.0**-126) if min(shares) < SMALL_SHARE else None
    return KernelOptions(inverse, None, *shares, small, hard_weight, options.ignore_index)
