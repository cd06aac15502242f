"""Kept sets: statistics and gradient of labels over k ids of each row, the only logits that are read.

    statistics   what labels' kernels know of the kept columns of this rank
    gradient     merge the ranks, and write the gradients of the kept columns; all others are cleared by a fill

The outputs are those of labels. One program per row, a lane per id; an id that is twice counts once. Regime: a few
microseconds for k up to some hundreds, and in backward one write of the shard.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from vocab_parallel_ce.kernels import primitives as ops
from vocab_parallel_ce.kernels.given_ids import lanes_of, write_columns
from vocab_parallel_ce.kernels.given_ids_rows import IdsSizes, given_columns, load_given
from vocab_parallel_ce.kernels.label_rows import label_loss
from vocab_parallel_ce.kernels.labels import (
    load_stats,
    logits_gradient,
    merge_pair,
    row_factors,
    store_stats,
)
from vocab_parallel_ce.kernels.launch import Launch, Rows, cache_launches, row_arguments
from vocab_parallel_ce.kernels.outputs import element_mul, outputs
from vocab_parallel_ce.layout import RowLayout
from vocab_parallel_ce.losses.base import Launchers
from vocab_parallel_ce.losses.kept import NO_ID
from vocab_parallel_ce.program import make, step
from vocab_parallel_ce.shard import VocabShard
from vocab_parallel_ce.spec import GradOutputs, LossOptions, RowStats


@triton.jit
def kept_columns(kept, row, lane, live, sizes, shard_start):
    """Return the columns of a row's ids; which of them this rank has, of equal ones the first; which are outside."""
    at = given_columns(kept, row, lane, sizes, shard_start)
    is_first = lane >= 0
    for i in range(sizes.k - 1):
        earlier = tl.load(kept + row * sizes.k + i).to(tl.int64) - shard_start
        is_first &= (at.column != earlier) | (lane <= i)
    in_row = lane < tl.where(live, lane.shape[0], 0)
    return at.column, at.owned & is_first & in_row, at.outside & in_row


@triton.jit
def stats_of_lanes(z, owned, is_target, outside, loss_options):
    """Return the ``RowStats`` of the lanes that are ``owned``; NaN if one is ``outside`` of the vocabulary."""
    row_max = tl.max(z)
    exp = ops.exp_shifted(z, ops.finite_or_zero(row_max))
    others_sum = tl.sum(tl.where(is_target | (owned == 0), 0.0, exp))
    # A maximum may pass over a NaN, and a sum leaves out the label's.
    is_nan = (owned & (z != z)) | outside
    others_sum = tl.where(tl.sum(is_nan.to(tl.int32)) > 0, float("nan"), others_sum)
    target_logit = tl.max(tl.where(is_target, z, float("-inf")))
    exp_shifted_sum = 0.0
    if loss_options.entropy is not None:
        shifted = ops.bounded(z - ops.finite_or_zero(row_max))
        exp_shifted_sum = tl.sum(tl.where(owned, exp * shifted, 0.0))
    return RowStats(row_max, others_sum, target_logit, 0.0, 0.0, exp_shifted_sum, 0.0, 0.0, 0.0)


@triton.jit(do_not_specialize=["n_rows", "shard_start", "stats_start"])
def kept_statistics_kernel(
    logits,  # [N, C] bf16|fp16|fp32
    labels,  # [N] int64|int32
    kept,  # [N, k] int64|int32, NO_ID for none
    temperature,  # [N] fp32, or None: 1
    stats,  # [R, N, K] fp32, out: this rank's rows
    layout,  # RowLayout of logits
    sizes,  # IdsSizes
    loss_options,  # option_arguments
    n_rows,
    shard_start,
    stats_start,  # this rank's first row in stats
    WIDTH: tl.constexpr,  # K
    LANES: tl.constexpr,  # k rounded up to a power of two
):
    """Example: ``x = [1, 3, 2]``, kept ``[0, 1]``, label 1: ``(3, 0.1353, 3)``."""
    row, lane = tl.program_id(0).to(tl.int64), tl.arange(0, LANES)
    label = ops.load_label(labels, row)
    live = label != loss_options.ignore_index
    column, owned, outside = kept_columns(kept, row, lane, live, sizes, shard_start)
    t = ops.row_temperature(temperature, row, live)
    z, _ = load_given(logits, ops.row_begin(row, layout), column, owned, loss_options, t)
    is_target = owned & (column == label - shard_start)
    found = stats_of_lanes(z, owned, is_target, outside, loss_options)
    store_stats(stats + (stats_start + row) * WIDTH, found, loss_options, 1)


