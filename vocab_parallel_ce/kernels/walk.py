"""Walk the rows of one tensor, or of two together: logits, and what stands alongside each logit.

Column ``i`` of one row stands alongside column ``i`` of the other. Their strides and dtypes may differ. The walk's
vectors are those of the first tensor. If both rows begin at the same position of a line, accesses of the second are
vectors too; otherwise they are single elements.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from vocab_parallel_ce.kernels import primitives as ops
from vocab_parallel_ce.shard import VocabShard


class Place(NamedTuple):
    """Where the rows lie, in elements from their bases."""

    begin: tl.tensor
    n_columns: tl.tensor  # to walk
    first: tl.tensor  # of the body
    width: tl.tensor  # of the body
    other_first: tl.tensor
    other_shift: tl.tensor  # from an element of one row to that of the other
    unit_width: tl.tensor  # columns of a unit, if the row is whole units


class Tile(NamedTuple):
    """Some columns of a row: the body's ``[LANES, VECTOR]``, or those of its edges."""

    first: tl.tensor  # an element of the first tensor, from its base
    other_first: tl.tensor  # the same of the other
    at: tl.tensor  # from both of these; int32 in the body
    column: tl.tensor  # int32
    inside: tl.tensor  # whether there is such a column, and it is read
    vector: tl.tensor  # [LANES] each lane's first column, from that of the body; of edges unused
    vector_inside: tl.tensor  # [LANES] whether there is such a vector; of edges unused


class Sizes(NamedTuple):
    """The columns of a shard and of the vocabulary: a launch's values, as they do not change from call to call."""

    n_columns: int | None  # with padding; None: no padding
    n_valid: int  # columns that are not padding
    vocab_size: int

    @classmethod
    def of(cls, shard: VocabShard) -> "Sizes":
        return cls(shard.n_columns if shard.n_columns > shard.n_valid else None, shard.n_valid, shard.vocab_size)


@triton.jit
def column_of(label, shard_start, n_columns):
    """Return a label's column, int32; -1 if it is none of ``n_columns``."""
    column = label - shard_start
    return tl.where((column >= 0) & (column < n_columns), column, -1).to(tl.int32)


@triton.jit
def locate(row, layout, other_layout, n_columns, SHAPE: tl.constexpr, unit_width=0):
    """Return the ``Place`` of ``row`` (int64); ``other_layout`` is None if there is one tensor."""
    begin = ops.row_begin(row, layout)
    if SHAPE.UNITS == 0:
        first, width = ops.row_body(begin, n_columns, SHAPE.VECTOR)
    else:
        first, width = ops.unit_body(begin, n_columns, SHAPE.VECTOR)
    other_begin, other_first = begin, first
    if other_layout is not None:
        other_begin = ops.row_begin(row, other_layout)
        other_first = other_begin + (first - begin)
        if SHAPE.ALIKE:
            # The same number, and the compiler sees that it is a multiple.
            other_first = other_first // SHAPE.VECTOR * SHAPE.VECTOR
    return Place(begin, n_columns, first, width, other_first, other_begin - begin, unit_width)


@triton.jit
def body_tile(place, begin, live, SHAPE: tl.constexpr):
    """Return the ``Tile`` at ``begin`` of a row's body, and which of its columns there are.

    A row that is not ``live`` is not read; None is always.
    """
    lane_vectors, lane_ends = tl.arange(0, SHAPE.LANES) * SHAPE.VECTOR, place.width
    if SHAPE.UNITS > 0:
        lane_vectors, lane_ends = ops.unit_lanes(place.width, place.unit_width, SHAPE.LANES, SHAPE.VECTOR)
    vectors = begin + lane_vectors
    columns = begin + (lane_vectors[:, None] + tl.arange(0, SHAPE.VECTOR)[None, :])
    vector_inside = vectors < lane_ends
    inside = columns < place.width
    if SHAPE.UNITS > 0:
        inside &= vector_inside[:, None]
    is_read = inside if live is None else inside & live
    # Without edges before it the body begins with column 0, and the compiler sees that columns are aligned.
    column = columns
    if SHAPE.HAS_EDGES and SHAPE.UNITS == 0:
        column = columns + (place.first - place.begin).to(tl.int32)
    return Tile(place.first, place.other_first, columns, column, is_read, vectors, vector_inside), inside


@triton.jit
def edge_tile(place, offset, inside):
    """Return the ``Tile`` of a row's edges at offsets from the first tensor's base."""
    column = (offset - place.begin).to(tl.int32)
    return Tile(0, place.other_shift, offset, column, inside, column, inside)


@triton.jit
def part_of_row(place, begin, row, TILE: tl.constexpr, SHAPE: tl.constexpr):
    """Return ``state = TILE(state, tile, row)`` after the tiles of a part from ``begin`` on; the first state is None.

    Lanes keep their own states.
    """
    TILES: tl.constexpr = SHAPE.TILES
    width: tl.constexpr = SHAPE.LANES // max(SHAPE.UNITS, 1) * SHAPE.VECTOR
    tile, _ = body_tile(place, begin, None, SHAPE)
    state = TILE(None, tile, row)
    for i in tl.static_range(1, TILES):
        tile, _ = body_tile(place, begin + i * width, None, SHAPE)
        state = TILE(state, tile, row)
    return state


