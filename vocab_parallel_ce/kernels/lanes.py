"""Statistics per lane: of a tile, of a part of a row, of a row's body.

A lane has one 16-byte vector of each tile. A part is TILES tiles. :func:`merge_lanes` merges what a lane knows of
two sets of columns, the first of which comes before the second: the tiles of a part, one after the other, and then
the parts. So the bits of a row depend on its width alone, and not on which program has which part.

If the row is UNITS units, these lie side by side over the lanes: each has 32 lanes of its own, a warp, and a tile has
the next columns of each. So what the lanes know of a unit depends on nothing else.
"""

# mypy: disable-error-code="arg-type"
# In a jit function, the literal 0.0 is a tensor.

from typing import NamedTuple

import triton
import triton.language as tl

from vocab_parallel_ce.kernels import primitives as ops


class Row(NamedTuple):
    """Where a row lies, in elements from the base."""

    logits: tl.tensor  # the base
    begin: tl.tensor
    n_columns: tl.tensor  # not padding; 0 in an ignored row
    first: tl.tensor  # of the body
    width: tl.tensor  # of the body
    target: tl.tensor  # the label's logit
    owned: tl.tensor  # whether the label is among the columns
    target_vector: tl.tensor  # begin of the label's vector, from first; negative if it is not in the body
    unit_width: tl.tensor  # columns of a unit
    lane_ends: tl.tensor  # of the body, or of each lane's unit in it, from first
    lane_vectors: tl.tensor  # the first column of each lane in the row's first tile, from first
    lane_columns: tl.tensor  # all of them


class LaneStats(NamedTuple):
    """What each lane knows of some columns; 0 if no option needs it."""

    max: tl.tensor
    sum: tl.tensor
    shifted_sum: tl.tensor
    n_columns: tl.tensor  # the sum of their class weights, if there are
    exp_shifted_sum: tl.tensor
    sum_exp_sq: tl.tensor
    max_tile: tl.tensor  # the first tile with the maximum


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
def load_logits(pointers, inside, loss_options):
    """Return the transformed logits, -inf outside."""
    return ops.transform(tl.load(pointers, inside, other=float("-inf")), loss_options)[0]


@triton.jit
def no_columns(LANES: tl.constexpr):
    """Return what lanes know before they have seen a column."""
    zeros = tl.zeros([LANES], tl.float32)
    lowest = tl.full([LANES], float("-inf"), tl.float32)
    return LaneStats(lowest, zeros, zeros, zeros, zeros, zeros, tl.zeros([LANES], tl.int32))


@triton.jit
def tile_stats(row, tile, class_weight, loss_options, HAS_HEAD: tl.constexpr):
    """Return the ``LaneStats`` of a tile, except the label's vector; ``tile`` is its first column, from ``first``.

    HAS_HEAD: whether ``first`` may be behind the row's first column.
    """
    LANES: tl.constexpr = row.lane_columns.shape[0]
    VECTOR: tl.constexpr = row.lane_columns.shape[1]
    zeros = tl.zeros([LANES], tl.float32)
    shifted_sum, n_columns, exp_shifted_sum, sum_exp_sq = zeros, zeros, zeros, zeros
    columns = tile + row.lane_columns
    vectors = tile + row.lane_vectors
    lane_inside = (vectors < row.lane_ends) & (vectors != row.target_vector)
    inside = lane_inside[:, None] & (columns < row.width)
    z = load_logits(row.logits + row.first + columns, inside, loss_options)
    lane_max = tl.max(z, axis=1)
    shift = ops.finite_or_zero(lane_max)
    if loss_options.smoothing is not None or loss_options.mean_logit is not None:
        shifted = tl.where(inside, z - shift[:, None], 0.0)
        if class_weight is not None:
            # Without a head the body begins with column 0, and the compiler sees that it is aligned.
            at = columns + (row.first - row.begin).to(tl.int32) if HAS_HEAD else columns
            weights = tl.load(class_weight + at, inside, other=0.0)
            shifted_sum = tl.sum(ops.weighted_class(shifted, weights), axis=1)
            # The select hides the load: Triton moves a sum of what is loaded out of the loop, and up to 3.8 the
            # loop then reads n_columns as 0 (docs/triton_reductions.md).
            n_columns = tl.sum(tl.where(inside, weights, 0.0), axis=1)
        else:
            shifted_sum = tl.sum(shifted, axis=1)
            n_columns = tl.where(lane_inside, float(VECTOR), 0.0)
    if loss_options.entropy is not None:
        exp_shifted_sum = tl.sum(exp_times_shifted(z, shift[:, None]), axis=1)
    if loss_options.sum_sq_probs is not None:
        sum_exp_sq = tl.sum(exp_squared(z, shift[:, None]), axis=1)
    lane_sum = tl.sum(ops.exp_shifted(z, shift[:, None]), axis=1)
    max_tile = tl.full([LANES], 0, tl.int32) + tile
    return LaneStats(lane_max, lane_sum, shifted_sum, n_columns, exp_shifted_sum, sum_exp_sq, max_tile)


