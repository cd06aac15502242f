"""Distillation against fp64 and TRL: edges. Random calls have the pairs of options, also on ranks."""

from functools import partial
from typing import NamedTuple

import mpmath
import pytest
import torch
import torch.nn.functional as F

from tests.support.cases.flat import linear_distillation_loss
from tests.support.cases.inputs import IGNORE_INDEX
from tests.support.cases.logits import broad_rows
from tests.support.cases.soft import divergences
from tests.support.ranks.in_turn import in_turn
from vocab_parallel_ce import Head, TopKTeacher, VocabShard, distillation_loss, vocab_parallel_cross_entropy
from vocab_parallel_ce.losses.divergences import DIVERGENCES

NAN, INF = float("nan"), float("inf")
ROWS, COLUMNS = 5, 43


class Pair(NamedTuple):
    logits: torch.Tensor
    other: torch.Tensor  # the teacher's
    labels: torch.Tensor


def pair_of(columns=COLUMNS):
    """The teacher is near the student in the first row and another model's in the rest. A label is ignored."""
    logits, labels = broad_rows("peaked", ROWS, columns, shards=2)
    noise = torch.randn(logits.shape, generator=torch.Generator().manual_seed(5))
    other = noise * 3 + logits * 0.3
    other[0], labels[2] = logits[0] + noise[0] * 0.01, IGNORE_INDEX
    return Pair(logits, other, labels)


@pytest.mark.reference
def test_pytorchs_and_trls_numbers():
    gkd = pytest.importorskip("trl.experimental.gkd")
    made = pair_of()
    log_s, log_t = (z.div(1.7).log_softmax(-1) for z in (made.logits, made.other))
    forward = F.kl_div(log_s, log_t, log_target=True, reduction="batchmean")
    reverse = F.kl_div(log_t, log_s, log_target=True, reduction="batchmean")
    for divergence, expected in (("forward", forward), ("reverse", reverse)):
        loss = distillation_loss(made.logits, made.other, divergence=divergence, temperature=1.7)
        torch.testing.assert_close(loss, expected)
    theirs = gkd.GKDTrainer.generalized_jsd_loss
    for beta in (0.2, 0.5):
        given = made.logits.unsqueeze(0), made.other.unsqueeze(0)
        expected = theirs(*given, beta=beta, temperature=1.7, reduction="sum")
        loss = distillation_loss(*given, divergence="js", beta=beta, temperature=1.7, reduction="sum")
        torch.testing.assert_close(loss, expected)


@pytest.mark.reference
def test_a_teacher_in_the_memory_of_the_logits_or_written_before_backward():
    made = pair_of()
    leaf = made.logits.clone().requires_grad_()
    for which in range(2):
        tensors = leaf * 1, made.other.clone()
        loss = distillation_loss(*tensors)
        tensors[which].mul_(2)
        with pytest.raises(RuntimeError, match="were overwritten before backward"):
            loss.backward()
    logits = leaf + 1
    kept = logits.detach().clone()
    (grad,) = torch.autograd.grad(distillation_loss(logits, logits.detach()), logits)
    assert torch.equal(logits, kept) and grad.data_ptr() != logits.data_ptr()
    with pytest.raises(ValueError, match="^teacher: expected memory of its own"):
        distillation_loss(logits, logits.detach(), gradient="in_backward")


@pytest.mark.usefixtures("unread_labels")
@pytest.mark.interpreted(3)
@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_edge_rows(impl_device, divergence):
    """Columns that both exclude, or one; NaN, +inf, -inf rows; labels outside; no items; no rows."""
    impl, device = impl_device
    made = pair_of(columns=30)
    student, teacher = (torch.cat([t, t[1:]]).clone() for t in (made.logits, made.other))
    student[0:2, 4], teacher[0, 4], teacher[2, 4] = -INF, -INF, -INF
    student[3, 3], teacher[4, 3], student[5] = NAN, INF, -INF
    labels = torch.tensor([3, 3, 3, 3, 3, 3, 30, -1, IGNORE_INDEX])
    leaf, on_device = student.to(device).requires_grad_(), teacher.to(device)
    ways = {"divergence": divergence, "labels": labels.to(device), "impl": impl, "temperature": 2.0}
    loss = distillation_loss(leaf * 1, on_device, reduction="none", **ways)
    (grad,) = torch.autograd.grad(loss.sum(), leaf)
    loss, grad = loss.detach().cpu(), grad.cpu()
    truth = divergences(student.double(), teacher.double(), divergence=divergence, temperature=2.0).float()
    torch.testing.assert_close(loss[:3], truth[:3])
    assert loss.isinf().tolist() == [False, divergence == "forward", divergence == "reverse", *[False] * 6]
    assert loss[3:8].isnan().all() and loss[8] == 0 and not grad[8].any() and grad[3:8].isnan().all()
    assert not grad[:2, 4].any() and grad[:2].isfinite().all()
    assert divergence == "reverse" or grad[2].isfinite().all()
    loss = distillation_loss(leaf * 1, on_device, reduction="sum", num_items=0, **ways)
    assert loss == 0 and not torch.autograd.grad(loss, leaf, torch.tensor(INF, device=device))[0].any()
    ways["labels"] = torch.full_like(ways["labels"], IGNORE_INDEX)
    loss = distillation_loss(leaf * 1, on_device, **ways)
    assert loss == 0 and not torch.autograd.grad(loss, leaf)[0].any()
    ways["labels"] = ways["labels"][:0]
    assert distillation_loss(leaf[:0] * 1, on_device[:0], **ways) == 0


