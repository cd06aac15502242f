"""The loss and the log-probabilities of logits that are DTensors, cut over the vocabulary.

Nothing is gathered and nothing is redistributed: each rank computes with its local tensor. The columns of every rank
follow from the global shape. So all ranks agree on them if the last one has fewer columns, or none.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from vocab_parallel_ce import checks
from vocab_parallel_ce.api import logits as over_logits
from vocab_parallel_ce.api.call import Outputs, public
from vocab_parallel_ce.dtensor import is_dtensor
from vocab_parallel_ce.integrations.columns import local_columns


@public()
def cross_entropy(
    logits: Any,
    labels: Any,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    reduction: str = "mean",
    num_items: float | Tensor | None = None,
    outputs: Sequence[str] = (),
    gradient: str = "auto",
    impl: str = "auto",
    check_labels: bool | str = "auto",
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
    the mesh: one all_gather in the forward pass, none in backward.

    Args:
        logits: ``[..., V]``, of a dtype of that function.
        labels: ``[...]`` int64 or int32 global ids, plain or a DTensor.
        num_items: plain; the same on every rank if ``labels`` are a DTensor.
        others: as in that function, except ``group``, ``vocab_size`` and ``class_weight``.

    Returns:
        As that function, with plain tensors or DTensors: those of each token are as the labels are.

    Raises:
        TypeError: ``logits`` are no DTensor, ``labels`` are no ids, or an option is not known.
        ValueError: ``logits`` or ``labels`` have other placements; or a mean is asked for of all tokens, which
            are on several ranks.
        others: as that function.

    Example:
        >>> from torch.distributed.tensor import DTensor, Shard
        >>> from vocab_parallel_ce.integrations import dtensor
        >>> torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
        >>> mesh = torch.distributed.init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
        >>> logits = DTensor.from_local(torch.zeros(2, 4), mesh, [Shard(-1)])
        >>> round(dtensor.cross_entropy(logits, torch.tensor([1, 2])).item(), 4)
        1.3863
        >>> torch.distributed.destroy_process_group()
    """
    if num_items is not None and isinstance(num_items, Tensor):
        checks.check_tensor("num_items", num_items)
    local = _Local.of(logits, labels)
    if reduction == "mean" and num_items is None and local.tokens_are_cut:
        raise ValueError(
            "reduction: expected no mean of tokens that are on several ranks, got 'mean'; pass num_items= of all ranks"
        )
    result = over_logits.vocab_parallel_cross_entropy(
        local.logits,
        local.labels,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        z_loss=z_loss,
        softcap=softcap,
        logit_scale=logit_scale,
        reduction=reduction,
        num_items=num_items,
        outputs=outputs,
        gradient=gradient,
        impl=impl,
        check_labels=check_labels,
        **local.options,
    )
    return local.placed(result)


@public()
def token_log_probs(
    logits: Any,
    labels: Any,
    *,
    ignore_index: int = -100,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    temperature: float | Tensor = 1.0,
    threshold: Tensor | None = None,
    outputs: Sequence[str] = (),
    gradient: str = "auto",
    impl: str = "auto",
    check_labels: bool | str = "auto",
) -> Any:
    """Compute :func:`vocab_parallel_ce.token_log_probs` of ``logits`` as :func:`cross_entropy` takes them.

    Overwrites: nothing, by default, as :func:`cross_entropy`.

    Collectives: as :func:`vocab_parallel_ce.token_log_probs`: one all_gather in the forward pass, none in backward.

    Args:
        logits, labels: as in :func:`cross_entropy`.
        temperature, threshold: a tensor is plain, with one element or the shape of this rank's labels;
            ``sampling_threshold`` takes ``logits.to_local()``, with a group.
        others: as in that function, except ``group`` and ``vocab_size``.

    Returns:
        as :func:`vocab_parallel_ce.token_log_probs`. Plain if ``labels`` are. Otherwise DTensors with
        the placements of ``labels``.

    Raises:
        TypeError, ValueError: as :func:`cross_entropy`.

    Example:
        >>> from torch.distributed.tensor import DTensor, Shard
        >>> from vocab_parallel_ce.integrations import dtensor
        >>> torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
        >>> mesh = torch.distributed.init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
        >>> logits = DTensor.from_local(torch.zeros(2, 4), mesh, [Shard(-1)])
        >>> dtensor.token_log_probs(logits, torch.tensor([1, 2]))
        tensor([-1.3863, -1.3863])
        >>> torch.distributed.destroy_process_group()
    """
    local = _Local.of(logits, labels)
    result = over_logits.token_log_probs(
        local.logits,
        local.labels,
        ignore_index=ignore_index,
        softcap=softcap,
        logit_scale=logit_scale,
        temperature=temperature,
        threshold=threshold,
        outputs=outputs,
        gradient=gradient,
        impl=impl,
        check_labels=check_labels,
        **local.options,
    )
    return local.placed(result)


class _Local(NamedTuple):
    """This rank's part of a call."""

    logits: Tensor
    labels: Tensor
    options: dict[str, Any]  # group, and the columns as vocab_size
    passed: Any  # the labels as the caller passed them

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
        local_labels = labels
        if is_dtensor(labels):
            placements = columns.placements_of_tokens
            if labels.device_mesh != logits.device_mesh or labels.placements != placements:
                expected = f"the mesh of logits, {logits.device_mesh}, and the placements {placements}"
                got = f"{labels.device_mesh} and {labels.placements}"
                raise ValueError(
                    f"labels: expected a DTensor with {expected}, got {got}; redistribute it, or pass this "
                    "rank's part as a plain tensor"
                )
            local_labels = labels.to_local()
        checks.check_labels(local_labels, columns.logits)  # probabilities would be as DTensors of logits' shape
        return cls(columns.logits, local_labels, {"group": columns.group, "vocab_size": columns.shard}, labels)

    @property
    def tokens_are_cut(self) -> bool:
        """Whether a result of all tokens is asked for, and no rank has all of them."""
        return is_dtensor(self.passed) and any(placement.is_shard() for placement in self.passed.placements)

    def placed(self, result: Tensor | Outputs) -> Any:
        """Return the results as the labels are: plain, or DTensors."""
        if not is_dtensor(self.passed):
            return result
        if isinstance(result, Outputs):
            return tree_map(self._as_dtensor, result)
        return self._as_dtensor(result)

    def _as_dtensor(self, result: Tensor) -> Any:
        from torch.distributed.tensor import DTensor, Partial

        shape, placements = self.passed.shape, self.passed.placements
        if not result.dim():  # of all tokens: a sum, if they are cut
            shape, placements = result.shape, [Partial() if p.is_shard() else p for p in placements]
        stride = torch.empty(shape, device="meta").stride()
        mesh = self.passed.device_mesh
        return DTensor.from_local(result, mesh, placements, run_check=False, shape=shape, stride=stride)
