"""Teachers that are known at their k most probable tokens: numbers against fp64, and edges."""

import math
from functools import partial

import pytest
import torch

from tests.support.cases.flat import linear_distillation_loss
from tests.support.cases.inputs import IGNORE_INDEX, Batch, padded_shard
from tests.support.cases.logits import broad_rows, random_grad_output
from tests.support.cases.pairs import covering
from tests.support.cases.soft import topk_loss, topk_losses
from tests.support.ranks.collectives import record_collectives
from tests.support.ranks.pools import in_ranks
from tests.support.truth.budget import assert_within_budget
from vocab_parallel_ce import Head, TopKTeacher, VocabShard, distillation_loss, vocab_parallel_cross_entropy

NAN, INF = float("nan"), float("inf")
ROWS, COLUMNS, K = 5, 43, 6


def made_of(kind="peaked", dtype=torch.float32, columns=COLUMNS, labels=False, k=K):
    """Logits and labels, and what is known of the teacher."""
    made = broad_rows(kind, ROWS, columns, dtype=dtype, shards=2)
    noise = torch.randn(made.logits.shape, generator=torch.Generator().manual_seed(5))
    log_t = (noise * 2 + made.logits.float() * 0.3).log_softmax(-1)
    # Shuffled: the most probable token need not be first.
    order = torch.randperm(k, generator=torch.Generator().manual_seed(6))
    log_probs, ids = (t[:, order] for t in log_t.topk(k, dim=-1))
    given = made.labels.clone().index_fill_(0, torch.tensor([2]), IGNORE_INDEX) if labels else None
    return Batch(made.logits, given), {"teacher_ids": ids, "teacher_log_probs": log_probs}


def on(device, options):
    return {name: value.to(device) if torch.is_tensor(value) else value for name, value in options.items()}


def grad_output_of(loss):
    return random_grad_output(len(loss), seed=1).to(loss.device) if loss.dim() else torch.tensor(0.75)


def assert_right(loss, grad, logits, *, reduction="mean", gradient="auto", **options):
    """In fp64, but for the rounding of what is subtracted: of ``q * (|log s| + |log q|)``, and of exponents."""
    found, labels, grad_output = [], options.get("labels"), grad_output_of(loss)
    for dtype, place in ((torch.float64, "cpu"), (torch.float32, grad.device)):
        leaf = logits.to(place, dtype, copy=True).requires_grad_()
        losses = topk_losses(leaf, **on(place, options))
        counted = torch.ones_like(losses) if labels is None else (labels != IGNORE_INDEX).to(losses)
        losses = losses.where(counted > 0, 0.0)
        total = losses if reduction == "none" else losses.sum() / (counted.sum() if reduction == "mean" else 1)
        found.append((total, *torch.autograd.grad(total, leaf, grad_output.to(leaf))))
    z = logits.double() / options.get("temperature", 1.0)
    log_q, own = options["teacher_log_probs"].double(), z.log_softmax(-1).gather(-1, options["teacher_ids"])
    is_forward = options.get("divergence", "forward") == "forward" and not options.get("hard_weight")
    weight = log_q.exp() if is_forward else torch.maximum(log_q, own).exp()
    of_loss = float((weight * (own.abs() + log_q.abs())).sum(-1).max()) + (not is_forward)
    of_grad = float((z.softmax(-1) * z.abs() * grad_output.abs().max().cpu()).max()) / (1 if loss.dim() else len(z))
    for actual, truth, peer, size in zip((loss, grad), *found, (of_loss, of_grad), strict=True):
        assert_within_budget(actual, truth, peer, size)


def check_call(impl_device, made, **options):
    impl, device = impl_device
    options |= {} if made.labels is None else {"labels": made.labels}
    leaf = made.logits.to(device, copy=True).requires_grad_()
    loss = topk_loss(leaf * 1, **on(device, options), impl=impl)
    loss.backward(grad_output_of(loss))
    assert_right(loss, leaf.grad, made.logits, **options)


BEYOND_FORWARD = covering(
    divergence=("forward", "reverse", "js"),
    rest=("ignore", "bucket"),
    hard=(None, 0.0, 0.3),  # None: without labels
    reduction=("mean", "sum", "none"),
    gradient=("auto", "in_backward", "out_of_place"),
    kind=("peaked", "confident", "far_negative"),
    dtype=(torch.float32, torch.bfloat16),
    temperature=(1.0, 2.5),
)


