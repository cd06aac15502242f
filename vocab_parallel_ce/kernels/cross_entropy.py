"""Gradient, and loss, from the gathered statistics of all ranks.

    loss = (1 - e) * (lse - z_y) + e * (lse - mean_i z_i) + z_loss * lse^2
    dz_i = p_i * (1 + 2 * z_loss * lse) - (1 - e) * [i == y] - e / V,   p_i = exp(z_i - row_max) / sum_exp
    p_y - 1 = -others_sum / sum_exp,   sum_exp = others_sum + exp(z_y - row_max)
    dx_i = (dz_i * grad_output / n + p_i * (mean_shifted - (z_i - row_max)) * grad_entropy) * dz_i/dx_i

``cross_entropy_kernel`` is one program a row: it merges the R statistics, writes the loss if asked and the
gradient, over the logits or elsewhere: reads the shard once, writes it once. The grad_output and the
divisor are one fp32 factor a row, so the gradient is rounded once. Padding becomes 0, whatever it holds.
"""

import functools

import triton
import triton.language as tl
from torch import Tensor

from vocab_parallel_ce.blocks import READ_AND_WRITE, READ_AND_WRITE_EDGES, choose_block
from vocab_parallel_ce.kernels.launch import (
    MOST_LAUNCHES,
    Dtypes,
    Launch,
    dtypes_of,
    option_arguments,
    row_arguments,
)
from vocab_parallel_ce.kernels.primitives import (
    bounded,
    divisor_weight,
    edge_offsets,
    exp_shifted,
    label_exp,
    log_sum_exp,
    merge_ranks,
    row_begin,
    row_body,
    row_loss,
    stats_of_row,
    transform,
)
from vocab_parallel_ce.shard import VocabShard
from vocab_parallel_ce.spec import LossOptions


@triton.jit
def logits_gradient(x, is_target, factors, grad_entropy, row_options):
    """One row's gradient at ``x``; exactly 0 in an excluded column. ``factors`` are the row's.

    ``target_grad`` is the label's: ``p - 1`` would lose the digits of a confident label's 1 - p.
    """
    _, smoothing, z_loss, logit_scale, softcap, _, _ = row_options
    shift, inverse_sum, target_grad, weight, uniform_p, z_factor, mean_shifted, entropy_weight = factors
    z, slope = transform(x, row_options)
    p = exp_shifted(z, shift) * inverse_sum
    grad = p
    if z_loss is not None:
        grad += p * z_factor
    if smoothing is not None:
        grad = tl.where(z == float("-inf"), grad, grad - uniform_p)
    grad = tl.where(is_target, target_grad, grad) * weight
    if grad_entropy is not None:
        grad += p * (mean_shifted - bounded(z - shift)) * entropy_weight
    if softcap is not None or logit_scale is not None:
        grad *= slope
    return grad


