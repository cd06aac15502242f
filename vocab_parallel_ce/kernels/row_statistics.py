"""Statistics of every loss of two tensors: logits, and a number alongside each logit.

    statistics   walk a row of both shards: what this rank's columns contribute, on one rank to both exchanges
    second       the same of a second exchange, of sums over columns that need the statistics of all ranks

A loss is an ``Algebra``, as in ``row_loss``. One program per row. Each lane has its own statistics of each part of the
row, a few tiles, and merges the parts one after the other; lanes are merged once, at the end of the row. If there are
few rows, each part of a row has a program of its own, ``row_part_kernel``, which stores what its lanes know. The
kernels above then merge the stored parts, in the order in which they merge them if they walk the row themselves: the
same bits. Regime: as ``row_loss``; of few rows also 1 KiB per part and statistic.
"""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from vocab_parallel_ce.blocks import PARTS_AT_ONCE, StatisticsShape, statistics_shape, units_of
from vocab_parallel_ce.kernels import primitives as ops
from vocab_parallel_ce.kernels.launch import Launch, begin_at_vectors, cache_launches
from vocab_parallel_ce.kernels.row_loss import PairLoss, add_sums, load_sums, merged_ranks
from vocab_parallel_ce.kernels.walk import (
    PairRows,
    Row,
    Sizes,
    column_of,
    lane_pointers,
    load_logits,
    locate,
    merge_parts,
    pair_arguments,
    pair_launch,
    part_of_row,
    walk_edges,
    walk_parts,
)


@triton.jit
def as_they_are(numbers):
    return numbers


@triton.jit
def parts_of_row(
    sizes, unit_width, LANES: tl.constexpr, VECTOR: tl.constexpr, UNITS: tl.constexpr, TILES: tl.constexpr
):
    """Return the parts of a row, or of each unit of it, and the columns of a part."""
    width = LANES // max(UNITS, 1) * VECTOR * TILES
    n_columns = sizes.n_valid
    if UNITS > 0:
        n_columns = unit_width
    return tl.cdiv(n_columns, width), width


