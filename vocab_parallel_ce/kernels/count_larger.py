"""Count the logits of each row that are larger than a given one: the label's rank among a shard's columns.

    count = sum_i (x_i > label_x)

One read of the shard. One program does one row. Regime: bound by memory.
"""

import triton
import triton.language as tl
from torch import Tensor

from vocab_parallel_ce.blocks import READ, choose_block
from vocab_parallel_ce.kernels.launch import Dtypes, Launch, Rows, cache_launches, dtypes_of, row_arguments, walk_launch
from vocab_parallel_ce.kernels.walk import locate, walk_edges, walk_parts
from vocab_parallel_ce.shard import VocabShard


@triton.jit
def add_larger(found, tile, own):
    """Return each lane's count with one more tile; ``found`` is None for the first one."""
    logits, label_x = own
    x = tl.load(logits + tile.offset, tile.inside, other=float("-inf"))
    count = tl.sum((x.to(tl.float32) > label_x).to(tl.int32), axis=1)
    return count if found is None else found + count


@triton.jit
def add(a, b, loss_options):
    """Return the counts of two sets of columns."""
    return a + b


@triton.jit(do_not_specialize=["n_rows"])
def count_larger_kernel(
    logits,  # [N, C] bf16|fp16|fp32
    label_x,  # [N] fp32
    counts,  # [N] int32, out
    layout,  # RowLayout of logits
    n_columns,  # that are not padding
    n_rows,
    HAS_EDGES: tl.constexpr,
    LANES: tl.constexpr,
    VECTOR: tl.constexpr,
):
    """Example: ``x = [1, 3, 2]`` and ``label_x = 1`` give 2."""
    row = tl.program_id(0).to(tl.int64)
    own = logits, tl.load(label_x + row)
    place = locate(row, layout, None, n_columns, False, VECTOR)
    found = tl.zeros([LANES], tl.int32)
    found = walk_parts(place, found, own, None, add_larger, add, HAS_EDGES, LANES, VECTOR, 1)
    found = walk_edges(place, found, own, add_larger, HAS_EDGES, LANES, VECTOR)
    tl.store(counts + row, tl.sum(found, axis=0))


def count_larger(logits: Tensor, label_x: Tensor, counts: Tensor, *, shard: VocabShard) -> None:
    """Fill ``counts [N]`` int32 for ``logits [..., C]`` and ``label_x [N]`` fp32, both contiguous."""
    base, rows = row_arguments(logits)
    tensors = (base, label_x, counts)
    _launch(dtypes_of(tensors), rows, shard)(counts.shape[0], tensors, (counts.shape[0],))


@cache_launches
def _launch(dtypes: Dtypes, rows: Rows, shard: VocabShard) -> Launch:
    block = choose_block(READ, shard.n_columns, dtypes[0].itemsize)
    layout, has_edges = rows
    rows = (layout, has_edges or shard.n_valid % block.vector != 0)
    return walk_launch(count_larger_kernel, rows, (shard.n_valid,), block)