@pytest.mark.interpreted(3)
@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_columns_masked_by_the_least_finite_number(impl_device, divergence):
    """In the side that weighs, a probability of 0: its term is 0, also beside the other's mask."""
    impl, device = impl_device
    made, least = pair_of(columns=30), torch.finfo(torch.bfloat16).min
    student, teacher = made.logits.clone(), made.other.clone()
    weighing, other = (teacher, student) if divergence == "forward" else (student, teacher)
    weighing[:, 3:9], weighing[1, 12], other[1, 12] = least, -200.0, least
    leaf = student.to(device).requires_grad_()
    loss = distillation_loss(leaf * 1, teacher.to(device), divergence=divergence, reduction="none", impl=impl)
    (grad,) = torch.autograd.grad(loss.sum(), leaf)
    wide = student.double().requires_grad_()
    truth = divergences(wide, teacher.double(), divergence=divergence)
    (true_grad,) = torch.autograd.grad(truth.sum(), wide)
    torch.testing.assert_close(loss.detach().cpu(), truth.detach().float())
    torch.testing.assert_close(grad.cpu(), true_grad.float())
    assert not grad[:, 3:9].signbit().any() or divergence == "forward"


@pytest.mark.parametrize("divergence", ("forward", "reverse"))
def test_an_infinite_divergence_stays_so_beside_a_larger_logit(impl_device, divergence):
    """Of the same lane or rank or another, earlier or later, also if its first term is nothing beside it: 0 * inf."""
    impl, device = impl_device
    student, teacher = torch.zeros(2, 6, 300)
    weighing, other = (teacher, student) if divergence == "forward" else (student, teacher)
    other[:, 130] = -INF
    for row, column in enumerate((2, 131, 258, 299)):
        weighing[row, column] = 200.0
    weighing[4, 258], other[4, 258], other[5, 258] = 200.0, 200.0, 200.0
    ways = {"divergence": divergence, "reduction": "none", "impl": impl}
    for n in (1, 2, 3):

        def of_rank(rank, group, n=n):
            columns = slice(100 * rank * 3 // n, 100 * (rank + 1) * 3 // n)
            return distillation_loss(
                student[:, columns].to(device), teacher[:, columns].to(device), group=group, **ways
            )

        assert [loss.tolist() for loss in in_turn(n, of_rank)] == [[INF] * 6] * n


def test_the_mixture_of_probabilities_that_are_almost_0(impl_device):
    """Half of the least number is 0 in fp32, and its logarithm would be -inf."""
    impl, device = impl_device
    gaps = torch.arange(80, 110, 0.5)
    rare = torch.stack([torch.zeros_like(gaps), -gaps, torch.full_like(gaps, -300.0)], dim=1)
    never = rare.clone().index_fill_(1, torch.tensor(1), -300.0)
    for student, teacher in ((rare, never), (never, rare)):
        leaf, wide = student.clone().to(device).requires_grad_(), student.double().requires_grad_()
        loss = distillation_loss(leaf * 1, teacher.to(device), divergence="js", reduction="none", impl=impl)
        truth = divergences(wide, teacher.double(), divergence="js")
        torch.testing.assert_close(loss.detach().cpu(), truth.detach().float())
        grads = torch.autograd.grad(loss.sum(), leaf)[0].cpu(), torch.autograd.grad(truth.sum(), wide)[0].float()
        torch.testing.assert_close(*grads)


def precise_js(student, teacher, beta):
    """Losses and gradients in 60 digits: in fp64 a mixture rounds a share of 1e-12 to four."""
    losses, grads = [], []
    with mpmath.workdps(60):
        for rows in zip(student.tolist(), teacher.tolist(), strict=True):
            s, t = ([mpmath.exp(z) / mpmath.fsum(map(mpmath.exp, row)) for z in row] for row in rows)
            m = [beta * b + (1 - mpmath.mpf(beta)) * a for a, b in zip(s, t, strict=True)]
            of_student, of_teacher = (
                [p * mpmath.log(p / q) if p else mpmath.mpf(0) for p, q in zip(side, m, strict=True)] for side in (s, t)
            )
            kl = mpmath.fsum(of_student)
            losses.append(float(beta * mpmath.fsum(of_teacher) + (1 - mpmath.mpf(beta)) * kl))
            grads.append([float((1 - mpmath.mpf(beta)) * (a - p * kl)) for a, p in zip(of_student, s, strict=True)])
    return torch.tensor(losses, dtype=torch.float64), torch.tensor(grads, dtype=torch.float64)


def _js_of_heads(student, teacher, **options):
    finite = (states.nan_to_num(neginf=-1e30) for states in (student, teacher))
    heads = (Head(states, torch.eye(states.shape[-1]).to(states)) for states in finite)
    return linear_distillation_loss(*heads, divergence="js", **options)


def _js_of_topk(student, teacher, **options):
    log_probs, ids = teacher.log_softmax(-1), torch.arange(teacher.shape[-1], device=teacher.device)
    known = TopKTeacher(ids.expand(teacher.shape), log_probs)
    return distillation_loss(student, known, divergence="js", **options)


@pytest.mark.interpreted(5)
@pytest.mark.parametrize("function", (partial(distillation_loss, divergence="js"), _js_of_heads, _js_of_topk))
@pytest.mark.parametrize("beta", (1e-30, 1e-6, 0.1, 0.2, 0.9, 1 - 1e-6, 1 - 1e-12))
def test_a_mixture_with_a_small_share_keeps_its_digits(impl_device, function, beta):
    """At 1e-6 and 1 - 1e-6 the loss was off by 13 % of itself; a gradient, at 1e-12, by all of it."""
    impl, device = impl_device
    draws = torch.randn(2, 4, 12, generator=torch.Generator().manual_seed(3))
    student, teacher = draws * torch.tensor([0.5, 1.0, 3.0, 3.0]).unsqueeze(-1)
    student[3, 1], student[3, 2], teacher[3, 3] = -INF, -70.0, -80.0
    losses, grads = precise_js(student, teacher, beta)
    leaf = student.to(device).requires_grad_()
    found = function(leaf * 1, teacher.to(device), beta=beta, reduction="none", impl=impl)
    (grad,) = torch.autograd.grad(found.sum(), leaf)
    assert ((found.detach().cpu().double() - losses).abs() <= 3e-6 * losses).all()
    assert ((grad.cpu().double() - grads).abs() <= 2e-5 * grads.abs().amax(-1, keepdim=True)).all()
    if impl == "reference" and function is not _js_of_heads:
        leaf = student.double().requires_grad_()
        found = function(leaf * 1, teacher.double(), beta=beta, reduction="none")
        torch.testing.assert_close(found.detach(), losses, rtol=1e-13, atol=0.0)
        wide = torch.autograd.grad(found.sum(), leaf)[0]
        assert ((wide - grads).abs() <= 1e-12 * grads.abs().amax(-1, keepdim=True)).all()


def test_a_hard_weight_of_1_is_cross_entropy_and_equal_logits_are_at_0(impl_device):
    """Also where a column that one of them excludes makes a divergence infinite."""
    impl, device = impl_device
    made = pair_of()
    given = made.logits.to(device), made.other.to(device)
    labels = made.labels.to(device)
    (leaf, teacher), column = (t.clone() for t in given), (labels[0] + 1) % COLUMNS
    leaf[0, column], teacher[1, (labels[1] + 1) % COLUMNS] = -INF, -INF
    leaf.requires_grad_()
    expected = vocab_parallel_cross_entropy(leaf * 1, labels, impl=impl)
    (expected_grad,) = torch.autograd.grad(expected, leaf)
    for divergence in DIVERGENCES:
        ways = {"divergence": divergence, "hard_weight": 1.0, "temperature": 3.0, "impl": impl}
        loss = distillation_loss(leaf * 1, teacher, labels=labels, **ways)
        torch.testing.assert_close(loss, expected)
        torch.testing.assert_close(torch.autograd.grad(loss, leaf)[0], expected_grad)
    for divergence in DIVERGENCES:
        loss = distillation_loss(given[0], given[0], divergence=divergence, reduction="none", impl=impl)
        assert loss.abs().max() < 2e-6


@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_no_items_of_a_hard_weight_are_zero_whatever_the_logits_hold(impl_device, divergence):
    impl, device = impl_device
    made = pair_of()
    leaf, teacher = made.logits.to(device, copy=True), made.other.to(device)
    leaf[0, 3] = torch.nan
    leaf.requires_grad_()
    ways = {"divergence": divergence, "hard_weight": 0.4, "impl": impl, "labels": made.labels.to(device)}
    loss = distillation_loss(leaf * 1, teacher, num_items=0, **ways)
    assert loss == 0 and not torch.autograd.grad(loss, leaf)[0].any()
    assert distillation_loss(leaf * 1, teacher, num_items=1, **ways).isnan()


def _other_padding(rank, group):
    """On each of two ranks: a teacher padded more than the student on the last, and one that starts elsewhere."""
    student, teacher = torch.randn(3, 6), torch.randn(3, 6 + 2 * rank)
    shard = VocabShard(6 * rank, 6 * rank + 6, 11)
    distillation_loss(student, teacher, group=group, vocab_size=shard)
    with pytest.raises(ValueError, match="^teacher: last dimension must give the student's columns"):
        distillation_loss(student, torch.randn(3, 7), group=group, vocab_size=11)
    return True


@pytest.mark.gloo
@pytest.mark.parametrize("rank_pool", [pytest.param(("gloo", 2), id="gloo-2")], indirect=True)
def test_a_teacher_that_is_padded_differently(rank_pool):
    assert rank_pool.run(_other_padding) == [True, True]
