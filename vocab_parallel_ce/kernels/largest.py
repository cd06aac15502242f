"""What finds the largest logits of a row: the maxima of its tiles, and how many of its logits are equal to a number.

Tiles: a program takes 64 tiles of 64 columns. Equal logits: a program takes a row. Regime: bound by memory, one read of
the shard each; 1 K to 256 K columns.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from vocab_parallel_ce.kernels.launch import Launch, cache_launches

TILES = 64  # of a program
COLUMNS = 4096  # that a program compares at once


@triton.jit(do_not_specialize=["n_programs"])
def tile_maxima_kernel(
    logits,  # [N, C] bf16|fp16|fp32
    maxima,  # [N, n_tiles] logits' dtype, out
    row_stride,  # of logits
    n_columns,
    n_programs,  # of a row
    TILE: tl.constexpr,  # columns of a tile
    TILES: tl.constexpr,  # of a program
):
    """Example: tiles of two columns, ``[1, 3, 2, nan, 0]``: ``[3, nan, 0]``."""
    row = (tl.program_id(0) // n_programs).to(tl.int64)
    tiles = (tl.program_id(0) % n_programs) * TILES + tl.arange(0, TILES)
    columns = tiles[:, None] * TILE + tl.arange(0, TILE)[None, :]
    x = tl.load(logits + row * row_stride + columns, columns < n_columns, other=float("-inf")).to(tl.float32)
    largest = tl.where(tl.max((x != x).to(tl.int32), axis=1) > 0, float("nan"), tl.max(x, axis=1))
    n_tiles = tl.cdiv(n_columns, TILE)
    tl.store(maxima + row * n_tiles + tiles, largest.to(maxima.dtype.element_ty), tiles < n_tiles)


@triton.jit(do_not_specialize=["n_rows"])
def count_equal_kernel(
    logits,  # [N, C] bf16|fp16|fp32
    numbers,  # [N] logits' dtype
    counts,  # [N] int32, out
    row_stride,  # of logits
    n_columns,
    n_rows,
    COLUMNS: tl.constexpr,
):
    """Example: ``[1, 3, 1]`` and 1: 2."""
    row = tl.program_id(0).to(tl.int64)
    number = tl.load(numbers + row)
    count = tl.zeros([COLUMNS], tl.int32)
    for first in range(0, n_columns, COLUMNS):
        columns = first + tl.arange(0, COLUMNS)
        x = tl.load(logits + row * row_stride + columns, columns < n_columns, other=float("nan"))
        count += (x == number).to(tl.int32)
    tl.store(counts + row, tl.sum(count))


def tile_maxima(rows: Tensor, tile: int) -> Tensor:
    """Return ``[N, n_tiles]``, the largest of each ``tile`` columns of ``rows [N, C]``, NaN where there is one."""
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    n_rows, n_columns = rows.shape
    maxima = rows.new_empty(n_rows, triton.cdiv(n_columns, tile))
    n_programs = triton.cdiv(maxima.shape[1], TILES)
    _tile_maxima(rows.stride(0), n_columns, tile)(n_rows * n_programs, (rows, maxima), (n_programs,))
    return maxima


def count_equal(rows: Tensor, numbers: Tensor) -> Tensor:
    """Return ``[N]`` int32, how many of ``rows [N, C]`` are equal to ``numbers [N]``."""
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    counts = rows.new_empty(rows.shape[0], dtype=torch.int32)
    _count_equal(rows.stride(0), rows.shape[1])(rows.shape[0], (rows, numbers, counts), (rows.shape[0],))
    return counts


@cache_launches
def _tile_maxima(row_stride: int, n_columns: int, tile: int) -> Launch:
    constants = {"TILE": tile, "TILES": TILES}
    return Launch(tile_maxima_kernel, (row_stride, n_columns), constants, num_warps=8)


@cache_launches
def _count_equal(row_stride: int, n_columns: int) -> Launch:
    return Launch(count_equal_kernel, (row_stride, n_columns), {"COLUMNS": COLUMNS}, num_warps=8)
