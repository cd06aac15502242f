"""Distillation of a head from a teacher's head, chunk by chunk: numbers against fp64, ranks."""

from collections import Counter

import pytest
import torch
import torch.nn.functional as F

from tests.support.cases.flat import linear_cross_entropy, linear_distillation_loss
from tests.support.cases.inputs import IGNORE_INDEX
from tests.support.cases.soft import divergences
from tests.support.ranks.collectives import error_of, record_collectives
from tests.support.ranks.pools import device_of, in_ranks, in_several_ranks
from vocab_parallel_ce import (
    Head,
    TopKTeacher,
    distillation_loss,
    verify_calls,
    vocab_parallel_cross_entropy,
)

TOKENS, WIDTH, OF_TEACHER, COLUMNS = 9, 12, 7, 40
NAMES = ("student_hidden", "student_weight", "teacher_hidden", "teacher_weight", "student_bias", "teacher_bias")


def inputs(n_tokens=TOKENS):
    """Of both models; the labels ignore two tokens."""
    generator = torch.Generator().manual_seed(0)
    shapes = (n_tokens, WIDTH), (COLUMNS, WIDTH), (n_tokens, OF_TEACHER), (COLUMNS, OF_TEACHER), (COLUMNS,), (COLUMNS,)
    made = {n: torch.randn(s, generator=generator) for n, s in zip(NAMES, shapes, strict=True)}
    # Broad distributions: gradients of confident ones are differences of nearly equal numbers.
    made = {n: t * 0.5 if "weight" in n else t for n, t in made.items()}
    labels = torch.randint(0, COLUMNS, (n_tokens,), generator=generator)
    labels[3], labels[5] = IGNORE_INDEX, IGNORE_INDEX
    return made, labels


def heads_of(made):
    """The student's and the teacher's."""
    tensors = ("hidden", "weight", "bias")
    return [Head(*(made.get(f"{who}_{name}") for name in tensors)) for who in ("student", "teacher")]


CALLS = [  # divergence, reduction, weight of the labels (None: no labels), (tokens, chunk), gradient, reduced
    ("forward", "mean", 0.3, (150, 140), "in_forward", True),  # statistics are sent in parts of 128 rows
    ("forward", "none", None, (9, 4), "auto", False),
    ("reverse", "mean", 0.0, (9, 4), "in_backward", True),
    ("reverse", "none", 0.3, (150, 140), "in_backward", False),
    ("js", "mean", None, (9, "auto"), "auto", False),
    ("js", "mean", 0.3, (150, 140), "in_forward", True),
    ("js", "none", 0.0, (150, 140), "auto", True),
    ("top-k", "mean", None, (9, 4), "in_forward", True),
    ("top-k", "none", None, (9, "auto"), "auto", False),
]
FACTORS = ("divergence", "reduction", "hard", "tokens", "gradient", "reduce_hidden_grad")


