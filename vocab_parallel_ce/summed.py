"""The sum of a gradient over the ranks, in backward, and checks that it is made once."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node

from vocab_parallel_ce.checks import is_traced
from vocab_parallel_ce.collectives import NamedGroup, summed_over_ranks

# Nodes of one input that only view or cast it.
_VIEWS = frozenset(
    f"{name}Backward{i}"
    for i in (0, 1)
    for name in (
        *("View", "UnsafeView", "ReshapeAlias", "Slice", "Select", "Squeeze", "Unsqueeze", "Transpose", "T", "Permute"),
        *("Expand", "Alias", "AsStrided", "Split", "Unbind", "Index", "IndexSelect", "Clone", "ToCopy"),
    )
)
_PRODUCTS = {"MmBackward0": -2, "AddmmBackward0": -2, "BmmBackward0": -2, "BaddbmmBackward0": -2, "LinearBackward0": 0}


def copied(tensor: Tensor, group: Any) -> Tensor:
    """Return ``tensor``, whose gradient is summed over the ranks of ``group`` in backward.

    Collectives: one all_reduce in backward if it gives ``tensor`` a gradient.
    """
    result: Tensor = CopyToRanks.apply(tensor, group.group_name if is_traced() else group)
    return result


class CopyToRanks(torch.autograd.Function):
    """Forward: identity. Backward: the sum over the ranks."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Any) -> Tensor:
        ctx.group = group
        ctx.set_materialize_grads(False)
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, None]:
        if grad is None:
            return None, None
        if isinstance(ctx.group, str):  # in a graph, whose operators `compile` has defined
            return torch.ops.vocab_parallel_ce.sum_over_ranks(grad, ctx.group), None
        return _Sum.apply(grad, ctx.group), None


class _Sum(torch.autograd.Function):
    """Forward: the sum over the ranks. Backward: identity, as every rank holds the gradient of the sum."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return summed_over_ranks(part, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return CopyToRanks.apply(grad, ctx.group), None


# Megatron-LM's node is the same, and has its group under the same name.
_COPIES = ("CopyToRanksBackward", "_CopyToModelParallelRegionBackward")


def _behind_views(node: Node | None) -> Node | None:
    """Return the node that made what ``node`` only views or casts."""
    while type(node).__name__ in _VIEWS:
        node = node.next_functions[0][0]  # type: ignore[union-attr]
    return node


def check_summed_once(hidden: Tensor, group: Any) -> None:
    """Raise ValueError if a head would sum a gradient that ``copy_to_ranks`` sums over the same ranks."""
    node = _behind_views(hidden.grad_fn)
    if type(node).__name__ not in _COPIES:
        return
    other, own = NamedGroup.of(getattr(node, "group", None)), NamedGroup.of(group)
    if other is None or own is None or other.ranks == own.ranks:
        raise ValueError(
            "hidden: expected its gradient to be summed once, got the result of copy_to_ranks or of Megatron-LM's "
            "copy, whose sum over the ranks this head would sum again; pass hidden as it is, or "
            "reduce_hidden_grad=False"
        )


def check_summed(logits: Tensor) -> None:
    """Raise ValueError if logits of several ranks are a product whose hidden states get a part of their gradient.

    Only plain products are looked at. A custom Function, as of Megatron-LM or DTensor, may sum what it gets.
    """
    product = _behind_views(logits.grad_fn) if torch.is_grad_enabled() else None
    position = _PRODUCTS.get(type(product).__name__)
    if position is None:
        return
    hidden = _behind_views(product.next_functions[position][0])  # type: ignore[union-attr]
    is_known = isinstance(hidden, Node) and not isinstance(hidden, torch.autograd.function.BackwardCFunction)
    # A parameter is the head, with hidden states on its other side.
    if is_known and not isinstance(getattr(hidden, "variable", None), torch.nn.Parameter):
        raise ValueError(
            "logits: expected a product of copy_to_ranks(hidden, group), got one of hidden states whose gradient is "
            "summed over no ranks: each rank has its columns' part of it; pass them through copy_to_ranks"
        )
