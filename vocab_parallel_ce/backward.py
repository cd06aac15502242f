"""What the backward of every loss does before its gradient: it refuses, and the ranks compare."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from vocab_parallel_ce import checks, verify
from vocab_parallel_ce.overwritten import current_age, mark_overwritten
from vocab_parallel_ce.sole_owner import is_sole_owner, measure
from vocab_parallel_ce.spec import GradOutputs

Found = TypeVar("Found")
N_GRADS = len(GradOutputs._fields)  # the outputs after these have no gradient

_in_transform = torch._C._are_functorch_transforms_active
_is_batch = torch._C._functorch.is_legacy_batchedtensor  # as is_grads_batched makes them


class Refusals(NamedTuple):
    """Errors of a kind of loss."""

    second: str  # a second backward, after one that handed its memory on
    overwritten: str | None = None  # what is saved was overwritten; None: PyTorch's own error


def run_backward(
    gradient: Callable[[Any, tuple[Any, ...], GradOutputs], Found],
    ctx: Any,
    grads: tuple[Tensor | None, ...],
    refusals: Refusals,
    group: Any,
    device: torch.device | None = None,
) -> Found | None:
    """Return ``gradient(ctx, saved tensors, grads)``; None if no output was used: then only verification reads more.

    It runs eagerly, under compiled autograd too, since it may overwrite. Under verification the ranks of ``group``
    compare ``grads`` first, by all_gathers from ``device``, by default that of ``grads``.

    Raises:
        RuntimeError: in a recorded backward or a transform, even if no output was used, and as ``refusals`` says.
    """
    if torch.compiler.is_dynamo_compiling():
        return torch.compiler.disable(run_backward)(gradient, ctx, grads, refusals, group, device)
    if not verify.is_on:
        return _run(gradient, ctx, grads, refusals)
    device = device or next((grad.device for grad in grads if grad is not None), None)
    with verify.open_call(group, device, is_backward=True):
        return _run(gradient, ctx, grads, refusals)


def _run(
    gradient: Callable[..., Found], ctx: Any, grads: tuple[Tensor | None, ...], refusals: Refusals
) -> Found | None:
    checks.check_no_double_backward()
    # once_differentiable looks at grad_output alone: without requires_grad, a gradient is silently a constant.
    used = [grad for grad in grads if grad is not None]
    if _in_transform() or any(map(_is_batch, used)):
        raise RuntimeError(checks.IN_TRANSFORM)
    if not used and not verify.open_calls:
        return None
    if ctx.handed_on:
        raise RuntimeError(refusals.second)
    try:
        saved = ctx.saved_tensors  # once: a checkpoint gives them once
    except RuntimeError as error:
        if refusals.overwritten is not None and "inplace operation" in str(error):
            raise RuntimeError(f"{refusals.overwritten} ({error})") from error
        raise
    of_outputs = GradOutputs(*grads[:N_GRADS])
    if verify.open_calls:
        verify.compare_backward(**of_outputs._asdict())
    return gradient(ctx, saved, of_outputs) if used else None


def begin(ctx: Any, call: Any) -> None:
    """Prepare the context of an autograd Function over logits for :func:`run_backward`."""
    ctx.call, ctx.handed_on = call, False
    ctx.set_materialize_grads(False)
    if call.plan.gradient == "auto":
        measure()
    elif call.plan.gradient != "out_of_place":
        ctx.age = current_age()


def writes_in_place(mode: str, saved: tuple[Any, ...]) -> bool:
    """Return whether the gradient goes over the logits ``saved[0]``, which the caller holds in no other way."""
    return is_sole_owner(saved) if mode == "auto" else mode != "out_of_place"


def mark_written(ctx: Any, kept: Tensor, logits: Tensor, version_before: int) -> None:
    """Make autograd refuse ``kept``, overwritten through ``logits``; by-name modes make losses refuse it too."""
    increment_version(logits)  # of a view in the graph itself, it would rebuild the node
    if ctx.call.plan.gradient != "auto":
        mark_overwritten(kept, version_before, ctx.age)
