"""Is a provider right? Its losses and gradients against PyTorch in fp64, before it is timed."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from bench_lib.cases import IGNORE_INDEX, Inputs, LinearCase

CHECKED_ROWS = 64
SUMS = 64 * 2.0**-23  # the error of sums in fp32
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
def errors_of(actual: tuple[Tensor, ...], right: list[Tensor], gradients: tuple[str, ...]) -> dict[str, float]:
    """Relative errors: of all losses as a whole, of each gradient the root mean square over its rows.

    Over rows, since a few rows of a weight's gradient, those of the labels, hold nearly all of its norm.
    """
    n_losses = len(right) - len(gradients)
    loss, right_loss = (torch.cat([t.reshape(-1).double() for t in ts[:n_losses]]) for ts in (actual, right))
    norm = torch.linalg.vector_norm
    errors = {"loss": float(norm(loss - right_loss) / norm(right_loss))}
    for name, grad, right_grad in zip(gradients, actual[n_losses:], right[n_losses:], strict=True):
        norms = norm(right_grad, dim=1)
        # A row that must be zero counts as one far smaller than the others.
        smallest = float(norms[norms > 0].median()) * 1e-3 if bool(norms.any()) else 1e-30
        relative = norm(grad - right_grad, dim=1) / norms.clamp(min=smallest)
        errors[name] = float(relative.square().mean().sqrt())
    return errors


def require(errors: dict[str, float], allowed: tuple[float, ...]) -> None:
    """Raise AssertionError if an error is larger than allowed, or NaN."""
    for (name, error), most in zip(errors.items(), allowed, strict=True):
        if not error <= most:
            raise AssertionError(f"{name}: relative error {error:.2g}, at most {most:.2g}")
