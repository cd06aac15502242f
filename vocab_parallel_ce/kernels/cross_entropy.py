"""Outputs and gradient from the gathered statistics of all ranks, and a stored gradient times ``grad_output``.

    dx_i = (dloss/dz_i * grad_loss / divisor + the sum of dO/dz_i * grad_O of each other output O) * dz_i/dx_i
    p_y - 1 = -others_sum / sum_exp

``spec`` has the loss and the derivatives.

Outputs: one program does 128 rows; with up to 1024 rows, one program does all and also writes the sum of the losses. It
reads 4 K R bytes per row and writes 4 bytes per output (predictions 8). It does not read the logits.

Gradient: each program merges the R statistics of a row, and writes the gradient of all or some of its tiles, over the
logits or elsewhere. Regime: bound by memory; it reads the shard once and writes it once. ``grad_loss`` and the divisor
are one fp32 factor per row, so the gradient is rounded once. Padded columns become 0, whatever they hold.

A stored gradient: a fixed number of programs walks the rows. The factor is read on the device, and a row with factor 1
is left alone. So the usual ``loss.backward()`` of a reduced loss costs one short launch. Otherwise the shard is read
once and written once, and the gradient is rounded a second time.
"""

from collections.abc import Callable

import triton
import triton.language as tl
from torch import Tensor

from vocab_parallel_ce.blocks import (
    READ_AND_WRITE,
    READ_AND_WRITE_EDGES,
    WRITE_SMALL_TILES,
    WRITE_TILES,
    Block,
    Table,
    choose_block,
    gradient_shape,
)
from vocab_parallel_ce.kernels import primitives as ops
from vocab_parallel_ce.kernels.labels import GradientRow, merge_ranks, row_factors, store_outputs, tile_gradient
from vocab_parallel_ce.kernels.launch import (
    Launch,
    Rows,
    cache_launches,
    row_arguments,
    walk_launch,
)
from vocab_parallel_ce.kernels.walk import Sizes, clear_padding, column_of, locate, write
from vocab_parallel_ce.losses.labels import Labels
from vocab_parallel_ce.reference import sum_losses
from vocab_parallel_ce.shard import VocabShard
from vocab_parallel_ce.spec import GradOutputs, LossOptions, TokenOutputs

LOSS_ROWS, SUMMED_ROWS = 128, 1024  # of a program of the outputs; of its only one
PROGRAMS = 512  # that scale a stored gradient: fills a GPU, and starts and ends in 2 us


