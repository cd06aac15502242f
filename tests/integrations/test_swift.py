"""ms-swift's log-probabilities, entropies and divergences: fp64, and its own functions if it is there.

ms-swift has large requirements and is not in CI. The tests that need it skip and say so; the formulas do not. Its
import scripts functions of torch, which these tests replace: run them with PYTORCH_JIT=0.
"""

import pytest
import torch

from tests.support.cases import soft
from tests.support.cases.inputs import DTYPES, batch
from tests.support.cases.logits import Results
from tests.support.frameworks.rl import (
    COLUMNS,
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
from vocab_parallel_ce.integrations import swift

SHARDS, GKD = swift.SHARDS, swift.GKD
DIVERGENCES = {0: {"divergence": "forward"}, 1: {"divergence": "reverse"}, 0.3: {"divergence": "js", "beta": 0.3}}


def _policy(functions, inputs, compute_entropy):
    """Log-probabilities and entropies of one read, and the gradient."""
    leaves = leaves_of(inputs)
    (logits,) = activations(leaves)
    with record_collectives() as collectives:
        found = functions.compute_logps_and_entropy_from_logits(logits, inputs.labels, compute_entropy)
    assert found[0].dtype == torch.float32 and (found[1] is None) is not compute_entropy
    backward(found, inputs.grads)
    outputs = (None if output is None else output.detach() for output in found)
    return Found(*outputs, (leaves[0].grad,)), [call.nbytes for call in collectives]


@on_devices
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("compute_entropy", [False, True])
def test_one_rank(monkeypatch, device, dtype, compute_entropy):
    monkeypatch.setattr(swift, "tensor_parallel_group", lambda: None)
    inputs = policy(dtype, "confident", device=device)
    found, _ = _policy(swift, inputs, compute_entropy)
    assert not compute_entropy or found.entropy.dtype == dtype
    assert_right(found, inputs, roundings=1)


@pytest.mark.reference
def test_ignored_tokens_have_entropies_and_no_log_probability(monkeypatch):
    monkeypatch.setattr(swift, "tensor_parallel_group", lambda: None)
    inputs = policy()
    ignored = inputs.labels == -100
    log_probs, entropy = swift.compute_logps_and_entropy_from_logits(inputs.leaves[0], inputs.labels, True)
    assert ignored.any() and not log_probs[ignored].any() and entropy[ignored].all()


def _on_shards(rank, group, inputs, compute_entropy):
    swift.tensor_parallel_group = lambda: group
    return _policy(swift, shards(inputs, rank, 2, device_of(rank, group)), compute_entropy)


@pytest.mark.parametrize("compute_entropy", [False, True])
@in_two_ranks
def test_shards(rank_pool, impl, compute_entropy):
    inputs = policy(kind="confident")
    results = rank_pool.run(_on_shards, inputs, compute_entropy)
    assert all(nbytes == [(16 if compute_entropy else 12) * inputs.labels.numel()] for _, nbytes in results)
    assert_right(whole([found for found, _ in results]), inputs)


def _pair():
    student, teacher = (batch(kind, rows=6, vocab_size=COLUMNS).logits for kind in ("peaked", "confident"))
    return soft.Pair(student, teacher, soft.divergences)


def _divergence(function, beta, student, teacher, *functions):
    leaf = student.clone().requires_grad_()
    loss = function(leaf * 1, teacher, beta, *functions)
    loss.backward(torch.tensor(0.75, device=leaf.device))
    return Results((loss.detach(),), leaf.grad)


@pytest.mark.reference
@pytest.mark.parametrize("beta", DIVERGENCES)
def test_divergences_of_whole_logits(beta):
    pair = _pair()
    found = _divergence(swift.jsd_loss, beta, pair.logits, pair.other)
    soft.assert_right(found, pair, reduction="sum", **DIVERGENCES[beta])


@pytest.mark.reference
def test_no_token_has_a_divergence_of_0_in_the_graph():
    loss = swift.jsd_loss(torch.zeros(0, COLUMNS, requires_grad=True) * 1, torch.zeros(0, COLUMNS), 0.5)
    assert loss.requires_grad and loss == 0


# With ms-swift itself.


def _both(rank, group, call, *args):
    """In a rank: what ms-swift's own functions get, and ours in their place."""
    state = real_module("megatron.core.parallel_state")
    state.initialize_model_parallel(tensor_model_parallel_size=group.size())
    try:
        real_module(GKD)
        own = call(rank, group, *args)
        with swift.installed() as report:
            assert report.left == swift.LEFT and f"{SHARDS}.vocab_parallel_gather_logps" in report.rebound
            return own, call(rank, group, *args)
    finally:
        state.destroy_model_parallel()


def _every_function(rank, group, inputs, beta):
    pair, device = _pair(), device_of(rank, group)
    functions, gkd = real_module(SHARDS), real_module(GKD)
    given = shards(inputs, rank, 2, device)
    found = [_policy(functions, given, each)[0] for each in (False, True)]
    cut = [tensor.chunk(2, -1)[rank].contiguous().to(device) for tensor in (pair.logits, pair.other)]
    of_shards = functions.vocab_parallel_log_softmax, functions.vocab_parallel_kl_div
    of_whole = pair.logits.to(device), pair.other.to(device)
    return found, [
        _divergence(gkd.jsd_loss, beta, *cut, *of_shards),
        _divergence(gkd.jsd_loss, beta, *of_whole, gkd.default_log_softmax, gkd.default_kl_div),
        _divergence(gkd.jsd_loss, beta, *of_whole),
    ]


@pytest.mark.parametrize("beta", DIVERGENCES)
@in_two_ranks
def test_beside_ms_swifts_own_functions(rank_pool, impl, beta):
    real_module(SHARDS)
    inputs = policy(kind="confident")
    results = rank_pool.run(_both, _every_function, inputs, beta)
    for which in range(2):
        own, found = (whole([result[side][0][which] for result in results]) for side in range(2))
        assert_right(found, inputs, own)
    for own, found in ((own[1], found[1]) for own, found in results):
        torch.testing.assert_close(found, own, rtol=1e-4, atol=1e-5)


@pytest.mark.reference
def test_other_functions_and_a_teacher_with_a_gradient_are_ms_swifts():
    gkd, pair = real_module(GKD), _pair()
    own = gkd.jsd_loss

    def halved(logits):
        return (logits / 2).log_softmax(-1)

    with swift.installed():
        for teacher, functions in ((pair.other, (halved, gkd.default_kl_div)), (pair.other.requires_grad_(), ())):
            given = pair.logits, teacher, 0.3, *functions
            assert torch.equal(gkd.jsd_loss(*given), own(*given))


def _gkd(rank, group):
    """The whole pipeline, of tokens that are not ignored, and of a teacher that is known at its top k."""
    gkd, utils, helpers = real_module(GKD), real_module(SHARDS), real_module("swift.megatron.trainers.gkd_utils")
    inputs, teacher = policy(), policy(kind="confident").leaves[0]
    given, found = shards(inputs, rank, 2, device_of(rank, group)), []
    part = teacher.chunk(2, -1)[rank].to(given.labels.device)
    values, indices = teacher.to(part.device).log_softmax(-1).topk(4)
    functions = helpers.tp_gather_topk, utils.vocab_parallel_log_softmax, utils.vocab_parallel_kl_div
    for output in (gkd.TeacherOutput(full_logits=part), gkd.TeacherOutput(topk_logprobs=values, topk_indices=indices)):
        (leaf,) = leaves_of(given)
        total, n_valid = gkd.gkd_loss(leaf * 1, output, given.labels, 0.5, 0.7, *functions)
        total.backward()
        found.append((total.detach(), n_valid, leaf.grad))
    return found


@in_two_ranks
def test_knowledge_distillation_is_ms_swifts(rank_pool, impl):
    real_module("swift.megatron.trainers.gkd_utils")
    for own, found in rank_pool.run(_both, _gkd):
        torch.testing.assert_close(found, own, rtol=1e-4, atol=1e-5)


def _curve(rank, group):
    utils = real_module(SHARDS)

    def loss_of(hidden, weight, labels):
        log_probs, entropy = utils.compute_logps_and_entropy_from_logits(
            summed_grad(hidden, group) @ weight.t(), labels, True
        )
        is_valid = labels != -100
        return -(log_probs + 0.01 * entropy)[is_valid].mean()

    return curve(rank, group, loss_of)


@in_two_ranks
def test_curves_are_ms_swifts(rank_pool, impl):
    real_module(SHARDS)
    for own, found in rank_pool.run(_both, _curve):
        torch.testing.assert_close(found, own, rtol=1e-4, atol=1e-5)
