"""Cross-entropy with probability targets: statistics, losses and gradient of ``losses.targets``.

    loss = T' * log(sum_exp) - target_shifted + z_loss * lse^2
    dz_i = p_i * (T' + 2 * z_loss * lse) - t'_i

The statistics kernel reads both shards once. The gradient kernel reads both and writes one, over the logits or
elsewhere. One program does one row. Regime: bound by memory, five passes over a shard in all; 1 K to 256 K columns.
"""

import triton
import triton.language as tl
from torch import Tensor

from vocab_parallel_ce.kernels import primitives as ops
from vocab_parallel_ce.kernels.launch import Dtypes, Launch, cache_launches, dtypes_of
from vocab_parallel_ce.kernels.loss import LOSS_ROWS
from vocab_parallel_ce.kernels.pairs import (
    PairRows,
    Sizes,
    clear_columns,
    locate_pair,
    loss_factor,
    pair_arguments,
    pair_edges,
    pair_launch,
)
from vocab_parallel_ce.losses.targets import Targets, TargetStats
from vocab_parallel_ce.shard import VocabShard
from vocab_parallel_ce.spec import GradOutputs, LossOptions, TokenOutputs

N_STATISTICS = tl.constexpr(len(TargetStats._fields))


@triton.jit
def no_columns(LANES: tl.constexpr):
    """Return the ``TargetStats`` of lanes that have seen nothing."""
    zeros = tl.zeros([LANES], tl.float32)
    return TargetStats(tl.full([LANES], float("-inf"), tl.float32), zeros, zeros, zeros)


@triton.jit
def times(target, shifted):
    """Return ``target * shifted``, 0 for a target of 0, also in an excluded column."""
    return tl.where(target == 0, 0.0, target * shifted)


@triton.jit
def load_targets(targets, class_weight, columns, inside, vocab_size, loss_options):
    """Return ``t'`` of a tile, fp32, 0 outside. ``columns`` are those of the shard; ``class_weight`` may be None."""
    t = tl.load(targets, inside, other=0.0).to(tl.float32)
    if loss_options.smoothing is not None:
        t = tl.where(inside, (1 - loss_options.smoothing) * t + loss_options.smoothing / vocab_size, 0.0)
    if class_weight is not None:
        t *= tl.load(class_weight + columns, inside, other=0.0)
    return t


@triton.jit
def with_tile(stats, logits, t, inside, loss_options):
    """Return each lane's statistics with one more tile: logits at pointers, and ``t'``."""
    z, _ = ops.transform(tl.load(logits, inside, other=float("-inf")).to(tl.float32), loss_options)
    row_max = tl.maximum(stats.row_max, tl.max(z, axis=1))
    shift = ops.finite_or_zero(row_max)
    raised = ops.raised_by(stats.row_max, shift)
    tile_sum = tl.sum(ops.exp_shifted(z, shift[:, None]), axis=1)
    sum_exp = stats.sum_exp * ops.exp_shifted(stats.row_max, shift) + tile_sum
    target_shifted = stats.target_shifted + times(stats.target_sum, raised)
    target_shifted += tl.sum(times(t, z - shift[:, None]), axis=1)
    # Subtracted: Triton 3.7 fails to compile a sum over tiles that is used more than once.
    return TargetStats(row_max, sum_exp, stats.target_sum - tl.sum(-t, axis=1), target_shifted)


@triton.jit
def merged(stats):
    """Merge statistics over axis 0: lanes, or ranks in their order."""
    row_max = tl.max(stats.row_max, axis=0)
    shift = ops.finite_or_zero(row_max)
    raised = ops.raised_by(stats.row_max, shift)
    return TargetStats(
        row_max,
        tl.sum(stats.sum_exp * ops.exp_shifted(stats.row_max, shift), axis=0),
        tl.sum(stats.target_sum, axis=0),
        tl.sum(stats.target_shifted + times(stats.target_sum, raised), axis=0),
    )


