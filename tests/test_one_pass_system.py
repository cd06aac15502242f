"""The one-pass kernel in a program: pairs, heads, refusals, graphs, synchronisation, memory, offsets past 2^31."""

from __future__ import annotations

import pytest
import torch

from tests.support.cases.one_pass import NARROW, assert_equal, made, options_of, require_one_pass, run
from tests.support.host.gpu import (
    assert_graph_replays,
    assert_host_never_waits,
    assert_right_past_2_to_the_31_elements,
    extra_peak_bytes,
)
from vocab_parallel_ce import (
    cross_entropy_backward,
    cross_entropy_forward,
    linear_cross_entropy,
    vocab_parallel_cross_entropy,
)

pytestmark = pytest.mark.cuda


@pytest.fixture(autouse=True)
def _runs_here(monkeypatch):
    require_one_pass(monkeypatch)


def test_the_two_step_pair_and_no_gradient():
    logits, labels = made("some_ignored", 20, NARROW)
    loss, grad = run(logits.clone(), labels, torch.tensor(0.5, device="cuda"))
    with torch.no_grad():
        options = {"impl": "one_pass", "gradient": "in_forward"}
        alone = vocab_parallel_cross_entropy(unchanged := logits.clone(), labels, **options)
    assert torch.equal(unchanged, logits)
    torch.testing.assert_close(alone, loss, rtol=1e-5, atol=0)
    pair_loss, pair = cross_entropy_forward(logits, labels, 0.0, True, None, -100)
    cross_entropy_backward(pair, torch.tensor(0.5, device="cuda"))
    assert_equal((pair_loss, pair), (loss, grad))


@pytest.mark.parametrize("option", ("smoothing", "weights"))
def test_a_head(option):
    """Its chunks take one launch each, and a width that has edges."""
    columns = NARROW + 1
    hidden = torch.randn(300, 64, generator=torch.Generator().manual_seed(0)).bfloat16().cuda()
    weight = torch.randn(columns, 64, generator=torch.Generator().manual_seed(1)).bfloat16().cuda()
    labels = made("some_ignored", 300, columns)[1]
    results = []
    for impl in ("one_pass", "triton"):
        leaves = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        options = {"impl": impl, "chunk_size": 128, **options_of(option, columns)}
        loss = linear_cross_entropy(*leaves, labels, **options)
        results.append((loss.detach(), *torch.autograd.grad(loss, leaves)))
    for actual, expected in zip(*results, strict=True):
        torch.testing.assert_close(actual.float(), expected.float(), rtol=2**-6, atol=float(expected.abs().max()) / 256)


def test_a_call_that_is_refused_leaves_the_logits_alone():
    """``test_selection`` has everything that one launch cannot do."""
    logits, labels = made("peaked", 4, NARROW)
    before, version = logits.clone(), logits._version
    with pytest.raises(ValueError, match="^impl: 'one_pass' needs a loss that it computes, got softcap"):
        vocab_parallel_cross_entropy(logits, labels, impl="one_pass", gradient="in_forward", softcap=30.0)
    assert torch.equal(logits, before) and logits._version == version


@pytest.mark.no_poison
def test_graph_replays_with_new_data_and_the_host_never_waits():
    """Also other labels are ignored, and another number of items divides."""

    def arguments(seed):
        items = torch.tensor(40 + seed, device="cuda")
        return [*made("some_ignored", 300, NARROW, seed=seed), torch.rand(300, device="cuda"), items]

    def step(logits, labels, grad_output, items):
        results = []
        for options in ({}, {"reduction": "sum"}, {"reduction": "sum", "num_items": items}, {"z_loss": 1e-3}):
            results += run(logits.clone(), labels, grad_output[0], **options)
        return [*results, *run(logits.clone(), labels, grad_output, reduction="none")]

    assert_graph_replays(step, arguments(0), (arguments(seed) for seed in (1, 2)))
    static = arguments(0)
    assert_host_never_waits(lambda: step(*static))


@pytest.mark.no_poison
@pytest.mark.parametrize("columns", (NARROW, 128_256))
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
