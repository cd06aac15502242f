"""Statistics of every row of a vocabulary shard, of any loss, in one read of it per exchange.

    statistics   what this rank's columns contribute to the first exchange, on one rank to the second one too
    second       the sums of a second exchange, over columns, which need the statistics of all ranks

A loss is an ``Algebra``. One program per row. Each lane has its own statistics of each part of the row, a few tiles,
and merges the parts one after the other; lanes are merged once, at the end of the row. If there are few rows, each part
of a row has a program of its own, ``part_kernel``, which stores what its lanes know. The other kernels then merge the
stored parts, in the order in which they merge them if they walk the row themselves: the same bits.

Regime: 1 K to 256 K columns, any number of rows, bound by memory. Of each exchange the kernels read the shard, of pairs
what stands alongside too, and write 4 K bytes per row, and of few rows up to 1 KiB per part and field. They read no
ignored row and no padding.
"""

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from vocab_parallel_ce.blocks import PARTS_AT_ONCE, Block, statistics_shape, units_of
from vocab_parallel_ce.kernels import primitives as ops
from vocab_parallel_ce.kernels.algebra import KernelLoss, Row, add_sums, as_they_are, in_units, load_sums, merged_ranks
from vocab_parallel_ce.kernels.launch import Launch, Rows, begin_at_vectors, cache_launches
from vocab_parallel_ce.kernels.walk import lane_pointers, locate, merge_parts, part_of_row, walk_edges, walk_parts
from vocab_parallel_ce.losses.base import Stats
from vocab_parallel_ce.program import make
from vocab_parallel_ce.spec import TokenOutputs

NOT_STORED = TokenOutputs(None)  # type: ignore[arg-type]  # the outputs have a launch of their own
STORED_ROWS = 1024  # more are not faster: 256 x 128256 gains 1 % on one H200, 4096 x 128256 loses 1 %


@triton.jit
def parts_of_row(sizes, unit_width, SHAPE: tl.constexpr):
    """Return the parts of a row, or of each unit of it, and the columns of a part."""
    width = SHAPE.LANES // max(SHAPE.UNITS, 1) * SHAPE.VECTOR * SHAPE.TILES
    n_columns = sizes.n_valid
    if SHAPE.UNITS > 0:
        n_columns = unit_width
    return tl.cdiv(n_columns, width), width


@triton.jit
def second_of_row(
    place, row, stats, parts, n_parts, pointer, LOSS: tl.constexpr, SHAPE: tl.constexpr, UNROLLED: tl.constexpr
):
    """Store a row's two sums of the second exchange at ``pointer``. ``parts``: pointers, or None."""
    LANES: tl.constexpr = SHAPE.LANES
    zeros = tl.zeros([LANES], tl.float32)
    both = (row, stats)
    if parts is None:
        sums = walk_parts(place, (zeros, zeros), both, None, LOSS.second, add_sums, SHAPE)
    else:
        sums = merge_parts(parts, n_parts, (zeros, zeros), None, load_sums, add_sums, 2, UNROLLED)
    sums = walk_edges(place, sums, both, LOSS.second, SHAPE)
    sums = ops.merge_tree(LOSS.merge_second(in_units(sums, SHAPE.UNITS)), None, add_sums, as_they_are)
    tl.store(pointer, sums[0])
    tl.store(pointer + 1, sums[1])


