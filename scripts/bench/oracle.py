"""Is a provider's answer right? Its first rows against PyTorch's in fp64, before anything is timed."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from bench.cases import Case
from bench.logits import as_produced
from bench.providers import Provider

CHECKED_ROWS = 64
FP32_EPS = 2.0**-23


class Expected(NamedTuple):
    """What the first rows of a shard must come to, in fp64."""

    shard: Tensor  # [CHECKED_ROWS, C] logits
    labels: Tensor
    loss: Tensor
    grad: Tensor  # [CHECKED_ROWS, C]


class Tolerance(NamedTuple):
    """``grad_atol`` is relative to the largest element of the expected gradient."""

    loss_rtol: float
    loss_atol: float
    grad_rtol: float
    grad_atol: float


# Others may round the loss to bf16 and the gradient several times; a wrong formula is far outside.
GENEROUS = Tolerance(1e-2, 1e-2, 2e-2, 1e-5)


def strict_tolerance(dtype: torch.dtype) -> Tolerance:
    """This project's: one rounding of the gradient, relative to each element.

    Most probabilities are far below any absolute tolerance.
    """
    return Tolerance(1e-5, 1e-5, torch.finfo(dtype).eps + 64 * FP32_EPS, 0.0)


def expected(case: Case, logits: Tensor, labels: Tensor, reduction: str) -> Expected:
    """Collectives: one all_gather of the first rows of every shard, where there are several ranks."""
    shard, labels = logits[:CHECKED_ROWS].detach().clone(), labels[:CHECKED_ROWS].clone()
    whole, first = shard, 0
    if case.ranks > 1:
        parts = [torch.empty_like(shard) for _ in range(case.ranks)]
        dist.all_gather(parts, shard, group=case.group)
        whole, first = torch.cat(parts, dim=1), case.rank * case.columns
    source = whole.double().requires_grad_()
    loss = torch.nn.functional.cross_entropy(source, labels, reduction=reduction)
    (grad,) = torch.autograd.grad(loss.sum(), source)
    return Expected(shard, labels, loss.detach(), grad[:, first : first + case.columns])


def max_error(loss: Tensor, grad: Tensor, right: Expected) -> float:
    """The greater of the loss's error, relative where it is above 1, and the gradient's over its largest."""
    of_loss = (loss.double() - right.loss).abs() / right.loss.abs().clamp(min=1)
    of_grad = (grad.double() - right.grad).abs().max() / right.grad.abs().max()
    return float(torch.maximum(of_loss.max(), of_grad))


def check(provider: Provider, case: Case, right: Expected, reduction: str) -> float:
    """The :func:`max_error` of one call of ``provider``.

    Raises:
        AssertionError: the error is outside the provider's tolerance.
    """
    logits = as_produced(right.shard.clone())
    loss, grad = provider.call(logits, right.labels, reduction, case.group)
    tolerance = strict_tolerance(case.dtype) if provider.is_ours else GENEROUS
    torch.testing.assert_close(
        loss.detach().double(),
        right.loss,
        rtol=tolerance.loss_rtol,
        atol=tolerance.loss_atol,
        msg=_of("loss"),
    )
    atol = max(float(right.grad.abs().max()) * tolerance.grad_atol, torch.finfo(case.dtype).smallest_normal)
    torch.testing.assert_close(
        grad.double(), right.grad, rtol=tolerance.grad_rtol, atol=atol, msg=_of("gradient")
    )
    return max_error(loss.detach(), grad, right)


def _of(what: str) -> Callable[[str], str]:
    return lambda message: f"{what}: {' '.join(message.split())}"
