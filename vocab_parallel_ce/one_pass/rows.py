"""How ``one_pass`` reads and writes a row: the circular buffer of its pieces, its edges, and sums over its columns.

A row is a body of whole 16-byte vectors, which are copied to the buffer, and edges before and after the body if rows
are not aligned. A piece is one vector per lane, and a lane is a thread. A thread reads only vectors that it copied
itself. So it waits for its own copies only, without a barrier.

Next to the label's own term, ``others_sum`` would lose digits. So the walk leaves out the label's vector. The other
logits of that vector, and the edges, are loaded separately, one per lane, and the sums begin with them.
"""

# mypy: disable-error-code="assignment, misc"
# Tuples grow in loops that the compiler unrolls.

from typing import NamedTuple

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from vocab_parallel_ce.kernels import primitives as ops
from vocab_parallel_ce.kernels.labels import logits_gradient

# Triton 3.7 renamed it.
copy_to_shared = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared


class Walk(NamedTuple):
    """The logits, the buffer, and how a row lies in both; the same for all rows."""

    logits: tl.tensor
    layout: tl.tuple
    n_columns: tl.tensor
    lane_columns: tl.tensor  # [LANES, VECTOR] columns of a body's first piece
    buffer: gl.shared_memory_descriptor


class Sizes(NamedTuple):
    """Constants of the kernel; the numbers are in pieces."""

    PIECES: gl.constexpr  # of a row
    REGISTER_PIECES: gl.constexpr
    STAGES: gl.constexpr
    PIECES_PER_WAIT: gl.constexpr
    HAS_EDGES: gl.constexpr


class Cursor(NamedTuple):
    """The row that a program works on, and what it knows of its next rows."""

    stage: tl.tensor  # of the row's first piece
    row: tl.tensor
    step: tl.tensor  # from one row of the program to its next
    columns: tl.tuple  # label_column of this row and of the next ones


class Body(NamedTuple):
    """Where a row lies, in elements from the base."""

    begin: tl.tensor
    first: tl.tensor  # of the body
    width: tl.tensor  # of the body
    label_vector: tl.tensor  # the label's, counted from first; -1 if it is not in the body


class Remainder(NamedTuple):
    """A row's logits that no piece has, as they are in memory, one per lane; -inf in the lanes after them."""

    label_logit: tl.tensor  # the label's
    neighbors: tl.tensor  # the others of the label's vector
    edges: tl.tensor  # of rows that have them; with the label's if it is there


@gluon.constexpr_function
def copies_in_flight(piece, PIECES, REGISTER_PIECES, STAGES, PIECES_PER_WAIT):
    """Return how many copies may be in flight while PIECES_PER_WAIT pieces from ``piece`` on must be there.

    STAGES copies were started before the row's first refill, and one by each refill since.
    """
    last = min(piece + PIECES_PER_WAIT, PIECES) - 1
    refilled = min(max(piece - PIECES_PER_WAIT, 0), REGISTER_PIECES)
    return STAGES + refilled - last - 1


@gluon.jit
def merge_lanes(max_a, sum_a, max_b, sum_b):
    row_max = tl.maximum(max_a, max_b)
    shift = ops.finite_or_zero(row_max)
    return row_max, sum_a * ops.exp_shifted(max_a, shift) + sum_b * ops.exp_shifted(max_b, shift)


