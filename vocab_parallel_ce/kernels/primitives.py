"""Jit functions that several kernels share: the position of a row, and arithmetic.

Constants are literals: on its own launch path, Triton compares each global of a kernel with its compiled value.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

SMALL_CAP = 64.0  # the largest for which a softcap of 16-bit logits is fast


@triton.jit
def begin(OVERLAPS: tl.constexpr):
    """Let the next launch of the stream begin, and wait for the one before: nothing may be read or written earlier.

    A launch that ``overlaps`` begins while the one before ends (programmatic dependent launch, CUDA C++ Programming
    Guide); without, one waits for the other's end before it begins.
    """
    if OVERLAPS:
        gdc_launch_dependents()
        gdc_wait()


@triton.jit
def row_begin(row, layout):
    """Return the element offset of ``row`` (int64) from the base, as ``layout.py`` defines it."""
    outer = row // layout.size2
    return (
        layout.offset
        + (outer // layout.size1).to(tl.int64) * layout.stride0
        + (outer % layout.size1).to(tl.int64) * layout.stride1
        + (row % layout.size2).to(tl.int64) * layout.stride2
    )


@triton.jit
def row_body(begin, n_columns, VECTOR: tl.constexpr):
    """Return ``(first, width)`` of a row's body: whole vectors that begin at a line of 128 bytes.

    Both are multiples of VECTOR (16 bytes), and the compiler sees that. So accesses are 16 bytes wide even
    if the row is not aligned. The edges are what lies before and after the body. Example: a row of 85 columns
    at 60, VECTOR 8. Its body is [64, 144), its head [60, 64), its tail [144, 145).
    """
    line = 8 * VECTOR
    first = (begin + line - 1) // line * line
    last = (begin + n_columns) // VECTOR * VECTOR
    return first, tl.maximum(last - first, 0).to(tl.int32)


@triton.jit
def unit_body(begin, n_columns, VECTOR: tl.constexpr):
    """Return ``(first, width)`` of the body of a row that is whole units: it and they begin at boundaries of 16 bytes.

    Its only edge is a last vector that is partly padding.
    """
    return begin // VECTOR * VECTOR, n_columns // VECTOR * VECTOR


@triton.jit
def unit_lanes(width, unit_width, LANES: tl.constexpr, VECTOR: tl.constexpr):
    """Return each lane's first column, and where its unit ends in a body of ``width``; a unit has 32 lanes, a warp."""
    lane = tl.arange(0, LANES)
    unit_begin = lane // 32 * (unit_width // VECTOR) * VECTOR
    unit_end = tl.minimum(width, unit_begin + unit_width) // VECTOR * VECTOR
    return unit_begin + lane % 32 * VECTOR, unit_end


@triton.jit
def tiles_of_program(n_rows, n_programs, IS_CUT: tl.constexpr, WIDTH: tl.constexpr):
    """Return a program's row (int64), its first tile, and the step to its next tile."""
    program, begin_tile, step = tl.program_id(0), 0, WIDTH
    if IS_CUT:
        begin_tile = program % n_programs * WIDTH
        program //= n_programs
        step = n_programs * WIDTH
    # Last rows first: the kernel before has just left them in the L2 cache.
    return (n_rows - 1 - program).to(tl.int64), begin_tile, step


@triton.jit
def tile_columns(LANES: tl.constexpr, VECTOR: tl.constexpr):
    """Return the columns ``[LANES, VECTOR]`` of a row's first tile: one vector per lane."""
    return tl.arange(0, LANES)[:, None] * VECTOR + tl.arange(0, VECTOR)[None, :]


@triton.jit
def edge_offsets(lane, begin, n_columns, first, width, VECTOR: tl.constexpr):
    """Return the element offsets of a row's head and tail, and which of them exist.

    ``lane`` counts from 0 to 16 * VECTOR: the first half are the head's, the second half the tail's.
    """
    line = 8 * VECTOR
    end = begin + n_columns
    is_head = lane < line
    offset = tl.where(is_head, begin + lane, first + width + lane - line)
    return offset, offset < tl.where(is_head, tl.minimum(first, end), end)


