"""The matrix products of a head: logits of hidden states, and the gradients of both factors.

    logits   = hidden @ weight.T + bias            [n, C]
    d hidden = d logits @ weight                   [n, D]
    d weight = sum over chunks of d logits.T @ hidden,  d bias = sum of d logits

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


def write_hidden_gradient(grad_logits: Tensor, weight: Tensor, out: Tensor) -> None:
    """Fill ``out [n, D]``, of any dtype, from ``grad_logits [n, C]`` and ``weight [C, D]``, of one dtype."""
    if out.dtype == weight.dtype:
        torch.mm(grad_logits, weight, out=out)
    else:
        out.copy_(torch.mm(grad_logits, weight))


def cleared(rows: Tensor, is_ignored: Tensor) -> Tensor:
    """A copy of ``rows [n, D]`` with zeros where ``is_ignored [n]``, whatever those rows hold."""
    # Eight bytes at a time: PyTorch fills by single elements, of 2 bytes at a fraction of the bandwidth.
    bytes_before = rows.data_ptr(), rows.storage_offset() * rows.itemsize, rows.shape[1] * rows.itemsize
    whole = rows.is_contiguous() and math.gcd(*bytes_before, 8) == 8
    wide = rows.view(torch.int64) if whole else rows
    return wide.masked_fill(is_ignored.unsqueeze(1), 0).view(rows.dtype)


class WeightGradient:
    """The gradient, of dtype ``dtype``, of a weight as ``weight [C, D]`` is, over ``n_chunks`` chunks.

    ``main_grad`` fp32, where given, is what the chunks are added to. A single chunk whose products have
    that dtype needs no fp32 sum: the product is rounded once as it is.
    """

    def __init__(
        self, weight: Tensor, *, dtype: torch.dtype, n_chunks: int, main_grad: Tensor | None = None
    ) -> None:
        self.dtype = dtype if main_grad is None else torch.float32
        self.is_empty = main_grad is None
        if main_grad is None:
            is_product = n_chunks == 1 and dtype == weight.dtype
            main_grad = weight.new_empty(weight.shape, dtype=dtype if is_product else torch.float32)
        self.total = main_grad

    def add(self, grad: Tensor, hidden: Tensor) -> None:
        """``grad [n, C]`` and ``hidden [n, D]`` of one chunk, of one dtype."""
        add_product(self.total, grad.t(), hidden, is_empty=self.is_empty)
        self.is_empty = False

    def rounded(self) -> Tensor:
        """The sum, in the parameter's dtype; zeros where there was no chunk."""
        if self.is_empty:
            self.total.zero_()
        return self.total.to(self.dtype)


def add_product(total: Tensor, a: Tensor, b: Tensor, *, is_empty: bool) -> None:
    """``total += a @ b`` in the dtype of ``total``; ``is_empty``: ``total`` holds nothing yet."""
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
    """Whether a product of 16-bit factors can be written as fp32; elsewhere the factors are made fp32."""
    return factor.is_cuda and torch.version.hip is None