@triton.jit
def merged_ranks(pointers, mask):
    """Merge the packed statistics at ``pointers`` over axis 0; ranks that ``mask`` excludes count as no columns."""
    row_max = tl.load(pointers, mask, other=float("-inf"))
    sum_exp = tl.load(pointers + 1, mask, other=0.0)
    target_sum = tl.load(pointers + 2, mask, other=0.0)
    return merged(TargetStats(row_max, sum_exp, target_sum, tl.load(pointers + 3, mask, other=0.0)))


@triton.jit
def target_loss(stats, divisor, loss_options):
    """Return the loss, as ``TargetLoss.output``, for one row or a vector of rows; ``divisor`` divides it."""
    log_sum = tl.log(stats.sum_exp)
    value = stats.target_sum * log_sum - stats.target_shifted
    if loss_options.z_loss is not None:
        lse = stats.row_max + log_sum
        value += loss_options.z_loss * lse * lse
    if divisor is not None:
        value = ops.weighted(value, ops.divisor_weight(divisor))
    return value


@triton.jit(do_not_specialize=["n_rows", "stats_start"])
def target_statistics_kernel(
    logits,  # [N, C] bf16|fp16|fp32
    targets,  # [N, C] bf16|fp16|fp32|fp64
    stats,  # [R, N, K] fp32, out: this rank's rows
    loss,  # [N] fp32, out; None if there are other ranks
    divisor,  # [1] of loss, integer or floating point, or None: 1
    class_weight,  # [n_columns] fp32, or None: all 1
    layout,  # RowLayout of logits
    target_layout,
    n_columns,  # that are not padding
    vocab_size,
    loss_options,  # option_arguments
    n_rows,
    stats_start,  # this rank's first row in stats
    HAS_EDGES: tl.constexpr,
    ALIKE: tl.constexpr,
    LANES: tl.constexpr,
    VECTOR: tl.constexpr,
):
    """Example: ``x = [1, 3, 2]``, ``t = [0, 0.5, 0.5]`` gives ``(3, 1.5032, 1, -0.5)``; loss 0.9076."""
    row = tl.program_id(0).to(tl.int64)
    pair = locate_pair(row, layout, target_layout, n_columns, ALIKE, VECTOR)
    lane_columns = ops.tile_columns(LANES, VECTOR)
    lanes = no_columns(LANES)
    for tile in range(0, pair.width, LANES * VECTOR):
        columns = tile + lane_columns
        inside = columns < pair.width
        at = columns + (pair.first - pair.begin) if HAS_EDGES else columns  # the compiler sees that these are aligned
        t = load_targets(targets + pair.other_first + columns, class_weight, at, inside, vocab_size, loss_options)
        lanes = with_tile(lanes, logits + pair.first + columns, t, inside, loss_options)
    if HAS_EDGES:
        offset, inside = pair_edges(pair, lane_columns, n_columns)
        beside, at = targets + offset + pair.other_shift, offset - pair.begin
        t = load_targets(beside, class_weight, at, inside, vocab_size, loss_options)
        lanes = with_tile(lanes, logits + offset, t, inside, loss_options)
    found = merged(lanes)
    pointer = stats + (stats_start + row) * N_STATISTICS
    tl.store(pointer, found.row_max)
    tl.store(pointer + 1, found.sum_exp)
    tl.store(pointer + 2, found.target_sum)
    tl.store(pointer + 3, found.target_shifted)
    if loss is not None:
        tl.store(loss + row, target_loss(found, divisor, loss_options))


