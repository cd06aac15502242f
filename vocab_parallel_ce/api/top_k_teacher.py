"""Divergences from a teacher that is known at k tokens, out of the student's log-probabilities at these ids.

    forward   sum_k q_k (log q_k - log s_k)
    reverse   sum_k s_k (log s_k - log q_k)
    js        sum_k beta q_k (log q_k - log m_k) + (1 - beta) s_k (log s_k - log m_k),  m = beta q + (1 - beta) s

With ``rest="bucket"`` the other tokens are one more, of ``1 - sum_k s_k`` and ``1 - sum_k q_k``, which counts as at
least half an eps. A hard label is one more given id.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vocab_parallel_ce import checks, verify
from vocab_parallel_ce.api.call import is_traced
from vocab_parallel_ce.layout import compute_dtype
from vocab_parallel_ce.losses.divergences import check_hard_weight, divergence_options, log_ratios
from vocab_parallel_ce.losses.given_ids import IGNORED, Ids, marked
from vocab_parallel_ce.options import REDUCTIONS, Settings
from vocab_parallel_ce.plan import checked_divisor
from vocab_parallel_ce.run import rows_of_mean
from vocab_parallel_ce.spec import NAN, NEG_INF, is_ignored
from vocab_parallel_ce.targets import RowIds, Tokens, check_alongside

# Of the probabilities of a row. Log-probabilities of bf16 come to less than 1.03; probabilities in their place to k.
MOST_MASS = 1.125

LogProbsAt = Callable[..., Tensor]  # (given ids, settings=, n_known=) -> log-probabilities


class TopKTeacher(NamedTuple):
    """A teacher that is known at ``k`` tokens, the same on every rank; it gets no gradient.

    A row whose ``exp(log_probs)`` sum to more than 1.125 is no distribution, beyond rounding: probabilities or logits
    in the place of ``log_probs``. Its loss and gradient are NaN, as of an id outside the vocabulary, and with
    ``check_labels=True`` it is a ValueError.

    Example:
        >>> from vocab_parallel_ce import TopKTeacher, distillation_loss
        >>> teacher = TopKTeacher(ids=torch.tensor([[0, 1]]), log_probs=torch.tensor([[0.5, 0.5]]).log())
        >>> round(distillation_loss(torch.zeros(1, 4), teacher).item(), 4)  # log 4 - log 2
        0.6931
    """

    ids: Tensor  #: [..., k] int64 or int32 global ids, different in a row
    log_probs: Tensor  #: [..., k] floating point, at the temperature of the loss; -inf leaves an id out
    #: "ignore": nothing else counts. "bucket": all other tokens are one, of probability 1 - sum_k q_k.
    rest: str = "ignore"


def divergence(
    teacher: TopKTeacher,
    labels: Tensor | None,
    student: Tensor,
    subject: str,
    settings: Settings,
    num_items: Any,
    log_probs_at: LogProbsAt,
) -> Tensor:
    """Return the loss of ``student``, logits or hidden states, which ``subject`` is."""
    check_call(teacher, labels, student, subject, settings)
    divisor = None if num_items is None else _divisor(num_items, settings.reduction, student)
    log_q = teacher.log_probs.detach().to(compute_dtype(student.dtype))
    left_out = log_q == NEG_INF
    if labels is not None:
        left_out = left_out | is_ignored(labels, settings.ignore_index).unsqueeze(-1)
    mass = log_q.masked_fill(left_out, NEG_INF).exp().sum(dim=-1)
    log_q = log_q.masked_fill((mass > MOST_MASS).unsqueeze(-1), NAN)
    ids, k = marked(teacher.ids, left_out), teacher.ids.shape[-1]
    if labels is not None:
        hard = marked(labels, is_ignored(labels, settings.ignore_index))
        ids = torch.cat([ids, hard.unsqueeze(-1)], dim=-1)
    if divisor is not None:  # of 0 items no row counts: a NaN in one must not reach the gradient as 0 * NaN
        divisor = divisor.to(log_q.dtype)  # a quotient has the wider dtype of both
        left_out, ids = left_out | (divisor == 0), ids.masked_fill(divisor == 0, IGNORED)
    n_known = k if teacher.rest == "bucket" else 0
    if verify.open_calls:
        facts = {"reduction": settings.reduction, "num_items": None if num_items is None else float(num_items)}
        verify.also_compare(facts | {"teacher.rest": teacher.rest, "teacher.log_probs": teacher.log_probs})
    with checks.naming(labels="teacher.ids, labels"):
        log_probs = log_probs_at(Ids(ids), settings=settings._replace(ignore_index=IGNORED), n_known=n_known)
    rows = _terms(log_probs[..., :k], log_q, left_out, settings).sum(dim=-1)
    if n_known:
        log_r = (1 - mass).clamp(min=torch.finfo(log_q.dtype).eps / 2)
        rows = rows + _terms(log_probs[..., -1], log_r.log(), left_out.all(dim=-1), settings)
    if labels is not None:
        label_log_prob, hard_weight = log_probs[..., k], float(settings.hard_weight)
        if hard_weight == 1:
            rows = rows.masked_fill(rows.isinf(), 0.0)  # times 0 it would be NaN
        if hard_weight:
            rows = (1 - hard_weight) * rows - hard_weight * label_log_prob
        rows = torch.where(label_log_prob.isnan(), NAN, rows)  # a label outside the vocabulary
    if settings.reduction == "mean":
        ignored = None if labels is None else is_ignored(labels, settings.ignore_index)
        divisor = rows_of_mean(ignored, rows.detach()).to(rows.dtype)
    if settings.reduction == "none":
        return rows
    if divisor is None:
        return rows.sum()
    is_none = divisor == 0  # of which autograd must see no quotient: 0 / 0 is NaN
    return torch.where(is_none, 0.0, rows.sum() / divisor.masked_fill(is_none, 1)).reshape(())


def check_call(teacher: TopKTeacher, labels: Tensor | None, student: Tensor, subject: str, settings: Settings) -> None:
    """Check the arguments, besides what the student's log-probabilities check."""
    checks.check_tensor(subject, student)
    divergence_options(settings)
    check_hard_weight(settings, labels)
    checks.check_choice("reduction", settings.reduction, REDUCTIONS)
    ids, log_probs, rest = teacher
    checks.check_choice("teacher.rest", rest, ("ignore", "bucket"))
    checks.check_labels(ids, student, subject, name="teacher.ids")
    checks.check_floating("teacher.log_probs", log_probs, student, subject)
    if log_probs.requires_grad:
        checks.check_requires_no_gradient("teacher.log_probs", log_probs)
    if log_probs.dim() == 0 or log_probs.shape[:-1] != student.shape[:-1] or log_probs.shape[-1] == 0:
        expected = f"{tuple(student.shape[:-1])} and k, for {subject} {tuple(student.shape)}"
        raise ValueError(f"teacher.log_probs: shape must be {expected}, got {tuple(log_probs.shape)}")
    if ids.shape != log_probs.shape:
        expected = f"that of teacher.log_probs, {tuple(log_probs.shape)}"
        raise ValueError(f"teacher.ids: shape must be {expected}, got {tuple(ids.shape)}")
    tokens = Tokens(student, subject, student.shape[:-1])
    if not is_traced():
        checks.check_no_transforms(log_probs)
        check_alongside("teacher.log_probs", log_probs, tokens, settings)
    if labels is not None:
        RowIds().check("labels", labels, tokens, settings)
    if settings.hard_weight and settings.temperature != 1:
        raise ValueError(
            f"hard_weight: expected temperature=1 with a TopKTeacher, got {settings.temperature}; add "
            "vocab_parallel_cross_entropy yourself"
        )
    if settings.gradient == "in_forward":
        raise ValueError(
            "gradient: expected no 'in_forward' with a TopKTeacher, whose loss is computed from the student's "
            "log-probabilities, got it; leave it out"
        )
    if settings.check_labels and is_traced():
        raise ValueError(
            "check_labels: expected False in compiled code with a TopKTeacher, because the check waits for the "
            "device, got True; check the teacher in an eager call"
        )
    if settings.check_labels:
        check_values(teacher, labels, settings.ignore_index)


