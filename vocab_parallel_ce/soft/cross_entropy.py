"""Cross-entropy with probability targets over sharded logits: the public function."""

from __future__ import annotations

from typing import Any, TypedDict

import torch
from torch import Tensor

from vocab_parallel_ce import checks, verify
from vocab_parallel_ce.cross_entropy import public
from vocab_parallel_ce.options import Settings, check_names, divided_by, keyword_defaults, with_keywords
from vocab_parallel_ce.plan import comparable, weights_of_columns
from vocab_parallel_ce.shard import VocabShard
from vocab_parallel_ce.soft.pairs import PairCall, divisor_of, launchers_of, plan_pair, run
from vocab_parallel_ce.soft.targets_spec import N_STATISTICS

TARGET_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


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


@public(lambda keywords: True)
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

    Collectives: forward one all_gather of 16 bytes per row from each rank; backward none. ``torch.compile`` breaks
    the graph here.

    Args:
        logits: ``[..., C]`` bf16, fp16, fp32 or fp64, at least two dimensions, of any strides.
        target_probs: ``[..., C]`` bf16, fp16, fp32 or fp64, the same columns. Must not require a gradient.
        class_weight: as in :func:`vocab_parallel_cross_entropy`; a mean still divides by the rows.
        reduction: ``"mean"`` over all rows, ``"sum"`` or ``"none"``.
        gradient: ``"auto"``, ``"in_backward"`` or ``"out_of_place"``.
        impl: ``"triton"``, ``"reference"`` or ``"auto"``.
        others: as in :func:`vocab_parallel_cross_entropy`.

    Returns:
        fp32 loss, fp64 for fp64 logits, equal bit for bit on all ranks: ``[]``, or ``[...]`` for ``"none"``.

    Raises:
        TypeError, ValueError, RuntimeError: as :func:`vocab_parallel_cross_entropy`.
    """
    check_names(keywords, KEYWORDS, soft_cross_entropy)
    settings = divided_by(num_items, Settings(**keywords))
    checks.check_logits(logits)
    _check_targets(target_probs, logits)
    checks.check_no_transforms(class_weight)
    plan = plan_pair(logits, target_probs, None, "target_probs", settings, group)
    weights = None if class_weight is None else weights_of_columns(class_weight, plan.shard, logits)
    divisor = divisor_of(logits, None, settings, num_items)
    if verify.open_calls:
        no_labels = torch.empty(0, dtype=torch.int64)
        options = comparable(settings, num_items, class_weight)
        verify.compare_call({"logits": logits}, no_labels, plan.shard, options, beside="target_probs")
    launchers = launchers_of(plan, "targets_reference", "soft_targets")
    call = PairCall(plan, launchers, plan.options, N_STATISTICS, False, group, divisor)
    return run(call, logits, target_probs, weights)


def _check_targets(targets: Any, logits: Tensor) -> None:
    """Check that there is a probability per logit."""
    checks.check_tensor("target_probs", targets)
    if targets.layout is not torch.strided or targets.dtype not in TARGET_DTYPES:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in TARGET_DTYPES)
        raise TypeError(f"target_probs: dtype must be one of {names}, dense, got {targets.dtype}, {targets.layout}")
    if targets.shape != logits.shape:
        raise ValueError(
            f"target_probs: shape must be that of logits, {tuple(logits.shape)}, got {tuple(targets.shape)}"
        )
