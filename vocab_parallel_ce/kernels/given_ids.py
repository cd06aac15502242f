"""k given ids of each row: their statistics, log-probabilities and gradients, around the kernels of cross-entropy.

    statistics   this rank's logits at the ids, and the label of cross-entropy's statistics: the best of them
    outputs      merge the ranks, and write the log-probabilities at the ids, or the divergence from a top-k teacher
    gradient     merge the ranks, and write what cross-entropy's gradient takes, and the gradients of the k columns
    write        put these into the columns, over what cross-entropy's gradient has written

The mathematics is that of ``losses.given_ids`` and ``losses.top_k_teacher``. One program per row, a lane per id.
Regime: a few microseconds beside one pass over the shard; k up to some hundreds, since every id is compared with all.
"""

import math
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from vocab_parallel_ce.kernels import primitives as ops
from vocab_parallel_ce.kernels.given_ids_rows import (
    IdsSizes,
    best_column,
    given_columns,
    load_given,
    log_probs_at,
    merged_ids,
)
from vocab_parallel_ce.kernels.label_rows import label_loss
from vocab_parallel_ce.kernels.launch import Launch, Rows, cache_launches, row_arguments
from vocab_parallel_ce.kernels.outputs import element_mul, gradient
from vocab_parallel_ce.kernels.rows import statistics
from vocab_parallel_ce.kernels.top_k_teacher import row_gradients, row_loss
from vocab_parallel_ce.layout import RowLayout
from vocab_parallel_ce.losses.labels import Labels
from vocab_parallel_ce.program import make, step
from vocab_parallel_ce.reference import sum_losses
from vocab_parallel_ce.shard import VocabShard
from vocab_parallel_ce.spec import GradOutputs, TokenOutputs


@triton.jit(do_not_specialize=["n_rows", "shard_start", "stats_start"])
def ids_statistics_kernel(
    logits,  # [N, C] bf16|fp16|fp32
    ids,  # [N, k] int64|int32
    log_probs,  # [N, k] fp32, a teacher's, or None
    labels,  # [N] int64|int32, hard labels, or None
    temperature,  # [N] fp32, or None: 1
    stats,  # [R, N, 3 + n_ids] fp32, out: the last n_ids of this rank's rows
    label,  # [N] int64, out: the best of this rank's given ids
    layout,  # RowLayout of logits
    sizes,  # IdsSizes
    loss_options,  # option_arguments
    n_rows,
    shard_start,
    stats_start,  # this rank's first row in stats
    LANES: tl.constexpr,  # n_ids rounded up to a power of two
):
    """Example: ``x = [1, 3, 2]``, ids ``[0, 1]``: z ``[1, 3]``, label 1."""
    row, lane = tl.program_id(0).to(tl.int64), tl.arange(0, LANES)
    at = given_columns(ids, log_probs, labels, row, lane, sizes, shard_start)
    t = ops.row_temperature(temperature, row, True)
    z, _ = load_given(logits, ops.row_begin(row, layout), at.column, at.owned, loss_options, t)
    tl.store(stats + (stats_start + row) * (3 + sizes.n_ids) + 3 + lane, z, lane < sizes.n_ids)
    is_dead = tl.min(at.left_out.to(tl.int32)) == 1
    best = best_column(z, at, lane).to(tl.int64) + shard_start
    tl.store(label + row, tl.where(is_dead, loss_options.ignore_index, best))


@triton.jit(do_not_specialize=["n_rows", "shard_start"])
def ids_outputs_kernel(
    stats,  # [R, N, 3 + n_ids] fp32
    ids,  # [N, k] int64|int32
    log_probs,  # [N, k] fp32, a teacher's, or None
    labels,  # [N] int64|int32, or None
    divisor,  # [1], or None: 1
    loss,  # [N] fp32 of a teacher, or [N, k] log-probabilities, out
    sizes,  # IdsSizes
    n_ranks,
    n_rows,
    shard_start,
    LANES: tl.constexpr,
):
    """Example: statistics ``(3, 0.5032, 3, 1, 3)`` of ``x = [1, 3, 2]``, ids ``[0, 1]``: ``[-2.4076, -0.4076]``."""
    row, lane = tl.program_id(0).to(tl.int64), tl.arange(0, LANES)
    at = given_columns(ids, log_probs, labels, row, lane, sizes, shard_start)
    known = merged_ids(stats, row, lane, sizes, n_ranks, n_rows)
    values, rest = log_probs_at(known, at, lane)
    if log_probs is None:
        tl.store(loss + row * sizes.k + lane, values, lane < sizes.k)
    else:
        value = row_loss(values, rest, at.log_q, at.left_out, labels is not None, lane, sizes)
        if divisor is not None:
            value = ops.weighted(value, ops.divisor_weight(divisor))
        tl.store(loss + row, value)


