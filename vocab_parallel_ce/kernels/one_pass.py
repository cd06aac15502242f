"""Loss and gradient of whole rows in one launch: every logit is read once and written once.

    loss = log(sum_exp) + row_max - z_y + z_loss * lse^2
    dz_i = p_i * (1 + 2 * z_loss * lse) - [i == y],   p_i = exp(z_i - row_max) / sum_exp
    p_y - 1 = -others_sum / sum_exp,   sum_exp = others_sum + exp(z_y - row_max)

One persistent program or two a multiprocessor; each walks its rows in chunks of one 16-byte vector a thread.
A ring of SLOTS chunks in shared memory is kept full by asynchronous copies, so that the next rows arrive
while this one is worked on. The first KEEP chunks of a row stay in registers for the second look at it, which
frees their slots at once; the others stay in the ring. Regime: rows of 16 to 270 KB of aligned vectors, one
rank, bound by memory. Rows that are ignored are not read.

``others_sum`` never holds the label's own term, next to which it would lose digits. The walk leaves out the
label's vector, whose other logits are loaded beside it and begin the sums.

A thread reads from the ring only the vectors that it copied there itself: waiting for its own copies is all
the order that the ring needs. Written in Gluon, Triton's language for explicit layouts, which cannot be
interpreted.
"""

# mypy: disable-error-code="assignment, misc"
# Tuples grow in loops that the compiler unrolls.

import functools

import torch
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from vocab_parallel_ce.blocks import choose_ring
from vocab_parallel_ce.kernels.launch import (
    MOST_LAUNCHES,
    Dtypes,
    Launch,
    dtypes_of,
    option_arguments,
    row_arguments,
)
from vocab_parallel_ce.kernels.primitives import (
    divisor_weight,
    exp_shifted,
    finite_or_zero,
    label_exp,
    log_sum_exp,
    row_begin,
    row_loss,
)
from vocab_parallel_ce.layout import VECTOR_BYTES
from vocab_parallel_ce.spec import LossOptions

# Triton 3.7 renamed both.
copy_to_shared = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
barrier = getattr(gl, "barrier", None) or gl.thread_barrier


@gluon.constexpr_function
def copies_in_flight(chunk, GROUP, CHUNKS, KEEP, SLOTS):
    """Groups of copies that may be outstanding when chunks ``chunk`` to ``chunk + GROUP`` must have arrived.

    SLOTS were committed before the row's first chunk was freed, and one more for each that was freed since.
    """
    last = min(chunk + GROUP, CHUNKS) - 1
    freed = min(max(chunk - GROUP, 0), KEEP)
    return SLOTS + freed - last - 1


@gluon.jit
def merge_lanes(max_a, sum_a, max_b, sum_b):
    """``spec.merge`` of two lanes."""
    row_max = tl.maximum(max_a, max_b)
    shift = finite_or_zero(row_max)
    return row_max, sum_a * exp_shifted(max_a, shift) + sum_b * exp_shifted(max_b, shift)


@gluon.jit
def label_of(labels, row, n_rows):
    """Labels of ``row``; of rows beyond the last, that of the first."""
    return gl.load(labels + gl.where(row < n_rows, row, 0))


@gluon.jit
def column_of(label, row, n_rows, n_columns, ignore_index):
    """int32: the column of ``label``, -1 for one outside the vocabulary, -2 for a row to leave out."""
    label = label.to(gl.int64)
    column = gl.where((label >= 0) & (label < n_columns), label, -1).to(gl.int32)
    return gl.where((label != ignore_index) & (row < n_rows), column, -2)


@gluon.jit
def count_labels(labels, n_rows, lane_columns, ignore_index):
    """Labels that are not ignored. Every program counts them all: 8 bytes a row, from the L2 cache."""
    count = gl.zeros_like(lane_columns)
    for first_row in range(0, n_rows, lane_columns.numel):
        rows = first_row + lane_columns
        counts = (label_of(labels, rows, n_rows).to(gl.int64) != ignore_index) & (rows < n_rows)
        count += counts.to(gl.int32)
    return gl.sum(gl.sum(count, axis=1), axis=0)


@gluon.jit
def load_target(logits, layout, row, column, VECTOR: gl.constexpr):
    """The label's logit; -inf where it has none."""
    begin = vector_begin(row, layout, VECTOR)
    return gl.load(logits + begin + column, mask=column >= 0, other=float("-inf"))