@triton.jit
def load(pointers, mask, other):
    """Return what is at ``pointers``, and ``other`` where ``mask`` excludes it; None excludes nothing."""
    return tl.load(pointers) if mask is None else tl.load(pointers, mask, other=other)


@triton.jit
def load_fields(pointers, mask, fields, empty, step):
    """Return the numbers of a record of which ``fields`` [bool] are stored, ``step`` apart; 0 for the others.

    What ``mask`` excludes has ``empty`` [number]. The first field is always stored.
    """
    first = load(pointers, mask, empty[0])
    numbers = (first,)
    for i in tl.static_range(1, len(fields)):
        number = tl.zeros_like(first)
        if fields[i]:
            pointers += step
            number = load(pointers, mask, empty[i])
        numbers = numbers + (number,)
    return numbers


@triton.jit
def store_fields(pointers, record, fields, step):
    """Store the ``fields`` [bool] of a record in fp32, ``step`` apart."""
    for i in tl.static_range(len(fields)):
        if fields[i]:
            tl.store(pointers, record[i].to(tl.float32))
            pointers += step


@triton.jit
def merge_tree(stats, loss_options, MERGE: tl.constexpr, RECORD: tl.constexpr):
    """Return the statistics of a row from those of its units, ``[n]``: a power of two, neighbours first.

    So the numbers of 8 units do not depend on how many of them a rank has merged already. ``MERGE(a, b, loss_options)``
    merges the statistics of two sets of columns, which ``RECORD(numbers)`` makes of their numbers.
    """
    if stats[0].shape[0] == 1:
        merged = RECORD([tl.sum(x) for x in stats])
    else:
        pairs = [tl.split(tl.reshape(x, [x.shape[0] // 2, 2])) for x in stats]
        merged = MERGE(RECORD([x[0] for x in pairs]), RECORD([x[1] for x in pairs]), loss_options)
        merged = merge_tree(merged, loss_options, MERGE, RECORD)
    return merged


@triton.jit
def merge_neighbours(pointers, step, mask, loss_options, LOAD: tl.constexpr, MERGE: tl.constexpr, RANKS: tl.constexpr):
    """Return the statistics of RANKS ranks, ``step`` apart, merged as in :func:`merge_tree`."""
    if RANKS == 1:
        merged = LOAD(pointers, mask, loss_options, 1)
    else:
        HALF: tl.constexpr = 4 if RANKS > 4 else 2 if RANKS > 2 else 1
        a = merge_neighbours(pointers, step, mask, loss_options, LOAD, MERGE, HALF)
        b = merge_neighbours(pointers + HALF * step, step, mask, loss_options, LOAD, MERGE, RANKS - HALF)
        merged = MERGE(a, b, loss_options)
    return merged


@triton.jit
def merge_ranks(pointers, step, mask, loss_options, LOAD: tl.constexpr, MERGE: tl.constexpr, RANKS: tl.constexpr):
    """Return the statistics of all ranks, of a row or of a vector of rows; ``pointers`` are the first rank's.

    Every rank merges the same numbers in the same order, so all ranks get the same bits. Of more than 8 ranks each 8
    are a tree, one after the other.
    """
    merged = merge_neighbours(pointers, step, mask, loss_options, LOAD, MERGE, min(RANKS, 8))
    for _ in range(8, RANKS // 8 * 8, 8):
        pointers += 8 * step
        group = merge_neighbours(pointers, step, mask, loss_options, LOAD, MERGE, 8)
        merged = MERGE(merged, group, loss_options)
    if RANKS > 8 and RANKS % 8 > 0:
        group = merge_neighbours(pointers + 8 * step, step, mask, loss_options, LOAD, MERGE, RANKS % 8)
        merged = MERGE(merged, group, loss_options)
    return merged


@triton.jit
def finite_or_zero(row_max):
    """Replace -inf by 0: exp(-inf - 0) is 0, exp(-inf - -inf) is NaN."""
    return tl.where(row_max == float("-inf"), 0.0, row_max)


@triton.jit
def raised_by(old_max, new_shift):
    """Return ``old_max - new_shift``, by which a shifted sum moves; 0 if ``old_max`` is -inf."""
    return tl.where(old_max == float("-inf"), 0.0, old_max - new_shift)


@triton.jit
def bounded(shifted):
    """Limit ``shifted`` to -1e30 and above: times an exponential of 0 it is then 0, not NaN."""
    return tl.maximum(shifted, -1e30)


@triton.jit
def exp_shifted(x, shift):
    """Return exp(x - shift), by exp2. The subtraction comes first: a fused one loses digits far from 0."""
    return tl.exp2((x - shift) * 1.4426950408889634)


@triton.jit
def log1p(x):
    """Return log(1 + x) for ``x >= -1``, exact to the last digits of a small x; ``log1p(1e-5) = 9.99995e-6``.

    Below 1/2 it is the series of 2 atanh(x / (2 + x)). The first omitted term is 1e-8 of the result.
    """
    s = x / (2.0 + x)
    w = s * s
    small = 2.0 * s * (1.0 + w * (0.3333333333 + w * (0.2 + w * (0.1428571429 + w * 0.1111111111))))
    return tl.where(tl.abs(x) < 0.5, small, tl.log(1.0 + x))


@triton.jit
def log2_normal(x):
    """Return log2(x) for normal ``x > 0``, relative error 1.6 * 2^-23; of NaN some number. Faster than ``log2``.

    ``x = 2^e * (1 + f)``, ``1 + f`` in sqrt([1/2, 2]); a polynomial in f, fitted to log2(1 + f) / f there.
    """
    bits = x.to(tl.int32, bitcast=True)
    exponent = (bits - 0x3F3504F3) & -0x800000  # 2^23 e
    f = (bits - exponent).to(tl.float32, bitcast=True) - 1.0
    p = 0.12583723664283752
    p = p * f - 0.20726986229419708
    p = p * f + 0.21571557223796844
    p = p * f - 0.23894479870796204
    p = p * f + 0.28791624307632446
    p = p * f - 0.3607036769390106
    p = p * f + 0.48091062903404236
    p = p * f - 0.7213473320007324
    p = p * f + 1.4426950216293335
    # Fused as written: kernels that would choose themselves may differ.
    return tl.fma(p, f, exponent.to(tl.float32) * 1.1920928955078125e-07)


@triton.jit
def tanh(a):
    """Return tanh(a), to 2 units in the last digit if exp2 and division are exact; ``tanh(0.5) = 0.4621172``.

    Below 1 the other formula cancels: a polynomial in a^2, fitted to (tanh(a) / a - 1) / a^2 at Chebyshev nodes.
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
def capped(x, factor, IS_FAST: tl.constexpr):
    """Return ``(tanh(x * factor), 1 - tanh(x * factor)^2)`` for ``factor > 0``; of NaN some number.

    IS_FAST takes one exponential and one root, with an absolute error of up to 3e-7: for 16-bit logits, whose own
    rounding near the cap is hundreds of times that, and a small cap. The result never falls while x rises: equal
    logits stay equal, and the first maximum the first. The finite factor: infinity times a logit of 0 is NaN.
    """
    if IS_FAST:
        a = x * tl.minimum(factor * 2.8853900817779268, 3.4028234663852886e38)
        e = tl.exp2(tl.minimum(tl.abs(a), 60.0)) + 1.0
        root = tl.rsqrt(e)
        r = root * root  # 1 / e, at most 1/2
        r *= 2.0 - e * r  # a step of Newton's, exact to the last digit
        t = 1.0 - 2.0 * r
        slope = tl.where(t < 1.0, 4.0 * r * (1.0 - r), 0.0)
        t = tl.where(a < 0, -t, t)
    else:
        t = tanh(x * tl.minimum(factor, 3.4028234663852886e38))
        slope = 1.0 - t * t
    return t, slope


@triton.jit
def weighted_class(value, weight):
    """Return ``value * weight``, 0 for infinity times 0."""
    return tl.where((weight == 0) & (tl.abs(value) == float("inf")), 0.0, value * weight)


@triton.jit
def transform(x, loss_options, temperature=None, threshold=None):
    """Return fp32 ``(z, dz/dx)`` of logits, as ``spec.transformed`` does: infinite logits stay infinite.

    ``temperature`` and ``threshold`` are the row's, or None.

    The selects also stop the compiler from fusing the product with a later subtraction of the maximum. With
    that, the maximum would differ from itself.
    """
    slope = 1.0
    is_16_bit: tl.constexpr = x.dtype.primitive_bitwidth == 16
    x = x.to(tl.float32)
    if threshold is not None:
        x = tl.where(x < threshold, float("-inf"), x)
    if loss_options.softcap is not None:
        scale = 1.0
        if loss_options.logit_scale is not None:
            scale = loss_options.logit_scale
        cap = loss_options.softcap[0]
        t, slope = capped(x, scale / cap, is_16_bit and len(loss_options.softcap) == 1)
        if temperature is not None:
            scale = tl.div_rn(scale, temperature)
            cap = tl.div_rn(cap, temperature)
        slope *= scale
        x = tl.where(tl.abs(x) < float("inf"), cap * t, x)
    elif loss_options.logit_scale is not None:
        slope = loss_options.logit_scale
        if temperature is not None:
            slope = tl.div_rn(slope, temperature)
        x = tl.where(tl.abs(x) == float("inf"), x, x * slope)
    elif temperature is not None:
        slope = tl.div_rn(1.0, temperature)
        x = tl.where(tl.abs(x) == float("inf"), x, x * slope)
    return x, slope


@triton.jit
def row_temperature(temperature, row, live):
    """Return the row's temperature: NaN unless it and its inverse are positive and finite, 1 if it is not ``live``.

    None if the pointer is. Kernels make records of such numbers themselves: Triton 3.6 cannot return None in a tuple.
    """
    t = None
    if temperature is not None:
        t = tl.load(temperature + row, live, other=1.0)
        inverse = 1.0 / t
        t = tl.where((inverse > 0) & (inverse < float("inf")), t, float("nan"))
    return t


@triton.jit
def row_least(threshold, row, live):
    """Return the row's threshold: -inf if it is not ``live``. None if the pointer is."""
    least = None
    if threshold is not None:
        least = tl.load(threshold + row, live, other=float("-inf"))
    return least


@triton.jit
def load_label(labels, row, mask=None):
    """Return the label of a row or of a vector of rows, int64. None if the pointer is."""
    label = None
    if labels is not None:
        label = load(labels + row, mask, 0).to(tl.int64)
    return label


@triton.jit
def at_the_edges(value, label, vocab_size, loss_options):
    """Return ``value``; NaN if the label is outside the vocabulary, 0 if it is ``ignore_index``."""
    value = tl.where((label < 0) | (label >= vocab_size), float("nan"), value)
    return tl.where(label == loss_options.ignore_index, 0.0, value)


@triton.jit
def divisor_weight(divisor, class_weight=None):
    """Return the ``inverse_divisor`` of a number, or of the one at a pointer."""
    if divisor.dtype.is_ptr():
        divisor = tl.load(divisor)
    return inverse_divisor(divisor.to(tl.float32), class_weight)


@triton.jit
def inverse_divisor(n, class_weight=None):
    """Return 1 / n, a row's weight in a mean or a sum over items; 0 for 0; NaN if class weights sum to inf."""
    if class_weight is not None:
        n = tl.where(n == float("inf"), float("nan"), n)
    return tl.where(n == 0, 0.0, tl.div_rn(1.0, n))


@triton.jit
def weighted(value, weight):
    """Return ``value * weight``, 0 for a weight of 0."""
    return tl.where(weight == 0, 0.0, value * weight)
