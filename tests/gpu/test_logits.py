"""What only a GPU shows: graphs, synchronisation, peak memory, offsets past 2^31, the current device."""

from itertools import product

import pytest
import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from tests.support.budget import assert_within_budget
from tests.support.gpu import (
    assert_graph_replays,
    assert_host_never_waits,
    assert_right_past_2_to_the_31_elements,
    extra_peak_bytes,
)
from tests.support.inputs import batch
from tests.support.logits import GRADIENTS, REDUCTIONS
from tests.support.oracle import cross_entropy_fp64, cross_entropy_same_dtype
from vocab_parallel_ce import (
    cross_entropy_backward,
    cross_entropy_forward,
    parallel_cross_entropy,
    vocab_parallel_cross_entropy,
)

pytestmark = pytest.mark.cuda


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


@pytest.mark.parametrize("gradient", ("in_forward", "in_backward"))
def test_warm_up_and_capture_of_a_cuda_graph_are_not_checked(gradient):
    """Both call over the same static logits; what a replay leaves there is refused again."""
    values, labels = (t.cuda() for t in batch("peaked", rows=8, vocab_size=64))
    # A leaf: another tensor's node lies on the stream that made it, and a capture may not wait for that.
    static = values.clone().requires_grad_()

    def step():
        loss = vocab_parallel_cross_entropy(static, labels, gradient=gradient, impl="triton")
        torch.autograd.grad(loss, static)
        return loss

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = step()
    with torch.no_grad():
        static.copy_(values)
    graph.replay()
    oracle, peer = (f(values.cpu(), labels.cpu()) for f in (cross_entropy_fp64, cross_entropy_same_dtype))
    assert_within_budget(loss, oracle.loss, peer.loss)
    assert_within_budget(static, oracle.grad, peer.grad)


KERNELS = ("online_softmax", "cross_entropy", "loss_kernel", "element_mul")


@pytest.mark.nccl
@pytest.mark.no_poison
@pytest.mark.parametrize("reduction", ("mean", "none"))
def test_tensors_on_a_gpu_that_is_not_current(reduction):
    """Without a guard the launch goes to the current GPU's stream, and reads the other's memory too early."""
    logits, labels = inputs()
    torch.cuda.set_device(0)
    there = logits.to("cuda:1").requires_grad_()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
        loss = vocab_parallel_cross_entropy(there, labels.to("cuda:1"), reduction=reduction)
        (grad,) = torch.autograd.grad(loss, there, torch.ones_like(loss))
        torch.cuda.synchronize(1)
    assert torch.cuda.current_device() == 0
    launches = [event for event in profiled.events() if event.device_type == DeviceType.CUDA]
    gpus = [e.device_index for e in launches if any(name in e.name for name in KERNELS)]
    assert gpus == [1] * (3 if reduction == "mean" else 2)
    here = logits.clone().requires_grad_()
    expected = vocab_parallel_cross_entropy(here, labels, reduction=reduction)
    (expected_grad,) = torch.autograd.grad(expected, here, torch.ones_like(expected))
    assert torch.equal(loss.cpu(), expected.cpu())
    assert torch.equal(grad.cpu(), expected_grad.cpu())
