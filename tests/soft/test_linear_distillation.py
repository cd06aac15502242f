"""Distillation of a head from a teacher's head, chunk by chunk: numbers against fp64, refusals, ranks."""

import pytest
import torch
import torch.nn.functional as F

from tests.support.budget import assert_within_budget
from tests.support.collectives import record_collectives
from tests.support.inputs import IGNORE_INDEX, NAN
from tests.support.ranks import device_of, in_two_ranks
from tests.support.soft import divergences
from vocab_parallel_ce import linear_distillation_loss
from vocab_parallel_ce.soft.distillation import DIVERGENCES

TOKENS, WIDTH, OF_TEACHER, COLUMNS = 9, 12, 7, 40
NAMES = ("student_hidden", "student_weight", "teacher_hidden", "teacher_weight", "student_bias", "teacher_bias")


def inputs(dtype=torch.float32):
    """Of both models; the labels ignore two tokens."""
    generator = torch.Generator().manual_seed(0)
    shapes = (TOKENS, WIDTH), (COLUMNS, WIDTH), (TOKENS, OF_TEACHER), (COLUMNS, OF_TEACHER), (COLUMNS,), (COLUMNS,)
    made = {n: torch.randn(s, generator=generator).to(dtype) for n, s in zip(NAMES, shapes, strict=True)}
    labels = torch.randint(0, COLUMNS, (TOKENS,), generator=generator)
    labels[3], labels[5] = IGNORE_INDEX, IGNORE_INDEX
    return made, labels


def oracle(made, labels, dtype, reduction, masked, **options):
    """``(loss, gradients of student_hidden, student_weight and student_bias)`` in ``dtype``."""
    made = {name: tensor.to(dtype).requires_grad_(name.startswith("student")) for name, tensor in made.items()}
    student, teacher = (
        F.linear(made[f"{who}_hidden"], made[f"{who}_weight"], made[f"{who}_bias"]) for who in ("student", "teacher")
    )
    losses = divergences(student, teacher, labels=labels, **options)
    if masked:
        losses = losses.where(labels != IGNORE_INDEX, 0.0)
    loss = losses.sum() / (float((labels != IGNORE_INDEX).sum()) if masked else TOKENS) ** (reduction == "mean")
    of_student = [made[name] for name in NAMES if name.startswith("student")]
    return loss.detach(), torch.autograd.grad(loss * 0.75, of_student)


def check(loss, grads, made, labels, **given):
    truth, peer = (oracle(made, labels, dtype, **given) for dtype in (torch.float64, torch.float32))
    assert_within_budget(loss, truth[0], peer[0])
    for grad, *others in zip(grads, truth[1], peer[1], strict=True):
        assert_within_budget(grad, *others)


@pytest.mark.interpreted(2)
@pytest.mark.parametrize("chunk_tokens", (4, "auto"))
@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_loss_and_gradients(impl_device, divergence, chunk_tokens):
    impl, device = impl_device
    made, labels = inputs()
    masked = divergence != "reverse"
    options = {"divergence": divergence, "temperature": 1.5} | ({"hard_weight": 0.3} if masked else {})
    own = {n: t.clone().to(device).requires_grad_(n.startswith("student")) for n, t in made.items()}
    reduction = "mean" if chunk_tokens == 4 else "sum"
    given = {**options, "reduction": reduction, "chunk_tokens": chunk_tokens, "impl": impl}
    loss = linear_distillation_loss(**own, **given, labels=labels.to(device) if masked else None)
    loss.backward(torch.tensor(0.75, device=device))
    grads = [own[name].grad.cpu() for name in NAMES if name.startswith("student")]
    check(loss.cpu(), grads, made, labels, reduction=reduction, masked=masked, **options)
    assert not masked or not grads[0][3].any()
    with pytest.raises(RuntimeError, match="second time|second backward|backward through the graph"):
        loss.backward()
    assert torch.equal(own["teacher_hidden"].cpu(), made["teacher_hidden"])


