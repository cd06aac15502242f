"""Probability targets: PyTorch's number, edges, refusals, ranks. ``tests/conformance`` has the pairs of options."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F

from tests.support.inputs import batch
from tests.support.logits import broad_rows
from tests.support.logits_ranks import even
from tests.support.ranks import in_two_ranks
from tests.support.soft import Case, check_ranks, run_in_rank, soft_losses, soft_targets
from tests.support.weights import weights
from vocab_parallel_ce import soft_cross_entropy, verify_calls, vocab_parallel_cross_entropy
from vocab_parallel_ce.losses.targets import TARGETS, Targets
from vocab_parallel_ce.shard import VocabShard
from vocab_parallel_ce.spec import LossOptions

NAN, INF = float("nan"), float("inf")
ROWS, COLUMNS = 5, 43
EVERY = {"label_smoothing": 0.1, "z_loss": 0.02, "softcap": 10.0, "logit_scale": 0.4}


def case_of(kind="peaked", dtype=torch.float32, target_dtype=torch.float32, columns=COLUMNS, options=None, **ways):
    logits = broad_rows(kind, ROWS, columns, dtype=dtype, shards=2).logits
    targets = soft_targets(logits).to(target_dtype)
    return Case(soft_cross_entropy, soft_losses, logits, targets, options or {}, ways)


@pytest.mark.reference
@pytest.mark.parametrize("label_smoothing", (0.0, 0.1, 1.0))
@pytest.mark.parametrize("weight", (None, weights(COLUMNS)), ids=("", "class_weight"))
def test_the_mathematics_is_pytorchs(weight, label_smoothing):
    logits = batch("peaked", rows=ROWS, vocab_size=COLUMNS).logits.double().requires_grad_()
    targets = soft_targets(logits).double()
    options = LossOptions(smoothing=label_smoothing)
    w = None if weight is None else weight.double()
    truth = F.cross_entropy(logits, targets, w, label_smoothing=label_smoothing, reduction="none")
    x, parts, whole = logits.detach(), [], VocabShard(0, COLUMNS, COLUMNS)
    for part in (slice(0, 20), slice(20, 21), slice(21, COLUMNS)):
        beside = Targets(targets[:, part], None if w is None else w[part])
        parts.append(TARGETS.tile(x[:, part], beside, VocabShard(part.start, part.stop, COLUMNS), options))
    stats = TARGETS.merge(parts[0], TARGETS.merge(parts[2], parts[1], options), options)
    beside = Targets(targets, w)
    loss = TARGETS.output("loss", stats, None, beside, whole, options)
    torch.testing.assert_close(loss, truth, rtol=1e-12, atol=1e-12)
    grad = TARGETS.gradient(x, beside, stats, None, whole, options)
    torch.testing.assert_close(grad, torch.autograd.grad(truth.sum(), logits)[0], rtol=1e-12, atol=1e-12)
    own = {"class_weight": weight, "label_smoothing": label_smoothing}
    mean = soft_cross_entropy(logits.float(), targets, **own, impl="reference")
    expected = F.cross_entropy(logits.float(), targets.float(), weight, label_smoothing=label_smoothing)
    torch.testing.assert_close(mean, expected)


def test_the_worked_example_of_the_kernels(impl_device):
    impl, device = impl_device
    leaf = torch.tensor([[1.0, 3.0, 2.0]], device=device, requires_grad=True)
    loss = soft_cross_entropy(leaf, torch.tensor([[0.0, 0.5, 0.5]], device=device), impl=impl)
    loss.backward()
    torch.testing.assert_close(loss.cpu(), torch.tensor(0.9076060))
    torch.testing.assert_close(leaf.grad.cpu(), torch.tensor([[0.0900306, 0.1652410, -0.2552715]]))


def test_a_layout_the_kernels_walk_and_one_they_do_not(impl_device):
    """By name the gradient lies over transposed logits; a column-major target is copied."""
    impl, device = impl_device
    made = case_of(columns=20)
    values = made.logits[:4].view(2, 2, 20)
    source = values.transpose(0, 1).contiguous().to(device).requires_grad_()
    logits = (source * 1).transpose(0, 1)
    targets = made.other[:4].t().contiguous().t().view(2, 2, 20).to(device)
    loss = soft_cross_entropy(logits, targets, reduction="sum", impl=impl, gradient="in_backward")
    (grad,) = torch.autograd.grad(loss, logits)
    leaf = values.double().requires_grad_()
    (truth,) = torch.autograd.grad(soft_losses(leaf.view(4, 20), made.other[:4]).sum(), leaf)
    torch.testing.assert_close(grad.cpu().double(), truth, rtol=0, atol=1e-6)
    assert grad.data_ptr() == logits.data_ptr()


@pytest.mark.parametrize("gradient", ("in_backward", "out_of_place"))
def test_edge_rows(impl_device, gradient):
    """Excluded columns without and with a target, NaN, +inf, a row of -inf, and targets of 0."""
    impl, device = impl_device
    made = case_of(columns=30)
    logits, targets = torch.randn(6, 30), soft_targets(torch.randn(6, 30))
    targets[0:2, 4], logits[0:2, 4], targets[1, 4] = 0.0, -INF, 0.25
    weight = torch.ones(30).index_fill_(0, torch.tensor([4]), 0.0)
    logits[2, 3], logits[3, 3], logits[4], targets[5] = NAN, INF, -INF, 0.0
    leaf = logits.to(device).requires_grad_()
    options = {"reduction": "none", "gradient": gradient, "impl": impl}
    loss = soft_cross_entropy(leaf * 1, targets.to(device), **options)
    (grad,) = torch.autograd.grad(loss.sum(), leaf)
    loss, grad = loss.detach().cpu(), grad.cpu()
    expected = soft_losses(logits[[0, 5]].double(), targets[[0, 5]]).float()
    torch.testing.assert_close(loss[[0, 5]], expected)
    assert loss[1] == INF and loss[2:5].isnan().all() and loss[5] == 0
    assert not grad[:2, 4].any() and grad[:2].isfinite().all() and grad[2:5].isnan().all()
    own = {"label_smoothing": 0.1, "class_weight": weight.to(device)}  # excluded by a weight of 0
    loss = soft_cross_entropy(leaf * 1, targets.to(device), **options, **own)
    (grad,) = torch.autograd.grad(loss.sum(), leaf)
    left = [column for column in range(30) if column != 4]
    expected = soft_losses(logits[:2, left].double(), targets[:2, left], label_smoothing=0.1)
    expected += soft_losses(logits[:2, left].double(), torch.ones(2, 29)) * 0.1 * (1 / 30 - 1 / 29)
    torch.testing.assert_close(loss.detach()[:2].cpu(), expected.float())
    assert grad[:2].isfinite().all() and not grad[:2, 4].any()
    items = {**options, "reduction": "sum", "num_items": 0}
    loss = soft_cross_entropy(leaf * 1, targets.to(device), **items)
    assert loss == 0 and not torch.autograd.grad(loss, leaf, torch.tensor(INF, device=device))[0].any()
    assert made.function(leaf[:0] * 1, targets[:0].to(device), impl=impl) == 0  # no rows


@pytest.mark.reference
def test_where_the_gradient_is_written():
    """In place by name, unless the targets lie in the same memory; a second backward over it raises."""
    made = case_of()
    leaf = made.logits.clone().requires_grad_()
    logits = leaf * 1
    loss = soft_cross_entropy(logits, made.other, gradient="in_backward")
    (grad,) = torch.autograd.grad(loss, logits, retain_graph=True)
    assert grad.data_ptr() == logits.data_ptr()
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(loss, logits)
    with pytest.raises(ValueError, match="has left its gradient"):
        soft_cross_entropy(logits, made.other)
    logits = leaf * 1
    loss = soft_cross_entropy(logits, made.other.clone())
    logits.mul_(2)
    with pytest.raises(RuntimeError, match="were overwritten before backward"):
        loss.backward()
    targets = made.other.clone()
    loss = soft_cross_entropy(leaf * 1, targets)
    targets.mul_(2)
    with pytest.raises(RuntimeError, match="or another tensor of the call were overwritten before backward"):
        loss.backward()
    weight = weights(COLUMNS)
    loss = soft_cross_entropy(leaf * 1, made.other, class_weight=weight)
    weight.mul_(2)
    with pytest.raises(RuntimeError, match="or another tensor of the call were overwritten before backward"):
        loss.backward()
    logits = leaf * 1
    loss = soft_cross_entropy(logits, logits.detach())
    kept = logits.detach().clone()
    (grad,) = torch.autograd.grad(loss, logits)
    assert torch.equal(logits, kept) and grad.data_ptr() != logits.data_ptr()
    with pytest.raises(ValueError, match="^target_probs: expected memory of its own"):
        soft_cross_entropy(logits, logits.detach(), gradient="in_backward")


@pytest.mark.reference
def test_refusals_by_name():
    logits, targets = torch.randn(2, 5, requires_grad=True), torch.rand(2, 5)
    for error, words, changed in (
        (TypeError, "target_probs: .*requires no gradient", {"target_probs": targets.clone().requires_grad_()}),
        (TypeError, "target_probs: dtype", {"target_probs": torch.zeros(2, 5, dtype=torch.int64)}),
        (ValueError, "target_probs: shape", {"target_probs": targets[:, :4]}),
        (TypeError, "target_probs: expected a torch.Tensor", {"target_probs": 3}),
        (ValueError, "gradient: ", {"gradient": "forward"}),
        (ValueError, "reduction: ", {"reduction": "batchmean"}),
        (TypeError, "ignore_index: expected one of", {"ignore_index": 3}),
        (ValueError, "class_weight: expected shape", {"class_weight": torch.ones(4)}),
        (TypeError, "class_weight: expected a constant", {"class_weight": torch.ones(5, requires_grad=True)}),
        (ValueError, "num_items: ", {"num_items": -1, "reduction": "sum"}),
        (ValueError, "logits: last dimension", {"vocab_size": 9}),
        (ValueError, "impl: 'one_pass'", {"impl": "one_pass"}),
    ):
        given = {"logits": logits, "target_probs": targets} | changed
        with pytest.raises(error, match=f"^{words}"):
            soft_cross_entropy(**given)


@pytest.mark.reference
def test_torch_compile_breaks_the_graph_and_computes_the_same():
    made = case_of()
    compiled = torch.compile(lambda x, t: soft_cross_entropy(x * 1, t), backend="eager")
    leaf, again = (made.logits.clone().requires_grad_() for _ in range(2))
    loss, expected = compiled(leaf, made.other), soft_cross_entropy(again * 1, made.other)
    loss.backward(), expected.backward()
    assert torch.equal(loss, expected) and torch.equal(leaf.grad, again.grad)


@in_two_ranks
def test_a_shard_that_is_excluded(rank_pool, impl):
    case, bounds = case_of("excluded_shard", columns=40, reduction="sum", num_items=7), even(20, 2)
    check_ranks(case, rank_pool.run(run_in_rank, case, impl, bounds), bounds, [16])


def _verified(rank, group):
    logits, targets = torch.randn(3, 4 + rank), torch.rand(3, 4 + rank)
    with verify_calls(), pytest.raises(ValueError, match="z_loss"):
        soft_cross_entropy(logits, targets, group=group, z_loss=0.1 * rank, vocab_size=None)
    hard = partial(vocab_parallel_cross_entropy, labels=torch.zeros(3, dtype=torch.int64))
    call = hard if rank else partial(soft_cross_entropy, target_probs=targets)
    with verify_calls(), pytest.raises(ValueError, match="rank 0 has a loss over logits and target_probs"):
        call(logits, group=group)
    return True


@pytest.mark.gloo
@pytest.mark.parametrize("rank_pool", [pytest.param(("gloo", 2), id="gloo-2")], indirect=True)
def test_verification_compares_the_ranks(rank_pool):
    assert rank_pool.run(_verified) == [True, True]
