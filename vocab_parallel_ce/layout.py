"""How tensors lie in memory: rows that kernels can walk, copies if they cannot, views of labels and factors.

A kernel walks a view whose last dimension is dense. It gets the 1-D base tensor and six integers. Row ``r`` of the
flattened ``[N, C]`` view begins ``offset + i0 * stride0 + i1 * stride1 + i2 * stride2`` elements after the base, with
``r = (i0 * size1 + i1) * size2 + i2``. Dimensions of size 1 are dropped here, and mergeable ones are merged.

Example: the view ``x[:, :-1]`` of a contiguous ``x [2, 5, 8]`` has its rows at 0, 8, 16, 24, 40, 48,
56, 64: ``RowLayout(offset=0, size1=4, size2=1, stride0=40, stride1=8, stride2=0)``.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

VECTOR_BYTES = 16
LINE_BYTES = 128
INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}  # of as many bytes


class RowLayout(NamedTuple):
    """Element offsets of the rows of a view; see the module docstring."""

    offset: int
    size1: int
    size2: int
    stride0: int
    stride1: int
    stride2: int

    @property
    def pitch(self) -> int:
        """The largest number of elements that every row begins a multiple of after the base."""
        return math.gcd(self.offset, self.stride0, self.stride1, self.stride2)


def row_layout(logits: Tensor) -> RowLayout | None:
    """Layout of ``logits [..., C]``, or None where rows are not dense or take more than three levels."""
    columns = logits.shape[-1]
    if logits.is_contiguous():
        return RowLayout(0, 1, 1, columns, 0, 0)
    levels = _merged_levels(logits)
    if (columns > 1 and logits.stride(-1) != 1) or len(levels) > 3:
        return None
    (_, stride0), (size1, stride1), (size2, stride2) = levels + [(1, 0)] * (3 - len(levels))
    return RowLayout(0, size1, size2, stride0, stride1, stride2)


def rows_are_disjoint(logits: Tensor) -> bool:
    """Whether writing one row of ``logits [..., C]``, dense in its last dimension, changes no other."""
    if logits.is_contiguous():
        return True
    reach = logits.shape[-1]
    for size, stride in sorted(_merged_levels(logits), key=lambda level: level[1]):
        if stride < reach:
            return False
        reach = stride * (size - 1) + reach
    return True


def aligned_base(logits: Tensor) -> tuple[Tensor, int]:
    """A 1-D tensor at a 16-byte boundary at or before ``logits``, and the elements between the two.

    Kernels see only the boundary, so the compiler can prove that a multiple of 16 bytes from it is
    aligned. Storage that begins off a boundary itself is returned as it is: correct, and slower.
    """
    misaligned = logits.data_ptr() % VECTOR_BYTES // logits.element_size()
    start = logits.storage_offset() - misaligned
    if misaligned == 0 or start < 0:
        return logits, 0
    return torch.as_strided(logits.detach(), (1,), (1,), start), misaligned


def walkable(logits: Tensor) -> Tensor:
    """Return ``logits``, or a copy if kernels cannot walk their rows, or if their memory has the negative numbers."""
    logits = logits.resolve_neg()
    return logits if logits.is_contiguous() or row_layout(logits) is not None else logits.contiguous()


def overwritable(logits: Tensor) -> Tensor:
    """Return ``logits``, or a contiguous copy if rows cannot be walked or share memory with each other."""
    if logits.is_contiguous():
        return logits.resolve_neg()
    logits = walkable(logits)
    return logits if rows_are_disjoint(logits) else logits.contiguous()


def source_and_new(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return the logits to read and a new tensor for their gradient, laid out alike: gaps cost a copy."""
    grad, is_contiguous = torch.empty_like(logits), logits.is_contiguous()
    if not is_contiguous and row_layout(grad) is None:
        grad = torch.empty_like(logits, memory_format=torch.contiguous_format)
    alike = (is_contiguous or grad.stride() == logits.stride()) and logits.data_ptr() % 16 == grad.data_ptr() % 16
    return (logits, grad) if alike and not logits.is_neg() else (grad.copy_(logits), grad)


def cut(tensor: Tensor, rows: slice, dim: int = 0) -> Tensor:
    """Return these rows of ``tensor``, along ``dim``: itself if they are all of it, since a view takes microseconds."""
    n_rows = rows.stop - rows.start
    return tensor if n_rows == tensor.shape[dim] else tensor.narrow(dim, rows.start, n_rows)


def as_dtype(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``tensor`` in ``dtype``: itself if it has it, which PyTorch takes longer to see."""
    return tensor if tensor.dtype == dtype else tensor.to(dtype)


def shares_storage(a: Tensor, b: Tensor) -> bool:
    """Whether both lie in one storage, also as parts that do not overlap."""
    return a.numel() > 0 and a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


def constant(values: Tensor, logits: Tensor) -> Tensor:
    """Return ``values``, which backward reads, or a copy if it may overwrite them or autograd cannot save them."""
    copies = torch.is_grad_enabled() and (values.is_inference() or shares_storage(values, logits))
    return values.clone() if copies else values


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of the arithmetic, the statistics and the loss of logits: fp32, or fp64 for fp64 logits."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def per_row(grad_output: Tensor, logits: Tensor) -> Tensor:
    """Return ``[N]``, a view of a ``grad_output`` of one element for all rows (stride 0) or one per row."""
    if grad_output.numel() == 1:
        return grad_output.as_strided((logits.numel() // logits.shape[-1],), (0,))
    return grad_output if grad_output.dim() == 1 else grad_output.reshape(-1)


def flat(values: Tensor, n_axes: int = 1) -> Tensor:
    """Return ``[N]`` contiguous values of rows, or ``[N, k]`` with 2 axes: a view if they are contiguous already."""
    values = values.resolve_neg()
    if values.dim() == n_axes and values.is_contiguous():
        return values
    return values.flatten(0, values.dim() - n_axes).contiguous()


def sum_losses(losses: Tensor, total: Tensor) -> None:
    """Fill ``total []`` with the sum of ``losses``, contiguous."""
    torch.sum(losses.view(-1), 0, out=total)


def _merged_levels(logits: Tensor) -> list[tuple[int, int]]:
    """(size, stride) of the leading dimensions, outermost first: no size 1, merged where possible."""
    levels: list[tuple[int, int]] = []
    for size, stride in zip(logits.shape[:-1], logits.stride()[:-1], strict=True):
        if size == 1:
            continue
        if levels and levels[-1][1] == size * stride:
            size, stride = size * levels.pop()[0], stride
        levels.append((size, stride))
    return levels