@pytest.mark.quick(3)
@pytest.mark.interpreted(12)
@pytest.mark.parametrize("case", BEYOND_FORWARD, ids=map(str, range(len(BEYOND_FORWARD))))
def test_divergences_at_known_tokens(impl_device, case):
    options = {name: case[name] for name in ("rest", "divergence", "temperature", "reduction", "gradient")}
    options |= {"hard_weight": case["hard"], "temperature": 1.0} if case["hard"] else {}
    options |= {"beta": 0.2} if case["divergence"] == "js" else {}
    pair, known = made_of(case["kind"], case["dtype"], labels=case["hard"] is not None)
    check_call(impl_device, pair, **known, **options)


ON_RANKS = covering(divergence=("forward", "js"), rest=("ignore", "bucket"), reduction=("mean", "none"))


def _in_rank(rank, group, impl, options):
    """The loss and gradient of this rank's columns, and what is sent."""
    made, known = made_of()
    shard = VocabShard(15 * rank, 15 * rank + 15, COLUMNS)
    leaf = padded_shard(made.logits, shard.start, shard.stop).requires_grad_()
    with record_collectives() as sent:
        loss = topk_loss(leaf * 1, **known, **options, group=group, vocab_size=shard, impl=impl)
        loss.backward(grad_output_of(loss))
    return loss.detach(), leaf.grad, [(call.name, call.nbytes) for call in sent]


@pytest.mark.interpreted(2)
@pytest.mark.parametrize("options", ON_RANKS, ids=lambda options: "-".join(options.values()))
@in_ranks((3,), (3,), ())
def test_three_ranks(rank_pool, impl, options):
    """Of which the last has padding."""
    (made, known), results = made_of(), rank_pool.run(_in_rank, impl, options)
    for loss, _, sent in results:
        assert torch.equal(loss, results[0][0]) and sent == [("_allgather_base_", 4 * (3 + K) * ROWS)]
    grad, of_padding = torch.cat([grad for _, grad, _ in results], -1).split([COLUMNS, 2], -1)
    assert not of_padding.any()
    assert_right(results[0][0], grad, made.logits, **known, **options)


@pytest.mark.parametrize("divergence", ("forward", "reverse", "js"))
@pytest.mark.parametrize("rest", ("ignore", "bucket"))
@pytest.mark.usefixtures("unread_labels")
def test_edges(impl_device, rest, divergence):
    """A token left out, one that the student excludes, a label outside, a row of nothing, an ignored row; NaN."""
    impl, device = impl_device
    made, of_teacher = made_of(columns=20)
    ids, log_probs = (tensor.clone() for tensor in of_teacher.values())
    student, labels = made.logits.clone(), torch.tensor([3, 4, 20, 5, IGNORE_INDEX])
    log_probs[0, 2], student[1, ids[1, 0]], log_probs[3] = -INF, -INF, -INF
    ids[0, 2], student[3:] = ids[0, 2] if rest == "bucket" else -7, NAN
    given = {"teacher_ids": ids.to(device), "teacher_log_probs": log_probs.to(device), "rest": rest}
    leaf, ways = student.to(device).requires_grad_(), {"divergence": divergence, "impl": impl, "reduction": "none"}
    loss = topk_loss(leaf * 1, **given, **ways, labels=labels.to(device))
    (grad,) = torch.autograd.grad(loss.sum(), leaf)
    loss, grad = loss.detach().cpu(), grad.cpu()
    assert loss[2].isnan() and grad[2].isnan().all() and loss[4] == 0 and not grad[4].any()
    assert loss[3].isnan()  # of its label's logits
    assert divergence != "forward" or (loss[1] == INF and grad[1].isfinite().all() and grad[1, ids[1, 0]] == 0)
    for row, kept in ((0, [0, 1, 3, 4, 5]), *([(1, list(range(K)))] if divergence != "forward" else [])):
        known = {"teacher_ids": ids[row : row + 1, kept], "teacher_log_probs": log_probs[row : row + 1, kept]}
        own = student[row : row + 1].double().requires_grad_()
        truth = topk_losses(own, **known, rest=rest, divergence=divergence)
        torch.testing.assert_close(loss[row : row + 1], truth.float())
        truth = torch.autograd.grad(truth, own)[0].nan_to_num(0.0).float()
        torch.testing.assert_close(grad[row : row + 1], truth, rtol=1e-5, atol=1e-6)
    loss = topk_loss(leaf * 1, **given, **ways).detach()
    assert loss[3] == 0 and loss[4].isnan()


