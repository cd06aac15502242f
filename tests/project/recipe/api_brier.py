"""The Brier score over logits and over a head: the public functions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from tests.project.recipe.brier import BRIER, Answers
from vocab_parallel_ce.api.call import needs_eager, overwrites, public, run_head, run_logits
from vocab_parallel_ce.head.arguments import Arguments
from vocab_parallel_ce.options import HeadOptions, ObjectiveSettings, head_settings, settings_of
from vocab_parallel_ce.targets import Head

if TYPE_CHECKING:
    from typing_extensions import Unpack


class BrierSettings(ObjectiveSettings, total=False):
    """The settings that both functions take."""

    reduction: str


@public(overwrites, BrierSettings)
def brier_score(
    logits: Tensor, labels: Tensor, *, group: Any = None, gradient: str = "auto", **keywords: Unpack[BrierSettings]
) -> Tensor:
    """Squared error of the probabilities of sharded logits ``[..., C]``."""
    settings = settings_of(gradient=gradient, **keywords)
    return run_logits(BRIER, logits, Answers(labels), settings, group=group).loss


@public(needs_eager, BrierSettings)
def linear_brier_score(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    group: Any = None,
    options: HeadOptions | None = None,
    **keywords: Unpack[BrierSettings],
) -> Tensor:
    """:func:`brier_score` of ``hidden @ weight.T + bias``, which is made in chunks of tokens."""
    given = Arguments(Head(hidden, weight, bias), Answers(labels), group, None)
    return run_head(BRIER, given, head_settings(options, **keywords)).loss
