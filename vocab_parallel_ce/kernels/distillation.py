"""Divergence of a student's distribution from a teacher's: the statistics and losses of ``losses.divergences``.

    forward   KL = cross / teacher_sum - log(teacher_sum) + log(student_sum)
    reverse   KL = cross / student_sum - log(student_sum) + log(teacher_sum)
    js        beta * KL(t || m) + (1 - beta) * KL(s || m)

The statistics kernel reads both shards once, for ``js`` the mixture kernel once more. One program does one row. Regime:
bound by memory, the mixture by arithmetic; 1 K to 256 K columns. They do not read ignored rows. If there is one rank,
the statistics kernel does it all: it reads each row again for ``js``, and writes the losses.
"""

import triton
import triton.language as tl
from torch import Tensor

from vocab_parallel_ce.kernels import primitives as ops
from vocab_parallel_ce.kernels.distillation_gradient import gradient
from vocab_parallel_ce.kernels.divergence import (
    kernel_options,
    load_logits,
    merged,
    merged_mixture,
    merged_ranks,
    mixture_terms,
    no_columns,
    row_loss,
    stats_of_row,
    with_tile,
)
from vocab_parallel_ce.kernels.launch import Dtypes, Launch, cache_launches, dtypes_of
from vocab_parallel_ce.kernels.pairs import (
    PairRows,
    Sizes,
    locate_pair,
    pair_arguments,
    pair_edges,
    pair_launch,
    second_of,
)
from vocab_parallel_ce.losses.divergences import DivergenceOptions, Teacher
from vocab_parallel_ce.shard import VocabShard
from vocab_parallel_ce.spec import TokenOutputs

__all__ = ["gradient", "outputs", "second", "statistics"]

LOSS_ROWS = 128


@triton.jit
def store_mixture(student, teacher, mixture, pair, stats, n_columns, lane_columns, weights, HAS_EDGES: tl.constexpr):
    """Walk a row, store what it has of ``KL(t || m)`` and ``KL(s || m)`` at ``mixture``, and return both."""
    LANES: tl.constexpr = lane_columns.shape[0]
    VECTOR: tl.constexpr = lane_columns.shape[1]
    of_teacher = tl.zeros([LANES], tl.float32)
    of_student = tl.zeros([LANES], tl.float32)
    for tile in range(0, pair.width, LANES * VECTOR):
        columns = tile + lane_columns
        x, w = student + pair.first + columns, teacher + pair.other_first + columns
        parts = mixture_terms(x, w, columns < pair.width, stats, weights)
        of_teacher += parts[0]
        of_student += parts[1]
    if HAS_EDGES:
        offset, inside = pair_edges(pair, lane_columns, n_columns)
        w = teacher + offset + pair.other_shift
        parts = mixture_terms(student + offset, w, inside, stats, weights)
        of_teacher += parts[0]
        of_student += parts[1]
    own_teacher = tl.sum(of_teacher) * 0.6931471805599453
    own_student = tl.sum(of_student) * 0.6931471805599453
    tl.store(mixture, own_teacher)
    tl.store(mixture + 1, own_student)
    return own_teacher, own_student


