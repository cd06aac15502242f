"""What log-probabilities return beside themselves: the names that a caller asks for, and the record of the results."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from vocab_parallel_ce import checks
from vocab_parallel_ce.options import Settings
from vocab_parallel_ce.spec import TokenOutputs, is_ignored
from vocab_parallel_ce.top import Top


class TokenLogProbs(NamedTuple):
    """Log-probabilities and what was asked for beside them, each of the shape of the labels; None for the rest.

    All fp32 outputs except ``top_log_probs`` are differentiable. All are 0 for ignored tokens, ids and ``rank`` -1.
    ``z`` is divided by the temperature.
    """

    log_probs: Tensor  # fp32
    entropy: Tensor | None  # fp32, in nats
    lse: Tensor | None  # fp32 log-sum-exp of z
    sum_sq_probs: Tensor | None  # fp32 sum_i p_i^2
    mean_logit: Tensor | None  # fp32 mean of z over the vocabulary
    is_top1: Tensor | None  # bool: the label has the largest z, and no lower id has the same; False for ignored tokens
    rank: Tensor | None = None  # int64: how many logits are larger than the label's; -1 for ignored tokens
    top_ids: Tensor | None = None  # [..., k] int64; -1 where no z is finite; equals in any order
    top_log_probs: Tensor | None = None  # [..., k] fp32


OUTPUTS = TokenLogProbs._fields[1:-2]


def settings_of(entropy: bool, outputs: Any) -> dict[str, Any]:
    """Return the settings that ask for ``outputs``, a tuple or list of names in ``OUTPUTS``."""
    checks.check_bool("entropy", entropy)
    if not isinstance(outputs, tuple | list):
        raise TypeError(f"outputs: expected a tuple of names, got {type(outputs).__name__}")
    if entropy and outputs:
        raise ValueError("entropy: expected False with outputs, which may name it, got True")
    asked: dict[str, Any] = {"entropy": entropy}
    for name in outputs:
        checks.check_choice("outputs", name, OUTPUTS)
        asked["return_metrics" if name == "is_top1" else name] = True
    return asked


def taken_temperature(keywords: dict[str, Any]) -> Tensor | None:
    """Take a ``temperature`` that is a tensor out of ``keywords``: it is no setting."""
    return keywords.pop("temperature") if isinstance(keywords.get("temperature"), Tensor) else None


def asks_for_top(keywords: dict[str, Any]) -> bool:
    """Return whether the keywords ask for what no operator of ``torch.compile`` returns."""
    outputs = keywords.get("outputs", ())
    return keywords.get("top_k") is not None or (isinstance(outputs, tuple | list) and "rank" in outputs)


def top_of(settings: Settings) -> Top | None:
    """Return what finds the largest logits and the rank, if they are asked for."""
    return Top(settings.top_k, settings.rank) if settings.rank or settings.top_k is not None else None


def results_of(
    found: TokenOutputs, labels: Tensor, outputs: Any, ignore_index: int, top: Top | None
) -> Tensor | tuple[Tensor, Tensor] | TokenLogProbs:
    """Return what the public functions do: log-probabilities alone, with the entropy, or a :class:`TokenLogProbs`."""
    log_probs = torch.rsub(found.loss, 0.0)  # 0 - loss, since a negated 0 would be -0; the operator takes longer
    if not outputs and top is None:
        return log_probs if found.entropy is None else (log_probs, found.entropy)
    lse = found.lse if "lse" in outputs else None
    is_top1 = None
    if found.predictions is not None:
        with torch.no_grad():
            is_top1 = (found.predictions == labels) & (found.predictions >= 0)
    results = TokenLogProbs(log_probs, found.entropy, lse, found.sum_sq_probs, found.mean_logit, is_top1)
    if top is None:
        return results
    assert found.lse is not None
    return results._replace(**top.results(found.lse, is_ignored(labels, ignore_index)))