def _of_head(hidden, teacher, **options):
    return linear_distillation_loss(Head(hidden, torch.eye(hidden.shape[-1]).to(hidden)), teacher, **options)


@pytest.mark.parametrize("function", (distillation_loss, _of_head))
@pytest.mark.parametrize("divergence", ("forward", "reverse", "js"))
def test_no_items_leave_a_gradient_of_0(impl_device, function, divergence):
    """Also of rows that are no numbers."""
    impl, device = impl_device
    leaf, (log_probs, ids) = torch.randn(4, 9), torch.randn(4, 9).log_softmax(-1).topk(3)
    leaf[1, 2], leaf[2], log_probs[3] = NAN, INF, NAN
    leaf, labels = leaf.to(device).requires_grad_(), torch.arange(4, device=device)
    for num_items in (0, torch.tensor(0, device=device), torch.tensor(0.0)):
        for options in ({"labels": labels, "hard_weight": 0.3}, {"reduction": "sum"}):
            teacher = TopKTeacher(ids.to(device), log_probs.to(device), "ignore" if "labels" in options else "bucket")
            loss = function(leaf * 1, teacher, divergence=divergence, num_items=num_items, impl=impl, **options)
            assert loss == 0 and not torch.autograd.grad(loss, leaf)[0].any()


@pytest.mark.parametrize("function", (distillation_loss, _of_head))
@pytest.mark.parametrize("divergence", ("forward", "reverse", "js"))
@pytest.mark.usefixtures("unread_labels")
def test_a_label_outside_is_nan_where_all_ids_are_left_out(impl_device, function, divergence):
    """And an ignored one is 0, and one of the vocabulary is the hard part alone."""
    impl, device = impl_device
    ids, log_probs = torch.tensor([[1, 2]], device=device).expand(4, 2), torch.full((4, 2), -INF, device=device)
    leaf, labels = torch.randn(4, 9, device=device).requires_grad_(), torch.tensor([9, IGNORE_INDEX, 3, -5])
    for rest, hard_weight in (("ignore", 0.0), ("bucket", 0.0), ("ignore", 0.5), ("bucket", 0.5)):
        options = {"divergence": divergence, "labels": labels.to(device), "hard_weight": hard_weight, "impl": impl}
        losses = function(leaf * 1, TopKTeacher(ids, log_probs, rest), reduction="none", **options)
        (grad,) = torch.autograd.grad(losses.sum(), leaf)
        assert losses.isnan().tolist() == [True, False, False, True] and not losses[1]
        assert grad.isnan().all(-1).tolist() == [True, False, False, True] and not grad[1].any()
        assert bool(losses[2]) == bool(grad[2].any()) == bool(hard_weight)


