"""Distillation of a head from a teacher's head, chunk by chunk: numbers against fp64, ranks."""

from collections import Counter

import pytest
import torch
import torch.nn.functional as F

from tests.support.cases.flat import linear_distillation_loss
from tests.support.cases.inputs import IGNORE_INDEX, padded_shard
from tests.support.cases.pairs import covering
from tests.support.cases.soft import divergences, subtracted, topk_losses
from tests.support.ranks.case import BOUNDS, assembled, even
from tests.support.ranks.collectives import error_of, record_collectives
from tests.support.ranks.pools import device_of, in_ranks, in_several_ranks
from tests.support.truth.budget import assert_within_budget
from vocab_parallel_ce import Head, TopKTeacher, VocabShard, verify_calls, vocab_parallel_cross_entropy

TOKENS, WIDTH, OF_TEACHER, COLUMNS = 9, 12, 7, 40
FACTORS = torch.linspace(-0.5, 1.5, TOKENS)  # of unreduced losses
NAMES = ("student_hidden", "student_weight", "teacher_hidden", "teacher_weight", "student_bias", "teacher_bias")


def inputs(columns=COLUMNS):
    """Of both models; the labels ignore two tokens."""
    generator = torch.Generator().manual_seed(0)
    shapes = (TOKENS, WIDTH), (columns, WIDTH), (TOKENS, OF_TEACHER), (columns, OF_TEACHER), (columns,), (columns,)
    made = {n: torch.randn(s, generator=generator) for n, s in zip(NAMES, shapes, strict=True)}
    # Broad distributions: gradients of confident ones are differences of nearly equal numbers.
    made = {n: t * 0.5 if "weight" in n else t for n, t in made.items()}
    labels = torch.randint(0, columns, (TOKENS,), generator=generator)
    labels[3], labels[5] = IGNORE_INDEX, IGNORE_INDEX
    return made, labels


def heads_of(made):
    """The student's and the teacher's."""
    tensors = ("hidden", "weight", "bias")
    return [Head(*(made.get(f"{who}_{name}") for name in tensors)) for who in ("student", "teacher")]


def oracle(made, labels, dtype, reduction, masked, num_items=None, bounds=None, chunk=TOKENS, **options):
    """``(loss, gradients of student_hidden, student_weight and student_bias)``: fp64, or None for PyTorch's own.

    And the magnitudes of what is subtracted on the way to each. ``bounds`` are of the ranks' columns, whose parts of
    the hidden states' gradient are added in its dtype; ``chunk`` is the tokens of a product, which rounds by it.
    """
    columns = len(made["student_weight"])
    bounds = bounds or [(0, columns)]
    # Gradients are not rounded at the end: the budget adds that. Those of logits are, and ranks' parts of a sum.
    rounded = {who: dtype or made[f"{who}_weight"].dtype for who in ("student", "teacher")}
    made = {
        name: tensor.to(dtype or torch.float32, copy=True).requires_grad_(name.startswith("student"))
        for name, tensor in made.items()
    }

    def logits(who):
        hidden, bias = made[f"{who}_hidden"], made.get(f"{who}_bias")
        parts = [slice(start, min(stop, columns)) for start, stop in sorted(bounds) if start < columns]
        products = []
        for part in parts:
            own = hidden if len(parts) == 1 else hidden.to(rounded[who]).to(hidden.dtype)
            of_head = made[f"{who}_weight"][part], None if bias is None else bias[part]
            products.append(torch.cat([F.linear(rows, *of_head) for rows in own.split(chunk)]))
        return torch.cat(products, -1).to(rounded[who]).to(dtype or torch.float32)

    student, teacher = logits("student"), logits("teacher")
    if "teacher_ids" in options:
        losses = topk_losses(student, None, **options)
    else:
        losses = divergences(student, teacher, labels=labels, **options)
    if masked:
        losses = losses.where(labels != IGNORE_INDEX, 0.0)
    n_tokens = float((labels != IGNORE_INDEX).sum()) if masked else TOKENS
    if reduction == "none":
        loss = losses
    else:
        loss = losses.sum() / (n_tokens ** (reduction == "mean") if num_items is None else float(num_items))
    of_student = [made[name] for name in NAMES if name.startswith("student") and name in made]
    of_loss, of_grad = subtracted(student.detach(), teacher, options)
    largest = max(float(t.detach().abs().max()) for t in made.values())  # of what products multiply it with
    return (
        loss.detach(),
        torch.autograd.grad((loss * factor_of(reduction)).sum(), of_student),
        (of_loss, of_grad / TOKENS * largest),
    )


def factor_of(reduction):
    """What multiplies the loss before backward."""
    return FACTORS if reduction == "none" else torch.tensor(0.75)


def check(loss, grads, made, labels, roundings, **given):
    truth, peer = (oracle(made, labels, dtype, **given) for dtype in (torch.float64, None))
    of_loss, of_grad = truth[2]
    assert_within_budget(loss, truth[0], peer[0], of_loss)
    for grad, *others in zip(grads, truth[1], peer[1], strict=True):
        assert_within_budget(grad, *others, of_grad, roundings)


