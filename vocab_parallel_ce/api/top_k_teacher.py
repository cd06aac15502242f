"""A teacher that is known at k tokens of each row: its divergence is one of the student's log-probabilities there.

    forward   sum_k q_k (log q_k - log s_k)
    reverse   sum_k s_k (log s_k - log q_k)
    js        sum_k beta q_k (log q_k - log m_k) + (1 - beta) s_k (log s_k - log m_k),  m = beta q + (1 - beta) s

With a rest, the other tokens are one more, of ``1 - sum_k s_k`` and ``1 - sum_k q_k``. A hard label is one more given
id. All of it is plain PyTorch over ``[..., k]`` numbers, after :func:`token_log_probs` or inside an objective.
"""

from __future__ import annotations

import math
from typing import Annotated, Any, NamedTuple

import torch
from torch import Tensor

from vocab_parallel_ce import checks, verify
from vocab_parallel_ce.api.call import run_head, run_logits, run_objective
from vocab_parallel_ce.api.given_ids import rows_of_all, vocab_size_of
from vocab_parallel_ce.collectives import group_position
from vocab_parallel_ce.head.arguments import Arguments, check_gradient, gradient_of
from vocab_parallel_ce.head.objective import Objective
from vocab_parallel_ce.in_place import check_not_overwritten
from vocab_parallel_ce.layout import compute_dtype
from vocab_parallel_ce.losses.base import Loss
from vocab_parallel_ce.losses.divergences import check_divergence, log_ratios
from vocab_parallel_ce.losses.given_ids import GIVEN_IDS, IGNORED, Ids
from vocab_parallel_ce.options import REDUCTIONS, Settings, TeacherOptions
from vocab_parallel_ce.plan import checked_divisor, comparable
from vocab_parallel_ce.spec import INF, NAN, NEG_INF, is_ignored
from vocab_parallel_ce.targets import Head, Role, Tokens, check, register

# Of the probabilities of a row. Log-probabilities of bf16 come to less than 1.03; probabilities in their place to k.
MOST_MASS = 1.125


class TopKTeacher(NamedTuple):
    """A teacher that is known at ``k`` tokens, the same on every rank; it gets no gradient.

    A row whose ``exp(log_probs)`` sum to more than 1.125 is no distribution, beyond rounding: probabilities or logits
    in the place of ``log_probs``. Its loss and gradient are NaN, as of an id outside the vocabulary, and
    where ``check_labels`` looks it is a ValueError. ``"auto"`` does not look in compiled code.

    Example:
        >>> from vocab_parallel_ce import TopKTeacher, distillation_loss
        >>> teacher = TopKTeacher(ids=torch.tensor([[0, 1]]), log_probs=torch.tensor([[0.5, 0.5]]).log())
        >>> round(distillation_loss(torch.zeros(1, 4), teacher).item(), 4)  # log 4 - log 2
        0.6931
    """

    ids: Tensor  #: [..., k] int64 or int32 global ids, different in a row
    log_probs: Tensor  #: [..., k] floating point, log_softmax(logits / temperature); -inf leaves an id out
    #: "ignore": nothing else counts. "bucket": all other tokens are one, of probability 1 - sum_k q_k.
    rest: str = "ignore"
    temperature: float = 1.0  #: of log_probs; the loss must have the same


class TopK(NamedTuple):
    """The caller's tensors, with the roles by which they are checked."""

    ids: Annotated[Tensor, Role("ids", ("rows", "k"), "teacher.ids")]
    log_probs: Annotated[Tensor, Role("numbers", ("rows", "k"), "teacher.log_probs")]
    labels: Annotated[Tensor | None, Role("ids", ("rows",))] = None


register(TopK)


def loss_of_logits(
    student: Tensor, teacher: TopKTeacher, labels: Tensor | None, settings: Settings, group: Any, num_items: Any
) -> Tensor:
    """Return the loss of a student's logits."""
    checks.check_choice("gradient", settings.gradient, ("auto", "in_backward", "out_of_place"))
    checks.check_tensor("student_logits", student)
    n_columns = student.shape[-1] * group_position(group)[1]
    tokens = Tokens(student, "student_logits", student.shape[:-1])
    ids, log_q, divisor = checked(teacher, labels, tokens, n_columns, settings, num_items)
    with checks.naming(labels="teacher.ids"):
        values = run_logits(GIVEN_IDS, student, Ids(ids), _of_values(ids, settings), group=group).loss
    return reduced(row_losses(values, log_q, teacher.rest, settings), divisor, settings.reduction)