@gluon.jit
def load_beside_target(logits, layout, row, column, lane_columns):
    """The other logits of the label's vector, one for each of the first lanes; -inf for the other lanes."""
    VECTOR: gl.constexpr = lane_columns.shape[1]
    lane: gl.constexpr = gl.SliceLayout(1, lane_columns.type.layout)
    lanes = gl.arange(0, lane_columns.shape[0], layout=lane)
    columns = column // VECTOR * VECTOR + lanes
    inside = (lanes < VECTOR) & (columns != column) & (column >= 0)
    begin = vector_begin(row, layout, VECTOR)
    return gl.load(logits + begin + columns, mask=inside, other=float("-inf"))


@gluon.jit
def vector_begin(row, layout, VECTOR: gl.constexpr):
    """``row_begin`` where it is whole vectors, and the compiler sees that it is."""
    return row_begin(row.to(gl.int64), layout) // VECTOR * VECTOR


@gluon.jit
def fetch(ring, source, place, chunk: gl.constexpr, CHUNKS: gl.constexpr, SLOTS: gl.constexpr):
    """Begin to copy the chunk that is ``chunk`` chunks after the place's row begins into its slot.

    Columns that are not read, those of ignored rows among them, become 0 there.

    ``source`` is ``(logits, layout, n_columns, lane_columns)``; ``place`` is ``(slot, row, step,
    targets)``: where the row's first chunk lies, and :func:`column_of` this row and those after it.
    """
    logits, layout, n_columns, lane_columns = source
    slot, row, step, targets = place
    ahead: gl.constexpr = chunk // CHUNKS
    columns = (chunk % CHUNKS) * lane_columns.numel + lane_columns
    n_read = gl.where(targets[ahead] == -2, 0, n_columns)
    begin = vector_begin(row + ahead * step, layout, lane_columns.shape[1])
    copy_to_shared(ring.index((slot + chunk) % SLOTS), logits + begin + columns, mask=columns < n_read)
    async_copy.commit_group()