def _in_rank(rank, group, case, impl):
    """``(loss, gradient of hidden states, collectives, device)`` with this rank's rows of both heads, or with all."""
    n_ranks, device = (1, torch.device("cpu")) if group is None else (group.size(), device_of(rank, group))
    made, labels = inputs(n_tokens=case["tokens"][0])
    rows = slice(COLUMNS // n_ranks * rank, COLUMNS // n_ranks * (rank + 1))
    own = {n: (t if "hidden" in n else t[rows]).to(device, copy=True) for n, t in made.items()}
    student, teacher = heads_of({n: t.requires_grad_(n.startswith("student")) for n, t in own.items()})
    options = {name: case[name] for name in ("reduction", "gradient", "reduce_hidden_grad")}
    options |= {"group": group, "impl": impl, "chunk_size": case["tokens"][1]}
    if case["hard"] is not None:
        options |= {"labels": labels.to(device), "hard_weight": case["hard"]}
    if case["divergence"] == "top-k":
        log_probs, ids = F.linear(*heads_of(made)[1]).log_softmax(-1).topk(5)
        teacher = TopKTeacher(ids.to(device), log_probs.to(device), "bucket")
    else:
        options["divergence"] = case["divergence"]
    with record_collectives() as calls:
        loss = linear_distillation_loss(student, teacher, **options)
    with record_collectives() as in_backward:
        loss.backward(torch.ones_like(loss))
    assert {call.name for call in in_backward} <= ({"allreduce_"} if is_deferred(case) else set())
    with pytest.raises(RuntimeError, match="second time|second backward|backward through the graph"):
        loss.backward(torch.ones_like(loss))
    return loss.detach(), student.hidden.grad, [call.name for call in calls + in_backward], device.type


def is_deferred(case):
    """Whether gradients are computed in backward."""
    return case["gradient"] == "in_backward" or (case["gradient"] == "auto" and case["reduction"] == "none")


def chunks_of(case, device):
    """The tokens of each. On a CPU, ignored tokens are left out."""
    n_tokens, chunk_size = case["tokens"]
    n_rows = n_tokens - 2 * (case["hard"] is not None and device == "cpu")
    size = n_rows if chunk_size == "auto" else chunk_size
    return [min(size, n_rows - first) for first in range(0, n_rows, size)]


@pytest.mark.interpreted(2)
@pytest.mark.parametrize("call", CALLS, ids=map(str, range(len(CALLS))))
@in_several_ranks
def test_ranks(rank_pool, impl, call):
    """Random calls have the numbers of all options; these are ranks in processes, and what they send."""
    case = dict(zip(FACTORS, call, strict=True))
    results, (loss, hidden, *_) = rank_pool.run(_in_rank, case, impl), _in_rank(0, None, case, "reference")
    found = [grad for _, grad, *_ in results]
    torch.testing.assert_close(found[0] if case["reduce_hidden_grad"] else sum(found), hidden, rtol=1e-4, atol=1e-5)
    for own, grad, calls, device in results:
        assert torch.equal(own, results[0][0]) and (not case["reduce_hidden_grad"] or torch.equal(grad, found[0]))
        torch.testing.assert_close(own, loss, rtol=1e-5, atol=1e-5)
        chunks, is_js = chunks_of(case, device), case["divergence"] == "js"
        n_parts = sum(1 + (rows > 128 and not is_deferred(case)) for rows in chunks)
        n_gathers = 2 * n_parts if is_js else 1 if is_deferred(case) else n_parts
        assert Counter(calls) == Counter(
            _allgather_base_=n_gathers, allreduce_=len(chunks) * case["reduce_hidden_grad"]
        )


def _verified(rank, group):
    """What a call raises if the ranks differ in one argument."""
    made, labels = inputs()
    rows = slice(20 * rank, 20 * rank + 20)
    made = {n: t if "hidden" in n else t[rows] for n, t in made.items()}
    made["student_hidden"].requires_grad_()
    same = {"labels": labels, "group": group, "hard_weight": 0.1}

    def call(**own):
        tensors = {name: own.pop(name) for name in NAMES if name in own}
        return linear_distillation_loss(*heads_of(made | tensors), **same | own)

    with verify_calls():
        differing = ({"hard_weight": 0.1 * (rank + 1)}, {"temperature": 1.0 + rank}, {"teacher_hidden": 0})
        differing[2]["teacher_hidden"] = made["teacher_hidden"] * (1 + rank)
        errors = [error_of(lambda own=own: call(**own)) for own in differing]
        tokens = TopKTeacher(torch.zeros(TOKENS, 1).long(), -torch.ones(TOKENS, 1) - rank)
        errors.append(error_of(lambda: linear_distillation_loss(heads_of(made)[0], tokens, group=group)))
        logits = made["student_hidden"].detach(), made["teacher_hidden"][:, :1].expand(-1, WIDTH)
        for own in (
            {"hard_weight": 0.1 * (rank + 1)},
            {"num_items": rank + 1},
            {"divergence": ("js", "reverse")[rank]},
        ):
            errors.append(error_of(lambda own=own: distillation_loss(*logits, **same | own)))
        # Rounding does not differ, nor do rows that are ignored.
        close = made["teacher_hidden"] * (1 + 1e-3 * rank)
        call(teacher_hidden=close.index_fill(0, torch.tensor([3, 5]), rank)).backward()
        return errors


@in_ranks((2,), (), ())
def test_verification_compares_the_ranks(rank_pool, impl):
    first, second = rank_pool.run(_verified)
    names = ("hard_weight", "temperature", "teacher.hidden", "tokens['teacher.log_probs']")
    names += ("hard_weight", "num_items", "divergence")  # over logits
    assert first == second and all(f"ValueError: {n}: rank 1 of 2 has " in e for n, e in zip(names, first, strict=True))


@pytest.mark.reference
def test_no_tokens_and_without_labels_nothing_is_ignored():
    made, _ = inputs()
    few = {name: tensor[:0] if "hidden" in name else tensor for name, tensor in made.items()}
    assert linear_distillation_loss(*heads_of(few)) == 0
    loss = linear_distillation_loss(*heads_of(made), ignore_index=0)
    student, teacher = (F.linear(*head).double() for head in heads_of(made))
    torch.testing.assert_close(loss.double(), divergences(student, teacher).mean(), rtol=2e-5, atol=0.0)


@pytest.mark.parametrize("gradient", ["in_forward", "in_backward"])
def test_a_hard_weight_of_1_is_cross_entropy(impl_device, gradient):
    """Also where the divergence is infinite, which has no finite gradient."""
    impl, device = impl_device
    made, labels = inputs()
    made["teacher_bias"][(labels[0] + 1) % COLUMNS] = -torch.inf
    made = {name: tensor.to(device).requires_grad_(name.startswith("student")) for name, tensor in made.items()}
    (student, teacher), labels = heads_of(made), labels.to(device)
    options = {"impl": impl, "gradient": gradient, "labels": labels}
    expected = linear_cross_entropy(*student[:2], bias=student.bias, **options)
    expected = expected, *torch.autograd.grad(expected, student)
    for divergence in ("forward", "reverse", "js"):
        loss = linear_distillation_loss(student, teacher, hard_weight=1.0, divergence=divergence, **options)
        torch.testing.assert_close((loss, *torch.autograd.grad(loss, student)), expected)


@pytest.mark.reference
def test_labels_written_before_backward_are_noticed():
    made, labels = inputs()
    labels = labels.clamp(min=0)  # with ignored tokens their copy is kept
    student, teacher = heads_of(made)
    student = Head(*(tensor.clone().requires_grad_() for tensor in student))
    loss = linear_distillation_loss(student, teacher, labels=labels, reduction="none")
    labels.fill_(-100)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.sum().backward()


@pytest.mark.reference
def test_a_teacher_of_inference_mode_is_refused_where_backward_needs_it():
    made, labels = inputs()
    with torch.inference_mode():
        made["teacher_weight"] = made["teacher_weight"].clone()
    made["student_hidden"].requires_grad_()
    linear_distillation_loss(*heads_of(made), labels=labels).backward()
    with pytest.raises(ValueError, match=r"^teacher.weight: expected .* pass its clone\(\)"):
        linear_distillation_loss(*heads_of(made), labels=labels, reduction="none")


@pytest.mark.reference
def test_a_teacher_that_holds_a_gradient_is_refused():
    made, labels = inputs()
    logits = made["teacher_hidden"].detach().clone().requires_grad_() * 1
    vocab_parallel_cross_entropy(logits, labels.clamp(min=0) % logits.shape[-1], gradient="in_forward")
    with pytest.raises(ValueError, match=r"^teacher.hidden: expected logits, got memory in which an earlier call"):
        linear_distillation_loss(*heads_of(made | {"teacher_hidden": logits.detach()}), labels=labels)
