"""The Brier score over logits and over a head: the public functions."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from vocab_parallel_ce.api.call import over_head, over_logits, overwrites, public, settings_of
from vocab_parallel_ce.head.plan import Arguments, Head
from vocab_parallel_ce.losses.brier import BRIER, Answers
from vocab_parallel_ce.options import (
    Advanced,
    CommonKeywords,
    HeadKeywords,
    Settings,
    check_names,
    keyword_defaults,
    with_keywords,
)

KEYWORDS = keyword_defaults(CommonKeywords) | {"reduction": "mean", "gradient": "auto"}
HEAD_KEYWORDS = KEYWORDS | keyword_defaults(HeadKeywords)


@public(overwrites)
@with_keywords(KEYWORDS)
def brier_score(logits: Tensor, labels: Tensor, *, group: Any = None, **keywords: Any) -> Tensor:
    """Squared error of the probabilities of sharded logits ``[..., C]``."""
    check_names(keywords, KEYWORDS, brier_score)
    return over_logits(BRIER, logits, Answers(labels), Settings(**keywords), group=group)[0].loss


@public()
@with_keywords(HEAD_KEYWORDS)
def linear_brier_score(
    hidden: Tensor, weight: Tensor, labels: Tensor, *, bias: Tensor | None = None, group: Any = None, **keywords: Any
) -> Tensor:
    """:func:`brier_score` of ``hidden @ weight.T + bias``, which is made in chunks of tokens."""
    settings, head = settings_of(keywords, HEAD_KEYWORDS, linear_brier_score, Advanced())
    given = Arguments(Head(hidden, weight, bias), labels, Answers(labels), group, None)
    return over_head(BRIER, given, settings, head)[0].loss
