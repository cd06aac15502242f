"""Loss and gradient of whole rows in one launch: every logit is read once and written once.

    loss = log(sum_exp) + row_max - z_y + z_loss * lse^2
    dz_i = p_i * (1 + 2 * z_loss * lse) - [i == y],   p_y - 1 = -others_sum / sum_exp

One or two persistent programs per multiprocessor walk the rows, in chunks of one 16-byte vector per thread.
Asynchronous copies fill a circular buffer of STAGES chunks in shared memory, so the next rows arrive while
the program works on this one. The gradient needs each chunk a second time. The first REGISTER_CHUNKS of a
row stay in registers, and their stages are refilled at once. The other chunks stay in the buffer.

Regime: one rank, rows of 16 to 264 KiB of aligned vectors, bound by memory. Ignored rows are not read.

Next to the label's own term, ``others_sum`` would lose digits. So the walk leaves out the label's vector.
The other logits of that vector are loaded separately, and the sums begin with them.

A thread reads only vectors that it copied to the buffer itself. So it waits for its own copies only, and needs no
barrier. The kernel is written in Gluon, Triton's language for explicit layouts, which no interpreter runs.
"""

# mypy: disable-error-code="assignment, misc"
# Tuples grow in loops that the compiler unrolls.

import functools
from typing import NamedTuple

import torch
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from vocab_parallel_ce.blocks import THREADS_PER_WARP, one_pass_config
from vocab_parallel_ce.kernels import labels as of_labels
from vocab_parallel_ce.kernels import primitives as ops
from vocab_parallel_ce.kernels.launch import Dtypes, Launch, cache_launches, dtypes_of, row_arguments
from vocab_parallel_ce.layout import VECTOR_BYTES, RowLayout
from vocab_parallel_ce.spec import LossOptions, RowStats

# Triton 3.7 renamed both.
copy_to_shared = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
barrier = getattr(gl, "barrier", None) or gl.thread_barrier


class Walk(NamedTuple):
    """The logits, the buffer, and how a row lies in both; the same for all rows."""

    logits: tl.tensor
    layout: tl.tuple
    n_columns: tl.tensor
    lane_columns: tl.tensor  # [LANES, VECTOR] columns of a row's first chunk
    buffer: gl.shared_memory_descriptor


class Sizes(NamedTuple):
    """Constants of the kernel, in chunks."""

    CHUNKS: gl.constexpr  # of a row
    REGISTER_CHUNKS: gl.constexpr
    STAGES: gl.constexpr
    CHUNKS_PER_WAIT: gl.constexpr


class Cursor(NamedTuple):
    """The row that a program works on, and what it knows of its next rows."""

    stage: tl.tensor  # of the row's first chunk
    row: tl.tensor
    step: tl.tensor  # from one row of the program to its next
    columns: tl.tuple  # label_column of this row and of the next ones


@gluon.constexpr_function
def copies_in_flight(chunk, CHUNKS, REGISTER_CHUNKS, STAGES, CHUNKS_PER_WAIT):
    """Return how many copies may be in flight while CHUNKS_PER_WAIT chunks from ``chunk`` on must be there.

    STAGES copies were started before the row's first refill, and one by each refill since.
    """
    last = min(chunk + CHUNKS_PER_WAIT, CHUNKS) - 1
    refilled = min(max(chunk - CHUNKS_PER_WAIT, 0), REGISTER_CHUNKS)
    return STAGES + refilled - last - 1


@gluon.jit
def merge_lanes(max_a, sum_a, max_b, sum_b):
    """Merge the statistics of two lanes."""
    row_max = tl.maximum(max_a, max_b)
    shift = ops.finite_or_zero(row_max)
    return row_max, sum_a * ops.exp_shifted(max_a, shift) + sum_b * ops.exp_shifted(max_b, shift)


@gluon.jit
def load_label(labels, row, n_rows):
    """Load the label of ``row``; beyond the last row, that of the first."""
    return gl.load(labels + gl.where(row < n_rows, row, 0))


