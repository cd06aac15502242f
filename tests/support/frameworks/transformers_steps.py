"""A training step of a tiny model of transformers, with and without install()."""

from typing import Any

from vocab_parallel_ce.integrations.transformers import install
from vocab_parallel_ce.integrations.transformers.audit_models import Outcome, audit, differs, step
from vocab_parallel_ce.integrations.transformers.tiny import tiny_inputs

FUSED = {"fused": 1}


def own_step(model: Any, inputs: dict[str, Any]) -> Outcome:
    """Return a step's outcome with gradients that no later step changes."""
    outcome = step(model, inputs)
    return outcome._replace(gradients={n: None if g is None else g.clone() for n, g in outcome.gradients.items()})


def same_step(model: Any, **inputs: Any) -> dict[str, int]:
    """Assert that install() changes no number of a step, and return what became of its call."""
    inputs = tiny_inputs(model) | inputs
    expected = own_step(model, inputs)
    install(model)
    assert differs(step(model, inputs), expected) is None
    return calls_of(model)


def calls_of(model: Any) -> dict[str, int]:
    """Return what became of the calls of an installed model; a step looks at its logits afterwards."""
    return {event: count for event, count in audit(model).items() if event != "logits made after the call"}