def loss_of_head(
    student: Head, teacher: TopKTeacher, labels: Tensor | None, settings: Settings, group: Any, num_items: Any
) -> Tensor:
    """Return the loss of a student's head: an objective if forward can compute the gradients, in three products."""
    check_gradient(settings, knows_grad_output=False)
    checks.check_hidden(student.hidden)
    tokens = Tokens(student.hidden, "student.hidden", student.hidden.shape[:-1])
    n_columns = rows_of_all(student.weight, group)
    ids, log_q, divisor = checked(teacher, labels, tokens, n_columns, settings, num_items)

    def divergence(log_probs: Tensor, **of_teacher: Tensor) -> Tensor:
        return row_losses(log_probs, of_teacher["teacher.log_probs"], teacher.rest, settings)

    objective = Objective(divergence, {"teacher.log_probs": log_q}, "sum", divisor, False)
    arguments = Arguments(student, Ids(ids), group, None, objective=objective)
    with checks.naming(labels="teacher.ids", objective="gradient"):
        return composed(GIVEN_IDS, arguments, settings, _of_values(ids, settings))


def composed(loss: Loss, arguments: Arguments, settings: Settings, of_rows: Settings) -> Tensor:
    """Return the loss of a head by an objective, in three products; or by what it takes, if only backward may know it.

    ``of_rows`` are the settings of the quantities that the objective takes; it is not reduced by itself.
    """
    objective = arguments.objective
    assert objective is not None
    gradient = "in_backward" if checks.is_traced() else gradient_of(settings)
    of_rows = of_rows._replace(gradient=gradient)
    if gradient == "in_forward":
        return run_objective(loss, arguments, of_rows)[0]
    found = run_head(loss, arguments._replace(objective=None), of_rows)
    others = {name: getattr(found, name) for name in of_rows.outputs}
    losses = objective.function(found.loss, **others, **objective.tokens)
    return reduced(losses, objective.num_items, settings.reduction)


def checked_hard_weight(settings: Settings, labels: Tensor | None) -> float:
    """Return the hard weight; it needs labels."""
    checks.check_number("hard_weight", settings.hard_weight, at_most=1)
    if settings.hard_weight and labels is None:
        raise ValueError(f"hard_weight: expected labels with it, got {settings.hard_weight} and labels=None")
    return float(settings.hard_weight)


def with_hard_weight(divergence: Tensor, log_probs: Tensor, hard_weight: float) -> Tensor:
    """Return ``(1 - h) * divergence + h * cross_entropy``; 0 times an infinite divergence would be NaN."""
    if hard_weight == 1:
        return -log_probs
    return (1 - hard_weight) * divergence - hard_weight * log_probs if hard_weight else divergence


def _of_values(ids: Tensor, settings: Settings) -> Settings:
    """Return the settings of the log-probabilities; verification compares those of the divergence with them."""
    return settings._replace(ignore_index=IGNORED, reduction="none", check_labels=False, n_ids=ids.shape[-1])


def reduced(losses: Tensor, divisor: Any, reduction: str) -> Tensor:
    """Return the losses ``[...]``, or their sum ``[]`` over ``divisor [1]``, 0 for a divisor of 0."""
    if reduction == "none":
        return losses
    if divisor is None:
        return losses.sum()
    divisor = divisor.to(losses.dtype).reshape(())
    return losses.sum() / divisor.masked_fill(divisor == 0, INF)


def row_losses(values: Tensor, log_q: Tensor, rest: str, settings: Settings) -> Tensor:
    """Return ``[...]`` losses of the log-probabilities ``values [..., k]`` of a student, one more with labels.

    ``log_q [..., k]`` are the teacher's, -inf where an id is left out. Values there are 0, as all of an ignored token.
    """
    k, left_out = log_q.shape[-1], log_q == NEG_INF
    log_s, mass = values[..., :k], log_q.exp().sum(dim=-1, keepdim=True)
    log_q = log_q.masked_fill(mass > MOST_MASS, NAN)
    if rest == "bucket":
        log_r = (1 - mass).clamp(min=torch.finfo(log_q.dtype).eps / 2).log()
        log_q, log_s = torch.cat([log_q, log_r], dim=-1), torch.cat([log_s, log_rest(log_s, left_out)], dim=-1)
        left_out = torch.cat([left_out, left_out.all(dim=-1, keepdim=True)], dim=-1)
    log_q, log_s = log_q.masked_fill(left_out, 0.0), log_s.masked_fill(left_out, 0.0)
    losses = _terms(log_s, log_q, settings).masked_fill(left_out, 0.0).sum(dim=-1)
    if values.shape[-1] == k:
        return losses
    label_log_prob = values[..., k]
    # NaN stays: the teacher is no distribution.
    losses = torch.where(losses.isnan(), losses, with_hard_weight(losses, label_log_prob, settings.hard_weight))
    return torch.where(label_log_prob.isnan(), NAN, losses)  # a label outside the vocabulary


