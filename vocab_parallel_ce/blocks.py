"""How wide a program is: data, chosen by a pure function that needs no GPU.

A program walks one row in tiles of ``lanes x vector`` elements. With 32 threads a warp, each thread holds
``chunks`` vectors of 16 bytes, and so has as many independent loads in flight.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

from vocab_parallel_ce.layout import VECTOR_BYTES

THREADS_PER_WARP = 32

Table = tuple[tuple[int, int, int], ...]

# (row bytes up to, warps, chunks): the best of 4, 8, 16 warps and 1, 2, 4 chunks, bf16 rows of 8 K to 128 K
# columns, one H200, Triton 3.6; rows of up to 2 KB were not tuned. A kernel that only reads is best with
# fewer warps than one that writes too. docs/performance.md has the times.
READ = (
    (2_048, 1, 1),
    (16_384, 4, 2),
    (1 << 62, 8, 2),
)
READ_AND_WRITE = (
    (2_048, 1, 1),
    (40_960, 8, 2),
    (1 << 62, 16, 4),
)
# Rows with edges: a program more on each multiprocessor hides the wait for them.
READ_AND_WRITE_EDGES = (
    (2_048, 1, 1),
    (1 << 62, 8, 2),
)


class Block(NamedTuple):
    """Launch shape of a row-walking kernel."""

    num_warps: int
    lanes: int  # rows of the tile
    vector: int  # elements of 16 bytes


@functools.lru_cache
def choose_block(table: Table, n_columns: int, element_size: int) -> Block:
    """Launch shape of ``table`` for rows of ``n_columns`` elements of ``element_size`` bytes."""
    num_warps, chunks = next(
        (num_warps, chunks) for row_bytes, num_warps, chunks in table if n_columns * element_size <= row_bytes
    )
    return Block(num_warps, THREADS_PER_WARP * num_warps * chunks, VECTOR_BYTES // element_size)


class Ring(NamedTuple):
    """Launch shape of the one-pass kernel."""

    num_warps: int
    keep: int  # chunks of a row that stay in registers
    slots: int  # chunks in shared memory
    group: int  # chunks that are waited for, and freed, together
    programs: int  # a multiprocessor


# (row bytes from, up to, ring): the best of about 80 on bf16 rows of 8 K to 128 K columns, one H200, Triton
# 3.6; docs/performance.md has the times. A chunk is 512 bytes a warp, a row at most keep + slots chunks.
ONE_PASS = (
    (16_384, 40_960, Ring(4, 8, 48, 4, 2)),
    (40_961, 94_208, Ring(8, 4, 24, 8, 2)),
    (94_209, 106_496, Ring(16, 12, 26, 4, 1)),
    (106_497, 122_880, Ring(16, 5, 26, 8, 1)),
    (122_881, 139_264, Ring(16, 11, 26, 4, 1)),
    (139_265, 212_992, Ring(16, 8, 26, 4, 1)),
    (212_993, 270_336, Ring(16, 7, 26, 8, 1)),
)


@functools.lru_cache
def choose_ring(row_bytes: int) -> Ring | None:
    """Ring for rows of ``row_bytes``, or None where the one-pass kernel is not the best or does not fit."""
    return next((ring for least, most, ring in ONE_PASS if least <= row_bytes <= most), None)
