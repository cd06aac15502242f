"""Megatron-Core's losses, computed by this package in its real models: loss, gradients and curves of its own."""

import sys
from importlib import import_module
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from tests.support.ranks import device_of, in_ranks

pytest.importorskip("megatron.core")

from tests.support import megatron_stubs as stubs
from vocab_parallel_ce.integrations import megatron

SCRIPTS = Path(__file__).parents[2] / "scripts"
OURS = ("vocab_parallel_ce, logits", "vocab_parallel_ce, linear")
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
                torch.testing.assert_close(ours[1][name], native[1][name], rtol=1e-4, atol=1e-5)
        assert calls == {kind: {kind: n_heads} for kind in KINDS}


def _example(rank, group):
    sys.path.insert(0, str(SCRIPTS))
    try:
        example, bench = import_module("examples.megatron_gpt"), import_module("bench_megatron")
    finally:
        sys.path.remove(str(SCRIPTS))
    device = device_of(rank, group)
    shape = {"columns": 64, "width": 16, "heads": 2, "length": 8}
    with stubs.megatron_ranks(rank, group, 2):
        curves = example.compare(4, device, shape, use_cpu_initialization=True)
        model = example.build(**shape, use_cpu_initialization=True)
        ranks = bench.Ranks(rank, 2, group, device.type)
        with patch.object(bench, "PROVIDERS", {n: o for n, o in bench.PROVIDERS.items() if not n.endswith("fused")}):
            return curves, bench.measure(model, 2, shape, ranks, 1)


@in_ranks((2,), (), ())
def test_the_example_and_the_benchmark(rank_pool, impl, tmp_path):
    curves, case = rank_pool.run(_example)[0]
    for kind in ("logits", "linear"):
        torch.testing.assert_close(curves[kind], curves["native"], rtol=2e-3, atol=0)
    assert [result["provider"] for result in case["results"]][1:] == list(OURS)
    torch.testing.assert_close(*[result["loss"] for result in case["results"][::2]], rtol=1e-3, atol=0)
