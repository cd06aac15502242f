"""SkyRL's log-probabilities and entropies on shards: the formulas in fp64, and its own functions if it is there.

SkyRL needs another Python and is not in CI: unpack its wheel. The tests that need it skip and say so; the formulas do
not. Two of its cores are those of NeMo-RL, which has their tests.
"""

import pytest
import torch
import torch.distributed as dist

from tests.support.cases.inputs import DTYPES
from tests.support.frameworks.rl import (
    COLUMNS,
    Found,
    assert_right,
    backward,
    curve,
    in_two_ranks,
    leaves_of,
    policy,
    real_module,
    shards,
    summed_grad,
    whole,
)
from tests.support.ranks.collectives import assert_refused, messages_of, record_collectives
from tests.support.ranks.pools import device_of
from vocab_parallel_ce.integrations import skyrl

MODULE = skyrl.MODULE


def _columns(rank, group):
    width = COLUMNS // group.size()
    return rank * width, (rank + 1) * width


def _head(rank, group, inputs, functions=skyrl, chunk_size=3):
    """In a rank: log-probabilities of its rows; the gradient of the hidden states is summed over the ranks here."""
    leaves = leaves_of(shards(inputs, rank, 2, device_of(rank, group)))
    given = inputs.labels.to(leaves[0].device), *_columns(rank, group), chunk_size, group
    core = functions.FusedLinearChunkedDistributedLogprob.apply
    with record_collectives() as collectives:
        log_probs = core(*leaves, *given)
        assert log_probs.dtype == torch.float32
        backward([log_probs], [inputs.grads[0].to(log_probs.device)])
    share = leaves[0].grad.clone()
    dist.all_reduce(leaves[0].grad, group=group)
    assert not torch.allclose(share, leaves[0].grad, rtol=0.1)
    alone = core(*leaves, *given, True)
    assert not alone.requires_grad
    return Found(log_probs.detach(), None, tuple(leaf.grad for leaf in leaves)), [call.nbytes for call in collectives]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@in_two_ranks
def test_heads(rank_pool, impl, dtype):
    inputs = policy(dtype, head=True)
    results = rank_pool.run(_head, inputs)
    kept = inputs.labels if rank_pool.backend == "nccl" else inputs.labels[inputs.labels != -100]  # a CPU counts them
    assert [nbytes for _, nbytes in results] == [[12 * kept.numel()]] * 2
    # Each rank rounds its share of the hidden states' gradient, and the sum is rounded again.
    assert_right(whole([found for found, _ in results]), inputs, roundings=3)


def _entropies(rank, group, inputs, functions=skyrl, **options):
    if functions is skyrl:
        skyrl.tensor_parallel_group = lambda: group
    inputs = shards(inputs, rank, 2, device_of(rank, group))
    (leaf,) = leaves_of(inputs)
    entropy = functions.vocab_parallel_entropy(leaf * 1, **options)
    backward([entropy], inputs.grads[1:])
    assert entropy.dtype == leaf.dtype
    return Found(None, entropy.detach(), (leaf.grad,))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@in_two_ranks
def test_entropies(rank_pool, impl, dtype):
    inputs = policy(dtype, "confident")
    assert_right(whole(rank_pool.run(_entropies, inputs)), inputs)


def _refusals(rank, group):
    device = device_of(rank, group)
    hidden, head, target = torch.randn(2, 4, 8), torch.randn(10, 8), torch.zeros(2, 4, dtype=torch.int64)
    core = skyrl.FusedLinearChunkedDistributedLogprob.apply
    given = [tensor.to(device) for tensor in (hidden, head, target)]
    return messages_of({"padded": lambda: core(*given, rank * 10, rank * 10 + 9, 4, group)})


@in_two_ranks
def test_shards_that_are_not_equal_are_refused(rank_pool, impl):
    assert_refused(rank_pool.run(_refusals), {"padded": "ValueError: vocab_start_index, vocab_end_index: expected "})


# With SkyRL itself.


def _both(rank, group, call, *args):
    """In a rank: what SkyRL's own functions get, and ours in their place."""
    state = real_module("megatron.core.parallel_state")
    state.initialize_model_parallel(tensor_model_parallel_size=group.size())
    try:
        own = call(rank, group, *args)
        with skyrl.installed() as report:
            assert report.left == skyrl.LEFT and len(report.rebound) >= 4
            return own, call(rank, group, *args)
    finally:
        state.destroy_model_parallel()


def _every_function(rank, group, inputs, head):
    utils = real_module(MODULE)
    given = shards(inputs, rank, 2, device_of(rank, group))
    columns, found = _columns(rank, group), []
    for chunk_size in (None, 3):
        (leaf,) = leaves_of(given)
        targets = given.labels.roll(1, dims=-1)
        log_probs = utils.from_parallel_logits_to_logprobs(leaf * 1, targets, *columns, group, chunk_size=chunk_size)
        backward([log_probs], [given.grads[0][:, :-1]])
        found.append((log_probs.detach(), leaf.grad))
    entropy = _entropies(rank, group, inputs, utils), _entropies(rank, group, inputs, utils, chunk_size=2)
    hidden, weight = leaves_of(shards(head, rank, 2, given.labels.device))
    options = {"chunk_size": 2, "temperature": 0.7}
    log_probs = utils.from_parallel_hidden_to_logprobs(hidden, weight, given.labels, *columns, group, **options)
    backward([log_probs], [given.grads[0][:, :-1]])
    return found, entropy, (log_probs.detach(), hidden.grad, weight.grad)


@in_two_ranks
def test_beside_skyrls_own_functions(rank_pool, impl):
    real_module(MODULE)
    for own, found in rank_pool.run(_both, _every_function, policy(kind="peaked"), policy(kind="peaked", head=True)):
        torch.testing.assert_close(found, own, rtol=1e-4, atol=1e-5)


def _curves(rank, group):
    utils = real_module(MODULE)

    def loss_of(hidden, weight, labels):
        targets, is_valid = labels.clamp(min=0).roll(1, dims=-1), (labels != -100)[:, :-1]
        given = summed_grad(hidden, group), weight, targets, *_columns(rank, group), group
        return -utils.from_parallel_hidden_to_logprobs(*given, chunk_size=2)[is_valid].mean()

    return curve(rank, group, loss_of)


@in_two_ranks
def test_curves_are_skyrls(rank_pool, impl):
    real_module(MODULE)
    for own, found in rank_pool.run(_both, _curves):
        torch.testing.assert_close(found, own, rtol=1e-4, atol=1e-5)
