"""What finds the largest logits of a row: the maxima of its tiles, and which logits are equal to or above numbers.

Tiles: a program takes 64 tiles of 64 columns. Otherwise a program takes a row. Regime: bound by memory, one read of the
shard each, and sums above several numbers by additions of int64; 1 K to 256 K columns.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from vocab_parallel_ce.kernels import primitives as ops
from vocab_parallel_ce.kernels.launch import Launch, cache_launches
from vocab_parallel_ce.layout import walkable
from vocab_parallel_ce.spec import LossOptions

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
def equal_and_below_kernel(
    logits,  # [N, C] bf16|fp16|fp32
    numbers,  # [N] logits' dtype
    counts,  # [N] int32, out
    below,  # [N] logits' dtype, out
    row_stride,  # of logits
    n_columns,
    n_rows,
    COLUMNS: tl.constexpr,
):
    """Example: ``[1, 3, 1, 0]`` and 1: 2 are equal, and 0 is the largest below."""
    row = tl.program_id(0).to(tl.int64)
    number = tl.load(numbers + row).to(tl.float32)
    count = tl.zeros([COLUMNS], tl.int32)
    largest = tl.full([COLUMNS], float("-inf"), tl.float32)
    for first in range(0, n_columns, COLUMNS):
        columns = first + tl.arange(0, COLUMNS)
        x = tl.load(logits + row * row_stride + columns, columns < n_columns, other=float("nan")).to(tl.float32)
        count += (x == number).to(tl.int32)
        largest = tl.where(x < number, tl.maximum(x, largest), largest)
    tl.store(counts + row, tl.sum(count))
    tl.store(below + row, tl.max(largest).to(below.dtype.element_ty))


@triton.jit(do_not_specialize=["n_rows"])
def sums_above_kernel(
    logits,  # [N, C] bf16|fp16|fp32
    numbers,  # [N, n_numbers] logits' dtype
    row_max,  # [N] logits' dtype, of all ranks
    temperature,  # [N] fp32, or None: 1
    sums,  # [N, n_numbers] int64, out
    row_stride,  # of logits
    n_columns,
    n_numbers,
    unit,  # of an exponential of 1
    loss_options,  # option_arguments
    n_rows,
    COUNTS: tl.constexpr,  # whether each logit counts 1
    NUMBERS: tl.constexpr,  # n_numbers rounded up to a power of two
    COLUMNS: tl.constexpr,
):
    """Example: ``[1, 3, 1]``, a number 0, unit 100: 100 + 13 + 13."""
    row = tl.program_id(0).to(tl.int64)
    t = None
    if temperature is not None:
        t = tl.load(temperature + row)
    z_max = ops.transform(tl.load(row_max + row), loss_options, t)[0]
    place = tl.arange(0, NUMBERS)
    least = tl.load(numbers + row * n_numbers + place, place < n_numbers, other=float("inf")).to(tl.float32)
    total = tl.zeros([NUMBERS, COLUMNS], tl.int64)
    for first in range(0, n_columns, COLUMNS):
        columns = first + tl.arange(0, COLUMNS)[None, :]
        x = tl.load(logits + row * row_stride + columns, columns < n_columns, other=float("-inf"))
        part = tl.full([1, COLUMNS], 1, tl.int64)
        if not COUNTS:
            z = ops.transform(x, loss_options, t)[0]
            part = (ops.exp_shifted(z, z_max) * unit).to(tl.int64)
        total += tl.where(x.to(tl.float32) > least[:, None], part, 0)
    tl.store(sums + row * n_numbers + place, tl.sum(total, axis=1), place < n_numbers)


def tile_maxima(rows: Tensor, tile: int) -> Tensor:
    """Return ``[N, n_tiles]``, the largest of each ``tile`` columns of ``rows [N, C]``, NaN where there is one."""
    rows = walkable(rows)
    n_rows, n_columns = rows.shape
    maxima = rows.new_empty(n_rows, triton.cdiv(n_columns, tile))
    n_programs = triton.cdiv(maxima.shape[1], TILES)
    _tile_maxima(rows.stride(0), n_columns, tile)(n_rows * n_programs, (rows, maxima), (n_programs,))
    return maxima


def equal_and_below(rows: Tensor, numbers: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``[N]`` int32, how many of ``rows [N, C]`` are equal to ``numbers [N]``, and the largest below them."""
    rows, numbers = walkable(rows), numbers.contiguous()
    outputs = torch.empty_like(numbers, dtype=torch.int32), torch.empty_like(numbers)
    _equal_and_below(rows.stride(0), rows.shape[1])(rows.shape[0], (rows, numbers, *outputs), (rows.shape[0],))
    return outputs


def sums_above(
    rows: Tensor, numbers: Tensor, row_max: Tensor, options: LossOptions, *, unit: float, counts: bool
) -> Tensor:
    """Return ``[N, T]`` int64 sums over ``rows [N, C]``, which kernels can walk, above ``numbers [N, T]``.

    Of ``unit * exp(z - z_max)``, each rounded towards 0, or of 1 with ``counts``; ``row_max [N]`` has ``z_max``, and
    ``options`` may have temperatures ``[N, 1]``.
    """
    sums = rows.new_empty(numbers.shape, dtype=torch.int64)
    temperature = None if options.temperature is None else options.temperature.flatten()
    key = rows.stride(0), rows.shape[1], numbers.shape[1], unit, options._replace(temperature=None), counts
    _sums_above(*key)(len(rows), (rows, numbers.contiguous(), row_max.contiguous(), temperature, sums), (len(rows),))
    return sums


@cache_launches
def _tile_maxima(row_stride: int, n_columns: int, tile: int) -> Launch:
    constants = {"TILE": tile, "TILES": TILES}
    return Launch(tile_maxima_kernel, (row_stride, n_columns), constants, num_warps=8)


@cache_launches
def _equal_and_below(row_stride: int, n_columns: int) -> Launch:
    return Launch(equal_and_below_kernel, (row_stride, n_columns), {"COLUMNS": COLUMNS}, num_warps=8)


@cache_launches
def _sums_above(
    row_stride: int, n_columns: int, n_numbers: int, unit: float, options: LossOptions, counts: bool
) -> Launch:
    constants = {"COUNTS": counts, "NUMBERS": triton.next_power_of_2(n_numbers), "COLUMNS": COLUMNS // 4}
    return Launch(sums_above_kernel, (row_stride, n_columns, n_numbers, unit, options), constants, num_warps=4)