@triton.jit
def walk_parts(
    place,
    state,
    row,
    loss_options,
    TILE: tl.constexpr,
    MERGE: tl.constexpr,
    SHAPE: tl.constexpr,
    UNROLLED: tl.constexpr = 1,
):
    """Return ``state = MERGE(state, part, loss_options)`` after all parts of a body; UNROLLED are loaded together."""
    width: tl.constexpr = SHAPE.LANES // max(SHAPE.UNITS, 1) * SHAPE.VECTOR * SHAPE.TILES
    end = place.width
    if SHAPE.UNITS > 0:
        end = tl.minimum(end, place.unit_width)
    for begin in tl.range(0, end, width, loop_unroll_factor=UNROLLED):
        part = part_of_row(place, begin, row, TILE, SHAPE)
        state = MERGE(state, part, loss_options)
    return state


@triton.jit
def merge_parts(
    pointers,
    n_parts,
    state,
    loss_options,
    LOAD: tl.constexpr,
    MERGE: tl.constexpr,
    WIDTH: tl.constexpr,
    UNROLLED: tl.constexpr,
):
    """Return what :func:`walk_parts` does, of parts of WIDTH numbers per lane at ``pointers``, those of the first one.

    Each number has its lanes side by side. UNROLLED parts are loaded together.
    """
    LANES: tl.constexpr = pointers.shape[0]
    for _ in tl.range(0, n_parts, loop_unroll_factor=UNROLLED):
        state = MERGE(state, LOAD(pointers, True, loss_options, LANES), loss_options)
        pointers += WIDTH * LANES
    return state


@triton.jit
def walk_edges(place, state, row, TILE: tl.constexpr, SHAPE: tl.constexpr):
    """Return ``TILE(state, tile, row)`` of a row's edges."""
    VECTOR: tl.constexpr = SHAPE.VECTOR
    if SHAPE.HAS_EDGES:
        # 16 vectors. States have a lane for each row of a tile, so their tile is a whole one.
        lane = ops.tile_columns(SHAPE.LANES, VECTOR)
        if SHAPE.UNITS == 0:
            offset, inside = ops.edge_offsets(lane, place.begin, place.n_columns, place.first, place.width, VECTOR)
            inside &= lane < 16 * VECTOR
            tile = edge_tile(place, offset, inside)
        else:
            # One vector, of the first lane of its unit. The compiler sees that it is aligned, as the body.
            lane -= place.width // place.unit_width * (32 * VECTOR)
            column = place.width + lane
            inside = (lane >= 0) & (lane < VECTOR) & (column < place.n_columns)
            tile = Tile(place.first, place.other_first, column, column, inside, column, inside)
        state = TILE(state, tile, row)
    return state


@triton.jit
def write(place, state, row, out, live, begin, step, TILE: tl.constexpr, SHAPE: tl.constexpr):
    """Store ``TILE(state, tile, row)`` in the tiles at ``begin``, ``begin + step``, ... of a row; from 0, in its edges.

    ``out`` is a pointer to the first tensor or one like it. A row that is not ``live`` is not read; None is always.
    """
    for tile_begin in range(begin, place.width, step):
        tile, inside = body_tile(place, tile_begin, live, SHAPE)
        values = TILE(state, tile, row).to(out.dtype.element_ty)
        tl.store(out + tile.first + tile.at, values, inside)
    VECTOR: tl.constexpr = SHAPE.VECTOR
    if SHAPE.HAS_EDGES:
        lane = tl.arange(0, 16 * VECTOR)
        offset, inside = ops.edge_offsets(lane, place.begin, place.n_columns, place.first, place.width, VECTOR)
        inside &= begin == 0
        is_read = inside if live is None else inside & live
        tile = edge_tile(place, offset, is_read)
        values = TILE(state, tile, row).to(out.dtype.element_ty)
        tl.store(out + tile.first + tile.at, values, inside)


@triton.jit
def lane_pointers(parts, index, WIDTH: tl.constexpr, LANES: tl.constexpr):
    """Return pointers to the first of each lane's WIDTH numbers in part ``index``; the others are LANES apart."""
    return parts + index.to(tl.int64) * (WIDTH * LANES) + tl.arange(0, LANES)


@triton.jit
def clear_padding(out, place, sizes, begin, LANES: tl.constexpr):
    """Store 0 in the padded columns of a row if ``begin`` is its first tile: one program does, since they are few."""
    if sizes.n_columns is not None:
        end = tl.where(begin == 0, sizes.n_columns, 0)
        for tile in range(sizes.n_valid, end, LANES):
            columns = tile + tl.arange(0, LANES)
            tl.store(out + place.begin + columns, tl.zeros([LANES], out.dtype.element_ty), columns < end)
