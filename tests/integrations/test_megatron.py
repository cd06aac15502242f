"""Megatron-Core's losses, computed by this package in its real models: loss, gradients and curves of its own."""

import pytest
import torch

from tests.support.ranks import device_of, in_ranks

pytest.importorskip("megatron.core")

from tests.support import megatron_stubs as stubs
from vocab_parallel_ce.integrations import megatron

in_two_ranks = in_ranks((2,), (), (2,))
CASES = {
    "gpt": {},
    "gpt-tied-sequence": {"tied": True, "sequence_parallel": True},
    "gpt-mtp-sequence": {"mtp": True, "sequence_parallel": True},
}
HYBRID_CASES = {"hybrid": {}, "hybrid-mtp-sequence-tied": {"tied": True, "mtp": True, "sequence_parallel": True}}


def _losses(rank, group, impl, name, size, dtype, options):
    device = device_of(rank, group)
    with stubs.megatron_ranks(rank, group, size):
        model = stubs.small_model(name, device, dtype=dtype, **options)
        inputs = stubs.batch(device)
        native = stubs.step(model, inputs)
        with megatron.installed(impl=impl) as report:
            logits = stubs.step(model, inputs)
            calls = megatron.report().calls
        return native, logits, calls, report.rebound


@in_two_ranks
@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("case", [*CASES, *HYBRID_CASES])
def test_losses_and_gradients_are_megatrons(rank_pool, impl, case, size):
    results = rank_pool.run(_losses, impl, case.split("-")[0], size, torch.float32, (CASES | HYBRID_CASES)[case])
    for native, ours, calls, rebound in results:
        torch.testing.assert_close(ours[0], native[0], rtol=1e-5, atol=1e-5)
        assert ours[1].keys() == native[1].keys()
        for name in native[1]:
            torch.testing.assert_close(ours[1][name], native[1][name], rtol=1e-4, atol=1e-6)
        assert calls
