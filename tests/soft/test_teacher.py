"""A teacher inside an objective: the divergence of each token is one more quantity. Random calls have the options."""

import pytest
import torch
import torch.nn.functional as F

from tests.support.cases.flat import linear_objective
from tests.support.cases.linear import record_matmuls
from tests.support.ranks.case import distributed
from tests.support.ranks.collectives import error_of, record_collectives
from tests.support.ranks.pools import in_ranks
from vocab_parallel_ce import Teacher, verify_calls

TOKENS, COLUMNS, WIDTH, OF_TEACHER = 8, 40, 12, 7
KINDS = pytest.mark.parametrize("kind", ["forward", "reverse", "js"])


def objective(log_probs=None, *, divergence, advantage, mask, entropy=None):
    """Of all quantities that there are; each has a derivative of its own in each token."""
    values = (1 + advantage) * divergence + 0.1 * divergence**2
    if log_probs is not None:
        values = values - advantage * log_probs - 0.5 * (2 - advantage) * entropy
    return mask * values


class Calls:
    """Calls of an objective on one rank, and their loss and gradients."""

    def __init__(self, impl_device, kind="forward"):
        self.impl, self.device = impl_device
        generator = torch.Generator().manual_seed(0)
        shapes = (TOKENS, WIDTH), (COLUMNS, WIDTH), (COLUMNS,), (TOKENS, OF_TEACHER), (COLUMNS, OF_TEACHER), (COLUMNS,)
        drawn = [torch.randn(shape, generator=generator).to(self.device) for shape in (*shapes, (TOKENS,))]
        self.hidden, self.weight, self.bias, hidden, weight, bias, advantage = drawn
        self.labels = torch.randint(0, COLUMNS, (TOKENS,), generator=generator).to(self.device)
        self.labels[::2] = F.linear(*drawn[:3]).argmax(-1)[::2]
        self.labels[5] = -100
        mask = torch.ones_like(advantage).index_fill(0, torch.tensor([1, 6], device=self.device), 0.0)
        self.tokens = {"advantage": advantage, "mask": mask}
        self.teacher = Teacher(hidden, weight, bias, divergence=kind)
        self.leaves = [leaf.requires_grad_() for leaf in (self.hidden, self.weight, self.bias)]

    def loss(self, function=objective, **options):
        """With labels all quantities, without them the divergence."""
        labels = options.pop("labels", self.labels)
        given = {"bias": self.bias, "teacher": self.teacher, "tokens": self.tokens, "impl": self.impl}
        given |= {} if labels is None else {"outputs": ("entropy",)}
        tensors = [options.pop(name, getattr(self, name)) for name in ("hidden", "weight")]
        return linear_objective(*tensors, labels, function, **given | options)

    def gradients(self, *args, **options):
        return torch.autograd.grad(self.loss(*args, **options)[0], self.leaves)


def with_or_without(calls):
    """The labels of calls, and none."""
    return ({}, {"labels": None})


@KINDS
def test_four_products_of_each_chunk_whatever_the_weights(impl_device, kind):
    calls = Calls(impl_device, kind)
    for options in with_or_without(calls):
        with record_matmuls() as in_forward:
            loss, found = calls.loss(**options)
        with record_matmuls() as in_backward:
            loss.backward()
        assert (len(in_forward), len(in_backward)) == (4, 0)
        with torch.no_grad(), record_matmuls() as in_forward:
            alone, of_no_grad = calls.loss(**options)
        assert len(in_forward) == 2 and alone.grad_fn is None
        torch.testing.assert_close(alone, loss.detach())
        torch.testing.assert_close(of_no_grad.divergence, found.divergence)


def test_a_teacher_of_inference_mode(impl_device):
    """As an engine returns its hidden states: backward needs nothing of them."""
    calls = Calls(impl_device)
    with torch.inference_mode():
        teacher = Teacher(*(tensor.clone() for tensor in calls.teacher[:3]))
    for options in with_or_without(calls):
        for one, other in zip(calls.gradients(teacher=teacher, **options), calls.gradients(**options), strict=True):
            assert torch.equal(one, other)


def test_a_student_that_is_the_teacher_has_no_divergence(impl_device):
    calls = Calls(impl_device)
    heads = calls.hidden.detach(), calls.weight.detach(), calls.bias.detach()
    for kind in ("forward", "reverse", "js"):
        teacher = Teacher(*heads, 7.0, 0.6, 1.4, kind)
        options = {"teacher": teacher, "softcap": 7.0, "logit_scale": 0.6, "temperature": 0.5}
        loss, found = calls.loss(lambda p, divergence, **_: divergence, **options)
        assert float(found.divergence.abs().max()) < 1e-6
        assert all(float(gradient.abs().max()) < 1e-6 for gradient in torch.autograd.grad(loss, calls.leaves))


