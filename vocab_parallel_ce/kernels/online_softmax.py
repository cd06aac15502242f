"""Statistics of every row of a vocabulary shard, in one read of it: a ``spec.RowStats`` of the options' statistics.

One program per row. Each lane has its own maximum and sums (``lanes``), which are merged once, at the end of the row.
Next to the label's own term, a sum would lose digits. So the walk leaves out the label's vector, and the kernel reads
it afterwards. If there are few rows, each part of a row has a program of its own, which stores what its lanes know.
The kernel then merges these parts, in the order in which it merges them if it walks the row itself: the same bits.

Regime: 1 K to 256 K columns, any number of rows, bound by memory. The kernel reads the shard once and writes 4 K
bytes per row, and of few rows 1 KiB per part and field. It does not read ignored rows or padding.
"""

from collections.abc import Callable
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from vocab_parallel_ce.blocks import StatisticsBlock, StatisticsShape, statistics_shape, units_of
from vocab_parallel_ce.kernels import primitives as ops
from vocab_parallel_ce.kernels.label_rows import label_weight, load_loose_columns, locate_target, merge_columns
from vocab_parallel_ce.kernels.lanes import LaneRow, load_lanes, load_logits, merge_lanes, no_columns, store_lanes, tile
from vocab_parallel_ce.kernels.launch import Launch, Rows, begin_at_vectors, cache_launches, row_arguments, walk_launch
from vocab_parallel_ce.kernels.walk import lane_pointers, locate, merge_parts, part_of_row, walk_parts
from vocab_parallel_ce.losses.labels import Labels
from vocab_parallel_ce.shard import VocabShard
from vocab_parallel_ce.spec import LossOptions


@triton.jit
def count_labels(labels, n_rows, ignore_index):
    """Count the labels that are not ``ignore_index``, 512 at a time, which fit in one warp's registers."""
    count = tl.zeros([512], tl.int32)
    for first_row in range(0, n_rows, 512):
        rows = first_row + tl.arange(0, 512)
        inside = rows < n_rows
        label = tl.load(labels + rows, inside, other=0).to(tl.int64)
        count += (inside & (label != ignore_index)).to(tl.int32)
    return tl.sum(count)


@triton.jit
def store_stats(pointer, stats, loss_options):
    """Store a ``RowStats`` in the order of ``LossOptions.statistics``."""
    tl.store(pointer, stats.row_max)
    tl.store(pointer + 1, stats.others_sum)
    tl.store(pointer + 2, stats.target_logit)
    pointer += 3
    if loss_options.smoothing is not None or loss_options.mean_logit is not None:
        tl.store(pointer, stats.shifted_sum)
        tl.store(pointer + 1, stats.n_columns)
        pointer += 2
    if loss_options.entropy is not None:
        tl.store(pointer, stats.exp_shifted_sum)
        pointer += 1
    if loss_options.predictions is not None:
        tl.store(pointer, stats.argmax)
        pointer += 1
    if loss_options.class_weight is not None:
        tl.store(pointer, stats.target_weight)
        pointer += 1
    if loss_options.sum_sq_probs is not None:
        tl.store(pointer, stats.sum_exp_sq)


