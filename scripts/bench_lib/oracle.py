"""Is a provider right? Its losses and gradients against PyTorch in fp64, before it is timed."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from bench_lib.cases import IGNORE_INDEX, Inputs, LinearCase

CHECKED_ROWS = 64
FP32_EPS = 2.0**-23
CHUNK_ELEMENTS = 2**27  # logits in fp64 that exist at a time: 1 GiB


def of_all_ranks(shard: Tensor, dim: int, group: Any) -> Tensor:
    """The ranks' shards side by side."""
    if group is None:
        return shard
    parts = [torch.empty_like(shard) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, shard.contiguous(), group=group)
    return torch.cat(parts, dim=dim)


def losses_fp64(logits: Tensor, labels: Tensor, options: dict[str, Any]) -> tuple[Tensor, ...]:
    """The outputs of this project's losses by PyTorch's own; token_log_probs if there is no ``reduction``."""
    z = logits * options.get("logit_scale", 1.0)
    if options.get("softcap"):
        z = options["softcap"] * torch.tanh(z / options["softcap"])
    if "reduction" not in options:
        log_p = functional.log_softmax(z / options.get("temperature", 1.0), -1)
        picked = log_p.gather(1, labels[:, None])[:, 0]
        return (picked, -(log_p.exp() * log_p).sum(-1)) if options.get("entropy") else (picked,)
    smoothing = options.get("label_smoothing", 0.0)
    if options.get("smoothing_formula") == "megatron":
        smoothing *= z.shape[1] / (z.shape[1] - 1)
    losses = functional.cross_entropy(z, labels, label_smoothing=smoothing, reduction="none")
    losses = losses + options.get("z_loss", 0.0) * torch.logsumexp(z, -1).square()
    if options["reduction"] == "none":
        return (losses,)
    items = len(labels) if options["reduction"] == "mean" else options.get("num_items", 1)
    return (losses.sum() / items,)


def expected_logits(shard: Tensor, labels: Tensor, options: dict[str, Any], group: Any) -> list[Tensor]:
    """Losses, then this rank's part of the gradient of their sums. Collectives: one all_gather."""
    source = of_all_ranks(shard.detach(), 1, group).double().requires_grad_()
    losses = losses_fp64(source, labels, options)
    (grad,) = torch.autograd.grad([loss.sum() for loss in losses], source)
    first = 0 if group is None else dist.get_rank(group) * shard.shape[1]
    return [*(loss.detach() for loss in losses), grad[:, first : first + shard.shape[1]]]


def check_logits(actual: tuple[Tensor, ...], right: list[Tensor], is_ours: bool) -> float:
    """The largest error: of a loss relative if it is above 1, of the gradient over its largest element.

    This project may round each element of the gradient once: most are far below any absolute tolerance.
    Others may round the loss to bf16 and the gradient several times; a wrong formula is far outside that.

    Raises:
        AssertionError: ``loss: ...`` or ``gradient: ...`` is wrong.
    """
    *losses, grad = actual
    *right_losses, right_grad = right
    loss_tolerance = 1e-5 if is_ours else 1e-2
    for loss, right_loss in zip(losses, right_losses, strict=True):
        _assert_close("loss", loss, right_loss, loss_tolerance, loss_tolerance)
    largest = float(right_grad.abs().max())
    smallest = torch.finfo(grad.dtype).smallest_normal
    rtol = torch.finfo(grad.dtype).eps + 64 * FP32_EPS if is_ours else 2e-2
    _assert_close("gradient", grad, right_grad, rtol, smallest if is_ours else max(1e-5 * largest, smallest))
    error = float((grad.double() - right_grad).abs().max()) / largest
    for loss, right_loss in zip(losses, right_losses, strict=True):
        relative = (loss.double() - right_loss).abs() / right_loss.abs().clamp(min=1)
        error = max(error, float(relative.max()))
    return error


def _assert_close(what: str, actual: Tensor, right: Tensor, rtol: float, atol: float) -> None:
    def message(text: str) -> str:
        return f"{what}: {' '.join(text.split())}"

    torch.testing.assert_close(actual.detach().double(), right, rtol=rtol, atol=atol, msg=message)


def expected_linear(case: LinearCase, inputs: Inputs, group: Any) -> list[Tensor]:
    """Loss and gradients of hidden and weight, chunk by chunk; each rank computes with the whole weight."""
    hidden, shard = (tensor.detach() for tensor in inputs.tensors)
    weight = of_all_ranks(shard, 0, group).double().requires_grad_()
    valid = inputs.labels != IGNORE_INDEX
    assert inputs.upstreams is not None
    upstream = inputs.upstreams[torch.float32].double().expand(case.tokens)
    if case.reduction == "mean":
        upstream = upstream / valid.sum()
    losses, d_hidden, d_weight = [], [], torch.zeros_like(weight)
    chunk = max(1, CHUNK_ELEMENTS // case.vocabulary)
    for start in range(0, case.tokens, chunk):
        rows = slice(start, start + chunk)
        part = hidden[rows].double().requires_grad_()
        loss = functional.cross_entropy(part @ weight.T, inputs.labels[rows], reduction="none")
        of_hidden, of_weight = torch.autograd.grad(loss, (part, weight), upstream[rows])
        losses.append(loss.detach())
        d_hidden.append(of_hidden)
        d_weight += of_weight
    loss = torch.cat(losses)
    first = 0 if group is None else dist.get_rank(group) * case.columns
    total = loss.sum() / valid.sum() if case.reduction == "mean" else loss
    return [total, torch.cat(d_hidden), d_weight[first : first + case.columns].clone()]


@torch.no_grad()
def check_linear(actual: tuple[Tensor, ...], right: list[Tensor], is_ours: bool) -> dict[str, float]:
    """Relative errors: of the loss as a whole, of each gradient the root mean square over its rows.

    Over rows, since a few rows of the weight's gradient, those of the labels, hold nearly all of its norm.

    Raises:
        AssertionError: one of them is too large, or NaN.
    """
    of_loss = torch.linalg.vector_norm(actual[0] - right[0]) / torch.linalg.vector_norm(right[0])
    errors = {"loss": float(of_loss)}
    errors |= {name: _over_rows(actual[i], right[i]) for i, name in ((1, "d_hidden"), (2, "d_weight"))}
    eps = torch.finfo(actual[1].dtype).eps
    # This project: less than one rounding. Others may keep log-probabilities and sums in the dtype.
    allowed = (eps / 16, eps, eps) if is_ours else (0.05, 0.05, 0.1)
    for (name, error), most in zip(errors.items(), allowed, strict=True):
        limit = most + 64 * FP32_EPS
        assert error <= limit, f"{name}: relative error {error:.2g}, at most {limit:.2g}"
    return errors


def _over_rows(actual: Tensor, right: Tensor) -> float:
    """A row that must be zero counts as one far smaller than the others."""
    norms = torch.linalg.vector_norm(right, dim=1)
    others = norms[norms > 0]
    smallest = 1e-3 * others.median() if others.numel() else torch.finfo(norms.dtype).tiny
    relative = torch.linalg.vector_norm(actual - right, dim=1) / norms.clamp(min=float(smallest))
    return float(relative.square().mean().sqrt())