def test_ignored_tokens_count_nowhere(impl_device):
    calls = Calls(impl_device)
    plain = calls.loss()[0], *calls.gradients()
    hidden = calls.teacher.hidden.clone()
    hidden[5], calls.tokens["advantage"][5] = torch.nan, torch.nan
    loss, found = calls.loss(teacher=calls.teacher._replace(hidden=hidden))
    assert found.divergence[5] == 0 and bool((found.divergence > 0).sum() == TOKENS - 1)
    for one, other in zip((loss, *torch.autograd.grad(loss, calls.leaves)), plain, strict=True):
        assert torch.equal(one, other)
    loss, found = calls.loss(labels=torch.full_like(calls.labels, -100))
    assert loss == 0 and not found.divergence.any()
    assert not any(gradient.any() for gradient in torch.autograd.grad(loss, calls.leaves))


@KINDS
def test_zero_items_are_zero_whatever_the_logits_hold(impl_device, kind):
    calls = Calls(impl_device, kind)
    with torch.no_grad():
        calls.bias[3] = torch.nan
    for options in with_or_without(calls):
        for num_items in (0, torch.zeros(1, device=calls.device)):
            loss, _ = calls.loss(num_items=num_items, **options)
            assert loss == 0
            assert not any(gradient.any() for gradient in torch.autograd.grad(loss, calls.leaves))
        assert calls.loss(num_items=1, **options)[0].isnan()


@KINDS
def test_a_nan_of_the_teacher_and_a_wrong_label_are_nan_in_their_rows_alone(impl_device, kind):
    calls = Calls(impl_device, kind)
    hidden, labels = calls.teacher.hidden.clone(), calls.labels.clone()
    hidden[2], labels[4] = torch.nan, COLUMNS
    teacher = calls.teacher._replace(hidden=hidden)
    for options, bad in (({"labels": labels, "check_labels": False}, [2, 4]), ({"labels": None}, [2])):
        loss, found = calls.loss(lambda log_probs=None, *, divergence, **_: divergence, teacher=teacher, **options)
        assert found.divergence.isnan().nonzero().flatten().tolist() == bad
        gradient = torch.autograd.grad(loss, calls.hidden)[0]
        assert gradient.isnan().any(dim=1).nonzero().flatten().tolist() == bad


@KINDS
def test_valid_tokens(impl_device, kind):
    calls = Calls(impl_device, kind)
    expected = calls.loss()[0], *calls.gradients()
    for valid_tokens in (TOKENS - 1, TOKENS):
        loss, _ = calls.loss(valid_tokens=valid_tokens, chunk_size=3)
        torch.testing.assert_close((loss, *torch.autograd.grad(loss, calls.leaves)), expected)
    loss, found = calls.loss(valid_tokens=TOKENS - 2, check_labels=False)
    assert loss.isnan() and found.divergence.isnan().any()
    loss, _ = calls.loss(labels=None, valid_tokens=TOKENS)
    torch.testing.assert_close(loss, calls.loss(labels=None)[0])


@KINDS
def test_vocabularies_that_differ_in_padding(impl_device, kind):
    """Rows beyond ``vocab_size`` do not count, in either head; without it, or in other numbers, they are refused."""
    calls = Calls(impl_device, kind)
    valid = COLUMNS - 3
    cut = Teacher(calls.teacher.hidden, calls.teacher.weight[:valid], calls.teacher.bias[:valid], divergence=kind)
    calls.labels.clamp_(max=valid - 1)
    small = {"weight": calls.weight[:valid], "bias": calls.bias[:valid], "teacher": cut}
    longer = F.pad(calls.teacher.weight, (0, 0, 0, 5), value=50.0), F.pad(calls.teacher.bias, (0, 5), value=50.0)
    for options in with_or_without(calls):
        expected = calls.loss(**small, **options)[0], *calls.gradients(**small, **options)
        for padded in (calls.teacher, cut, calls.teacher._replace(weight=longer[0], bias=longer[1])):
            loss, _ = calls.loss(teacher=padded, vocab_size=valid, **options)
            torch.testing.assert_close((loss, *torch.autograd.grad(loss, calls.leaves)), expected)
        few = calls.teacher._replace(weight=calls.teacher.weight[:30], bias=None)
        for teacher, size, message in (
            (cut, None, f"must be the student's, {COLUMNS}, without vocab_size, got {valid}"),
            (few, valid, f"{valid}.*got 30"),
        ):
            with pytest.raises(ValueError, match=f"^teacher.weight: rows .*{message}"):
                calls.loss(teacher=teacher, vocab_size=size, **options)


def test_an_infinite_divergence_that_does_not_count_has_no_gradient(impl_device):
    """Of a teacher that excludes a column, and a mask in place of labels."""
    calls = Calls(impl_device, "reverse")
    bias = calls.teacher.bias.clone()
    bias[3] = -torch.inf
    teacher, mask = calls.teacher._replace(bias=bias), {"kept": torch.zeros(TOKENS, device=calls.device)}
    masked = calls.loss(
        lambda divergence, kept: torch.where(kept > 0, divergence, 0.0), labels=None, tokens=mask, teacher=teacher
    )
    assert masked[1].divergence.isinf().all() and masked[0] == 0
    assert not any(gradient.any() for gradient in torch.autograd.grad(masked[0], calls.leaves))