@triton.jit(do_not_specialize=["n_rows", "shard_start"])
def part_kernel(
    logits,  # [N, C] bf16|fp16|fp32
    other,  # [N, C'], what stands alongside the logits; or None
    labels,  # [N] int64|int32, or None
    temperature,  # [N] fp32, or None: 1
    threshold,  # [N] fp32, smaller logits are excluded; or None
    class_weight,  # [sizes.n_valid] fp32, or None: all 1
    stats,  # [R, N, K] fp32, for the second exchange's parts; or None: the first one's
    parts,  # [N, n_parts, fields or 2, LANES] fp32, out
    layout,  # RowLayout of logits
    other_layout,
    sizes,  # Sizes
    unit_width,  # columns of a unit
    loss_options,  # option_arguments, or the loss's own
    n_rows,
    shard_start,
    LOSS: tl.constexpr,  # Algebra
    FIELDS: tl.constexpr,  # that a lane stores
    WIDTH: tl.constexpr,  # K of stats, 0 without
    RANKS: tl.constexpr,
    SHAPE: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Example: ``x = [1, 3, 2]`` is no vector, so each lane has maxima of -inf and sums of 0."""
    ops.begin(OVERLAPS)
    program = tl.program_id(0)
    n_parts, width = parts_of_row(sizes, unit_width, SHAPE)
    index, begin = (program // n_parts).to(tl.int64), program % n_parts * width
    label = ops.load_label(labels, index)
    live, n_columns = index >= 0, sizes.n_valid
    if label is not None:
        live = label != loss_options.ignore_index
        n_columns = tl.where(live, n_columns, 0)  # nothing of an ignored row is read
    t = ops.row_temperature(temperature, index, live)
    least = ops.row_least(threshold, index, live)
    place = locate(index, layout, other_layout, n_columns, SHAPE, unit_width)
    label_at = LOSS.label_at(place, label, shard_start, SHAPE.VECTOR)
    row = Row(logits, other, class_weight, label_at, sizes.vocab_size, loss_options, t, least)
    if stats is None:
        lanes = part_of_row(place, begin, row, LOSS.tile, SHAPE)
        LOSS.store_lanes(lane_pointers(parts, program, FIELDS, SHAPE.LANES), lanes, loss_options, SHAPE.LANES)
    else:
        merged = merged_ranks(stats, index, None, n_rows, loss_options, LOSS, WIDTH, RANKS)
        sums = part_of_row(place, begin, (row, merged), LOSS.second, SHAPE)
        pointers = lane_pointers(parts, program, 2, SHAPE.LANES)
        tl.store(pointers, sums[0])
        tl.store(pointers + SHAPE.LANES, sums[1])


@triton.jit(do_not_specialize=["n_rows", "shard_start", "stats_start"])
def statistics_kernel(
    logits,  # [N, C] bf16|fp16|fp32
    other,  # [N, C'], what stands alongside the logits; or None
    labels,  # [N] int64|int32, or None
    temperature,  # [N] fp32, or None: 1
    threshold,  # [N] fp32, smaller logits are excluded; or None
    class_weight,  # [sizes.n_valid] fp32, or None: all 1
    parts,  # [N, n_parts, fields, LANES] fp32, of part_kernel; or None: this kernel walks the rows
    stats,  # [R, N, K or more] fp32, out: the first K of this rank's rows
    second,  # [1, N, 2] fp32, out, or None: no second exchange, or other ranks
    loss,  # [N] fp32, out, of one rank: the outputs of an unreduced loss; or None
    entropy,  # [N] fp32, out, or None
    lse,  # [N] fp32, out, or None
    divergence,  # [N] fp32, out, or None
    sum_sq_probs,  # [N] fp32, out, or None
    mean_logit,  # [N] fp32, out, or None
    predictions,  # [N] int64, out, or None
    layout,  # RowLayout of logits
    other_layout,
    sizes,  # Sizes
    unit_width,  # columns of a unit
    stats_width,  # numbers from a row of stats to the next one
    loss_options,  # option_arguments, or the loss's own
    n_rows,
    shard_start,
    stats_start,  # this rank's first row in stats
    LOSS: tl.constexpr,  # Algebra
    FIELDS: tl.constexpr,  # that a lane stores
    UNROLLED: tl.constexpr,  # parts that are loaded together
    SHAPE: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Example, labels: ``x = [1, 3, 2]``, label 1 at shard start 0 gives ``(3, 0.5032, 3)``.

    With smoothing or mean_logit also ``(-3, 3)``, with entropy ``-0.6386``, with predictions ``1``, with
    sum_sq_probs ``1.1536``.
    """
    ops.begin(OVERLAPS)
    index = tl.program_id(0).to(tl.int64)
    label = ops.load_label(labels, index)
    live, n_columns = index >= 0, sizes.n_valid
    if label is not None:
        live = label != loss_options.ignore_index
        n_columns = tl.where(live, n_columns, 0)  # nothing of an ignored row is read
    t = ops.row_temperature(temperature, index, live)
    least = ops.row_least(threshold, index, live)
    place = locate(index, layout, other_layout, n_columns, SHAPE, unit_width)
    label_at = LOSS.label_at(place, label, shard_start, SHAPE.VECTOR)
    row = Row(logits, other, class_weight, label_at, sizes.vocab_size, loss_options, t, least)
    lanes = LOSS.empty(row, place, SHAPE.LANES)
    if parts is None:
        lanes = walk_parts(place, lanes, row, loss_options, LOSS.tile, LOSS.merge_lanes, SHAPE, UNROLLED)
    else:
        n_parts, _ = parts_of_row(sizes, unit_width, SHAPE)
        pointers = lane_pointers(parts, index * n_parts, FIELDS, SHAPE.LANES)
        lanes = merge_parts(pointers, n_parts, lanes, loss_options, LOSS.load_lanes, LOSS.merge_lanes, FIELDS, UNROLLED)
    merged = LOSS.finish(lanes, row, place, label, shard_start, sizes, loss_options, SHAPE)
    LOSS.store(stats + (stats_start + index) * stats_width, merged, loss_options, 1)
    if loss is not None:
        outputs = TokenOutputs(loss, entropy, lse, divergence, sum_sq_probs, mean_logit, predictions)
        LOSS.store_outputs(outputs, index, None, merged, None, label, None, sizes, loss_options)
    if second is not None:
        second_of_row(place, row, merged, None, 0, second + 2 * index, LOSS, SHAPE, UNROLLED)


@triton.jit(do_not_specialize=["n_rows", "second_start"])
def second_kernel(
    logits,  # [N, C] bf16|fp16|fp32
    other,  # [N, C'], what stands alongside the logits
    labels,  # [N] int64|int32, or None
    parts,  # [N, n_parts, 2, LANES] fp32, of part_kernel; or None: this kernel walks the rows
    stats,  # [R, N, K] fp32
    second,  # [R, N, 2] fp32, out: this rank's rows
    layout,  # RowLayout of logits
    other_layout,
    sizes,  # Sizes
    unit_width,  # columns of a unit
    loss_options,  # the loss's own
    n_rows,
    second_start,  # this rank's first row in second
    LOSS: tl.constexpr,  # Algebra
    WIDTH: tl.constexpr,  # K
    RANKS: tl.constexpr,
    UNROLLED: tl.constexpr,  # parts that are loaded together
    SHAPE: tl.constexpr,
):
    """Example: js, ``x = [1, 3]``, ``w = [2, 2]``, beta 0.5: 0.0783 and 0.1008."""
    index = tl.program_id(0).to(tl.int64)
    merged = merged_ranks(stats, index, None, n_rows, loss_options, LOSS, WIDTH, RANKS)
    label = ops.load_label(labels, index)
    n_columns = sizes.n_valid
    if label is not None:
        n_columns = tl.where(label == loss_options.ignore_index, 0, n_columns)
    place = locate(index, layout, other_layout, n_columns, SHAPE, unit_width)
    row = Row(logits, other, None, None, sizes.vocab_size, loss_options, None, None)
    n_parts, _ = parts_of_row(sizes, unit_width, SHAPE)
    if parts is not None:
        parts = lane_pointers(parts, index * n_parts, 2, SHAPE.LANES)
    pointer = second + 2 * (second_start + index)
    second_of_row(place, row, merged, parts, n_parts, pointer, LOSS, SHAPE, UNROLLED)


def statistics_launcher(loss: KernelLoss) -> Callable[..., None]:
    """Return the launcher of the statistics, and of a single rank of those of its second exchange."""
    second_too = second_launcher(loss)

    @cache_launches
    def launches(
        rows: Rows, n_rows: int, size: int, width: int, rank: int, n_ranks: int
    ) -> tuple[Block, Launch, Launch | None]:
        block = _block(loss, rows, n_rows, size, rank, n_ranks)
        part = _launch_of_parts(loss, rows, block, loss.n_lane_fields or width) if block.is_cut else None
        return block, _launch(loss, rows, block, width), part

    def fill(logits: Tensor, targets: Any, stats: Stats, rank: int, outputs: TokenOutputs = NOT_STORED) -> None:
        """Fill ``stats[0][rank]`` of ``stats[0] [R, N, K]`` for ``logits [..., C]``: the first K of each row's numbers.

        ``outputs``, if given, are filled too: of a single rank and exchange, unreduced.
        """
        n_ranks, n_rows, width = stats[0].shape
        tensors, rows = loss.read(logits, targets)
        block, launch, part = launches(rows, n_rows, logits.itemsize, width, rank, n_ranks)
        parts, has_both = None, n_ranks == 1 and len(stats) > 1
        if part is not None:
            shape_of_parts = n_rows, block.n_parts, loss.n_lane_fields or width, block.lanes
            parts = make(stats[0], *shape_of_parts, dtype=torch.float32)
            part(n_rows * block.n_parts, (*tensors, None, parts), (n_rows, loss.shard.start))
        # Programs of parts need the statistics of the row: those of the second exchange follow.
        sums = stats[1] if has_both and part is None else None
        sizes = (n_rows, loss.shard.start, rank * n_rows)
        launch(n_rows, (*tensors, parts, stats[0], sums, *outputs), sizes)
        if has_both and part is not None:
            second_too(logits, targets, stats, rank)

    return fill


def second_launcher(loss: KernelLoss) -> Callable[..., None]:
    """Return the launcher of the second exchange's sums."""

    def fill(logits: Tensor, targets: Any, stats: Stats, rank: int) -> None:
        """Fill ``stats[1][rank]`` of ``stats[1] [R, N, 2]``."""
        n_ranks, n_rows, width = stats[0].shape
        tensors, rows = loss.read(logits, targets)
        block, parts = _block(loss, rows, n_rows, logits.itemsize, rank, n_ranks), None
        if block.is_cut:
            parts = make(stats[0], n_rows, block.n_parts, 2, block.lanes, dtype=torch.float32)
            part = _launch_of_parts(loss, rows, block, 2, n_ranks, width)
            part(n_rows * block.n_parts, (*tensors, stats[0], parts), (n_rows, loss.shard.start))
        launch = _second(loss, rows, block, n_ranks, width)
        launch(n_rows, (*tensors[:3], parts, *stats), (n_rows, rank * n_rows))

    return fill


def _block(loss: KernelLoss, rows: Rows, n_rows: int, size: int, rank: int, n_ranks: int) -> Block:
    """Return the launch shape for rows of elements of ``size`` bytes, with the units of the row if it has some."""
    is_aligned = (rows.alike or not loss.is_pair) and begin_at_vectors(rows.layout, size)
    units = units_of(loss.shard, rank, n_ranks, size) if is_aligned else 0
    return statistics_shape(n_rows, loss.shard, size, 1 + loss.is_pair, units)


@cache_launches
def _launch(loss: KernelLoss, rows: Rows, block: Block, width: int) -> Launch:
    at_once, compiler = _parts_at_once(loss, block, block.has_edges(loss.shard, rows.has_edges))
    constants = {"FIELDS": loss.n_lane_fields or width, "UNROLLED": at_once}
    return loss.launch(statistics_kernel, rows, (_unit_width(loss, block), width), block, constants, compiler)


def _parts_at_once(loss: KernelLoss, block: Block, has_edges: bool) -> tuple[int, dict[str, Any]]:
    """Return how many parts a program loads together, and the compiler's options for that.

    Without a bound of registers, ptxas takes few, and loads the second part, or tile, when it has used the first.
    """
    if block.is_cut:
        return PARTS_AT_ONCE if loss.is_pair else block.at_once, {"maxnreg": 64, "overlaps": True}
    if loss.is_pair:
        if loss.n_lane_fields > 8 or (loss.n_lane_fields and block.units > 1):
            return 1, {}  # what labels and a teacher have together would not fit
        if loss.options.beta is not None:
            return 1, {"maxnreg": 64 if has_edges or block.units else 40}
        return 1, {"maxnreg": 56} if block.units > 1 else {}
    is_capped, has_more = loss.options.softcap is not None, loss.n_lane_fields > 2
    if block.at_once > 1 and (has_more or is_capped):
        # Several parts of logits would take too many registers; without softcap, two do not.
        return (1, {}) if is_capped else (2, {"maxnreg": 64})
    if block.units:
        return block.at_once, {"maxnreg": 64}
    options = loss.options
    sums = options.entropy, options.sum_sq_probs, options.smoothing or options.mean_logit
    if (has_more or is_capped) and sum(map(bool, sums)) < 2 and not has_edges and not options.predictions:
        # So ptxas loads both vectors of a tile before it uses the first, with as many programs at once as may be.
        return block.at_once, {"maxnreg": 40 if is_capped or options.logit_scale != 1 else 36}
    return block.at_once, {}


@cache_launches
def _second(loss: KernelLoss, rows: Rows, block: Block, n_ranks: int, width: int) -> Launch:
    constants = {"WIDTH": width, "RANKS": n_ranks, "UNROLLED": PARTS_AT_ONCE}
    return loss.launch(second_kernel, rows, (_unit_width(loss, block),), block, constants)


@cache_launches
def _launch_of_parts(
    loss: KernelLoss, rows: Rows, block: Block, fields: int, n_ranks: int = 1, width: int = 0
) -> Launch:
    constants = {"FIELDS": fields, "WIDTH": width, "RANKS": n_ranks}
    return loss.launch(part_kernel, rows, (_unit_width(loss, block),), block, constants, {"overlaps": True})


def _unit_width(loss: KernelLoss, block: Block) -> int:
    return loss.shard.n_columns // max(block.units, 1)