@triton.jit
def in_units(lanes, UNITS: tl.constexpr):
    """Return the numbers of lanes, ``[LANES]`` each, as ``[n, LANES // n]``, of n units or of the row."""
    n: tl.constexpr = max(UNITS, 1)
    return [tl.reshape(x, [n, x.shape[0] // n]) for x in lanes]


@triton.jit
def second_of_row(
    place,
    pair,
    stats,
    parts,
    n_parts,
    pointer,
    LOSS: tl.constexpr,
    HAS_EDGES: tl.constexpr,
    LANES: tl.constexpr,
    VECTOR: tl.constexpr,
    UNITS: tl.constexpr,
    TILES: tl.constexpr,
    UNROLLED: tl.constexpr,
):
    """Store a row's two sums of the second exchange at ``pointer``. ``parts``: pointers, or None."""
    zeros = tl.zeros([LANES], tl.float32)
    both = (pair, stats)
    if parts is None:
        sums = walk_parts(
            place, (zeros, zeros), both, None, LOSS.second, add_sums, HAS_EDGES, LANES, VECTOR, UNITS, TILES
        )
    else:
        sums = merge_parts(parts, n_parts, (zeros, zeros), None, load_sums, add_sums, 2, UNROLLED)
    sums = walk_edges(place, sums, both, LOSS.second, HAS_EDGES, LANES, VECTOR, UNITS)
    sums = ops.merge_tree(LOSS.merge_second(in_units(sums, UNITS)), None, add_sums, as_they_are)
    tl.store(pointer, sums[0])
    tl.store(pointer + 1, sums[1])


@triton.jit(do_not_specialize=["n_rows"])
def row_part_kernel(
    logits,  # [N, C] bf16|fp16|fp32
    other,  # [N, C'], what stands alongside the logits
    labels,  # [N] int64|int32, or None
    class_weight,  # [sizes.n_valid] fp32, or None: all 1
    stats,  # [R, N, K] fp32, for the second exchange's parts; or None: the first one's
    parts,  # [N, n_parts, K or 2, LANES] fp32, out
    layout,  # RowLayout of logits
    other_layout,
    sizes,  # Sizes
    unit_width,  # columns of a unit
    loss_options,  # option_arguments, or the loss's own
    n_rows,
    LOSS: tl.constexpr,  # Algebra
    WIDTH: tl.constexpr,  # K
    RANKS: tl.constexpr,
    UNITS: tl.constexpr,  # of the row, 32 lanes each; 0: the row is no whole units
    TILES: tl.constexpr,  # of a part
    HAS_EDGES: tl.constexpr,
    ALIKE: tl.constexpr,
    LANES: tl.constexpr,
    VECTOR: tl.constexpr,
):
    """Example: ``x = [1, 3, 2]`` is no vector, so each lane has maxima of -inf and sums of 0."""
    program = tl.program_id(0)
    n_parts, width = parts_of_row(sizes, unit_width, LANES, VECTOR, UNITS, TILES)
    row = (program // n_parts).to(tl.int64)
    begin = program % n_parts * width
    n_columns = sizes.n_valid
    if labels is not None:
        label = tl.load(labels + row).to(tl.int64)
        n_columns = tl.where(label == loss_options.ignore_index, 0, n_columns)
    place = locate(row, layout, other_layout, n_columns, ALIKE, VECTOR, unit_width, UNITS)
    pair = Row(logits, other, class_weight, -1, sizes.vocab_size, loss_options)
    if stats is None:
        lanes = part_of_row(place, begin, pair, LOSS.tile, HAS_EDGES, LANES, VECTOR, UNITS, TILES)
        LOSS.store(lane_pointers(parts, program, WIDTH, LANES), lanes, loss_options, LANES)
    else:
        merged = merged_ranks(stats, row, True, n_rows, loss_options, LOSS, WIDTH, RANKS)
        sums = part_of_row(place, begin, (pair, merged), LOSS.second, HAS_EDGES, LANES, VECTOR, UNITS, TILES)
        pointers = lane_pointers(parts, program, 2, LANES)
        tl.store(pointers, sums[0])
        tl.store(pointers + LANES, sums[1])


@triton.jit(do_not_specialize=["n_rows", "shard_start", "stats_start"])
def row_statistics_kernel(
    logits,  # [N, C] bf16|fp16|fp32
    other,  # [N, C'], what stands alongside the logits
    labels,  # [N] int64|int32, or None
    class_weight,  # [sizes.n_valid] fp32, or None: all 1
    parts,  # [N, n_parts, K, LANES] fp32, of row_part_kernel; or None: this kernel walks the rows
    stats,  # [R, N, K] fp32, out: this rank's rows
    second,  # [1, N, 2] fp32, out, or None: no second exchange, or other ranks
    layout,  # RowLayout of logits
    other_layout,
    sizes,  # Sizes
    unit_width,  # columns of a unit
    loss_options,  # option_arguments, or the loss's own
    n_rows,
    shard_start,
    stats_start,  # this rank's first row in stats
    LOSS: tl.constexpr,  # Algebra
    WIDTH: tl.constexpr,  # K
    UNITS: tl.constexpr,  # of the row, 32 lanes each; 0: the row is no whole units
    TILES: tl.constexpr,  # of a part
    UNROLLED: tl.constexpr,  # parts that are loaded together
    HAS_EDGES: tl.constexpr,
    ALIKE: tl.constexpr,
    LANES: tl.constexpr,
    VECTOR: tl.constexpr,
):
    """Example: targets, ``x = [1, 3, 2]``, ``t = [0, 0.5, 0.5]``: ``(3, 1.5032, 1, -0.5)``."""
    row = tl.program_id(0).to(tl.int64)
    n_columns = sizes.n_valid
    target = tl.full((), -1, tl.int32)
    if labels is not None:
        label = tl.load(labels + row).to(tl.int64)
        # An ignored row counts as a row of no columns: nothing is read.
        n_columns = tl.where(label == loss_options.ignore_index, 0, n_columns)
        target = column_of(label, shard_start, n_columns)
    place = locate(row, layout, other_layout, n_columns, ALIKE, VECTOR, unit_width, UNITS)
    pair = Row(logits, other, class_weight, target, sizes.vocab_size, loss_options)
    at_label = load_logits(logits + place.begin + target, target >= 0)
    lanes = LOSS.empty(at_label, LANES)
    if parts is None:
        lanes = walk_parts(
            place, lanes, pair, loss_options, LOSS.tile, LOSS.merge_pair, HAS_EDGES, LANES, VECTOR, UNITS, TILES
        )
    else:
        n_parts, _ = parts_of_row(sizes, unit_width, LANES, VECTOR, UNITS, TILES)
        pointers = lane_pointers(parts, row * n_parts, WIDTH, LANES)
        lanes = merge_parts(pointers, n_parts, lanes, loss_options, LOSS.load, LOSS.merge_pair, WIDTH, UNROLLED)
    lanes = walk_edges(place, lanes, pair, LOSS.tile, HAS_EDGES, LANES, VECTOR, UNITS)
    units = LOSS.merge(LOSS.record(in_units(lanes, UNITS)), loss_options)
    merged = ops.merge_tree(units, loss_options, LOSS.merge_pair, LOSS.record)
    LOSS.store(stats + (stats_start + row) * WIDTH, merged, loss_options, 1)
    if second is not None:
        second_of_row(
            place, pair, merged, None, 0, second + 2 * row, LOSS, HAS_EDGES, LANES, VECTOR, UNITS, TILES, UNROLLED
        )


@triton.jit(do_not_specialize=["n_rows", "second_start"])
def row_second_kernel(
    logits,  # [N, C] bf16|fp16|fp32
    other,  # [N, C'], what stands alongside the logits
    labels,  # [N] int64|int32, or None
    class_weight,  # [sizes.n_valid] fp32, or None: all 1
    parts,  # [N, n_parts, 2, LANES] fp32, of row_part_kernel; or None: this kernel walks the rows
    stats,  # [R, N, K] fp32
    second,  # [R, N, 2] fp32, out: this rank's rows
    layout,  # RowLayout of logits
    other_layout,
    sizes,  # Sizes
    unit_width,  # columns of a unit
    loss_options,  # option_arguments, or the loss's own
    n_rows,
    second_start,  # this rank's first row in second
    LOSS: tl.constexpr,  # Algebra
    WIDTH: tl.constexpr,  # K
    RANKS: tl.constexpr,
    UNITS: tl.constexpr,  # of the row, 32 lanes each; 0: the row is no whole units
    TILES: tl.constexpr,  # of a part
    UNROLLED: tl.constexpr,  # parts that are loaded together
    HAS_EDGES: tl.constexpr,
    ALIKE: tl.constexpr,
    LANES: tl.constexpr,
    VECTOR: tl.constexpr,
):
    """Example: js, ``x = [1, 3]``, ``w = [2, 2]``, beta 0.5: 0.0783 and 0.1008."""
    row = tl.program_id(0).to(tl.int64)
    merged = merged_ranks(stats, row, True, n_rows, loss_options, LOSS, WIDTH, RANKS)
    n_columns = sizes.n_valid
    if labels is not None:
        label = tl.load(labels + row).to(tl.int64)
        n_columns = tl.where(label == loss_options.ignore_index, 0, n_columns)
    place = locate(row, layout, other_layout, n_columns, ALIKE, VECTOR, unit_width, UNITS)
    pair = Row(logits, other, class_weight, -1, sizes.vocab_size, loss_options)
    n_parts, _ = parts_of_row(sizes, unit_width, LANES, VECTOR, UNITS, TILES)
    if parts is not None:
        parts = lane_pointers(parts, row * n_parts, 2, LANES)
    pointer = second + 2 * (second_start + row)
    second_of_row(place, pair, merged, parts, n_parts, pointer, LOSS, HAS_EDGES, LANES, VECTOR, UNITS, TILES, UNROLLED)


def statistics(
    loss: PairLoss, logits: Tensor, targets: Any, stats: tuple[Tensor, ...], rank: int, count: None = None
) -> None:
    """Fill ``stats[0][rank]`` of ``stats[0] [R, N, K]``, and of a single rank those of the second exchange."""
    n_ranks, n_rows, width = stats[0].shape
    tensors, rows, shape = _with_parts(loss, logits, targets, stats, rank, before_second=False)
    has_both = n_ranks == 1 and len(stats) > 1
    # Programs of parts need the statistics of the row: those of the second exchange follow.
    tensors = (*tensors, stats[0], stats[1] if has_both and not shape.is_cut else None)
    launch = _statistics(loss, rows, shape, width)
    launch(n_rows, tensors, (n_rows, loss.shard.start, rank * n_rows))
    if has_both and shape.is_cut:
        second(loss, logits, targets, stats, rank)


def second(loss: PairLoss, logits: Tensor, targets: Any, stats: tuple[Tensor, ...], rank: int) -> None:
    """Fill ``stats[1][rank]`` of ``stats[1] [R, N, 2]``."""
    n_ranks, n_rows, width = stats[0].shape
    tensors, rows, shape = _with_parts(loss, logits, targets, stats, rank, before_second=True)
    launch = _second(loss, rows, shape, n_ranks, width)
    launch(n_rows, (*tensors, *stats), (n_rows, rank * n_rows))


def _with_parts(
    loss: PairLoss, logits: Tensor, targets: Any, stats: tuple[Tensor, ...], rank: int, *, before_second: bool
) -> tuple[tuple[Tensor | None, ...], PairRows, StatisticsShape]:
    """Return the tensors that are read, the last of which is the parts; their rows; and the launch shapes.

    The parts, None if rows are not cut, are what the lanes know of each part of each row: this launches their kernel,
    that of the second exchange if ``before_second``.
    """
    n_ranks, n_rows, width = stats[0].shape
    base, other_base, rows = pair_arguments(logits, targets[0])
    pair = (base, other_base, getattr(targets, "labels", None), getattr(targets, "class_weight", None))
    size = base.element_size()
    is_aligned = rows.alike and begin_at_vectors(rows.layout, size)
    units = units_of(loss.shard, rank, n_ranks, size) if is_aligned else 0
    shape = statistics_shape(n_rows, loss.shard, size, 2, units)
    if not shape.is_cut:
        return (*pair, None), rows, shape
    lanes, n_parts = shape.block.lanes, shape.block.n_parts
    parts = stats[0].new_empty(n_rows, n_parts, 2 if before_second else width, lanes)
    launch = _launch_of_parts(loss, rows, shape, n_ranks, width)
    launch(n_rows * n_parts, (*pair, stats[0] if before_second else None, parts), (n_rows,))
    return (*pair, parts), rows, shape


@cache_launches
def _statistics(loss: PairLoss, rows: PairRows, shape: StatisticsShape, width: int) -> Launch:
    values, constants, compiler = _values(loss, shape), {"LOSS": loss.algebra, "WIDTH": width}, {}
    if not shape.is_cut:
        # Without a bound, ptxas takes fewer, and loads the second tile when it has used the first.
        if getattr(loss.options, "beta", None) is not None:
            has_edges = shape.block.has_edges(loss.shard, rows.has_edges)
            compiler = {"maxnreg": 64 if has_edges or shape.block.units else 40}
        elif shape.block.units > 1:
            compiler = {"maxnreg": 56}
    return _launch(row_statistics_kernel, rows, values, loss, shape, constants, compiler)


@cache_launches
def _second(loss: PairLoss, rows: PairRows, shape: StatisticsShape, n_ranks: int, width: int) -> Launch:
    values = _values(loss, shape)
    return _launch(row_second_kernel, rows, values, loss, shape, loss.constants(n_ranks, width))


@cache_launches
def _launch_of_parts(loss: PairLoss, rows: PairRows, shape: StatisticsShape, n_ranks: int, width: int) -> Launch:
    values = _values(loss, shape)
    constants = loss.constants(n_ranks, width) | {"UNITS": shape.block.units, "TILES": shape.block.tiles}
    return pair_launch(row_part_kernel, rows, values, loss.shard, shape.block, **constants)


def _values(loss: PairLoss, shape: StatisticsShape) -> tuple[Any, ...]:
    return Sizes.of(loss.shard), shape.block.unit_width(loss.shard), loss.options


def _launch(
    kernel: Any,
    rows: PairRows,
    values: tuple[Any, ...],
    loss: PairLoss,
    shape: StatisticsShape,
    constants: dict[str, Any],
    compiler: dict[str, int] | None = None,
) -> Launch:
    """Return the Launch of a kernel that walks the rows, or merges parts."""
    constants |= {"UNITS": shape.block.units, "TILES": shape.block.tiles, "UNROLLED": PARTS_AT_ONCE}
    return pair_launch(kernel, rows, values, loss.shard, shape.block, compiler, **constants)