@pytest.mark.parametrize("function", (distillation_loss, _of_head))
def test_the_whole_vocabulary_as_k(impl_device, function):
    """As many ids as columns, also with the label's, are no one-hot labels."""
    impl, device = impl_device
    student, teacher = torch.randn(4, 9, device=device), torch.randn(4, 9, device=device).log_softmax(-1)
    ids, labels = torch.arange(9, device=device).expand(4, 9), torch.tensor([1, 2, IGNORE_INDEX, 3], device=device)
    for k, given in ((9, None), (9, labels), (8, labels)):
        known, ways = TopKTeacher(ids[:, :k], teacher[:, :k], "bucket"), {"labels": given, "divergence": "reverse"}
        truth = distillation_loss(student, teacher, **ways, impl=impl)
        torch.testing.assert_close(function(student, known, **ways, impl=impl), truth, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("gap", (22.0, -22.0))
def test_gradients_beyond_forward_keep_their_digits(impl_device, gap):
    """Of a student that is sure of a known token, or that all known tokens have almost no probability."""
    impl, device = impl_device
    logits, ids = torch.randn(1, 50), torch.tensor([[7, 3, 4]])
    logits[0, ids[0, : 1 if gap > 0 else 3]] += gap
    leaf, own = logits.to(device, copy=True).requires_grad_(), logits.double().requires_grad_()
    known = {"teacher_ids": ids, "teacher_log_probs": torch.tensor([[0.5, 0.2, 0.1]]).log()}
    options = {"divergence": "reverse", "rest": "bucket"}
    given = {name: tensor.to(device) for name, tensor in known.items()}
    topk_loss(leaf * 1, **given, **options, impl=impl).backward()
    topk_losses(own, **known, **options).sum().backward()
    torch.testing.assert_close(leaf.grad.cpu(), own.grad.float(), rtol=1e-4, atol=0.0)


@pytest.mark.reference
@pytest.mark.parametrize("divergence", ["forward", "reverse", "js"])
@pytest.mark.usefixtures("unread_labels")
def test_an_id_or_a_label_far_below_the_vocabulary_is_outside_of_it(divergence):
    """Also the number that stands for what is left out inside."""
    logits, ids, far = torch.randn(2, 9), torch.tensor([[1, 2], [3, 4]]), -(2**62)
    loss = partial(distillation_loss, logits, divergence=divergence, reduction="none")
    log_probs = torch.tensor([0.5, 0.2]).log().expand(2, 2)
    found = loss(TopKTeacher(ids.index_fill(0, torch.tensor([0]), far), log_probs))
    assert found.isnan().tolist() == [True, False]
    for hard_weight in (0.0, 0.5):
        labels = {"labels": torch.tensor([far, 1]), "hard_weight": hard_weight}
        assert loss(TopKTeacher(ids, log_probs), **labels).isnan().tolist() == [True, False]


@pytest.mark.reference
def test_padded_ids_are_left_out_and_no_rows_are_a_loss_of_0():
    """Also if ids are checked: what a log-probability of -inf leaves out may be any number, twice."""
    student, ids = torch.randn(2, 12), torch.tensor([[3, -1, -1, 5], [7, 0, 12, 12]])
    log_probs = torch.tensor([[0.3, 0.0, 0.0, 0.2], [0.5, 0.1, 0.0, 0.0]]).log()
    given = {"teacher_log_probs": log_probs, "check_labels": True}
    left, q = log_probs != -INF, log_probs.double().exp()
    log_s = student.double().log_softmax(-1).gather(-1, ids.clamp(0, 11))
    truth = (q * (q.log() - log_s))[left].sum() / 2
    torch.testing.assert_close(topk_loss(student, teacher_ids=ids, **given), truth.float())
    with pytest.raises(ValueError, match=r"^teacher.ids: must be in \[0, 12\), got 1 outside, the first at .*: -77"):
        topk_loss(student, teacher_ids=torch.tensor([[3, 1, 2, -77], [7, 0, 4, 5]]), **given)
    none = student[:0].requires_grad_()
    loss = distillation_loss(none * 1, TopKTeacher(ids[:0], log_probs[:0]))
    loss.backward()
    assert loss == 0 and none.grad.shape == (0, 12)


@pytest.mark.interpreted(3)
@pytest.mark.parametrize("gap", (22.0, 70.0, 200.0))
def test_a_confident_student_keeps_the_digits_of_the_rest(impl_device, gap):
    """1 - S in fp32 is 0 or a rounding there. Beyond 76 nats the loss is too small, and all stays finite."""
    impl, device = impl_device
    logits = torch.zeros(1, 50, device=device)
    logits[0, 7], logits[0, 8] = gap, 1.0
    ids, log_probs = torch.tensor([[8, 7]], device=device), torch.tensor([[0.1, 0.7]], device=device).log()
    given = {"teacher_ids": ids, "teacher_log_probs": log_probs, "rest": "bucket"}
    leaves = logits.requires_grad_(), logits.detach().double().requires_grad_()
    losses = topk_loss(leaves[0] * 1, impl=impl, **given), topk_losses(leaves[1], **given)[0]
    grad, truth = (torch.autograd.grad(loss, leaf)[0] for loss, leaf in zip(losses, leaves, strict=True))
    if gap < 76:
        torch.testing.assert_close(losses[0], losses[1].float())
        torch.testing.assert_close(grad, truth.float())
    else:
        assert 0.2 * 70 < losses[0] < losses[1] and grad.isfinite().all()


@pytest.mark.parametrize("rest", ("ignore", "bucket"))
def test_probabilities_above_1_leave_no_rest_and_a_row_of_nothing_is_nan(impl_device, rest):
    """A rounded teacher's may be 1.01 in all."""
    impl, device = impl_device
    pair, given = made_of(k=2)
    log_probs = torch.tensor([0.7, 0.31]).log().expand(ROWS, 2)
    given |= {"teacher_log_probs": log_probs, "rest": rest}
    check_call(impl_device, pair, **given, reduction="none")
    logits = torch.full((ROWS, COLUMNS), -INF)
    assert topk_loss(logits.to(device), **on(device, given), impl=impl, reduction="none").isnan().all()


@pytest.mark.reference
def test_a_teacher_that_holds_a_gradient_is_refused():
    made, given = made_of(k=2)
    log_probs = given["teacher_log_probs"].clone().requires_grad_() * 1
    labels = torch.zeros(ROWS, dtype=torch.int64)
    vocab_parallel_cross_entropy(log_probs, labels, gradient="in_backward").backward()
    head = torch.randn(COLUMNS, 3)
    teacher = TopKTeacher(given["teacher_ids"], log_probs.detach())
    for call in (
        lambda: distillation_loss(made.logits, teacher),
        lambda: linear_distillation_loss(Head(torch.randn(ROWS, 3), head), teacher),
    ):
        with pytest.raises((ValueError), match="^teacher.log_probs"):
            call()


@pytest.mark.reference
def test_an_fp64_student_has_fp64_arithmetic():
    made, of_teacher = made_of(dtype=torch.float64)
    for rest in ("ignore", "bucket"):
        given = {**of_teacher, "teacher_log_probs": of_teacher["teacher_log_probs"].double(), "rest": rest}
        truth = topk_losses(made.logits, **given).mean()
        torch.testing.assert_close(topk_loss(made.logits, **given), truth, rtol=1e-13, atol=1e-13)


@pytest.mark.reference
@pytest.mark.parametrize("rest", ("bucket", "ignore"))
@pytest.mark.parametrize("divergence", ("reverse", "js"))
def test_a_student_that_excludes_an_id(divergence, rest):
    """The limit of a probability of 0: the loss and gradient of a logit so low that its exponential is 0."""
    ids, teacher = torch.tensor([[2, 1], [0, 2], [3, 4]]), torch.randn(3, 8)
    top_k = TopKTeacher(ids, teacher.log_softmax(-1).gather(1, ids), rest)
    student = torch.randn(3, 8)
    results = []
    for lowest in (-math.inf, -1e4):
        leaf = student.index_fill(1, torch.tensor([2]), lowest).requires_grad_()
        loss = distillation_loss(leaf, top_k, divergence=divergence, reduction="none")
        results.append((loss.detach(), *torch.autograd.grad(loss.sum(), leaf)))
    for excluded, limit in zip(*results, strict=True):
        torch.testing.assert_close(excluded, limit, rtol=1e-6, atol=1e-6)


@pytest.mark.reference
def test_a_temperature_that_was_rounded_to_fp32_is_the_losss():
    made, given = made_of()
    teacher = TopKTeacher(given["teacher_ids"], given["teacher_log_probs"], temperature=torch.tensor(0.7).item())
    exact = distillation_loss(made.logits, teacher._replace(temperature=0.7), temperature=0.7)
    assert torch.equal(distillation_loss(made.logits, teacher, temperature=0.7), exact)


@pytest.mark.reference
def test_compiled_code_says_why_it_refuses_a_temperature():
    """Of numbers that the compiler does not know, which it cannot write."""
    made, given = made_of()

    def loss(logits, temperature):
        return distillation_loss(logits, TopKTeacher(*given.values()), temperature=temperature)

    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True, dynamic=True)
    compiled(made.logits, 1.0)
    with pytest.raises(Exception, match="teacher.temperature: expected the loss's temperature"):
        compiled(made.logits, 2.0)


