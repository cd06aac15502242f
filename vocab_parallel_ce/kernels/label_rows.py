"""The algebra of labels, and what one program knows of a row with a label: statistics of lanes, columns and units.

    lanes -> units;    edges, the rest of the label's vector, the label -> the unit that they are in;    units -> row

Each arrow merges two ``RowStats`` at a time, as ranks are merged (``labels.merge_pair``). So a unit's numbers are
those of the same columns on any number of ranks. The walk leaves out the label's vector: next to the label's own term,
a sum would lose digits.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from vocab_parallel_ce.kernels import primitives as ops
from vocab_parallel_ce.kernels.algebra import Algebra, KernelLoss
from vocab_parallel_ce.kernels.labels import (
    load_stats,
    merge_pair,
    row_factors,
    row_stats,
    store_stats,
    store_token_outputs,
    tile_gradient,
)
from vocab_parallel_ce.kernels.lanes import (
    LaneStats,
    exp_squared,
    exp_times_shifted,
    lane_fields,
    load_lanes,
    load_logits,
    merge_lanes,
    no_columns,
    store_lanes,
    tile,
)
from vocab_parallel_ce.kernels.launch import option_arguments
from vocab_parallel_ce.kernels.walk import column_of
from vocab_parallel_ce.shard import VocabShard
from vocab_parallel_ce.spec import LossOptions, RowStats


class LabelPlace(NamedTuple):
    """Where a row's label is."""

    offset: tl.tensor  # of its logit, from the base
    owned: tl.tensor  # whether it is among the row's columns
    vector: tl.tensor  # begin of its vector, from the body's first column; negative if it is not in the body


class Remainder(NamedTuple):
    """What the walk leaves out, except the label: the row's edges and the rest of the label's vector."""

    z: tl.tensor
    offset: tl.tensor
    inside: tl.tensor
    is_edge: tl.tensor


@triton.jit
def locate_label(place, column, VECTOR: tl.constexpr):
    """Return the ``LabelPlace`` in ``column``, which may be outside ``[0, n_columns)``."""
    owned = (column >= 0) & (column < place.n_columns)
    offset = place.begin + column
    vector = (offset - place.first) // VECTOR * VECTOR
    in_body = owned & (offset >= place.first) & (vector < place.width)
    return LabelPlace(offset, owned, tl.where(in_body, vector, -VECTOR).to(tl.int32))


@triton.jit
def load_label_weight(class_weight, label, column, owned, vocab_size, loss_options):
    """Return ``spec.label_weights`` of one row. ``owned`` is false if the label is ``ignore_index``."""
    weight = tl.load(class_weight + column, owned, other=0.0)
    return ops.at_the_edges(weight, label, vocab_size, loss_options)


@triton.jit
def load_remainder(row, place, label_at, SHAPE: tl.constexpr):
    """Return the ``Remainder`` of a row.

    Those of a row of units are at most one for each thread of a warp: so the order of their sums does not depend on
    the number of warps, and with it on that of ranks.
    """
    VECTOR: tl.constexpr = SHAPE.VECTOR
    vector = place.first + label_at.vector
    if SHAPE.HAS_EDGES:
        # The first vectors of lanes are the edges', the next one is the label's.
        EDGES: tl.constexpr = VECTOR if SHAPE.UNITS > 0 else 16 * VECTOR
        lane = tl.arange(0, 2 * EDGES)
        if SHAPE.UNITS > 0:
            offset = place.first + place.width + lane
            inside = offset < place.begin + place.n_columns
        else:
            offset, inside = ops.edge_offsets(lane, place.begin, place.n_columns, place.first, place.width, VECTOR)
        vector_lane = lane - EDGES
        is_edge = vector_lane < 0
        offset = tl.where(is_edge, offset, vector + vector_lane)
        inside = tl.where(is_edge, inside, (vector_lane < VECTOR) & (label_at.vector >= 0))
    else:
        lane = tl.arange(0, VECTOR)
        offset = vector + lane
        is_edge = lane < 0
        inside = (lane < VECTOR) & (label_at.vector >= 0)
    inside &= offset != label_at.offset
    return Remainder(load_logits(row.logits + offset, inside, row), offset, inside, is_edge)


@triton.jit
def first_maximum(row, place, label_at, lanes, remainder, label_logit, row_max, VECTOR: tl.constexpr):
    """Return the row's first column with ``row_max``, int64.

    Each lane knows the first vector with its maximum, which is read again.
    """
    # Unchanged: from Triton 3.8 on, the compiler sees only here that vectors are aligned.
    vectors = lanes.max_vector // VECTOR * VECTOR
    columns = vectors[:, None] + tl.arange(0, VECTOR)[None, :]
    is_read = (lanes.max == row_max)[:, None] & (columns < place.width)
    z = load_logits(row.logits + place.first + columns, is_read, row)
    columns = tl.where(z == tl.max(z), columns, 2147483647)
    argmax = tl.min(tl.where(is_read, columns, 2147483647)) + (place.first - place.begin)
    other_columns = tl.where(remainder.z == row_max, remainder.offset - place.begin, 2147483647)
    argmax = tl.minimum(argmax, tl.min(other_columns))
    is_label = label_at.owned & (label_logit == row_max)
    return tl.minimum(argmax, tl.where(is_label, label_at.offset - place.begin, 2147483647))


