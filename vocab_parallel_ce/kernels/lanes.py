"""Statistics per lane of a row with a label: of a tile, of a part of the row, of its body, as ``walk`` walks them.

A lane has one 16-byte vector of each tile. :func:`merge_lanes` merges what a lane knows of two sets of columns, the
first of which comes before the second: the tiles of a part, one after the other, and then the parts. So the bits of a
row depend on its width alone, and not on which program has which part.

If the row is UNITS units, these lie side by side over the lanes: each has 32 lanes of its own, a warp, and a tile has
the next columns of each. So what the lanes know of a unit depends on nothing else.
"""

# mypy: disable-error-code="arg-type"
# In a jit function, the literal 0.0 is a tensor.

from typing import NamedTuple

import triton
import triton.language as tl

from vocab_parallel_ce.kernels import primitives as ops


class LaneStats(NamedTuple):
    """What each lane knows of some columns; 0 if no option needs it."""

    max: tl.tensor
    sum: tl.tensor
    shifted_sum: tl.tensor
    n_columns: tl.tensor  # the sum of their class weights, if there are
    exp_shifted_sum: tl.tensor
    sum_exp_sq: tl.tensor
    max_vector: tl.tensor  # the begin of the first vector with the maximum, from the body's first column


@triton.jit
def exp_times_shifted(z, shift):
    """Return ``exp(z - shift) * (z - shift)``, 0 in an excluded column."""
    return ops.exp_shifted(z, shift) * ops.bounded(z - shift)


@triton.jit
def exp_squared(z, shift):
    """Return ``exp(2 * (z - shift))``."""
    exp = ops.exp_shifted(z, shift)
    return exp * exp


@triton.jit
def load_logits(pointers, inside, row):
    """Return the transformed logits of an ``algebra.Row``, -inf outside."""
    x = tl.load(pointers, inside, other=float("-inf"))
    return ops.transform(x, row.loss_options, row.temperature, row.threshold)[0]


@triton.jit
def no_columns(LANES: tl.constexpr):
    """Return what lanes know before they have seen a column."""
    zeros = tl.zeros([LANES], tl.float32)
    lowest = tl.full([LANES], float("-inf"), tl.float32)
    return LaneStats(lowest, zeros, zeros, zeros, zeros, zeros, tl.zeros([LANES], tl.int32))


@triton.jit
def tile_stats(tile, row):
    """Return the ``LaneStats`` of a tile, except the label's vector."""
    loss_options = row.loss_options
    LANES: tl.constexpr = tile.column.shape[0]
    VECTOR: tl.constexpr = tile.column.shape[1]
    zeros = tl.zeros([LANES], tl.float32)
    shifted_sum, n_columns, exp_shifted_sum, sum_exp_sq = zeros, zeros, zeros, zeros
    is_other = tile.vector != row.label_at
    inside = tile.inside & is_other[:, None]
    z = load_logits(row.logits + tile.first + tile.at, inside, row)
    lane_max = tl.max(z, axis=1)
    shift = ops.finite_or_zero(lane_max)
    if loss_options.smoothing is not None or loss_options.mean_logit is not None:
        shifted = tl.where(inside, z - shift[:, None], 0.0)
        if row.class_weight is not None:
            weights = tl.load(row.class_weight + tile.column, inside, other=0.0)
            shifted_sum = tl.sum(ops.weighted_class(shifted, weights), axis=1)
            # The select hides the load: Triton moves a sum of what is loaded out of the loop, and up to 3.8 the
            # loop then reads n_columns as 0 (docs/triton_reductions.md).
            n_columns = tl.sum(tl.where(inside, weights, 0.0), axis=1)
        else:
            shifted_sum = tl.sum(shifted, axis=1)
            n_columns = tl.where(tile.vector_inside & is_other, float(VECTOR), 0.0)
    if loss_options.entropy is not None:
        exp_shifted_sum = tl.sum(exp_times_shifted(z, shift[:, None]), axis=1)
    if loss_options.sum_sq_probs is not None:
        sum_exp_sq = tl.sum(exp_squared(z, shift[:, None]), axis=1)
    lane_sum = tl.sum(ops.exp_shifted(z, shift[:, None]), axis=1)
    return LaneStats(lane_max, lane_sum, shifted_sum, n_columns, exp_shifted_sum, sum_exp_sq, tile.vector)


@triton.jit
def merge_lanes(a, b, loss_options):
    """Merge what each lane knows of two sets of columns; those of ``b`` come after those of ``a``.

    Fused multiplications are written out, so that every kernel has the same ones.
    """
    lane_max = tl.maximum(a.max, b.max)
    shift = ops.finite_or_zero(lane_max)
    a_decay, b_decay = ops.exp_shifted(a.max, shift), ops.exp_shifted(b.max, shift)
    lane_sum = tl.fma(a.sum, a_decay, b.sum * b_decay)
    shifted_sum, n_columns, exp_shifted_sum, sum_exp_sq, max_vector = a[2:]
    if loss_options.smoothing is not None or loss_options.mean_logit is not None:
        shifted_sum = tl.fma(a.n_columns, ops.raised_by(a.max, shift), a.shifted_sum)
        shifted_sum += tl.fma(b.n_columns, ops.raised_by(b.max, shift), b.shifted_sum)
        n_columns = a.n_columns + b.n_columns
    if loss_options.entropy is not None:
        a_sum = tl.fma(a.sum, ops.bounded(ops.raised_by(a.max, shift)), a.exp_shifted_sum)
        b_sum = tl.fma(b.sum, ops.bounded(ops.raised_by(b.max, shift)), b.exp_shifted_sum)
        exp_shifted_sum = tl.fma(a_sum, a_decay, b_sum * b_decay)
    if loss_options.sum_sq_probs is not None:
        sum_exp_sq = tl.fma(a.sum_exp_sq, a_decay * a_decay, b.sum_exp_sq * (b_decay * b_decay))
    if loss_options.predictions is not None:
        max_vector = tl.where(b.max > a.max, b.max_vector, max_vector)
    return LaneStats(lane_max, lane_sum, shifted_sum, n_columns, exp_shifted_sum, sum_exp_sq, max_vector)


@triton.jit
def tile(lanes, tile, row):
    """Return ``lanes`` with one more tile, except the label's vector; they are None for the first one."""
    stats = tile_stats(tile, row)
    if lanes is not None:
        stats = merge_lanes(lanes, stats, row.loss_options)
    return stats


@triton.jit
def lane_fields(loss_options):
    """Return which fields of ``LaneStats`` options need."""
    is_smoothed = loss_options.smoothing is not None or loss_options.mean_logit is not None
    has_entropy, has_sum_sq = loss_options.entropy is not None, loss_options.sum_sq_probs is not None
    return True, True, is_smoothed, is_smoothed, has_entropy, has_sum_sq, loss_options.predictions is not None


@triton.jit
def store_lanes(pointers, lanes, loss_options, step):
    ops.store_fields(pointers, lanes, lane_fields(loss_options), step)


@triton.jit
def load_lanes(pointers, mask, loss_options, step):
    empty = float("-inf"), 0.0, 0.0, 0.0, 0.0, 0.0, 0.0
    numbers = ops.load_fields(pointers, mask, lane_fields(loss_options), empty, step)
    return LaneStats(*numbers[:6], numbers[6].to(tl.int32))