@triton.jit(do_not_specialize=["n_rows", "shard_start"])
def kept_gradient_kernel(
    logits,  # [N, C] bf16|fp16|fp32
    labels,  # [N] int64|int32
    kept,  # [N, k] int64|int32, NO_ID for none
    temperature,  # [N] fp32, or None: 1
    stats,  # [R, N, K] fp32
    grad_loss,  # [N] fp32 of any stride
    grad_entropy,  # [N] fp32 of any stride, or None
    columns,  # [N, k] int32, out: of this rank, -1 for none
    values,  # [N, k] fp32, out: the gradients of these columns
    layout,  # RowLayout of logits
    sizes,  # IdsSizes
    grad_strides,  # GradOutputs of numbers or None
    loss_options,  # option_arguments
    n_rows,
    shard_start,
    WIDTH: tl.constexpr,  # K
    RANKS: tl.constexpr,
    LANES: tl.constexpr,  # k rounded up to a power of two
):
    """Example: the loss of ``x = [1, 3, 2]``, kept ``[0, 1]``, label 1: ``[0.1192, -0.1192]`` in columns 0 and 1."""
    row, lane = tl.program_id(0).to(tl.int64), tl.arange(0, LANES)
    label = ops.load_label(labels, row)
    live = label != loss_options.ignore_index
    column, owned, outside = kept_columns(kept, row, lane, live, sizes, shard_start)
    t = ops.row_temperature(temperature, row, live)
    step = n_rows.to(tl.int64) * WIDTH
    merged = ops.merge_ranks(stats + row * WIDTH, step, None, loss_options, load_stats, merge_pair, RANKS)
    grads = GradOutputs(grad_loss, grad_entropy, None, None, None)
    factors = row_factors(merged, label, live, 1.0, grads, grad_strides, row, sizes.vocab_size, loss_options)
    x = tl.load(logits + ops.row_begin(row, layout) + column, owned, other=float("-inf"))
    is_target = owned & (column == tl.where(merged.target_logit == float("-inf"), -1, label - shard_start))
    grad = logits_gradient(x, is_target, 0.0, factors, grads, loss_options, t)
    inside, first = lane < sizes.k, row * sizes.k
    tl.store(columns + first + lane, tl.where(owned, column, -1), inside)
    tl.store(values + first + lane, grad, inside)


def launchers(options: LossOptions, shard: VocabShard) -> Launchers:
    """Return the launchers of the loss."""

    def statistics(logits: Tensor, targets: Any, stats: tuple[Tensor], rank: int) -> None:
        labels, kept, temperature = targets
        n_rows, k = kept.shape
        base, rows = row_arguments(logits)
        launch = _statistics(rows, k, shard, options)
        launch(n_rows, (base, labels, kept, temperature, stats[0]), (n_rows, shard.start, rank * n_rows))

    def gradient(
        logits: Tensor, targets: Any, stats: tuple[Tensor], divisor: None, grads: GradOutputs, grad_logits: Tensor
    ) -> None:
        labels, kept, temperature = targets
        (n_rows, k), n_ranks = kept.shape, stats[0].shape[0]
        columns, values = (make(stats[0], n_rows, k, dtype=dtype) for dtype in (torch.int32, torch.float32))
        base, rows = row_arguments(logits)
        strides = tuple([None if grad is None else grad.stride(0) for grad in grads])
        launch = _gradient(rows, k, strides, n_ranks, shard, options)
        tensors = (base, labels, kept, temperature, stats[0], grads.loss, grads.entropy, columns, values)
        launch(n_rows, tensors, (n_rows, shard.start))
        step(Tensor.zero_, grad_logits)
        write_columns(columns, values, grad_logits)

    fill_outputs = outputs(label_loss(shard, options))
    return Launchers(statistics, fill_outputs, gradient, element_mul, widths=(len(options.statistics),))


def _sizes(k: int, shard: VocabShard) -> IdsSizes:
    return IdsSizes(k, shard.n_valid, shard.vocab_size, NO_ID)


@cache_launches
def _statistics(rows: Rows, k: int, shard: VocabShard, options: LossOptions) -> Launch:
    lanes, num_warps = lanes_of(k)
    values = (RowLayout(*rows.layout), _sizes(k, shard), options)
    constants = {"WIDTH": len(options.statistics), **lanes}
    return Launch(kept_statistics_kernel, values, constants, num_warps=num_warps)


@cache_launches
def _gradient(
    rows: Rows, k: int, strides: tuple[int | None, ...], n_ranks: int, shard: VocabShard, options: LossOptions
) -> Launch:
    lanes, num_warps = lanes_of(k)
    values = (RowLayout(*rows.layout), _sizes(k, shard), GradOutputs(*strides), options)
    constants = {"WIDTH": len(options.statistics), "RANKS": n_ranks, **lanes}
    return Launch(kept_gradient_kernel, values, constants, num_warps=num_warps)
