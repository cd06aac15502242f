"""Products that are fp32: logits, and the gradient of a head's weight, summed over the chunks and rounded once."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def writes_fp32(factor: Tensor) -> bool:
    """Return whether a product of 16-bit factors on this device can be fp32."""
    return factor.is_cuda and torch.version.hip is None


def fp32_factor(factor: Tensor) -> Tensor:
    """Return the 16-bit ``factor`` as :func:`fp32_product` takes it: itself, or an fp32 copy."""
    return factor if writes_fp32(factor) else factor.float()


def fp32_product(a: Tensor, b: Tensor, out: Tensor) -> None:
    """Fill ``out``, fp32, with ``a @ b`` of 16-bit factors; ``b`` is an :func:`fp32_factor`."""
    if a.dtype == b.dtype:
        torch.mm(a, b, out_dtype=out.dtype, out=out)
    else:
        torch.mm(a.float(), b, out=out)


class WeightGradient:
    """Sum over ``n_chunks`` chunks of ``d_logits.T @ hidden``, ``[C, D]`` as ``weight``, at the end of ``dtype``.

    The chunks are added to ``main_grad`` fp32, if given. A single product that has the dtype needs no fp32 sum.
    """

    def __init__(self, weight: Tensor, *, dtype: torch.dtype, n_chunks: int, main_grad: Tensor | None = None) -> None:
        self.dtype, self.is_empty = dtype, main_grad is None
        if main_grad is None:
            is_product = n_chunks == 1 and dtype == weight.dtype
            main_grad = weight.new_empty(weight.shape, dtype=dtype if is_product else torch.float32)
        self.total = main_grad

    def add(self, d_logits: Tensor, hidden: Tensor) -> None:
        """Add the product of ``d_logits [n, C]`` and ``hidden [n, D]`` of one chunk, of one dtype."""
        total, d_logits = self.total, d_logits.t()
        if total.dtype != hidden.dtype and not writes_fp32(hidden):
            d_logits, hidden = d_logits.to(total.dtype), hidden.to(total.dtype)
        if total.dtype == hidden.dtype:
            if self.is_empty:
                torch.mm(d_logits, hidden, out=total)
            else:
                total.addmm_(d_logits, hidden)
        elif self.is_empty:
            torch.mm(d_logits, hidden, out_dtype=total.dtype, out=total)
        else:
            torch.addmm(total, d_logits, hidden, out_dtype=total.dtype, out=total)
        self.is_empty = False

    def rounded(self) -> Tensor:
        """Return the sum in the parameter's dtype; zeros if there was no chunk."""
        if self.is_empty:
            self.total.zero_()
        return self.total.to(self.dtype)


def zero_ignored(rows: Tensor, is_ignored: Tensor) -> Tensor:
    """Return a copy of ``rows [n, D]`` with zeros where ``is_ignored [n]``, whatever those rows hold."""
    # Eight bytes at a time: PyTorch fills single elements of 2 bytes at a fraction of the bandwidth.
    # One row is contiguous whatever its stride, which view looks at all the same.
    elements = rows.storage_offset(), rows.shape[1], rows.stride(0)
    whole = rows.is_contiguous() and math.gcd(rows.data_ptr(), *(n * rows.itemsize for n in elements), 8) == 8
    wide = rows.view(torch.int64) if whole else rows
    return wide.masked_fill(is_ignored.unsqueeze(1), 0).view(rows.dtype)
