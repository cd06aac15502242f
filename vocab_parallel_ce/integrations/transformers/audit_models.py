"""Which of transformers' causal language models train without their logits, and why the others do not."""

from __future__ import annotations

from collections import Counter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vocab_parallel_ce.integrations.transformers.heads import calls
from vocab_parallel_ce.integrations.transformers.patch import calls_inside, install, uninstall, why_not_reached
from vocab_parallel_ce.integrations.transformers.targets import owner_of

TOLERANCE = 1e-4  # of fp32 gradients through a whole model, relative to the largest


class Outcome(NamedTuple):
    """What one training step of a model gives."""

    loss: Tensor
    gradients: dict[str, Tensor | None]
    logits: Tensor


def audit(target: Any = None, *, mechanism: str = "lazy") -> dict[str, Any]:
    """Say which models are fused.

    Args:
        target: an installed model: how many of its calls ran fused, and why the others did not; of compiled code
            (of the model, or of its class if that is installed) each compilation counts once. None: every class
            of transformers' causal language models, each tried in a tiny model on the CPU, which takes minutes.
        mechanism: as in :func:`install`; for ``target=None``.

    Returns:
        JSON: for a model ``{"fused": calls, reason: calls}``, with 0 calls for the reason why calls do not come to the
        installed forward; else ``{class: {"verdict": ..., "reason": ...}}``, where
        the verdict is "fused", "falls back" (right, with its logits), "declined" (by the rewriting), "failed", or
        "cannot be built" (without this project; "rewritten, not run" if that can be done all the same).
    """
    if target is not None:
        owner = owner_of(target)
        is_class = isinstance(owner, type)
        calls_here = Counter[str]() if is_class else calls_inside(owner)
        mro = (owner if is_class else type(owner)).__mro__
        reason = None if is_class else why_not_reached(owner)
        return dict(sum((calls.get(cls, Counter()) for cls in mro), calls_here)) | ({reason: 0} if reason else {})
    from vocab_parallel_ce.integrations.transformers.tiny import class_names

    return {name: audit_class(name, mechanism) for name in class_names()}


def audit_class(name: str, mechanism: str) -> dict[str, str]:
    """Compare a step of a tiny model with and without the fused loss."""
    from vocab_parallel_ce.integrations.transformers.tiny import load_class, tiny_inputs, tiny_model

    verdict = "cannot be built"
    try:
        cls = load_class(name)
        if mechanism == "rewrite" and _can_be_rewritten(cls):
            verdict = "rewritten, not run"
        model = tiny_model(cls)
        inputs = tiny_inputs(model)
        expected = step(model, inputs)
    except Exception as error:  # whatever a model's own code raises
        return _verdict(verdict, _first_line(error))
    try:
        install(model, mechanism=mechanism)
    except ValueError as error:
        return _verdict("declined", str(error).partition("cannot be rewritten: ")[2])
    try:
        outcome = step(model, inputs)
        reasons = [event for event in calls[model] if event not in ("fused", "logits made after the call")]
        difference = differs(outcome, expected)
    except Exception as error:
        return _verdict("failed", _first_line(error))
    finally:
        uninstall(model)
    if difference is not None:
        return _verdict("failed", difference)
    return _verdict("falls back", reasons[0]) if reasons else _verdict("fused")


def _can_be_rewritten(cls: Any) -> bool:
    try:
        return install(cls, mechanism="rewrite").installed
    except ValueError:
        return False
    finally:
        uninstall(cls)


def step(model: Any, inputs: dict[str, Any], seed: int = 0) -> Outcome:
    """Run forward and backward of a model."""
    model.zero_grad(set_to_none=True)
    torch.manual_seed(seed)
    outputs = model(**inputs)
    outputs.loss.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    return Outcome(outputs.loss.detach(), gradients, outputs.logits.detach())


def differs(outcome: Outcome, expected: Outcome) -> str | None:
    """Name what of an outcome is not as expected, or return None."""
    if not torch.equal(outcome.logits, expected.logits):
        return "other logits"
    if not torch.allclose(outcome.loss, expected.loss, rtol=1e-5, atol=0.0):
        return f"loss {outcome.loss.item()} instead of {expected.loss.item()}"
    whole = [grad for grad in expected.gradients.values() if grad is not None and grad.numel()]
    largest = max((grad.abs().max().item() for grad in whole), default=0.0)
    for name, grad in expected.gradients.items():
        gradient = outcome.gradients[name]
        if (gradient is None) != (grad is None):
            return f"{name}: {'no' if gradient is None else 'a'} gradient"
        if gradient is not None and grad is not None and grad.numel():
            error = (gradient - grad).abs().max().item()
            if not error <= TOLERANCE * grad.abs().max().item() + 1e-7 * largest:
                return f"{name}: gradient differs by {error:.2g} of {grad.abs().max().item():.2g}"
    return None


def _verdict(verdict: str, reason: str = "") -> dict[str, str]:
    return {"verdict": verdict, "reason": reason}


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"[:200]