DIVISORS = {
    "mean": {"reduction": "mean"},
    "none": {"reduction": "none"},
    "sum / fp32": {"reduction": "sum", "num_items": torch.tensor(6.5)},
}
GRADIENTS = ("auto", "in_forward", "in_backward")
PAIRS = covering(  # tests/conformance has more options on one rank, random calls all of them on several
    lambda case: not (case.get("gradient") == "in_forward" and case.get("divisor") == "none"),
    divergence=("forward", "js 0.2", "top-k bucket"),
    divisor=tuple(DIVISORS),
    hard=(None, 0.3),  # None: without labels
    columns=tuple(BOUNDS),
    chunk_size=(4, "auto"),
    gradient=GRADIENTS,
    reduce_hidden_grad=(True, False),
    dtype=(torch.float32, torch.bfloat16, torch.float16),
)
EACH = pytest.mark.parametrize("pair", PAIRS, ids=map(str, range(len(PAIRS))))


def given_of(pair):
    """The tensors over the whole vocabulary, labels, and what the oracle knows of the options."""
    made, labels = inputs()
    made = {n: t if n.startswith("teacher") else t.to(pair["dtype"]) for n, t in made.items()}
    divergence, _, detail = pair["divergence"].partition(" ")
    options = {"temperature": 2.5}
    if divergence == "top-k":
        teacher = F.linear(made["teacher_hidden"], made["teacher_weight"], made.get("teacher_bias")).float()
        log_probs, ids = (teacher / 2.5).log_softmax(-1).topk(5)
        options |= {"rest": detail, "teacher_ids": ids.flip(-1), "teacher_log_probs": log_probs.flip(-1)}
    else:
        options |= {"divergence": divergence} | ({"beta": 0.2} if detail else {})
        options |= {"hard_weight": pair["hard"]} if pair["hard"] else {}
    return made, labels, options | DIVISORS[pair["divisor"]]


