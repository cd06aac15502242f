"""Divergence of a student's distribution from a teacher's, as jit functions: ``losses.divergences`` has the legend.

    forward   KL = cross / teacher_sum - log(teacher_sum) + log(student_sum)     dx_i = (s_i - t_i) / T
    reverse   KL = cross / student_sum - log(student_sum) + log(teacher_sum)     dx_i = s_i (log(s_i / t_i) - KL) / T
    js        beta * KL(t || m) + (1 - beta) * KL(s || m)       dx_i = (1 - beta) s_i (log(s_i / m_i) - KL(s || m)) / T

The two terms of js are the second exchange. Their walk is bound by arithmetic.
"""

from collections import namedtuple
from typing import Any, NamedTuple

import triton
import triton.language as tl

from vocab_parallel_ce.kernels import primitives as ops
from vocab_parallel_ce.kernels.launch import option_arguments
from vocab_parallel_ce.losses.divergences import DivergenceOptions, DivergenceStats
from vocab_parallel_ce.spec import LossOptions

SMALL_SHARE = 0.125  # of a mixture: a larger one multiplies the rounding of its logarithm by 8 at most


OWN = (
    "student_inverse",  # 1 / T of the student's z
    "teacher_inverse",
    "reverse",  # a kind is what is on: beta is js's, forward has neither
    "beta",
    "student_share",  # 1 - beta, which fp32 would round
    "small_share",  # the smaller of the two, if it is below SMALL_SHARE
    "teacher_softcap",  # as softcap, the student's
    "teacher_scale",
)
# Options of both for a kernel, None if off: Triton 3.6 passes no None in a tuple of a tuple.
KernelOptions: Any = namedtuple("KernelOptions", (*LossOptions._fields, *OWN))  # type: ignore[misc]


class Transform(NamedTuple):
    """What ``primitives.transform`` reads of options, for the teacher."""

    softcap: tl.tuple
    logit_scale: tl.tensor


class Factors(NamedTuple):
    """What the gradients of a row's columns share."""

    student_max: tl.tensor
    teacher_max: tl.tensor
    student_sum: tl.tensor
    teacher_sum: tl.tensor
    offset: tl.tensor  # reverse: KL + log(student_sum) - log(teacher_sum); js: KL(s || m)
    weight: tl.tensor  # grad_output / divisor


@triton.jit
def cooled(shifted, inverse):
    """Return ``shifted / T``."""
    if inverse is not None:
        shifted = shifted * inverse
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
    """Return ``total`` and ``stats`` together; the maxima of ``stats`` are not larger.

    Fused multiplications are written out, so that every kernel has the same ones.
    """
    student_shift = ops.finite_or_zero(total.student_max)
    teacher_shift = ops.finite_or_zero(total.teacher_max)
    student_decay = ops.exp_shifted(cooled(stats.student_max - student_shift, loss_options.student_inverse), 0.0)
    teacher_decay = ops.exp_shifted(cooled(stats.teacher_max - teacher_shift, loss_options.teacher_inverse), 0.0)
    cross = total.cross
    if loss_options.beta is None:
        student_raised = cooled(ops.raised_by(stats.student_max, student_shift), loss_options.student_inverse)
        teacher_raised = cooled(ops.raised_by(stats.teacher_max, teacher_shift), loss_options.teacher_inverse)
        if loss_options.reverse is None:
            cross += moved(stats.cross, stats.teacher_sum, teacher_raised, student_raised, teacher_decay)
        else:
            cross += moved(stats.cross, stats.student_sum, student_raised, teacher_raised, student_decay)
    student_sum = tl.fma(stats.student_sum, student_decay, total.student_sum)
    teacher_sum = tl.fma(stats.teacher_sum, teacher_decay, total.teacher_sum)
    return DivergenceStats(total.student_max, student_sum, total.teacher_max, teacher_sum, cross)


@triton.jit
def record(numbers):
    return DivergenceStats(*numbers)


@triton.jit
def empty(row, place, LANES: tl.constexpr):
    zeros = tl.zeros([LANES], tl.float32)
    lowest = tl.full([LANES], float("-inf"), tl.float32)
    return DivergenceStats(lowest, zeros, lowest, zeros, zeros)


@triton.jit
def load_pair(tile, row):
    """Return a tile's z of the student, -inf outside, its slope, and the teacher's z."""
    x = tl.load(row.logits + tile.first + tile.at, tile.inside, other=float("-inf"))
    w = tl.load(row.other + tile.other_first + tile.at, tile.inside, other=float("-inf"))
    z, slope = ops.transform(x, row.loss_options)
    of_teacher = Transform(row.loss_options.teacher_softcap, row.loss_options.teacher_scale)
    return z, slope, ops.transform(w, of_teacher)[0]


