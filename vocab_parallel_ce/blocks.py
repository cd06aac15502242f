"""Launch shapes of the kernels, as tables of measurements; choosing one needs no GPU.

Most kernels walk one row per program, in tiles of ``lanes x vector`` elements, with 32 threads per warp. A thread
holds several vectors of 16 bytes of a tile, so it has that many independent loads in flight.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

from vocab_parallel_ce.environment import SAME_BITS, switch
from vocab_parallel_ce.layout import VECTOR_BYTES
from vocab_parallel_ce.shard import VocabShard

THREADS_PER_WARP = 32

Table = tuple[tuple[int, int, int], ...]

# (row bytes up to, warps, vectors per thread). The best of 4, 8, 16 warps and 1, 2, 4 vectors for bf16 rows of 8 K
# to 128 K columns, on one H200 with Triton 3.6. Rows of up to 2 KB were not tuned. A kernel that only reads needs
# fewer warps than one that also writes. docs/measurements.md has what was tried.
READ_PAIRS = ((2_048, 1, 1), (16_384, 4, 2), (1 << 62, 8, 1))  # kernels that read a row of two tensors
READ_AND_WRITE = ((2_048, 1, 1), (40_960, 8, 2), (1 << 62, 16, 4))
# For rows with edges: one more program per multiprocessor hides the latency of the edges.
READ_AND_WRITE_EDGES = ((2_048, 1, 1), (1 << 62, 8, 2))
# For gradients whose programs write a few tiles each: of the small ones several share a row's merged statistics, and
# they leave registers to rows that need more.
WRITE_TILES = ((2_048, 1, 1), (1 << 62, 4, 4))
WRITE_SMALL_TILES = ((2_048, 1, 1), (1 << 62, 4, 2))
ALL_TILES = 1 << 31


class Shape(NamedTuple):
    """What a kernel that walks rows must know when it is compiled."""

    HAS_EDGES: bool  # rows have columns in no whole vector
    LANES: int
    VECTOR: int
    ALIKE: bool  # each two rows of two tensors begin at the same position of a line
    UNITS: int  # of the row, 32 lanes each; 0: the row is no whole units
    TILES: int  # of a part


class Block(NamedTuple):
    """Launch shape of a kernel that walks rows.

    The fields after the first three are of the statistics. A row's bits depend on the fields up to ``units``, so these
    depend on the row's bytes alone, or on a unit's. No bit of a gradient depends on any.
    """

    num_warps: int
    lanes: int  # rows of the tile: of statistics threads, with a vector each
    vector: int  # elements of 16 bytes
    tiles: int = 0  # of a part
    n_parts: int = 0  # of a row, or of a unit
    units: int = 0  # side by side over the lanes; 0: the row is no whole units
    is_cut: bool = False  # each part of a row has a program of its own
    at_once: int = 1  # parts of logits that a program reads together, if options allow; of pairs unused

    def has_edges(self, shard: VocabShard, rows_have: bool) -> bool:
        """Return whether there are columns in no whole vector. ``rows_have``: rows do not begin or end at lines.

        Of units, whether the vocabulary has a last vector that is not whole: the same on all ranks.
        """
        if self.units:
            return shard.vocab_size % self.vector != 0
        return rows_have or shard.n_valid % self.vector != 0


# (row bytes up to, warps, tiles of a part)
STATISTICS = ((2_048, 1, 2), (16_384, 4, 2), (1 << 62, 8, 2))
PARTS_AT_ONCE = 8  # that a program reads together: of logits if rows are few, or those that other programs stored
# The most rows, and the fewest parts of a row, of which each part has a program of its own.
CUT_ROWS, CUT_PARTS = 96, 12
AT_ONCE_ROWS = 512  # the most rows whose programs read several parts together; no fewer than CUT_ROWS
UNIT_PARTS_AT_ONCE = 4  # of any number of rows of units, whose parts are narrower
PROGRAMS_OF_FEW_ROWS = 4096  # of a gradient: with fewer, its programs write fewer tiles than the table says
UNITS = 8  # of a vocabulary, for the same bits on 1, 2, 4 and 8 ranks


@functools.lru_cache(maxsize=1024)
def units_of(shard: VocabShard, rank: int, n_ranks: int, element_size: int) -> int:
    """Return how many units of the padded vocabulary a rank has; 0 if its shard is no whole units.

    A unit is one eighth of the columns of all ranks. It begins at a boundary of 16 bytes if rows do. A single rank has
    units only if the environment asks for the bits of several.
    """
    if n_ranks == 1 and not switch(SAME_BITS):
        return 0
    width = shard.n_columns * n_ranks // UNITS
    is_equal = shard.start == rank * shard.n_columns and shard.vocab_size <= shard.n_columns * n_ranks
    is_whole = UNITS % n_ranks == 0 and width * UNITS == shard.n_columns * n_ranks
    return UNITS // n_ranks if is_equal and is_whole and width > 0 and width * element_size % VECTOR_BYTES == 0 else 0


@functools.lru_cache(maxsize=1024)
def statistics_shape(n_rows: int, shard: VocabShard, element_size: int, n_tensors: int, units: int = 0) -> Block:
    """Return the launch shape of statistics of a shard's rows, or of its ``units``, in ``n_tensors``."""
    n_columns, num_warps, tiles = shard.n_columns, units, 2
    if not units:
        n_columns = shard.n_valid
        row_bytes = n_columns * element_size
        num_warps, tiles = next((warps, tiles) for most, warps, tiles in STATISTICS if row_bytes <= most)
    lanes, vector = THREADS_PER_WARP * num_warps, VECTOR_BYTES // element_size
    n_parts = -(-n_columns // (lanes * vector * tiles))
    is_cut = n_rows <= CUT_ROWS and n_tensors * n_parts >= CUT_PARTS  # a part of two tensors is two reads
    at_once = PARTS_AT_ONCE if n_rows <= AT_ONCE_ROWS else 1
    if units:
        at_once = 2 * PARTS_AT_ONCE if is_cut else UNIT_PARTS_AT_ONCE
    return Block(num_warps, lanes, vector, tiles, n_parts, units, is_cut, at_once)


@functools.lru_cache(maxsize=1024)
def gradient_shape(n_rows: int, shard: VocabShard, element_size: int, table: Table, tiles: int) -> tuple[Block, int]:
    """Return the launch shape of a gradient, and the programs of a row. No bit depends on them.

    A program writes ``tiles``, or fewer tiles if rows are few.
    """
    block = choose_block(table, shard.n_columns, element_size)
    n_tiles = -(-shard.n_columns // (block.lanes * block.vector))
    return block, min(n_tiles, max(-(-n_tiles // tiles), PROGRAMS_OF_FEW_ROWS // max(n_rows, 1)))


def choose_block(table: Table, n_columns: int, element_size: int) -> Block:
    """Return the launch shape for rows of ``n_columns`` elements of ``element_size`` bytes."""
    row_bytes = n_columns * element_size
    num_warps, vectors = next((warps, vectors) for most, warps, vectors in table if row_bytes <= most)
    return Block(num_warps, THREADS_PER_WARP * num_warps * vectors, VECTOR_BYTES // element_size)
