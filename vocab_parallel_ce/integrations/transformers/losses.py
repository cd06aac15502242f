"""The loss of a model's logits, for ``model.loss_function`` of transformers."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from vocab_parallel_ce import next_labels, vocab_parallel_cross_entropy
from vocab_parallel_ce.dtensor import is_dtensor
from vocab_parallel_ce.integrations import dtensor


def causal_lm_loss(
    logits: Any,
    labels: Any,
    vocab_size: int,
    num_items_in_batch: float | Tensor | None = None,
    ignore_index: int = -100,
    shift_labels: Tensor | None = None,
    *,
    group: Any = None,
    **kwargs: Any,
) -> Any:
    """Compute transformers' ``ForCausalLMLoss`` of logits, without copies of them in fp32; other keywords are ignored.

    Collectives: with a sharded vocabulary those of :func:`vocab_parallel_ce.vocab_parallel_cross_entropy`, else none.

    Args:
        logits: ``[B, L, V]``, plain or a DTensor that is cut over the vocabulary; ``[B, L, C]`` with ``group``.
        labels: ``[B, L]`` ids, which are shifted by one here.
        vocab_size: ``V``.
        num_items_in_batch: divides the sum of the losses; None: the number of labels that are not ignored.
        shift_labels: labels that are shifted already, in place of ``labels``.
        group: of the ranks that share the vocabulary of plain logits: ``functools.partial(causal_lm_loss, group=...)``.

    Returns:
        fp32 loss ``[]``. If no label is valid it is 0, where transformers' is NaN.

    Raises:
        ValueError: the logits have other columns than ``V``, or another number of tokens than the labels.
        others: as :func:`vocab_parallel_ce.vocab_parallel_cross_entropy`.
    """
    if group is None and logits.shape[-1] != vocab_size:
        raise ValueError(
            f"logits: expected vocab_size columns, {vocab_size}, got {logits.shape[-1]}; if tensor parallelism cut "
            "them, set model.loss_function = functools.partial(causal_lm_loss, group=group of its ranks)"
        )
    targets = next_labels(labels, ignore_index=ignore_index) if shift_labels is None else shift_labels
    targets = targets.to(logits.device)
    if targets.numel() == logits.shape[:-1].numel():  # else a DTensor, of which this rank has a part of the tokens
        targets = targets.reshape(logits.shape[:-1])
    if isinstance(num_items_in_batch, Tensor):
        num_items_in_batch = num_items_in_batch.to(logits.device)
    options: dict[str, Any] = {"ignore_index": ignore_index, "num_items": num_items_in_batch}
    if is_dtensor(logits):
        return dtensor.cross_entropy(logits, targets, **options)
    return vocab_parallel_cross_entropy(logits, targets, group=group, vocab_size=vocab_size, **options)
