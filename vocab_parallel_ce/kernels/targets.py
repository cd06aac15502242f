"""Cross-entropy with probability targets: the algebra of ``losses.targets`` for ``row_loss``.

loss = T' * log(sum_exp) - target_shifted + z_loss * lse^2
dz_i = p_i * (T' + 2 * z_loss * lse) - t'_i
"""

from typing import NamedTuple

import triton
import triton.language as tl

from vocab_parallel_ce.kernels import primitives as ops
from vocab_parallel_ce.kernels.algebra import Algebra, load_logits
from vocab_parallel_ce.losses.targets import TargetStats


class Factors(NamedTuple):
    """What the gradients of a row's columns share."""

    row_max: tl.tensor
    of_exp: tl.tensor  # times the exponentials, p_i * (T' + 2 * z_loss * lse)
    weight: tl.tensor  # grad_output / divisor


@triton.jit
def times(target, shifted):
    """Return ``target * shifted``, 0 for a target of 0, also in an excluded column."""
    return tl.where(target == 0, 0.0, target * shifted)


@triton.jit
def load_targets(tile, own):
    """Return ``t'`` of a tile, fp32, 0 outside."""
    loss_options = own.loss_options
    t = tl.load(own.other + tile.other, tile.inside, other=0.0).to(tl.float32)
    if loss_options.smoothing is not None:
        t = tl.where(tile.inside, (1 - loss_options.smoothing) * t + loss_options.smoothing / own.vocab_size, 0.0)
    if own.class_weight is not None:
        t *= tl.load(own.class_weight + tile.column, tile.inside, other=0.0)
    return t


@triton.jit
def empty(at_label, LANES: tl.constexpr):
    zeros = tl.zeros([LANES], tl.float32)
    return TargetStats(tl.full([LANES], float("-inf"), tl.float32), zeros, zeros, zeros)


@triton.jit
def tile(stats, tile, own):
    t = load_targets(tile, own)
    z, _ = ops.transform(load_logits(own.logits + tile.offset, tile.inside), own.loss_options)
    row_max = tl.maximum(stats.row_max, tl.max(z, axis=1))
    shift = ops.finite_or_zero(row_max)
    raised = ops.raised_by(stats.row_max, shift)
    tile_sum = tl.sum(ops.exp_shifted(z, shift[:, None]), axis=1)
    sum_exp = stats.sum_exp * ops.exp_shifted(stats.row_max, shift) + tile_sum
    target_shifted = stats.target_shifted + times(stats.target_sum, raised)
    target_shifted += tl.sum(times(t, z - shift[:, None]), axis=1)
    # Subtracted: Triton 3.7 fails to compile a sum over tiles that is used more than once.
    return TargetStats(row_max, sum_exp, stats.target_sum - tl.sum(-t, axis=1), target_shifted)


@triton.jit
def merge(stats, loss_options):
    row_max = tl.max(stats.row_max, axis=0)
    shift = ops.finite_or_zero(row_max)
    raised = ops.raised_by(stats.row_max, shift)
    return TargetStats(
        row_max,
        tl.sum(stats.sum_exp * ops.exp_shifted(stats.row_max, shift), axis=0),
        tl.sum(stats.target_sum, axis=0),
        tl.sum(stats.target_shifted + times(stats.target_sum, raised), axis=0),
    )


@triton.jit
def load(pointers, mask, loss_options):
    row_max = tl.load(pointers, mask, other=float("-inf"))
    sum_exp = tl.load(pointers + 1, mask, other=0.0)
    target_sum = tl.load(pointers + 2, mask, other=0.0)
    return TargetStats(row_max, sum_exp, target_sum, tl.load(pointers + 3, mask, other=0.0))


@triton.jit
def store(pointer, stats, loss_options):
    tl.store(pointer, stats.row_max)
    tl.store(pointer + 1, stats.sum_exp)
    tl.store(pointer + 2, stats.target_sum)
    tl.store(pointer + 3, stats.target_shifted)


@triton.jit
def loss(stats, second, loss_options):
    log_sum = tl.log(stats.sum_exp)
    value = stats.target_sum * log_sum - stats.target_shifted
    if loss_options.z_loss is not None:
        lse = stats.row_max + log_sum
        value += loss_options.z_loss * lse * lse
    return value


@triton.jit
def factors(stats, second, weight, live, loss_options):
    of_exp = stats.target_sum
    if loss_options.z_loss is not None:
        of_exp += 2 * loss_options.z_loss * (stats.row_max + tl.log(stats.sum_exp))
    of_exp /= stats.sum_exp
    return Factors(tl.where(live, stats.row_max, 0.0), tl.where(live, of_exp, 0.0), tl.where(live, weight, 0.0))


@triton.jit
def gradient(factors, tile, own):
    t, loss_options = load_targets(tile, own), own.loss_options
    z, slope = ops.transform(load_logits(own.logits + tile.offset, tile.inside), loss_options)
    grad = ops.exp_shifted(z, factors.row_max) * factors.of_exp - tl.where(z == float("-inf"), 0.0, t)
    grad *= factors.weight
    if loss_options.softcap is not None or loss_options.logit_scale is not None:
        grad *= slope
    return grad


ALGEBRA = Algebra(empty, tile, merge, load, store, loss, factors, gradient)
