"""What only a GPU shows: graphs, synchronisation, peak memory, offsets past 2^31, the current device."""

import importlib
from itertools import product

import pytest
import torch

from tests.support.gpu import (
    assert_graph_replays,
    assert_host_never_waits,
    assert_right_past_2_to_the_31_elements,
    extra_peak_bytes,
)
from tests.support.inputs import batch
from vocab_parallel_ce import (
    cross_entropy_backward,
    cross_entropy_forward,
    parallel_cross_entropy,
    vocab_parallel_cross_entropy,
)

pytestmark = pytest.mark.cuda

REDUCTIONS = ("mean", "sum", "none")
GRADIENTS = ("in_forward", "in_backward", "out_of_place")


def inputs(rows=64, columns=1000, dtype=torch.bfloat16, seed=0):
    logits, labels = batch("some_ignored", rows=rows, vocab_size=columns, dtype=dtype, seed=seed)
    return logits.cuda(), labels.cuda()


@pytest.mark.no_poison
@pytest.mark.parametrize("gradient", GRADIENTS)
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_graph_replays_with_new_data(gradient, reduction):
    """Looking at the grad_output on the host broke capture elsewhere."""
    options = {"reduction": reduction, "gradient": gradient, "label_smoothing": 0.1}

    def arguments(seed):
        return [*inputs(seed=seed), torch.rand((64,) if reduction == "none" else (), device="cuda")]

    def step(logits, labels, grad_output):
        source = logits.clone().requires_grad_()
        loss = vocab_parallel_cross_entropy(source, labels, **options)
        return loss, torch.autograd.grad(loss, source, grad_output)[0]

    assert_graph_replays(step, arguments(0), (arguments(seed) for seed in (1, 2)))


@pytest.mark.no_poison
def test_the_host_never_waits():
    logits, labels = inputs()
    grad_output = torch.rand(64, device="cuda")

    def every_path():
        for reduction, gradient in product(REDUCTIONS, GRADIENTS):
            source = logits.clone().requires_grad_()
            options = {"reduction": reduction, "gradient": gradient}
            loss = vocab_parallel_cross_entropy(source, labels, **options)
            torch.autograd.grad(loss, source, grad_output if reduction == "none" else grad_output[0])
        loss, grad = cross_entropy_forward(logits.clone(), labels, 0.0, True, None, -100)
        cross_entropy_backward(grad, grad_output[0])

    assert_host_never_waits(every_path)


@pytest.mark.no_poison
@pytest.mark.parametrize("columns", (32000, 32001))
@pytest.mark.parametrize("reduction", ("mean", "none"))
def test_extra_peak_memory_in_place(reduction, columns):
    """Less than 64 bytes a row: no second shard, of any dtype, at any moment."""
    rows = 2048
    logits = torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16).requires_grad_() * 1
    labels = torch.randint(0, columns, (rows,), device="cuda")
    grad_output = torch.ones((rows,) if reduction == "none" else (), device="cuda")

    def step():
        torch.autograd.graph.increment_version(logits)  # written anew
        loss = vocab_parallel_cross_entropy(logits, labels, reduction=reduction)
        torch.autograd.grad(loss, logits, grad_output)

    extra = extra_peak_bytes(step)
    assert extra < 64 * rows, extra / rows


@pytest.mark.no_poison
@pytest.mark.parametrize("shape", ((2, 1024, 8000), (1024, 2, 8000)))
def test_no_copy_of_dense_layouts(shape):
    """Transposing tokens before the loss cost a copy of the logits elsewhere."""
    logits = torch.randn(*shape, device="cuda", dtype=torch.bfloat16).requires_grad_() * 1
    view = logits.transpose(0, 1)[:, : shape[0] - 1]
    labels = torch.randint(0, shape[-1], view.shape[:-1], device="cuda")

    def step():
        torch.autograd.graph.increment_version(logits)  # written anew
        loss = vocab_parallel_cross_entropy(view, labels)
        torch.autograd.grad(loss, view)

    assert extra_peak_bytes(step) < 64 * labels.numel()


@pytest.mark.no_poison
def test_nothing_but_the_loss_under_no_grad():
    logits = torch.randn(2048, 8000, device="cuda", dtype=torch.bfloat16).requires_grad_()
    labels = torch.randint(0, 8000, (2048,), device="cuda")

    @torch.no_grad()
    def step():
        vocab_parallel_cross_entropy(logits, labels)

    assert extra_peak_bytes(step) < 32 * 2048


@pytest.mark.no_poison
def test_more_than_2_to_the_31_elements():
    rows, columns = 32_832, 65_537  # the last 64 rows lie within 128-byte lines as the first 64 do

    def step(logits, labels):
        losses = parallel_cross_entropy(logits.requires_grad_(), labels, overwrite_input=True)
        (grad,) = torch.autograd.grad(losses, logits, torch.ones_like(losses))
        return losses, grad

    def step_of_tail(tail, labels):
        want = vocab_parallel_cross_entropy(tail.clone(), labels, reduction="none")
        source = tail.clone().requires_grad_()
        loss = vocab_parallel_cross_entropy(source, labels, reduction="none")
        (want_grad,) = torch.autograd.grad(loss, source, torch.ones_like(loss))
        return want, want_grad

    assert_right_past_2_to_the_31_elements(rows, columns, step, step_of_tail)


class RecordedLaunches:
    """A kernel that notes which GPU is current at each of its launches."""

    def __init__(self, kernel, gpus):
        self.kernel, self.gpus = kernel, gpus

    def __getitem__(self, grid):
        def launch(*args, **kwargs):
            self.gpus.append(torch.cuda.current_device())
            return self.kernel[grid](*args, **kwargs)

        return launch


@pytest.mark.nccl
@pytest.mark.parametrize("reduction", ("mean", "none"))
def test_tensors_on_a_gpu_that_is_not_current(monkeypatch, reduction):
    """Without a guard the launch goes to the current GPU's stream, and reads the other's memory too early."""
    gpus: list[int] = []
    for name in ("online_softmax", "cross_entropy", "loss", "element_mul"):
        module = importlib.import_module(f"vocab_parallel_ce.kernels.{name}")
        kernel = getattr(module, f"{name}_kernel")
        monkeypatch.setattr(module, f"{name}_kernel", RecordedLaunches(kernel, gpus))
        monkeypatch.setattr(module, "_launch", module._launch.__wrapped__)  # those in its cache have a kernel
    logits, labels = inputs()
    torch.cuda.set_device(0)
    there = logits.to("cuda:1").requires_grad_()
    loss = vocab_parallel_cross_entropy(there, labels.to("cuda:1"), reduction=reduction)
    (grad,) = torch.autograd.grad(loss, there, torch.ones_like(loss))
    assert gpus == [1] * (3 if reduction == "mean" else 2)
    assert torch.cuda.current_device() == 0
    here = logits.clone().requires_grad_()
    expected = vocab_parallel_cross_entropy(here, labels, reduction=reduction)
    (expected_grad,) = torch.autograd.grad(expected, here, torch.ones_like(expected))
    assert torch.equal(loss.cpu(), expected.cpu())
    assert torch.equal(grad.cpu(), expected_grad.cpu())
