"""The mathematics of distillation, in plain PyTorch: divergences of a student's distribution from a teacher's.

Of student logits ``x`` and teacher logits ``w``, with the temperature ``T``, over the whole vocabulary:

    s = softmax(x / T),  t = softmax(w / T)
    forward   KL(t || s) = sum_i t_i (log t_i - log s_i)          dx_i = (s_i - t_i) / T
    reverse   KL(s || t)                                          dx_i = s_i (log s_i - log t_i - KL(s || t)) / T
    js        beta * KL(t || m) + (1 - beta) * KL(s || m),  m = beta * t + (1 - beta) * s
                                                      dx_i = (1 - beta) * s_i (log(s_i / m_i) - KL(s || m)) / T

``forward`` is that of Hinton et al. (arXiv:1503.02531), without their factor ``T^2``; the others are those of GKD
(Agarwal et al., arXiv:2306.13649, equation 1 for ``js``). With labels ``y`` and ``h = hard_weight`` the loss is

    (1 - h) * divergence + h * (lse(x) - x_y)

A rank knows of its columns the largest ``x`` and ``w``, and sums relative to both. With ``a_i = (x_i - x_max) / T`` and
``b_i = (w_i - w_max) / T``, so that rows far from 0 lose no digits:

    forward   cross = sum_i exp(b_i) * (b_i - a_i),  student_sum = sum_i exp(a_i),  teacher_sum = sum_i exp(b_i)
              KL = cross / teacher_sum - log(teacher_sum) + log(student_sum)

``reverse`` has student and teacher exchanged. ``js`` needs the normalised probabilities, so its two terms are summed
after a first exchange, and are exchanged themselves.

Edges. A column that both exclude by ``-inf`` takes no part. If only the student excludes it, ``forward`` is ``inf``; if
only the teacher does, ``reverse`` is ``inf``, and its gradient is not finite. The gradient is 0 where the student has
``-inf``, in padded columns, and in rows with ``ignore_index``, whose loss is 0. A label outside ``[0, V)``, NaN or
``+inf`` in a row: NaN.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from vocab_parallel_ce.spec import INF, NAN, NEG_INF, _bounded, _finite_or_zero, _outside, _raised_by, is_ignored


class DivergenceOptions(NamedTuple):
    """What is computed of a row."""

    divergence: str = "forward"
    temperature: float = 1.0
    beta: float = 0.5  # of js
    hard_weight: float = 0.0
    ignore_index: int = -100


class DivergenceStats(NamedTuple):
    """What a set of columns contributes to each row, each ``[N]``."""

    student_max: Tensor  # largest x
    student_sum: Tensor  # sum of exp((x - student_max) / T)
    teacher_max: Tensor
    teacher_sum: Tensor
    cross: Tensor  # 0 for js
    target: Tensor  # the label's x, -inf if it is not in the set
    hard_sum: Tensor  # sum of exp(x - student_max)


IDENTITY = (NEG_INF, 0.0, NEG_INF, 0.0, 0.0, NEG_INF, 0.0)


def statistics(options: DivergenceOptions) -> tuple[str, ...]:
    """Names of the statistics that travel, in the order in which they are packed."""
    cross = () if options.divergence == "js" else ("cross",)
    hard = ("target", "hard_sum") if options.hard_weight else ()
    return (*DivergenceStats._fields[:4], *cross, *hard)


def local_stats(
    student: Tensor, teacher: Tensor, labels: Tensor | None, start: int, vocab_size: int, options: DivergenceOptions
) -> DivergenceStats:
    """Statistics of the columns of ``student`` and ``teacher [N, C]`` from global id ``start`` on."""
    x, w = (_valid(logits, start, vocab_size, student.dtype) for logits in (student, teacher))
    if x.shape[-1] == 0:
        return DivergenceStats(*(x.new_full(x.shape[:1], value) for value in IDENTITY))
    x_max, w_max = x.amax(dim=-1), w.amax(dim=-1)
    x_shifted = x - _finite_or_zero(x_max).unsqueeze(-1)
    a, b = x_shifted / options.temperature, (w - _finite_or_zero(w_max).unsqueeze(-1)) / options.temperature
    cross, target = torch.zeros_like(x_max), torch.full_like(x_max, NEG_INF)
    if options.divergence == "forward":
        cross = _cross(b, a)
    elif options.divergence == "reverse":
        cross = _cross(a, b)
    if labels is not None:
        column = labels.long() - start
        owned = (column >= 0) & (column < x.shape[-1])
        at_label = x.gather(-1, torch.where(owned, column, 0).unsqueeze(-1)).squeeze(-1)
        target = torch.where(owned, at_label, NEG_INF)
    student_sum, teacher_sum, hard_sum = (value.exp().sum(dim=-1) for value in (a, b, x_shifted))
    return DivergenceStats(x_max, student_sum, w_max, teacher_sum, cross, target, hard_sum)


def merge(a: DivergenceStats, b: DivergenceStats, options: DivergenceOptions) -> DivergenceStats:
    """Statistics of the union of two disjoint sets of columns: associative and commutative."""
    student_max, teacher_max = torch.maximum(a.student_max, b.student_max), torch.maximum(a.teacher_max, b.teacher_max)
    student_shift, teacher_shift = _finite_or_zero(student_max), _finite_or_zero(teacher_max)

    def moved(own: DivergenceStats) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        student_raised = _raised_by(own.student_max, student_shift) / options.temperature
        teacher_raised = _raised_by(own.teacher_max, teacher_shift) / options.temperature
        student_decay = ((own.student_max - student_shift) / options.temperature).exp()
        teacher_decay = ((own.teacher_max - teacher_shift) / options.temperature).exp()
        of_student = (own.student_sum, student_raised, teacher_raised, student_decay)
        of_teacher = (own.teacher_sum, teacher_raised, student_raised, teacher_decay)
        cross = _moved(own.cross, *(of_teacher if options.divergence == "forward" else of_student))
        hard_decay = (own.student_max - student_shift).exp()
        return own.student_sum * student_decay, own.teacher_sum * teacher_decay, cross, own.hard_sum * hard_decay

    student_sum, teacher_sum, cross, hard_sum = (x + y for x, y in zip(moved(a), moved(b), strict=True))
    target = torch.maximum(a.target, b.target)
    return DivergenceStats(student_max, student_sum, teacher_max, teacher_sum, cross, target, hard_sum)


def local_mixture(
    student: Tensor, teacher: Tensor, stats: DivergenceStats, start: int, vocab_size: int, options: DivergenceOptions
) -> Tensor:
    """``[N, 2]`` parts of ``KL(t || m)`` and ``KL(s || m)`` of these columns, from merged statistics."""
    s, t, log_s, log_t, log_m = _probabilities(student, teacher, stats, start, vocab_size, options)
    parts = torch.where(t == 0, 0.0, t * (log_t - log_m)), torch.where(s == 0, 0.0, s * (log_s - log_m))
    return torch.stack([part.sum(dim=-1) for part in parts], dim=-1)


def loss(
    stats: DivergenceStats, mixture: Tensor | None, labels: Tensor | None, vocab_size: int, options: DivergenceOptions
) -> Tensor:
    """``[N]`` unreduced loss; ``mixture [N, 2]`` is that of the whole vocabulary."""
    log_student, log_teacher = stats.student_sum.log(), stats.teacher_sum.log()
    if options.divergence == "forward":
        value = stats.cross / stats.teacher_sum - log_teacher + log_student
    elif options.divergence == "reverse":
        value = stats.cross / stats.student_sum - log_student + log_teacher
    else:
        assert mixture is not None
        value = options.beta * mixture[:, 0] + (1 - options.beta) * mixture[:, 1]
    if options.hard_weight:
        hard = stats.hard_sum.log() + (stats.student_max - stats.target)
        value = hard if options.hard_weight == 1 else (1 - options.hard_weight) * value + options.hard_weight * hard
    return value if labels is None else at_the_edges(value, labels, vocab_size, options)


def gradient(
    student: Tensor,
    teacher: Tensor,
    stats: DivergenceStats,
    mixture: Tensor | None,
    labels: Tensor | None,
    start: int,
    vocab_size: int,
    options: DivergenceOptions,
) -> Tensor:
    """``[N, C]`` derivative of each row's loss by the student's logits, in the compute dtype."""
    s, t, log_s, log_t, log_m = _probabilities(student, teacher, stats, start, vocab_size, options)
    if options.divergence == "forward":
        grad = s - t
    elif options.divergence == "reverse":
        kl = stats.cross / stats.student_sum - stats.student_sum.log() + stats.teacher_sum.log()
        grad = torch.where(s == 0, 0.0, s * (log_s - log_t - kl.unsqueeze(-1)))
    else:
        assert mixture is not None
        grad = (1 - options.beta) * torch.where(s == 0, 0.0, s * (log_s - log_m - mixture[:, 1:]))
    grad = grad * ((1 - options.hard_weight) / options.temperature) if options.hard_weight < 1 else grad.new_zeros(())
    if options.hard_weight:
        assert labels is not None
        x = _valid(student, start, vocab_size, student.dtype)
        p = (x - stats.student_max.unsqueeze(-1)).exp() / stats.hard_sum.unsqueeze(-1)
        column = torch.arange(start, start + x.shape[-1], device=x.device)
        grad = grad + options.hard_weight * (p - (column == labels.long().unsqueeze(-1)).to(p))
    is_finite = (stats.student_sum.isfinite() & (stats.student_max != NEG_INF)).unsqueeze(-1)
    grad = torch.where((log_s == NEG_INF) & is_finite, 0.0, grad)
    grad = torch.nn.functional.pad(grad, (0, student.shape[-1] - grad.shape[-1]))
    if labels is None:
        return grad
    column = torch.arange(start, start + grad.shape[-1], device=grad.device)
    grad = torch.where(_outside(labels, vocab_size).unsqueeze(-1) & (column < vocab_size), NAN, grad)
    return torch.where(is_ignored(labels, options.ignore_index).unsqueeze(-1), 0.0, grad)


def at_the_edges(value: Tensor, labels: Tensor, vocab_size: int, options: DivergenceOptions) -> Tensor:
    """``value``; NaN if the label is outside the vocabulary, 0 if it is ``ignore_index``."""
    value = torch.where(_outside(labels, vocab_size), NAN, value)
    return torch.where(is_ignored(labels, options.ignore_index), 0.0, value)


def _probabilities(
    student: Tensor, teacher: Tensor, stats: DivergenceStats, start: int, vocab_size: int, options: DivergenceOptions
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """``(s, t, log s, log t, log m)`` of the valid columns."""
    logs = []
    sides = (student, stats.student_max, stats.student_sum), (teacher, stats.teacher_max, stats.teacher_sum)
    for logits, row_max, sum_exp in sides:
        shifted = (_valid(logits, start, vocab_size, student.dtype) - row_max.unsqueeze(-1)) / options.temperature
        logs.append(shifted - sum_exp.log().unsqueeze(-1))
    log_m = torch.logaddexp(logs[0] + math.log1p(-options.beta), logs[1] + math.log(options.beta))
    return logs[0].exp(), logs[1].exp(), logs[0], logs[1], log_m


def _valid(logits: Tensor, start: int, vocab_size: int, dtype: torch.dtype) -> Tensor:
    """The columns that are not padding, in the compute dtype of logits of ``dtype``, the student's."""
    return logits[:, : max(vocab_size - start, 0)].to(torch.promote_types(dtype, torch.float32))


def _cross(weights: Tensor, others: Tensor) -> Tensor:
    """``[N]`` sum of ``exp(w) * (w - o)``; an excluded ``w`` counts as 0, an excluded ``o`` beside another as inf."""
    terms = weights.exp() * (weights - others)
    terms = torch.where(others == NEG_INF, INF, terms)
    return torch.where(weights == NEG_INF, 0.0, terms).sum(dim=-1)


def _moved(cross: Tensor, weight_sum: Tensor, weight_raised: Tensor, other_raised: Tensor, decay: Tensor) -> Tensor:
    """``cross`` relative to larger maxima."""
    shift = torch.where(weight_sum == 0, 0.0, weight_sum * (_bounded(weight_raised) - other_raised))
    return torch.where(cross == INF, INF, (cross + shift) * decay)
