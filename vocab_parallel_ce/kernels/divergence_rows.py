"""Distillation from a teacher's logits for the kernels of all losses: ``divergences`` over a row of two tensors.

What a lane knows of some columns is what a rank knows of its own: ``DivergenceStats``.
"""

import triton
import triton.language as tl

from vocab_parallel_ce.kernels import primitives as ops
from vocab_parallel_ce.kernels.algebra import Algebra, KernelLoss, in_units
from vocab_parallel_ce.kernels.divergences import (
    empty,
    gradient,
    kernel_options,
    load,
    loss,
    merge,
    merge_mixture,
    merge_pair,
    mixture,
    record,
    shares,
    store,
    tile,
)
from vocab_parallel_ce.kernels.walk import walk_edges
from vocab_parallel_ce.losses.divergences import DivergenceOptions
from vocab_parallel_ce.shard import VocabShard


@triton.jit
def label_at(place, label, shard_start, VECTOR: tl.constexpr):
    """A label says whether a row is read, and no more."""
    return tl.full((), -1, tl.int32)


@triton.jit
def finish(lanes, row, place, label, shard_start, sizes, loss_options, SHAPE: tl.constexpr):
    """Walk the edges, and merge the lanes to the statistics of a row."""
    lanes = walk_edges(place, lanes, row, tile, SHAPE)
    units = merge(record(in_units(lanes, SHAPE.UNITS)), loss_options)
    return ops.merge_tree(units, loss_options, merge_pair, record)


@triton.jit
def store_outputs(outputs, rows, inside, stats, second, label, divisor, sizes, loss_options):
    """Store the losses, and return them."""
    losses = loss(stats, second, loss_options)
    if label is not None:
        losses = ops.at_the_edges(losses, label, sizes.vocab_size, loss_options)
    if divisor is not None:
        losses = ops.weighted(losses, ops.divisor_weight(divisor))
    tl.store(outputs.loss + rows, losses, inside)
    return losses


@triton.jit
def factors(stats, second, label, live, divisor, grads, strides, row, shard_start, sizes, loss_options):
    """Return the ``Factors``, whether the row is read, and no column of the label."""
    weight = 1.0
    if grads.loss is not None:
        weight = tl.load(grads.loss + row * strides.loss)
    if divisor is not None:
        share = ops.divisor_weight(divisor)
        weight *= share
        live &= share != 0
    if label is not None:
        weight = tl.where((label < 0) | (label >= sizes.vocab_size), float("nan"), weight)
    return shares(stats, second, weight, live, loss_options), live, tl.full((), -1, tl.int32)


ALGEBRA = Algebra(
    label_at=label_at,
    empty=empty,
    tile=tile,
    merge_lanes=merge_pair,
    load_lanes=load,
    store_lanes=store,
    finish=finish,
    store=store,
    load=load,
    merge_pair=merge_pair,
    store_outputs=store_outputs,
    factors=factors,
    gradient=gradient,
    second=mixture,
    merge_second=merge_mixture,
)


def divergence_loss(shard: VocabShard, options: DivergenceOptions) -> KernelLoss:
    return KernelLoss(ALGEBRA, shard, kernel_options(options))
