"""Probability targets: PyTorch's number, edges, in-place gradients. ``tests/conformance`` has the numbers."""

import pytest
import torch
import torch.nn.functional as F

from tests.support.cases.inputs import batch
from tests.support.cases.logits import broad_rows
from tests.support.cases.soft import Pair, soft_losses, soft_targets
from tests.support.cases.weights import weights
from tests.support.ranks.case import Case, check, run
from tests.support.ranks.pools import in_two_ranks
from vocab_parallel_ce import vocab_parallel_cross_entropy

NAN, INF = float("nan"), float("inf")
ROWS, COLUMNS = 5, 43


def pair_of(kind="peaked", columns=COLUMNS):
    logits = broad_rows(kind, ROWS, columns, shards=2).logits
    return Pair(logits, soft_targets(logits), soft_losses)


@pytest.mark.reference
@pytest.mark.parametrize("weight", (None, weights(COLUMNS)), ids=("", "class_weight"))
def test_pytorchs_numbers(weight):
    """PyTorch has a probability target too."""
    logits = batch("peaked", rows=ROWS, vocab_size=COLUMNS).logits.double().requires_grad_()
    targets = soft_targets(logits).double()
    for label_smoothing in (0.0, 0.1, 1.0):
        own = {"class_weight": None if weight is None else weight.double(), "label_smoothing": label_smoothing}
        loss = vocab_parallel_cross_entropy(logits * 1, targets, **own)
        truth = F.cross_entropy(logits, targets, own["class_weight"], label_smoothing=label_smoothing)
        torch.testing.assert_close(loss, truth, rtol=1e-12, atol=1e-12)
        grads = (torch.autograd.grad(each, logits)[0] for each in (loss, truth))
        torch.testing.assert_close(*grads, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("gradient", ("in_backward", "out_of_place"))
def test_edge_rows(impl_device, gradient):
    """Excluded columns without and with a target, NaN, +inf, a row of -inf, and targets of 0."""
    impl, device = impl_device
    logits, targets = torch.randn(6, 30), soft_targets(torch.randn(6, 30))
    targets[0:2, 4], logits[0:2, 4], targets[1, 4] = 0.0, -INF, 0.25
    weight = torch.ones(30).index_fill_(0, torch.tensor([4]), 0.0)
    logits[2, 3], logits[3, 3], logits[4], targets[5] = NAN, INF, -INF, 0.0
    leaf = logits.to(device).requires_grad_()
    options = {"reduction": "none", "gradient": gradient, "impl": impl}
    loss = vocab_parallel_cross_entropy(leaf * 1, targets.to(device), **options)
    (grad,) = torch.autograd.grad(loss.sum(), leaf)
    loss, grad = loss.detach().cpu(), grad.cpu()
    expected = soft_losses(logits[[0, 5]].double(), targets[[0, 5]]).float()
    torch.testing.assert_close(loss[[0, 5]], expected)
    assert loss[1] == INF and loss[2:5].isnan().all() and loss[5] == 0
    assert not grad[:2, 4].any() and grad[:2].isfinite().all() and grad[2:5].isnan().all()
    own = {"label_smoothing": 0.1, "class_weight": weight.to(device)}  # excluded by a weight of 0
    loss = vocab_parallel_cross_entropy(leaf * 1, targets.to(device), **options, **own)
    (grad,) = torch.autograd.grad(loss.sum(), leaf)
    left = [column for column in range(30) if column != 4]
    expected = soft_losses(logits[:2, left].double(), targets[:2, left], label_smoothing=0.1)
    expected += soft_losses(logits[:2, left].double(), torch.ones(2, 29)) * 0.1 * (1 / 30 - 1 / 29)
    torch.testing.assert_close(loss.detach()[:2].cpu(), expected.float())
    assert grad[:2].isfinite().all() and not grad[:2, 4].any()
    items = {**options, "reduction": "sum", "num_items": 0}
    loss = vocab_parallel_cross_entropy(leaf * 1, targets.to(device), **items)
    assert loss == 0 and not torch.autograd.grad(loss, leaf, torch.tensor(INF, device=device))[0].any()
    assert vocab_parallel_cross_entropy(leaf[:0] * 1, targets[:0].to(device), impl=impl) == 0  # no rows


@pytest.mark.reference
def test_where_the_gradient_is_written():
    """In place by name, unless the targets lie in the same memory; a second backward over it raises."""
    made = pair_of()
    leaf = made.logits.clone().requires_grad_()
    logits = leaf * 1
    loss = vocab_parallel_cross_entropy(logits, made.other, gradient="in_backward")
    (grad,) = torch.autograd.grad(loss, logits, retain_graph=True)
    assert grad.data_ptr() == logits.data_ptr()
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(loss, logits)
    with pytest.raises(ValueError, match="has left its gradient"):
        vocab_parallel_cross_entropy(logits, made.other)
    logits = leaf * 1
    loss = vocab_parallel_cross_entropy(logits, made.other.clone())
    logits.mul_(2)
    with pytest.raises(RuntimeError, match="were overwritten before backward"):
        loss.backward()
    targets = made.other.clone()
    loss = vocab_parallel_cross_entropy(leaf * 1, targets)
    targets.mul_(2)
    with pytest.raises(RuntimeError, match="or another tensor of the call were overwritten before backward"):
        loss.backward()
    weight = weights(COLUMNS)
    loss = vocab_parallel_cross_entropy(leaf * 1, made.other, class_weight=weight)
    weight.mul_(2)
    with pytest.raises(RuntimeError, match="or another tensor of the call were overwritten before backward"):
        loss.backward()
    logits = leaf * 1
    loss = vocab_parallel_cross_entropy(logits, logits.detach())
    kept = logits.detach().clone()
    (grad,) = torch.autograd.grad(loss, logits)
    assert torch.equal(logits, kept) and grad.data_ptr() != logits.data_ptr()
    with pytest.raises(ValueError, match="^labels: expected memory of its own"):
        vocab_parallel_cross_entropy(logits, logits.detach(), gradient="in_backward")


@in_two_ranks
def test_a_shard_that_is_excluded_and_smoothing_over_all_columns(rank_pool, impl):
    for kind, options in (("excluded_shard", {}), ("peaked", {"label_smoothing": 0.1})):
        case = Case(pair_of(kind, columns=40), impl, {**options, "reduction": "sum", "num_items": 7})
        check(case, rank_pool.run(run, case), [16])
