"""Megatron-Core's losses, computed by this package in its real models: loss, gradients and curves of its own."""

import pytest
import torch

from tests.support.ranks import device_of, in_ranks

pytest.importorskip("megatron.core")

from tests.support import megatron_stubs as stubs
from vocab_parallel_ce.integrations import megatron

in_two_ranks = in_ranks((2,), (), (2,))
KINDS = {
    "loss of logits": {},
    "linear loss, gradients in forward": {"linear": True},
    "linear loss, gradients in backward": {"linear": True, "gradient": "in_backward"},
}
CASES = {
    "gpt": {},
    "gpt-tied-sequence": {"tied": True, "sequence_parallel": True},
    "gpt-mtp-sequence": {"mtp": True, "sequence_parallel": True},
}
HYBRID_CASES = {"hybrid": {}, "hybrid-mtp-sequence-tied": {"tied": True, "mtp": True, "sequence_parallel": True}}


def _losses(rank, group, impl, name, size, dtype, options):
    """Losses and gradients: Megatron's, of our loss over logits, of our linear loss with and without the mask."""
    device = device_of(rank, group)
    with stubs.megatron_ranks(rank, group, size):
        model = stubs.small_model(name, device, dtype=dtype, **options)
        inputs = stubs.batch(device)
        native = stubs.step(model, inputs)
        found, calls = {}, {}
        for kind, asked in KINDS.items():
            with megatron.installed(impl=impl, **asked):
                found[kind] = stubs.step(model, inputs)
                calls[kind] = megatron.report().calls
        assert torch.equal(native[0], stubs.step(model, inputs)[0])
        return native, found, calls


@in_two_ranks
@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("case", [*CASES, *HYBRID_CASES])
def test_losses_and_gradients_are_megatrons(rank_pool, impl, case, size):
    results = rank_pool.run(_losses, impl, case.split("-")[0], size, torch.float32, (CASES | HYBRID_CASES)[case])
    n_heads = 3 if "mtp" in case else 1
    for native, found, calls in results:
        for kind, ours in found.items():
            torch.testing.assert_close(ours[0], native[0], rtol=1e-5, atol=1e-5)
            assert ours[1].keys() == native[1].keys()
            for name in native[1]:
                torch.testing.assert_close(ours[1][name], native[1][name], rtol=1e-4, atol=1e-5, msg=lambda m: f"{kind} {name} {m}")
        assert calls == {kind: {kind: n_heads} for kind in KINDS}
