"""Sum the gradient of hidden states over the ranks of a column-parallel matmul."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vocab_parallel_ce import checks
from vocab_parallel_ce.collectives import group_position
from vocab_parallel_ce.dtensor import process_group_of
from vocab_parallel_ce.summed import copied


def copy_to_ranks(hidden: Tensor, group: Any) -> Tensor:
    """Return ``hidden``, whose gradient is summed over the ranks of ``group`` in backward.

    For a column-parallel matmul in front of a loss over logits: each rank's logits ``hidden @ weight.T`` give it the
    part of the gradient that its own columns know. Megatron-LM's ``copy_to_tensor_model_parallel_region`` is the same.
    ``linear_cross_entropy`` and the other functions of heads sum it themselves: pass them ``hidden`` as it is. They
    raise if they get the result.

    Overwrites nothing, and copies nothing in the forward pass. Backward keeps the dtype of the gradient. It may be
    differentiated again.

    Collectives: none in the forward pass; one all_reduce of the gradient in backward, on every rank, or on none.
    None for one rank, for None, and if ``hidden`` requires no gradient: then it is returned itself.

    Args:
        hidden: any plain tensor, the same on every rank.
        group: the process group of the ranks that share the vocabulary, or a ``DeviceMesh`` of one dimension; or None.

    Raises:
        TypeError: ``hidden`` is no plain tensor, or ``group`` no group.
        ValueError: this rank is not in the group.

    Example:
        >>> from vocab_parallel_ce import copy_to_ranks, vocab_parallel_cross_entropy
        >>> hidden, head = torch.ones(2, 3, requires_grad=True), torch.zeros(4, 3)
        >>> logits = copy_to_ranks(hidden, group=None) @ head.t()  # on several ranks: their group
        >>> vocab_parallel_cross_entropy(logits, torch.tensor([0, 3]), group=None).backward()
    """
    checks.check_tensor("hidden", hidden)
    group = process_group_of(group)
    if group_position(group)[1] == 1 or not (torch.is_grad_enabled() and hidden.requires_grad):
        return hidden
    if checks.is_traced():
        from vocab_parallel_ce import compile  # noqa: F401  # it defines the operator that sums
    return copied(hidden, group)
