"""The one-pass kernel in a program: graphs, synchronisation, peak memory, offsets past 2^31, other GPUs."""

from __future__ import annotations

import pytest
import torch

from tests.support.gpu import (
    assert_graph_replays,
    assert_host_never_waits,
    assert_right_past_2_to_the_31_elements,
    extra_peak_bytes,
)
from tests.support.one_pass import assert_equal, made, run, skip_where_it_cannot_run
from vocab_parallel_ce import cross_entropy_backward, cross_entropy_forward, vocab_parallel_cross_entropy
from vocab_parallel_ce.blocks import ONE_PASS

pytestmark = pytest.mark.cuda

COLUMNS = -(-ONE_PASS[0][0] // 16) * 8  # the narrowest bf16 rows


@pytest.fixture(autouse=True)
def _runs_here():
    skip_where_it_cannot_run()


@pytest.mark.no_poison
@pytest.mark.parametrize("name", ("mean", "none", "items"))
def test_graph_replays_with_new_data(name):
    """Also other labels are ignored, and another number of items divides."""

    def arguments(seed):
        grad_output = torch.rand((300,) if name == "none" else (), device="cuda")
        items = torch.tensor(40 + seed, device="cuda")
        return [*made("some_ignored", 300, COLUMNS, seed=seed), grad_output, items]

    def step(logits, labels, grad_output, items):
        options = {"reduction": "sum", "num_items": items} if name == "items" else {"reduction": name}
        return run(logits.clone(), labels, grad_output, z_loss=1e-3, **options)

    assert_graph_replays(step, arguments(0), (arguments(seed) for seed in (1, 2)))


@pytest.mark.no_poison
def test_the_host_never_waits():
    logits, labels = made("some_ignored", 300, COLUMNS)
    grad_output, items = torch.rand(300, device="cuda"), torch.tensor(40, device="cuda")

    def every_path():
        for options in ({}, {"reduction": "sum"}, {"reduction": "sum", "num_items": items}, {"z_loss": 0.1}):
            run(logits.clone(), labels, grad_output[0], **options)
        run(logits.clone(), labels, grad_output, reduction="none")
        _, grad = cross_entropy_forward(logits.clone(), labels, 0.0, True, None, -100)
        cross_entropy_backward(grad, grad_output[0])

    assert_host_never_waits(every_path)


@pytest.mark.no_poison
@pytest.mark.parametrize("columns", (COLUMNS, 128_256))
def test_extra_peak_memory(columns):
    """Less than 64 bytes a row."""
    rows = 2048
    logits = torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16)
    labels = torch.randint(0, columns, (rows,), device="cuda")
    grad_output = torch.ones((), device="cuda")
    extra = extra_peak_bytes(lambda: run(logits, labels, grad_output))
    assert extra < 64 * rows, extra / rows


@pytest.mark.no_poison
def test_more_than_2_to_the_31_elements():
    def step(logits, labels):
        return run(logits, labels, reduction="none")

    assert_right_past_2_to_the_31_elements(32_800, 65_544, step, step)


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
    assert_equal(actual, expected)


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
        assert_equal([value.to("cuda:0") for value in actual], expected)


def test_a_view_in_a_graph_goes_to_two_launches():
    """Autograd allows to overwrite no such view during forward."""
    logits, labels = made("peaked", 20, COLUMNS)
    source = logits.clone().requires_grad_()
    view = (source * 1)[:-1]
    with pytest.raises(ValueError, match="^gradient: 'in_forward' .* use 'in_backward'"):
        vocab_parallel_cross_entropy(view, labels[:-1], impl="one_pass", gradient="in_forward")
    with pytest.raises(ValueError, match="^impl: 'one_pass' needs gradient 'in_forward', got 'auto'"):
        vocab_parallel_cross_entropy(view, labels[:-1], impl="one_pass")
    vocab_parallel_cross_entropy(view, labels[:-1]).backward()
    _, expected = run(logits[:-1].clone(), labels[:-1], impl="triton", gradient="in_backward")
    assert torch.equal(source.grad[:-1], expected)
