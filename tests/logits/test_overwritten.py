"""Logits that hold a gradient: a second call over them is refused, until somebody has written there."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import vocab_parallel_ce as vp
from tests.support.cases.logits import Leaves
from tests.support.truth.budget import assert_within_budget
from tests.support.truth.oracle import cross_entropy_fp64, cross_entropy_same_dtype

REFUSAL = "^logits: .* an earlier call has left its gradient; .* gradient='out_of_place'"
IN_PLACE = ("in_forward", "in_backward")


class Overwritten(Leaves):
    def __init__(self, impl_device):
        super().__init__(impl_device, "peaked", rows=8, columns=30)

    def overwrite(self, gradient="in_backward"):
        loss = self.loss(gradient=gradient)
        if gradient == "in_backward":
            torch.autograd.grad(loss, self.logits)

    def without_the_first_tensor(self):
        """``logits = logits.detach()`` for a metric: the memory outlives the tensor that the loss saw."""
        self.logits = self.logits.detach()
        return self.loss()

    def assert_refused(self, *call):
        with pytest.raises(ValueError, match=REFUSAL):
            self.loss(*call)

    def assert_loss(self, loss, rows=slice(None)):
        truth, peer = (f(*(t[rows] for t in self.made)) for f in (cross_entropy_fp64, cross_entropy_same_dtype))
        assert_within_budget(loss, truth.loss, peer.loss)


SECOND_CALLS = {
    "loss": lambda case: case.loss(),
    "out of place": lambda case: case.loss(gradient="out_of_place"),
    "in forward": lambda case: case.loss(gradient="in_forward"),
    "unreduced": lambda case: case.loss(reduction="none"),
    "detached": lambda case: case.loss(case.logits.detach()),
    "view": lambda case: case.loss(case.logits.view(2, 4, -1), case.labels.view(2, 4)),
    "slice": lambda case: case.loss(case.logits[3:5]),
    "transposed": lambda case: case.loss(case.logits.view(2, 4, -1).transpose(0, 1), case.labels.view(4, 2)),
    "log-probs": lambda case: vp.token_log_probs(case.logits, case.labels, impl=case.impl),
    "first tensor gone": Overwritten.without_the_first_tensor,
}


@pytest.mark.quick(2)
@pytest.mark.parametrize("second", SECOND_CALLS)
@pytest.mark.parametrize("gradient", IN_PLACE)
def test_a_second_call_over_a_gradient_is_refused(impl_device, gradient, second):
    """It computed a wrong loss, which was printed before backward complained."""
    case = Overwritten(impl_device)
    case.overwrite(gradient)
    kept, version = case.logits.detach().clone(), case.logits._version
    for grad_enabled in (True, False):
        with torch.set_grad_enabled(grad_enabled), pytest.raises(ValueError, match=REFUSAL):
            SECOND_CALLS[second](case)
    assert torch.equal(case.logits, kept) and case.logits._version == version


@pytest.mark.reference
def test_calls_of_transformer_engine_are_refused_and_its_pair_over_its_gradient_is_not():
    case = Overwritten(("auto", "cpu"))
    vp.parallel_cross_entropy(case.logits, case.labels, reduce_loss=True, overwrite_input=True).backward()
    with pytest.raises(ValueError, match=REFUSAL):
        vp.parallel_cross_entropy(case.logits, case.labels, reduce_loss=True)
    with pytest.raises(ValueError, match=REFUSAL):
        vp.cross_entropy_forward(case.logits.detach(), case.labels, 0.0, True, None, -100)
    logits = case.values.clone()
    for _ in range(2):
        _, grad = vp.cross_entropy_forward(logits, case.labels, 0.0, True, None, -100)
        assert vp.cross_entropy_backward(grad, torch.tensor(1.0)) is logits


def test_logits_that_somebody_has_written_to_since_are_logits(impl_device):
    case = Overwritten(impl_device)
    for gradient in (*IN_PLACE, "in_forward"):
        case.overwrite(gradient)
        with torch.no_grad():
            case.logits.copy_(case.values)
        case.assert_loss(case.loss(gradient="out_of_place"))
    case.overwrite()
    torch.autograd.graph.increment_version(case.logits)
    case.loss()


def test_other_rows_of_the_same_memory_are_logits(impl_device):
    """Losses over chunks of one tensor, one backward after another: only what was overwritten is refused."""
    case = Overwritten(impl_device)
    chunks = [(rows, case.logits[rows]) for rows in (slice(0, 3), slice(3, 4), slice(4, 8))]
    for rows, chunk in chunks:
        loss = case.loss(chunk, case.labels[rows], gradient="in_backward")
        case.assert_loss(loss, rows)
        torch.autograd.grad(loss, chunk)
    for rows, chunk in chunks:
        case.assert_refused(chunk, case.labels[rows])


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
        losses.append(vp.vocab_parallel_cross_entropy(logits, labels, gradient="in_backward"))
        losses[-1].backward()
    assert losses[0] == losses[1] == losses[2]
    with pytest.raises(ValueError, match=REFUSAL):
        vp.vocab_parallel_cross_entropy(static, labels)


@pytest.mark.parametrize("gradient", IN_PLACE)
def test_two_tensors_of_one_memory_are_both_known(impl_device, gradient):
    """A gradient written in forward forgot the records of the same storage before it."""
    case = Overwritten(impl_device)
    memory = case.values.clone()
    halves = [(memory[:4].requires_grad_(), case.labels[:4]), (memory.detach()[4:].requires_grad_(), case.labels[4:])]
    for half, labels in halves:
        torch.autograd.grad(case.loss(half, labels, gradient=gradient), half)
    for half, labels in halves:
        with torch.no_grad():
            case.assert_refused(half, labels)


@pytest.mark.parametrize("gradient", IN_PLACE)
def test_memory_that_a_freed_leaf_has_overwritten(impl_device, gradient):
    """A reentrant checkpoint calls over a detached leaf of the caller's logits, which dies with its graph."""
    case = Overwritten(impl_device)
    checkpoint(lambda x: case.loss(x, gradient=gradient), case.logits, use_reentrant=True).backward()
    for logits in (case.logits, case.logits.detach()):
        with torch.no_grad():
            case.assert_refused(logits)