def test_a_check_finds_functions_that_mix_divergences(impl_device):
    calls = Calls(impl_device)
    for mixing in (
        lambda log_probs=None, *, divergence, **_: divergence - divergence.mean(),
        lambda log_probs=None, *, divergence, **_: divergence * divergence.max().detach(),
    ):
        heads = calls.hidden.detach(), calls.weight.detach(), calls.bias.detach()
        for teacher in (calls.teacher, Teacher(*heads)):  # of a student that is its teacher all divergences are 0
            for options in with_or_without(calls):
                with pytest.raises(ValueError, match="objective: .*mixes tokens"):
                    calls.loss(mixing, teacher=teacher, **options)


def in_rank(rank, group, kind):
    """A call over DTensors and one over plain rows of both heads, and the collectives of the latter."""
    calls = Calls(("reference", "cpu"), kind)
    wholes = calls.weight, calls.bias, *calls.teacher[1:3]
    rows = slice(COLUMNS // group.size() * rank, COLUMNS // group.size() * (rank + 1))
    results = []
    for cut in (lambda t: distributed(t.detach(), torch.device("cpu"), group), lambda t: t.detach()[rows].clone()):
        weight, bias, *of_teacher = [cut(whole) for whole in wholes]
        hidden, head = calls.hidden.detach().clone().requires_grad_(), (weight.requires_grad_(), bias.requires_grad_())
        teacher = Teacher(calls.teacher.hidden, *of_teacher, divergence=kind)
        options = {"hidden": hidden, "weight": weight, "bias": bias, "teacher": teacher, "group": group}
        with record_collectives() as sent:
            loss, found = calls.loss(**options)
        loss.backward()
        local = [getattr(leaf.grad, "to_local", lambda leaf=leaf: leaf.grad)() for leaf in head]
        results.append((loss.detach(), found.divergence, hidden.grad, *local))
    return *results, [(call.name, call.nbytes) for call in sent]


@KINDS
@in_ranks((2,), (), ())
def test_dtensors_and_collectives_of_a_chunk(rank_pool, impl, kind):
    calls = Calls(("reference", "cpu"), kind)
    loss, found = calls.loss()
    expected = loss.detach(), found.divergence, *torch.autograd.grad(loss, calls.leaves)
    for rank, (of_dtensors, of_rows, sent) in enumerate(rank_pool.run(in_rank, kind)):
        rows = slice(COLUMNS // 2 * rank, COLUMNS // 2 * (rank + 1))
        right = [*expected[:3], *(each[rows] for each in expected[3:])]
        torch.testing.assert_close(of_rows, tuple(right))
        assert all(torch.equal(one, other) for one, other in zip(of_dtensors, of_rows, strict=True))
        # Statistics: 4 of labels and entropy, and 5 of the divergence, or 4 and the sums of js.
        n_rows, is_js = TOKENS - 1, kind == "js"
        gathers = [4 * n_rows * n for n in ((8, 2) if is_js else (9,))]
        reduced = [("allreduce_", 4 * n_rows * WIDTH)]
        assert sent == [("_allgather_base_", nbytes) for nbytes in gathers] + reduced


def verified(rank, group):
    """What a call raises if the ranks differ in one field of the teacher, with labels and without."""
    calls = Calls(("reference", "cpu"))
    rows = slice(COLUMNS // 2 * rank, COLUMNS // 2 * (rank + 1))
    hidden = calls.teacher.hidden
    plain = Teacher(hidden, *(tensor[rows] for tensor in calls.teacher[1:3]))
    own = {"weight": calls.weight[rows], "bias": calls.bias[rows], "group": group}
    changes = (
        {"hidden": hidden * (1 + rank)},
        {"temperature": 1.0 + rank},
        {"softcap": 5.0 + rank},
        {"logit_scale": 1.0 + rank},
        {"divergence": ("forward", "reverse")[rank]},
        {"divergence": "js", "beta": (0.3, 0.4)[rank]},
    )
    found = []
    with verify_calls():
        for options in with_or_without(calls):
            for change in changes:
                given = own | options | {"teacher": plain._replace(**change)}
                found.append(error_of(lambda given=given: calls.loss(**given)))
            calls.loss(teacher=plain, **own, **options)[0].backward()
            close = plain._replace(hidden=hidden * (1 + 1e-3 * rank))  # rounding does not differ
            calls.loss(teacher=close, **own, **options)[0].backward()
    return found


@in_ranks((2,), (), ())
def test_verification_compares_the_teachers(rank_pool, impl):
    first, second = rank_pool.run(verified)
    assert first == second
    names = ["teacher.hidden", *["teacher"] * 5] * 2
    for name, error in zip(names, first, strict=True):
        assert error.startswith(f"ValueError: {name}: rank 1 of 2 has "), error