@triton.jit(do_not_specialize=["n_rows"])
def target_loss_kernel(
    stats,  # [R, N, K] fp32
    divisor,  # [1], or None: 1
    loss,  # [N] fp32, out
    n_ranks,
    loss_options,  # option_arguments
    n_rows,
    RANKS: tl.constexpr,  # n_ranks rounded up to a power of two
    ROWS: tl.constexpr,
):
    """Example: ranks with ``(3, 1.1353, 0.5, 0)`` and ``(2, 1, 0.5, 0)``: loss 0.9076."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = rows < n_rows
    ranks = tl.arange(0, RANKS)[:, None]
    pointers = stats + (ranks.to(tl.int64) * n_rows + rows[None, :]) * N_STATISTICS
    found = merged_ranks(pointers, (ranks < n_ranks) & inside[None, :])
    tl.store(loss + rows, target_loss(found, divisor, loss_options), inside)


@triton.jit
def write_tile(logits, t, grad_logits, inside, live, row_max, factor, weight, loss_options):
    """Store the gradient of a tile, 0 if the row is not ``live``: logits at pointers, and ``t'``.

    ``factor`` times the exponentials is ``p_i * (T' + 2 * z_loss * lse)``.
    """
    z, slope = ops.transform(tl.load(logits, inside & live, other=float("-inf")).to(tl.float32), loss_options)
    grad = (ops.exp_shifted(z, row_max) * factor - tl.where(z == float("-inf"), 0.0, t)) * weight
    if loss_options.softcap is not None or loss_options.logit_scale is not None:
        grad *= slope
    grad = tl.where(live, grad, 0.0)
    tl.store(grad_logits, grad.to(grad_logits.dtype.element_ty), inside)


@triton.jit(do_not_specialize=["n_rows"])
def target_gradient_kernel(
    logits,  # [N, C] bf16|fp16|fp32
    targets,  # [N, C] bf16|fp16|fp32|fp64
    stats,  # [R, N, K] fp32
    divisor,  # [1], or None: 1
    class_weight,  # [sizes.n_valid] fp32, or None: all 1
    grad_output,  # [N] fp32
    grad_logits,  # [N, C] logits' dtype, out; may be logits
    layout,  # RowLayout of logits and of grad_logits
    target_layout,
    grad_stride,  # of grad_output
    sizes,  # Sizes
    n_ranks,
    loss_options,  # option_arguments
    n_rows,
    RANKS: tl.constexpr,  # n_ranks rounded up to a power of two
    HAS_EDGES: tl.constexpr,
    ALIKE: tl.constexpr,
    LANES: tl.constexpr,
    VECTOR: tl.constexpr,
):
    """Example: ``x = [1, 3, 2]``, ``t = [0, 0.5, 0.5]``: ``[0.0900, 0.1652, -0.2553]``."""
    # Last rows first: the statistics kernel has just left them in the L2 cache.
    row = (n_rows - 1 - tl.program_id(0)).to(tl.int64)
    ranks = tl.arange(0, RANKS)
    found = merged_ranks(stats + (ranks.to(tl.int64) * n_rows + row) * N_STATISTICS, ranks < n_ranks)
    weight = tl.load(grad_output + row * grad_stride)
    live = row >= 0
    if divisor is not None:
        share = ops.divisor_weight(divisor)
        weight *= share
        live &= share != 0
    factor = found.target_sum
    if loss_options.z_loss is not None:
        factor += 2 * loss_options.z_loss * (found.row_max + tl.log(found.sum_exp))
    factor /= found.sum_exp
    pair = locate_pair(row, layout, target_layout, sizes.n_valid, ALIKE, VECTOR)
    lane_columns = ops.tile_columns(LANES, VECTOR)
    for tile in range(0, pair.width, LANES * VECTOR):
        columns = tile + lane_columns
        offset, inside = pair.first + columns, columns < pair.width
        at = columns + (pair.first - pair.begin) if HAS_EDGES else columns
        beside, is_read = targets + pair.other_first + columns, inside & live
        t = load_targets(beside, class_weight, at, is_read, sizes.vocab_size, loss_options)
        write_tile(logits + offset, t, grad_logits + offset, inside, live, found.row_max, factor, weight, loss_options)
    if HAS_EDGES:
        offset, inside = pair_edges(pair, lane_columns, sizes.n_valid)
        beside, is_read = targets + offset + pair.other_shift, inside & live
        t = load_targets(beside, class_weight, offset - pair.begin, is_read, sizes.vocab_size, loss_options)
        write_tile(logits + offset, t, grad_logits + offset, inside, live, found.row_max, factor, weight, loss_options)
    clear_columns(grad_logits, pair.begin, sizes.n_valid, sizes.n_columns, LANES)


def statistics(
    logits: Tensor,
    beside: Targets,
    stats: tuple[Tensor],
    rank: int,
    count: None = None,
    outputs: TokenOutputs | None = None,
    divisor: Tensor | None = None,
    *,
    shard: VocabShard,
    options: LossOptions,
) -> None:
    """Fill ``stats[0][rank]`` of ``stats[0] [R, N, K]``, and ``outputs`` if given: then the rank is the only one."""
    n_rows = stats[0].shape[1]
    base, target_base, rows = pair_arguments(logits, beside.probs)
    tensors = (base, target_base, stats[0], None if outputs is None else outputs.loss, divisor, beside.class_weight)
    _statistics(dtypes_of(tensors), rows, shard, options)(n_rows, tensors, (n_rows, rank * n_rows))


def outputs(
    stats: tuple[Tensor],
    beside: Targets,
    divisor: Tensor | None,
    outputs: TokenOutputs,
    *,
    shard: VocabShard,
    options: LossOptions,
) -> None:
    """Fill ``outputs``, contiguous, from ``stats[0] [R, N, K]``; ``divisor [1]`` divides the loss if given."""
    n_ranks, n_rows, _ = stats[0].shape
    tensors = (stats[0], divisor, outputs.loss)
    launch = _losses(dtypes_of(tensors), n_ranks, options)
    launch(-(-n_rows // LOSS_ROWS), tensors, (n_rows,))


def gradient(
    logits: Tensor,
    beside: Targets,
    stats: tuple[Tensor],
    divisor: Tensor | None,
    grads: GradOutputs,
    loss: None,
    grad_logits: Tensor,
    *,
    shard: VocabShard,
    options: LossOptions,
) -> None:
    """Fill ``grad_logits``, laid out as ``logits [..., C]`` or the same; ``grads.loss [N]`` multiplies it per row."""
    n_ranks, n_rows, _ = stats[0].shape
    base, target_base, rows = pair_arguments(logits, beside.probs)
    grad_base = base
    if grad_logits is not logits:
        grad_base, _, grad_rows = pair_arguments(grad_logits, beside.probs)
        assert rows == grad_rows, "the gradient is laid out as the logits are"
    grad_output = loss_factor(grads, stats)
    tensors = (base, target_base, stats[0], divisor, beside.class_weight, grad_output, grad_base)
    launch = _gradient(dtypes_of(tensors), rows, grad_output.stride(0), n_ranks, shard, options)
    launch(n_rows, tensors, (n_rows,))


@cache_launches
def _statistics(dtypes: Dtypes, rows: PairRows, shard: VocabShard, options: LossOptions) -> Launch:
    values = (shard.n_valid, shard.vocab_size, options)
    return pair_launch(target_statistics_kernel, rows, values, shard, dtypes[0].itemsize)


@cache_launches
def _losses(dtypes: Dtypes, n_ranks: int, options: LossOptions) -> Launch:
    constants = {"RANKS": triton.next_power_of_2(n_ranks), "ROWS": LOSS_ROWS}
    return Launch(target_loss_kernel, (n_ranks, options), constants, num_warps=4)


@cache_launches
def _gradient(
    dtypes: Dtypes, rows: PairRows, grad_stride: int, n_ranks: int, shard: VocabShard, options: LossOptions
) -> Launch:
    values = (grad_stride, Sizes.of(shard), n_ranks, options)
    return pair_launch(
        target_gradient_kernel, rows, values, shard, dtypes[0].itemsize, RANKS=triton.next_power_of_2(n_ranks)
    )
