"""Logits that hold a gradient: a second call over them is refused, until somebody has written there."""

from __future__ import annotations

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from tests.support.budget import assert_within_budget
from tests.support.inputs import batch
from tests.support.oracle import cross_entropy_fp64, cross_entropy_same_dtype
from vocab_parallel_ce import (
    cross_entropy_backward,
    cross_entropy_forward,
    parallel_cross_entropy,
    token_log_probs,
    vocab_parallel_cross_entropy,
)

REFUSAL = "^logits: .* an earlier call has left its gradient; .* gradient='out_of_place'"
IN_PLACE = ("in_forward", "in_backward")


class Case:
    """Logits as a model produces them, and losses over them."""

    def __init__(self, impl_device, rows=8, columns=30):
        self.impl, self.device = impl_device
        self.values, self.labels = (t.to(self.device) for t in batch("peaked", rows=rows, vocab_size=columns))
        self.logits = self.values.clone().requires_grad_() * 1

    def loss(self, logits=None, labels=None, **options):
        logits = self.logits if logits is None else logits
        labels = self.labels[: logits.shape[0]] if labels is None else labels
        return vocab_parallel_cross_entropy(logits, labels, impl=self.impl, **options)

    def overwrite(self, gradient="in_backward", logits=None):
        loss = self.loss(logits, gradient=gradient)
        if gradient == "in_backward":
            torch.autograd.grad(loss, self.logits if logits is None else logits, retain_graph=True)
        return loss

    def assert_loss(self, loss, logits, labels):
        want, peer = (f(logits.cpu(), labels.cpu()) for f in (cross_entropy_fp64, cross_entropy_same_dtype))
        assert_within_budget(loss, want.loss, peer.loss)


SECOND_CALLS = {
    "loss": lambda case: case.loss(),
    "out of place": lambda case: case.loss(gradient="out_of_place"),
    "in forward": lambda case: case.loss(gradient="in_forward"),
    "unreduced": lambda case: case.loss(reduction="none"),
    "detached": lambda case: case.loss(case.logits.detach()),
    "view": lambda case: case.loss(case.logits.view(2, 4, -1), case.labels.view(2, 4)),
    "slice": lambda case: case.loss(case.logits[3:5]),
    "transposed": lambda case: case.loss(case.logits.view(2, 4, -1).transpose(0, 1), case.labels.view(4, 2)),
    "log-probs": lambda case: token_log_probs(case.logits, case.labels, impl=case.impl),
}


@pytest.mark.quick(2)
@pytest.mark.parametrize("second", SECOND_CALLS)
@pytest.mark.parametrize("gradient", IN_PLACE)
def test_a_second_call_over_a_gradient_is_refused(impl_device, gradient, second):
    """It computed a wrong loss, which was printed before backward complained."""
    case = Case(impl_device)
    case.overwrite(gradient)
    kept, version = case.logits.detach().clone(), case.logits._version
    for grad_enabled in (True, False):
        with torch.set_grad_enabled(grad_enabled), pytest.raises(ValueError, match=REFUSAL):
            SECOND_CALLS[second](case)
    assert torch.equal(case.logits, kept) and case.logits._version == version


@pytest.mark.reference
def test_a_call_of_transformer_engine_is_refused_and_its_pair_is_not():
    case = Case(("auto", "cpu"))
    parallel_cross_entropy(case.logits, case.labels, reduce_loss=True)
    with pytest.raises(ValueError, match=REFUSAL):
        parallel_cross_entropy(case.logits, case.labels, reduce_loss=True)
    logits = case.values.clone()
    for _ in range(2):
        _, grad = cross_entropy_forward(logits, case.labels, 0.0, True, None, -100)
        assert cross_entropy_backward(grad, torch.tensor(1.0)) is logits


def test_logits_that_somebody_has_written_to_since_are_logits(impl_device):
    case = Case(impl_device)
    for gradient in (*IN_PLACE, "in_forward"):
        case.overwrite(gradient)
        with torch.no_grad():
            case.logits.copy_(case.values)
        case.assert_loss(case.loss(gradient="out_of_place"), case.values, case.labels)
    case.overwrite()
    torch.autograd.graph.increment_version(case.logits)
    case.loss()


