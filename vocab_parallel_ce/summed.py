"""The sum of a gradient over the ranks, in backward, and checks that it is made once."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node

from vocab_parallel_ce.checks import is_traced
from vocab_parallel_ce.collectives import NamedGroup, summed_over_ranks

_JOINS = {"CatBackward0", "StackBackward0", "AddBackward0", "SubBackward0", "WhereBackward0"}  # of several inputs
_MOST_NODES = 64
_PRODUCTS = {"MmBackward0": -2, "AddmmBackward0": -2, "BmmBackward0": -2, "BaddbmmBackward0": -2, "LinearBackward0": 0}


def copied(tensor: Tensor, group: Any) -> Tensor:
    """Return ``tensor``, whose gradient is summed over the ranks of ``group`` in backward.

    Collectives: one all_reduce in backward if it gives ``tensor`` a gradient.
    """
    result: Tensor = CopyToRanks.apply(tensor, group.group_name if is_traced() else group)
    return result


def summed(part: Tensor, group: Any) -> Tensor:
    """Return the sum of ``part`` over the ranks, whose gradient is that of each part.

    Collectives: one all_reduce.
    """
    result: Tensor = _Sum.apply(part, group)
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
        return summed(grad, ctx.group), None


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


def _is_custom(node: Node | None) -> bool:
    return isinstance(node, torch.autograd.function.BackwardCFunction)


def _origins(node: Node | None) -> list[Node]:
    """Return the nearest nodes that do more than hand on the gradient, as views, casts and factors do.

    These are custom Functions, products, leaves, and what has several inputs.
    """
    found, nodes = list[Node](), [node]
    for _ in range(_MOST_NODES):
        if not nodes:
            break
        node = nodes.pop()
        following = [each for each, _ in node.next_functions if each is not None] if node is not None else []
        name = type(node).__name__
        if node is None or _is_custom(node) or name in _PRODUCTS or (len(following) != 1 and name not in _JOINS):
            found += [] if node is None else [node]
        else:
            nodes += following
    return found


def check_summed_once(hidden: Tensor, group: Any) -> None:
    """Raise ValueError if a head would sum a gradient that ``copy_to_ranks`` sums over the same ranks."""
    for node in _origins(hidden.grad_fn):
        if type(node).__name__ not in _COPIES:
            continue
        other, own = NamedGroup.of(getattr(node, "group", None)), NamedGroup.of(group)
        if other is None or own is None or other.ranks == own.ranks:
            raise ValueError(
                "hidden: expected its gradient to be summed once, got the result of copy_to_ranks or of Megatron-LM's "
                "copy, whose sum over the ranks this head would sum again; pass hidden as it is, or "
                "options=HeadOptions(reduce_hidden_grad=False)"
            )


def check_summed(logits: Tensor) -> None:
    """Raise ValueError if logits of several ranks are a product whose hidden states get a part of their gradient.

    Only plain products are looked at. A custom Function, as of Megatron-LM or DTensor, may sum what it gets.
    """
    for product in _origins(logits.grad_fn) if torch.is_grad_enabled() else ():
        position = _PRODUCTS.get(type(product).__name__)
        if position is None:
            continue
        hidden = _origins(product.next_functions[position][0])
        others = [each for operand, _ in product.next_functions for each in _origins(operand)]
        # A parameter is the head, with hidden states on its other side.
        is_head = all(isinstance(getattr(each, "variable", None), torch.nn.Parameter) for each in hidden)
        if not is_head and not any(map(_is_custom, others)):
            raise ValueError(
                "logits: expected a product of copy_to_ranks(hidden, group), got one of hidden states whose gradient "
                "is summed over no ranks: each rank has its columns' part of it; pass them through copy_to_ranks"
            )