@triton.jit(do_not_specialize=["shard_start", "n_rows"])
def cross_entropy_kernel(
    logits,  # [N, C] bf16|fp16|fp32
    labels,  # [N] int64|int32
    stats,  # [R, N, K] fp32
    divisor,  # [1] integer or floating point, or None: 1
    grad_output,  # [N] fp32, or None: 1
    grad_entropy,  # [N] fp32, or None: 0
    loss,  # [N] fp32, out, or None
    grad_logits,  # [N, C] logits' dtype, out; may be logits
    layout,  # RowLayout of logits and of grad_logits
    grad_output_stride,  # or None
    grad_entropy_stride,  # of grad_entropy, or None
    n_columns,
    n_valid,  # columns that are no padding, or None: all
    n_ranks,
    vocab_size,
    row_options,  # option_arguments
    n_rows,
    shard_start,
    HAS_EDGES: tl.constexpr,
    RANKS: tl.constexpr,
    LANES: tl.constexpr,
    VECTOR: tl.constexpr,
):
    """One row: ``x = [1, 3, 2]``, label 1: loss 0.4076, gradient ``[0.0900, -0.3348, 0.2447]``."""
    _, smoothing, z_loss, _, _, _, _ = row_options
    # Last rows first: they are what the statistics kernel has just left in the L2 cache.
    row = (n_rows - 1 - tl.program_id(0)).to(tl.int64)
    label = tl.load(labels + row).to(tl.int64)
    live = label != row_options[0]
    ranks = tl.arange(0, RANKS)
    pointers = stats_of_row(stats, ranks.to(tl.int64) * n_rows + row, row_options)
    merged = merge_ranks(pointers, ranks < n_ranks, row_options)
    row_max, others_sum, target_logit, _, exp_shifted_sum, _ = merged
    label_sum = label_exp(row_max, target_logit)
    sum_exp = others_sum + label_sum
    weight = 1.0
    if divisor is not None:
        weight = divisor_weight(divisor)
        live &= weight != 0
    if loss is not None:
        value = row_loss(merged, label, vocab_size, row_options)
        if divisor is not None:
            value = tl.where(weight == 0, 0.0, value * weight)
        tl.store(loss + row, value)
    if grad_output is not None:
        weight *= tl.load(grad_output + row * grad_output_stride)
    outside = (label < 0) | (label >= vocab_size)
    weight = tl.where(outside, float("nan"), weight)
    # An ignored row, or one of no items, reads nothing (NaN in it stays unseen) and has every factor 0.
    shift = tl.where(live, row_max, 0.0)
    inverse_sum = tl.where(live, 1.0 / sum_exp, 0.0)
    target_grad = tl.where(live, -others_sum / sum_exp, 0.0)
    weight = tl.where(live, weight, 0.0)
    uniform_p = 0.0
    z_factor = 0.0
    if z_loss is not None:
        z_factor = tl.where(live, 2 * z_loss * (row_max + log_sum_exp(merged)), 0.0)
        target_grad += label_sum * inverse_sum * z_factor
    if smoothing is not None:
        uniform_p = smoothing / vocab_size
        target_grad += smoothing - uniform_p
    mean_shifted = 0.0
    entropy_weight = 0.0
    if grad_entropy is not None:
        mean_shifted = tl.where(live, exp_shifted_sum / sum_exp, 0.0)
        entropy_weight = tl.where(live, tl.load(grad_entropy + row * grad_entropy_stride), 0.0)
    factors = (shift, inverse_sum, target_grad, weight, uniform_p, z_factor, mean_shifted, entropy_weight)
    # A label in an excluded column is no column's target.
    label = tl.where(target_logit == float("-inf"), -1, label)

    begin = row_begin(row, layout)
    first, width = row_body(begin, n_columns, VECTOR)
    target = begin - first + label - shard_start
    target = tl.where((target >= 0) & (target < width), target, -1).to(tl.int32)
    if n_valid is not None:
        # Whole vectors are read, so that loads stay 16 bytes wide, padding among them.
        valid_width = (begin + n_valid - first).to(tl.int32)
        readable = (valid_width + VECTOR - 1) // VECTOR * VECTOR
    lane_columns = tl.arange(0, LANES)[:, None] * VECTOR + tl.arange(0, VECTOR)[None, :]
    for tile in range(0, width, LANES * VECTOR):
        columns = tile + lane_columns
        inside = columns < width
        is_read = inside & live
        if n_valid is not None:
            is_read &= columns < readable
        x = tl.load(logits + first + columns, is_read, other=float("-inf")).to(tl.float32)
        grad = logits_gradient(x, columns == target, factors, grad_entropy, row_options)
        if n_valid is not None:
            grad = tl.where(columns < valid_width, grad, 0.0)
        tl.store(grad_logits + first + columns, grad.to(grad_logits.dtype.element_ty), inside)
    if HAS_EDGES:
        offset, inside = edge_offsets(begin, n_columns, first, width, VECTOR)
        x = tl.load(logits + offset, inside & live, other=float("-inf")).to(tl.float32)
        is_target = offset == begin + label - shard_start
        grad = logits_gradient(x, is_target, factors, grad_entropy, row_options)
        if n_valid is not None:
            grad = tl.where(offset < begin + n_valid, grad, 0.0)
        tl.store(grad_logits + offset, grad.to(grad_logits.dtype.element_ty), inside)


def cross_entropy(
    logits: Tensor,
    stats: Tensor,
    labels: Tensor,
    divisor: Tensor | None,
    grad_output: Tensor | None,
    grad_entropy: Tensor | None,
    loss: Tensor | None,
    grad_logits: Tensor,
    *,
    shard: VocabShard,
    options: LossOptions,
) -> None:
    """Fill ``grad_logits``, laid out as ``logits [..., C]`` or the same tensor, and ``loss [N]`` where given.

    ``grad_output [N]`` fp32 of any stride multiplies each row's gradient of the loss, ``grad_entropy
    [N]`` that of its entropy; neither has a part in ``loss``.
    """
    n_ranks, n_rows, _ = stats.shape
    if n_rows == 0:
        return
    base, layout, has_edges = row_arguments(logits)
    grad_base = base
    if grad_logits is not logits:
        grad_base, grad_layout, _ = row_arguments(grad_logits)
        assert layout == grad_layout, "the gradient is laid out as the logits are"
    tensors = (base, labels, stats, divisor, grad_output, grad_entropy, loss, grad_base)
    launch = _launch(
        dtypes_of(tensors),
        layout,
        has_edges,
        None if grad_output is None else grad_output.stride(0),
        None if grad_entropy is None else grad_entropy.stride(0),
        n_ranks,
        shard,
        options,
    )
    launch(n_rows, tensors, (n_rows, shard.start))


@functools.lru_cache(maxsize=MOST_LAUNCHES)
def _launch(
    dtypes: Dtypes,
    layout: tuple[int, ...],
    has_edges: bool,
    grad_output_stride: int | None,
    grad_entropy_stride: int | None,
    n_ranks: int,
    shard: VocabShard,
    options: LossOptions,
) -> Launch:
    block = choose_block(
        READ_AND_WRITE_EDGES if has_edges else READ_AND_WRITE, shard.n_columns, dtypes[0].itemsize
    )
    return Launch(
        cross_entropy_kernel,
        (
            layout,
            grad_output_stride,
            grad_entropy_stride,
            shard.n_columns,
            None if shard.n_valid == shard.n_columns else shard.n_valid,
            n_ranks,
            shard.vocab_size,
            option_arguments(options),
        ),
        {
            "HAS_EDGES": has_edges,
            "RANKS": triton.next_power_of_2(n_ranks),
            "LANES": block.lanes,
            "VECTOR": block.vector,
        },
        num_warps=block.num_warps,
    )
