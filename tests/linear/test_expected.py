"""Unreduced losses whose grad_output is known in forward except one factor: one matmul fewer, or NaN and a warning."""

import contextlib
import warnings

import pytest
import torch

from tests.support.cases import linear
from tests.support.cases.flat import linear_cross_entropy
from tests.support.cases.linear import COLUMNS, WIDTH, Results, assert_right
from tests.support.host.gpu import assert_graph_replays, assert_host_never_waits
from vocab_parallel_ce.head import expected as module

ROWS, FACTOR = linear.N_LEAVES, -0.37
WAY = {"reduction": "none", "gradient": "in_forward"}
BY_DTYPE = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
MISFIT = "expected_grad_output: the losses of a call"


def mask_of(rows, kind="mask"):
    """Zeros, among them the first token, and ones; or numbers of both signs, or of one."""
    numbers = linear.zero_first_grad_output(rows)
    return {"mask": (numbers > 0).float(), "numbers": numbers, "negative": -numbers.abs()}[kind]


class Expecting(linear.Leaves):
    def loss(self, expected, **options):
        return super().loss(**{"expected_grad_output": expected.to(self.device), **WAY, **options})

    def gradients(self, expected, grad_output, **options):
        loss = self.loss(expected, **options)
        return torch.autograd.grad(loss, self.leaves, grad_output.to(self.device), allow_unused="main_grad" in options)


@contextlib.contextmanager
def misfit_is_warned_of(case, is_misfit=True):
    """On a CPU at once, on a GPU by a later call."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
        if case.device == "cuda":
            torch.cuda.synchronize()
            case.loss(torch.ones(ROWS))
    assert any(MISFIT in str(each.message) for each in caught) == is_misfit
    assert not module._misfits or case.device == "cuda"


@BY_DTYPE
def test_main_grad_over_several_micro_batches(impl_device, dtype):
    """The gradient is rounded once, after the factor, from the fp32 sum."""
    case, mask = Expecting(impl_device, dtype=dtype), mask_of(ROWS, "numbers")
    case.leaves[1].grad_added_to_main_grad = False
    main_grad = torch.zeros(COLUMNS, WIDTH, device=case.device)
    for step in (1, 2, 3):
        before, loss = main_grad.clone(), case.loss(mask, main_grad=main_grad, chunk_size=4)
        assert torch.equal(main_grad, before), "written by forward"
        _, dummy, _ = torch.autograd.grad(loss, case.leaves, FACTOR * mask.to(case.device))
        assert case.leaves[1].grad_added_to_main_grad is True and dummy.dtype == dtype and not dummy.any()
        results = Results((), None, main_grad.to(dtype).cpu(), None)
        assert_right(results, case.inputs, step * FACTOR * mask, reduction="none")
        if step == 1:
            assert not torch.equal(main_grad, main_grad.bfloat16().float())
            assert torch.equal(case.gradients(mask, FACTOR * mask, chunk_size=4)[1], main_grad.to(dtype))


@pytest.mark.parametrize("row", [0, ROWS - 1])
def test_another_grad_output_makes_every_gradient_nan_and_warns(impl_device, row):
    """Also if nothing is expected, and something multiplies the losses after all."""
    case = Expecting(impl_device, kind="peaked")
    for mask in (mask_of(ROWS, "numbers"), torch.zeros(ROWS)):
        real = FACTOR * mask
        real[row] += 1e-4
        with misfit_is_warned_of(case):
            gradients = case.gradients(mask, real)
        assert all(gradient.isnan().all() for gradient in gradients)


def test_rounding_ignored_tokens_and_nothing_are_no_misfit(impl_device):
    case, mask, negative = Expecting(impl_device), *(mask_of(ROWS, kind) for kind in ("numbers", "negative"))
    ignored = case.inputs.labels == -100
    assert ignored.any()
    rounded = (mask * 0.1 / 7 * 3.3).nextafter(torch.tensor(torch.inf))
    for expected, real in (
        (mask, rounded),
        (negative, FACTOR * negative),
        (torch.where(ignored, torch.inf, mask), torch.where(ignored, torch.nan, FACTOR * mask)),
        (torch.zeros(ROWS), torch.zeros(ROWS)),
    ):
        with misfit_is_warned_of(case, False):
            gradients = case.gradients(expected, real)
        assert_right(Results((), *gradients), case.inputs, torch.where(ignored, 0.0, real), reduction="none")


def test_an_overflow_is_no_misfit(impl_device):
    case, mask = Expecting(impl_device, kind="peaked"), mask_of(ROWS)
    for value in (torch.inf, torch.nan):
        with misfit_is_warned_of(case, False):
            gradients = case.gradients(mask, torch.where(mask == 0, 0.0, value))
        assert not any(gradient.isfinite().any() for gradient in gradients)


def test_autocast_rounds_no_fp32_gradient(impl_device):
    case, mask = Expecting(impl_device, kind="peaked"), mask_of(ROWS)
    with torch.autocast(case.device, torch.bfloat16):
        gradients = case.gradients(mask, FACTOR * mask)
        in_backward = case.gradients(mask, FACTOR * mask, gradient="in_backward", expected_grad_output=None)
    for gradient, other in zip(gradients, in_backward, strict=True):
        torch.testing.assert_close(gradient, other, rtol=0, atol=float(2**-7 * other.abs().max()))
        assert gradient.dtype == torch.float32 and not torch.equal(gradient, gradient.bfloat16().float())


def test_no_tokens_and_a_second_backward(impl_device):
    case, mask = Expecting(impl_device), mask_of(ROWS)
    empty = torch.zeros(0, WIDTH, device=case.device, requires_grad=True)
    labels = torch.zeros(0, dtype=torch.int64, device=case.device)
    options = {"expected_grad_output": labels.float(), "impl": case.impl, **WAY}
    linear_cross_entropy(empty, case.leaves[1], labels, **options).sum().backward()
    assert empty.grad.shape == (0, WIDTH) and not case.leaves[1].grad.any()
    loss = case.loss(mask)
    loss.backward(mask.to(case.device), retain_graph=True)
    with pytest.raises(RuntimeError, match="in_backward"):
        loss.backward(mask.to(case.device))


@pytest.mark.cuda
@pytest.mark.parametrize("impl", ["reference", "triton"])
def test_the_host_never_waits(impl):
    case, mask = Expecting((impl, "cuda"), dtype=torch.bfloat16), mask_of(ROWS).cuda()
    main_grad = torch.zeros(COLUMNS, WIDTH, device="cuda")

    def step():
        case.gradients(mask, FACTOR * mask)
        case.gradients(mask, FACTOR * mask, main_grad=main_grad, chunk_size=2)

    assert_host_never_waits(step)


@pytest.mark.cuda
def test_a_captured_graph_finds_the_factor_of_each_replay():
    case = Expecting(("triton", "cuda"), dtype=torch.bfloat16)
    weight = case.leaves[1].detach()

    def step(hidden, mask, grad_output):
        hidden = hidden.detach().requires_grad_()
        options = {"expected_grad_output": mask, "impl": "triton", **WAY}
        loss = linear_cross_entropy(hidden, weight, case.labels, **options)
        return loss.detach(), *torch.autograd.grad(loss, [hidden], grad_output)

    masks = [mask_of(ROWS, kind).cuda() for kind in ("mask", "numbers")]
    hidden = case.leaves[0].detach()
    batches = [(hidden * number, mask, mask * number) for number, mask in enumerate(masks, 2)]
    assert_graph_replays(step, (hidden.clone(), masks[0].clone(), masks[0].clone()), batches)
