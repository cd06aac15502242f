"""Gradient of a divergence by the student's logits, from the statistics of all ranks.

    forward   dx_i = (s_i - t_i) / T
    reverse   dx_i = s_i (log(s_i / t_i) - KL) / T
    js        dx_i = (1 - beta) s_i (log(s_i / m_i) - KL(s || m)) / T
    with hard_weight h:  (1 - h) * dx_i + h * (softmax(x)_i - [i == y])

One program does one row. Regime: bound by memory; it reads both shards once and writes one, over the student's logits
or elsewhere. ``grad_output`` and the divisor are one fp32 factor per row, so the gradient is rounded once.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from vocab_parallel_ce.kernels import primitives as ops
from vocab_parallel_ce.kernels.divergence import (
    cooled,
    kernel_options,
    load_logits,
    log2_mixture,
    log2_probs,
    merged_mixture,
    merged_ranks,
    stats_of_row,
)
from vocab_parallel_ce.kernels.launch import Dtypes, Launch, cache_launches, dtypes_of
from vocab_parallel_ce.kernels.pairs import (
    PairRows,
    Sizes,
    clear_columns,
    locate_pair,
    loss_factor,
    pair_arguments,
    pair_edges,
    pair_launch,
    second_of,
)
from vocab_parallel_ce.losses.divergences import DivergenceOptions, Teacher
from vocab_parallel_ce.shard import VocabShard
from vocab_parallel_ce.spec import GradOutputs


class Factors(NamedTuple):
    """What the gradient of a row's every column is made of."""

    student_max: tl.tensor
    teacher_max: tl.tensor
    student_sum: tl.tensor
    teacher_sum: tl.tensor
    offset: tl.tensor  # reverse: KL + log(student_sum) - log(teacher_sum); js: KL(s || m)
    hard_inverse: tl.tensor  # 1 / hard_sum
    weight: tl.tensor  # grad_output / divisor


@triton.jit
def row_factors(stats, of_student, weight, live, weights, KIND: tl.constexpr):
    """Return the ``Factors`` of a row, 0 (sums: 1) if it is not ``live``; ``of_student`` is ``KL(s || m)``."""
    offset = of_student
    if KIND == "reverse":
        offset = stats.cross / stats.student_sum  # KL + log(student_sum) - log(teacher_sum)
    hard_inverse = 0.0
    if weights.hard_weight is not None:
        hard_inverse = tl.where(live, 1.0 / stats.hard_sum, 0.0)
    return Factors(
        tl.where(live, stats.student_max, 0.0),
        tl.where(live, stats.teacher_max, 0.0),
        tl.where(live, stats.student_sum, 1.0),
        tl.where(live, stats.teacher_sum, 1.0),
        tl.where(live, offset, 0.0),
        hard_inverse,
        tl.where(live, weight, 0.0),
    )


@triton.jit
def write_tile(student, teacher, grad_student, inside, live, is_target, factors, weights, KIND: tl.constexpr):
    """Store the gradient of a tile. If the row is not ``live``, all logits count as -inf, and it is 0."""
    x, w = load_logits(student, inside & live), load_logits(teacher, inside & live)
    if KIND == "js":
        student_log = log2_probs(x, factors.student_max, tl.log2(factors.student_sum), weights)
        teacher_log = log2_probs(w, factors.teacher_max, tl.log2(factors.teacher_sum), weights)
        s, t = tl.exp2(student_log), tl.exp2(teacher_log)
        log_ratio = (student_log - log2_mixture(s, t, weights)) * 0.6931471805599453
        grad = tl.where(s == 0, 0.0, (1 - weights.beta) * s * (log_ratio - factors.offset))
    else:
        a, b = cooled(x - factors.student_max, weights), cooled(w - factors.teacher_max, weights)
        s = ops.exp_shifted(a, 0.0) * (1.0 / factors.student_sum)
        if KIND == "forward":
            t = ops.exp_shifted(b, 0.0) * (1.0 / factors.teacher_sum)
            grad = s - tl.where(x == float("-inf"), 0.0, t)
        else:
            grad = tl.where(s == 0, 0.0, s * (a - b - factors.offset))
    grad = cooled(grad, weights)
    if weights.hard_weight is not None:
        hard = ops.exp_shifted(x, factors.student_max) * factors.hard_inverse
        hard -= tl.where(is_target & (x != float("-inf")), 1.0, 0.0)
        grad = tl.where(weights.hard_weight == 1, 0.0, (1 - weights.hard_weight) * grad) + weights.hard_weight * hard
    tl.store(grad_student, (grad * factors.weight).to(grad_student.dtype.element_ty), inside)


