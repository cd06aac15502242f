"""Log-probabilities of given tokens, and the entropy of their distributions, for reinforcement learning."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, overload

import torch
from torch import Tensor

from vocab_parallel_ce import checks
from vocab_parallel_ce.cross_entropy import overwrites, public, run
from vocab_parallel_ce.options import LogProbKeywords, Settings, check_names, keyword_defaults, with_keywords

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
@public(overwrites)
@with_keywords(KEYWORDS)
def token_log_probs(
    logits: Tensor, labels: Tensor, *, group: Any = None, entropy: bool = False, **keywords: Any
) -> Tensor | tuple[Tensor, Tensor]:
    """Log-probability of each label, and the entropy of the whole distribution, from one read of the logits.

        p = softmax(z / temperature),  log_prob = log p_y,  entropy = -sum_i p_i log p_i

    in fp32, with ``z`` the scaled and capped logits of :func:`vocab_parallel_cross_entropy`. Both are
    differentiable; one pass computes their gradients together.

    Overwrites: backward writes the gradient over ``logits``, unless ``gradient`` says otherwise.

    Collectives: forward one all_gather of 12 bytes per row from each rank, 16 with ``entropy``; backward none.

    Args:
        temperature: positive; divides ``z``, after the cap.
        entropy: also return the entropy, in nats.
        ignore_index: tokens with this label have log-probability, entropy and gradient 0.
        gradient: ``"auto"``, ``"in_backward"`` or ``"out_of_place"``.
        others: as in :func:`vocab_parallel_cross_entropy`.

    Returns:
        ``[...]`` fp32 log-probabilities, equal bit for bit on all ranks; with ``entropy``, ``(log_probs, entropy)``.

    Raises:
        TypeError, ValueError, RuntimeError: as :func:`vocab_parallel_cross_entropy`.
    """
    check_names(keywords, KEYWORDS)
    settings = Settings(entropy=entropy, reduction="none", **keywords)
    checks.check_choice("gradient", settings.gradient, ("auto", "in_backward", "out_of_place"))
    outputs, _ = run(logits, labels, settings, group=group)
    log_probs = 0.0 - outputs.loss  # a negated 0 would be -0
    return log_probs if outputs.entropy is None else (log_probs, outputs.entropy)


def entropies(logits: Tensor, group: Any = None) -> Tensor:
    """Return the fp32 entropies ``[...]`` of ``logits [..., C]`` without labels. Overwrites nothing."""
    any_labels = torch.zeros(logits.shape[:-1], dtype=torch.int32, device=logits.device)
    return token_log_probs(logits, any_labels, group=group, entropy=True, gradient="out_of_place")[1]
