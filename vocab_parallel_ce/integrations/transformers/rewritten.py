"""What a rewritten forward calls: lazy logits in place of the head, and the model's own loss function of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from vocab_parallel_ce.integrations.lazy_logits import LazyLogits, Recorded, lazy_logits
from vocab_parallel_ce.integrations.transformers.heads import (
    CallRecord,
    HeadCall,
    HeadPlan,
    lazy_head,
    refusal,
    refusal_of_inputs,
)
from vocab_parallel_ce.integrations.transformers.rewrite import Declined, rewrite


class ReplayedCall(HeadCall):
    """One call of a head in a rewritten forward, whose old lines make the logits."""

    def __init__(self, plan: HeadPlan, hidden: Tensor, model: Any, replay: Callable[[], Tensor]) -> None:
        super().__init__(plan, hidden)
        self.model = model
        self.logits = replay  # type: ignore[method-assign]

    def check_unchanged(self, freed: bool = True) -> None:
        super().check_unchanged(freed)
        if self.model.get_output_embeddings() is not self.plan.module:
            raise RuntimeError("logits: looked at after the model was given another head; look at them before")


def rewritten_forward(original: Callable[..., Any], options: dict[str, Any]) -> Callable[..., Any]:
    """Return a forward without logits, made from the source of ``original``.

    Raises:
        ValueError: the source is not understood; the message says what in it.
    """

    @torch._dynamo.disable
    def lazy(model: Any, head: Any, hidden: Tensor, replay: Callable[[], Tensor]) -> Tensor:
        if torch._C._are_functorch_transforms_active():
            return replay()
        reason, group = refusal(head)
        reason = reason or refusal_of_inputs(head, (hidden,), {})
        if reason is None:
            plan = HeadPlan(head, group, options, CallRecord(model))
            return lazy_logits(ReplayedCall(plan, hidden, model, replay), head.out_features)
        with lazy_head(model, options) as record:  # the head is perhaps inside this one
            logits = replay()
        if not isinstance(logits, LazyLogits):
            record.end()
        return logits

    @torch._dynamo.disable
    def loss(
        model: Any,
        head: Any,
        hidden: Tensor,
        labels: Tensor,
        *,
        logits: Any,
        scale: Any,
        softcap: Any,
        **arguments: Any,
    ) -> Tensor:
        if not isinstance(logits, LazyLogits):
            return model.loss_function(logits=logits, labels=labels, **arguments)
        call: Any = logits._head
        factors = [1.0 if factor is None else factor for factor in (scale, softcap)]
        if isinstance(call, ReplayedCall) and all(isinstance(each, (int, float)) and each > 0 for each in factors):
            cap = None if softcap is None else float(softcap)
            recorded = Recorded(hidden, head.out_features, float(factors[0]), cap)
            logits = LazyLogits(call, recorded, logits.dtype, logits.make, logits.requires_grad)
        elif isinstance(call, ReplayedCall):
            logits = logits.make("a scale or softcap that is not a positive number")
        result = model.loss_function(logits=logits, labels=labels, **arguments)
        call.plan.record.end()
        return result

    result = rewrite(original, loss, lazy)
    if isinstance(result, Declined):
        raise ValueError(result.reason)
    return result.forward