def log_rest(log_s: Tensor, left_out: Tensor) -> Tensor:
    """Return ``[..., 1]``, log(1 - S), where S is the sum of ``exp(log_s [..., k])`` of what is not left out.

    1 - s of the largest has all digits. 1 - S counts as at least half an eps of that, because less is rounding, and as
    2^-110 (in fp64 2^-1006), so that its inverse times a loss scale of 2^16 is finite. It has no gradient there.
    """
    s = log_s.exp().masked_fill(left_out, 0.0)
    best, place = log_s.detach().masked_fill(left_out, NEG_INF).max(dim=-1, keepdim=True)
    without_best, limits = -best.expm1(), torch.finfo(s.dtype)
    outside = without_best - s.detach().scatter(-1, place, 0.0).sum(dim=-1, keepdim=True)
    least = (without_best * (limits.eps / 2)).clamp(min=limits.tiny * 2**16)
    inside = s.sum(dim=-1, keepdim=True)
    return torch.maximum(outside + (inside.detach() - inside), least).log()


def _terms(log_s: Tensor, log_q: Tensor, settings: Settings) -> Tensor:
    """Return the term of each outcome."""
    if settings.divergence == "forward":
        return log_q.exp() * (log_q - log_s)
    # An outcome that the student excludes, by a logit of -inf, must not make its gradient NaN.
    excluded = log_s == NEG_INF
    log_s = log_s.masked_fill(excluded, 0.0)
    s, beta = log_s.exp().masked_fill(excluded, 0.0), settings.beta
    if settings.divergence == "reverse":
        return s * (log_s - log_q)
    # What the mixture adds to the derivatives of both terms cancels: the ratios have none.
    student_ratio, teacher_ratio = log_ratios(log_s.detach(), log_q, beta)
    teacher_ratio = teacher_ratio.masked_fill(excluded, -math.log(beta))
    return beta * log_q.exp() * teacher_ratio + (1 - beta) * s * student_ratio