@triton.jit(do_not_specialize=["n_rows", "shard_start"])
def divergence_gradient_kernel(
    student,  # [N, C] bf16|fp16|fp32
    teacher,  # [N, C'] bf16|fp16|fp32
    labels,  # [N] int64|int32, or None
    stats,  # [R, N, K] fp32
    mixture,  # [R, N, 2] fp32, or None
    divisor,  # [1], or None: 1
    grad_output,  # [N] fp32
    grad_student,  # [N, C] student's dtype, out; may be student
    layout,  # RowLayout of student and of grad_student
    teacher_layout,
    grad_stride,  # of grad_output
    sizes,  # Sizes
    n_ranks,
    loss_options,  # option_arguments
    weights,  # Weights
    n_rows,
    shard_start,
    KIND: tl.constexpr,
    RANKS: tl.constexpr,  # n_ranks rounded up to a power of two
    HAS_EDGES: tl.constexpr,
    ALIKE: tl.constexpr,
    LANES: tl.constexpr,
    VECTOR: tl.constexpr,
):
    """Example: forward, ``x = [1, 3]``, ``w = [2, 2]``: ``[-0.3808, 0.3808]``."""
    # Last rows first: the kernel before has just left them in the L2 cache.
    row = (n_rows - 1 - tl.program_id(0)).to(tl.int64)
    ranks = tl.arange(0, RANKS)
    pointers = stats_of_row(stats, ranks.to(tl.int64) * n_rows + row, weights, KIND)
    found = merged_ranks(pointers, ranks < n_ranks, weights, KIND)
    of_student = 0.0
    if mixture is not None:
        of_teacher, of_student = merged_mixture(mixture, row, ranks, ranks < n_ranks, n_rows)
        of_student = tl.where(of_teacher != of_teacher, of_teacher, of_student)  # NaN: log2_mixture hides it
    weight = tl.load(grad_output + row * grad_stride)
    live = row >= 0
    if divisor is not None:
        share = ops.divisor_weight(divisor)
        weight *= share
        live &= share != 0
    column = -1
    if labels is not None:
        label = tl.load(labels + row).to(tl.int64)
        live &= label != loss_options.ignore_index
        weight = tl.where((label < 0) | (label >= sizes.vocab_size), float("nan"), weight)
        column = label - shard_start
    factors = row_factors(found, of_student, weight, live, weights, KIND)
    pair = locate_pair(row, layout, teacher_layout, sizes.n_valid, ALIKE, VECTOR)
    lane_columns = ops.tile_columns(LANES, VECTOR)
    for tile in range(0, pair.width, LANES * VECTOR):
        columns = tile + lane_columns
        offset = pair.first + columns
        x, w, grad = student + offset, teacher + pair.other_first + columns, grad_student + offset
        is_target = offset == pair.begin + column
        write_tile(x, w, grad, columns < pair.width, live, is_target, factors, weights, KIND)
    if HAS_EDGES:
        offset, inside = pair_edges(pair, lane_columns, sizes.n_valid)
        x, w, grad = student + offset, teacher + offset + pair.other_shift, grad_student + offset
        is_target = offset == pair.begin + column
        write_tile(x, w, grad, inside, live, is_target, factors, weights, KIND)
    clear_columns(grad_student, pair.begin, sizes.n_valid, sizes.n_columns, LANES)


def gradient(
    student: Tensor,
    beside: Teacher,
    stats: tuple[Tensor, ...],
    divisor: Tensor | None,
    grads: GradOutputs,
    loss: None,
    grad_student: Tensor,
    *,
    shard: VocabShard,
    options: DivergenceOptions,
) -> None:
    """Fill ``grad_student``, laid out as ``student [..., C]`` or it; ``grads.loss [N]`` multiplies it per row."""
    n_ranks, n_rows, _ = stats[0].shape
    base, teacher_base, rows = pair_arguments(student, beside.logits)
    grad_base = base
    if grad_student is not student:
        grad_base, _, grad_rows = pair_arguments(grad_student, beside.logits)
        assert rows == grad_rows, "the gradient is laid out as the logits are"
    grad_output = loss_factor(grads, stats)
    tensors = (base, teacher_base, beside.labels, stats[0], second_of(stats), divisor, grad_output, grad_base)
    launch = _launch(dtypes_of(tensors), rows, grad_output.stride(0), n_ranks, shard, options)
    launch(n_rows, tensors, (n_rows, shard.start))


@cache_launches
def _launch(
    dtypes: Dtypes, rows: PairRows, grad_stride: int, n_ranks: int, shard: VocabShard, options: DivergenceOptions
) -> Launch:
    values = (grad_stride, Sizes.of(shard), n_ranks, *kernel_options(options))
    constants = {"KIND": options.divergence, "RANKS": triton.next_power_of_2(n_ranks)}
    return pair_launch(divergence_gradient_kernel, rows, values, shard, dtypes[0].itemsize, **constants)
