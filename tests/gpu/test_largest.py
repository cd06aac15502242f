"""Thresholds and the most probable tokens by kernels, against plain PyTorch on the CPU."""

import pytest
import torch

from vocab_parallel_ce import sampling_threshold, top_k

pytestmark = pytest.mark.cuda


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16, torch.float32), ids=str)
@pytest.mark.parametrize(
    "way", ({"top_k": 50}, {"top_p": 0.9}, {"top_k": 50, "top_p": 0.9}, {"top_k": 2000, "top_p": 0.5})
)
def test_a_threshold_is_that_of_the_cpu(way, dtype):
    """Of 50 rows at most one by the last digit of a sum of exponentials."""
    rows, temperature = (2 * torch.randn(50, 20001)).to(dtype), torch.rand(50) + 0.5
    want = sampling_threshold(rows, temperature=temperature, **way)
    found = sampling_threshold(rows.cuda(), temperature=temperature.cuda(), **way).cpu()
    assert (found != want).sum() <= 1


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16, torch.float32), ids=str)
@pytest.mark.parametrize("k", (1, 8, 64, 300))
def test_ids_are_those_of_the_cpu(k, dtype):
    rows = (2 * torch.randn(20, 20001)).to(dtype)
    (ids, log_probs), (want, values) = (tuple(t.cpu() for t in top_k(x, k)) for x in (rows.cuda(), rows))
    assert torch.equal(ids, want)
    torch.testing.assert_close(log_probs, values, rtol=1e-6, atol=1e-5)
