"""Kernels that apply one jit function to many inputs; needs triton."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from vocab_parallel_ce.kernels import primitives
from vocab_parallel_ce.kernels.launch import option_arguments
from vocab_parallel_ce.kernels.outputs import count_labels
from vocab_parallel_ce.kernels.primitives import edge_offsets, row_body, transform
from vocab_parallel_ce.spec import LossOptions

BLOCK = 1024


@triton.jit
def _elementwise_kernel(x, out, n, FUNCTION: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, FUNCTION(tl.load(x + at, at < n)), at < n)


@triton.jit
def _transform_kernel(x, out, slope, n, loss_options, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    z, dz = transform(tl.load(x + at, at < n), loss_options)
    tl.store(out + at, z, at < n)
    tl.store(slope + at, dz, at < n)


@triton.jit
def _count_kernel(labels, out, n_rows, ignore_index):
    tl.store(out, count_labels(labels, n_rows, ignore_index))


@triton.jit
def _row_parts_kernel(first, width, offset, inside, BEGINS: tl.constexpr, VECTOR: tl.constexpr, ROWS: tl.constexpr):
    """Row r has ``r // BEGINS + 1`` columns and begins at ``r % BEGINS``."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    begin, n_columns = (rows % BEGINS).to(tl.int64), rows // BEGINS + 1
    body_first, body_width = row_body(begin, n_columns, VECTOR)
    lane = tl.arange(0, 16 * VECTOR)[None, :]
    edge, is_inside = edge_offsets(lane, begin, n_columns, body_first, body_width, VECTOR)
    lanes = rows * (16 * VECTOR) + lane
    tl.store(first + rows, body_first)
    tl.store(width + rows, body_width)
    tl.store(offset + lanes, edge)
    tl.store(inside + lanes, is_inside.to(tl.int32))


def elementwise(name: str, x: Tensor) -> Tensor:
    """Return the primitive ``name`` of each of fp32 ``x [n]``."""
    out, function = x.new_full(x.shape, float("nan")), getattr(primitives, name)
    _elementwise_kernel[(triton.cdiv(x.numel(), BLOCK),)](x, out, x.numel(), FUNCTION=function, BLOCK=BLOCK)
    return out


def transform_of(x: Tensor, options: LossOptions) -> tuple[Tensor, Tensor]:
    """Return the kernels' fp32 ``(z, dz/dx)`` of ``x [n]``."""
    z, slope = (torch.full_like(x, float("nan"), dtype=torch.float32) for _ in range(2))
    grid = (triton.cdiv(x.numel(), BLOCK),)
    _transform_kernel[grid](x, z, slope, x.numel(), option_arguments(options), BLOCK=BLOCK)
    return z, slope


def count_of(labels: Tensor, ignore_index: int) -> int:
    """Return the number of labels that are not ``ignore_index``."""
    out = torch.full((1,), -1, dtype=torch.int32, device=labels.device)
    _count_kernel[(1,)](labels, out, labels.numel(), ignore_index)
    return int(out)


def row_parts(widths: int, begins: int, vector: int, device: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return ``first`` and ``width`` ``[widths, begins]``, and the edges' ``offset`` and ``inside``.

    The rows have 1 to ``widths`` columns and begin at 0 to ``begins``; ``widths * begins`` is a multiple of
    1024. The edges' tensors have one more dimension of 16 * vector.
    """
    first = torch.full((widths, begins), -1, dtype=torch.int64, device=device)
    offset = torch.full((widths, begins, 16 * vector), -1, dtype=torch.int64, device=device)
    inside = torch.full_like(offset, -1, dtype=torch.int32)
    width = torch.full_like(first, -1)
    rows = 1024 if device == "cpu" else 8  # large blocks are quick to interpret and slow to compile
    grid = (widths * begins // rows,)
    _row_parts_kernel[grid](first, width, offset, inside, BEGINS=begins, VECTOR=vector, ROWS=rows)
    return first, width, offset, inside
