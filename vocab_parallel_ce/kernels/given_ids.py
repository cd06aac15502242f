"""k given ids of each row: their statistics, log-probabilities and gradients, around the kernels of cross-entropy.

    statistics   this rank's logits at the ids, and the label of cross-entropy's statistics: the best of them
    outputs      merge the ranks, and write the log-probabilities at the ids
    gradient     merge the ranks, and write what cross-entropy's gradient takes, and the gradients of the k columns
    write        put these into the columns, over what cross-entropy's gradient has written

The mathematics is that of ``losses.given_ids``. One program per row, a lane per id.
Regime: a few microseconds beside one pass over the shard; k up to some hundreds, since every id is compared with all.
"""

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
from vocab_parallel_ce.kernels.launch import Launch, Rows, cache_launches, row_arguments
from vocab_parallel_ce.losses.given_ids import GivenIds, Ids, IdsOptions
from vocab_parallel_ce.program import make
from vocab_parallel_ce.shard import VocabShard


@triton.jit(do_not_specialize=["n_rows", "shard_start", "stats_start"])
def ids_statistics_kernel(
    logits,  # [N, C] bf16|fp16|fp32
    ids,  # [N, k] int64|int32
    temperature,  # [N] fp32, or None: 1
    stats,  # [R, N, 3 + k] fp32, out: the last k of this rank's rows
    label,  # [N] int64, out: the best of this rank's given ids
    layout,  # RowLayout of logits
    sizes,  # IdsSizes
    loss_options,  # option_arguments
    n_rows,
    shard_start,
    stats_start,  # this rank's first row in stats
    LANES: tl.constexpr,  # k rounded up to a power of two
):
    """Example: ``x = [1, 3, 2]``, ids ``[0, 1]``: z ``[1, 3]``, label 1."""
    row, lane = tl.program_id(0).to(tl.int64), tl.arange(0, LANES)
    at = given_columns(ids, row, lane, sizes, shard_start)
    t = ops.row_temperature(temperature, row, True)
    z, _ = load_given(logits, ops.row_begin(row, layout), at.column, at.owned, loss_options, t)
    tl.store(stats + (stats_start + row) * (3 + sizes.k) + 3 + lane, z, lane < sizes.k)
    is_dead = tl.min(at.left_out.to(tl.int32)) == 1
    best = best_column(z, at, lane).to(tl.int64) + shard_start
    tl.store(label + row, tl.where(is_dead, loss_options.ignore_index, best))


@triton.jit(do_not_specialize=["n_rows", "shard_start"])
def ids_outputs_kernel(
    stats,  # [R, N, 3 + k] fp32
    ids,  # [N, k] int64|int32
    log_probs,  # [N, k] fp32, out
    sizes,  # IdsSizes
    n_ranks,
    n_rows,
    shard_start,
    LANES: tl.constexpr,
):
    """Example: statistics ``(3, 0.5032, 3, 1, 3)`` of ``x = [1, 3, 2]``, ids ``[0, 1]``: ``[-2.4076, -0.4076]``."""
    row, lane = tl.program_id(0).to(tl.int64), tl.arange(0, LANES)
    at = given_columns(ids, row, lane, sizes, shard_start)
    known = merged_ids(stats, row, lane, sizes, n_ranks, n_rows)
    tl.store(log_probs + row * sizes.k + lane, log_probs_at(known, at), lane < sizes.k)


@triton.jit(do_not_specialize=["n_rows", "shard_start"])
def ids_gradient_kernel(
    logits,  # [N, C] bf16|fp16|fp32
    ids,  # [N, k] int64|int32
    temperature,  # [N] fp32, or None: 1
    stats,  # [R, N, 3 + k] fp32
    grads,  # [N, k] fp32
    columns,  # [N, k] int32, out: of this rank, -1 for another's
    values,  # [N, k] fp32, out: the gradients of these columns
    merged,  # [1, N, 3] fp32, out: cross-entropy's statistics of the whole vocabulary
    weight,  # [N] fp32, out: what multiplies the softmax elsewhere
    label,  # [N] int64, out: a column that is written again, or another rank's
    layout,  # RowLayout of logits
    sizes,  # IdsSizes
    n_ranks,
    loss_options,  # option_arguments
    n_rows,
    shard_start,
    LANES: tl.constexpr,
):
    """Example: ``x = [1, 3, 2]``, ids ``[0, 1]``, grads ``[1, 0]``: values ``[0.9100, -0.6652]``, weight -1."""
    row, lane = tl.program_id(0).to(tl.int64), tl.arange(0, LANES)
    at = given_columns(ids, row, lane, sizes, shard_start)
    known = merged_ids(stats, row, lane, sizes, n_ranks, n_rows)
    t = ops.row_temperature(temperature, row, True)
    z, slope = load_given(logits, ops.row_begin(row, layout), at.column, at.owned, loss_options, t)
    grad = tl.load(grads + row * sizes.k + lane, at.left_out == 0, other=0.0)
    is_dead = tl.min(at.left_out.to(tl.int32)) == 1
    best, sum_exp = best_column(z, at, lane), known.others + known.best_term
    total = tl.where(tl.sum(at.outside.to(tl.int32)) > 0, float("nan"), tl.sum(grad))
    other_total = tl.sum(tl.where(at.column == best, 0.0, grad))
    shifted = z - tl.where(tl.abs(known.row_max) == float("inf"), float("nan"), known.row_max)  # such a row is NaN
    s = ops.exp_shifted(shifted, 0.0) / sum_exp
    # Equal ids have the sum of their gradients, in the order of the ids.
    inside_row, first = lane < sizes.k, row * sizes.k
    tl.store(columns + first + lane, at.column, inside_row)
    tl.store(values + first + lane, grad, inside_row)
    tl.debug_barrier()
    equal_sum = tl.zeros([LANES], tl.float32)
    for i in range(sizes.k):
        is_equal = at.column == tl.load(columns + first + i)
        equal_sum += tl.where(is_equal, tl.load(values + first + i), 0.0)
    tl.debug_barrier()
    value = equal_sum - s * total
    # Of a confident id, 1 - s and the sum of the other gradients: the digits that s and the total round away.
    value = tl.where(s > 0.5, known.others / sum_exp * total - other_total, value)
    value = tl.where((shifted == float("-inf")) | is_dead, 0.0, value * slope)
    tl.store(values + first + lane, value, inside_row)
    tl.store(merged + 3 * row, known.row_max)
    tl.store(merged + 3 * row + 1, sum_exp)
    tl.store(merged + 3 * row + 2, float("-inf"))
    tl.store(weight + row, -total)
    last = tl.max(at.column).to(tl.int64)
    elsewhere = (shard_start + sizes.n_valid).to(tl.int64) % sizes.vocab_size
    last = tl.where(last < 0, elsewhere, shard_start + last)
    tl.store(label + row, tl.where(is_dead, loss_options.ignore_index, last))


