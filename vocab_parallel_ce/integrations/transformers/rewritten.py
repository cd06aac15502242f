"""What a rewritten forward calls: lazy logits in place of the head, and the model's own loss function of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from vocab_parallel_ce.integrations.lazy_logits import LazyLogits
from vocab_parallel_ce.integrations.transformers.heads import lazy_head
from vocab_parallel_ce.integrations.transformers.rewrite import Declined, rewrite


def rewritten_forward(original: Callable[..., Any], options: dict[str, Any]) -> Callable[..., Any]:
    """Return a forward without logits, made from the source of ``original``.

    Raises:
        ValueError: the source is not understood; the message says what in it.
    """

    @torch._dynamo.disable
    def lazy(model: Any, head: Any, hidden: Tensor, replay: Callable[[], Tensor]) -> Tensor:
        if torch._C._are_functorch_transforms_active():
            return replay()
        with lazy_head(model, options, head) as record:
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
        result = model.loss_function(logits=logits, labels=labels, **arguments)
        if isinstance(logits, LazyLogits):
            call: Any = logits._head
            call.plan.record.end()
        return result

    result = rewrite(original, loss, lazy)
    if isinstance(result, Declined):
        raise ValueError(result.reason)
    return result.forward