@gluon.jit
def read_row(
    ring,
    source,
    place,
    beside,
    CHUNKS: gl.constexpr,
    KEEP: gl.constexpr,
    SLOTS: gl.constexpr,
    GROUP: gl.constexpr,
):
    """``(row_max, sum, kept)``: statistics of the columns but the label's, and the row's first KEEP chunks.

    ``beside`` is what the label's vector adds to them: :func:`load_beside_target`.
    """
    _, _, n_columns, lane_columns = source
    VECTOR: gl.constexpr = lane_columns.shape[1]
    tile: gl.constexpr = lane_columns.type.layout
    lane: gl.constexpr = gl.SliceLayout(1, tile)
    lanes = gl.arange(0, lane_columns.shape[0], layout=lane)
    column = place[3][0]
    vectors_on = gl.where(column >= 0, column // VECTOR, -1) - lanes
    lane_max = beside.to(gl.float32)
    lane_sum = exp_shifted(lane_max, finite_or_zero(lane_max))
    kept = ()
    for i in gl.static_range(CHUNKS):
        if i % GROUP == 0:
            async_copy.wait_group(copies_in_flight(i, GROUP, CHUNKS, KEEP, SLOTS))
            # The slots of what was read before the wait.
            for freed in gl.static_range(i - GROUP, i):
                if freed >= 0 and freed < KEEP:
                    fetch(ring, source, place, freed + SLOTS, CHUNKS, SLOTS)
        chunk = ring.index((place[0] + i) % SLOTS).load(tile)
        if i < KEEP:
            kept = kept + (chunk,)
        z = chunk.to(gl.float32)
        if i == CHUNKS - 1:
            z = gl.where(i * lane_columns.numel + lane_columns < n_columns, z, float("-inf"))
        is_other = vectors_on != i * lane_columns.shape[0]
        new_max = gl.maximum(lane_max, gl.where(is_other, gl.max(z, axis=1), float("-inf")))
        shift = finite_or_zero(new_max)
        lane_sum *= exp_shifted(lane_max, shift)
        lane_sum += gl.where(is_other, gl.sum(exp_shifted(z, shift[:, None]), axis=1), 0.0)
        lane_max = new_max
    row_max, others_sum = gl.reduce((lane_max, lane_sum), 0, merge_lanes)
    for freed in gl.static_range((CHUNKS - 1) // GROUP * GROUP, CHUNKS):
        if freed < KEEP:
            fetch(ring, source, place, freed + SLOTS, CHUNKS, SLOTS)
    return row_max, others_sum, kept


@gluon.jit
def write_row(
    ring,
    source,
    place,
    begin,
    kept,
    row_max,
    scale,
    CHUNKS: gl.constexpr,
    KEEP: gl.constexpr,
    SLOTS: gl.constexpr,
    GROUP: gl.constexpr,
):
    """``exp(z - row_max) * scale`` over every column of a row."""
    logits, _, n_columns, lane_columns = source
    for i in gl.static_range(CHUNKS):
        if i < KEEP:
            chunk = kept[i]
        else:
            chunk = ring.index((place[0] + i) % SLOTS).load(lane_columns.type.layout)
        grad = (exp_shifted(chunk.to(gl.float32), row_max) * scale).to(logits.dtype.element_ty)
        columns = i * lane_columns.numel + lane_columns
        if i < CHUNKS - 1:
            gl.store(logits + begin + columns, grad)
        else:
            gl.store(logits + begin + columns, grad, mask=columns < n_columns)
        if i >= KEEP and ((i + 1 - KEEP) % GROUP == 0 or i == CHUNKS - 1):
            for freed in gl.static_range(KEEP + (i - KEEP) // GROUP * GROUP, i + 1):
                fetch(ring, source, place, freed + SLOTS, CHUNKS, SLOTS)


@gluon.jit
def clear_rows(source, loss, row, step, n_rows, CHUNKS: gl.constexpr):
    """Loss and gradient 0 of all rows: a sum over no items."""
    logits, layout, n_columns, lane_columns = source
    zeros = gl.zeros_like(lane_columns).to(logits.dtype.element_ty)
    while row < n_rows:
        begin = vector_begin(row, layout, lane_columns.shape[1])
        for i in range(CHUNKS):
            columns = i * lane_columns.numel + lane_columns
            gl.store(logits + begin + columns, zeros, mask=columns < n_columns)
        gl.store(loss + row, 0.0)
        row += step


@gluon.jit(do_not_specialize=["n_rows"])
def one_pass_kernel(
    logits,  # [N, C] bf16|fp16|fp32, in; their gradient, out
    labels,  # [N] int64|int32
    divisor,  # [1] integer or floating point, or None: 1
    loss,  # [N] fp32, out
    layout,  # RowLayout of logits
    n_columns,
    row_options,  # option_arguments: ignore_index and z_loss
    n_rows,
    COUNTED: gl.constexpr,  # the divisor is the number of rows that are not ignored
    CHUNKS: gl.constexpr,
    KEEP: gl.constexpr,
    SLOTS: gl.constexpr,
    GROUP: gl.constexpr,
    LANES: gl.constexpr,
    VECTOR: gl.constexpr,
):
    """One row: ``x = [1, 3, 2]``, label 1: loss 0.4076, gradient ``[0.0900, -0.3348, 0.2447]``."""
    tile: gl.constexpr = gl.BlockedLayout([1, VECTOR], [32, 1], [LANES // 32, 1], [1, 0])
    lane: gl.constexpr = gl.SliceLayout(1, tile)
    unswizzled: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    AHEAD: gl.constexpr = (CHUNKS - 1 + SLOTS) // CHUNKS
    vector_columns = gl.arange(0, VECTOR, layout=gl.SliceLayout(0, tile))
    lane_columns = gl.arange(0, LANES, layout=lane)[:, None] * VECTOR + vector_columns[None, :]
    element = logits.dtype.element_ty
    n_columns = n_columns // VECTOR * VECTOR  # it is; now the compiler sees it
    ring = gl.allocate_shared_memory(element, [SLOTS, LANES, VECTOR], unswizzled)
    source = (logits, layout, n_columns, lane_columns)
    slot = 0
    row = gl.program_id(0)
    step = gl.num_programs(0)
    ignore_index = row_options[0]
    targets = ()
    for i in gl.static_range(AHEAD + 1):
        label = label_of(labels, row + i * step, n_rows)
        targets = targets + (column_of(label, row + i * step, n_rows, n_columns, ignore_index),)
    # Labels and their vectors' logits are loaded before the row that needs them begins.
    next_label = label_of(labels, row + (AHEAD + 1) * step, n_rows)
    next_target = load_target(logits, layout, row, targets[0], VECTOR)
    next_beside = load_beside_target(logits, layout, row, targets[0], lane_columns)
    for i in gl.static_range(SLOTS):
        fetch(ring, source, (slot, row, step, targets), i, CHUNKS, SLOTS)
    weight = 1.0
    if COUNTED:
        count = count_labels(labels, n_rows, lane_columns, ignore_index).to(gl.float32)
        weight = gl.where(count == 0, 0.0, 1.0 / count)
    elif divisor is not None:
        weight = divisor_weight(divisor)
    if COUNTED or divisor is not None:
        if weight == 0:
            # What is being fetched may be NaN, and stays unseen.
            async_copy.wait_group(0)
            clear_rows(source, loss, row, step, n_rows, CHUNKS)
            n_rows *= 0
    while row < n_rows:
        place = (slot, row, step, targets)
        begin = vector_begin(row, layout, VECTOR)
        column = targets[0]
        target, beside = next_target.to(gl.float32), next_beside
        new_row = row + (AHEAD + 1) * step
        new_column = column_of(next_label, new_row, n_rows, n_columns, ignore_index)
        others_max, others_sum, kept = read_row(ring, source, place, beside, CHUNKS, KEEP, SLOTS, GROUP)
        row_max = gl.maximum(others_max, target)
        others_sum *= exp_shifted(others_max, finite_or_zero(row_max))
        sum_exp = others_sum + label_exp(row_max, target)
        merged = (row_max, others_sum, target, 0.0, 0.0, 0.0)
        row_weight = gl.where(column >= 0, weight, float("nan"))
        value = row_loss(merged, column, n_columns, row_options) * row_weight
        gl.store(loss + row, gl.where(column == -2, 0.0, value))
        z_factor = 0.0
        if row_options[2] is not None:
            z_factor = 2 * row_options[2] * (row_max + log_sum_exp(merged))
        # An ignored row was not read: the ring holds zeros for it.
        scale = gl.where(column == -2, 0.0, row_weight * (1 + z_factor) / sum_exp)
        grad = (label_exp(row_max, target) * z_factor - others_sum) / sum_exp * row_weight
        # A label that is excluded is no column's.
        written = gl.where(target > float("-inf"), column, -1)
        # Not earlier: they would take registers while the row fills them.
        next_label = label_of(labels, new_row + step, n_rows)
        next_target = load_target(logits, layout, row + step, targets[1], VECTOR)
        next_beside = load_beside_target(logits, layout, row + step, targets[1], lane_columns)
        write_row(ring, source, place, begin, kept, row_max, scale, CHUNKS, KEEP, SLOTS, GROUP)
        # The label's column was written as every other.
        barrier()
        gl.store(logits + begin + written, grad.to(element), mask=written >= 0)
        slot = (slot + CHUNKS) % SLOTS
        row += step
        shifted = ()
        for i in gl.static_range(AHEAD):
            shifted = shifted + (targets[i + 1],)
        targets = shifted + (new_column,)


def one_pass(
    logits: Tensor,
    labels: Tensor,
    divisor: Tensor | None,
    loss: Tensor,
    *,
    counted: bool,
    options: LossOptions,
) -> None:
    """Fill ``loss [N]`` and write the gradient over ``logits [..., C]``, the whole vocabulary.

    Both are divided by ``divisor [1]`` where given, or, ``counted``, by the number of rows not ignored.
    """
    n_rows, n_columns = labels.shape[0], logits.shape[-1]
    if n_rows == 0:
        return
    base, layout, _ = row_arguments(logits)
    tensors = (base, labels, divisor, loss)
    launch, programs = _launch(dtypes_of(tensors), n_columns, layout, counted, options)
    launch(programs * _multiprocessors(logits.get_device()), tensors, (n_rows,))


@functools.lru_cache(maxsize=MOST_LAUNCHES)
def _launch(
    dtypes: Dtypes, n_columns: int, layout: tuple[int, ...], counted: bool, options: LossOptions
) -> tuple[Launch, int]:
    """The launch, and its programs a multiprocessor."""
    element_size = dtypes[0].itemsize
    ring = choose_ring(n_columns * element_size)
    assert ring is not None, "selection leaves rows that do not fit to other kernels"
    vector = VECTOR_BYTES // element_size
    lanes = 32 * ring.num_warps
    chunks = -(-n_columns // (lanes * vector))
    constants = {
        "COUNTED": counted,
        "CHUNKS": chunks,
        "KEEP": min(ring.keep, chunks),
        "SLOTS": ring.slots,
        "GROUP": ring.group,
        "LANES": lanes,
        "VECTOR": vector,
    }
    values = (layout, n_columns, option_arguments(options))
    return Launch(one_pass_kernel, values, constants, num_warps=ring.num_warps), ring.programs


@functools.cache
def _multiprocessors(device: int) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count
