"""Statistics of every row of a vocabulary shard, in one read of it.

    row_max = max_i x_i,  sum_exp = sum_i exp(x_i - row_max),  target_logit = x_y,  logit_sum = sum_i x_i

One program a row. Each thread walks the row in 16-byte vectors with a maximum and a sum of its own,
rescaled when its maximum grows; the threads' pairs are merged once, at the end of the row. Regime:
1 K to 256 K columns, any number of rows, bound by memory: reads the shard once, writes 4 K bytes a row.
Rows that are ignored are not read.
"""

import triton
import triton.language as tl
from torch import Tensor

from vocab_parallel_ce.kernels.blocks import READ, choose_block
from vocab_parallel_ce.kernels.launch import device_of, row_arguments
from vocab_parallel_ce.kernels.primitives import (
    edge_offsets,
    exp_shifted,
    finite_or_zero,
    row_begin,
    row_body,
)

LABELS_AT_ONCE = 512  # more than a narrow row's lanes, few enough for one warp's registers


@triton.jit(do_not_specialize=["shard_start", "n_rows"])
def online_softmax_kernel(
    logits,  # [N, C] bf16|fp16|fp32
    layout,  # RowLayout of logits
    labels,  # [N] int64|int32
    stats,  # [N, K] fp32, out
    valid_rows,  # [1] int32, out, or None
    n_rows,
    n_columns,
    shard_start,
    ignore_index,
    HAS_SUM: tl.constexpr,
    HAS_EDGES: tl.constexpr,
    LANES: tl.constexpr,
    VECTOR: tl.constexpr,
    COUNTED: tl.constexpr,
):
    """One row: ``x = [1, 3, 2]``, label 1 at shard start 0 gives ``(3, 1.5032, 3, 6)``."""
    row = tl.program_id(0).to(tl.int64)
    if valid_rows is not None:
        # One program counts the labels while the others stream logits: no launch, no atomics.
        if row == 0:
            count = tl.zeros([COUNTED], tl.int32)
            for first_row in range(0, n_rows, COUNTED):
                rows = first_row + tl.arange(0, COUNTED)
                inside = rows < n_rows
                row_label = tl.load(labels + rows, inside, other=0).to(tl.int64)
                count += (inside & (row_label != ignore_index)).to(tl.int32)
            tl.store(valid_rows, tl.sum(count))
    label = tl.load(labels + row).to(tl.int64)
    # An ignored row is a row of no columns: nothing is read and the identity comes out.
    n_columns = tl.where(label == ignore_index, 0, n_columns)
    begin = row_begin(row, layout)
    first, width = row_body(begin, n_columns, VECTOR)
    lane_columns = tl.arange(0, LANES)[:, None] * VECTOR + tl.arange(0, VECTOR)[None, :]
    lane_max = tl.full([LANES], float("-inf"), tl.float32)
    lane_sum = tl.zeros([LANES], tl.float32)
    lane_logit_sum = tl.zeros([LANES], tl.float32)
    for tile in range(0, width, LANES * VECTOR):
        columns = tile + lane_columns
        inside = columns < width
        x = tl.load(logits + first + columns, inside, other=float("-inf")).to(tl.float32)
        new_max = tl.maximum(lane_max, tl.max(x, axis=1))
        shift = finite_or_zero(new_max)
        lane_sum *= exp_shifted(lane_max, shift)
        lane_sum += tl.sum(exp_shifted(x, shift[:, None]), axis=1)
        lane_max = new_max
        if HAS_SUM:
            lane_logit_sum += tl.sum(tl.where(inside, x, 0.0), axis=1)
    row_max = tl.max(lane_max)
    if HAS_EDGES:
        offset, inside = edge_offsets(begin, n_columns, first, width, VECTOR)
        edge = tl.load(logits + offset, inside, other=float("-inf")).to(tl.float32)
        row_max = tl.maximum(row_max, tl.max(edge))
    shift = finite_or_zero(row_max)
    sum_exp = tl.sum(lane_sum * exp_shifted(lane_max, shift))
    logit_sum = tl.sum(lane_logit_sum)
    if HAS_EDGES:
        sum_exp += tl.sum(exp_shifted(edge, shift))
        logit_sum += tl.sum(tl.where(inside, edge, 0.0))
    column = label - shard_start
    owned = (column >= 0) & (column < n_columns)
    target_logit = tl.load(logits + begin + column, owned, other=float("-inf")).to(tl.float32)
    out = stats + row * (3 + HAS_SUM)
    tl.store(out, row_max)
    tl.store(out + 1, sum_exp)
    tl.store(out + 2, target_logit)
    if HAS_SUM:
        tl.store(out + 3, logit_sum)


def online_softmax(
    logits: Tensor,
    labels: Tensor,
    stats: Tensor,
    valid_rows: Tensor | None,
    *,
    start: int,
    ignore_index: int,
) -> None:
    """Fill ``stats [N, K]`` for ``logits [..., C]`` and contiguous ``labels [N]``; K = 4 asks for logit_sum.

    ``valid_rows [1]`` int32, where given, receives the number of labels that are not ignored.
    """
    n_rows, n_stats = stats.shape
    if n_rows == 0:
        return
    n_columns = logits.shape[-1]
    block = choose_block(READ, n_columns, logits.element_size())
    base, layout, has_edges = row_arguments(logits, block.vector)
    with device_of(logits):
        online_softmax_kernel[(n_rows,)](
            base,
            layout,
            labels,
            stats,
            valid_rows,
            n_rows,
            n_columns,
            start,
            ignore_index,
            HAS_SUM=n_stats == 4,
            HAS_EDGES=has_edges,
            LANES=block.lanes,
            VECTOR=block.vector,
            COUNTED=LABELS_AT_ONCE,
            num_warps=block.num_warps,
        )
