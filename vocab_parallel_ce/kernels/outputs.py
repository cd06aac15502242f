"""Outputs and gradient of every loss from the statistics of all ranks, and a stored gradient times ``grad_output``.

    dx_i = (dloss/dz_i * grad_loss / divisor + the sum of dO/dz_i * grad_O of each other output O) * dz_i/dx_i

A loss is an ``Algebra``; ``rows`` has its statistics.

Outputs: one program does 128 rows. Of labels, with up to 1024 rows, one program does all and also writes the sum of the
losses. Of a mean, each counts all labels. It reads 4 K R bytes per row and writes 4 bytes per output (predictions 8).
It does not read the logits.

Gradient: each program merges the R statistics of a row, and writes the gradient of all or some of its tiles, over the
logits or elsewhere. Regime: bound by memory; it reads the shard once, of pairs what stands alongside too, and writes it
once. ``grad_loss`` and the divisor are one fp32 factor per row, so the gradient is rounded once. Ignored rows are not
read. Padded columns become 0, whatever they hold.

A stored gradient: a fixed number of programs walks the rows. The factor is read on the device, and a row with factor 1
is left alone. So the usual ``loss.backward()`` of a reduced loss costs one short launch. Otherwise the shard is read
once and written once, and the gradient is rounded a second time.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from vocab_parallel_ce.blocks import (
    ALL_TILES,
    CUT_ROWS,
    READ_AND_WRITE,
    READ_AND_WRITE_EDGES,
    READ_PAIRS,
    WRITE_SMALL_TILES,
    WRITE_TILES,
    Block,
    Table,
    choose_block,
    gradient_shape,
    statistics_shape,
)
from vocab_parallel_ce.kernels import primitives as ops
from vocab_parallel_ce.kernels.algebra import KernelLoss, Row, merged_ranks, summed_ranks
from vocab_parallel_ce.kernels.launch import Launch, Rows, cache_launches, row_arguments, walk_launch
from vocab_parallel_ce.kernels.walk import Sizes, clear_padding, locate, write
from vocab_parallel_ce.layout import sum_losses
from vocab_parallel_ce.losses.base import Stats
from vocab_parallel_ce.program import step
from vocab_parallel_ce.spec import GradOutputs, TokenOutputs

LOSS_ROWS, SUMMED_ROWS = 128, 1024  # of a program of the outputs; of its only one
COUNTED_ROWS = 32_768  # the most whose labels each of these programs counts: of int64 64 MiB from the L2 cache
PROGRAMS = 512  # that scale a stored gradient: fills a GPU, and starts and ends in 2 us


@triton.jit
def count_labels(labels, n_rows, ignore_index):
    """Count the labels that are not ``ignore_index``, 1024 at a time."""
    count = tl.zeros([1024], tl.int32)
    for first_row in range(0, n_rows, 1024):
        rows = first_row + tl.arange(0, 1024)
        inside = rows < n_rows
        label = ops.load_label(labels, rows, inside)
        count += (inside & (label != ignore_index)).to(tl.int32)
    return tl.sum(count)


@triton.jit(do_not_specialize=["n_rows"])
def outputs_kernel(
    stats,  # [R, N, K] fp32
    second,  # [R, N, 2] fp32, or None: no second exchange
    labels,  # [N] int64|int32, or None
    divisor,  # [1] integer or floating point, or None: 1
    valid_rows,  # [1] int32, out: number of labels that are not ignored, which divides; or None
    loss,  # [N] fp32, out, or None
    entropy,  # [N] fp32, out, or None
    lse,  # [N] fp32, out, or None
    divergence,  # [N] fp32, out, or None
    sum_sq_probs,  # [N] fp32, out, or None
    mean_logit,  # [N] fp32, out, or None
    predictions,  # [N] int64, out, or None
    total,  # [] fp32, out: the sum of the losses of a single program; or None
    sizes,  # Sizes
    loss_options,  # option_arguments, or the loss's own
    n_rows,
    LOSS: tl.constexpr,  # Algebra
    WIDTH: tl.constexpr,  # K
    RANKS: tl.constexpr,
    ROWS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Example: two ranks with ``(3, 0.5032, 3)`` and ``(2, 1, -inf)``, label on the first: loss 0.6265."""
    ops.begin(OVERLAPS)
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = rows < n_rows
    label = ops.load_label(labels, rows, inside)
    if valid_rows is not None:
        divisor = count_labels(labels, n_rows, loss_options.ignore_index)  # by each program: they are in the L2 cache
        if tl.program_id(0) == 0:
            tl.store(valid_rows, divisor)
    merged = merged_ranks(stats, rows, inside, n_rows, loss_options, LOSS, WIDTH, RANKS)
    sums = summed_ranks(second, rows, inside, n_rows, RANKS)
    outputs = TokenOutputs(loss, entropy, lse, divergence, sum_sq_probs, mean_logit, predictions)
    losses = LOSS.store_outputs(outputs, rows, inside, merged, sums, label, divisor, sizes, loss_options)
    if total is not None:
        tl.store(total, tl.sum(tl.where(inside, losses, 0.0)))