def _divisor(num_items: Any, reduction: str, student: Tensor) -> Tensor | None:
    if is_traced():
        from vocab_parallel_ce.compile import divisor_of

        return divisor_of(num_items, reduction, student)
    return checked_divisor(num_items, reduction, student)


def _terms(log_s: Tensor, log_q: Tensor, left_out: Tensor, settings: Settings) -> Tensor:
    """Return the terms of a divergence; 0 where an outcome is left out."""
    log_q, log_s = log_q.masked_fill(left_out, 0.0), log_s.masked_fill(left_out, 0.0)
    q = log_q.exp()
    # An outcome that the student excludes, by a logit of -inf, must not make its gradient NaN.
    excluded = log_s == NEG_INF
    known = log_s.masked_fill(excluded, 0.0)
    if settings.divergence == "forward":
        terms = q * (log_q - log_s)
    elif settings.divergence == "reverse":
        terms = (known.exp() * (known - log_q)).masked_fill(excluded, 0.0)
    else:
        beta = float(settings.beta)
        # Constants: what the mixture adds to the gradient of both terms cancels.
        student_term, teacher_ratio = log_ratios(known.detach(), log_q, beta)
        student_term = (known.exp() * student_term).masked_fill(excluded, 0.0)
        terms = beta * q * teacher_ratio.masked_fill(excluded, -math.log(beta)) + (1 - beta) * student_term
    return terms.masked_fill(left_out, 0.0)


def check_values(teacher: TopKTeacher, labels: Tensor | None, ignore_index: int) -> None:
    """Wait for the device; raise ValueError for an id that is twice in a row, or for too much mass.

    The range of the ids is checked with the student's log-probabilities.
    """
    ids, log_probs, _ = teacher
    known = marked(ids, log_probs == NEG_INF)
    if labels is not None:
        known = torch.where(is_ignored(labels, ignore_index).unsqueeze(-1), IGNORED, known)
    known = known.reshape(-1, ids.shape[-1])
    in_order = known.sort(dim=-1).values
    twice = in_order[:, 1:][(in_order[:, 1:] == in_order[:, :-1]) & (in_order[:, 1:] != IGNORED)]
    if twice.numel():
        raise ValueError(f"teacher.ids: must be different in a row, got {int(twice[0])} twice; give its log_probs -inf")
    if not known.numel():
        return
    log_q = log_probs.reshape(known.shape).float().masked_fill(known == IGNORED, NEG_INF)
    most, mass = float(log_q.amax()), float(log_q.exp().sum(dim=-1).amax())
    remedy = "pass log-probabilities, not probabilities or logits"
    if most > 1e-3:  # beyond rounding
        raise ValueError(f"teacher.log_probs: must be at most 0, got {most:g}; {remedy}")
    if mass > MOST_MASS:
        raise ValueError(f"teacher.log_probs: exponentials of a row must sum to at most 1, got {mass:g}; {remedy}")
