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
    """``(first, width)`` of the part of a row that begins at a line of 128 bytes and is whole vectors.

    Both are multiples of VECTOR (16 bytes) by construction, which the compiler sees: accesses are 16 bytes
    wide even where neither the row's beginning nor its end is aligned. What lies before and after the body
    are the row's edges. A row of 85 columns at 60 with VECTOR 8 has the body [64, 144), its head is
    [60, 64) and its tail [144, 145).
    """
    line = 8 * VECTOR
    first = (begin + line - 1) // line * line
    last = (begin + n_columns) // VECTOR * VECTOR
    return first, tl.maximum(last - first, 0).to(tl.int32)


@triton.jit
def edge_offsets(begin, n_columns, first, width, VECTOR: tl.constexpr):
    """Element offsets of a row's head and tail, ``[16 * VECTOR]``, and which of them exist."""
    return edge_offsets_of(tl.arange(0, 16 * VECTOR), begin, n_columns, first, width, VECTOR)


@triton.jit
def edge_offsets_of(lane, begin, n_columns, first, width, VECTOR: tl.constexpr):
    """:func:`edge_offsets` of the elements ``lane`` of the 16 * VECTOR."""
    line = 8 * VECTOR
    end = begin + n_columns
    is_head = lane < line
    offset = tl.where(is_head, begin + lane, first + width + lane - line)
    return offset, offset < tl.where(is_head, tl.minimum(first, end), end)


@triton.jit
def loose_offsets(
    begin, n_columns, first, width, target_vector, VECTOR: tl.constexpr, HAS_EDGES: tl.constexpr
):
    """Element offsets of what a walk of whole vectors leaves out, and which of them exist.

    These are the vector at ``first + target_vector``, none if that is negative, and the row's edges.
    """
    if HAS_EDGES:
        lane = tl.arange(0, 32 * VECTOR)
        offset, inside = edge_offsets_of(lane, begin, n_columns, first, width, VECTOR)
        place = lane - 16 * VECTOR
        is_edge = place < 0
        offset = tl.where(is_edge, offset, first + target_vector + place)
        inside = tl.where(is_edge, inside, (place < VECTOR) & (target_vector >= 0))
    else:
        lane = tl.arange(0, VECTOR)
        offset = first + target_vector + lane
        inside = (lane < VECTOR) & (target_vector >= 0)
    return offset, inside


@triton.jit
def finite_or_zero(row_max):
    """-inf replaced by 0, since exp(-inf - 0) is the 0 that exp(-inf - -inf) is not."""
    return tl.where(row_max == float("-inf"), 0.0, row_max)


@triton.jit
def raised_by(old_max, new_shift):
    """``old_max - new_shift``, to move what was summed relative to ``old_max``; 0 where that is -inf."""
    return tl.where(old_max == float("-inf"), 0.0, old_max - new_shift)


@triton.jit
def bounded(gap):
    """``gap``, at least -1e30: where an exponential that is 0 multiplies it, the product is 0, not NaN."""
    return tl.maximum(gap, -1e30)


@triton.jit
def exp_shifted(x, shift):
    """exp(x - shift), by log2(e). The subtraction comes first: far from 0, fusing the two loses digits."""
    return tl.exp2((x - shift) * 1.4426950408889634)


@triton.jit
def log1p(x):
    """log(1 + x) of ``x >= -1``, to the last digits of a small x; ``log1p(1e-5) = 9.99995e-6``.

    Below 1/2 it is 2 atanh(x / (2 + x)) by its series, whose next term is 1e-8 of it.
    """
    s = x / (2.0 + x)
    w = s * s
    small = 2.0 * s * (1.0 + w * (0.3333333333 + w * (0.2 + w * (0.1428571429 + w * 0.1111111111))))
    return tl.where(tl.abs(x) < 0.5, small, tl.log(1.0 + x))


@triton.jit
def label_exp(row_max, target_logit):
    """``exp(z_y - row_max)``: 1 where the label has the largest z, 0 where it is not among the columns."""
    return exp_shifted(target_logit, finite_or_zero(row_max))


@triton.jit
def tanh(a):
    """tanh, to 2 units in the last place where exp2 and the division are exact; ``tanh(0.5) = 0.4621172``.

    Below 1, where 1 - 2 / (exp(2a) + 1) cancels, a polynomial in a^2 fitted to (tanh(a) / a - 1) / a^2 at
    Chebyshev nodes.
    """
    s = a * a
    p = -0.00035522019607014954
    p = p * s + 0.0022899629548192024
    p = p * s - 0.007930298335850239
    p = p * s + 0.021475795656442642
    p = p * s - 0.053875986486673355
    p = p * s + 0.1333228200674057
    p = p * s - 0.33333292603492737
    near = a + a * (s * p)
    far = 1.0 - 2.0 / (tl.exp2(tl.abs(a) * 2.8853900817779268) + 1.0)
    return tl.where(s < 1.0, near, tl.where(a < 0, -far, far))


@triton.jit
def transform(x, row_options):
    """``(z, dz/dx)`` of fp32 logits: ``spec.transformed``; ``row_options`` are ``launch.option_arguments``.

    An infinite logit stays infinite: an excluded column would come back as -softcap. The selects also
    keep the compiler from fusing a product with the subtraction of the maximum, which would leave the
    maximum itself a distance from the maximum.
    """
    _, _, _, logit_scale, softcap, _, _ = row_options
    slope = 1.0
    if softcap is not None:
        scale = 1.0
        if logit_scale is not None:
            scale = logit_scale
        # No infinity, which times a logit of 0 would be NaN.
        capped = tanh(x * tl.minimum(scale / softcap, 3.4028234663852886e38))
        slope = scale * (1.0 - capped * capped)
        x = tl.where(tl.abs(x) == float("inf"), x, softcap * capped)
    elif logit_scale is not None:
        slope = logit_scale
        x = tl.where(tl.abs(x) == float("inf"), x, x * logit_scale)
    return x, slope


