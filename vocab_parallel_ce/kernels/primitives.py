"""Jit functions that several kernels share: where a row lies, and the algebra of a row's statistics.

Constants stand as literals: every launch compares each global that a kernel uses with its value at
compile time, which costs microseconds each.
"""

import triton
import triton.language as tl


@triton.jit
def row_begin(row, layout):
    """Element offset of ``row`` (int64) from the base; ``layout`` is a ``RowLayout``.

    With ``layout = (0, 4, 1, 40, 8, 0)``, row 5 begins at ``1 * 40 + 1 * 8 = 48``.
    """
    offset, size1, size2, stride0, stride1, stride2 = layout
    outer = row // size2
    return (
        offset
        + (outer // size1).to(tl.int64) * stride0
        + (outer % size1).to(tl.int64) * stride1
        + (row % size2).to(tl.int64) * stride2
    )


@triton.jit
def row_body(begin, n_columns, VECTOR: tl.constexpr):
    """``(first, width)`` of the part of a row that whole, aligned vectors cover.

    Both are multiples of VECTOR by construction, which the compiler sees: loads are 16 bytes wide
    even where neither the row's beginning nor its end is aligned. The fewer than VECTOR columns
    before and after it are the row's edges. A row of 21 columns at 3 with VECTOR 8 has the body
    [8, 24) and no tail, its head is [3, 8).
    """
    first = (begin + VECTOR - 1) // VECTOR * VECTOR
    last = (begin + n_columns) // VECTOR * VECTOR
    return first, tl.maximum(last - first, 0).to(tl.int32)


@triton.jit
def edge_offsets(begin, n_columns, first, width, VECTOR: tl.constexpr):
    """Element offsets of a row's head and tail, ``[2 * VECTOR]``, and which of them exist."""
    lane = tl.arange(0, 2 * VECTOR)
    end = begin + n_columns
    is_head = lane < VECTOR
    offset = tl.where(is_head, begin + lane, first + width + lane - VECTOR)
    return offset, offset < tl.where(is_head, tl.minimum(first, end), end)


@triton.jit
def finite_or_zero(row_max):
    """-inf replaced by 0, since exp(-inf - 0) is the 0 that exp(-inf - -inf) is not."""
    return tl.where(row_max == float("-inf"), 0.0, row_max)


@triton.jit
def exp_shifted(x, shift):
    """exp(x - shift), by log2(e). The subtraction comes first: far from 0, fusing the two loses digits."""
    return tl.exp2((x - shift) * 1.4426950408889634)


@triton.jit
def merge_ranks(pointers, mask, HAS_SUM: tl.constexpr):
    """Merge the statistics at ``pointers`` over axis 0, the ranks; masked ranks are the identity.

    Every rank merges the same numbers in the same order, so the results are equal bit for bit.
    """
    row_max = tl.load(pointers, mask, other=float("-inf"))
    sum_exp = tl.load(pointers + 1, mask, other=0.0)
    target_logit = tl.load(pointers + 2, mask, other=float("-inf"))
    merged_max = tl.max(row_max, axis=0)
    shift = finite_or_zero(merged_max)
    merged_sum = tl.sum(sum_exp * exp_shifted(row_max, shift), axis=0)
    logit_sum = tl.zeros_like(merged_sum)
    if HAS_SUM:
        logit_sum = tl.sum(tl.load(pointers + 3, mask, other=0.0), axis=0)
    return merged_max, merged_sum, tl.max(target_logit, axis=0), logit_sum


@triton.jit
def row_loss(
    row_max,
    sum_exp,
    target_logit,
    logit_sum,
    label,
    vocab_size,
    ignore_index,
    label_smoothing,
    HAS_SUM: tl.constexpr,
):
    """Unreduced loss: ``spec.loss``, for one row or a vector of rows."""
    log_sum_exp = tl.log(sum_exp)
    value = log_sum_exp + (row_max - target_logit)
    if HAS_SUM:
        uniform = log_sum_exp + (row_max - logit_sum / vocab_size)
        value = (1 - label_smoothing) * value + label_smoothing * uniform
    value = tl.where((label < 0) | (label >= vocab_size), float("nan"), value)
    return tl.where(label == ignore_index, 0.0, value)


@triton.jit
def mean_weight(valid_rows):
    """1 / (number of rows that are not ignored): a row's weight in the mean; 0 rows have no weight."""
    count = tl.load(valid_rows).to(tl.float32)
    return tl.where(count > 0, 1.0 / tl.maximum(count, 1.0), 0.0)
