"""Cross-entropy with probability targets over sharded logits: the public function."""

from __future__ import annotations

from typing import Any, TypedDict

from torch import Tensor

from vocab_parallel_ce.cross_entropy import overwrites, public, run
from vocab_parallel_ce.losses.targets import TARGETS, Targets
from vocab_parallel_ce.options import Settings, check_names, divided_by, keyword_defaults, with_keywords
from vocab_parallel_ce.shard import VocabShard


class SoftKeywords(TypedDict, total=False):
    """Keywords, as type checkers see them; :class:`Settings` has their defaults."""

    label_smoothing: float
    z_loss: float
    softcap: float | None
    logit_scale: float
    reduction: str
    gradient: str
    impl: str
    vocab_size: int | None
    shard: VocabShard | None


KEYWORDS = keyword_defaults(SoftKeywords)


@public(overwrites)
@with_keywords(KEYWORDS)
def soft_cross_entropy(
    logits: Tensor,
    target_probs: Tensor,
    *,
    group: Any = None,
    num_items: float | Tensor | None = None,
    class_weight: Tensor | None = None,
    **keywords: Any,
) -> Tensor:
    """Cross-entropy of sharded logits against a probability per column, as PyTorch's with class probabilities.

    In fp32, with ``z`` and ``lse`` as in :func:`vocab_parallel_cross_entropy`, over the whole vocabulary:

        t'   = w * ((1 - e) * t + e / V),  w = class_weight, or 1
        loss = sum_i t'_i * (lse - z_i) + z_loss * lse^2

    Targets are taken as they are, also if they do not sum to 1. A ``-inf`` logit is excluded if its ``t'`` is
    0; otherwise the loss is infinite. Columns at ``V`` and beyond are ignored in both tensors. docs/distillation.md has
    more.

    Overwrites: by default nothing that anybody can still read, see ``gradient`` of the loss. ``target_probs``
    are never written, and get no gradient.

    Collectives: forward one all_gather of 16 bytes per row from each rank; backward none.

    Args:
        logits: ``[..., C]`` bf16, fp16, fp32 or fp64, at least two dimensions, of any strides.
        target_probs: ``[..., C]`` bf16, fp16, fp32 or fp64, the same columns. Must not require a gradient.
        class_weight: as in :func:`vocab_parallel_cross_entropy`; a mean still divides by the rows.
        reduction: ``"mean"`` over all rows, ``"sum"`` or ``"none"``.
        gradient: as in :func:`vocab_parallel_cross_entropy`.
        impl: ``"triton"``, ``"reference"`` or ``"auto"``.
        others: as in :func:`vocab_parallel_cross_entropy`.

    Returns:
        fp32 loss, fp64 for fp64 logits, equal bit for bit on all ranks: ``[]``, or ``[...]`` for ``"none"``.

    Raises:
        TypeError, ValueError, RuntimeError: as :func:`vocab_parallel_cross_entropy`.
    """
    check_names(keywords, KEYWORDS, soft_cross_entropy)
    settings = divided_by(num_items, Settings(**keywords))
    given = Targets(target_probs, class_weight)
    return run(TARGETS, logits, given, settings, group=group, num_items=num_items)[0].loss