@pytest.mark.reference
def test_per_token_losses_without_a_gradient_and_padding():
    made, labels = inputs()
    made["teacher_weight"] = torch.cat([made["teacher_weight"], torch.full((3, OF_TEACHER), NAN)])
    made["teacher_bias"] = torch.cat([made["teacher_bias"], torch.zeros(3)])
    given = {"reduction": "none", "vocab_size": COLUMNS, "chunk_tokens": 4}
    losses = linear_distillation_loss(**made, **given, labels=labels)
    student = F.linear(made["student_hidden"], made["student_weight"], made["student_bias"])
    teacher = F.linear(made["teacher_hidden"], made["teacher_weight"], made["teacher_bias"])
    expected = divergences(student.double(), teacher[:, :COLUMNS].double()).where(labels != IGNORE_INDEX, 0.0)
    torch.testing.assert_close(losses, expected.float(), rtol=1e-5, atol=1e-5)
    few = {name: made[name][:0] if "hidden" in name else made[name] for name in NAMES}
    assert linear_distillation_loss(**few, vocab_size=COLUMNS) == 0
    loss = linear_distillation_loss(**made, vocab_size=COLUMNS, ignore_index=0)  # without labels nothing is ignored
    truth = divergences(student.double(), teacher[:, :COLUMNS].double()).mean()
    torch.testing.assert_close(loss, truth.float(), rtol=1e-5, atol=1e-5)


@pytest.mark.reference
def test_refusals_by_name():
    made, labels = inputs()
    made["student_weight"].requires_grad_()
    for error, words, changed in (
        (TypeError, "teacher_weight: .*detach", {"teacher_weight": made["teacher_weight"].clone().requires_grad_()}),
        (ValueError, "teacher_hidden: shape", {"teacher_hidden": made["teacher_hidden"][:3]}),
        (ValueError, "teacher_weight: expected", {"teacher_weight": made["teacher_weight"].double().bfloat16()}),
        (ValueError, "teacher_weight: expected shape", {"teacher_weight": made["teacher_weight"][:, :3]}),
        (ValueError, "teacher_bias: expected shape", {"teacher_bias": made["teacher_bias"][:3]}),
        (
            ValueError,
            "teacher_weight: rows",
            {"teacher_weight": made["teacher_weight"][:9], "teacher_bias": made["teacher_bias"][:9]},
        ),
        (ValueError, "reduction: expected 'mean' or 'sum'", {"reduction": "none"}),
        (ValueError, "hard_weight: expected labels", {"hard_weight": 0.5}),
        (TypeError, "sequence_parallel: expected one of", {"sequence_parallel": True}),
        (ValueError, "labels: expected shape", {"labels": labels[:2]}),
    ):
        with pytest.raises(error, match=f"^{words}"):
            linear_distillation_loss(**(made | changed))


def _in_rank(rank, group, impl):
    """``(loss, gradients, names of the collectives)`` with this rank's half of both heads."""
    made, labels = inputs()
    own = {n: t if "hidden" in n else t.chunk(2)[rank].clone() for n, t in made.items()}
    device = device_of(rank, group)
    own = {n: t.to(device).requires_grad_(n.startswith("student")) for n, t in own.items()}
    labels = labels.to(device)
    with record_collectives() as calls:
        loss = linear_distillation_loss(
            **own, labels=labels, divergence="js", beta=0.3, group=group, vocab_size=COLUMNS, chunk_tokens=4, impl=impl
        )
        loss.backward(torch.tensor(0.75, device=device))
    return loss, [own[name].grad for name in NAMES if name.startswith("student")], [call.name for call in calls]


@in_two_ranks
def test_two_ranks(rank_pool, impl):
    (loss, first, calls), (other, second, _) = rank_pool.run(_in_rank, impl)
    made, labels = inputs()
    assert torch.equal(loss, other) and torch.equal(first[0], second[0])
    grads = [first[0], torch.cat([first[1], second[1]]), torch.cat([first[2], second[2]])]
    check(loss, grads, made, labels, reduction="mean", masked=True, divergence="js", beta=0.3)
    assert calls.count("_allgather_base_") == 2 * calls.count("allreduce_") > 0