@triton.jit
def merge_lanes(a, b, loss_options):
    """Merge what each lane knows of two sets of columns; those of ``b`` come after those of ``a``.

    Fused multiplications are written out, so that every kernel has the same ones.
    """
    lane_max = tl.maximum(a.max, b.max)
    shift = ops.finite_or_zero(lane_max)
    a_decay, b_decay = ops.exp_shifted(a.max, shift), ops.exp_shifted(b.max, shift)
    lane_sum = tl.fma(a.sum, a_decay, b.sum * b_decay)
    shifted_sum, n_columns, exp_shifted_sum, sum_exp_sq, max_tile = a[2:]
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
        max_tile = tl.where(b.max > a.max, b.max_tile, max_tile)
    return LaneStats(lane_max, lane_sum, shifted_sum, n_columns, exp_shifted_sum, sum_exp_sq, max_tile)


@triton.jit
def part_stats(
    row, part, class_weight, loss_options, HAS_EDGES: tl.constexpr, UNITS: tl.constexpr, TILES: tl.constexpr
):
    """Return the ``LaneStats`` of a part of a row, except the label's vector; ``part`` is as ``tile`` above."""
    width: tl.constexpr = row.lane_columns.numel // max(UNITS, 1)  # of a tile
    HAS_HEAD: tl.constexpr = HAS_EDGES and UNITS == 0
    lanes = tile_stats(row, part, class_weight, loss_options, HAS_HEAD)
    for i in tl.static_range(1, TILES):
        tile = tile_stats(row, part + i * width, class_weight, loss_options, HAS_HEAD)
        lanes = merge_lanes(lanes, tile, loss_options)
    return lanes


@triton.jit
def walk_parts(
    row,
    class_weight,
    loss_options,
    HAS_EDGES: tl.constexpr,
    UNITS: tl.constexpr,
    TILES: tl.constexpr,
    UNROLLED: tl.constexpr,
):
    """Return the ``LaneStats`` of a row's body, except the label's vector; loads UNROLLED parts at a time."""
    lanes, end = no_columns(row.lane_columns.shape[0]), row.width
    if UNITS > 0:
        end = tl.minimum(end, row.unit_width)
    for part in tl.range(0, end, row.lane_columns.numel // max(UNITS, 1) * TILES, loop_unroll_factor=UNROLLED):
        stats = part_stats(row, part, class_weight, loss_options, HAS_EDGES, UNITS, TILES)
        lanes = merge_lanes(lanes, stats, loss_options)
    return lanes


@triton.jit
def lane_fields(loss_options):
    """Return how many fields of ``LaneStats`` the options need."""
    n_fields = 2 + 2 * (loss_options.smoothing is not None or loss_options.mean_logit is not None)
    n_fields += (loss_options.entropy is not None) + (loss_options.sum_sq_probs is not None)
    return n_fields + (loss_options.predictions is not None)


@triton.jit
def lane_pointers(parts, index, loss_options, LANES: tl.constexpr):
    """Return pointers to the first field of the ``LaneStats`` of part ``index``, as :func:`store_lanes` packs them."""
    return parts + index.to(tl.int64) * (lane_fields(loss_options) * LANES) + tl.arange(0, LANES)


@triton.jit
def store_lanes(pointers, lanes, loss_options):
    """Store the fields that options need, LANES apart."""
    LANES: tl.constexpr = lanes.max.shape[0]
    tl.store(pointers, lanes.max)
    tl.store(pointers + LANES, lanes.sum)
    pointers += 2 * LANES
    if loss_options.smoothing is not None or loss_options.mean_logit is not None:
        tl.store(pointers, lanes.shifted_sum)
        tl.store(pointers + LANES, lanes.n_columns)
        pointers += 2 * LANES
    if loss_options.entropy is not None:
        tl.store(pointers, lanes.exp_shifted_sum)
        pointers += LANES
    if loss_options.sum_sq_probs is not None:
        tl.store(pointers, lanes.sum_exp_sq)
        pointers += LANES
    if loss_options.predictions is not None:
        tl.store(pointers, lanes.max_tile.to(tl.float32))


@triton.jit
def load_lanes(pointers, loss_options):
    """Load what :func:`store_lanes` stored."""
    LANES: tl.constexpr = pointers.shape[0]
    _, _, shifted_sum, n_columns, exp_shifted_sum, sum_exp_sq, max_tile = no_columns(LANES)
    lane_max, lane_sum = tl.load(pointers), tl.load(pointers + LANES)
    pointers += 2 * LANES
    if loss_options.smoothing is not None or loss_options.mean_logit is not None:
        shifted_sum, n_columns = tl.load(pointers), tl.load(pointers + LANES)
        pointers += 2 * LANES
    if loss_options.entropy is not None:
        exp_shifted_sum = tl.load(pointers)
        pointers += LANES
    if loss_options.sum_sq_probs is not None:
        sum_exp_sq = tl.load(pointers)
        pointers += LANES
    if loss_options.predictions is not None:
        max_tile = tl.load(pointers).to(tl.int32)
    return LaneStats(lane_max, lane_sum, shifted_sum, n_columns, exp_shifted_sum, sum_exp_sq, max_tile)


@triton.jit
def merge_parts(parts, index, n_parts, loss_options, LANES: tl.constexpr, UNROLLED: tl.constexpr):
    """Return what :func:`walk_parts` does, of parts that were stored; ``index`` is the first one's."""
    lanes = no_columns(LANES)
    pointers = lane_pointers(parts, index, loss_options, LANES)
    for _ in tl.range(0, n_parts, loop_unroll_factor=UNROLLED):
        lanes = merge_lanes(lanes, load_lanes(pointers, loss_options), loss_options)
        pointers += lane_fields(loss_options) * LANES
    return lanes
