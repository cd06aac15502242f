"""Log-probabilities at k given ids per token. Labels of one more dimension than tokens have are given ids."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from vocab_parallel_ce import checks
from vocab_parallel_ce.collectives import group_position
from vocab_parallel_ce.dtensor import is_dtensor
from vocab_parallel_ce.losses.base import Loss
from vocab_parallel_ce.losses.given_ids import GIVEN_IDS, Ids
from vocab_parallel_ce.losses.labels import LABELS, Labels
from vocab_parallel_ce.options import Settings
from vocab_parallel_ce.shard import VocabShard


def ids_or_labels(labels: Any, tokens: Any) -> dict[str, Any]:
    """Return the settings of log-probabilities of labels, or of given ids ``[..., k]``.

    ``tokens`` are logits or hidden states, of as many dimensions as given ids.
    """
    if isinstance(labels, Tensor) and isinstance(tokens, Tensor) and labels.dtype in checks.LABEL_DTYPES:
        if labels.dim() == tokens.dim() > 1:
            return {"negated": False, "n_ids": labels.shape[-1]}
    return {"negated": True}


def loss_and_targets(
    labels: Any,
    tokens: Tensor,
    weight: Tensor | None,
    settings: Settings,
    temperature: Tensor | None,
    threshold: Tensor | None,
    group: Any,
) -> tuple[Loss, Any]:
    """Return the loss of :func:`ids_or_labels` and its targets. ``weight`` is that of a head.

    Raises ValueError if excluded logits or given ids come with an output that they have not.
    """
    if not settings.negated:
        n_columns = tokens.shape[-1] * group_position(group)[1] if weight is None else rows_of_all(weight, group)
        check_given_ids(labels, tokens, n_columns, settings, threshold, group)
        return GIVEN_IDS, Ids(labels, temperature)
    if threshold is not None:
        check_threshold(settings)
    return LABELS, Labels(labels, None, temperature, threshold)


def check_threshold(settings: Settings) -> None:
    """Raise ValueError if the mean of logits is asked for, of which a threshold excludes some."""
    if "mean_logit" in settings.outputs:
        raise ValueError("outputs: expected no 'mean_logit' with a threshold, which excludes logits, got both")


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