@triton.jit(do_not_specialize=["n_rows"])
def loss_kernel(
    labels,  # [N] int64|int32
    stats,  # [R, N, K] fp32
    divisor,  # [1] integer or floating point, or None: 1
    loss,  # [N] fp32, out
    entropy,  # [N] fp32, out, or None
    lse,  # [N] fp32, out, or None
    sum_sq_probs,  # [N] fp32, out, or None
    mean_logit,  # [N] fp32, out, or None
    predictions,  # [N] int64, out, or None
    total,  # [] fp32, out: the sum of the losses of a single program; or None
    vocab_size,
    loss_options,  # option_arguments
    n_rows,
    RANKS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Example: two ranks with ``(3, 0.5032, 3)`` and ``(2, 1, -inf)``, label on the first: loss 0.6265."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = rows < n_rows
    label = tl.load(labels + rows, inside, other=0).to(tl.int64)
    merged = merge_ranks(stats, rows, inside, n_rows, loss_options, RANKS)
    outputs = TokenOutputs(loss, entropy, lse, sum_sq_probs, mean_logit, predictions)
    weight = 1.0
    if divisor is not None:
        weight = ops.divisor_weight(divisor, loss_options.class_weight)
    losses = store_outputs(outputs, rows, inside, merged, label, weight, vocab_size, loss_options)
    if total is not None:
        tl.store(total, tl.sum(tl.where(inside, losses, 0.0)))


def token_outputs(shard: VocabShard, options: LossOptions) -> Callable[..., None]:
    """Return the launcher of the outputs."""
    launch_of = cache_launches(lambda block, n_ranks: _outputs(block, n_ranks, shard.vocab_size, options))

    def fill(
        stats: tuple[Tensor],
        targets: Labels,
        divisor: Tensor | None,
        outputs: TokenOutputs,
        total: Tensor | None = None,
    ) -> None:
        """Fill ``outputs``, contiguous, from ``stats[0] [R, N, K]``; ``divisor [1]`` divides the loss if given.

        ``total []``, if given, gets the sum of the losses: of up to SUMMED_ROWS rows in the same launch.
        """
        n_ranks, n_rows, _ = stats[0].shape
        in_launch = total if 0 < n_rows <= SUMMED_ROWS else None
        # The next power of two; triton.next_power_of_2 takes 3 us.
        block = LOSS_ROWS if in_launch is None else max(LOSS_ROWS, 1 << (n_rows - 1).bit_length())
        tensors = (targets.labels, stats[0], divisor, *outputs, in_launch)
        launch_of(block, n_ranks)(-(-n_rows // block), tensors, (n_rows,))
        if total is not None and in_launch is None:
            sum_losses(outputs.loss, total)

    return fill


@cache_launches
def _outputs(block: int, n_ranks: int, vocab_size: int, options: LossOptions) -> Launch:
    constants = {"RANKS": n_ranks, "ROWS": block}
    return Launch(loss_kernel, (vocab_size, options), constants, num_warps=block // 32)


@triton.jit(do_not_specialize=["shard_start", "n_rows", "n_programs"])
def cross_entropy_kernel(
    logits,  # [N, C] bf16|fp16|fp32
    labels,  # [N] int64|int32
    temperature,  # [N] fp32, or None: 1
    threshold,  # [N] fp32, smaller logits are excluded; or None
    stats,  # [R, N, K] fp32
    divisor,  # [1] integer or floating point, or None: 1
    grad_loss,  # [N] fp32, or None: 1
    grad_entropy,  # [N] fp32, or None: 0
    grad_lse,  # [N] fp32, or None: 0
    grad_sum_sq_probs,  # [N] fp32, or None: 0
    grad_mean_logit,  # [N] fp32, or None: 0
    grad_logits,  # [N, C] logits' dtype, out; may be logits; or of 16 bits and of fp32 logits
    class_weight,  # [sizes.n_valid] fp32, or None: all equal, or no smoothing
    layout,  # RowLayout of logits and of grad_logits
    grad_strides,  # GradOutputs of numbers or None
    sizes,  # Sizes
    loss_options,  # option_arguments
    n_rows,
    shard_start,
    n_programs,  # of a row; each writes every n_programs-th tile
    RANKS: tl.constexpr,
    IS_CUT: tl.constexpr,  # whether n_programs is not 1
    HAS_EDGES: tl.constexpr,
    LANES: tl.constexpr,
    VECTOR: tl.constexpr,
):
    """Example: ``x = [1, 3, 2]``, label 1: ``[0.0900, -0.3348, 0.2447]``."""
    row, begin_tile, step = ops.tiles_of_program(n_rows, n_programs, IS_CUT, LANES * VECTOR)
    label = tl.load(labels + row).to(tl.int64)
    live = label != loss_options.ignore_index
    if temperature is not None:
        t = ops.row_temperature(temperature, row, live)
        loss_options = LossOptions(*loss_options[:-2], t, loss_options[-1])  # type: ignore[call-arg]
    if threshold is not None:
        loss_options = LossOptions(*loss_options[:-1], ops.row_least(threshold, row, live))  # type: ignore[call-arg]
    merged = merge_ranks(stats, row, None, n_rows, loss_options, RANKS)
    weight = 1.0
    if divisor is not None:
        weight = ops.divisor_weight(divisor, loss_options.class_weight)
        if (grad_entropy is None and grad_lse is None) and (grad_sum_sq_probs is None and grad_mean_logit is None):
            live &= weight != 0  # it divides the loss alone
    grads = GradOutputs(grad_loss, grad_entropy, grad_lse, grad_sum_sq_probs, grad_mean_logit)
    factors = row_factors(merged, label, live, weight, grads, grad_strides, row, sizes.vocab_size, loss_options)
    # A label in an excluded column is no column's target.
    label = tl.where(merged.target_logit == float("-inf"), -1, label)
    target = column_of(label, shard_start, sizes.n_valid)
    place = locate(row, layout, None, sizes.n_valid, False, VECTOR)
    of_row = GradientRow(logits, class_weight, target, grads, loss_options)
    write(place, factors, of_row, grad_logits, live, begin_tile, step, tile_gradient, HAS_EDGES, LANES, VECTOR)
    clear_padding(grad_logits, place, sizes, begin_tile, LANES)


def cross_entropy(shard: VocabShard, options: LossOptions) -> Callable[..., None]:
    """Return the launcher of the gradient."""

    @cache_launches
    def launch_of(
        rows: Rows, n_rows: int, size: int, strides: tuple[int | None, ...], n_ranks: int, has_row_options: bool
    ) -> tuple[Launch, int]:
        table, tiles = _table(n_ranks, options, has_row_options, shard)
        block, n_programs = gradient_shape(n_rows, shard, size, table, tiles)
        return _gradient(rows, block, n_programs > 1, strides, n_ranks, shard, options), n_programs

    def gradient(
        logits: Tensor,
        targets: Labels,
        stats: tuple[Tensor],
        divisor: Tensor | None,
        grads: GradOutputs,
        grad_logits: Tensor,
    ) -> None:
        """Fill ``grad_logits``, which has the layout of ``logits [..., C]`` or is it.

        Each of ``grads``, fp32 ``[N]`` of any stride, multiplies the gradient of its output per row. None is 1 for the
        loss, and 0 for the others. A gradient of another dtype is of fp32 logits and 16 bits.
        """
        labels, class_weight, temperature, threshold = targets
        n_ranks, n_rows, _ = stats[0].shape
        base, rows = row_arguments(logits)
        grad_base = base
        if grad_logits is not logits:
            grad_base, grad_rows = row_arguments(grad_logits)
            assert rows[0] == grad_rows[0], "the gradient is laid out as the logits are"
            rows = grad_rows  # the smaller elements have the longer lines
        smoothing_weight = class_weight if options.smoothing else None
        tensors = (base, labels, temperature, threshold, stats[0], divisor, *grads, grad_base, smoothing_weight)
        strides = tuple([None if grad is None else grad.stride(0) for grad in grads])
        has_row_options = temperature is not None or threshold is not None
        launch, n_programs = launch_of(rows, n_rows, grad_logits.dtype.itemsize, strides, n_ranks, has_row_options)
        launch(n_rows * n_programs, tensors, (n_rows, shard.start, n_programs))

    return gradient


def _table(n_ranks: int, options: LossOptions, has_row_options: bool, shard: VocabShard) -> tuple[Table, int]:
    """Return the table of blocks, and the tiles of a program. No bit depends on them.

    By measurement (docs/measurements.md). Each program merges its row's statistics first: the longer that takes, the
    more tiles should share it. ``has_row_options``: rows have a temperature or a threshold, which need registers.
    Padded rows were timed with small tiles alone.
    """
    has_sums = options.entropy or options.sum_sq_probs or options.smoothing or options.mean_logit
    if options.softcap is not None or (has_sums and n_ranks > 1):
        return WRITE_SMALL_TILES, 4
    if has_sums or has_row_options or shard.n_valid < shard.n_columns or n_ranks > 1:
        return WRITE_SMALL_TILES, 2
    return WRITE_TILES, 1


@cache_launches
def _gradient(
    rows: Rows,
    block: Block,
    is_cut: bool,
    strides: tuple[int | None, ...],
    n_ranks: int,
    shard: VocabShard,
    options: LossOptions,
) -> Launch:
    layout, has_edges = rows[0], block.has_edges(shard, rows[1])
    sums, compiler = (options.entropy, options.sum_sq_probs, options.smoothing, options.mean_logit), {}
    if sum(map(bool, sums)) > 1 or (options.softcap is not None and has_edges):
        # Without the bound, ptxas takes fewer, and loads a thread's second vector when it has used the first.
        compiler = {"maxnreg": 64}
    values, constants = (GradOutputs(*strides), Sizes.of(shard), options), {"RANKS": n_ranks, "IS_CUT": is_cut}
    return walk_launch(cross_entropy_kernel, (layout, has_edges), values, block, compiler, **constants)


@triton.jit
def scaled(factor, tile, grad_logits):
    """Return a tile times ``factor``, 0 where it is 0: an ignored row stays 0 under an infinite factor."""
    grad = tl.load(grad_logits + tile.first + tile.at, tile.inside).to(tl.float32)
    return tl.where(grad == 0, 0.0, grad * factor)


@triton.jit(do_not_specialize=["n_rows"])
def element_mul_kernel(
    grad_logits,  # [N, C] bf16|fp16|fp32, in and out
    grad_output,  # [N] fp32
    layout,  # RowLayout of grad_logits
    grad_output_stride,  # 0: one factor for all rows
    n_columns,
    n_rows,
    HAS_EDGES: tl.constexpr,
    LANES: tl.constexpr,
    VECTOR: tl.constexpr,
):
    """Example: ``[1, 2, 3]`` with grad_output 0.5 becomes ``[0.5, 1, 1.5]``."""
    row = tl.program_id(0).to(tl.int64)
    if grad_output_stride == 0:
        if tl.load(grad_output).to(tl.float32) == 1.0:
            n_rows *= 0
    while row < n_rows:
        factor = tl.load(grad_output + row * grad_output_stride).to(tl.float32)
        if factor != 1.0:
            place = locate(row, layout, None, n_columns, False, VECTOR)
            step: tl.constexpr = LANES * VECTOR
            write(place, factor, grad_logits, grad_logits, None, 0, step, scaled, HAS_EDGES, LANES, VECTOR)
        row += tl.num_programs(0)


def element_mul(grad_logits: Tensor, grad_output: Tensor) -> None:
    """Multiply, and overwrite, row r of ``grad_logits [..., C]`` by ``grad_output [N]``, of any stride."""
    n_rows = grad_output.shape[0]
    base, rows = row_arguments(grad_logits)
    tensors = (base, grad_output)
    launch = _scaled(rows, grad_logits.shape[-1], grad_logits.element_size(), grad_output.stride(0))
    launch(min(n_rows, PROGRAMS), tensors, (n_rows,))


@cache_launches
def _scaled(rows: Rows, n_columns: int, element_size: int, stride: int) -> Launch:
    block = choose_block(READ_AND_WRITE_EDGES if rows[1] else READ_AND_WRITE, n_columns, element_size)
    values = (stride, n_columns)
    return walk_launch(element_mul_kernel, rows, values, block)
