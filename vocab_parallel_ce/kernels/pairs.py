"""Two tensors whose rows are walked together: logits, and what stands beside each logit.

Column ``i`` of one row stands beside column ``i`` of the other. Their strides and dtypes may differ. The walk's
vectors are those of the first tensor. If both rows begin at the same position of a line, accesses of the second are
vectors too; otherwise they are single elements.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from vocab_parallel_ce.blocks import READ_PAIRS, choose_block
from vocab_parallel_ce.kernels import primitives as ops
from vocab_parallel_ce.kernels.launch import Launch, row_arguments
from vocab_parallel_ce.layout import RowLayout
from vocab_parallel_ce.shard import VocabShard
from vocab_parallel_ce.spec import GradOutputs


class Pair(NamedTuple):
    """Where two rows lie, in elements from their bases."""

    begin: tl.tensor
    first: tl.tensor  # of the body
    width: tl.tensor  # of the body
    other_first: tl.tensor
    other_shift: tl.tensor  # from an element of one row to that of the other


class Sizes(NamedTuple):
    """Numbers that are the same in every step."""

    n_columns: int
    n_valid: int  # columns that are not padding
    vocab_size: int

    @classmethod
    def of(cls, shard: VocabShard) -> "Sizes":
        return cls(shard.n_columns, shard.n_valid, shard.vocab_size)


class PairRows(NamedTuple):
    """How the rows of two tensors lie, as a part of a launch's key."""

    layout: tuple[int, ...]
    other_layout: tuple[int, ...]
    has_edges: bool
    alike: bool  # each two rows begin at the same position of a line


@triton.jit
def locate_pair(row, layout, other_layout, n_columns, ALIKE: tl.constexpr, VECTOR: tl.constexpr):
    """Return the ``Pair`` of ``row`` (int64)."""
    begin = ops.row_begin(row, layout)
    other_begin = ops.row_begin(row, other_layout)
    first, width = ops.row_body(begin, n_columns, VECTOR)
    other_first = other_begin + (first - begin)
    if ALIKE:
        # The same number, and the compiler sees that it is a multiple.
        other_first, _ = ops.row_body(other_begin, n_columns, VECTOR)
    return Pair(begin, first, width, other_first, other_begin - begin)


@triton.jit
def pair_edges(pair, lane_columns, n_columns):
    """Return the offsets of the head and the tail as one tile, and which of them exist."""
    VECTOR: tl.constexpr = lane_columns.shape[1]
    offset, inside = ops.edge_offsets(lane_columns, pair.begin, n_columns, pair.first, pair.width, VECTOR)
    return offset, inside & (lane_columns < 16 * VECTOR)


@triton.jit
def clear_columns(grad_logits, begin, n_valid, n_columns, LANES: tl.constexpr):
    """Store 0 in the padded columns of a row."""
    for tile in range(n_valid, n_columns, LANES):
        columns = tile + tl.arange(0, LANES)
        tl.store(grad_logits + begin + columns, tl.zeros([LANES], grad_logits.dtype.element_ty), columns < n_columns)


def pair_arguments(logits: Tensor, other: Tensor) -> tuple[Tensor, Tensor, PairRows]:
    """Return the bases of two tensors ``[..., C]`` of equal leading dimensions, and their ``PairRows``."""
    base, (layout, has_edges) = row_arguments(logits)
    other_base, (other_layout, _) = row_arguments(other)
    line = 128 // logits.element_size()  # 8 vectors of the walk
    own, others = RowLayout(*layout), RowLayout(*other_layout)
    distances = (a - b for a, b in zip(own, others, strict=True))
    alike = own[1:3] == others[1:3] and all(distance % line == 0 for distance in distances)
    return base, other_base, PairRows(layout, other_layout, has_edges, alike)


def second_of(stats: tuple[Tensor, ...]) -> Tensor | None:
    """Return the statistics of the second exchange, if there is one."""
    return stats[1] if len(stats) > 1 else None


def loss_factor(grads: GradOutputs, stats: tuple[Tensor, ...]) -> Tensor:
    """Return what multiplies the gradient of each row's loss, ``[N]`` of any stride; None is 1."""
    if grads.loss is None:
        return stats[0].new_ones(1, dtype=torch.float32).expand(stats[0].shape[1])
    factor: Tensor = grads.loss
    return factor


def pair_launch(
    kernel: Any, rows: PairRows, values: tuple[Any, ...], shard: VocabShard, size: int, **own: Any
) -> Launch:
    """Return the Launch of a kernel that walks two tensors: both layouts come first, HAS_EDGES after ``own``.

    ``size`` is that of an element of the first tensor.
    """
    block = choose_block(READ_PAIRS, shard.n_columns, size)
    has_edges = rows.has_edges or shard.n_valid % block.vector != 0
    constants = {**own, "HAS_EDGES": has_edges, "ALIKE": rows.alike, "LANES": block.lanes, "VECTOR": block.vector}
    layouts = RowLayout(*rows.layout), RowLayout(*rows.other_layout)
    return Launch(kernel, (*layouts, *values), constants, num_warps=block.num_warps)