@gluon.jit
def locate(walk, row, column, HAS_EDGES: gl.constexpr):
    """Return the ``Body`` of a row; the compiler sees that it has whole vectors. ``column`` is the label's."""
    VECTOR: gl.constexpr = walk.lane_columns.shape[1]
    begin = ops.row_begin(row.to(gl.int64), walk.layout)
    if HAS_EDGES:
        first, width = ops.row_body(begin, walk.n_columns, VECTOR)
        body_column = column - (first - begin).to(gl.int32)
        is_inside = (column >= 0) & (body_column >= 0) & (body_column < width)
        label_vector = gl.where(is_inside, body_column // VECTOR, -1)
    else:
        begin = begin // VECTOR * VECTOR
        first = begin
        width = walk.n_columns
        label_vector = gl.where(column >= 0, column // VECTOR, -1)
    return Body(begin, first, width, label_vector)


@gluon.jit
def piece_columns(LANES: gl.constexpr, VECTOR: gl.constexpr):
    """Return the columns ``[LANES, VECTOR]`` of a piece: a vector per thread."""
    tile: gl.constexpr = gl.BlockedLayout([1, VECTOR], [32, 1], [LANES // 32, 1], [1, 0])
    vectors = gl.arange(0, LANES, layout=gl.SliceLayout(1, tile))
    return vectors[:, None] * VECTOR + gl.arange(0, VECTOR, layout=gl.SliceLayout(0, tile))[None, :]


@gluon.jit
def label_lanes_of(LANES: gl.constexpr, VECTOR: gl.constexpr):
    """Return the numbers from 0 on of the labels that a program counts at once, VECTOR per thread."""
    layout: gl.constexpr = gl.BlockedLayout([VECTOR], [32], [LANES // 32], [0])
    return gl.arange(0, LANES * VECTOR, layout=layout)


@gluon.jit
def lanes_of(walk):
    return gl.arange(0, walk.lane_columns.shape[0], layout=gl.SliceLayout(1, walk.lane_columns.type.layout))


@gluon.jit
def neighbor_offsets(walk, body, column):
    """Return the offsets of the other logits of the label's vector, one per lane, and which of them exist."""
    VECTOR: gl.constexpr = walk.lane_columns.shape[1]
    lanes = lanes_of(walk)
    offset = body.first + body.label_vector * VECTOR + lanes
    return offset, (lanes < VECTOR) & (body.label_vector >= 0) & (offset != body.begin + column)


@gluon.jit
def load_remainder(walk, body, column, HAS_EDGES: gl.constexpr):
    """Load the ``Remainder`` logits of a row whose label is in ``column``; of an ignored row none."""
    lowest: gl.constexpr = float("-inf")
    label_logit = gl.load(walk.logits + body.begin + column, mask=column >= 0, other=lowest)
    offset, inside = neighbor_offsets(walk, body, column)
    neighbors = gl.load(walk.logits + offset, mask=inside, other=lowest)
    edges = neighbors  # Triton 3.6 cannot return None in a tuple
    if HAS_EDGES:
        offset, inside = edge_offsets(walk, body)
        edges = gl.load(walk.logits + offset, mask=inside & (column != -2), other=lowest)
    return Remainder(label_logit, neighbors, edges)


@gluon.jit
def edge_offsets(walk, body):
    """Return the offsets of a row's edges, one per lane, and which of them exist."""
    VECTOR: gl.constexpr = walk.lane_columns.shape[1]
    return ops.edge_offsets(lanes_of(walk), body.begin, walk.n_columns, body.first, body.width, VECTOR)


@gluon.jit
def fetch(walk, cursor, piece: gl.constexpr, SIZES: gl.constexpr):
    """Start to copy a piece to its stage; ``piece`` counts from the cursor's row on, over the next rows too.

    Columns that are not read become 0 in the buffer, those of ignored rows too.
    """
    ahead: gl.constexpr = piece // SIZES.PIECES
    columns = (piece % SIZES.PIECES) * walk.lane_columns.numel + walk.lane_columns
    body = locate(walk, cursor.row + ahead * cursor.step, -1, SIZES.HAS_EDGES)
    n_read = gl.where(cursor.columns[ahead] == -2, 0, body.width)
    stage = (cursor.stage + piece) % SIZES.STAGES
    copy_to_shared(walk.buffer.index(stage), walk.logits + body.first + columns, mask=columns < n_read)
    async_copy.commit_group()


@gluon.constexpr_function
def may_end(piece, SIZES):
    """Whether the body may end in ``piece``. An edge is narrower than a piece, so it may in the last two."""
    return piece >= SIZES.PIECES - 1 - SIZES.HAS_EDGES


@gluon.jit
def begin_sums(walk, body, remainder, column, loss_options, HAS_EDGES: gl.constexpr):
    """Return each lane's maximum and sum of the row's remaining logits, except the label's."""
    neighbors = ops.transform(remainder.neighbors.to(gl.float32), loss_options)[0]
    lane_max = neighbors
    if HAS_EDGES:
        offset, _ = edge_offsets(walk, body)
        edges = ops.transform(remainder.edges.to(gl.float32), loss_options)[0]
        edges = gl.where(offset == body.begin + column, float("-inf"), edges)
        lane_max = gl.maximum(neighbors, edges)
    shift = ops.finite_or_zero(lane_max)
    lane_sum = ops.exp_shifted(neighbors, shift)
    if HAS_EDGES:
        lane_sum += ops.exp_shifted(edges, shift)
    return lane_max, lane_sum


@gluon.jit
def read_row(walk, cursor, body, remainder, loss_options, SIZES: gl.constexpr):
    """Return ``(row_max, others_sum, pieces)``: statistics without the label, and the pieces in registers."""
    PIECES: gl.constexpr = SIZES.PIECES
    PIECES_PER_WAIT: gl.constexpr = SIZES.PIECES_PER_WAIT
    lane_columns = walk.lane_columns
    tile: gl.constexpr = lane_columns.type.layout
    label_vector = body.label_vector - lanes_of(walk)
    lane_max, lane_sum = begin_sums(walk, body, remainder, cursor.columns[0], loss_options, SIZES.HAS_EDGES)
    pieces = ()
    for i in gl.static_range(PIECES):
        if i % PIECES_PER_WAIT == 0:
            async_copy.wait_group(copies_in_flight(i, PIECES, SIZES.REGISTER_PIECES, SIZES.STAGES, PIECES_PER_WAIT))
            # Refill the stages that were read before the wait.
            for done in gl.static_range(i - PIECES_PER_WAIT, i):
                if done >= 0 and done < SIZES.REGISTER_PIECES:
                    fetch(walk, cursor, done + SIZES.STAGES, SIZES)
        piece = walk.buffer.index((cursor.stage + i) % SIZES.STAGES).load(tile)
        if i < SIZES.REGISTER_PIECES:
            pieces = pieces + (piece,)
        z = ops.transform(piece.to(gl.float32), loss_options)[0]
        if may_end(i, SIZES):
            z = gl.where(i * lane_columns.numel + lane_columns < body.width, z, float("-inf"))
        is_other = label_vector != i * lane_columns.shape[0]
        piece_max = gl.where(is_other, gl.max(z, axis=1), float("-inf"))
        new_max = gl.maximum(lane_max, piece_max)
        shift = ops.finite_or_zero(new_max)
        lane_sum *= ops.exp_shifted(lane_max, shift)
        lane_sum += gl.where(is_other, gl.sum(ops.exp_shifted(z, shift[:, None]), axis=1), 0.0)
        lane_max = new_max
    row_max, others_sum = gl.reduce((lane_max, lane_sum), 0, merge_lanes)
    for done in gl.static_range((PIECES - 1) // PIECES_PER_WAIT * PIECES_PER_WAIT, PIECES):
        if done < SIZES.REGISTER_PIECES:
            fetch(walk, cursor, done + SIZES.STAGES, SIZES)
    return row_max, others_sum, pieces


@gluon.jit
def write_row(walk, cursor, body, edges, pieces, factors, grads, loss_options, SIZES: gl.constexpr):
    """Write the gradient over every column of a row, the label's as if it were another, and refill the stages."""
    logits, lane_columns = walk.logits, walk.lane_columns
    element = logits.dtype.element_ty
    for i in gl.static_range(SIZES.PIECES):
        if i < SIZES.REGISTER_PIECES:
            piece = pieces[i]
        else:
            piece = walk.buffer.index((cursor.stage + i) % SIZES.STAGES).load(lane_columns.type.layout)
        columns = i * lane_columns.numel + lane_columns
        x = piece.to(gl.float32)
        grad = logits_gradient(x, False, 0.0, factors, grads, loss_options).to(element)
        if may_end(i, SIZES):
            gl.store(logits + body.first + columns, grad, mask=columns < body.width)
        else:
            gl.store(logits + body.first + columns, grad)
        if i >= SIZES.REGISTER_PIECES:
            if (i + 1 - SIZES.REGISTER_PIECES) % SIZES.PIECES_PER_WAIT == 0 or i == SIZES.PIECES - 1:
                # Refill the stages that were read since the last refill.
                for done in gl.static_range(i - (i - SIZES.REGISTER_PIECES) % SIZES.PIECES_PER_WAIT, i + 1):
                    fetch(walk, cursor, done + SIZES.STAGES, SIZES)
    if SIZES.HAS_EDGES:
        offset, inside = edge_offsets(walk, body)
        grad = logits_gradient(edges.to(gl.float32), False, 0.0, factors, grads, loss_options).to(element)
        gl.store(logits + offset, grad, mask=inside)


@gluon.jit
def write_label(walk, body, label_logit, column, factors, grads, loss_options, HAS_EDGES: gl.constexpr):
    """Write the label's gradient, unless its column is excluded.

    The thread that wrote the label's vector, or its edge, does: so it is the later one of the two without a barrier.
    """
    lanes = lanes_of(walk)
    is_writer = lanes == body.label_vector % lanes.shape[0]
    if HAS_EDGES:
        offset, inside = edge_offsets(walk, body)
        is_writer = gl.where(body.label_vector >= 0, is_writer, inside & (offset == body.begin + column))
    x = label_logit.to(gl.float32)
    is_written = (column >= 0) & (ops.transform(x, loss_options)[0] > float("-inf"))
    grad = logits_gradient(x, True, 0.0, factors, grads, loss_options).to(walk.logits.dtype.element_ty)
    pointers = walk.logits + (body.begin + column) + gl.zeros_like(lanes)
    gl.store(pointers, grad, mask=is_writer & is_written)


@gluon.jit
def clear_rows(walk, row, step, n_rows, SIZES: gl.constexpr):
    """Write gradient 0 in every row of a program: a sum over no items."""
    lane_columns = walk.lane_columns
    zeros = gl.zeros_like(lane_columns).to(walk.logits.dtype.element_ty)
    while row < n_rows:
        body = locate(walk, row, -1, SIZES.HAS_EDGES)
        for i in range(SIZES.PIECES):
            columns = i * lane_columns.numel + lane_columns
            gl.store(walk.logits + body.first + columns, zeros, mask=columns < body.width)
        if SIZES.HAS_EDGES:
            offset, inside = edge_offsets(walk, body)
            gl.store(walk.logits + offset, gl.zeros_like(lanes_of(walk)).to(zeros.dtype), mask=inside)
        row += step