@triton.jit
def value_gradients(grads, log_probs, row, grad_stride, values, rest, at, lane, share, sizes):
    """Return the gradient of each lane's log-probability and that of the rest's; 0 where left out."""
    grad_rest = 0.0
    if log_probs is None:
        grad = tl.load(grads + row * sizes.k + lane, lane < sizes.k, other=0.0) * share
    else:
        grad_row = tl.load(grads + row * grad_stride) * share
        grad, grad_rest = row_gradients(values, rest, at.log_q, at.left_out, grad_row, lane, sizes)
    return tl.where(at.left_out, 0.0, grad), grad_rest


@triton.jit(do_not_specialize=["n_rows", "shard_start"])
def ids_gradient_kernel(
    logits,  # [N, C] bf16|fp16|fp32
    ids,  # [N, k] int64|int32
    log_probs,  # [N, k] fp32, a teacher's, or None
    labels,  # [N] int64|int32, or None
    temperature,  # [N] fp32, or None: 1
    stats,  # [R, N, 3 + n_ids] fp32
    divisor,  # [1], or None: 1
    grads,  # [N] fp32 of any stride, of a teacher; or [N, k]
    columns,  # [N, n_ids] int32, out: of this rank, -1 for another's
    values,  # [N, n_ids] fp32, out: the gradients of these columns
    merged,  # [1, N, 3] fp32, out: cross-entropy's statistics of the whole vocabulary
    weight,  # [N] fp32, out: what multiplies the softmax elsewhere
    label,  # [N] int64, out: a column that is written again, or another rank's
    layout,  # RowLayout of logits
    sizes,  # IdsSizes
    grad_stride,
    n_ranks,
    loss_options,  # option_arguments
    n_rows,
    shard_start,
    LANES: tl.constexpr,
):
    """Example: ``x = [1, 3, 2]``, ids ``[0, 1]``, grads ``[1, 0]``: values ``[0.9100, -0.6652]``, weight -1."""
    row, lane = tl.program_id(0).to(tl.int64), tl.arange(0, LANES)
    at = given_columns(ids, log_probs, labels, row, lane, sizes, shard_start)
    known = merged_ids(stats, row, lane, sizes, n_ranks, n_rows)
    log_probs_of_row, rest = log_probs_at(known, at, lane)
    t = ops.row_temperature(temperature, row, True)
    z, slope = load_given(logits, ops.row_begin(row, layout), at.column, at.owned, loss_options, t)
    share = 1.0
    if divisor is not None:
        share = ops.divisor_weight(divisor)
    grad, grad_rest = value_gradients(
        grads, log_probs, row, grad_stride, log_probs_of_row, rest, at, lane, share, sizes
    )
    is_dead = (tl.min(at.left_out.to(tl.int32)) == 1) | (share == 0)
    best, sum_exp = best_column(z, at, lane), known.others + known.best_term
    total = tl.where(tl.sum(at.outside.to(tl.int32)) > 0, float("nan"), tl.sum(grad))
    other_total = tl.sum(tl.where(at.column == best, 0.0, grad))
    outer = -total
    if sizes.rest is not None:
        inside = tl.sum(tl.where(lane < sizes.k, ops.exp_shifted(known.z, ops.finite_or_zero(known.row_max)), 0.0))
        outer = grad_rest * (inside / known.outside) - total
        total, other_total = total + grad_rest, other_total + grad_rest
    shifted = z - tl.where(tl.abs(known.row_max) == float("inf"), float("nan"), known.row_max)  # such a row is NaN
    s = ops.exp_shifted(shifted, 0.0) / sum_exp
    # Equal ids have the sum of their gradients, in the order of the ids.
    inside_row, first = lane < sizes.n_ids, row * sizes.n_ids
    tl.store(columns + first + lane, at.column, inside_row)
    tl.store(values + first + lane, grad, inside_row)
    tl.debug_barrier()
    equal_sum, among_known = tl.zeros([LANES], tl.float32), lane < 0
    for i in range(sizes.n_ids):
        is_equal = at.column == tl.load(columns + first + i)
        equal_sum += tl.where(is_equal, tl.load(values + first + i), 0.0)
        among_known |= is_equal & (i < sizes.k)
    tl.debug_barrier()
    value = equal_sum - s * total
    # Of a confident id, 1 - s and the sum of the other gradients: the digits that s and the total round away.
    value = tl.where(s > 0.5, known.others / sum_exp * total - other_total, value)
    if sizes.rest is not None:
        value += tl.where(among_known, 0.0, s * (outer + total))
    value = tl.where((shifted == float("-inf")) | is_dead, 0.0, value * slope)
    tl.store(values + first + lane, value, inside_row)
    tl.store(merged + 3 * row, known.row_max)
    tl.store(merged + 3 * row + 1, sum_exp)
    tl.store(merged + 3 * row + 2, float("-inf"))
    tl.store(weight + row, outer)
    last = tl.max(at.column).to(tl.int64)
    elsewhere = (shard_start + sizes.n_valid).to(tl.int64) % sizes.vocab_size
    last = tl.where(last < 0, elsewhere, shard_start + last)
    tl.store(label + row, tl.where(is_dead, loss_options.ignore_index, last))


