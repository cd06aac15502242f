"""What a call must return, over the whole vocabulary on one rank: in fp64, and as PyTorch gets it in fp32.

:func:`values` states the mathematics once, over ``torch.log_softmax`` and ``torch.logsumexp``; gradients are
autograd's. Where this package differs on purpose from ``torch.nn.functional.cross_entropy`` it does too:
gradient 0 at ``-inf`` columns and in ignored rows, NaN for a label outside the vocabulary (PyTorch refuses
it), loss 0 if there is nothing to divide by. Logits have no padded columns here.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

NAN = float("nan")
NEG_INF = float("-inf")


class Values(NamedTuple):
    """Everything that a call can return; those before sum_sq_probs are differentiable there."""

    loss: Tensor  # of the labels' shape, or () if reduced
    log_probs: Tensor  # the rest: of the labels' shape
    entropy: Tensor
    lse: Tensor  # after the temperature
    sum_sq_probs: Tensor
    mean_logit: Tensor
    predictions: Tensor  # int64, -1 in rows that are ignored or hold no number


class LossAndGradient(NamedTuple):
    """A loss and the gradient of ``(loss * grad_output).sum()`` by the logits."""

    loss: Tensor
    grad: Tensor


def transformed(x: Tensor, logit_scale: float = 1.0, softcap: float | None = None) -> Tensor:
    """Logits after their scale and their cap."""
    u = x * logit_scale
    return u if softcap is None else torch.where(u.isinf(), u, softcap * torch.tanh(u / softcap))


def values(
    logits: Tensor,
    labels: Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    reduction: str = "mean",
    num_items: int | float | Tensor | None = None,
    temperature: float | Tensor = 1.0,
    class_weight: Tensor | None = None,
) -> Values:
    """Differentiable outputs for ``logits [..., V]``, in their dtype.

    With 0 ``num_items``, which divides the sum, no row counts in the loss, whatever it holds.
    """
    vocab_size = logits.shape[-1]
    x, targets = logits.reshape(-1, vocab_size), labels.reshape(-1).long()
    ignored = targets == ignore_index
    is_empty = num_items is not None and float(num_items) == 0
    left_out = torch.ones_like(ignored) if is_empty else ignored
    outside = ((targets < 0) | (targets >= vocab_size)) & ~ignored
    any_target = targets.masked_fill(ignored | outside, 0).unsqueeze(1)
    temperature = temperature.to(x).reshape(-1, 1) if isinstance(temperature, Tensor) else temperature

    def per_token(value: Tensor, filled: Tensor) -> Tensor:
        one_or_nan = torch.ones_like(value).masked_fill(outside & ~filled, NAN)
        return (value * one_or_nan).masked_fill(filled, 0.0).reshape(labels.shape)

    z = transformed(_clean(x, left_out), logit_scale, softcap)
    log_p = (z / temperature).log_softmax(dim=-1)
    e = label_smoothing
    w = torch.ones(vocab_size).to(x) if class_weight is None else class_weight.to(x)
    w_target = w[any_target.squeeze(1)].masked_fill(ignored, 0.0)
    of_labels = -_times(w_target, log_p.gather(1, any_target).squeeze(1))
    squared_lse = z.logsumexp(dim=-1).masked_fill(left_out, 0.0) ** 2
    of_z = w_target * z_loss * squared_lse if z_loss else torch.zeros_like(w_target)
    losses = (1 - e) * of_labels - (e * _times(w, log_p).mean(dim=-1) if e else 0.0) + of_z

    # What num_items divides is the loss alone.
    z = transformed(_clean(x, ignored), logit_scale, softcap)
    known = z.amax(dim=-1).isfinite() & ~ignored
    predictions = z.detach().argmax(dim=-1).masked_fill(~known, -1)  # of equal values the first
    z = z / temperature
    log_p = z.log_softmax(dim=-1)
    of_tokens = (
        log_p.gather(1, any_target).squeeze(1),
        -(log_p.exp() * log_p.masked_fill(log_p == NEG_INF, 0.0)).sum(dim=-1),
        z.logsumexp(dim=-1),
        log_p.exp().square().sum(dim=-1),
        z.mean(dim=-1),
    )
    of_reduction = reduction, num_items, w_target
    return Values(
        _reduced(per_token(losses, left_out), *of_reduction),
        *(per_token(value, ignored) for value in of_tokens),
        predictions.reshape(labels.shape),
    )


def _clean(x: Tensor, filled: Tensor) -> Tensor:
    """A filled element has no gradient: neither rows left out, nor -inf columns beside others, get one."""
    x = x.masked_fill(filled.unsqueeze(1), 0.0)
    return x.masked_fill((x == NEG_INF) & (x.amax(dim=-1, keepdim=True) != NEG_INF), NEG_INF)


def _times(weight: Tensor, log_p: Tensor) -> Tensor:
    """A class of weight 0 counts nowhere, also if its log-probability is -inf."""
    return weight * log_p.masked_fill((weight == 0) & log_p.isinf(), 0.0)


def of_loss(found: Values) -> tuple[Tensor, ...]:
    return (found.loss,)


def of_log_probs(found: Values) -> tuple[Tensor, ...]:
    return found.log_probs, found.entropy


def of_every_output(found: Values) -> tuple[Tensor, ...]:
    """log_probs, entropy, lse, ``1 + sum_sq_probs`` and ``[..., 2]`` lse and mean_logit.

    The terms of sum_sq_probs are rounded next to 1, those of the mean next to the lse.
    """
    both = torch.stack([found.lse, found.mean_logit], dim=-1)
    return found.log_probs, found.entropy, found.lse, 1 + found.sum_sq_probs, both


def of_loss_and_every_output(found: Values) -> tuple[Tensor, ...]:
    """Those of :func:`of_every_output`, with the loss in the place of log_probs."""
    return found.loss, *of_every_output(found)[1:]


def at_least_fp32(logits: Tensor) -> Tensor:
    """For fp32 arithmetic, of fp64 logits fp64; 16 bits are not rounded to, because the budget adds that."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def with_gradient(
    of: Callable[[Values], tuple[Tensor, ...]], x: Tensor, labels: Tensor, *grad_outputs: Tensor | None, **options: Any
) -> tuple[Tensor, ...]:
    """The outputs ``of`` the values, and the gradient of ``x``, in its dtype; options as of :func:`values`.

    ``grad_outputs`` are of these outputs; without any, that of the first is 1, and an output with None is not used.
    """
    leaf = x.detach().clone().requires_grad_()
    outputs = of(values(leaf, labels, **options))
    given = zip(outputs, grad_outputs or (torch.ones(()),), strict=False)
    used = [(output, grad.to(output).expand_as(output)) for output, grad in given if grad is not None]
    (grad,) = torch.autograd.grad([output for output, _ in used], leaf, [grad for _, grad in used])
    return *(output.detach() for output in outputs), grad