@triton.jit(do_not_specialize=["n_rows"])
def write_columns_kernel(
    columns,  # [N, k] int32, -1 for none
    values,  # [N, k] fp32; equal columns have equal values
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


class KernelIds(GivenIds):
    """The launchers of these kernels."""

    def best_ids(self, logits: Tensor, targets: Ids, stats: Tensor, rank: int) -> tuple[Tensor, tuple[Tensor], int]:
        n_rows, (ids, temperature) = stats.shape[1], targets
        label = make(ids, n_rows, dtype=torch.int64)
        base, rows = row_arguments(logits)
        launch = _statistics(rows, self.options, self.shard)
        launch(n_rows, (base, ids, temperature, stats, label), (n_rows, self.shard.start, rank * n_rows))
        return label, (stats,), rank

    def log_probs(self, stats: Tensor, targets: Ids, values: Tensor) -> None:
        n_ranks, n_rows, _ = stats.shape
        launch = _outputs(self.options, self.shard, n_ranks)
        launch(n_rows, (stats, targets.ids, values), (n_rows, self.shard.start))

    def column_gradients(self, logits: Tensor, targets: Ids, stats: Tensor, grads: Tensor) -> tuple[Tensor, ...]:
        (n_ranks, n_rows, _), n_ids, (ids, temperature) = stats.shape, self.options.n_ids, targets
        new = partial(make, stats, dtype=torch.float32)
        columns, values = new(n_rows, n_ids, dtype=torch.int32), new(n_rows, n_ids)
        merged, weight, label = new(1, n_rows, 3), new(n_rows), new(n_rows, dtype=torch.int64)
        base, rows = row_arguments(logits)
        launch = _gradient(rows, self.options, self.shard, n_ranks)
        tensors = (base, ids, temperature, stats, grads.contiguous())
        launch(n_rows, (*tensors, columns, values, merged, weight, label), (n_rows, self.shard.start))
        return columns, values, merged, weight, label

    def write_columns(self, columns: Tensor, values: Tensor, grad_logits: Tensor) -> None:
        n_rows, n_ids = columns.shape
        base, rows = row_arguments(grad_logits)
        _write(rows, n_ids)(n_rows, (columns, values, base), (n_rows,))


def _launch(kernel: Any, n_ids: int, *values: Any) -> Launch:
    """Return the Launch of a kernel with a lane for each id."""
    lanes = triton.next_power_of_2(n_ids)
    return Launch(kernel, values, {"LANES": lanes}, num_warps=min(max(lanes // 64, 1), 8))


@cache_launches
def _statistics(rows: Rows, options: IdsOptions, shard: VocabShard) -> Launch:
    values = rows.layout, IdsSizes.of(options, shard), options.softmax
    return _launch(ids_statistics_kernel, options.n_ids, *values)


@cache_launches
def _outputs(options: IdsOptions, shard: VocabShard, n_ranks: int) -> Launch:
    return _launch(ids_outputs_kernel, options.n_ids, IdsSizes.of(options, shard), n_ranks)


@cache_launches
def _gradient(rows: Rows, options: IdsOptions, shard: VocabShard, n_ranks: int) -> Launch:
    values = rows.layout, IdsSizes.of(options, shard), n_ranks, options.softmax
    return _launch(ids_gradient_kernel, options.n_ids, *values)


@cache_launches
def _write(rows: Rows, n_ids: int) -> Launch:
    return _launch(write_columns_kernel, n_ids, rows.layout, n_ids)
