"""A kernel that tells the body and the edges of many rows. Import it inside a test only."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from vocab_parallel_ce.kernels.primitives import edge_offsets, row_body


@triton.jit
def _row_parts_kernel(first, width, offset, inside, VECTOR: tl.constexpr, BEGINS: tl.constexpr):
    """Rows of ``program_id + 1`` columns at each of BEGINS beginnings."""
    n_columns = tl.program_id(0) + 1
    begin = tl.arange(0, BEGINS).to(tl.int64)[:, None]
    body_first, body_width = row_body(begin, n_columns, VECTOR)
    edge, is_inside = edge_offsets(begin, n_columns, body_first, body_width, VECTOR)
    rows = tl.program_id(0) * BEGINS + tl.arange(0, BEGINS)[:, None]
    lanes = rows * (16 * VECTOR) + tl.arange(0, 16 * VECTOR)[None, :]
    tl.store(first + rows, body_first)
    tl.store(width + rows, body_width)
    tl.store(offset + lanes, edge)
    tl.store(inside + lanes, is_inside.to(tl.int32))


def row_parts(widths: int, begins: int, vector: int, device: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``first`` and ``width`` ``[widths, begins]``, edges' ``offset`` and ``inside`` ``[.., 16 * vector]``.

    Of rows of 1 to ``widths`` columns that begin at 0 to ``begins``, a power of two.
    """
    first = torch.full((widths, begins), -1, dtype=torch.int64, device=device)
    offset = torch.full((widths, begins, 16 * vector), -1, dtype=torch.int64, device=device)
    inside = torch.full_like(offset, -1, dtype=torch.int32)
    width = torch.full_like(first, -1)
    _row_parts_kernel[(widths,)](first, width, offset, inside, VECTOR=vector, BEGINS=begins)
    return first, width, offset, inside
