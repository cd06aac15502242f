"""What only a GPU shows: graphs, synchronisation, peak memory, offsets past 2^31, the current device."""

import importlib
from itertools import product

import pytest
import torch

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
    """Looking at the upstream gradient on the host broke capture elsewhere."""
    static_logits, static_labels = inputs()
    options = {"reduction": reduction, "gradient": gradient, "label_smoothing": 0.1}
    static_upstream = torch.rand((64,) if reduction == "none" else (), device="cuda")

    def step(logits, labels, upstream):
        loss = vocab_parallel_cross_entropy(logits, labels, **options)
        return loss, torch.autograd.grad(loss, logits, upstream)[0]

    def static_step():
        return step(static_logits.clone().requires_grad_(), static_labels, static_upstream)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        static_step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        static_loss, static_grad = static_step()
    for seed in (1, 2):
        logits, labels = inputs(seed=seed)
        upstream = torch.rand_like(static_upstream)
        for static, new in ((static_logits, logits), (static_labels, labels), (static_upstream, upstream)):
            static.copy_(new)
        graph.replay()
        loss, grad = step(logits.clone().requires_grad_(), labels, upstream)
        assert torch.equal(static_loss, loss) and torch.equal(static_grad, grad)


@pytest.mark.no_poison
def test_the_host_never_waits():
    logits, labels = inputs()
    upstream = torch.rand(64, device="cuda")

    def every_path():
        for reduction, gradient in product(REDUCTIONS, GRADIENTS):
            source = logits.clone().requires_grad_()
            options = {"reduction": reduction, "gradient": gradient}
            loss = vocab_parallel_cross_entropy(source, labels, **options)
            torch.autograd.grad(loss, source, upstream if reduction == "none" else upstream[0])
        loss, grad = cross_entropy_forward(logits.clone(), labels, 0.0, True, None, -100)
        cross_entropy_backward(grad, upstream[0])

    every_path()  # compiles, which may wait
    torch.cuda.set_sync_debug_mode("error")
    try:
        with pytest.raises(RuntimeError, match="synchroniz"):
            labels.sum().item()
        every_path()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.no_poison
@pytest.mark.parametrize("columns", (32000, 32001))
@pytest.mark.parametrize("reduction", ("mean", "none"))
def test_extra_peak_memory_in_place(reduction, columns):
    """Less than 64 bytes a row: no second shard, of any dtype, at any moment."""
    rows = 2048
    logits = torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16).requires_grad_()
    labels = torch.randint(0, columns, (rows,), device="cuda")
    upstream = torch.ones((rows,) if reduction == "none" else (), device="cuda")
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    loss = vocab_parallel_cross_entropy(logits, labels, reduction=reduction)
    torch.autograd.grad(loss, logits, upstream)
    extra = torch.cuda.max_memory_allocated() - before
    assert extra < 64 * rows, extra / rows


@pytest.mark.no_poison
@pytest.mark.parametrize("shape", ((2, 1024, 8000), (1024, 2, 8000)))
def test_no_copy_of_dense_layouts(shape):
    """Transposing tokens before the loss cost a copy of the logits elsewhere."""
    logits = torch.randn(*shape, device="cuda", dtype=torch.bfloat16)
    view = logits.transpose(0, 1)[:, : shape[0] - 1].requires_grad_()
    labels = torch.randint(0, shape[-1], view.shape[:-1], device="cuda")
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    loss = vocab_parallel_cross_entropy(view, labels)
    loss.backward(inputs=[view])
    assert torch.cuda.max_memory_allocated() - before < 64 * labels.numel()


@pytest.mark.no_poison
def test_nothing_but_the_loss_under_no_grad():
    logits = torch.randn(2048, 8000, device="cuda", dtype=torch.bfloat16).requires_grad_()
    labels = torch.randint(0, 8000, (2048,), device="cuda")
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    with torch.no_grad():
        vocab_parallel_cross_entropy(logits, labels)
    assert torch.cuda.max_memory_allocated() - before < 32 * 2048


@pytest.mark.no_poison
def test_more_than_2_to_the_31_elements():
    """32-bit row offsets read, and write, far outside the tensor."""
    columns, rows = 65_537, 32_832  # the last 64 rows lie within 128-byte lines as the first 64 do
    needed = 2 * rows * columns * 2 + (1 << 30)
    free = torch.cuda.mem_get_info()[0]
    if free < needed:
        pytest.skip(f"needs {needed} bytes of GPU memory, {free} are free")
    logits = torch.zeros(rows, columns, device="cuda", dtype=torch.bfloat16)
    assert logits.numel() > 2**31
    tail, _ = batch("peaked", rows=64, vocab_size=columns, dtype=torch.bfloat16)
    tail = tail.cuda()
    logits[-64:] = tail
    labels = torch.randint(0, columns, (rows,), device="cuda")
    want = vocab_parallel_cross_entropy(tail.clone(), labels[-64:], reduction="none")
    source = tail.clone().requires_grad_()
    loss = vocab_parallel_cross_entropy(source, labels[-64:], reduction="none")
    (want_grad,) = torch.autograd.grad(loss, source, torch.ones_like(loss))
    logits.requires_grad_()
    losses = parallel_cross_entropy(logits, labels)
    (grad,) = torch.autograd.grad(losses, logits, torch.ones_like(losses))
    assert torch.equal(losses[-64:], want)
    assert torch.equal(grad[-64:], want_grad)
    # Element 2^31 lies among the last rows. The first rows, and the last before them, are of equal logits.
    for row in (0, 1, rows - 65):
        want_row = torch.full((columns,), 1 / columns, device="cuda").bfloat16()
        want_row[labels[row]] = 1 / columns - 1
        torch.testing.assert_close(grad[row], want_row, rtol=2**-7, atol=0)
    uniform = torch.tensor(columns, dtype=torch.float64).log()
    torch.testing.assert_close(losses[:-64].double().cpu(), uniform.expand(rows - 64), rtol=1e-6, atol=0)


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
