"""What log-probabilities return beside themselves: the names that a caller asks for, and the record of the results."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from vocab_parallel_ce import checks
from vocab_parallel_ce.spec import TokenOutputs


class TokenLogProbs(NamedTuple):
    """Log-probabilities and what was asked for beside them, each of the shape of the labels; None for the rest.

    All fp32 outputs are differentiable, and 0 for ignored tokens. ``z`` is after the temperature.
    """

    log_probs: Tensor  # fp32
    entropy: Tensor | None  # fp32, in nats
    lse: Tensor | None  # fp32 log-sum-exp of z
    sum_sq_probs: Tensor | None  # fp32 sum_i p_i^2
    mean_logit: Tensor | None  # fp32 mean of z over the vocabulary
    is_top1: Tensor | None  # bool: the label has the largest z, and no lower id has the same; False for ignored tokens


OUTPUTS = TokenLogProbs._fields[1:]


def settings_of(entropy: bool, outputs: Any) -> dict[str, Any]:
    """Return the settings that ask for ``outputs``, a tuple or list of names in ``OUTPUTS``."""
    checks.check_bool("entropy", entropy)
    if not isinstance(outputs, tuple | list):
        raise TypeError(f"outputs: expected a tuple of names, got {type(outputs).__name__}")
    if entropy and outputs:
        raise ValueError("entropy: expected False with outputs, which may name it, got True")
    for name in outputs:
        checks.check_choice("outputs", name, OUTPUTS)
    return {
        "entropy": entropy or "entropy" in outputs,
        "lse": "lse" in outputs,
        "sum_sq_probs": "sum_sq_probs" in outputs,
        "mean_logit": "mean_logit" in outputs,
        "return_metrics": "is_top1" in outputs,
    }


def results_of(found: TokenOutputs, labels: Tensor, outputs: Any) -> Tensor | tuple[Tensor, Tensor] | TokenLogProbs:
    """Return what the public functions do: log-probabilities alone, with the entropy, or a :class:`TokenLogProbs`."""
    log_probs = 0.0 - found.loss  # a negated 0 would be -0
    if not outputs:
        return log_probs if found.entropy is None else (log_probs, found.entropy)
    lse = found.lse if "lse" in outputs else None
    is_top1 = None
    if found.predictions is not None:
        with torch.no_grad():
            is_top1 = (found.predictions == labels) & (found.predictions >= 0)
    return TokenLogProbs(log_probs, found.entropy, lse, found.sum_sq_probs, found.mean_logit, is_top1)
