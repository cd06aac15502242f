"""What a call must return, over the whole vocabulary on one rank: in fp64, and as PyTorch gets it in fp32.

Plain formulas over ``torch.log_softmax`` and ``torch.logsumexp``, and autograd, with this package's
semantics where they differ on purpose from ``torch.nn.functional.cross_entropy``'s: gradient 0 at
``-inf`` columns and in ignored rows, NaN for a label outside the vocabulary (PyTorch refuses it), loss 0
where there is nothing to divide by. Logits have no padded columns here.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

NAN = float("nan")
NEG_INF = float("-inf")


class LossAndGradient(NamedTuple):
    """A loss and the gradient of ``(loss * grad_output).sum()`` by the logits."""

    loss: Tensor
    grad: Tensor


class Metrics(NamedTuple):
    """What a loss is returned with."""

    predictions: Tensor  # int64, -1 in rows that are ignored or hold no number
    token_accuracy: Tensor
    lse: Tensor
    z_loss: Tensor


class TokenOutputs(NamedTuple):
    """Log-probabilities and entropies, and the gradient of ``(each * its grad_output).sum()``."""

    log_probs: Tensor
    entropy: Tensor
    grad: Tensor


def cross_entropy_fp64(logits: Tensor, labels: Tensor, **options: Any) -> LossAndGradient:
    """fp64 loss and gradient for ``logits [..., V]`` of any dtype; options as of :func:`_cross_entropy`."""
    return _cross_entropy(logits.double(), labels, **options)


def cross_entropy_same_dtype(logits: Tensor, labels: Tensor, **options: Any) -> LossAndGradient:
    """What PyTorch gets in fp32 arithmetic: loss in fp32, gradient rounded once to the logits' dtype."""
    loss, grad = _cross_entropy(logits.float(), labels, **options)
    return LossAndGradient(loss, grad.to(logits.dtype))


def metrics_fp64(logits: Tensor, labels: Tensor, **options: Any) -> Metrics:
    """fp64 metrics of the loss with the same options."""
    return _metrics(logits.double(), labels, **options)


def metrics_same_dtype(logits: Tensor, labels: Tensor, **options: Any) -> Metrics:
    """The metrics that PyTorch gets in fp32 arithmetic."""
    return _metrics(logits.float(), labels, **options)


def token_outputs_fp64(logits: Tensor, labels: Tensor, **options: Any) -> TokenOutputs:
    """fp64 log-probabilities, entropies and gradient; options as of :func:`_token_outputs`."""
    return _token_outputs(logits.double(), labels, **options)


def token_outputs_same_dtype(logits: Tensor, labels: Tensor, **options: Any) -> TokenOutputs:
    """What PyTorch gets in fp32 arithmetic, the gradient rounded once to the logits' dtype."""
    log_probs, entropy, grad = _token_outputs(logits.float(), labels, **options)
    return TokenOutputs(log_probs, entropy, grad.to(logits.dtype))


class _Rows:
    """Rows of logits as a leaf, which of them count, and their transformed logits."""

    def __init__(
        self, x: Tensor, labels: Tensor, ignore_index: int, softcap: float | None, logit_scale: float
    ) -> None:
        self.shape = x.shape
        self.x = x.detach().reshape(-1, x.shape[-1]).clone().requires_grad_()
        targets = labels.reshape(-1).long()
        self.ignored = targets == ignore_index
        self.outside = ((targets < 0) | (targets >= x.shape[-1])) & ~self.ignored
        self.targets = targets.masked_fill(self.ignored | self.outside, 0).unsqueeze(1)
        u = self.x * logit_scale
        self.z = u if softcap is None else torch.where(u.isinf(), u, softcap * torch.tanh(u / softcap))

    def at_the_edges(self, values: Tensor) -> Tensor:
        return values.masked_fill(self.outside, NAN).masked_fill(self.ignored, 0.0)

    def gradient(self, outputs: list[Tensor], upstreams: list[Tensor]) -> Tensor:
        (grad,) = torch.autograd.grad(outputs, self.x, upstreams)
        excluded = (self.x == NEG_INF) & (self.x.amax(dim=-1, keepdim=True) != NEG_INF)
        grad = grad.masked_fill(excluded, 0.0)
        grad = grad.masked_fill(self.outside.unsqueeze(-1), NAN)
        return grad.masked_fill(self.ignored.unsqueeze(-1), 0.0).reshape(self.shape)