@gluon.jit
def label_column(label, row, n_rows, n_columns, ignore_index):
    """Return the label's column, int32; -1 outside the vocabulary, -2 if the row is ignored or missing."""
    label = label.to(gl.int64)
    column = gl.where((label >= 0) & (label < n_columns), label, -1).to(gl.int32)
    return gl.where((label != ignore_index) & (row < n_rows), column, -2)


@gluon.jit
def loss_weight(labels, divisor, n_rows, lane_columns, ignore_index, COUNTED: gl.constexpr):
    """Return 1 / the number of labels if COUNTED, else 1 / divisor, else 1; 0 for a division by 0.

    Every program counts all labels: 8 bytes per row, from the L2 cache.
    """
    weight = 1.0
    if COUNTED:
        counts = gl.zeros_like(lane_columns)
        for first_row in range(0, n_rows, lane_columns.numel):
            rows = first_row + lane_columns
            live = (load_label(labels, rows, n_rows).to(gl.int64) != ignore_index) & (rows < n_rows)
            counts += live.to(gl.int32)
        count = gl.sum(gl.sum(counts, axis=1), axis=0).to(gl.float32)
        weight = gl.where(count == 0, 0.0, 1.0 / count)
    elif divisor is not None:
        weight = ops.divisor_weight(divisor)
    return weight


@gluon.jit
def vector_begin(walk, row):
    """Return ``row_begin`` for rows of whole vectors, so that the compiler sees that they are."""
    VECTOR: gl.constexpr = walk.lane_columns.shape[1]
    return ops.row_begin(row.to(gl.int64), walk.layout) // VECTOR * VECTOR


@gluon.jit
def load_target(walk, row, column):
    """Load the label's logit, -inf if ``column`` is negative."""
    return gl.load(walk.logits + vector_begin(walk, row) + column, mask=column >= 0, other=float("-inf"))


@gluon.jit
def load_beside_target(walk, row, column):
    """Load the other logits of the label's vector, one per lane; -inf in the lanes after them."""
    VECTOR: gl.constexpr = walk.lane_columns.shape[1]
    lane: gl.constexpr = gl.SliceLayout(1, walk.lane_columns.type.layout)
    lanes = gl.arange(0, walk.lane_columns.shape[0], layout=lane)
    columns = column // VECTOR * VECTOR + lanes
    inside = (lanes < VECTOR) & (columns != column) & (column >= 0)
    return gl.load(walk.logits + vector_begin(walk, row) + columns, mask=inside, other=float("-inf"))


@gluon.jit
def fetch(walk, cursor, chunk: gl.constexpr, SIZES: gl.constexpr):
    """Start to copy a chunk to its stage; ``chunk`` counts from the cursor's row on, over the next rows too.

    Columns that are not read become 0 in the buffer, those of ignored rows too.
    """
    ahead: gl.constexpr = chunk // SIZES.CHUNKS
    columns = (chunk % SIZES.CHUNKS) * walk.lane_columns.numel + walk.lane_columns
    n_read = gl.where(cursor.columns[ahead] == -2, 0, walk.n_columns)
    begin = vector_begin(walk, cursor.row + ahead * cursor.step)
    stage = (cursor.stage + chunk) % SIZES.STAGES
    copy_to_shared(walk.buffer.index(stage), walk.logits + begin + columns, mask=columns < n_read)
    async_copy.commit_group()