def test_other_rows_of_the_same_memory_are_logits(impl_device):
    """Losses over chunks of one tensor, one backward after another: only what was overwritten is refused."""
    case = Case(impl_device)
    chunks = [case.logits[:3], case.logits[3:4], case.logits[4:]]
    bounds = [slice(0, 3), slice(3, 4), slice(4, 8)]
    for chunk, rows in zip(chunks, bounds, strict=True):
        loss = case.loss(chunk, case.labels[rows])
        case.assert_loss(loss, case.values[rows], case.labels[rows])
        torch.autograd.grad(loss, chunk)
    for chunk, rows in zip(chunks, bounds, strict=True):
        with pytest.raises(ValueError, match=REFUSAL):
            case.loss(chunk, case.labels[rows])


def test_interleaved_rows_are_told_apart(impl_device):
    """``[B, S, V]`` cut along S: the address ranges overlap, and the rows do not."""
    case = Case(impl_device)
    logits, labels, values = (t.view(2, 4, *t.shape[1:]) for t in (case.logits, case.labels, case.values))
    torch.autograd.grad(case.loss(logits[:, :2], labels[:, :2]), logits)
    loss = case.loss(logits[:, 2:], labels[:, 2:])
    case.assert_loss(loss, values[:, 2:], labels[:, 2:])
    for rows in (slice(1, 3), slice(0, 1), slice(0, 4, 2)):
        with pytest.raises(ValueError, match=REFUSAL):
            case.loss(logits[:, rows], labels[:, rows])


@pytest.mark.reference
def test_memory_of_a_new_producer_is_logits():
    """A replayed CUDA graph fills static logits anew, which raises no version; its node is a new one."""

    class Replay(torch.autograd.Function):
        @staticmethod
        def forward(ctx, anchor, static):
            return static.detach()

        @staticmethod
        def backward(ctx, grad):
            return grad.sum(), None

    static, labels = torch.randn(4, 9), torch.tensor([1, 2, 3, 4])
    fresh, anchor = static.clone(), torch.ones((), requires_grad=True)
    losses = []
    for _ in range(3):
        static.data.copy_(fresh)
        logits = Replay.apply(anchor, static)
        losses.append(vocab_parallel_cross_entropy(logits, labels))
        losses[-1].backward()
    assert losses[0] == losses[1] == losses[2]
    with pytest.raises(ValueError, match=REFUSAL):
        vocab_parallel_cross_entropy(static, labels)


@pytest.mark.parametrize("gradient", IN_PLACE)
def test_memory_whose_first_tensor_is_gone(impl_device, gradient):
    """``logits = logits.detach()`` for a metric: the memory outlives the tensor that the loss saw."""
    case = Case(impl_device)
    case.overwrite(gradient)
    case.logits = case.logits.detach()
    with pytest.raises(ValueError, match=REFUSAL):
        case.loss()


@pytest.mark.parametrize("gradient", IN_PLACE)
def test_two_tensors_of_one_memory_are_both_known(impl_device, gradient):
    """A gradient written in forward forgot the records of the same storage before it."""
    case = Case(impl_device)
    memory = case.values.clone()
    halves = [memory[:4].requires_grad_(), memory.detach()[4:].requires_grad_()]
    for half, labels in zip(halves, (case.labels[:4], case.labels[4:]), strict=True):
        torch.autograd.grad(case.loss(half, labels, gradient=gradient), half)
    for half, labels in zip(halves, (case.labels[:4], case.labels[4:]), strict=True):
        with torch.no_grad(), pytest.raises(ValueError, match=REFUSAL):
            case.loss(half, labels)


@pytest.mark.reference
@pytest.mark.parametrize("copies", (False, True))
def test_hooks_that_hand_over_another_tensor(copies):
    """In place by name: hooks of the same memory overwrite the logits, hooks that copy overwrite the copy."""
    case = Case(("auto", "cpu"))
    with saved_tensors_hooks(lambda t: t.clone() if copies else t.detach(), lambda t: t):
        loss = case.loss(gradient="in_backward")
    loss.backward()
    if copies:
        case.assert_loss(case.loss(gradient="out_of_place"), case.values, case.labels)
    else:
        with pytest.raises(ValueError, match=REFUSAL):
            case.loss()


@pytest.mark.parametrize("gradient", IN_PLACE)
def test_memory_that_a_freed_leaf_has_overwritten(impl_device, gradient):
    """A reentrant checkpoint calls over a detached leaf of the caller's logits, which dies with its graph."""
    case = Case(impl_device)
    checkpoint(lambda x: case.loss(x, gradient=gradient), case.logits, use_reentrant=True).backward()
    for logits in (case.logits, case.logits.detach()):
        with torch.no_grad(), pytest.raises(ValueError, match=REFUSAL):
            case.loss(logits)