@triton.jit(do_not_specialize=["shard_start", "n_rows", "n_programs"])
def gradient_kernel(
    logits,  # [N, C] bf16|fp16|fp32
    other,  # [N, C'], what stands alongside the logits; or None
    labels,  # [N] int64|int32, or None
    temperature,  # [N] fp32, or None: 1
    threshold,  # [N] fp32, smaller logits are excluded; or None
    class_weight,  # [sizes.n_valid] fp32, or None: all 1, or labels without smoothing
    stats,  # [R, N, K] fp32
    second,  # [R, N, 2] fp32, or None: no second exchange
    divisor,  # [1] integer or floating point, or None: 1
    grad_loss,  # [N] fp32, or None: 1
    grad_entropy,  # [N] fp32, or None: 0
    grad_lse,  # [N] fp32, or None: 0
    grad_divergence,  # [N] fp32, or None: 0
    grad_logits,  # [N, C] logits' dtype, out; may be logits; or of 16 bits and of fp32 logits
    layout,  # RowLayout of logits and of grad_logits
    other_layout,
    sizes,  # Sizes
    grad_strides,  # GradOutputs of numbers or None
    loss_options,  # option_arguments, or the loss's own
    n_rows,
    shard_start,
    n_programs,  # of a row; each writes every n_programs-th tile
    LOSS: tl.constexpr,  # Algebra
    WIDTH: tl.constexpr,  # K
    RANKS: tl.constexpr,
    IS_CUT: tl.constexpr,  # whether n_programs is not 1
    SHAPE: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Example: ``x = [1, 3, 2]``, label 1: ``[0.0900, -0.3348, 0.2447]``."""
    ops.begin(OVERLAPS)
    row, begin_tile, step = ops.tiles_of_program(n_rows, n_programs, IS_CUT, SHAPE.LANES * SHAPE.VECTOR)
    label = ops.load_label(labels, row)
    live = row >= 0
    if label is not None:
        live = label != loss_options.ignore_index
    t = ops.row_temperature(temperature, row, live)
    least = ops.row_least(threshold, row, live)
    merged = merged_ranks(stats, row, None, n_rows, loss_options, LOSS, WIDTH, RANKS)
    sums = summed_ranks(second, row, None, n_rows, RANKS)
    grads = GradOutputs(grad_loss, grad_entropy, grad_lse, grad_divergence)
    factors, live, label_at = LOSS.factors(
        merged, sums, label, live, divisor, grads, grad_strides, row, shard_start, sizes, loss_options
    )
    place = locate(row, layout, other_layout, sizes.n_valid, SHAPE)
    of_row = Row(logits, other, class_weight, label_at, sizes.vocab_size, loss_options, t, least, grads)
    write(place, factors, of_row, grad_logits, live, begin_tile, step, LOSS.gradient, SHAPE)
    clear_padding(grad_logits, place, sizes, begin_tile, SHAPE.LANES)


def outputs_launcher(loss: KernelLoss) -> Callable[..., None]:
    """Return the launcher of the outputs."""
    launch_of = cache_launches(partial(_outputs, loss))

    def fill(
        stats: Stats,
        targets: Any,
        divisor: Tensor | None,
        outputs: TokenOutputs,
        total: Tensor | None = None,
        count: Tensor | None = None,
    ) -> None:
        """Fill ``outputs``, contiguous, from ``stats`` of all ranks; ``divisor [1]`` divides the loss if given.

        ``total []``, if given, gets the sum of the losses: of labels' SUMMED_ROWS rows or fewer in the same launch, for
        which ``outputs.loss`` may be None.
        ``count [1]`` int32, if given, gets the number of labels that are not ignored, and divides.
        """
        n_ranks, n_rows, width = stats[0].shape
        in_launch = total if 0 < n_rows <= SUMMED_ROWS and not loss.is_pair else None
        # The next power of two; triton.next_power_of_2 takes 3 us.
        block = LOSS_ROWS if in_launch is None else max(LOSS_ROWS, 1 << (n_rows - 1).bit_length())
        second, labels = stats[1] if len(stats) > 1 else None, getattr(targets, "labels", None)
        tensors = (stats[0], second, labels, divisor, count, *outputs, in_launch)
        launch_of(block, n_ranks, width, n_rows <= CUT_ROWS)(-(-n_rows // block), tensors, (n_rows,))
        if total is not None and in_launch is None:
            step(sum_losses, outputs.loss, total)

    return fill


def gradient_launcher(loss: KernelLoss) -> Callable[..., None]:
    """Return the launcher of the gradient."""
    shard, reads_weights = loss.shard, not loss.is_pair and bool(loss.options.smoothing)

    @cache_launches
    def launch_of(
        rows: Rows, n_rows: int, size: int, strides: tuple[int | None, ...], n_ranks: int, width: int, by_row: bool
    ) -> tuple[Launch, int]:
        table, tiles = _table(loss, n_ranks, by_row)
        block, n_programs = gradient_shape(n_rows, shard, size, table, tiles)
        overlaps = statistics_shape(n_rows, shard, size, 1 + loss.is_pair).is_cut
        return _gradient(loss, rows, block, n_programs > 1, strides, n_ranks, width, overlaps), n_programs

    def fill(
        logits: Tensor, targets: Any, stats: Stats, divisor: Tensor | None, grads: GradOutputs, grad_logits: Tensor
    ) -> None:
        """Fill ``grad_logits``, which has the layout of ``logits [..., C]`` or is it.

        Each of ``grads``, fp32 ``[N]`` of any stride, multiplies the gradient of its output per row. None is 1 for the
        loss, and 0 for the others. A gradient of another dtype is of fp32 logits and 16 bits.
        """
        n_ranks, n_rows, width = stats[0].shape
        (*read, temperature, threshold, class_weight), rows = loss.read(logits, targets)
        grad_base = read[0]
        if grad_logits is not logits:
            grad_base, (layout, has_edges, *_) = row_arguments(grad_logits)
            assert rows.layout == layout, "the gradient is laid out as the logits are"
            if rows.has_edges != has_edges:
                rows = rows._replace(has_edges=has_edges)  # the smaller elements have the longer lines
        strides = tuple([None if grad is None else grad.stride(0) for grad in grads])
        by_row = temperature is not None or threshold is not None
        launch, n_programs = launch_of(rows, n_rows, grad_logits.itemsize, strides, n_ranks, width, by_row)
        by_column = class_weight if reads_weights else None
        merged = stats[0], stats[1] if len(stats) > 1 else None, divisor
        tensors = (*read, temperature, threshold, by_column, *merged, *grads, grad_base)
        launch(n_rows * n_programs, tensors, (n_rows, shard.start, n_programs))

    return fill


def _table(loss: KernelLoss, n_ranks: int, by_row: bool) -> tuple[Table, int]:
    """Return the table of blocks, and the tiles of a program. No bit depends on them.

    By measurement (docs/measurements.md). Each program merges its row's statistics first: the longer that takes, the
    more tiles should share it. ``by_row``: rows have a temperature or a threshold, which need registers.
    Padded rows were timed with small tiles alone.
    """
    options, shard = loss.options, loss.shard
    if loss.is_pair:
        return READ_PAIRS, ALL_TILES
    has_sums = options.entropy or options.sum_sq_probs or options.smoothing or options.mean_logit
    if options.softcap is not None or (has_sums and n_ranks > 1):
        return WRITE_SMALL_TILES, 4
    if has_sums or by_row or shard.n_valid < shard.n_columns or n_ranks > 1:
        return WRITE_SMALL_TILES, 2
    return WRITE_TILES, 1


@cache_launches
def _outputs(loss: KernelLoss, block: int, n_ranks: int, width: int, overlaps: bool = False) -> Launch:
    values, constants = (Sizes.of(loss.shard), loss.options), {"LOSS": loss.algebra, "WIDTH": width, "RANKS": n_ranks}
    return Launch(outputs_kernel, values, constants | {"ROWS": block}, num_warps=block // 32, overlaps=overlaps)


@cache_launches
def _gradient(
    loss: KernelLoss,
    rows: Rows,
    block: Block,
    is_cut: bool,
    strides: tuple[int | None, ...],
    n_ranks: int,
    width: int,
    overlaps: bool = False,
) -> Launch:
    options, compiler = loss.options, dict[str, Any](overlaps=overlaps)
    if not loss.is_pair:
        sums = (options.entropy, options.sum_sq_probs, options.smoothing, options.mean_logit)
        has_edges = block.has_edges(loss.shard, rows.has_edges)
        if sum(map(bool, sums)) > 1 or (options.softcap is not None and has_edges):
            # Without the bound, ptxas takes fewer, and loads a thread's second vector when it has used the first.
            compiler["maxnreg"] = 64
    constants = {"WIDTH": width, "RANKS": n_ranks, "IS_CUT": is_cut}
    return loss.launch(gradient_kernel, rows, (GradOutputs(*strides),), block, constants, compiler)


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
    SHAPE: tl.constexpr,
):
    """Example: ``[1, 2, 3]`` with grad_output 0.5 becomes ``[0.5, 1, 1.5]``."""
    row = tl.program_id(0).to(tl.int64)
    if grad_output_stride == 0:
        if tl.load(grad_output).to(tl.float32) == 1.0:
            n_rows *= 0
    while row < n_rows:
        factor = tl.load(grad_output + row * grad_output_stride).to(tl.float32)
        if factor != 1.0:
            place = locate(row, layout, None, n_columns, SHAPE)
            step: tl.constexpr = SHAPE.LANES * SHAPE.VECTOR
            write(place, factor, grad_logits, grad_logits, None, 0, step, scaled, SHAPE)
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
    block = choose_block(READ_AND_WRITE_EDGES if rows.has_edges else READ_AND_WRITE, n_columns, element_size)
    values = (stride, n_columns)
    return walk_launch(element_mul_kernel, rows, values, block)