def checked(
    teacher: TopKTeacher, labels: Tensor | None, tokens: Tokens, n_columns: int, settings: Settings, num_items: Any
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Check the arguments of a call, and return ids, the teacher's log-probabilities and the sum's divisor ``[1]``.

    The ids are ``[..., k]``, with labels one more, and ``IGNORED`` where one is left out. The log-probabilities are
    ``[..., k]`` in the dtype of the arithmetic, and -inf there. Where ``check_labels`` says so, it looks at the values.
    ``n_columns`` are those of all ranks, if ``vocab_size`` does not say it.
    """
    student, targets = tokens.tensor, TopK(teacher.ids, teacher.log_probs, labels)
    checks.check_no_transforms(student, *targets, num_items)
    _check_settings(teacher, settings)
    check(targets, tokens)
    checked_hard_weight(settings, labels)
    if targets.ids.shape != targets.log_probs.shape:
        expected = f"that of teacher.log_probs, {tuple(targets.log_probs.shape)}"
        raise ValueError(f"teacher.ids: shape must be {expected}, got {tuple(targets.ids.shape)}")
    ignored = None if labels is None else is_ignored(labels, settings.ignore_index)
    if not checks.is_traced():
        check_not_overwritten(targets.log_probs, "teacher.log_probs")
    divisor = divisor_of_losses(num_items, ignored, tokens, settings)
    if verify.is_on:
        facts = {"teacher.log_probs": targets.log_probs, "teacher.rest": teacher.rest}
        verify.also(facts | comparable(settings._replace(vocab_size=None), num_items))
    if num_items is not None:  # of 0 items no token counts: a NaN must not reach the gradient as 0 * NaN
        assert divisor is not None
        is_none = divisor.reshape(()) == 0
        ignored = is_none if ignored is None else ignored | is_none
    ids, log_q = targets.ids.long(), targets.log_probs.detach().to(compute_dtype(student.dtype))
    if ignored is not None:
        log_q = log_q.masked_fill(ignored.unsqueeze(-1), NEG_INF)
    left_out = log_q == NEG_INF
    if not checks.is_traced() and checks.looks_at(targets.ids, settings.check_labels):
        vocab_size = vocab_size_of(settings, n_columns)
        check_values(ids.masked_fill(left_out, IGNORED), log_q, vocab_size)
        if labels is not None:
            checks.check_label_range(labels, vocab_size, settings.ignore_index)
    if labels is not None:
        assert ignored is not None
        ids = torch.cat([ids, labels.long().unsqueeze(-1)], dim=-1)
        left_out = torch.cat([left_out, ignored.unsqueeze(-1)], dim=-1)
    return ids.clamp(min=-1).masked_fill(left_out, IGNORED), log_q, divisor


def _check_settings(teacher: TopKTeacher, settings: Settings) -> None:
    """Raise unless the settings fit the teacher's; ``loss_options`` checks others."""
    temperature, of_loss = teacher.temperature, settings.temperature
    checks.check_choice("teacher.rest", teacher.rest, ("ignore", "bucket"))
    checks.check_number("teacher.temperature", temperature, positive=True)
    checks.check_number("temperature", of_loss, positive=True)
    checks.check_choice("reduction", settings.reduction, REDUCTIONS)
    if abs(temperature - of_loss) > 1e-6 * of_loss:  # beyond rounding to fp32
        if checks.is_traced():  # the compiler cannot write its numbers
            raise ValueError("teacher.temperature: expected the loss's temperature, got another")
        raise ValueError(
            f"teacher.temperature: expected {of_loss:g}, the loss's temperature, got {temperature:g}; pass log_softmax "
            f"of the teacher's logits / {of_loss:g}, and TopKTeacher(..., temperature={of_loss:g})"
        )
    check_divergence(TeacherOptions(settings.divergence, settings.beta, settings.temperature))
    checks.check_integer("ignore_index", settings.ignore_index)
    checks.check_flag_or_auto("check_labels", settings.check_labels)
    if checks.is_traced() and settings.check_labels is True:
        raise ValueError(
            "check_labels: expected False in compiled code with a TopKTeacher, because the check waits for the "
            "device, got True; check the teacher in an eager call"
        )
    if settings.hard_weight and of_loss != 1:
        raise ValueError(
            f"hard_weight: expected temperature=1 with a TopKTeacher, got {of_loss}; add "
            "vocab_parallel_cross_entropy yourself"
        )


def divisor_of_losses(num_items: Any, ignored: Tensor | None, tokens: Tokens, settings: Settings) -> Tensor | None:
    """Return ``[1]`` what divides the sum of the losses: ``num_items``, or for a mean the tokens that count."""
    if num_items is not None and checks.is_traced():
        from vocab_parallel_ce.compile import divisor_of

        return divisor_of(num_items, settings.reduction, tokens.tensor)
    if num_items is not None:
        return checked_divisor(num_items, settings.reduction, tokens.tensor)
    if settings.reduction != "mean":
        return None
    if ignored is None:
        return tokens.tensor.new_full((1,), math.prod(tokens.shape), dtype=torch.int64)
    return (~ignored).sum().reshape(1)


def check_values(ids: Tensor, log_q: Tensor, vocab_size: int) -> None:
    """Raise ValueError for an id outside or twice in a row, or for too much mass. Waits for the device.

    ``ids [..., k]`` are ``IGNORED`` where ``log_q [..., k]`` are -inf.
    """
    checks.check_label_range(ids, vocab_size, IGNORED, name="teacher.ids", names_ignored=False)
    in_order = ids.sort(dim=-1).values
    twice = in_order[..., 1:][(in_order[..., 1:] == in_order[..., :-1]) & (in_order[..., 1:] != IGNORED)]
    if twice.numel():
        raise ValueError(f"teacher.ids: must be different in a row, got {int(twice[0])} twice; give its log_probs -inf")
    if not ids.numel():
        return
    most, mass = float(log_q.amax()), float(log_q.exp().sum(dim=-1).amax())
    remedy = "pass log-probabilities, not probabilities or logits"
    if most > 1e-3:  # beyond rounding
        raise ValueError(f"teacher.log_probs: must be at most 0, got {most:g}; {remedy}")
    if mass > MOST_MASS:
        raise ValueError(f"teacher.log_probs: exponentials of a row must sum to at most 1, got {mass:g}; {remedy}")
