"""A loss over two tensors of one shape: logits, and what stands beside each logit. One plan, one autograd Function.

    logits, other [N, C] -- statistics --> [N, K] -- all_gather --> [R, N, K] --> loss [N]
                                                                    --> gradient over logits [N, C]

The gradient is that of the logits alone. ``launchers`` has ``statistics``, ``losses`` and ``gradient`` of one loss. A
loss may have something else in the place of labels: the columns of a teacher's tokens, or class weights. A loss that
needs normalised probabilities has a second step, ``mix``: ``mixture [R, N, 2]``, exchanged in the same way. With one
rank, ``statistics`` does all steps before the gradient.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vocab_parallel_ce import checks, reference
from vocab_parallel_ce.backward import begin, mark_written, run_backward, writes_in_place
from vocab_parallel_ce.collectives import all_gather_stats, group_position
from vocab_parallel_ce.cross_entropy import REFUSALS
from vocab_parallel_ce.layout import compute_dtype, overwritable, per_row, shares_storage, source_and_new, walkable
from vocab_parallel_ce.options import Settings
from vocab_parallel_ce.overwritten import check_not_overwritten
from vocab_parallel_ce.plan import Plan, checked_divisor, plan_of
from vocab_parallel_ce.spec import GradOutputs, is_ignored

GRADIENTS = ("auto", "in_backward", "out_of_place")


def launchers_of(plan: Plan, in_pytorch: str, in_triton: str) -> ModuleType:
    """Import and return the launchers of the plan's implementation, a module of this folder or of ``kernels``."""
    name = f"soft.{in_pytorch}" if plan.launchers is reference else f"kernels.{in_triton}"
    return importlib.import_module(f"vocab_parallel_ce.{name}")


class PairCall(NamedTuple):
    """One checked call."""

    plan: Plan
    launchers: Any
    options: Any  # of the mathematics: hashable, as the launchers take them
    n_statistics: int
    has_mixture: bool
    group: Any
    divisor: Tensor | None  # [1]


def plan_pair(logits: Tensor, other: Tensor, labels: Tensor | None, name: str, settings: Settings, group: Any) -> Plan:
    """Check what both losses need, and plan it; changes nothing. ``name`` is that of ``other``."""
    checks.check_choice("gradient", settings.gradient, GRADIENTS)
    checks.check_no_transforms(logits, other)
    if torch.is_grad_enabled() and other.requires_grad:
        raise TypeError(f"{name}: expected a tensor that requires no gradient, got one that does; pass its detach()")
    needs_gradient = torch.is_grad_enabled() and logits.requires_grad
    if other.is_inference() and needs_gradient:
        raise ValueError(f"{name}: expected no tensor made in torch.inference_mode(), got one; pass its clone()")
    if other.device != logits.device:
        raise ValueError(f"{name}: device must be that of the logits, {logits.device}, got {other.device}")
    if labels is not None:
        checks.check_labels(labels, logits)
        checks.check_rows(labels, logits)
    if settings.gradient == "in_backward" and needs_gradient and shares_storage(logits, other):
        raise ValueError(f"{name}: expected memory of its own, got the logits'; use gradient='out_of_place'")
    plan = plan_of(logits, settings, *group_position(group))
    check_not_overwritten(logits)
    check_beside(name, other)
    if settings.check_labels and labels is not None:
        checks.check_label_range(labels, plan.shard.vocab_size, plan.options.ignore_index)
    return plan


def check_beside(name: str, tensor: Tensor) -> None:
    """Check that no transform sees what stands beside the student, and that it holds no gradient."""
    checks.check_no_transforms(tensor)
    with checks.naming(logits=name):
        check_not_overwritten(tensor)


def divisor_of(
    logits: Tensor, labels: Tensor | None, settings: Settings, num_items: float | Tensor | None
) -> Tensor | None:
    """Return what losses are divided by: the rows of a mean that are not ignored, or the items of a sum."""
    if num_items is not None:
        return checked_divisor(num_items, settings.reduction, logits)
    if settings.reduction != "mean":
        return None
    if labels is None:
        return logits.new_full((1,), logits.shape[:-1].numel(), dtype=compute_dtype(logits.dtype))
    return (~is_ignored(labels, settings.ignore_index)).sum().reshape(1)


def run(call: PairCall, logits: Tensor, other: Tensor, labels: Tensor | None) -> Tensor:
    """Compute the loss, under autograd if ``logits`` need a gradient."""
    other = walkable(other.detach())
    if torch.is_grad_enabled() and logits.requires_grad:
        loss: Tensor = _PairLoss.apply(logits, other, labels, call)
        return loss
    with torch.no_grad():
        return forward(call, walkable(logits), other, labels)[0]


def forward(
    call: PairCall, logits: Tensor, other: Tensor, labels: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the loss, the ``[R, N, K]`` statistics of all ranks, and their mixture."""
    plan, launchers, own = call.plan, call.launchers, {"shard": call.plan.shard, "options": call.options}
    shape, mixture = logits.shape[:-1], None
    loss = logits.new_empty(shape, dtype=compute_dtype(logits.dtype))
    stats = logits.new_empty((plan.n_ranks, shape.numel(), call.n_statistics), dtype=loss.dtype)
    if call.has_mixture:
        mixture = logits.new_empty((plan.n_ranks, shape.numel(), 2), dtype=loss.dtype)
    if plan.n_ranks == 1:
        launchers.statistics(logits, other, labels, stats, mixture, 0, loss, call.divisor, **own)
    else:
        launchers.statistics(logits, other, labels, stats, None, plan.rank, None, None, **own)
        all_gather_stats(stats, plan.rank, call.group)
        if mixture is not None:
            launchers.mix(logits, other, labels, stats, mixture, plan.rank, **own)
            all_gather_stats(mixture, plan.rank, call.group)
        launchers.losses(stats, mixture, labels, call.divisor, loss, **own)
    return (loss if plan.reduction == "none" else loss.sum()), stats, mixture


class _PairLoss(torch.autograd.Function):
    """Saved: both tensors, labels, statistics, mixture and divisor."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, other: Tensor, labels: Tensor | None, call: PairCall) -> Tensor:
        begin(ctx, call)
        kept = logits if call.plan.gradient == "out_of_place" else overwritable(logits)
        loss, *statistics = forward(call, walkable(kept), other, labels)
        ctx.save_for_backward(kept, other, labels, *statistics, call.divisor)
        return loss

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor | None) -> tuple[Tensor | None, None, None, None]:
        return run_backward(_gradient, ctx, (grad_loss,), REFUSALS, ctx.call.group), None, None, None


def _gradient(ctx: Any, saved: tuple[Any, ...], grads: GradOutputs) -> Tensor:
    """Write the gradient over the logits, or into a new tensor."""
    call: PairCall = ctx.call
    ctx.handed_on = writes_in_place(call.plan.gradient, saved)
    kept, other, labels, stats, mixture, divisor = saved
    logits, version = kept.detach(), kept._version
    source, grad = (logits, logits) if ctx.handed_on else source_and_new(logits)
    own = {"shard": call.plan.shard, "options": call.options}
    grad_output = per_row(grads.loss, logits)
    call.launchers.gradient(source, other, labels, stats, mixture, divisor, grad_output, grad, **own)
    if grad is logits:
        mark_written(ctx, kept, logits, version)
    return grad
