"""Log-probabilities at k given ids per token. Labels of one more dimension than tokens have are given ids."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from vocab_parallel_ce import checks
from vocab_parallel_ce.api.call import run_head, run_logits
from vocab_parallel_ce.collectives import group_position
from vocab_parallel_ce.dtensor import is_dtensor
from vocab_parallel_ce.head.arguments import Arguments
from vocab_parallel_ce.losses.given_ids import GIVEN_IDS, Ids
from vocab_parallel_ce.options import HeadSettings, Settings
from vocab_parallel_ce.shard import VocabShard
from vocab_parallel_ce.targets import Head


def are_given_ids(labels: Any, tokens: Any) -> bool:
    """Return whether ``labels [..., k]`` are given ids of ``tokens``, logits or hidden states of as many dimensions."""
    if not (isinstance(labels, Tensor) and isinstance(tokens, Tensor)):
        return False
    return labels.dim() == tokens.dim() > 1 and labels.dtype in checks.LABEL_DTYPES


def rows_of_all(weight: Any, group: Any) -> int:
    """Return the rows of a head's weight on all ranks together."""
    if not isinstance(weight, Tensor):
        checks.check_parameter("weight", weight)
    rows: int = weight.shape[0]
    return rows if is_dtensor(weight) else rows * group_position(group)[1]


def vocab_size_of(settings: Settings, n_columns: int) -> int:
    """Return the size of the vocabulary; ``n_columns`` are those of all ranks, if ``vocab_size`` does not say it."""
    size = settings.vocab_size
    return n_columns if size is None else size.vocab_size if isinstance(size, VocabShard) else size


def check_given_ids(
    ids: Tensor, tokens: Tensor, n_columns: int, settings: Settings, threshold: Tensor | None, group: Any
) -> None:
    """Raise ValueError if given ids come with outputs or a threshold, or if they may be one-hot labels.

    Those are an id for each column of a rank, or of the vocabulary: numbers that all ranks know. ``n_columns`` are
    those of all ranks, if ``vocab_size`` does not say it.
    """
    if settings.outputs or threshold is not None:
        raise ValueError(
            f"labels: expected one per token with outputs or a threshold, {tuple(tokens.shape[:-1])}, got "
            f"{tuple(ids.shape)}, given ids, and {'outputs' if settings.outputs else 'threshold'}; ask for them in a "
            "call of their own"
        )
    k, vocab_size, (_, n_ranks) = ids.shape[-1], vocab_size_of(settings, n_columns), group_position(group)
    if k in (vocab_size, -(-vocab_size // n_ranks)):
        raise ValueError(
            f"labels: expected another number of given ids per token than of columns, got {k} for {vocab_size} "
            f"columns on {n_ranks} ranks; {checks.NOT_ONE_HOT}"
        )


def log_probs_at(logits: Tensor, targets: Ids, settings: Settings, *, group: Any) -> Tensor:
    """Return ``[..., k]`` log-probabilities at ``targets.ids``."""
    settings = settings._replace(n_ids=targets.ids.shape[-1])
    return run_logits(GIVEN_IDS, logits, targets, settings, group=group).loss


def head_log_probs_at(
    tensors: Head,
    targets: Ids,
    settings: Settings,
    head: HeadSettings,
    *,
    group: Any,
    main_grad: Tensor | None = None,
) -> Tensor:
    """Return the same of the logits of a head."""
    settings = settings._replace(n_ids=targets.ids.shape[-1])
    return run_head(GIVEN_IDS, Arguments(tensors, targets, group, None, main_grad), settings, head).loss