@triton.jit
def stats_of_lanes(lanes, loss_options, UNITS: tl.constexpr):
    """Merge the lanes of each unit to a ``RowStats`` ``[UNITS]``."""
    lanes = LaneStats(*[tl.reshape(x, [UNITS, x.shape[0] // UNITS]) for x in lanes])
    row_max = tl.max(lanes.max, axis=1)
    shift = ops.finite_or_zero(row_max)[:, None]
    decay = ops.exp_shifted(lanes.max, shift)
    zeros = tl.zeros_like(row_max)
    shifted_sum, n_columns, exp_shifted_sum, sum_exp_sq = zeros, zeros, zeros, zeros
    if loss_options.smoothing is not None or loss_options.mean_logit is not None:
        shifted_sum = tl.sum(lanes.shifted_sum + lanes.n_columns * ops.raised_by(lanes.max, shift), axis=1)
        n_columns = tl.sum(lanes.n_columns, axis=1)
    if loss_options.entropy is not None:
        raised = ops.bounded(ops.raised_by(lanes.max, shift))
        exp_shifted_sum = tl.sum((lanes.exp_shifted_sum + lanes.sum * raised) * decay, axis=1)
    if loss_options.sum_sq_probs is not None:
        sum_exp_sq = tl.sum(lanes.sum_exp_sq * decay * decay, axis=1)
    others_sum, no_label = tl.sum(lanes.sum * decay, axis=1), tl.full([UNITS], float("-inf"), tl.float32)
    return RowStats(row_max, others_sum, no_label, shifted_sum, n_columns, exp_shifted_sum, zeros, zeros, sum_exp_sq)


@triton.jit
def stats_of_columns(z, inside, class_weight, column, loss_options):
    """Return the ``RowStats`` of a vector of columns."""
    row_max = tl.max(z)
    shift = ops.finite_or_zero(row_max)
    shifted_sum, n_columns, exp_shifted_sum, sum_exp_sq = 0.0, 0.0, 0.0, 0.0
    if loss_options.smoothing is not None or loss_options.mean_logit is not None:
        shifted, weights = tl.where(inside, z - shift, 0.0), inside.to(tl.float32)
        if class_weight is not None:
            weights = tl.load(class_weight + column, inside, other=0.0)
            shifted = ops.weighted_class(shifted, weights)
        shifted_sum, n_columns = tl.sum(shifted), tl.sum(weights)
    if loss_options.entropy is not None:
        exp_shifted_sum = tl.sum(exp_times_shifted(z, shift))
    if loss_options.sum_sq_probs is not None:
        sum_exp_sq = tl.sum(exp_squared(z, shift))
    others_sum = tl.sum(ops.exp_shifted(z, shift))
    return RowStats(row_max, others_sum, float("-inf"), shifted_sum, n_columns, exp_shifted_sum, 0.0, 0.0, sum_exp_sq)


@triton.jit
def stats_of_label(z, owned, weight, class_weight, loss_options):
    """Return the ``RowStats`` of the label's column, or of none if it is not ``owned``."""
    shifted_sum, n_columns, sum_exp_sq = 0.0, 0.0, 0.0
    if loss_options.smoothing is not None or loss_options.mean_logit is not None:
        shifted_sum, n_columns = tl.where(owned, z - ops.finite_or_zero(z), 0.0), owned.to(tl.float32)
        if class_weight is not None:
            shifted_sum, n_columns = ops.weighted_class(shifted_sum, weight), tl.where(owned, weight, 0.0)
    if loss_options.sum_sq_probs is not None:
        sum_exp_sq = exp_squared(z, ops.finite_or_zero(z))
    others_sum = tl.where(z == z, 0.0, float("nan"))  # a maximum may pass over a NaN
    return RowStats(z, others_sum, z, shifted_sum, n_columns, 0.0, 0.0, weight, sum_exp_sq)


@triton.jit
def with_columns(units, unit, stats, loss_options):
    """Return the ``RowStats`` of units with those of some columns of one ``unit``."""
    is_unit = tl.arange(0, units.row_max.shape[0]) == unit
    row_max = tl.where(is_unit, stats.row_max, float("-inf"))
    label_logit = tl.where(is_unit, stats.label_logit, float("-inf"))
    others_sum = tl.where(is_unit, stats.others_sum, 0.0)
    others = [tl.where(is_unit, x, 0.0) for x in stats[3:]]
    return merge_pair(units, RowStats(row_max, others_sum, label_logit, *others), loss_options)


@triton.jit
def label_vector(place, label, shard_start, VECTOR: tl.constexpr):
    """Return the begin of the label's vector, which the walk leaves out."""
    return locate_label(place, label - shard_start, VECTOR).vector


@triton.jit
def empty(row, place, LANES: tl.constexpr):
    return no_columns(LANES)


@triton.jit
def finish(lanes, row, place, label, shard_start, sizes, loss_options, SHAPE: tl.constexpr):
    """Merge the lanes, the remaining columns and the label to the ``RowStats`` of a row."""
    label_at = locate_label(place, label - shard_start, SHAPE.VECTOR)
    remainder = load_remainder(row, place, label_at, SHAPE)
    label_logit = load_logits(row.logits + label_at.offset, label_at.owned, row)
    label_weight = 0.0
    if row.class_weight is not None:
        label_weight = load_label_weight(
            row.class_weight, label, label - shard_start, label_at.owned, sizes.vocab_size, loss_options
        )
    units = stats_of_lanes(lanes, loss_options, max(SHAPE.UNITS, 1))
    column, unit = remainder.offset - place.begin, 0
    z, inside = remainder.z, remainder.inside
    if SHAPE.UNITS > 0:
        # A label that is not owned adds nothing but the NaN of its weight, to any unit.
        unit = tl.where(label_at.owned, (label_at.offset - place.begin).to(tl.int32) // place.unit_width, 0)
    if SHAPE.UNITS > 0 and SHAPE.HAS_EDGES:
        # The edge may be in another unit than the label.
        edge_z, is_edge = tl.where(remainder.is_edge, z, float("-inf")), inside & remainder.is_edge
        edge = stats_of_columns(edge_z, is_edge, row.class_weight, column, loss_options)
        units = with_columns(units, place.width // place.unit_width, edge, loss_options)
        z, inside = tl.where(remainder.is_edge, float("-inf"), z), inside & ~remainder.is_edge
    of_label = stats_of_label(label_logit, label_at.owned, label_weight, row.class_weight, loss_options)
    others = stats_of_columns(z, inside, row.class_weight, column, loss_options)
    units = with_columns(units, unit, merge_pair(others, of_label, loss_options), loss_options)
    stats = ops.merge_tree(units, loss_options, merge_pair, row_stats)
    argmax = 0.0
    if loss_options.predictions is not None:
        first = first_maximum(row, place, label_at, lanes, remainder, label_logit, stats.row_max, SHAPE.VECTOR)
        is_finite = tl.abs(stats.row_max) < float("inf")
        argmax = tl.where(is_finite, (first + shard_start).to(tl.float32), float("inf"))
    return RowStats(*stats[:6], argmax, *stats[7:])  # type: ignore[call-arg]


@triton.jit
def store_outputs(outputs, rows, inside, stats, second, label, divisor, sizes, loss_options):
    """Store all outputs, and return the losses."""
    weight = 1.0
    if divisor is not None:
        weight = ops.divisor_weight(divisor, loss_options.class_weight)
    return store_token_outputs(outputs, rows, inside, stats, label, weight, sizes.vocab_size, loss_options)


@triton.jit
def factors(stats, second, label, live, divisor, grads, strides, row, shard_start, sizes, loss_options):
    """Return the ``RowFactors``, whether the row is read, and the label's column."""
    weight = 1.0
    if divisor is not None:
        weight = ops.divisor_weight(divisor, loss_options.class_weight)
        if grads.entropy is None and grads.lse is None and grads.divergence is None:
            live &= weight != 0  # it divides the loss alone
    made = row_factors(stats, label, live, weight, grads, strides, row, sizes.vocab_size, loss_options)
    # A label in an excluded column has no column here.
    label = tl.where(stats.label_logit == float("-inf"), -1, label)
    return made, live, column_of(label, shard_start, sizes.n_valid)


ALGEBRA = Algebra(
    label_at=label_vector,
    empty=empty,
    tile=tile,
    merge_lanes=merge_lanes,
    load_lanes=load_lanes,
    store_lanes=store_lanes,
    finish=finish,
    store=store_stats,
    load=load_stats,
    merge_pair=merge_pair,
    store_outputs=store_outputs,
    factors=factors,
    gradient=tile_gradient,
)


def label_loss(shard: VocabShard, options: LossOptions) -> KernelLoss:
    fields = lane_fields.fn(option_arguments(options))  # as kernels store them
    return KernelLoss(ALGEBRA, shard, options, is_pair=False, n_lane_fields=sum(fields))