@triton.jit(do_not_specialize=["n_rows", "shard_start"])
def part_kernel(
    logits,  # [N, C] bf16|fp16|fp32
    labels,  # [N] int64|int32
    temperature,  # [N] fp32, or None: 1
    threshold,  # [N] fp32, smaller logits are excluded; or None
    parts,  # [N, n_parts, fields, LANES] fp32, out: LaneStats
    valid_rows,  # [1] int32, out: number of labels that are not ignored; or None
    class_weight,  # [n_columns] fp32, or None
    layout,  # RowLayout of logits
    n_columns,  # that are not padding
    unit_width,
    n_parts,
    loss_options,  # option_arguments
    n_rows,
    shard_start,
    WIDTH: tl.constexpr,  # fields of LaneStats
    UNITS: tl.constexpr,  # of the row, 32 lanes each; 0: the row is no whole units
    TILES: tl.constexpr,  # of a part
    HAS_EDGES: tl.constexpr,
    LANES: tl.constexpr,
    VECTOR: tl.constexpr,
):
    """Example: ``x = [1, 3, 2]`` is no vector, so each lane has a maximum of -inf and sums of 0."""
    program = tl.program_id(0)
    if valid_rows is not None:
        if program == 0:
            tl.store(valid_rows, count_labels(labels, n_rows, loss_options.ignore_index))
            return
        program -= 1
    index = (program // n_parts).to(tl.int64)
    label = tl.load(labels + index).to(tl.int64)
    if temperature is not None:
        t = ops.row_temperature(temperature, index, label != loss_options.ignore_index)
        loss_options = LossOptions(*loss_options[:-2], t, loss_options[-1])  # type: ignore[call-arg]
    if threshold is not None:
        least = ops.row_least(threshold, index, label != loss_options.ignore_index)
        loss_options = LossOptions(*loss_options[:-1], least)  # type: ignore[call-arg]
    n_columns = tl.where(label == loss_options.ignore_index, 0, n_columns)
    place = locate(index, layout, None, n_columns, False, VECTOR, unit_width, UNITS)
    target = locate_target(place, label - shard_start, VECTOR)
    row = LaneRow(logits, class_weight, target.vector, loss_options)
    begin = (program % n_parts) * (LANES // max(UNITS, 1) * VECTOR * TILES)
    lanes = part_of_row(place, begin, row, tile, HAS_EDGES, LANES, VECTOR, UNITS, TILES)
    store_lanes(lane_pointers(parts, program, WIDTH, LANES), lanes, loss_options, LANES)


@triton.jit(do_not_specialize=["shard_start", "n_rows", "stats_start"])
def online_softmax_kernel(
    logits,  # [N, C] bf16|fp16|fp32
    labels,  # [N] int64|int32
    temperature,  # [N] fp32, or None: 1
    threshold,  # [N] fp32, smaller logits are excluded; or None
    parts,  # [N, n_parts, fields, LANES] fp32, LaneStats; or None: this kernel walks the rows
    stats,  # [R, N, K or more] fp32, out: the first K of this rank's rows
    valid_rows,  # [1] int32, out: number of labels that are not ignored; or None
    class_weight,  # [n_columns] fp32, or None
    layout,  # RowLayout of logits
    n_columns,  # that are not padding
    unit_width,
    n_parts,
    vocab_size,
    stats_width,  # numbers from a row of stats to the next one
    loss_options,  # option_arguments
    n_rows,
    shard_start,
    stats_start,  # this rank's first row in stats
    WIDTH: tl.constexpr,  # fields of LaneStats
    UNITS: tl.constexpr,  # of the row, 32 lanes each; 0: the row is no whole units
    TILES: tl.constexpr,  # of a part
    UNROLLED: tl.constexpr,  # parts that are loaded together
    HAS_EDGES: tl.constexpr,
    LANES: tl.constexpr,
    VECTOR: tl.constexpr,
):
    """Example: ``x = [1, 3, 2]``, label 1 at shard start 0 gives ``(3, 0.5032, 3)``.

    With smoothing or mean_logit also ``(-3, 3)``, with entropy ``-0.6386``, with predictions ``1``, with
    sum_sq_probs ``1.1536``.
    """
    index = tl.program_id(0).to(tl.int64)
    if valid_rows is not None:
        # The first program counts the labels while the others read logits: no launch, no atomics. The last one would
        # begin when most have ended.
        if index == 0:
            tl.store(valid_rows, count_labels(labels, n_rows, loss_options.ignore_index))
            return
        index -= 1
    label = tl.load(labels + index).to(tl.int64)
    # An ignored row counts as a row of no columns: nothing is read, and the result is the identity.
    n_columns = tl.where(label == loss_options.ignore_index, 0, n_columns)
    if temperature is not None:
        t = ops.row_temperature(temperature, index, label != loss_options.ignore_index)
        loss_options = LossOptions(*loss_options[:-2], t, loss_options[-1])  # type: ignore[call-arg]
    if threshold is not None:
        least = ops.row_least(threshold, index, label != loss_options.ignore_index)
        loss_options = LossOptions(*loss_options[:-1], least)  # type: ignore[call-arg]
    place = locate(index, layout, None, n_columns, False, VECTOR, unit_width, UNITS)
    target = locate_target(place, label - shard_start, VECTOR)
    row = LaneRow(logits, class_weight, target.vector, loss_options)
    lanes = no_columns(LANES)
    if parts is None:
        lanes = walk_parts(
            place, lanes, row, loss_options, tile, merge_lanes, HAS_EDGES, LANES, VECTOR, UNITS, TILES, UNROLLED
        )
    else:
        pointers = lane_pointers(parts, index * n_parts, WIDTH, LANES)
        lanes = merge_parts(pointers, n_parts, lanes, loss_options, load_lanes, merge_lanes, WIDTH, UNROLLED)
    loose = load_loose_columns(logits, place, target, loss_options, HAS_EDGES, VECTOR, UNITS)
    target_logit = load_logits(logits + target.offset, target.owned, loss_options)
    weight = 0.0
    if class_weight is not None:
        weight = label_weight(class_weight, label, label - shard_start, target.owned, vocab_size, loss_options)
    merged = merge_columns(
        row, place, target, lanes, loose, target_logit, weight, shard_start, loss_options, HAS_EDGES, VECTOR, UNITS
    )
    store_stats(stats + (stats_start + index) * stats_width, merged, loss_options)


def online_softmax(shard: VocabShard, options: LossOptions) -> Callable[..., None]:
    """Return the launcher of the statistics."""

    @cache_launches
    def launches(
        rows: Rows, n_rows: int, size: int, width: int, units: int
    ) -> tuple[StatisticsBlock, Launch, Launch | None]:
        shape = statistics_shape(n_rows, shard, size, 1, units)
        part_launch = _launch_of_parts(rows, shape, shard, options) if shape.is_cut else None
        return shape.block, _launch(rows, shape, shard, options, width), part_launch

    def statistics(
        logits: Tensor, targets: Labels, stats: tuple[Tensor], rank: int, count: Tensor | None = None
    ) -> None:
        """Fill ``stats[0][rank]`` of ``stats[0] [R, N, K]`` for ``logits [..., C]``; of more than K numbers the first.

        ``count [1]`` int32, if given, gets the number of labels that are not ignored.
        """
        labels, class_weight, temperature, threshold = targets
        n_rows = labels.shape[0]
        base, rows = row_arguments(logits)
        size = logits.dtype.itemsize
        units = units_of(shard, rank, stats[0].shape[0], size) if begin_at_vectors(rows[0], size) else 0
        block, launch, part_launch = launches(rows, n_rows, size, stats[0].shape[2], units)
        parts, counted = None, count
        if part_launch is not None:
            parts = stats[0].new_empty(n_rows, block.n_parts, n_lane_fields(options), block.lanes)
            tensors: tuple[Tensor | None, ...] = (base, labels, temperature, threshold, parts, count, class_weight)
            part_launch(n_rows * block.n_parts + (count is not None), tensors, (n_rows, shard.start))
            counted = None
        tensors = (base, labels, temperature, threshold, parts, stats[0], counted, class_weight)
        launch(n_rows + (counted is not None), tensors, (n_rows, shard.start, rank * n_rows))

    return statistics


def n_lane_fields(options: LossOptions) -> int:
    """Return how many fields of ``LaneStats`` the options need."""
    smoothed = bool(options.smoothing) or options.mean_logit
    return 2 + 2 * smoothed + options.entropy + options.sum_sq_probs + options.predictions


@cache_launches
def _launch(rows: Rows, shape: StatisticsShape, shard: VocabShard, options: LossOptions, width: int) -> Launch:
    (block, is_cut, at_once), compiler = shape, {}
    if not is_cut and at_once > 1 and (n_lane_fields(options) > 2 or options.softcap is not None):
        at_once = 1  # several parts of logits would take too many registers
        if options.softcap is None:
            # Two do not. Without the bound, ptxas takes 32 and loads the second part when it has used the first.
            at_once, compiler = 2, {"maxnreg": 64}
    elif block.units and not is_cut:
        compiler = {"maxnreg": 64}  # likewise
    values = (shard.n_valid, block.unit_width(shard), block.n_parts, shard.vocab_size, width, options)
    constants = _constants(options, block) | {"UNROLLED": at_once}
    return walk_launch(online_softmax_kernel, _rows(rows, block, shard), values, block, compiler, **constants)


@cache_launches
def _launch_of_parts(rows: Rows, shape: StatisticsShape, shard: VocabShard, options: LossOptions) -> Launch:
    block = shape.block
    values = (shard.n_valid, block.unit_width(shard), block.n_parts, options)
    return walk_launch(part_kernel, _rows(rows, block, shard), values, block, **_constants(options, block))


def _rows(rows: Rows, block: StatisticsBlock, shard: VocabShard) -> Rows:
    return rows[0], block.has_edges(shard, rows[1])


def _constants(options: LossOptions, block: StatisticsBlock) -> dict[str, Any]:
    return {"WIDTH": n_lane_fields(options), "UNITS": block.units, "TILES": block.tiles}
