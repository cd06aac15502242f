"""AReaL's log-probabilities and entropies: the formulas of its source in fp64, and its own functions if it is there.

AReaL needs ray and others and is not in CI. The tests that need it skip and say so; the formulas do not.
"""

import pytest
import torch

from tests.support.cases.inputs import DTYPES
from tests.support.frameworks.rl import (
    Found,
    activations,
    assert_right,
    backward,
    curve,
    in_two_ranks,
    leaves_of,
    on_devices,
    policy,
    real_module,
    shards,
    summed_grad,
    whole,
)
from tests.support.ranks.collectives import record_collectives
from tests.support.ranks.pools import device_of
from vocab_parallel_ce.integrations import areal

MODULE = areal.MODULE


def _found(functions, inputs, has_entropy, **options):
    leaves = leaves_of(inputs)
    (logits,) = activations(leaves)
    function = functions.gather_logprobs_entropy if has_entropy else functions.gather_logprobs
    with record_collectives() as collectives:
        outputs = function(logits, inputs.labels, **options)
    outputs = outputs if has_entropy else (outputs, None)
    assert all(output is None or output.dtype == torch.float32 for output in outputs)
    backward(outputs, inputs.grads)
    values = (None if output is None else output.detach() for output in outputs)
    return Found(*values, (leaves[0].grad,)), [call.nbytes for call in collectives]


@on_devices
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("has_entropy", [False, True])
def test_one_rank(device, dtype, has_entropy):
    inputs = policy(dtype, "confident", device=device)
    assert_right(_found(areal, inputs, has_entropy, temperature=0.7)[0], inputs, temperature=0.7)


@pytest.mark.reference
def test_ignored_tokens_have_entropies_and_no_log_probability():
    inputs = policy()
    log_probs, entropy = areal.gather_logprobs_entropy(inputs.leaves[0], inputs.labels)
    ignored = inputs.labels == -100
    assert ignored.any() and not log_probs[ignored].any() and entropy[ignored].all()


def _on_shards(rank, group, inputs, has_entropy):
    inputs = shards(inputs, rank, 2, device_of(rank, group))
    return _found(areal, inputs, has_entropy, temperature=0.7, tp_group=group)


@pytest.mark.parametrize("has_entropy", [False, True])
@in_two_ranks
def test_shards(rank_pool, impl, has_entropy):
    inputs = policy(kind="confident")
    results = rank_pool.run(_on_shards, inputs, has_entropy)
    assert all(nbytes == [(16 if has_entropy else 12) * inputs.labels.numel()] for _, nbytes in results)
    assert_right(whole([found for found, _ in results]), inputs, temperature=0.7)


# With AReaL itself.


def _both(rank, group, inputs):
    """In a rank: AReaL's own functions, in chunks and at once, and ours in their place."""
    functions, inputs = real_module(MODULE), shards(inputs, rank, 2, device_of(rank, group))

    def every():
        return [
            _found(functions, inputs, has_entropy, temperature=0.7, tp_group=group, chunk_size=chunk_size)[0]
            for has_entropy in (False, True)
            for chunk_size in (1, 1024)
        ]

    own = every()
    with areal.installed() as report:
        assert report.left == areal.LEFT and "areal.utils.functional.gather_logprobs" in report.rebound
        return own, every()


@in_two_ranks
def test_beside_areals_own_functions(rank_pool, impl):
    real_module(MODULE)
    inputs = policy(kind="confident")
    for which in zip(*(zip(*result, strict=True) for result in rank_pool.run(_both, inputs)), strict=True):
        own, found = (whole([pair[side] for pair in which]) for side in range(2))
        assert_right(found, inputs, own, temperature=0.7)


def _curves(rank, group):
    functions = real_module(MODULE)

    def loss_of(hidden, weight, labels):
        logits = summed_grad(hidden, group) @ weight.t()
        log_probs, entropy = functions.gather_logprobs_entropy(logits, labels.clamp(min=0), tp_group=group)
        return -(log_probs + 0.01 * entropy)[labels != -100].mean()

    own = curve(rank, group, loss_of)
    with areal.installed():
        return own, curve(rank, group, loss_of)


@in_two_ranks
def test_curves_are_areals(rank_pool, impl):
    real_module(MODULE)
    for own, found in rank_pool.run(_curves):
        torch.testing.assert_close(found, own, rtol=1e-4, atol=1e-5)
