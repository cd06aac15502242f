"""A teacher that is known at k tokens of each row, in place of logits."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from vocab_parallel_ce import checks
from vocab_parallel_ce.losses.given_ids import IGNORED
from vocab_parallel_ce.losses.top_k_teacher import MOST_MASS, TOP_K, TopK
from vocab_parallel_ce.options import Settings
from vocab_parallel_ce.spec import NEG_INF, is_ignored
from vocab_parallel_ce.targets import Tokens, check


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


def targets_of(
    teacher: TopKTeacher, labels: Tensor | None, student: Tensor, subject: str, settings: Settings
) -> tuple[TopK, Settings]:
    """Return the targets of the loss of ``student``, logits or hidden states, and its settings.

    Where ``check_labels`` says so, it looks at the values, and marks the ids that are left out.
    """
    ids, log_probs, rest, temperature = teacher
    checks.check_choice("teacher.rest", rest, ("ignore", "bucket"))
    checks.check_number("teacher.temperature", temperature, positive=True)
    checks.check_number("temperature", settings.temperature, positive=True)
    of_loss = settings.temperature
    if abs(temperature - of_loss) > 1e-6 * of_loss:  # beyond rounding to fp32
        if checks.is_traced():  # the compiler cannot write its numbers
            raise ValueError("teacher.temperature: expected the loss's temperature, got another")
        raise ValueError(
            f"teacher.temperature: expected {of_loss:g}, the loss's temperature, got {temperature:g}; pass log_softmax "
            f"of the teacher's logits / {of_loss:g}, and TopKTeacher(..., temperature={of_loss:g})"
        )
    checks.check_tensor("teacher.ids", ids)
    if settings.check_labels == "auto" and checks.is_traced():
        settings = settings._replace(check_labels=False)  # an operator has no ids that are left out
    if checks.looks_at(ids, settings.check_labels):
        if checks.is_traced():
            raise ValueError(
                "check_labels: expected False in compiled code with a TopKTeacher, because the check waits for the "
                "device, got True; check the teacher in an eager call"
            )
        checks.check_tensor(subject, student)
        targets, tokens = TopK(ids, log_probs, labels), Tokens(student, subject, student.shape[:-1])
        check(targets, tokens)
        TOP_K.check(targets, tokens, settings)
        TOP_K.options(settings, None, class_weight=False)
        ids = check_values(teacher, labels, settings.ignore_index)
    k = ids.shape[-1] if ids.dim() else 0
    settings = settings._replace(n_ids=k + (labels is not None), n_known=k if rest == "bucket" else 0)
    return TopK(ids, log_probs, labels), settings


def check_values(teacher: TopKTeacher, labels: Tensor | None, ignore_index: int) -> Tensor:
    """Return the ids, those that are left out as ``IGNORED``; the loss checks the range of the others.

    Waits for the device. Raises ValueError for an id that is twice in a row, or for too much mass.
    """
    ids, log_probs = teacher.ids, teacher.log_probs
    known = ids.long().masked_fill(log_probs == NEG_INF, IGNORED)
    if labels is not None:
        known = torch.where(is_ignored(labels, ignore_index).unsqueeze(-1), IGNORED, known)
    known = known.reshape(-1, ids.shape[-1])
    in_order = known.sort(dim=-1).values
    twice = in_order[:, 1:][(in_order[:, 1:] == in_order[:, :-1]) & (in_order[:, 1:] != IGNORED)]
    if twice.numel():
        raise ValueError(f"teacher.ids: must be different in a row, got {int(twice[0])} twice; give its log_probs -inf")
    if not known.numel():
        return known.view(ids.shape)
    log_q = log_probs.reshape(known.shape).float().masked_fill(known == IGNORED, NEG_INF)
    most, mass = float(log_q.amax()), float(log_q.exp().sum(dim=-1).amax())
    remedy = "pass log-probabilities, not probabilities or logits"
    if most > 1e-3:  # beyond rounding
        raise ValueError(f"teacher.log_probs: must be at most 0, got {most:g}; {remedy}")
    if mass > MOST_MASS:
        raise ValueError(f"teacher.log_probs: exponentials of a row must sum to at most 1, got {mass:g}; {remedy}")
    return known.view(ids.shape)
