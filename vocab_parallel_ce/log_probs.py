"""Log-probabilities of given tokens, and the entropy of their distributions, for reinforcement learning."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, overload

import torch
from torch import Tensor

from vocab_parallel_ce import checks
from vocab_parallel_ce.cross_entropy import overwrites, public, run
from vocab_parallel_ce.losses.labels import LABELS, Labels
from vocab_parallel_ce.options import LogProbKeywords, Settings, check_names, keyword_defaults, with_keywords
from vocab_parallel_ce.outputs import TokenLogProbs, asks_for_top, results_of, settings_of, taken_temperature, top_of

if TYPE_CHECKING:
    from typing_extensions import Unpack

KEYWORDS = keyword_defaults(LogProbKeywords)


@overload
def token_log_probs(
    logits: Tensor, labels: Tensor, *, entropy: Literal[False] = False, **keywords: Unpack[LogProbKeywords]
) -> Tensor: ...
@overload
def token_log_probs(
    logits: Tensor, labels: Tensor, *, entropy: Literal[True], **keywords: Unpack[LogProbKeywords]
) -> tuple[Tensor, Tensor]: ...
@overload
def token_log_probs(
    logits: Tensor, labels: Tensor, *, outputs: Sequence[str], **keywords: Unpack[LogProbKeywords]
) -> TokenLogProbs: ...
@public(lambda keywords: overwrites(keywords) or asks_for_top(keywords))
@with_keywords(KEYWORDS)
def token_log_probs(
    logits: Tensor,
    labels: Tensor,
    *,
    group: Any = None,
    entropy: bool = False,
    outputs: Sequence[str] = (),
    **keywords: Any,
) -> Tensor | tuple[Tensor, Tensor] | TokenLogProbs:
    """Log-probability of each label, and what else is asked of the whole distribution, from one read of the logits.

        p = softmax(z),  log_prob = log p_y,  entropy = -sum_i p_i log p_i

    in fp32, with ``z`` the scaled and capped logits of :func:`vocab_parallel_cross_entropy`, divided by the
    temperature. All fp32 outputs except ``top_log_probs`` are differentiable; one pass computes their gradients.

    Overwrites: by default nothing that anybody can still read, see ``gradient`` of the loss.

    Collectives: forward one all_gather of 12 bytes per row from each rank; 4 more with each of ``entropy``,
    ``sum_sq_probs`` and ``is_top1``, 8 with ``mean_logit``, and ``8 * k`` with ``top_k``. ``rank`` is
    counted after that, which takes one all_reduce of 4 bytes per row, and 4 more in the all_gather where ``z / T`` is
    not the logit. Backward none.

    Args:
        temperature: positive; divides the logits after the cap. A number, or a floating-point tensor of one element, or
            of one for each label, without a gradient. The host does not read a tensor: where it is not positive and
            finite in fp32, outputs and gradient are NaN, except of ignored tokens.
        entropy: also return the entropy, in nats.
        outputs: names of ``"entropy"``, ``"lse"``, ``"sum_sq_probs"``, ``"mean_logit"``, ``"is_top1"`` and ``"rank"``,
            as :class:`TokenLogProbs` says; ``V`` at most 2**24 for ``is_top1``. Not together with ``entropy=True``.
        top_k: also return the ids and log-probabilities of so many columns, in a :class:`TokenLogProbs`.
        ignore_index: tokens with this label have outputs and gradient 0.
        gradient: ``"auto"``, ``"in_backward"`` or ``"out_of_place"``.
        others: as in :func:`vocab_parallel_cross_entropy`.

    Returns:
        ``[...]`` fp32 log-probabilities, equal bit for bit on all ranks; with ``entropy``, ``(log_probs, entropy)``;
        with ``outputs`` or ``top_k``, a :class:`TokenLogProbs`.

    Raises:
        TypeError, ValueError, RuntimeError: as :func:`vocab_parallel_cross_entropy`.
    """
    check_names(keywords, KEYWORDS, token_log_probs)
    temperature = taken_temperature(keywords)
    settings = Settings(reduction="none", **settings_of(entropy, outputs), **keywords)
    checks.check_choice("gradient", settings.gradient, ("auto", "in_backward", "out_of_place"))
    top = top_of(settings)
    given = Labels(labels, temperature=temperature)
    found, _ = run(LABELS, logits, given, settings, group=group, top=top)
    return results_of(found, labels, outputs, settings.ignore_index, top)


def output_of(name: str, logits: Tensor, group: Any = None) -> Tensor:
    """Return one of the fp32 ``outputs`` ``[...]`` of ``logits [..., C]``, without labels. Overwrites nothing."""
    any_labels = torch.zeros(logits.shape[:-1], dtype=torch.int32, device=logits.device)
    return getattr(token_log_probs(logits, any_labels, group=group, outputs=(name,), gradient="out_of_place"), name)
