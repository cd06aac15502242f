"""What a label has and a divergence from a teacher in one walk: ``label_rows`` and ``divergence_rows`` side by side.

Every record is a pair, the label's first: lanes, statistics, factors. The options are one record, which both read.
"""

import triton
import triton.language as tl

from vocab_parallel_ce.kernels import divergence_rows, divergences, label_rows, labels, lanes
from vocab_parallel_ce.kernels import primitives as ops
from vocab_parallel_ce.kernels.algebra import Algebra, KernelLoss
from vocab_parallel_ce.losses.divergences import DivergenceOptions
from vocab_parallel_ce.shard import VocabShard


@triton.jit
def empty(row, place, LANES: tl.constexpr):
    return lanes.no_columns(LANES), divergences.empty(row, place, LANES)


@triton.jit
def tile(seen, tile, row):
    of_label, of_teacher = None, None
    if seen is not None:
        of_label, of_teacher = seen[0], seen[1]
    return lanes.tile(of_label, tile, row), divergences.tile(of_teacher, tile, row)


@triton.jit
def merge_lanes(a, b, loss_options):
    return lanes.merge_lanes(a[0], b[0], loss_options), divergences.merge_pair(a[1], b[1], loss_options)


@triton.jit
def load_lanes(pointers, mask, loss_options, step):
    of_label = lanes.load_lanes(pointers, mask, loss_options, step)
    pointers = ops.after_fields(pointers, lanes.lane_fields(loss_options), step)
    return of_label, divergences.load(pointers, mask, loss_options, step)


@triton.jit
def store_lanes(pointers, seen, loss_options, step):
    lanes.store_lanes(pointers, seen[0], loss_options, step)
    pointers = ops.after_fields(pointers, lanes.lane_fields(loss_options), step)
    divergences.store(pointers, seen[1], loss_options, step)


@triton.jit
def finish(seen, row, place, label, shard_start, sizes, loss_options, SHAPE: tl.constexpr):
    of_label = label_rows.finish(seen[0], row, place, label, shard_start, sizes, loss_options, SHAPE)
    of_teacher = divergence_rows.finish(seen[1], row, place, label, shard_start, sizes, loss_options, SHAPE)
    return of_label, of_teacher


@triton.jit
def store(pointers, stats, loss_options, step):
    labels.store_stats(pointers, stats[0], loss_options, step)
    pointers = ops.after_fields(pointers, labels.fields(loss_options), step)
    divergences.store(pointers, stats[1], loss_options, step)


@triton.jit
def load(pointers, mask, loss_options, step):
    of_label = labels.load_stats(pointers, mask, loss_options, step)
    pointers = ops.after_fields(pointers, labels.fields(loss_options), step)
    return of_label, divergences.load(pointers, mask, loss_options, step)


@triton.jit
def merge_pair(a, b, loss_options):
    return labels.merge_pair(a[0], b[0], loss_options), divergences.merge_pair(a[1], b[1], loss_options)


@triton.jit
def store_outputs(outputs, rows, inside, stats, second, label, divisor, sizes, loss_options):
    """Store all outputs, and return the losses, which are those of the labels."""
    value = ops.at_the_edges(divergences.loss(stats[1], second, loss_options), label, sizes.vocab_size, loss_options)
    tl.store(outputs.divergence + rows, value, inside)
    return label_rows.store_outputs(outputs, rows, inside, stats[0], None, label, divisor, sizes, loss_options)


@triton.jit
def factors(stats, second, label, live, divisor, grads, strides, row, shard_start, sizes, loss_options):
    weight = 0.0
    if grads.divergence is not None:
        weight = tl.load(grads.divergence + row * strides.divergence)
    of_teacher = divergences.shares(stats[1], second, weight, live, loss_options)
    of_label, live, column = label_rows.factors(
        stats[0], None, label, live, divisor, grads, strides, row, shard_start, sizes, loss_options
    )
    return (of_label, of_teacher), live, column


@triton.jit
def gradient(factors, tile, row):
    grad = labels.tile_gradient(factors[0], tile, row)
    if row.grads.divergence is not None:
        # A divergence that does not count may be infinite.
        grad += tl.where(factors[1].weight == 0, 0.0, divergences.gradient(factors[1], tile, row))
    return grad


@triton.jit
def mixture(sums, tile, pair):
    row, stats = pair
    return divergences.mixture(sums, tile, (row, stats[1]))


ALGEBRA = Algebra(
    label_at=label_rows.label_vector,
    empty=empty,
    tile=tile,
    merge_lanes=merge_lanes,
    load_lanes=load_lanes,
    store_lanes=store_lanes,
    finish=finish,
    store=store,
    load=load,
    merge_pair=merge_pair,
    store_outputs=store_outputs,
    factors=factors,
    gradient=gradient,
    second=mixture,
    merge_second=divergences.merge_mixture,
)


def divergence_loss(shard: VocabShard, options: DivergenceOptions) -> KernelLoss:
    taken = divergences.kernel_options(options)
    fields = lanes.lane_fields.fn(taken) + divergences.fields.fn(taken)  # as kernels store them
    return KernelLoss(ALGEBRA, shard, taken, n_lane_fields=sum(fields))
