"""What only a GPU shows of the linear loss: synchronisation and peak memory."""

from __future__ import annotations

import pytest
import torch

from tests.support.cases.inputs import DTYPES
from tests.support.cases.linear import N_LEAVES as ROWS
from tests.support.cases.linear import WAYS, Leaves
from tests.support.cases.logits import METRICS
from tests.support.host.gpu import assert_host_never_waits, extra_peak_bytes
from vocab_parallel_ce import HeadOptions, Outputs, linear_cross_entropy

pytestmark = pytest.mark.cuda


@pytest.mark.no_poison
def test_the_host_never_waits():
    cases = [Leaves(("auto", "cuda"), dtype=dtype) for dtype in DTYPES]

    def every_path():
        for case in cases:
            for way in WAYS.values():
                for options in ({}, {"chunk_size": 2}, {"valid_tokens": ROWS, "outputs": METRICS}):
                    result = case.loss(**options, **way)
                    loss = result.loss if isinstance(result, Outputs) else result
                    torch.autograd.grad(loss, case.leaves, torch.ones_like(loss))

    assert_host_never_waits(every_path)


@pytest.mark.no_poison
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_memory_grows_with_the_hidden_states_gradient_alone(reduction):
    """Four times as many tokens, and no more logits at a time: 1 KB a token, where the logits would be 16."""
    columns, width = 8000, 256
    weight = torch.randn(columns, width, device="cuda", dtype=torch.bfloat16).requires_grad_()

    def extra(rows):
        hidden = torch.randn(rows, width, device="cuda", dtype=torch.bfloat16).requires_grad_()
        labels = torch.randint(0, columns, (rows,), device="cuda")

        def step():
            loss = linear_cross_entropy(
                hidden, weight, labels, reduction=reduction, options=HeadOptions(chunk_size=1024)
            )
            torch.autograd.grad(loss, (hidden, weight), torch.ones_like(loss))

        return extra_peak_bytes(step)

    extra(1024)
    few, many = extra(4096), extra(16384)
    assert many - few < 12288 * (2 * width + 512), (few, many)