@triton.jit(do_not_specialize=["n_rows", "shard_start", "stats_start"])
def divergence_statistics_kernel(
    student,  # [N, C] bf16|fp16|fp32
    teacher,  # [N, C'] bf16|fp16|fp32
    labels,  # [N] int64|int32, or None
    stats,  # [R, N, K] fp32, out: this rank's rows
    mixture,  # [1, N, 2] fp32, out, of js; None if there are other ranks
    loss,  # [N] fp32, out; None if there are other ranks
    divisor,  # [1] of loss, or None: 1
    layout,  # RowLayout of student
    teacher_layout,
    sizes,  # Sizes
    loss_options,  # option_arguments
    weights,  # Weights
    n_rows,
    shard_start,
    stats_start,  # this rank's first row in stats
    KIND: tl.constexpr,
    HAS_EDGES: tl.constexpr,
    ALIKE: tl.constexpr,
    LANES: tl.constexpr,
    VECTOR: tl.constexpr,
):
    """Example: forward, ``x = [1, 3]``, ``w = [2, 2]``: ``(3, 1.1353, 2, 2, 2)``, loss 0.4338."""
    row = tl.program_id(0).to(tl.int64)
    label = None
    n_columns = sizes.n_valid
    if labels is not None:
        label = tl.load(labels + row).to(tl.int64)
        # An ignored row counts as a row of no columns: nothing is read.
        n_columns = tl.where(label == loss_options.ignore_index, 0, n_columns)
    pair = locate_pair(row, layout, teacher_layout, n_columns, ALIKE, VECTOR)
    target = float("-inf")
    if weights.hard_weight is not None:
        column = label - shard_start
        target = load_logits(student + pair.begin + column, (column >= 0) & (column < n_columns))
    lane_columns = ops.tile_columns(LANES, VECTOR)
    lanes = no_columns(LANES)
    for tile in range(0, pair.width, LANES * VECTOR):
        columns = tile + lane_columns
        x, w = student + pair.first + columns, teacher + pair.other_first + columns
        lanes = with_tile(lanes, x, w, columns < pair.width, weights, KIND)
    if HAS_EDGES:
        offset, inside = pair_edges(pair, lane_columns, n_columns)
        w = teacher + offset + pair.other_shift
        lanes = with_tile(lanes, student + offset, w, inside, weights, KIND)
    found = merged(lanes, target, weights, KIND)
    pointer = stats_of_row(stats, stats_start + row, weights, KIND)
    tl.store(pointer, found.student_max)
    tl.store(pointer + 1, found.student_sum)
    tl.store(pointer + 2, found.teacher_max)
    tl.store(pointer + 3, found.teacher_sum)
    pointer += 4
    if KIND != "js":
        tl.store(pointer, found.cross)
        pointer += 1
    if weights.hard_weight is not None:
        tl.store(pointer, found.target)
        tl.store(pointer + 1, found.hard_sum)
    parts = 0.0, 0.0
    if mixture is not None:
        out = mixture + 2 * row
        parts = store_mixture(student, teacher, out, pair, found, n_columns, lane_columns, weights, HAS_EDGES)
    if loss is not None:
        tl.store(loss + row, row_loss(found, *parts, label, divisor, sizes, loss_options, weights, KIND))


@triton.jit(do_not_specialize=["n_rows", "mixture_start"])
def mixture_kernel(
    student,  # [N, C] bf16|fp16|fp32
    teacher,  # [N, C'] bf16|fp16|fp32
    labels,  # [N] int64|int32, or None
    stats,  # [R, N, K] fp32
    mixture,  # [R, N, 2] fp32, out: this rank's rows
    layout,  # RowLayout of student
    teacher_layout,
    sizes,  # Sizes
    n_ranks,
    loss_options,  # option_arguments
    weights,  # Weights
    n_rows,
    mixture_start,  # this rank's first row in mixture
    RANKS: tl.constexpr,  # n_ranks rounded up to a power of two
    HAS_EDGES: tl.constexpr,
    ALIKE: tl.constexpr,
    LANES: tl.constexpr,
    VECTOR: tl.constexpr,
):
    """Example: ``x = [1, 3]``, ``w = [2, 2]``, beta 0.5: 0.0783 and 0.1008."""
    row = tl.program_id(0).to(tl.int64)
    ranks = tl.arange(0, RANKS)
    pointers = stats_of_row(stats, ranks.to(tl.int64) * n_rows + row, weights, "js")
    found = merged_ranks(pointers, ranks < n_ranks, weights, "js")
    label = None
    n_columns = sizes.n_valid
    if labels is not None:
        label = tl.load(labels + row).to(tl.int64)
        n_columns = tl.where(label == loss_options.ignore_index, 0, n_columns)
    pair = locate_pair(row, layout, teacher_layout, n_columns, ALIKE, VECTOR)
    lane_columns = ops.tile_columns(LANES, VECTOR)
    out = mixture + 2 * (mixture_start + row)
    store_mixture(student, teacher, out, pair, found, n_columns, lane_columns, weights, HAS_EDGES)