@triton.jit
def stats_of_row(stats, row, row_options):
    """Pointers to the packed statistics of ``row``, K apart: their order is ``LossOptions.statistics``."""
    _, smoothing, _, _, _, entropy, predictions = row_options
    return stats + row * (3 + 2 * (smoothing is not None) + (entropy is not None) + (predictions is not None))


@triton.jit
def merge_ranks(pointers, mask, row_options):
    """Merge the statistics at ``pointers`` over axis 0, the ranks; masked ranks are the identity.

    Every rank merges the same numbers in the same order, so the results are equal bit for bit. Returns
    ``(row_max, others_sum, target_logit, shifted_sum, exp_shifted_sum, argmax)``, 0 for what is not carried.
    """
    _, smoothing, _, _, _, entropy, predictions = row_options
    row_max = tl.load(pointers, mask, other=float("-inf"))
    others_sum = tl.load(pointers + 1, mask, other=0.0)
    target_logit = tl.load(pointers + 2, mask, other=float("-inf"))
    merged_max = tl.max(row_max, axis=0)
    shift = finite_or_zero(merged_max)
    scale = exp_shifted(row_max, shift)
    merged_sum = tl.sum(others_sum * scale, axis=0)
    shifted_sum = tl.zeros_like(merged_sum)
    exp_shifted_sum = tl.zeros_like(merged_sum)
    argmax = tl.zeros_like(merged_sum)
    pointers += 3
    if smoothing is not None:
        gaps = tl.load(pointers, mask, other=0.0)
        n_columns = tl.load(pointers + 1, mask, other=0.0)
        shifted_sum = tl.sum(gaps + n_columns * raised_by(row_max, shift), axis=0)
        pointers += 2
    if entropy is not None:
        exp_gaps = tl.load(pointers, mask, other=0.0)
        sum_exp = others_sum + label_exp(row_max, target_logit)
        exp_shifted_sum = tl.sum((exp_gaps + sum_exp * bounded(raised_by(row_max, shift))) * scale, axis=0)
        pointers += 1
    if predictions is not None:
        first = tl.load(pointers, mask, other=float("inf"))
        argmax = tl.min(tl.where(row_max == merged_max, first, float("inf")), axis=0)
    return merged_max, merged_sum, tl.max(target_logit, axis=0), shifted_sum, exp_shifted_sum, argmax


@triton.jit
def log_sum_exp(merged):
    """``spec.log_sum_exp`` of what :func:`merge_ranks` returns."""
    row_max, others_sum, target_logit, _, _, _ = merged
    return log1p(others_sum + (label_exp(row_max, target_logit) - 1.0))


@triton.jit
def at_the_edges(value, label, vocab_size, row_options):
    """``value`` of rows that count; NaN where the label is outside the vocabulary, 0 in ignored rows."""
    value = tl.where((label < 0) | (label >= vocab_size), float("nan"), value)
    return tl.where(label == row_options[0], 0.0, value)


@triton.jit
def row_loss(merged, label, vocab_size, row_options):
    """Unreduced loss: ``spec.loss``, for one row or a vector of rows."""
    _, smoothing, z_loss, _, _, _, _ = row_options
    row_max, _, target_logit, shifted_sum, _, _ = merged
    log_sum = log_sum_exp(merged)
    value = log_sum + (row_max - target_logit)
    if smoothing is not None:
        value = (1 - smoothing) * value + smoothing * (log_sum - shifted_sum / vocab_size)
    if z_loss is not None:
        lse = row_max + log_sum
        value += z_loss * lse * lse
    return at_the_edges(value, label, vocab_size, row_options)


@triton.jit
def store_outputs(
    loss, entropy, lse, predictions, rows, inside, merged, label, divisor, vocab_size, row_options
):
    """Store what a row, or a vector of rows, comes to: ``spec.TokenOutputs``, None where not asked for.

    ``divisor`` as in :func:`divisor_weight`, or None: 1; ``inside`` masks a vector of rows.
    """
    row_max, others_sum, target_logit, _, exp_shifted_sum, argmax = merged
    sum_exp = others_sum + label_exp(row_max, target_logit)
    value = row_loss(merged, label, vocab_size, row_options)
    if divisor is not None:
        weight = divisor_weight(divisor)
        value = tl.where(weight == 0, 0.0, value * weight)
    tl.store(loss + rows, value, inside)
    if entropy is not None:
        value = log_sum_exp(merged) - exp_shifted_sum / sum_exp
        tl.store(entropy + rows, at_the_edges(value, label, vocab_size, row_options), inside)
    live = label != row_options[0]
    if lse is not None:
        tl.store(lse + rows, tl.where(live, row_max + log_sum_exp(merged), 0.0), inside)
    if predictions is not None:
        known = live & (sum_exp < float("inf")) & (argmax < float("inf"))
        tl.store(predictions + rows, tl.where(known, argmax, -1.0).to(tl.int64), inside)


@triton.jit
def divisor_weight(divisor):
    """1 / divisor: a row's weight in a mean, or in a sum over a number of items; 0 for none."""
    n = tl.load(divisor).to(tl.float32)
    return tl.where(n == 0, 0.0, 1.0 / n)
