"""The example of a policy, and switches in the environment that verl and SkyRL read."""

import re
import runpy
import sys
from types import SimpleNamespace

import pytest
import torch

from tests.docs.markdown import ROOT
from tests.linear.test_keep_logits import COLUMNS
from tests.support.cases.linear import record_matmuls
from tests.support.frameworks.rl import in_two_ranks
from tests.support.ranks.pools import device_of
from vocab_parallel_ce.integrations import verl
from vocab_parallel_ce.integrations.log_probs import FusedLinearChunkedDistributedLogprob

EXAMPLE = ROOT / "scripts" / "examples" / "rl_policy_gradient.py"


def _training(rank, group):
    example = SimpleNamespace(**runpy.run_path(str(EXAMPLE)))
    return example.train(15, rank, group.size(), group, device_of(rank, group))


@pytest.mark.reference
def test_the_example_learns(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [str(EXAMPLE), "--cpu", "--steps", "15"])
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    first, last = map(float, re.findall(r"0\.\d+", capsys.readouterr().out))
    assert 0.45 < first < 0.65 < 0.75 < last


@in_two_ranks
def test_the_example_learns_on_two_ranks(rank_pool, impl):
    first, second = rank_pool.run(_training)
    assert first == second and first[0] < 0.55 < 0.75 < first[-1]


@pytest.mark.reference
def test_verls_own_variable_switches_it_on(monkeypatch):
    """verl imports the modules that the variable names when it is imported itself."""
    pytest.importorskip("verl.utils.torch_functional", exc_type=ImportError)
    from tests.support.host.fresh import fresh_python

    variables = {"VOCAB_PARALLEL_CE_VERL": "1", "VERL_USE_EXTERNAL_MODULES": "vocab_parallel_ce.integrations.verl"}
    code = "from verl.utils.torch_functional import logprobs_from_logits as f; print(f.__module__)"
    result = fresh_python("-c", code, **variables)
    assert result.stdout.split()[-1:] == ["vocab_parallel_ce.integrations.verl"], result.stderr


@pytest.mark.reference
@pytest.mark.parametrize("core", ("linear_cross_entropy", "FusedLinearForPPO", "SkyRL"))
def test_heads_keep_their_logits_if_the_environment_says_so(monkeypatch, core):
    """The bits of those that are made again, with a product less per chunk."""
    hidden, weight, labels = torch.randn(6, 5), torch.randn(COLUMNS, 5), torch.randint(0, COLUMNS, (6,))
    calls = {
        "linear_cross_entropy": lambda h, w: verl.linear_cross_entropy(h, w, labels)[0],
        "FusedLinearForPPO": lambda h, w: verl.FusedLinearForPPO()(h, w, labels)[0],
        "SkyRL": lambda h, w: FusedLinearChunkedDistributedLogprob.apply(h, w, labels, 0, COLUMNS, 4, None),
    }
    results = []
    for kept, n_products in (("", 4), ("all", 3)):
        monkeypatch.setenv("VOCAB_PARALLEL_CE_KEEP_LOGITS", kept)
        leaves = [t.clone().requires_grad_() for t in (hidden, weight)]
        with record_matmuls() as products:
            log_probs = calls[core](*leaves)
            log_probs.sum().backward()
        assert len(products) == n_products
        results.append((log_probs, *(leaf.grad for leaf in leaves)))
    assert all(map(torch.equal, *results))