@triton.jit(do_not_specialize=["n_rows"])
def write_columns_kernel(
    columns,  # [N, n_ids] int32, -1 for none
    values,  # [N, n_ids] fp32; equal columns have equal values
    grad_logits,  # [N, C], out
    layout,  # RowLayout of grad_logits
    n_ids,
    n_rows,
    LANES: tl.constexpr,
):
    """Example: columns ``[2, -1]``, values ``[0.5, 0]``: column 2 of the row becomes 0.5."""
    row, lane = tl.program_id(0).to(tl.int64), tl.arange(0, LANES)
    column = tl.load(columns + row * n_ids + lane, lane < n_ids, other=-1)
    value = tl.load(values + row * n_ids + lane, lane < n_ids, other=0.0)
    begin = ops.row_begin(row, layout)
    tl.store(grad_logits + begin + column, value.to(grad_logits.dtype.element_ty), column >= 0)


def sizes_of(options: Any, shard: VocabShard, has_labels: bool) -> IdsSizes:
    """Return the numbers of a launch; ``options`` are the loss's."""
    divergence = getattr(options, "divergence", None)
    sizes = IdsSizes(options.n_ids - has_labels, options.n_ids, shard.n_valid, shard.vocab_size, options.ignore_index)
    if divergence is None:
        return sizes
    beta, limits = options.beta, torch.finfo(torch.float32)
    share = min(beta, 1 - beta)
    return sizes._replace(
        rest=1 if options.n_known else None,
        reverse=1 if divergence == "reverse" else None,
        beta=beta if divergence == "js" else None,
        student_share=1 - beta if divergence == "js" else None,
        log_beta=math.log(beta) if divergence == "js" else None,
        most=min(math.log(2 / limits.eps) - math.log(share), math.log(limits.max) - 1) if divergence == "js" else None,
        hard_weight=options.hard_weight or None,
    )


