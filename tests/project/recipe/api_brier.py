"""The Brier score over logits and over a head: the public functions."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from tests.project.recipe.brier import BRIER, Answers
from vocab_parallel_ce.api.call import overwrites, public, run_head, run_logits
from vocab_parallel_ce.head.arguments import Arguments
from vocab_parallel_ce.options import HeadSettings, Settings
from vocab_parallel_ce.targets import Head


@public(overwrites)
def brier_score(
    logits: Tensor,
    labels: Tensor,
    *,
    group: Any = None,
    ignore_index: int = -100,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    reduction: str = "mean",
    gradient: str = "auto",
    vocab_size: int | None = None,
) -> Tensor:
    """Squared error of the probabilities of sharded logits ``[..., C]``."""
    settings = Settings(
        ignore_index=ignore_index,
        softcap=softcap,
        logit_scale=logit_scale,
        reduction=reduction,
        gradient=gradient,
        vocab_size=vocab_size,
    )
    return run_logits(BRIER, logits, Answers(labels), settings, group=group).loss


@public()
def linear_brier_score(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    group: Any = None,
    ignore_index: int = -100,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    reduction: str = "mean",
    gradient: str = "auto",
    vocab_size: int | None = None,
    sequence_parallel: bool = False,
    chunk_size: int | str = "auto",
) -> Tensor:
    """:func:`brier_score` of ``hidden @ weight.T + bias``, which is made in chunks of tokens."""
    settings = Settings(
        ignore_index=ignore_index,
        softcap=softcap,
        logit_scale=logit_scale,
        reduction=reduction,
        gradient=gradient,
        vocab_size=vocab_size,
    )
    head = HeadSettings(sequence_parallel=sequence_parallel, chunk_size=chunk_size)
    given = Arguments(Head(hidden, weight, bias), Answers(labels), group, None)
    return run_head(BRIER, given, settings, head).loss
