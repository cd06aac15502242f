"""Tokens of a policy, and what the functions of RL frameworks must return for them.

The oracle is ``oracle.py`` in fp64. Beside it stands the same by PyTorch in the tensors' dtype with fp32 softmax, or
the framework's own function.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.support.cases.inputs import batch, with_a_broad_row
from tests.support.ranks.case import even
from tests.support.ranks.pools import device_of, in_ranks
from tests.support.truth import oracle
from tests.support.truth.budget import assert_within_budget

SEQUENCES, LENGTH, COLUMNS, WIDTH = 2, 4, 20, 16
in_two_ranks = in_ranks((2,), (), (2,))
on_devices = pytest.mark.parametrize(
    "device", [pytest.param("cpu", marks=pytest.mark.reference), pytest.param("cuda", marks=pytest.mark.cuda)]
)


class Policy(NamedTuple):
    """What a call takes: logits, or hidden states and a head; and the gradients of its outputs."""

    leaves: tuple[Tensor, ...]  # [2, 4, V]; or [2, 4, D] and [V, D]
    labels: Tensor  # [2, 4] int64
    grads: tuple[Tensor, Tensor]  # [2, 4] fp32 of log-probabilities and of entropies; 0 in the first token

    def to(self, device: Any) -> Policy:
        leaves, grads = (tuple(t.to(device) for t in tensors) for tensors in (self.leaves, self.grads))
        return Policy(leaves, self.labels.to(device), grads)  # type: ignore[arg-type]


class Outcome(NamedTuple):
    """What a call got; None where it returns no such thing."""

    log_probs: Tensor | None
    entropy: Tensor | None
    grads: tuple[Tensor | None, ...]  # of the leaves


def policy(
    dtype: torch.dtype = torch.float32, kind: str = "some_ignored", *, head: bool = False, device: Any = "cpu"
) -> Policy:
    """Peaked logits, of which some labels are -100; with ``head`` those of orthonormal hidden states."""
    made = with_a_broad_row(batch(kind, rows=SEQUENCES * LENGTH - 1, vocab_size=COLUMNS, shards=2, dtype=dtype))
    generator = torch.Generator().manual_seed(1)
    shape, leaves = (SEQUENCES, LENGTH), (made.logits.view(SEQUENCES, LENGTH, COLUMNS),)
    if head:
        hidden = torch.linalg.qr(torch.randn(WIDTH, SEQUENCES * LENGTH, generator=generator))[0].T
        weight = made.logits.float().T @ hidden
        leaves = (hidden.reshape(*shape, WIDTH).to(dtype), weight.to(dtype))
    grads = torch.randn(2, *shape, generator=generator).bfloat16().float()  # outputs of 16 bits round none of them
    grads[:, 0, 0] = 0
    return Policy(leaves, made.labels.view(shape), (grads[0], grads[1])).to(device)


def leaves_of(inputs: Policy) -> tuple[Tensor, ...]:
    """Copies that require a gradient."""
    return tuple(leaf.detach().clone().requires_grad_() for leaf in inputs.leaves)


def backward(outputs: Sequence[Tensor | None], grads: Sequence[Tensor], **options: Any) -> None:
    """One backward of the outputs that there are."""
    pairs = [(out, grad.to(out.dtype)) for out, grad in zip(outputs, grads, strict=True) if out is not None]
    torch.autograd.backward([out for out, _ in pairs], [grad for _, grad in pairs], **options)


def reference(inputs: Policy, dtype: torch.dtype, wanted: Sequence[bool] = (True, True), **options: Any) -> Outcome:
    """PyTorch's result from leaves of ``dtype``: log-probabilities and entropies, and the gradients of those wanted."""
    # Gradients of 16 bits are not rounded at the end: the budget adds that. Those of logits are.
    leaves = [leaf.detach().to(dtype).to(torch.promote_types(dtype, torch.float32)) for leaf in inputs.leaves]
    leaves = [leaf.requires_grad_() for leaf in leaves]
    logits = F.linear(*leaves).to(dtype) if len(leaves) == 2 else leaves[0]
    values = oracle.values(logits if dtype == torch.float64 else logits.float(), inputs.labels, **options)
    outputs = values.log_probs, values.entropy
    backward([out if is_wanted else None for out, is_wanted in zip(outputs, wanted, strict=True)], inputs.grads)
    return Outcome(values.log_probs.detach(), values.entropy.detach(), tuple(leaf.grad for leaf in leaves))


def assert_right(
    actual: Outcome, inputs: Policy, native: Outcome | None = None, *, roundings: int = 1, **options: Any
) -> None:
    """Fail unless all of it is nearly as near to fp64 as PyTorch, or as ``native``.

    ``native`` is what the framework's function gets; ``roundings`` are those of the gradient.
    """
    wanted = actual.log_probs is not None, actual.entropy is not None
    truth = reference(inputs, torch.float64, wanted, **options)
    peer = native or reference(inputs, inputs.leaves[0].dtype, wanted, **options)
    ignored = inputs.labels == -100
    for value, true, other in zip(actual[:2], truth[:2], peer[:2], strict=True):
        if value is not None:
            assert_within_budget(value, true, other.to(value.dtype))
    is_head = len(actual.grads) == 2  # whose entropies of ignored tokens are 0 too
    assert actual.log_probs is None or not actual.log_probs[ignored].any()
    assert actual.entropy is None or not is_head or not actual.entropy[ignored].any()
    if is_head or actual.entropy is None:
        assert not actual.grads[0][ignored].any()
    for grad, true, other in zip(actual.grads, truth.grads, peer.grads, strict=True):
        if grad is not None:
            assert_within_budget(grad, true, other, roundings=roundings)


def shards(inputs: Policy, rank: int, group: Any) -> Policy:
    """In a rank: with its columns of the last leaf, which are equal for all ranks."""
    *others, last = inputs.leaves
    start, stop = columns_of(rank, group)
    part = last.narrow(-1 if not others else 0, start, stop - start).contiguous()
    return inputs._replace(leaves=(*others, part)).to(device_of(rank, group))


def columns_of(rank: int, group: Any) -> tuple[int, int]:
    """In a rank: the first of its columns, and the first behind them."""
    return even(COLUMNS // group.size(), group.size())[rank]


def next_tokens(inputs: Policy) -> Policy:
    """The same tokens as targets before they are rolled: that of each but the last is the next one's label."""
    return inputs._replace(labels=inputs.labels.roll(1, dims=-1))


def without_the_last(inputs: Policy) -> Policy:
    """What counts in fp64: the last token of a sequence has no next one."""
    labels = inputs.labels.clone()
    labels[:, -1] = -100
    return inputs._replace(labels=labels)


def whole(results: Sequence[Outcome]) -> Outcome:
    """What the ranks got together: the same outputs, bit for bit, and the gradient of all columns."""
    for actual in results:
        for value, first in zip(actual[:2], results[0][:2], strict=True):
            assert (value is None and first is None) or torch.equal(value, first)
    *_, grads = results[0]
    parts = [actual.grads[-1] for actual in results]
    return results[0]._replace(grads=(*grads[:-1], torch.cat(parts, -1 if len(grads) == 1 else 0)))


def real_module(name: str) -> Any:
    """The framework's native module, or a skip that names what is missing."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        pytest.skip(f"{name} cannot be imported: {error}")