class GivenIds:
    """The launchers of a loss; ``Launchers`` in ``losses.base`` says what each fills."""

    def __init__(self, options: Any, shard: VocabShard) -> None:
        self.options, self.shard = options, shard
        softmax = label_loss(shard, options.softmax)
        self.softmax_statistics, self.softmax_gradient = statistics(softmax), gradient(softmax)
        self.element_mul = element_mul

    def statistics(self, logits: Tensor, targets: Any, stats: tuple[Tensor], rank: int) -> None:
        ids, log_probs, labels, temperature = _parts_of(targets)
        n_rows = stats[0].shape[1]
        label = make(ids, n_rows, dtype=torch.int64)
        base, rows = row_arguments(logits)
        launch = _statistics(rows, self.options, self.shard, labels is not None)
        tensors = (base, ids, log_probs, labels, temperature, stats[0], label)
        launch(n_rows, tensors, (n_rows, self.shard.start, rank * n_rows))
        self.softmax_statistics(logits, Labels(label, temperature=temperature), stats, rank)

    def outputs(
        self,
        stats: tuple[Tensor],
        targets: Any,
        divisor: Tensor | None,
        outputs: TokenOutputs,
        total: Tensor | None = None,
    ) -> None:
        ids, log_probs, labels, _ = _parts_of(targets)
        n_ranks, n_rows, _ = stats[0].shape
        launch = _outputs(self.options, self.shard, labels is not None, n_ranks)
        launch(n_rows, (stats[0], ids, log_probs, labels, divisor, outputs.loss), (n_rows, self.shard.start))
        if total is not None:
            step(sum_losses, outputs.loss, total)

    def gradient(
        self,
        logits: Tensor,
        targets: Any,
        stats: tuple[Tensor],
        divisor: Tensor | None,
        grads: GradOutputs,
        grad_logits: Tensor,
    ) -> None:
        ids, log_probs, labels, temperature = _parts_of(targets)
        (n_ranks, n_rows, _), n_ids = stats[0].shape, self.options.n_ids
        grad = stats[0].new_ones(1).expand(n_rows) if grads.loss is None else grads.loss
        if log_probs is None:
            grad = grad.contiguous()
        new = partial(make, stats[0], dtype=torch.float32)
        columns, values = new(n_rows, n_ids, dtype=torch.int32), new(n_rows, n_ids)
        merged, weight, label = new(1, n_rows, 3), new(n_rows), new(n_rows, dtype=torch.int64)
        base, rows = row_arguments(logits)
        launch = _gradient(rows, self.options, self.shard, labels is not None, grad.stride(0), n_ranks)
        tensors = (base, ids, log_probs, labels, temperature, stats[0], divisor, grad)
        launch(n_rows, (*tensors, columns, values, merged, weight, label), (n_rows, self.shard.start))
        softmax_targets = Labels(label, temperature=temperature)
        self.softmax_gradient(logits, softmax_targets, (merged,), None, GradOutputs(weight), grad_logits)
        write_columns(columns, values, grad_logits)


def write_columns(columns: Tensor, values: Tensor, grad_logits: Tensor) -> None:
    """Write ``values [N, n]`` into ``columns [N, n]`` int32 of ``grad_logits [..., C]``, -1 for none."""
    n_rows, n_ids = columns.shape
    base, rows = row_arguments(grad_logits)
    _write(rows, n_ids)(n_rows, (columns, values, base), (n_rows,))


def _parts_of(targets: Any) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Return ids, and a teacher's log-probabilities, hard labels and temperatures if there are some."""
    return targets.ids, *[getattr(targets, name, None) for name in ("log_probs", "labels", "temperature")]


def lanes_of(n_ids: int) -> tuple[dict[str, int], int]:
    """Return the constant LANES of a kernel, and its warps."""
    lanes = triton.next_power_of_2(n_ids)
    return {"LANES": lanes}, min(max(lanes // 64, 1), 8)


@cache_launches
def _statistics(rows: Rows, options: Any, shard: VocabShard, has_labels: bool) -> Launch:
    (lanes, num_warps), sizes = lanes_of(options.n_ids), sizes_of(options, shard, has_labels)
    values = (RowLayout(*rows.layout), sizes, options.softmax)
    return Launch(ids_statistics_kernel, values, lanes, num_warps=num_warps)


@cache_launches
def _outputs(options: Any, shard: VocabShard, has_labels: bool, n_ranks: int) -> Launch:
    (lanes, num_warps), sizes = lanes_of(options.n_ids), sizes_of(options, shard, has_labels)
    return Launch(ids_outputs_kernel, (sizes, n_ranks), lanes, num_warps=num_warps)


@cache_launches
def _gradient(rows: Rows, options: Any, shard: VocabShard, has_labels: bool, grad_stride: int, n_ranks: int) -> Launch:
    (lanes, num_warps), sizes = lanes_of(options.n_ids), sizes_of(options, shard, has_labels)
    values = (RowLayout(*rows.layout), sizes, grad_stride, n_ranks, options.softmax)
    return Launch(ids_gradient_kernel, values, lanes, num_warps=num_warps)


@cache_launches
def _write(rows: Rows, n_ids: int) -> Launch:
    lanes, num_warps = lanes_of(n_ids)
    return Launch(write_columns_kernel, (RowLayout(*rows.layout), n_ids), lanes, num_warps=num_warps)