def cross_entropy_fp64(
    logits: Tensor, labels: Tensor, *, grad_output: Tensor | None = None, **options: Any
) -> LossAndGradient:
    """fp64 loss and gradient for ``logits [..., V]`` of any dtype; a ``grad_output`` of None is ones."""
    return cross_entropy_same_dtype(logits.double(), labels, grad_output=grad_output, **options)


def cross_entropy_same_dtype(
    logits: Tensor, labels: Tensor, *, grad_output: Tensor | None = None, **options: Any
) -> LossAndGradient:
    """What PyTorch gets in fp32 arithmetic."""
    grad_outputs = () if grad_output is None else (grad_output,)
    return LossAndGradient(*with_gradient(of_loss, at_least_fp32(logits), labels, *grad_outputs, **options))


def predictions_fp64(logits: Tensor, labels: Tensor, **options: Any) -> Tensor:
    return values(logits.detach().double(), labels, **options).predictions


def _reduced(losses: Tensor, reduction: str, num_items: int | float | Tensor | None, counted: Tensor) -> Tensor:
    if reduction == "none":
        return losses
    if num_items is None:
        num_items = counted.sum() if reduction == "mean" else 1
    divisor = float(num_items)
    return losses.sum() / divisor if divisor else (losses * 0).nan_to_num().sum()