@gluon.jit
def read_row(walk, cursor, beside, SIZES: gl.constexpr):
    """Return ``(row_max, others_sum, chunks)``: statistics without the label, and the chunks in registers.

    ``beside`` are the other logits of the label's vector.
    """
    CHUNKS: gl.constexpr = SIZES.CHUNKS
    CHUNKS_PER_WAIT: gl.constexpr = SIZES.CHUNKS_PER_WAIT
    lane_columns = walk.lane_columns
    tile: gl.constexpr = lane_columns.type.layout
    lanes = gl.arange(0, lane_columns.shape[0], layout=gl.SliceLayout(1, tile))
    column = cursor.columns[0]
    label_vector = gl.where(column >= 0, column // lane_columns.shape[1], -1) - lanes
    lane_max = beside.to(gl.float32)
    lane_sum = ops.exp_shifted(lane_max, ops.finite_or_zero(lane_max))
    chunks = ()
    for i in gl.static_range(CHUNKS):
        if i % CHUNKS_PER_WAIT == 0:
            async_copy.wait_group(copies_in_flight(i, CHUNKS, SIZES.REGISTER_CHUNKS, SIZES.STAGES, CHUNKS_PER_WAIT))
            # Refill the stages that were read before the wait.
            for done in gl.static_range(i - CHUNKS_PER_WAIT, i):
                if done >= 0 and done < SIZES.REGISTER_CHUNKS:
                    fetch(walk, cursor, done + SIZES.STAGES, SIZES)
        chunk = walk.buffer.index((cursor.stage + i) % SIZES.STAGES).load(tile)
        if i < SIZES.REGISTER_CHUNKS:
            chunks = chunks + (chunk,)
        z = chunk.to(gl.float32)
        if i == CHUNKS - 1:
            z = gl.where(i * lane_columns.numel + lane_columns < walk.n_columns, z, float("-inf"))
        is_other = label_vector != i * lane_columns.shape[0]
        new_max = gl.maximum(lane_max, gl.where(is_other, gl.max(z, axis=1), float("-inf")))
        shift = ops.finite_or_zero(new_max)
        lane_sum *= ops.exp_shifted(lane_max, shift)
        lane_sum += gl.where(is_other, gl.sum(ops.exp_shifted(z, shift[:, None]), axis=1), 0.0)
        lane_max = new_max
    row_max, others_sum = gl.reduce((lane_max, lane_sum), 0, merge_lanes)
    for done in gl.static_range((CHUNKS - 1) // CHUNKS_PER_WAIT * CHUNKS_PER_WAIT, CHUNKS):
        if done < SIZES.REGISTER_CHUNKS:
            fetch(walk, cursor, done + SIZES.STAGES, SIZES)
    return row_max, others_sum, chunks


@gluon.jit
def finish_row(others_max, others_sum, target, column, weight, n_columns, loss_options):
    """Return ``(loss, row_max, scale, target_grad)``; the gradient is ``exp(z - row_max) * scale``.

    ``target_grad`` is the gradient at the label. ``weight`` is that of a row in the loss.
    """
    row_max = gl.maximum(others_max, target)
    others_sum *= ops.exp_shifted(others_max, ops.finite_or_zero(row_max))
    sum_exp = others_sum + of_labels.label_exp(row_max, target)
    stats = RowStats(row_max, others_sum, target, None, None, None, None, None, None)
    weight = gl.where(column >= 0, weight, float("nan"))
    value = of_labels.loss(stats, column, n_columns, loss_options) * weight
    z_factor = 0.0
    if loss_options.z_loss is not None:
        z_factor = 2 * loss_options.z_loss * (row_max + of_labels.log_sum_exp(stats))
    # An ignored row was not read: the buffer holds zeros for it.
    scale = gl.where(column == -2, 0.0, weight * (1 + z_factor) / sum_exp)
    target_grad = (of_labels.label_exp(row_max, target) * z_factor - others_sum) / sum_exp * weight
    return gl.where(column == -2, 0.0, value), row_max, scale, target_grad


@gluon.jit
def write_row(walk, cursor, chunks, row_max, scale, SIZES: gl.constexpr):
    """Write ``exp(z - row_max) * scale`` over every column of a row, and refill the stages."""
    logits, lane_columns = walk.logits, walk.lane_columns
    begin = vector_begin(walk, cursor.row)
    for i in gl.static_range(SIZES.CHUNKS):
        if i < SIZES.REGISTER_CHUNKS:
            chunk = chunks[i]
        else:
            chunk = walk.buffer.index((cursor.stage + i) % SIZES.STAGES).load(lane_columns.type.layout)
        grad = (ops.exp_shifted(chunk.to(gl.float32), row_max) * scale).to(logits.dtype.element_ty)
        columns = i * lane_columns.numel + lane_columns
        if i < SIZES.CHUNKS - 1:
            gl.store(logits + begin + columns, grad)
        else:
            gl.store(logits + begin + columns, grad, mask=columns < walk.n_columns)
        if i >= SIZES.REGISTER_CHUNKS:
            if (i + 1 - SIZES.REGISTER_CHUNKS) % SIZES.CHUNKS_PER_WAIT == 0 or i == SIZES.CHUNKS - 1:
                # Refill the stages that were read since the last refill.
                for done in gl.static_range(i - (i - SIZES.REGISTER_CHUNKS) % SIZES.CHUNKS_PER_WAIT, i + 1):
                    fetch(walk, cursor, done + SIZES.STAGES, SIZES)


@gluon.jit
def clear_rows(walk, loss, row, step, n_rows, CHUNKS: gl.constexpr):
    """Write loss and gradient 0 in every row of a program: a sum over no items."""
    lane_columns = walk.lane_columns
    zeros = gl.zeros_like(lane_columns).to(walk.logits.dtype.element_ty)
    while row < n_rows:
        begin = vector_begin(walk, row)
        for i in range(CHUNKS):
            columns = i * lane_columns.numel + lane_columns
            gl.store(walk.logits + begin + columns, zeros, mask=columns < walk.n_columns)
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
    loss_options,  # option_arguments: ignore_index and z_loss
    n_rows,
    COUNTED: gl.constexpr,  # the divisor is the number of rows that are not ignored
    CHUNKS: gl.constexpr,  # Sizes
    REGISTER_CHUNKS: gl.constexpr,
    STAGES: gl.constexpr,
    CHUNKS_PER_WAIT: gl.constexpr,
    LANES: gl.constexpr,
    VECTOR: gl.constexpr,
):
    """Example: 2 equal rows, ``x_1 = 8`` and ``x_i = 0`` in 8191 other columns, label 1, mean.

    Loss ``log(1 + 8191 exp(-8)) = 1.3212``. Gradient ``exp(-8) / 3.7478 / 2 = 4.475e-5`` in the other
    columns and ``(0.2668 - 1) / 2 = -0.3666`` at the label.
    """
    tile: gl.constexpr = gl.BlockedLayout([1, VECTOR], [32, 1], [LANES // 32, 1], [1, 0])
    unswizzled: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    # Rows after this one that a program fetches from while it works on this one.
    AHEAD: gl.constexpr = (CHUNKS - 1 + STAGES) // CHUNKS
    vector_columns = gl.arange(0, VECTOR, layout=gl.SliceLayout(0, tile))
    lane_vectors = gl.arange(0, LANES, layout=gl.SliceLayout(1, tile))
    lane_columns = lane_vectors[:, None] * VECTOR + vector_columns[None, :]
    element = logits.dtype.element_ty
    n_columns = n_columns // VECTOR * VECTOR  # unchanged; now the compiler sees that it is a multiple
    buffer = gl.allocate_shared_memory(element, [STAGES, LANES, VECTOR], unswizzled)
    walk = Walk(logits, layout, n_columns, lane_columns, buffer)
    sizes: gl.constexpr = Sizes(CHUNKS, REGISTER_CHUNKS, STAGES, CHUNKS_PER_WAIT)
    stage = 0
    row = gl.program_id(0)
    step = gl.num_programs(0)
    label_columns = ()
    for i in gl.static_range(AHEAD + 1):
        label = load_label(labels, row + i * step, n_rows)
        column = label_column(label, row + i * step, n_rows, n_columns, loss_options.ignore_index)
        label_columns = label_columns + (column,)
    # Labels and the logits of their vectors are loaded one row early.
    next_label = load_label(labels, row + (AHEAD + 1) * step, n_rows)
    next_target = load_target(walk, row, label_columns[0])
    next_beside = load_beside_target(walk, row, label_columns[0])
    for i in gl.static_range(STAGES):
        fetch(walk, Cursor(stage, row, step, label_columns), i, sizes)
    weight = loss_weight(labels, divisor, n_rows, lane_columns, loss_options.ignore_index, COUNTED)
    if COUNTED or divisor is not None:
        if weight == 0:
            # The fetched logits may be NaN. They stay unseen.
            async_copy.wait_group(0)
            clear_rows(walk, loss, row, step, n_rows, CHUNKS)
            n_rows *= 0
    while row < n_rows:
        cursor = Cursor(stage, row, step, label_columns)
        begin = vector_begin(walk, row)
        column = label_columns[0]
        target, beside = next_target.to(gl.float32), next_beside
        new_row = row + (AHEAD + 1) * step
        new_column = label_column(next_label, new_row, n_rows, n_columns, loss_options.ignore_index)
        others_max, others_sum, chunks = read_row(walk, cursor, beside, sizes)
        value, row_max, scale, target_grad = finish_row(
            others_max, others_sum, target, column, weight, n_columns, loss_options
        )
        gl.store(loss + row, value)
        # A label in an excluded column is no column's target.
        written = gl.where(target > float("-inf"), column, -1)
        # Not earlier: these loads would take registers while the row fills them.
        next_label = load_label(labels, new_row + step, n_rows)
        next_target = load_target(walk, row + step, label_columns[1])
        next_beside = load_beside_target(walk, row + step, label_columns[1])
        write_row(walk, cursor, chunks, row_max, scale, sizes)
        # write_row wrote the label's column like every other.
        barrier()
        gl.store(logits + begin + written, target_grad.to(element), mask=written >= 0)
        stage = (stage + CHUNKS) % STAGES
        row += step
        label_columns = label_columns[1:] + (new_column,)


def one_pass(
    logits: Tensor, labels: Tensor, divisor: Tensor | None, loss: Tensor, *, counted: bool, options: LossOptions
) -> None:
    """Fill ``loss [N]`` and write the gradient over ``logits [..., C]``, the whole vocabulary.

    If ``counted``, the number of rows that are not ignored divides both, else ``divisor [1]`` if given.
    """
    n_rows, n_columns = labels.shape[0], logits.shape[-1]
    if n_rows == 0:
        return
    base, (layout, _) = row_arguments(logits)
    tensors = (base, labels, divisor, loss)
    launch, programs = _launch(dtypes_of(tensors), n_columns, layout, counted, options)
    launch(programs * _multiprocessors(logits.get_device()), tensors, (n_rows,))


@cache_launches
def _launch(
    dtypes: Dtypes, n_columns: int, layout: tuple[int, ...], counted: bool, options: LossOptions
) -> tuple[Launch, int]:
    """Return the launch, and its programs per multiprocessor."""
    element_size = dtypes[0].itemsize
    config = one_pass_config(n_columns * element_size)
    assert config is not None, "selection leaves rows that do not fit to other kernels"
    vector = VECTOR_BYTES // element_size
    lanes = THREADS_PER_WARP * config.num_warps
    chunks = -(-n_columns // (lanes * vector))
    sizes = Sizes(chunks, min(config.register_chunks, chunks), config.stages, config.chunks_per_wait)
    constants = {"COUNTED": counted, **sizes._asdict(), "LANES": lanes, "VECTOR": vector}
    launch = Launch(one_pass_kernel, (RowLayout(*layout), n_columns, options), constants, num_warps=config.num_warps)
    return launch, config.programs_per_sm


@functools.cache
def _multiprocessors(device: int) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count
