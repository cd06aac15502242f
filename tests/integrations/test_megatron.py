"""Megatron-Core's losses, computed by this package in its real models: loss, gradients and curves of its own."""

import sys
from functools import partial
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch

from tests.support.ranks.pools import device_of, in_ranks
from tests.support.truth.budget import assert_within_budget

pytest.importorskip("megatron.core")

from tests.support.frameworks import megatron_stubs as stubs
from tests.support.frameworks.megatron_stubs import needs_hybrid
from vocab_parallel_ce import parallel_cross_entropy
from vocab_parallel_ce.integrations import megatron

SCRIPTS = Path(__file__).parents[2] / "scripts"
OURS = ("vocab_parallel_ce, logits", "vocab_parallel_ce, linear")
in_two_ranks = in_ranks((2,), (), (2,))
KINDS = {
    "loss of logits": {},
    "linear loss, gradients in forward": {"linear": True},
    "linear loss, gradients in backward": {"linear": True, "gradient": "in_backward"},
}
CASES = [
    pytest.param("gpt", 1, {}, id="gpt, tp 1"),
    pytest.param("gpt", 2, {"tied": True, "mtp": True}, id="gpt, tied, mtp"),
    pytest.param("gpt", 2, {"mtp": True, "sequence_parallel": True}, id="gpt, mtp, sequence"),
    pytest.param("gpt", 2, {"frozen": True}, id="gpt, frozen head"),
    pytest.param("gpt", 2, {"cross_entropy_loss_fusion": True}, id="gpt, fused"),
    pytest.param("gpt", 2, {"tied": True, "sequence_parallel": True}, id="gpt, tied, sequence"),
    pytest.param("hybrid", 1, {"tied": True, "mtp": True}, id="hybrid, tied, mtp, tp 1", marks=needs_hybrid),
    pytest.param("hybrid", 2, {}, id="hybrid", marks=needs_hybrid),
    pytest.param("hybrid", 2, {"mtp": True, "sequence_parallel": True}, id="hybrid, mtp, sequence", marks=needs_hybrid),
    pytest.param("gpt", 2, {"use_mup": True, "mup_base_hidden_size": 4}, id="gpt, mup", marks=needs_hybrid),
]


def _losses(rank, group, impl, name, size, dtype, options):
    """Losses, gradients and MTP's log: Megatron's, and those of each kind with its calls; and its evaluation."""
    device = device_of(rank, group)
    is_frozen, is_fused = (options.pop(each, False) for each in ("frozen", "cross_entropy_loss_fusion"))
    with stubs.megatron_ranks(rank, group, size):
        model = stubs.small_model(name, device, dtype=dtype, **options)
        model.output_layer.requires_grad_(not is_frozen)
        inputs = stubs.batch(device)
        native = *stubs.step(model, inputs), stubs.predicted()
        found = {}
        for kind, asked in KINDS.items():
            model.config.cross_entropy_loss_fusion = is_fused
            with megatron.installed(impl=impl, **asked):
                found[kind] = *stubs.step(model, inputs), stubs.predicted(), megatron.report().calls
                with torch.no_grad():
                    torch.testing.assert_close(model(**inputs), found[kind][0], rtol=1e-6, atol=1e-6)
            stubs.predicted()
            model.config.cross_entropy_loss_fusion = False
        assert all(torch.equal(*both) for both in zip(native[0], stubs.step(model, inputs)[0], strict=True))
        return native, found


@in_two_ranks
@pytest.mark.parametrize("name,size,options", CASES)
def test_losses_and_gradients_are_megatrons(rank_pool, impl, name, size, options):
    results = rank_pool.run(_losses, impl, name, size, torch.float32, options)
    short = torch.float16 if "frozen" in options else torch.bfloat16
    peers = rank_pool.run(_losses, impl, name, size, short, options)
    for (native, found), (native_short, found_short) in zip(results, peers, strict=True):
        for kind in KINDS:
            losses, gradients, predicted, calls = found[kind]
            assert calls == {kind: 3 if "mtp" in options else 1}
            assert found_short[kind][3] == calls
            torch.testing.assert_close(losses, native[0], rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(predicted, native[2], rtol=1e-5, atol=1e-5)
            assert losses.dtype == native_short[0].dtype == found_short[kind][0].dtype == torch.float32
            assert_within_budget(found_short[kind][0], native[0].double(), native_short[0])
            assert gradients.keys() == native[1].keys() == found_short[kind][1].keys()
            for name, gradient in gradients.items():
                truth = native[1][name].double()
                torch.testing.assert_close(gradient.double(), truth, rtol=0, atol=1e-5 * float(truth.abs().max()))
                # A model rounds on the way: what Megatron-LM's own loss loses in all, as numbers of fp32.
                assert_within_budget(found_short[kind][1][name], truth, native_short[1][name].float())


def _example(rank, group):
    sys.path.insert(0, str(SCRIPTS))
    try:
        example, bench = import_module("examples.megatron_gpt"), import_module("bench_megatron")
    finally:
        sys.path.remove(str(SCRIPTS))
    device = device_of(rank, group)
    shape = {"columns": 64, "width": 16, "heads": 2, "length": 8}
    ranks = bench.Ranks(rank, 2, group, device.type)
    providers = {name: options for name, options in bench.PROVIDERS.items() if name != "Megatron-Core, fused"}
    engine = SimpleNamespace(parallel_cross_entropy=parallel_cross_entropy)  # TransformerEngine's own needs a GPU
    own_losses = partial(patch.multiple, bench, PROVIDERS=providers, engine=lambda: engine)
    with stubs.megatron_ranks(rank, group, 2):
        curves = example.compare(4, device, shape, use_cpu_initialization=True)
        model = example.build(**shape, use_cpu_initialization=True)
        with own_losses():
            cases = [bench.measure(model, case, shape, ranks, 1) for case in (bench.Case(2), bench.Case(2, False))]
    with stubs.megatron_ranks(rank, group, 1):
        model = example.build(**shape, use_cpu_initialization=True)
        # The optimizer needs a GPU.
        with own_losses(), patch.object(bench, "get_megatron_optimizer"):
            return curves, [*cases, bench.measure(model, bench.Case(2, overlaps=True), shape, ranks, 1)]


@in_ranks((2,), (), ())
def test_the_example_and_the_benchmark(rank_pool, impl):
    """Megatron's fused loss is left out: its compilation takes longer than all of this."""
    curves, cases = rank_pool.run(_example)[0]
    for kind in ("logits", "linear"):
        torch.testing.assert_close(curves[kind], curves["native"], rtol=2e-3, atol=0)
    for case in cases:
        first, *others = case
        assert [result["provider"] for result in others] == ["Megatron-Core, TransformerEngine's loss", *OURS]
        for result in others:
            torch.testing.assert_close(result["loss"], first["loss"], rtol=1e-3, atol=0)
