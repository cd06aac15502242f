"""Log-probabilities at k given ids of each token: digits, edges, what is sent. Random calls have the numbers."""

from functools import partial

import pytest
import torch

from tests.support.cases.flat import linear_token_log_probs
from tests.support.cases.inputs import IGNORE_INDEX
from tests.support.ranks.collectives import record_collectives
from tests.support.ranks.pools import device_of, in_two_ranks
from vocab_parallel_ce import token_log_probs

NAN, INF = float("nan"), float("inf")


def log_probs_at(logits, ids):
    """``[N, k]`` in the dtype of ``logits [N, V]``, 0 for ignored ids."""
    return logits.log_softmax(-1).gather(-1, ids.clamp(min=0)).masked_fill(ids == IGNORE_INDEX, 0.0)


def test_the_digits_of_a_confident_id(impl_device):
    """1 - p is far below the rounding of p; a second id whose gradient is 0 changes nothing."""
    impl, device = impl_device
    logits, ids = torch.zeros(2, 50), torch.tensor([[7, 3], [7, 7]])
    logits[:, 7] = 22.0
    leaves = logits.to(device, copy=True).requires_grad_(), logits.double().requires_grad_()
    found, truth = token_log_probs(leaves[0] * 1, ids.to(device), impl=impl), log_probs_at(leaves[1], ids)
    grad_output = torch.tensor([[1.0, 0.0], [0.25, 0.75]])
    found.backward(grad_output.to(device))
    truth.backward(grad_output.double())
    torch.testing.assert_close(found.cpu(), truth.float(), rtol=1e-6, atol=0.0)
    torch.testing.assert_close(leaves[0].grad.cpu(), leaves[1].grad.float(), rtol=1e-5, atol=0.0)


@pytest.mark.parametrize("k", (3, 9))
def test_the_digits_of_a_confident_id_among_others(impl_device, k):
    """Given many times, and beside gradients that are far below its own's last digit."""
    impl, device = impl_device
    logits, ids, grad_output = torch.randn(2, 50), torch.full((2, k), 7), torch.rand(2, k) + 0.5
    logits[:, 7], ids[1, 1:], grad_output[1, 1:] = 22.0, torch.arange(8, 7 + k), 1e-9 * torch.randn(k - 1)
    leaves = logits.to(device, copy=True).requires_grad_(), logits.double().requires_grad_()
    token_log_probs(leaves[0] * 1, ids.to(device), impl=impl).backward(grad_output.to(device))
    log_probs_at(leaves[1], ids).backward(grad_output.double())
    torch.testing.assert_close(leaves[0].grad.cpu(), leaves[1].grad.float(), rtol=1e-5, atol=0.0)


def test_edges(impl_device):
    """An excluded id, one outside the vocabulary, NaN, +inf, a row of nothing, and ignored ids beside NaN."""
    impl, device = impl_device
    logits = torch.randn(7, 9)
    ids = torch.randint(0, 9, (7, 2))
    logits[0, ids[0, 0]], ids[1, 1], logits[2, 4], logits[3, 4], logits[4], logits[5] = -INF, 9, NAN, INF, -INF, NAN
    ids[0, 1], ids[3], ids[5] = (ids[0, 0] + 1) % 9, torch.tensor([3, 5]), IGNORE_INDEX
    leaf = logits.to(device).requires_grad_()
    found = token_log_probs(leaf * 1, ids.to(device), impl=impl)
    found.backward(torch.ones_like(found))
    found, grad = found.detach().cpu(), leaf.grad.cpu()
    assert found[0, 0] == -INF and found[0, 1].isfinite()
    assert grad[0].isfinite().all() and grad[0, ids[0, 0]] == 0
    assert found[1, 0].isfinite() and found[1, 1].isnan() and grad[1].isnan().all()
    assert found[2:5].isnan().all() and grad[2:5].isnan().all()
    assert not found[5].any() and not grad[5].any()
    assert token_log_probs(leaf[:0], ids[:0].to(device), impl=impl, outputs=[]).shape == (0, 2)


@pytest.mark.reference
@pytest.mark.parametrize("number", [-(2**62), -(2**62) - 1, -(2**63)])
def test_an_id_far_below_the_vocabulary_is_outside_of_it(number):
    """Also the number that stands for an ignored id inside, unless it is ``ignore_index``."""
    logits, ids = torch.randn(3, 9), torch.tensor([[1, number], [number, number], [2, 3]])
    head = torch.eye(9)
    for call in (partial(token_log_probs, logits), partial(linear_token_log_probs, logits, head)):
        found = call(ids)
        assert found.isnan().tolist() == [[False, True], [True, True], [False, False]]
        own = torch.where(ids == number, 0.0, logits.log_softmax(-1).gather(-1, ids.clamp(min=0)))
        torch.testing.assert_close(call(ids, ignore_index=number), own)
        with pytest.raises(ValueError, match=r"labels: must be in \[0, 9\)"):
            call(ids, check_labels=True)


def test_equal_ids_are_summed_in_one_order(impl_device):
    """The same bits every time, also of many."""
    impl, device = impl_device
    ids, grad_output = torch.full((3, 33), 4), torch.randn(3, 33)
    ids[:, ::3] = torch.randint(0, 9, (3, 11))
    logits = torch.randn(3, 9)
    grads = []
    for _ in range(2):
        leaf = logits.to(device, copy=True).requires_grad_()
        found = token_log_probs(leaf * 1, ids.to(device), impl=impl)
        found.backward(grad_output.to(device))
        grads.append(leaf.grad.cpu())
    assert torch.equal(*grads)
    wide = logits.double().requires_grad_()
    log_probs_at(wide, ids).backward(grad_output.double())
    torch.testing.assert_close(grads[0], wide.grad.float(), rtol=1e-5, atol=1e-5)


def _sent(rank, group, impl):
    logits, ids = torch.randn(6, 30), torch.randint(0, 60, (6, 5))
    with record_collectives() as calls:
        token_log_probs(*(t.to(device_of(rank, group)) for t in (logits, ids)), group=group, impl=impl)
    return [(call.name, call.nbytes) for call in calls]


@in_two_ranks
def test_one_exchange_of_a_number_for_each_id_and_three_more(rank_pool, impl):
    assert rank_pool.run(_sent, impl) == [[("_allgather_base_", 4 * 6 * (5 + 3))]] * 2


@pytest.mark.reference
def test_labels_and_ids_of_inference_mode_are_copied():
    """After a call of the same kind whose plan takes the caller's own tensors."""
    with torch.inference_mode():
        made = torch.tensor([[0, 1, 2]] * 4), torch.tensor([1, 2, 0, 1])
    head = torch.randn(9, 5)
    for ids, label in ((made[0].clone(), made[1].clone()), made):
        calls = (
            lambda x, ids=ids: token_log_probs(x, ids),
            lambda x, label=label: token_log_probs(x, label),
            lambda x, ids=ids: linear_token_log_probs(x[:, :5], head, ids),
        )
        for call in calls:
            leaf = torch.ones(4, 9, requires_grad=True)
            call(leaf * 1).sum().backward()
            assert leaf.grad is not None and leaf.grad.isfinite().all()
