"""The loss and the log-probabilities of logits that are DTensors, cut over the vocabulary.

Nothing is gathered and nothing is redistributed: each rank computes with its local tensor. The columns of every rank
follow from the global shape. So all ranks agree on them if the last one has fewer columns, or none.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vocab_parallel_ce import checks
from vocab_parallel_ce import cross_entropy as over_logits
from vocab_parallel_ce import log_probs as over_tokens
from vocab_parallel_ce.cross_entropy import LossMetrics, public, vocab_parallel_cross_entropy
from vocab_parallel_ce.dtensor import is_dtensor, local_columns
from vocab_parallel_ce.options import Settings, check_names, divided_by, with_keywords
from vocab_parallel_ce.outputs import TokenLogProbs

OF_THE_DTENSOR = ("vocab_size", "shard", "shift")  # with the group, what a DTensor says; its tokens may be cut
LOSS_KEYWORDS = {name: value for name, value in over_logits.KEYWORDS.items() if name not in OF_THE_DTENSOR}
LOG_PROB_KEYWORDS = {
    name: value for name, value in over_tokens.KEYWORDS.items() if name not in (*OF_THE_DTENSOR, "top_k")
}


@public(verifies=False)
@with_keywords(LOSS_KEYWORDS)
def cross_entropy(
    logits: Any, labels: Any, *, num_items: float | Tensor | None = None, return_metrics: bool = False, **keywords: Any
) -> Any:
    """Compute the loss of ``logits``, a DTensor with ``Shard(-1)`` on exactly one dimension of its mesh.

    The group and the columns of each rank are those of the DTensor. On the other dimensions of the mesh the logits are
    replicated, or cut along their tokens. The gradient of ``logits`` is a DTensor with the placements of ``logits``.

    ``labels`` decide what the result is:

    - Plain labels are those of this rank's tokens. The result is plain, and of this rank's tokens alone.
    - Labels that are a DTensor are those of all tokens. Their placements are those of ``logits``, with ``Replicate()``
      in the place of ``Shard(-1)``. The result is a DTensor of all tokens: where the tokens are cut, ``"none"`` has
      ``Shard()`` of the same dimension and ``"sum"`` has ``Partial()``.

    Overwrites: nothing, by default. PyTorch does not notice a write to the memory of a DTensor, so ``"auto"`` is
    ``"out_of_place"``. ``gradient="in_backward"`` writes the gradient over the logits, which saves their size in
    memory; ask for it if nothing else reads the logits.

    Collectives: those of :func:`vocab_parallel_ce.vocab_parallel_cross_entropy`, over the vocabulary's dimension of
    the mesh: one all_gather in forward, none in backward.

    Args:
        logits: ``[..., V]``, of a dtype of that function.
        labels: ``[...]`` int64 or int32 global ids, plain or a DTensor.
        num_items: plain; the same on every rank if ``labels`` are a DTensor.
        others: as in that function, except ``group``, ``vocab_size``, ``shard`` and ``shift``.

    Returns:
        As that function, with plain tensors or DTensors.

    Raises:
        TypeError: ``logits`` are no DTensor, or an option is not known.
        ValueError: ``logits`` or ``labels`` have other placements; or a mean or metrics are asked for of all tokens,
            which are on several ranks.
        others: as that function.
    """
    check_names(keywords, LOSS_KEYWORDS, cross_entropy)
    if num_items is not None and isinstance(num_items, Tensor):
        checks.check_tensor("num_items", num_items)
    local = _Local.of(logits, labels)
    reduction = divided_by(num_items, Settings(reduction=keywords.get("reduction", "mean"))).reduction
    if local.tokens_are_cut and (reduction == "mean" or return_metrics):
        what, remedy = "return_metrics", "pass the local tensors of labels, for the metrics of this rank's tokens"
        if reduction == "mean":
            what, remedy = "reduction", "pass num_items= of all ranks"
        raise ValueError(f"{what}: expected no mean of tokens that are on several ranks, got {reduction!r}; {remedy}")
    options = local.options | keywords | {"num_items": num_items, "return_metrics": return_metrics}
    result: Any = vocab_parallel_cross_entropy(local.logits, local.labels, **options)
    reduced = local.per_token if reduction == "none" else local.summed
    if not return_metrics:
        return reduced(result)
    loss, metrics = result
    predictions, accuracy, lse, z_loss = metrics
    metrics = LossMetrics(local.per_token(predictions), local.summed(accuracy), local.per_token(lse), reduced(z_loss))
    return reduced(loss), metrics


@public(verifies=False)
@with_keywords(LOG_PROB_KEYWORDS)
def token_log_probs(
    logits: Any, labels: Any, *, entropy: bool = False, outputs: Sequence[str] = (), **keywords: Any
) -> Any:
    """Compute :func:`vocab_parallel_ce.token_log_probs` of ``logits`` as :func:`cross_entropy` takes them.

    Overwrites: nothing, by default, as :func:`cross_entropy`.

    Collectives: as :func:`vocab_parallel_ce.token_log_probs`: one all_gather in forward, none in backward.

    Args:
        logits, labels: as in :func:`cross_entropy`.
        temperature: a tensor is plain, with one element or the shape of this rank's labels.
        others: as in that function, except ``group``, ``vocab_size`` and ``shard``.

    Returns:
        as :func:`vocab_parallel_ce.token_log_probs`. Plain if ``labels`` are. Otherwise DTensors with
        the placements of ``labels``.

    Raises:
        TypeError, ValueError: as :func:`cross_entropy`.
    """
    check_names(keywords, LOG_PROB_KEYWORDS, token_log_probs)
    local = _Local.of(logits, labels)
    options = local.options | keywords | {"entropy": entropy, "outputs": outputs}
    result: Any = over_tokens.token_log_probs(local.logits, local.labels, **options)
    if isinstance(result, torch.Tensor):
        return local.per_token(result)
    values = tuple(None if value is None else local.per_token(value) for value in result)
    return TokenLogProbs._make(values) if outputs else values


class _Local(NamedTuple):
    """This rank's part of a call."""

    logits: Tensor
    labels: Tensor
    options: dict[str, Any]  # group and shard
    given: Any  # the labels as they were given

    @classmethod
    def of(cls, logits: Any, labels: Any) -> _Local:
        """Check the placements, and return the local tensors."""
        checks.check_no_transforms()  # inside them a DTensor cannot be seen
        if not is_dtensor(logits):
            checks.check_tensor("logits", logits)
            raise TypeError(
                "logits: expected a DTensor, got a plain torch.Tensor; pass it to the function of the same purpose in "
                "vocab_parallel_ce, with group="
            )
        columns = local_columns("logits", logits)
        of_labels = labels
        if is_dtensor(labels):
            of_tokens = columns.placements_of_tokens
            if labels.device_mesh != logits.device_mesh or labels.placements != of_tokens:
                expected = f"the mesh of logits, {logits.device_mesh}, and the placements {of_tokens}"
                got = f"{labels.device_mesh} and {labels.placements}"
                raise ValueError(
                    f"labels: expected a DTensor with {expected}, got {got}; redistribute it, or pass this "
                    "rank's part as a plain tensor"
                )
            of_labels = labels.to_local()
        return cls(columns.logits, of_labels, {"group": columns.group, "shard": columns.shard}, labels)

    @property
    def tokens_are_cut(self) -> bool:
        """Whether a result of all tokens is asked for, and no rank has all of them."""
        return is_dtensor(self.given) and any(placement.is_shard() for placement in self.given.placements)

    def per_token(self, result: Tensor) -> Any:
        """Return the result of each token as the labels are: plain, or a DTensor."""
        return result if not is_dtensor(self.given) else self._as_dtensor(result, self.given.placements)

    def summed(self, result: Tensor) -> Any:
        """Return a result of all tokens, which is a sum if they are cut."""
        if not is_dtensor(self.given):
            return result
        from torch.distributed.tensor import Partial

        return self._as_dtensor(result, [Partial() if p.is_shard() else p for p in self.given.placements])

    def _as_dtensor(self, result: Tensor, placements: Any) -> Any:
        from torch.distributed.tensor import DTensor

        shape = self.given.shape if result.dim() else result.shape
        stride = torch.empty(shape, device="meta").stride()
        mesh = self.given.device_mesh
        return DTensor.from_local(result, mesh, placements, run_check=False, shape=shape, stride=stride)
