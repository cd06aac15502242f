"""The one-pass kernel in a program: when it runs, heads, refusals, memory, offsets past 2^31."""

from __future__ import annotations

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from tests.support.cases.flat import linear_cross_entropy
from tests.support.cases.one_pass import NARROW, made, options_of, require_one_pass, run
from tests.support.host.gpu import assert_right_past_2_to_the_31_elements, extra_peak_bytes
from vocab_parallel_ce import vocab_parallel_cross_entropy
from vocab_parallel_ce.one_pass import WIDTHS, fewest_rows_of

pytestmark = pytest.mark.cuda


@pytest.fixture(autouse=True)
def _runs_here():
    require_one_pass()


FIRST, LAST = WIDTHS[0][0], WIDTHS[-1][1]


@pytest.mark.no_poison
@pytest.mark.parametrize(
    ("bytes_a_row", "options", "expected"),
    [
        (FIRST, {}, True),
        (LAST, {"reduction": "sum"}, True),
        (LAST + 16, {}, False),
        (FIRST + 2, {"z_loss": 0.1, "ignore_index": 3, "logit_scale": 0.5, "outputs": ("lse",)}, True),
        (FIRST, {"gradient": "auto"}, False),
        (FIRST, {"label_smoothing": 0.1}, False),
        (FIRST, {"vocab_size": FIRST // 2 - 8}, False),
        (FIRST, {"rows": -1}, False),
        (LAST, {"rows": -1}, False),
        (FIRST, {"rows": -1, "impl": "one_pass"}, True),
        (FIRST, {"rows": -1, "reduction": "none"}, True),
    ],
)
def test_auto_takes_one_pass_where_it_can(bytes_a_row, options, expected):
    """As PyTorch's profiler sees it."""
    options = dict(options)
    rows = fewest_rows_of(bytes_a_row) + options.pop("rows", 0)
    logits = torch.zeros(rows, bytes_a_row // 2, device="cuda", dtype=torch.bfloat16).requires_grad_() * 1
    labels = torch.zeros(rows, device="cuda", dtype=torch.int64)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
        vocab_parallel_cross_entropy(logits, labels, **{"gradient": "in_forward", **options})
        torch.cuda.synchronize()
    kernels = {event.key for event in profiled.key_averages()}
    assert any("one_pass" in name for name in kernels) == expected, kernels


def test_a_head():
    """Its chunks take one launch each, and a width that has edges."""
    columns = NARROW + 1
    hidden = torch.randn(300, 64, generator=torch.Generator().manual_seed(0)).bfloat16().cuda()
    weight = torch.randn(columns, 64, generator=torch.Generator().manual_seed(1)).bfloat16().cuda()
    labels = made("some_ignored", 300, columns)[1]
    results = []
    for impl in ("one_pass", "triton"):
        leaves = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        options = {"impl": impl, "chunk_size": 128, **options_of("weights", columns)}
        loss = linear_cross_entropy(*leaves, labels, **options)
        results.append((loss.detach(), *torch.autograd.grad(loss, leaves)))
    for actual, expected in zip(*results, strict=True):
        torch.testing.assert_close(actual.float(), expected.float(), rtol=2**-6, atol=float(expected.abs().max()) / 256)


def test_a_call_that_is_refused_leaves_the_logits_alone():
    """``tests/core/test_one_pass.py`` has everything that one launch cannot do."""
    logits, labels = made("peaked", 4, NARROW)
    before, version = logits.clone(), logits._version
    with pytest.raises(ValueError, match="^impl: 'one_pass' needs a call without softcap"):
        vocab_parallel_cross_entropy(logits, labels, impl="one_pass", gradient="in_forward", softcap=30.0)
    assert torch.equal(logits, before) and logits._version == version


@pytest.mark.no_poison
def test_extra_peak_memory():
    """Less than 64 bytes a row."""
    rows, columns = 2048, NARROW
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
