"""OpenRLHF's log-probabilities and entropies: the formulas of its source in fp64, and its own functions if it is there.

OpenRLHF needs DeepSpeed and flash-attn and is not in CI. The tests that need it skip and say so; the formulas do not.
"""

import sys

import pytest
import torch

from tests.support.cases.inputs import DTYPES
from tests.support.frameworks.rl import (
    Found,
    activations,
    assert_right,
    backward,
    leaves_of,
    on_devices,
    policy,
    real_module,
)
from vocab_parallel_ce.integrations import openrlhf

NAMES = ("log_probs_from_logits", "compute_entropy")


def _found(functions, inputs, order=(0, 1), **options):
    """Both from the same logits, in either order, and one backward of each."""
    leaves = leaves_of(inputs)
    (logits,) = activations(leaves)
    outputs = [None, None]
    calls = [lambda: functions[0](logits, inputs.labels, **options), lambda: functions[1](logits)]
    for which in order:
        outputs[which] = calls[which]()
    for which in order:
        one = [output if which == index else None for index, output in enumerate(outputs)]
        backward(one, inputs.grads, retain_graph=True)
    return Found(*(output.detach() for output in outputs), tuple(leaf.grad for leaf in leaves)), logits.detach()


def _functions(module):
    return [getattr(module, name) for name in NAMES]


@on_devices
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("temperature", [1.0, 0.7, 2])
def test_log_probs(device, dtype, temperature):
    inputs = policy(dtype, device=device)
    leaves = leaves_of(inputs)
    (logits,) = activations(leaves)
    log_probs = openrlhf.log_probs_from_logits(logits, inputs.labels, temperature=temperature)
    assert log_probs.dtype == dtype and torch.equal(logits, inputs.leaves[0])
    backward([log_probs], inputs.grads[:1])
    assert torch.equal(logits, inputs.leaves[0])
    assert_right(Found(log_probs.detach(), None, (leaves[0].grad,)), inputs, temperature=temperature)


@on_devices
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["peaked", "confident", "excluded_columns"])
def test_entropies(device, dtype, kind):
    inputs = policy(dtype, kind, device=device)
    leaves = leaves_of(inputs)
    (logits,) = activations(leaves)
    entropy = openrlhf.compute_entropy(logits)
    backward([None, entropy], inputs.grads)
    assert entropy.dtype == dtype and torch.equal(logits, inputs.leaves[0])
    assert_right(Found(None, entropy.detach(), (leaves[0].grad,)), inputs)


@on_devices
@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_both_of_the_same_logits_in_either_order(device, order):
    """OpenRLHF's actor takes entropies, then log-probabilities, of the same fp32 logits."""
    inputs = policy(kind="confident", device=device)
    found, logits = _found(_functions(openrlhf), inputs, order)
    assert torch.equal(logits, inputs.leaves[0])
    assert_right(found, inputs)


@on_devices
def test_beside_openrlhfs_own_functions(monkeypatch, device):
    if device == "cpu":
        monkeypatch.setitem(sys.modules, "flash_attn.ops.triton.cross_entropy", None)  # it needs a GPU
    utils = real_module("openrlhf.models.utils")
    inputs = policy(kind="confident", device=device)
    own, _ = _found(_functions(utils), inputs, (1, 0))
    with openrlhf.installed() as report:
        assert {f"openrlhf.models.utils.{name}" for name in NAMES} <= set(report.rebound)
        assert list(report.left) == ["the head"]
        found, _ = _found(_functions(utils), inputs, (1, 0))
    assert_right(found, inputs, own)
    assert _found(_functions(utils), inputs, (1, 0))[0].log_probs.equal(own.log_probs)


@pytest.mark.reference
def test_an_actor_uses_them():
    """Its module has the names by ``from .utils import``."""
    actors = real_module("openrlhf.models.actor")
    with openrlhf.installed() as report:
        assert {f"openrlhf.models.actor.{name}" for name in NAMES} <= set(report.rebound)
        assert actors.compute_entropy is real_module("openrlhf.models.utils").compute_entropy
    assert not openrlhf.report().rebound
