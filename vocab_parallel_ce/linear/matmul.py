"""The matrix products of a head: logits of hidden states, and the gradients of both factors.

    logits   = hidden @ weight.T + bias            [n, C]
    d_hidden = d_logits @ weight                   [n, D]
    d_weight = sum over chunks of d_logits.T @ hidden,  d_bias = sum of d_logits

The sums are accumulated in fp32 and rounded once.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def write_logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """Fill ``out [n, C]`` from ``hidden [n, D]``, ``weight [C, D]`` and ``bias [C]``, all of one dtype."""
    if bias is None:
        torch.mm(hidden, weight.t(), out=out)
    else:
        torch.addmm(bias, hidden, weight.t(), out=out)


def write_d_hidden(d_logits: Tensor, weight: Tensor, out: Tensor) -> None:
    """Fill ``out [n, D]``, of any dtype, from ``d_logits [n, C]`` and ``weight [C, D]``, of one dtype."""
    if out.dtype == weight.dtype:
        torch.mm(d_logits, weight, out=out)
    else:
        out.copy_(torch.mm(d_logits, weight))


def zero_ignored(rows: Tensor, is_ignored: Tensor) -> Tensor:
    """Return a copy of ``rows [n, D]`` with zeros where ``is_ignored [n]``, whatever those rows hold."""
    # Eight bytes at a time: PyTorch fills single elements of 2 bytes at a fraction of the bandwidth.
    offsets = rows.data_ptr(), rows.storage_offset() * rows.itemsize, rows.shape[1] * rows.itemsize
    whole = rows.is_contiguous() and math.gcd(*offsets, 8) == 8
    wide = rows.view(torch.int64) if whole else rows
    return wide.masked_fill(is_ignored.unsqueeze(1), 0).view(rows.dtype)


class WeightGradient:
    """Sum over ``n_chunks`` chunks of the gradient of ``weight [C, D]``, at the end of dtype ``dtype``.

    The chunks are added to ``main_grad`` fp32, if given. A single chunk whose products have the dtype needs
    no fp32 sum: the product is rounded once as it is.
    """

    def __init__(self, weight: Tensor, *, dtype: torch.dtype, n_chunks: int, main_grad: Tensor | None = None) -> None:
        self.dtype = dtype if main_grad is None else torch.float32
        self.is_empty = main_grad is None
        if main_grad is None:
            is_product = n_chunks == 1 and dtype == weight.dtype
            main_grad = weight.new_empty(weight.shape, dtype=dtype if is_product else torch.float32)
        self.total = main_grad

    def add(self, d_logits: Tensor, hidden: Tensor) -> None:
        """Add the product of ``d_logits [n, C]`` and ``hidden [n, D]`` of one chunk, of one dtype."""
        add_product(self.total, d_logits.t(), hidden, is_empty=self.is_empty)
        self.is_empty = False

    def rounded(self) -> Tensor:
        """Return the sum in the parameter's dtype; zeros if there was no chunk."""
        if self.is_empty:
            self.total.zero_()
        return self.total.to(self.dtype)


def add_product(total: Tensor, a: Tensor, b: Tensor, *, is_empty: bool) -> None:
    """Do ``total += a @ b`` in the dtype of ``total``; if ``is_empty``, ``total`` holds nothing yet."""
    if a.dtype != total.dtype and not _sums_in_fp32(a):
        a, b = a.to(total.dtype), b.to(total.dtype)
    if a.dtype == total.dtype:
        if is_empty:
            torch.mm(a, b, out=total)
        else:
            total.addmm_(a, b)
    elif is_empty:
        torch.mm(a, b, out_dtype=total.dtype, out=total)
    else:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)


def _sums_in_fp32(factor: Tensor) -> bool:
    """Whether a product of 16-bit factors can be written as fp32; otherwise the factors are made fp32."""
    return factor.is_cuda and torch.version.hip is None
