"""Log-probabilities at k given ids of each token, of logits and of heads: numbers against fp64, edges, ranks."""

from functools import partial

import pytest
import torch

from tests.conformance.widths import HARD, PLACE, columns_of, each, made_of, placed, rows_of
from tests.support.cases.flat import linear_token_log_probs
from tests.support.cases.inputs import IGNORE_INDEX
from tests.support.cases.logits import broad_rows
from tests.support.cases.pairs import covering
from tests.support.cases.soft import Pair
from tests.support.ranks.case import Case, run
from tests.support.ranks.case import check as check_ranks
from tests.support.ranks.pools import in_several_ranks
from tests.support.truth.budget import assert_within_budget
from tests.support.truth.oracle import transformed
from vocab_parallel_ce import token_log_probs

NAN, INF = float("nan"), float("inf")


def log_probs_at(logits, ids, temperature=1.0, **options):
    """``[N, k]`` in the dtype of ``logits [N, V]``, 0 for ignored ids."""
    temperature = temperature.to(logits).unsqueeze(-1) if torch.is_tensor(temperature) else temperature
    found = (transformed(logits, **options) / temperature).log_softmax(-1)
    return found.gather(-1, ids.clamp(min=0)).masked_fill(ids == IGNORE_INDEX, 0.0)


def ids_of(logits, labels, k):
    """The label, the largest, one twice, an ignored one, random ones; the third row has ignored ones alone."""
    n, columns = logits.shape
    ids = torch.randint(0, columns, (n, k), generator=torch.Generator().manual_seed(3))
    ids[:, 0] = torch.where(labels == IGNORE_INDEX, 0, labels)
    if k > 3:
        ids[:, 1], ids[:, 3] = logits.float().argmax(-1), IGNORE_INDEX
        ids[:, -1] = ids[:, 1]
    ids[2] = IGNORE_INDEX
    return ids


def check(found, grad, logits, ids, grad_output, temperature=1.0, **options):
    def expected(dtype):
        leaf = logits.detach().to(dtype).requires_grad_()
        values = log_probs_at(leaf, ids, temperature, **options)
        return values.detach(), torch.autograd.grad(values, leaf, grad_output.to(dtype))[0]

    (truth, d_truth), (peer, d_peer) = expected(torch.float64), expected(torch.float32)
    smallest = temperature if isinstance(temperature, float) else float(temperature.min())
    z = transformed(logits.double(), **options).abs()
    assert_within_budget(found, truth, peer, float(z.max()) / smallest)
    # A column's gradient is a difference: of the sum of all, and of what is given at its id. In exponents z is rounded.
    sums = grad_output.abs().sum(-1).max() / smallest
    in_exponents = float((z.softmax(-1) * z).max()) / smallest
    assert_within_budget(grad, d_truth, d_peer, float(sums) * max(1.0, in_exponents))


LOGITS = covering(
    **PLACE,
    kind=HARD[:2],
    k=(1, 2, 7),
    temperature=(1.0, 0.7, "tokens"),
    softcap=(None, 10.0),
    logit_scale=(1.0, 0.4),
    gradient=("auto", "in_backward", "out_of_place"),
)


@pytest.mark.quick(3)
@each(LOGITS, interpreted=14)
def test_logits(impl_device, case):
    (impl, device), (logits, labels), shape = impl_device, made_of(case), rows_of(case)
    temperature = torch.rand(len(labels)) + 0.5 if case["temperature"] == "tokens" else case["temperature"]
    options = {"softcap": case["softcap"], "logit_scale": case["logit_scale"]}
    there = temperature.view(shape).to(device) if torch.is_tensor(temperature) else temperature
    ids, (leaf, x) = ids_of(logits, labels, case["k"]), placed(logits, case, device)
    ways = {"temperature": there, "impl": impl, "gradient": case["gradient"], "vocab_size": columns_of(case)[0]}
    found = token_log_probs(x, ids.view(*shape, -1).to(device), **options, **ways)
    assert found.shape == (*shape, case["k"])
    grad_output = torch.randn(ids.shape, generator=torch.Generator().manual_seed(1))
    found.backward(grad_output.view(found.shape).to(device))
    check(found.detach().view(ids.shape), leaf.grad, logits, ids, grad_output, temperature, **options)


@pytest.mark.parametrize("chunk_size", (2, "auto"))
@pytest.mark.parametrize("keep_logits", ("none", "all"))
def test_heads(impl_device, chunk_size, keep_logits):
    impl, device = impl_device
    hidden, weight, bias = torch.randn(9, 12), torch.randn(43, 12), torch.randn(43)
    temperature = torch.rand(9) + 0.5
    ids = ids_of(hidden @ weight.t(), torch.randint(0, 43, (9,)), 5)
    grad_output = torch.randn(ids.shape)

    def gradients(function, dtype, device):
        leaves = [t.to(device, dtype, copy=True).requires_grad_() for t in (hidden, weight, bias)]
        found = function(*leaves)
        return found.detach(), *torch.autograd.grad(found, leaves, grad_output.to(found))

    def ours(h, w, b):
        ways = {"impl": impl, "chunk_size": chunk_size, "keep_logits": keep_logits}
        return linear_token_log_probs(h, w, ids.to(device), bias=b, temperature=temperature.to(device), **ways)

    def oracle(h, w, b):
        return log_probs_at(torch.nn.functional.linear(h, w, b), ids, temperature)

    found = gradients(ours, torch.float32, device)
    truth, peer = (gradients(oracle, dtype, "cpu") for dtype in (torch.float64, torch.float32))
    for name, *triple in zip(("log_probs", "hidden", "weight", "bias"), found, truth, peer, strict=True):
        assert_within_budget(*triple, 60.0 if name == "log_probs" else 20.0)


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
    check(found[6:], grad[6:], logits[6:], ids[6:], torch.ones(1, 2))
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
        grads.append(leaf.grad)
    assert torch.equal(*grads)
    check(found.detach(), grads[0], logits, ids, grad_output)


def _weighed(student, ignored, *, ids, factors, reduction, **options):
    """The log-probabilities as one loss per token, as the harness of losses takes them."""
    return (token_log_probs(student, ids, **options) * factors).sum(-1)


def _losses(student, ignored, *, ids, factors, **options):
    return (log_probs_at(student, ids, **options) * factors.to(student)).sum(-1)


@pytest.mark.quick(2)
@pytest.mark.interpreted(2)
@in_several_ranks
def test_ranks(rank_pool, impl):
    """One all_gather of 4 * (k + 3) bytes per token; one rank has no valid column, and ids of others repeat."""
    logits, labels = broad_rows("peaked", 6, 61)
    ids, n = ids_of(logits, labels, 5), rank_pool.world_size
    cuts = [0, 5, *range(64 // n * 2, 64, 64 // n), 64]  # one rank has as many columns as there are ids
    bounds = list(zip(cuts, cuts[1:], strict=False))
    factors = torch.randn(6, 5, generator=torch.Generator().manual_seed(2))
    options = {"ids": ids, "factors": factors, "temperature": 0.7, "reduction": "none"}
    case = Case(Pair(logits, logits, _losses), impl, options, bounds, "shard", function=_weighed)
    check_ranks(case, rank_pool.run(run, case), [32])


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
