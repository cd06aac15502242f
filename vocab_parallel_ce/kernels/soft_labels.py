"""Cross-entropy with probability targets: the algebra of ``losses.soft_labels``.

loss = T' * log(sum_exp) - target_shifted + z_loss * lse^2
dz_i = p_i * (T' + 2 * z_loss * lse) - t'_i
"""

from typing import NamedTuple

import triton
import triton.language as tl

from vocab_parallel_ce.kernels import primitives as ops
from vocab_parallel_ce.kernels.algebra import pair_algebra
from vocab_parallel_ce.losses.soft_labels import TargetStats


class Factors(NamedTuple):
    """What the gradients of a row's columns share."""

    row_max: tl.tensor
    exp_factor: tl.tensor  # times the exponentials, p_i * (T' + 2 * z_loss * lse)
    weight: tl.tensor  # grad_output / divisor


@triton.jit
def times(target, shifted):
    """Return ``target * shifted``, 0 for a target of 0, also in an excluded column."""
    return tl.where(target == 0, 0.0, target * shifted)


@triton.jit
def load_targets(tile, row):
    """Return ``t'`` of a tile, fp32, 0 outside."""
    loss_options = row.loss_options
    t = tl.load(row.other + tile.other_first + tile.at, tile.inside, other=0.0).to(tl.float32)
    if loss_options.smoothing is not None:
        t = tl.where(tile.inside, (1 - loss_options.smoothing) * t + loss_options.smoothing / row.vocab_size, 0.0)
    if row.class_weight is not None:
        t *= tl.load(row.class_weight + tile.column, tile.inside, other=0.0)
    return t


@triton.jit
def record(numbers):
    return TargetStats(*numbers)


@triton.jit
def empty(row, place, LANES: tl.constexpr):
    zeros = tl.zeros([LANES], tl.float32)
    return TargetStats(tl.full([LANES], float("-inf"), tl.float32), zeros, zeros, zeros)


@triton.jit
def plus(total, stats):
    """Return ``total`` and ``stats`` together; the maximum of ``stats`` is not larger.

    The fused multiplication is written out, so that every kernel has the same one.
    """
    shift = ops.finite_or_zero(total.row_max)
    moved = stats.target_shifted + times(stats.target_sum, ops.raised_by(stats.row_max, shift))
    return TargetStats(
        total.row_max,
        tl.fma(stats.sum_exp, ops.exp_shifted(stats.row_max, shift), total.sum_exp),
        total.target_sum + stats.target_sum,
        total.target_shifted + moved,
    )


@triton.jit
def tile(stats, tile, row):
    t = load_targets(tile, row)
    z, _ = ops.transform(tl.load(row.logits + tile.first + tile.at, tile.inside, other=float("-inf")), row.loss_options)
    row_max = tl.max(z, axis=1)
    if stats is not None:
        row_max = tl.maximum(stats.row_max, row_max)
    shifted = z - ops.finite_or_zero(row_max)[:, None]
    sum_exp, target_shifted = tl.sum(ops.exp_shifted(shifted, 0.0), axis=1), tl.sum(times(t, shifted), axis=1)
    total = TargetStats(row_max, sum_exp, tl.sum(t, axis=1), target_shifted)
    if stats is not None:
        total = plus(total, stats)
    return total


@triton.jit
def merge_pair(a, b, loss_options):
    zeros = tl.zeros_like(a.sum_exp)
    return plus(plus(TargetStats(tl.maximum(a.row_max, b.row_max), zeros, zeros, zeros), b), a)


@triton.jit
def merge(stats, loss_options):
    zeros = tl.zeros_like(stats.sum_exp)
    row_max = tl.max(stats.row_max, axis=1)
    raised = plus(TargetStats(row_max[:, None], zeros, zeros, zeros), stats)
    sum_exp, target_sum = tl.sum(raised.sum_exp, axis=1), tl.sum(raised.target_sum, axis=1)
    return TargetStats(row_max, sum_exp, target_sum, tl.sum(raised.target_shifted, axis=1))


@triton.jit
def load(pointers, mask, loss_options, step):
    all_fields, empty = (True, True, True, True), (float("-inf"), 0.0, 0.0, 0.0)
    return TargetStats(*ops.load_fields(pointers, mask, all_fields, empty, step))


@triton.jit
def store(pointers, stats, loss_options, step):
    ops.store_fields(pointers, stats, (True, True, True, True), step)


@triton.jit
def loss(stats, second, loss_options):
    log_sum = tl.log(stats.sum_exp)
    value = stats.target_sum * log_sum - stats.target_shifted
    if loss_options.z_loss is not None:
        lse = stats.row_max + log_sum
        value += loss_options.z_loss * lse * lse
    return value


@triton.jit
def shares(stats, second, weight, live, loss_options):
    exp_factor = stats.target_sum
    if loss_options.z_loss is not None:
        exp_factor += 2 * loss_options.z_loss * (stats.row_max + tl.log(stats.sum_exp))
    exp_factor /= stats.sum_exp
    return Factors(tl.where(live, stats.row_max, 0.0), tl.where(live, exp_factor, 0.0), tl.where(live, weight, 0.0))


@triton.jit
def gradient(factors, tile, row):
    t, loss_options = load_targets(tile, row), row.loss_options
    z, slope = ops.transform(tl.load(row.logits + tile.first + tile.at, tile.inside, other=float("-inf")), loss_options)
    grad = ops.exp_shifted(z, factors.row_max) * factors.exp_factor - tl.where(z == float("-inf"), 0.0, t)
    grad *= factors.weight
    if loss_options.softcap is not None or loss_options.logit_scale is not None:
        grad *= slope
    return grad


ALGEBRA = pair_algebra(
    empty=empty,
    tile=tile,
    merge_pair=merge_pair,
    load=load,
    store=store,
    gradient=gradient,
    merge=merge,
    record=record,
    loss=loss,
    shares=shares,
)