def _cross_entropy(
    x: Tensor,
    labels: Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    smoothing_formula: str = "torch",
    z_loss: float = 0.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    reduction: str = "mean",
    num_items: int | float | Tensor | None = None,
    grad_output: Tensor | None = None,
) -> LossAndGradient:
    """Loss and gradient in the dtype of ``x [..., V]``.

    Args:
        num_items: divides a sum; with 0 no row counts, whatever it holds.
        grad_output: gradient of the loss, of the loss's shape; None is ones.
    """
    rows = _Rows(x, labels, ignore_index, softcap, logit_scale)
    if num_items is not None and float(num_items) == 0:
        rows.ignored.fill_(True)
    vocab_size = x.shape[-1]
    e = label_smoothing * (vocab_size / (vocab_size - 1) if smoothing_formula == "megatron" else 1.0)
    log_p = rows.z.log_softmax(dim=-1)
    losses = -log_p.gather(1, rows.targets).squeeze(1)
    if e:
        losses = (1 - e) * losses - e * log_p.mean(dim=-1)
    if z_loss:
        losses = losses + z_loss * rows.z.logsumexp(dim=-1) ** 2
    losses = rows.at_the_edges(losses)
    loss = _reduced(losses.reshape(labels.shape), reduction, num_items, ~rows.ignored)
    grad_output = torch.ones_like(loss) if grad_output is None else grad_output.to(loss)
    return LossAndGradient(loss.detach(), rows.gradient([loss], [grad_output]))


@torch.no_grad()
def _metrics(
    x: Tensor,
    labels: Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    smoothing_formula: str = "torch",
    z_loss: float = 0.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    reduction: str = "mean",
    num_items: int | float | Tensor | None = None,
) -> Metrics:
    rows = _Rows(x, labels, ignore_index, softcap, logit_scale)
    lse = rows.z.logsumexp(dim=-1).masked_fill(rows.ignored, 0.0)
    # Of equal values the first: the capped ones may be equal where the logits are not, so they decide.
    known = rows.z.amax(dim=-1).isfinite() & ~rows.ignored
    predictions = rows.z.argmax(dim=-1).masked_fill(~known, -1)
    correct = (predictions == labels.reshape(-1)) & known
    return Metrics(
        predictions.reshape(labels.shape),
        correct.sum().to(x) / (~rows.ignored).sum().clamp(min=1),
        lse.reshape(labels.shape),
        _reduced((z_loss * lse**2).reshape(labels.shape), reduction, num_items, ~rows.ignored),
    )


def _token_outputs(
    x: Tensor,
    labels: Tensor,
    *,
    temperature: float = 1.0,
    ignore_index: int = -100,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    grad_output: Tensor | None = None,
    grad_entropy: Tensor | None = None,
) -> TokenOutputs:
    """Outputs and gradient in the dtype of ``x [..., V]``; an grad_output of None: not used."""
    rows = _Rows(x, labels, ignore_index, softcap, logit_scale)
    log_p = (rows.z / temperature).log_softmax(dim=-1)
    log_probs = rows.at_the_edges(log_p.gather(1, rows.targets).squeeze(1)).reshape(labels.shape)
    finite_log_p = log_p.masked_fill(log_p == NEG_INF, 0.0)
    entropy = rows.at_the_edges(-(log_p.exp() * finite_log_p).sum(dim=-1)).reshape(labels.shape)
    upstreams = [
        torch.zeros_like(log_probs) if given is None else given.to(log_probs)
        for given in (grad_output, grad_entropy)
    ]
    grad = rows.gradient([log_probs, entropy], upstreams)
    return TokenOutputs(log_probs.detach(), entropy.detach(), grad)


def _reduced(
    losses: Tensor, reduction: str, num_items: int | float | Tensor | None, counted: Tensor
) -> Tensor:
    if reduction == "none":
        return losses
    divisor = float(counted.sum() if reduction == "mean" else 1 if num_items is None else num_items)
    return losses.sum() / divisor if divisor else (losses * 0).nan_to_num().sum()
