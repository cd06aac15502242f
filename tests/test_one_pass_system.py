"""The one-pass kernel in a program: graphs, synchronisation, peak memory, offsets past 2^31, other GPUs."""

from __future__ import annotations

import pytest
import torch

from tests.support.inputs import batch
from tests.support.one_pass import made, run, skip_where_it_cannot_run
from vocab_parallel_ce import cross_entropy_backward, cross_entropy_forward, vocab_parallel_cross_entropy
from vocab_parallel_ce.kernels.blocks import ONE_PASS

pytestmark = pytest.mark.cuda

COLUMNS = -(-ONE_PASS[0][0] // 16) * 8  # the narrowest bf16 rows


@pytest.fixture(autouse=True)
def _runs_here():
    skip_where_it_cannot_run()


@pytest.mark.no_poison
@pytest.mark.parametrize("name", ("mean", "none", "items"))
def test_graph_replays_with_new_data(name):
    """Also other labels are ignored, and another number of items divides."""
    items = torch.tensor(40, device="cuda")
    options = {"reduction": "sum", "num_items": items} if name == "items" else {"reduction": name}
    static_logits, static_labels = made("some_ignored", 300, COLUMNS)
    static_upstream = torch.rand((300,) if name == "none" else (), device="cuda")

    def static_step():
        return run(static_logits.clone(), static_labels, static_upstream, z_loss=1e-3, **options)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        static_step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        static_loss, static_grad = static_step()
    for seed in (1, 2):
        logits, labels = made("some_ignored", 300, COLUMNS, seed=seed)
        upstream = torch.rand_like(static_upstream)
        for static, new in ((static_logits, logits), (static_labels, labels), (static_upstream, upstream)):
            static.copy_(new)
        items += 1
        graph.replay()
        loss, grad = run(logits.clone(), labels, upstream, z_loss=1e-3, **options)
        assert torch.equal(static_loss, loss) and torch.equal(static_grad, grad)


@pytest.mark.no_poison
def test_the_host_never_waits():
    logits, labels = made("some_ignored", 300, COLUMNS)
    upstream, items = torch.rand(300, device="cuda"), torch.tensor(40, device="cuda")

    def every_path():
        for options in ({}, {"reduction": "sum"}, {"reduction": "sum", "num_items": items}, {"z_loss": 0.1}):
            run(logits.clone(), labels, upstream[0], **options)
        run(logits.clone(), labels, upstream, reduction="none")
        _, grad = cross_entropy_forward(logits.clone(), labels, 0.0, True, None, -100)
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
@pytest.mark.parametrize("columns", (COLUMNS, 128_256))
def test_extra_peak_memory(columns):
    """Less than 64 bytes a row."""
    rows = 2048
    logits = torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16)
    labels = torch.randint(0, columns, (rows,), device="cuda")
    upstream = torch.ones((), device="cuda")
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run(logits, labels, upstream)
    extra = torch.cuda.max_memory_allocated() - before
    assert extra < 64 * rows, extra / rows


@pytest.mark.no_poison
def test_more_than_2_to_the_31_elements():
    """32-bit row offsets read, and write, far outside the tensor."""
    columns, rows = 65_544, 32_800
    needed = 2 * rows * columns * 2 + (1 << 30)
    free = torch.cuda.mem_get_info()[0]
    if free < needed:
        pytest.skip(f"needs {needed} bytes of GPU memory, {free} are free")
    logits = torch.zeros(rows, columns, device="cuda", dtype=torch.bfloat16)
    assert logits.numel() > 2**31
    tail = batch("peaked", rows=64, vocab_size=columns, dtype=torch.bfloat16).logits.cuda()
    logits[-64:] = tail
    labels = torch.randint(0, columns, (rows,), device="cuda")
    want, want_grad = run(tail.clone(), labels[-64:], reduction="none")
    losses, grad = run(logits, labels, reduction="none")
    assert torch.equal(losses[-64:], want)
    assert torch.equal(grad[-64:], want_grad)
    # Element 2^31 lies among the last rows. The first rows, and the last before them, are of equal logits.
    for row in (0, 1, rows - 65):
        want_row = torch.full((columns,), 1 / columns, device="cuda").bfloat16()
        want_row[labels[row]] = 1 / columns - 1
        torch.testing.assert_close(grad[row], want_row, rtol=2**-7, atol=0)
    uniform = torch.tensor(columns, dtype=torch.float64).log()
    torch.testing.assert_close(losses[:-64].double().cpu(), uniform.expand(rows - 64), rtol=1e-6, atol=0)


@pytest.mark.no_poison
def test_on_a_stream_of_its_own():
    """The launch goes to the stream that is current, also when the variant is known already."""
    logits, labels = made("some_ignored", 300, COLUMNS)
    expected = run(logits.clone(), labels)
    stream = torch.cuda.Stream()
    source = torch.zeros_like(logits)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)
        source.copy_(logits)
        actual = run(source, labels)
    stream.synchronize()
    for value, want in zip(actual, expected, strict=True):
        assert torch.equal(value, want)


@pytest.mark.nccl
@pytest.mark.parametrize("reduction", ("mean", "none"))
def test_tensors_on_a_gpu_that_is_not_current(reduction):
    """Without a guard the launch goes to the current GPU's stream, and reads the other's memory too early."""
    logits, labels = made("some_ignored", 300, COLUMNS)
    torch.cuda.set_device(0)
    expected = run(logits.clone(), labels, reduction=reduction)
    for _ in range(2):
        actual = run(logits.to("cuda:1"), labels.to("cuda:1"), reduction=reduction)
        assert torch.cuda.current_device() == 0
        for value, want in zip(actual, expected, strict=True):
            assert torch.equal(value.cpu(), want.cpu())


def test_a_view_in_a_graph_goes_to_two_launches():
    """Autograd allows to overwrite no such view during forward."""
    logits, labels = made("peaked", 20, COLUMNS)
    source = logits.clone().requires_grad_()
    view = (source * 1)[:-1]
    with pytest.raises(ValueError, match="^gradient: 'in_forward' .* use 'in_backward'"):
        vocab_parallel_cross_entropy(view, labels[:-1], impl="one_pass", gradient="in_forward")
    with pytest.raises(ValueError, match="^impl: 'one_pass' needs gradient 'in_forward', got 'in_backward'"):
        vocab_parallel_cross_entropy(view, labels[:-1], impl="one_pass")
    vocab_parallel_cross_entropy(view, labels[:-1]).backward()
    _, expected = run(logits[:-1].clone(), labels[:-1], impl="triton", gradient="in_backward")
    assert torch.equal(source.grad[:-1], expected)


@pytest.mark.parametrize("gradient", ("auto", "in_forward"))
def test_a_second_backward_names_the_remedy(gradient):
    logits, labels = made("peaked", 20, COLUMNS)
    leaf = logits.requires_grad_()
    loss = vocab_parallel_cross_entropy(leaf, labels, impl="one_pass", gradient=gradient)
    torch.autograd.grad(loss, leaf, retain_graph=True)
    with pytest.raises(RuntimeError, match="out_of_place"):
        torch.autograd.grad(loss, leaf)