@pytest.mark.reference
def test_logits_in_the_place_of_log_probs_are_refused_where_they_count():
    logits, labels = torch.randn(2, 9), torch.tensor([3, -100])
    ids, log_probs = torch.tensor([[1, 2], [3, 4]]), torch.tensor([[-1.0, -2.0], [7.0, float("nan")]])
    options = {"labels": labels, "check_labels": True}
    assert distillation_loss(logits, TopKTeacher(ids, log_probs), **options).isfinite()  # nobody reads an ignored row
    with pytest.raises(ValueError, match="^teacher.log_probs: must be at most 0, got 7; pass log-probabilities"):
        distillation_loss(logits, TopKTeacher(ids, log_probs.flip(0).nan_to_num(-1.0)), **options)


@pytest.mark.reference
@pytest.mark.parametrize("function", (distillation_loss, _of_head))
@pytest.mark.parametrize("divergence", ("forward", "reverse", "js"))
@pytest.mark.parametrize("rest", ("ignore", "bucket"))
@pytest.mark.usefixtures("unread_labels")
def test_probabilities_in_the_place_of_log_probs_make_their_rows_nan(rest, divergence, function):
    """As labels outside of the vocabulary do: the other rows stay what they are, and an ignored one is 0."""
    made, (ids, log_probs) = made_of()[0], made_of()[1].values()
    labels, wrong = torch.tensor([3, 1, IGNORE_INDEX, 0, 2]), log_probs.clone()
    wrong[1:3], wrong[3] = log_probs[1:3].exp(), wrong[3] + 3.0
    results, options = [], {"divergence": divergence, "reduction": "none", "labels": labels}
    for numbers in (wrong, log_probs):
        leaf = made.logits.clone().requires_grad_()
        loss = function(leaf * 1, TopKTeacher(ids, numbers, rest), **options)
        results.append((loss.detach(), *torch.autograd.grad(loss.sum(), leaf)))
    for found, right in zip(*results, strict=True):
        assert found[[1, 3]].isnan().all() and torch.equal(found[[0, 2, 4]], right[[0, 2, 4]]) and not found[2].any()
    with pytest.raises(ValueError, match="^teacher.log_probs: must be at most 0, got .*; pass log-probabilities, not"):
        function(leaf, TopKTeacher(ids, wrong, rest), **options, check_labels=True)
    twice = torch.full_like(log_probs, -0.5)  # no number is above 0
    with pytest.raises(ValueError, match="^teacher.log_probs: exponentials of a row must sum to at most 1, got 3[.]6"):
        function(leaf, TopKTeacher(ids, twice, rest), **options, check_labels=True)


