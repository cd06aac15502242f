"""The loss over the whole vocabulary on one rank: in fp64, and as PyTorch computes it in the test's dtype.

Both are ``torch.nn.functional.cross_entropy`` and autograd, with this package's semantics where it
differs on purpose: gradient 0 at ``-inf`` columns and in ignored rows, NaN for a label outside the
vocabulary (PyTorch refuses it), loss 0 when every row is ignored (PyTorch divides by 0).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

NAN = float("nan")
NEG_INF = float("-inf")


class LossAndGradient(NamedTuple):
    """A loss and the gradient of ``(loss * upstream).sum()`` by the logits."""

    loss: Tensor
    grad: Tensor


def cross_entropy_fp64(
    logits: Tensor,
    labels: Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
    upstream: Tensor | None = None,
) -> LossAndGradient:
    """fp64 loss and gradient for ``logits [..., V]`` of any dtype.

    Args:
        upstream: gradient of the loss, of the loss's shape; None is ones.
    """
    return _cross_entropy(logits.double(), labels, ignore_index, label_smoothing, reduction, upstream)


def cross_entropy_same_dtype(
    logits: Tensor,
    labels: Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
    upstream: Tensor | None = None,
) -> LossAndGradient:
    """What PyTorch gets in fp32 arithmetic: loss in fp32, gradient rounded once to the logits' dtype."""
    loss, grad = _cross_entropy(logits.float(), labels, ignore_index, label_smoothing, reduction, upstream)
    return LossAndGradient(loss, grad.to(logits.dtype))


def _cross_entropy(
    x: Tensor,
    labels: Tensor,
    ignore_index: int,
    label_smoothing: float,
    reduction: str,
    upstream: Tensor | None,
) -> LossAndGradient:
    rows = x.detach().reshape(-1, x.shape[-1]).clone().requires_grad_()
    targets = labels.reshape(-1).long()
    ignored = targets == ignore_index
    outside = ((targets < 0) | (targets >= x.shape[-1])) & ~ignored
    losses = F.cross_entropy(
        rows,
        targets.masked_fill(outside, 0),
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        reduction="none",
    )
    losses = losses.masked_fill(outside, NAN)
    if reduction == "none":
        loss = losses.reshape(labels.shape)
    else:
        loss = losses.sum()
        if reduction == "mean":
            loss = loss / (~ignored).sum().clamp(min=1)
    upstream = torch.ones_like(loss) if upstream is None else upstream.to(loss)
    (grad,) = torch.autograd.grad(loss, rows, upstream)
    excluded = (rows == NEG_INF) & (rows.amax(dim=-1, keepdim=True) != NEG_INF)
    grad = grad.masked_fill(excluded, 0.0)
    grad = grad.masked_fill(outside.unsqueeze(-1), NAN)
    grad = grad.masked_fill(ignored.unsqueeze(-1), 0.0)
    return LossAndGradient(loss.detach(), grad.reshape(x.shape))
