"""The largest logits of a rank's rows, by the maxima of tiles: rows are read once, and few columns are compared.

The ``k`` largest of a row lie in the ``k`` tiles of the largest maxima: any logit of another tile has ``k`` maxima that
are at least as large. Of equal maxima the first tiles have the first columns.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from vocab_parallel_ce.layout import compute_dtype, walkable
from vocab_parallel_ce.selection import triton_state
from vocab_parallel_ce.spec import NEG_INF, LossOptions, transformed

TILE = 64
MOST_SORTED = 4096  # columns that PyTorch sorts on chip


def n_compared(n_columns: int, k: int) -> int:
    """Return how many numbers of a row of ``n_columns`` are compared, maxima and logits."""
    return n_columns if _are_few(n_columns, k) else n_columns // TILE + k * TILE


def largest_columns(rows: Tensor, k: int) -> Tensor:
    """Return ``[N, k]`` int64 columns of the largest of ``rows [N, C]``, of equal ones the first, in any order."""
    if _are_few(rows.shape[-1], k):
        return _first_largest(rows, k)
    columns, x = _of_tiles(rows, _first_largest(_tile_maxima(rows), k).sort(dim=-1).values)
    return columns.gather(-1, _first_largest(x, k))


def largest_values(rows: Tensor, k: int) -> Tensor:
    """Return ``[N, k]``, the largest of ``rows [N, C]`` in descending order; NaN is the largest."""
    if not _are_few(rows.shape[-1], k):
        _, rows = _of_tiles(rows, _tile_maxima(rows).topk(k, dim=-1, sorted=False).indices)
    return rows.topk(k, dim=-1).values


def equal_and_below(rows: Tensor, numbers: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``[N]`` int32, how many of ``rows [N, C]`` are equal to ``numbers [N]``, and the largest below them.

    The second has the numbers' dtype, and -inf if there is none.
    """
    if rows.shape[-1] and has_kernels(rows):
        from vocab_parallel_ce.kernels import largest

        n_equal, below = largest.equal_and_below(rows, numbers.to(rows.dtype))
    else:
        least = numbers.to(rows.dtype).unsqueeze(-1)
        n_equal = (rows == least).sum(dim=-1, dtype=torch.int32)
        below = F.pad(torch.where(rows < least, rows, NEG_INF), (0, 1), value=NEG_INF).amax(dim=-1)
    return n_equal, below.to(numbers.dtype)


def sums_above(rows: Tensor, row_max: Tensor, options: LossOptions, unit: float) -> Callable[..., Tensor]:
    """Return a function of ``numbers [N, T]`` of the logits' dtype: ``[N, T]`` int64 sums over the larger logits.

    It sums ``unit * exp(z - z_max)``, each rounded towards 0, or with ``counts=True`` 1, over ``rows [N, n]``.
    ``row_max [N]`` has ``z_max``.
    """
    if rows.shape[-1] and has_kernels(rows):
        from vocab_parallel_ce.kernels import largest

        rows = walkable(rows)  # once, not in each call
        return lambda numbers, counts: largest.sums_above(rows, numbers, row_max, options, unit=unit, counts=counts)
    x = rows.to(compute_dtype(rows.dtype)).sort(dim=-1).values.contiguous()
    z, z_max = (transformed(each.to(x.dtype), options)[0] for each in (x, row_max.unsqueeze(-1)))
    sums = F.pad(((z - z_max).exp() * unit).long().cumsum(dim=-1), (1, 0))  # of the columns before each, and of all

    def among_sorted(numbers: Tensor, *, counts: bool) -> Tensor:
        first = torch.searchsorted(x, numbers.to(x.dtype), right=True)
        return x.shape[-1] - first if counts else sums[:, -1:] - sums.gather(-1, first)

    return among_sorted


def _are_few(n_columns: int, k: int) -> bool:
    return 4 * k * TILE > n_columns


def has_kernels(rows: Tensor) -> bool:
    """Return whether kernels read ``rows``: on a GPU that has them. Otherwise, and in fp64, plain PyTorch does."""
    return rows.is_cuda and rows.dtype != torch.float64 and triton_state() == "compiler"


def _tile_maxima(rows: Tensor) -> Tensor:
    if has_kernels(rows):
        from vocab_parallel_ce.kernels import largest

        return largest.tile_maxima(rows, TILE)
    whole = rows.shape[-1] // TILE * TILE
    maxima = rows[:, :whole].unflatten(-1, (-1, TILE)).amax(dim=-1)
    if whole < rows.shape[-1]:
        maxima = torch.cat([maxima, rows[:, whole:].amax(dim=-1, keepdim=True)], dim=-1)
    return maxima


def _of_tiles(rows: Tensor, tiles: Tensor) -> tuple[Tensor, Tensor]:
    """Return the columns of ``tiles [N, k]``, and their logits, ``-inf`` beyond the last column."""
    columns = (tiles.unsqueeze(-1) * TILE + torch.arange(TILE, device=rows.device)).flatten(1)
    if rows.shape[-1] % TILE == 0:
        return columns, rows.gather(-1, columns)
    x = rows.gather(-1, columns.clamp(max=rows.shape[-1] - 1))
    return columns, x.masked_fill_(columns >= rows.shape[-1], NEG_INF)


def _first_largest(rows: Tensor, k: int) -> Tensor:
    if rows.shape[-1] <= MOST_SORTED or not k:
        return rows.sort(dim=-1, descending=True, stable=True).indices[:, :k]
    least = rows.topk(k, dim=-1).values[:, -1:]
    column = torch.arange(rows.shape[-1], dtype=torch.int32, device=rows.device)
    # All that are larger, and then those that are equal, in order.
    position = torch.where(rows > least, -1, column).where(rows >= least, rows.shape[-1])
    return position.topk(k, dim=-1, largest=False).indices
