"""Gradient, and loss, from the gathered statistics of all ranks.

    loss = (1 - e) * (lse - x_y) + e * (lse - mean_i x_i)
    dx_i = (exp(x_i - row_max) / sum_exp - (1 - e) * [i == y] - e / V) * upstream / n

``cross_entropy_kernel`` is one program a row: it merges the R statistics, writes the loss if asked and the
gradient, over the logits or elsewhere: reads the shard once, writes it once. The upstream gradient and the
mean's 1 / n are one fp32 factor a row, so the gradient is rounded once.
"""

import triton
import triton.language as tl
from torch import Tensor

from vocab_parallel_ce.kernels.blocks import READ_AND_WRITE, choose_block
from vocab_parallel_ce.kernels.launch import device_of, row_arguments
from vocab_parallel_ce.kernels.primitives import (
    edge_offsets,
    exp_shifted,
    mean_weight,
    merge_ranks,
    row_begin,
    row_body,
    row_loss,
)


@triton.jit
def logits_gradient(
    x, is_target, shift, inverse_sum, label_smoothing, uniform_p, weight, HAS_SUM: tl.constexpr
):
    """``weight * (p - (1 - e) * [is_target] - e / V)``, exactly 0 in an excluded column.

    p - 1 comes first: for a confident label it cancels without rounding, which p - (1 - e) does not.
    """
    grad = exp_shifted(x, shift) * inverse_sum
    target_grad = grad - 1
    if HAS_SUM:
        grad = tl.where(x == float("-inf"), grad, grad - uniform_p)
        target_grad += label_smoothing - uniform_p
    return tl.where(is_target, target_grad, grad) * weight


@triton.jit(do_not_specialize=["shard_start", "n_rows"])
def cross_entropy_kernel(
    logits,  # [N, C] bf16|fp16|fp32
    layout,  # RowLayout of logits and of grad_logits
    labels,  # [N] int64|int32
    stats,  # [R, N, K] fp32
    valid_rows,  # [1] int32, or None: no mean
    upstream,  # [N] fp32, or None: 1
    upstream_stride,
    loss,  # [N] fp32, out, or None
    grad_logits,  # [N, C] logits' dtype, out; may be logits
    n_rows,
    n_columns,
    n_ranks,
    shard_start,
    vocab_size,
    ignore_index,
    label_smoothing,
    HAS_SUM: tl.constexpr,
    HAS_EDGES: tl.constexpr,
    RANKS: tl.constexpr,
    LANES: tl.constexpr,
    VECTOR: tl.constexpr,
):
    """One row: ``x = [1, 3, 2]``, label 1: loss 0.4076, gradient ``[0.0900, -0.3348, 0.2447]``."""
    # Last rows first: they are what the statistics kernel has just left in the L2 cache.
    row = (n_rows - 1 - tl.program_id(0)).to(tl.int64)
    label = tl.load(labels + row).to(tl.int64)
    live = label != ignore_index
    ranks = tl.arange(0, RANKS)
    pointers = stats + (ranks.to(tl.int64) * n_rows + row) * (3 + HAS_SUM)
    row_max, sum_exp, target_logit, logit_sum = merge_ranks(pointers, ranks < n_ranks, HAS_SUM)
    weight = 1.0
    if valid_rows is not None:
        weight = mean_weight(valid_rows)
    if loss is not None:
        value = row_loss(
            row_max,
            sum_exp,
            target_logit,
            logit_sum,
            label,
            vocab_size,
            ignore_index,
            label_smoothing,
            HAS_SUM,
        )
        tl.store(loss + row, value * weight)
    if upstream is not None:
        weight *= tl.load(upstream + row * upstream_stride)
    weight = tl.where((label < 0) | (label >= vocab_size), float("nan"), weight)
    # An ignored row reads nothing (so that NaN in it stays unseen) and has every factor 0.
    shift = tl.where(live, row_max, 0.0)
    inverse_sum = tl.where(live, 1.0 / sum_exp, 0.0)
    weight = tl.where(live, weight, 0.0)
    uniform_p = label_smoothing / vocab_size
    # A label in an excluded column is no column's target.
    label = tl.where(target_logit == float("-inf"), -1, label)

    begin = row_begin(row, layout)
    first, width = row_body(begin, n_columns, VECTOR)
    target = begin - first + label - shard_start
    target = tl.where((target >= 0) & (target < width), target, -1).to(tl.int32)
    lane_columns = tl.arange(0, LANES)[:, None] * VECTOR + tl.arange(0, VECTOR)[None, :]
    for tile in range(0, width, LANES * VECTOR):
        columns = tile + lane_columns
        inside = columns < width
        x = tl.load(logits + first + columns, inside & live, other=float("-inf")).to(tl.float32)
        grad = logits_gradient(
            x, columns == target, shift, inverse_sum, label_smoothing, uniform_p, weight, HAS_SUM
        )
        tl.store(grad_logits + first + columns, grad.to(grad_logits.dtype.element_ty), inside)
    if HAS_EDGES:
        offset, inside = edge_offsets(begin, n_columns, first, width, VECTOR)
        x = tl.load(logits + offset, inside & live, other=float("-inf")).to(tl.float32)
        target_offset = begin + label - shard_start
        grad = logits_gradient(
            x, offset == target_offset, shift, inverse_sum, label_smoothing, uniform_p, weight, HAS_SUM
        )
        tl.store(grad_logits + offset, grad.to(grad_logits.dtype.element_ty), inside)


def cross_entropy(
    logits: Tensor,
    stats: Tensor,
    labels: Tensor,
    valid_rows: Tensor | None,
    upstream: Tensor | None,
    loss: Tensor | None,
    grad_logits: Tensor,
    *,
    start: int,
    vocab_size: int,
    ignore_index: int,
    label_smoothing: float,
) -> None:
    """Fill ``grad_logits``, laid out as ``logits [..., C]`` or the same tensor, and ``loss [N]`` where given.

    ``upstream [N]`` fp32 of any stride multiplies each row's gradient; it has no part in ``loss``.
    """
    n_ranks, n_rows, n_stats = stats.shape
    if n_rows == 0:
        return
    n_columns = logits.shape[-1]
    block = choose_block(READ_AND_WRITE, n_columns, logits.element_size())
    base, layout, has_edges = row_arguments(logits, block.vector)
    grad_base = base
    if grad_logits is not logits:
        grad_base, grad_layout, _ = row_arguments(grad_logits, block.vector)
        assert layout == grad_layout, "the gradient is laid out as the logits are"
    with device_of(logits):
        cross_entropy_kernel[(n_rows,)](
            base,
            layout,
            labels,
            stats,
            valid_rows,
            upstream,
            0 if upstream is None else upstream.stride(0),
            loss,
            grad_base,
            n_rows,
            n_columns,
            n_ranks,
            start,
            vocab_size,
            ignore_index,
            label_smoothing,
            HAS_SUM=n_stats == 4,
            HAS_EDGES=has_edges,
            RANKS=triton.next_power_of_2(n_ranks),
            LANES=block.lanes,
            VECTOR=block.vector,
            num_warps=block.num_warps,
        )