@pytest.mark.reference
@pytest.mark.parametrize("divergence", ("forward", "reverse"))
def test_rounded_log_probs_are_a_distribution(divergence):
    """The sum of 4096 log-probabilities of bf16 is off by less than the bound."""
    student, ids = torch.zeros(2, 4096), torch.arange(4096).expand(2, -1)
    for log_probs in (torch.zeros(2, 4096).log_softmax(-1), torch.randn(2, 4096).mul(4).log_softmax(-1)):
        for dtype in (torch.bfloat16, torch.float16):
            teacher = TopKTeacher(ids, log_probs.to(dtype), "bucket")
            assert distillation_loss(student, teacher, divergence=divergence, check_labels=True).isfinite()


@pytest.mark.reference
@pytest.mark.usefixtures("unread_labels")
def test_a_hard_weight_of_1_is_the_cross_entropy_alone():
    """Also if the divergence is infinite; not of a teacher that is no distribution."""
    student, ids = torch.randn(3, 9), torch.tensor([[1, 2], [3, 4], [5, 6]])
    student[0, 1] = -INF
    leaf, truth, labels = student.clone().requires_grad_(), student.double().requires_grad_(), torch.tensor([5, 6, 7])
    teacher = TopKTeacher(ids, torch.tensor([[-1.0, -1.0], [-1.0, -1.0], [-0.1, -0.1]]))
    losses = distillation_loss(leaf * 1, teacher, labels=labels, hard_weight=1.0, reduction="none")
    expected = torch.nn.functional.cross_entropy(truth, labels, reduction="none")
    grad, right = torch.autograd.grad(losses.sum(), leaf)[0], torch.autograd.grad(expected.sum(), truth)[0]
    torch.testing.assert_close((losses[:2], grad[:2]), (expected[:2].float(), right[:2].float()))
    assert losses[2].isnan() and grad[2].isnan().all()