@triton.jit(do_not_specialize=["n_rows"])
def divergence_loss_kernel(
    stats,  # [R, N, K] fp32
    mixture,  # [R, N, 2] fp32, or None
    labels,  # [N] int64|int32, or None
    divisor,  # [1], or None: 1
    loss,  # [N] fp32, out
    n_ranks,
    sizes,  # Sizes
    loss_options,  # option_arguments
    weights,  # Weights
    n_rows,
    KIND: tl.constexpr,
    RANKS: tl.constexpr,  # n_ranks rounded up to a power of two
    ROWS: tl.constexpr,
):
    """Example: forward, ranks with ``(1, 1, 2, 1, 0)`` and ``(3, 1, 2, 1, 0)``: loss 0.4338."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = rows < n_rows
    label = None
    if labels is not None:
        label = tl.load(labels + rows, inside, other=0).to(tl.int64)
    ranks = tl.arange(0, RANKS)[:, None]
    mask = (ranks < n_ranks) & inside[None, :]
    pointers = stats_of_row(stats, ranks.to(tl.int64) * n_rows + rows[None, :], weights, KIND)
    found = merged_ranks(pointers, mask, weights, KIND)
    of_teacher, of_student = 0.0, 0.0
    if mixture is not None:
        of_teacher, of_student = merged_mixture(mixture, rows[None, :], ranks, mask, n_rows)
    value = row_loss(found, of_teacher, of_student, label, divisor, sizes, loss_options, weights, KIND)
    tl.store(loss + rows, value, inside)


def statistics(
    student: Tensor,
    beside: Teacher,
    stats: tuple[Tensor, ...],
    rank: int,
    count: None = None,
    outputs: TokenOutputs | None = None,
    divisor: Tensor | None = None,
    *,
    shard: VocabShard,
    options: DivergenceOptions,
) -> None:
    """Fill ``stats[0][rank]`` of ``stats[0] [R, N, K]``. With ``outputs``, fill all: the rank is the only one."""
    n_rows = stats[0].shape[1]
    base, teacher_base, rows = pair_arguments(student, beside.logits)
    mixture, loss = (None, None) if outputs is None else (second_of(stats), outputs.loss)
    tensors = (base, teacher_base, beside.labels, stats[0], mixture, loss, divisor)
    launch = _statistics(dtypes_of(tensors), rows, shard, options)
    launch(n_rows, tensors, (n_rows, shard.start, rank * n_rows))


def second(
    student: Tensor,
    beside: Teacher,
    stats: tuple[Tensor, ...],
    rank: int,
    *,
    shard: VocabShard,
    options: DivergenceOptions,
) -> None:
    """Fill ``stats[1][rank]`` of ``stats[1] [R, N, 2]``."""
    n_ranks, n_rows, _ = stats[0].shape
    base, teacher_base, rows = pair_arguments(student, beside.logits)
    tensors = (base, teacher_base, beside.labels, *stats)
    launch = _mixture(dtypes_of(tensors), rows, n_ranks, shard, options)
    launch(n_rows, tensors, (n_rows, rank * n_rows))


def outputs(
    stats: tuple[Tensor, ...],
    beside: Teacher,
    divisor: Tensor | None,
    outputs: TokenOutputs,
    *,
    shard: VocabShard,
    options: DivergenceOptions,
) -> None:
    """Fill ``outputs``, contiguous, from the statistics of all ranks; ``divisor [1]`` divides the loss if given."""
    n_ranks, n_rows, _ = stats[0].shape
    tensors = (stats[0], second_of(stats), beside.labels, divisor, outputs.loss)
    launch = _losses(dtypes_of(tensors), n_ranks, shard, options)
    launch(-(-n_rows // LOSS_ROWS), tensors, (n_rows,))


@cache_launches
def _statistics(dtypes: Dtypes, rows: PairRows, shard: VocabShard, options: DivergenceOptions) -> Launch:
    values, kernel = (Sizes.of(shard), *kernel_options(options)), divergence_statistics_kernel
    return pair_launch(kernel, rows, values, shard, dtypes[0].itemsize, KIND=options.divergence)


@cache_launches
def _mixture(dtypes: Dtypes, rows: PairRows, n_ranks: int, shard: VocabShard, options: DivergenceOptions) -> Launch:
    values, size = (Sizes.of(shard), n_ranks, *kernel_options(options)), dtypes[0].itemsize
    return pair_launch(mixture_kernel, rows, values, shard, size, RANKS=triton.next_power_of_2(n_ranks))


@cache_launches
def _losses(dtypes: Dtypes, n_ranks: int, shard: VocabShard, options: DivergenceOptions) -> Launch:
    constants = {"KIND": options.divergence, "RANKS": triton.next_power_of_2(n_ranks), "ROWS": LOSS_ROWS}
    values = (n_ranks, Sizes.of(shard), *kernel_options(options))
    return Launch(divergence_loss_kernel, values, constants, num_warps=4)