def _in_rank(rank, group, pair, impl, device=None):
    """``(loss, gradients, collectives, device)`` with this rank's rows of both heads; the padding is large."""
    n_ranks, device = (1, device) if group is None else (group.size(), device_of(rank, group))
    made, labels, options = given_of(pair)
    start, stop = BOUNDS[pair["columns"]].get(n_ranks, even(COLUMNS // n_ranks, n_ranks))[rank]
    own = {n: t if "hidden" in n else padded_shard(t.t(), start, stop, 300.0).t().contiguous() for n, t in made.items()}
    own = {n: t.clone().to(device).requires_grad_(n.startswith("student")) for n, t in own.items()}
    student, teacher = heads_of(own)
    if "teacher_ids" in options:
        tensors = (options.pop(name).to(device) for name in ("teacher_ids", "teacher_log_probs"))
        teacher = TopKTeacher(*tensors, options.pop("rest"), options.get("temperature", 1.0))
    options |= {name: pair[name] for name in ("chunk_size", "gradient", "reduce_hidden_grad")}
    options |= {"labels": None if pair["hard"] is None else labels.to(device), "group": group, "impl": impl}
    options["vocab_size"] = VocabShard(start, stop, COLUMNS)
    with record_collectives() as calls:
        loss = linear_distillation_loss(student, teacher, **options)
    with record_collectives() as in_backward:
        loss.backward(factor_of(options["reduction"]).to(device))
    assert {call.name for call in in_backward} <= ({"allreduce_"} if is_deferred(pair) else set())
    with pytest.raises(RuntimeError, match="second time|second backward|backward through the graph"):
        loss.backward(torch.ones_like(loss))
    grads = [own[n].grad for n in NAMES if n.startswith("student") and n in own]
    return loss, grads, [call.name for call in calls + in_backward], str(device)


def is_deferred(pair):
    """Whether gradients are computed in backward."""
    is_auto = pair["gradient"] == "auto" and (pair["divisor"] == "none" or pair["dtype"] == torch.float16)
    return is_auto or pair["gradient"] == "in_backward"


def n_chunks_of(pair, labels, device):
    """On a CPU, ignored tokens are left out."""
    is_left_out = pair["hard"] is not None and device == "cpu"
    n_rows = int((labels != IGNORE_INDEX).sum()) if is_left_out else TOKENS
    return 1 if pair["chunk_size"] == "auto" else -(-n_rows // pair["chunk_size"])


def check_pair(pair, results):
    made, labels, options = given_of(pair)
    masked, n_ranks = pair["hard"] is not None, len(results)
    bounds = BOUNDS[pair["columns"]].get(n_ranks, even(COLUMNS // n_ranks, n_ranks))
    hidden = [grads[0] for _, grads, *_ in results]
    if pair["reduce_hidden_grad"]:
        assert all(torch.equal(grad, hidden[0]) for grad in hidden)
    parts = zip(*(grads[1:] for _, grads, *_ in results), strict=True)
    of_head = [assembled(bounds, part, COLUMNS) for part in parts]
    grads = [hidden[0] if pair["reduce_hidden_grad"] else sum(hidden[1:], start=hidden[0]), *of_head]
    roundings = 2 - is_deferred(pair)  # backward multiplies what forward has written
    check(results[0][0], grads, made, labels, roundings, masked=masked, bounds=bounds, **options)
    for loss, _, calls, device in results:
        assert torch.equal(loss, results[0][0])
        n_chunks = 0 if n_ranks == 1 else n_chunks_of(pair, labels, device)
        n_gathers = 2 * n_chunks if options.get("divergence") == "js" else n_chunks
        if is_deferred(pair) and options.get("divergence") != "js":
            n_gathers = min(n_chunks, 1)  # of all chunks
        expected = {"_allgather_base_": n_gathers, "allreduce_": n_chunks * pair["reduce_hidden_grad"]}
        assert Counter(calls) == Counter(expected)


@pytest.mark.interpreted(2)
@EACH
@in_several_ranks
def test_every_pair_on_ranks(rank_pool, impl, pair):
    check_pair(pair, rank_pool.run(_in_rank, pair, impl))


N_MANY = 300


def _many():
    """Heads of 300 tokens, and their labels, a fifth of them ignored."""
    generator = torch.Generator().manual_seed(1)
    shapes = (N_MANY, WIDTH), (COLUMNS, WIDTH), (N_MANY, OF_TEACHER), (COLUMNS, OF_TEACHER)
    tensors = [0.5 * torch.randn(shape, generator=generator) for shape in shapes]
    labels = torch.randint(0, COLUMNS, (N_MANY,), generator=generator)
    return tensors, torch.where(torch.rand(N_MANY, generator=generator) < 0.2, IGNORE_INDEX, labels)


def _many_in_rank(rank, group, impl, divergence):
    tensors, labels = _many()
    device, rows = device_of(rank, group), slice(20 * rank, 20 * rank + 20)
    tensors = [t[rows] if len(t) == COLUMNS else t for t in tensors]
    hidden, weight, *teacher = [t.to(device).requires_grad_() for t in tensors]
    heads = Head(hidden, weight), Head(*(t.detach() for t in teacher))
    options = {"divergence": divergence, "labels": labels.to(device), "chunk_size": 200, "group": group, "impl": impl}
    loss = linear_distillation_loss(*heads, **options)
    loss.backward()
    return [each.detach().cpu().double() for each in (loss, hidden.grad, weight.grad)]


@pytest.mark.parametrize("divergence", ["forward", "reverse", "js"])
@in_ranks()
def test_a_chunk_of_many_tokens_has_its_teacher_in_two_parts(rank_pool, impl, divergence):
    """Statistics travel in parts of 128 rows and the rest, each with its rows of the teacher's logits."""
    tensors, labels = _many()
    hidden, weight, *teacher = [t.double().requires_grad_() for t in tensors]
    student, of_teacher = F.linear(hidden, weight), F.linear(*teacher).detach()
    losses = divergences(student, of_teacher, labels=labels, divergence=divergence)
    loss = losses[labels != IGNORE_INDEX].mean()
    expected = loss.detach(), *torch.autograd.grad(loss, (hidden, weight))
    for rank, found in enumerate(rank_pool.run(_many_in_rank, impl, divergence)):
        of_rank = *expected[:2], expected[2][20 * rank : 20 * rank + 20]
        for value, right in zip(found, of_rank, strict=True):
            torch.testing.assert_close(value, right, rtol=2e-5, atol=2e-6 * float(right.abs().max()))


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
        # Rounding does not differ, nor do rows that are ignored.
        close = made["teacher_hidden"] * (1 + 1e-3 * rank)
        call(teacher_hidden=close.index_fill(0, torch.tensor([3, 5]), rank)).backward()
        return errors


@in_ranks((2,), (), ())
def test_verification_compares_the_ranks(rank_pool, impl):
    first, second = rank_pool.run(_verified)
    names = ("hard_weight", "temperature", "teacher.hidden", "tokens['teacher.log_probs']")
    assert first == second and all(f"ValueError: {n}: rank 1 of 2 has " in e for n, e in zip(names, first, strict=True))


@pytest.mark.reference
def test_no_tokens_and_without_labels_nothing_is_ignored():
    made, _ = inputs()
    few = {name: tensor[:0] if "hidden" in name else tensor for name, tensor in made.items()}
    assert linear_distillation_loss(*heads_of(few)) == 0
    loss = linear_distillation_loss(*heads_of(made), ignore_index=0)
    truth, peer = (oracle(made, None, dtype, reduction="mean", masked=False) for dtype in (torch.float64, None))
    assert_within_budget(loss, truth[0], peer[0], truth[2][0])


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
