"""The Brier score over logits and over a head: the public functions."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from vocab_parallel_ce import cross_entropy
from vocab_parallel_ce.cross_entropy import overwrites, public
from vocab_parallel_ce.linear import cross_entropy as linear
from vocab_parallel_ce.linear.plan import Arguments
from vocab_parallel_ce.losses.brier import BRIER, Answers
from vocab_parallel_ce.options import CommonKeywords, HeadSettings, Settings, keyword_defaults, with_keywords

KEYWORDS = keyword_defaults(CommonKeywords) | {"reduction": "mean", "gradient": "auto"}
HEAD_KEYWORDS = KEYWORDS | HeadSettings._field_defaults


@public(overwrites)
@with_keywords(KEYWORDS)
def brier_score(logits: Tensor, labels: Tensor, *, group: Any = None, **keywords: Any) -> Tensor:
    """Squared error of the probabilities of sharded logits ``[..., C]``."""
    return cross_entropy.run(BRIER, logits, Answers(labels), Settings(**keywords), group=group)[0].loss


@public()
@with_keywords(HEAD_KEYWORDS)
def linear_brier_score(
    hidden: Tensor, weight: Tensor, labels: Tensor, *, bias: Tensor | None = None, group: Any = None, **keywords: Any
) -> Tensor:
    """:func:`brier_score` of ``hidden @ weight.T + bias``, which is made in chunks of tokens."""
    settings, head = linear.split_keywords(keywords, HEAD_KEYWORDS, linear_brier_score)
    given = Arguments(hidden, weight, bias, labels, Answers(labels), group, None)
    return linear.run(BRIER, given, settings, head)[0].loss