@triton.jit
def tile(stats, tile, row):
    loss_options = row.loss_options
    x, _, w = load_pair(tile, row)
    student_max, teacher_max = tl.max(x, axis=1), tl.max(w, axis=1)
    cross = tl.zeros_like(student_max)
    if stats is not None:
        student_max = tl.maximum(stats.student_max, student_max)
        teacher_max = tl.maximum(stats.teacher_max, teacher_max)
    a = cooled(x - ops.finite_or_zero(student_max)[:, None], loss_options.student_inverse)
    b = cooled(w - ops.finite_or_zero(teacher_max)[:, None], loss_options.teacher_inverse)
    a_exp, b_exp = ops.exp_shifted(a, 0.0), ops.exp_shifted(b, 0.0)
    if loss_options.reverse is not None:
        cross = tl.sum(cross_terms(a_exp, a, b), axis=1)
    elif loss_options.beta is None:
        cross = tl.sum(cross_terms(b_exp, b, a), axis=1)
    student_sum, teacher_sum = tl.sum(a_exp, axis=1), tl.sum(b_exp, axis=1)
    total = DivergenceStats(student_max, student_sum, teacher_max, teacher_sum, cross)
    if stats is not None:
        total = plus(total, stats, loss_options)
    return total


@triton.jit
def merge_pair(a, b, loss_options):
    zeros = tl.zeros_like(a.student_sum)
    student_max, teacher_max = tl.maximum(a.student_max, b.student_max), tl.maximum(a.teacher_max, b.teacher_max)
    total = DivergenceStats(student_max, zeros, teacher_max, zeros, zeros)
    return plus(plus(total, b, loss_options), a, loss_options)


@triton.jit
def merge(stats, loss_options):
    zeros = tl.zeros_like(stats.student_sum)
    student_max, teacher_max = tl.max(stats.student_max, axis=1), tl.max(stats.teacher_max, axis=1)
    total = DivergenceStats(student_max[:, None], zeros, teacher_max[:, None], zeros, zeros)
    raised = plus(total, stats, loss_options)
    student_sum, teacher_sum = tl.sum(raised.student_sum, axis=1), tl.sum(raised.teacher_sum, axis=1)
    return DivergenceStats(student_max, student_sum, teacher_max, teacher_sum, tl.sum(raised.cross, axis=1))


@triton.jit
def fields(loss_options):
    """Return which fields of ``DivergenceStats`` are packed."""
    return True, True, True, True, loss_options.beta is None


@triton.jit
def load(pointers, mask, loss_options, step):
    empty = float("-inf"), 0.0, float("-inf"), 0.0, 0.0
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
    return value


@triton.jit
def log2_probs(logits, row_max, log2_sum, inverse):
    """Return log2 of the probabilities; ``log2_sum`` is that of the row's sum."""
    return cooled(logits - row_max, inverse) * 1.4426950408889634 - log2_sum


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
    x, _, w = load_pair(tile, row)
    student_log = log2_probs(x, stats.student_max, tl.log2(stats.student_sum), loss_options.student_inverse)
    teacher_log = log2_probs(w, stats.teacher_max, tl.log2(stats.teacher_sum), loss_options.teacher_inverse)
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
        tl.where(live, weight, 0.0),
    )


@triton.jit
def gradient(factors, tile, row):
    loss_options = row.loss_options
    x, slope, w = load_pair(tile, row)
    if loss_options.beta is not None:
        student_log = log2_probs(x, factors.student_max, tl.log2(factors.student_sum), loss_options.student_inverse)
        teacher_log = log2_probs(w, factors.teacher_max, tl.log2(factors.teacher_sum), loss_options.teacher_inverse)
        s, t = tl.exp2(student_log), tl.exp2(teacher_log)
        student_ratio, _ = log2_ratios(student_log, teacher_log, s, t, loss_options)
        log_ratio = student_ratio * 0.6931471805599453
        grad = tl.where(s == 0, 0.0, loss_options.student_share * s * (log_ratio - factors.offset))
    else:
        a = cooled(x - factors.student_max, loss_options.student_inverse)
        b = cooled(w - factors.teacher_max, loss_options.teacher_inverse)
        s = ops.exp_shifted(a, 0.0) * (1.0 / factors.student_sum)
        if loss_options.reverse is not None:
            grad = tl.where(s == 0, 0.0, s * (a - b - factors.offset))
        else:
            t = ops.exp_shifted(b, 0.0) * (1.0 / factors.teacher_sum)
            grad = s - tl.where(x == float("-inf"), 0.0, t)
    grad = cooled(grad, loss_options.student_inverse)
    if loss_options.softcap is not None or loss_options.logit_scale is not None:
        grad *= slope
    return grad * factors.weight


def kernel_options(options: DivergenceOptions) -> Any:
    """Return what kernels take."""
    of_labels, teacher = option_arguments(options.labels), option_arguments(options.teacher)
    inverses = [None if t == 1 else 1 / t for t in (options.student_temperature, options.temperature)]
    kind: tuple[Any, ...] = (1 if options.divergence == "reverse" else None, None, None, None)
    if options.divergence == "js":
        shares = options.beta, 1 - options.beta
        kind = None, *shares, max(min(shares), 2.0**-126) if min(shares) < SMALL_SHARE else None
    return KernelOptions._make([*of_labels, *inverses, *kind, teacher.softcap, teacher.logit_scale])
