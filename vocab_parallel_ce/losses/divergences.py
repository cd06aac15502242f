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
from types import ModuleType
from typing import Annotated, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from vocab_parallel_ce import checks, reference
from vocab_parallel_ce.losses.base import Launchers, Loss, bound
from vocab_parallel_ce.options import Settings, loss_options
from vocab_parallel_ce.shard import VocabShard
from vocab_parallel_ce.spec import INF, NAN, NEG_INF, _bounded, _finite_or_zero, _outside, _raised_by, is_ignored
from vocab_parallel_ce.targets import Role, Tokens

DIVERGENCES = ("forward", "reverse", "js")


class Teacher(NamedTuple):
    """The targets of a student's logits."""

    logits: Annotated[Tensor, Role("logits", ("rows", "columns"), "teacher", checks_memory=True)]
    labels: Annotated[Tensor | None, Role("ids", ("rows",))] = None


class TeacherHead(NamedTuple):
    """The targets of a student's head: another head, whose logits are made when needed."""

    hidden: Annotated[Tensor, Role("head", ("tokens", "features"), "teacher.hidden", checks_memory=True)]
    weight: Annotated[Tensor, Role("head", ("columns", "features"), "teacher.weight", checks_memory=True)]
    bias: Annotated[Tensor | None, Role("head", ("columns",), "teacher.bias", checks_memory=True)] = None
    labels: Annotated[Tensor | None, Role("ids", ("rows",))] = None
    # [M], one past the end for none; None: rows are tokens.
    token_of_row: Annotated[Tensor | None, Role("ids", ("rows",))] = None


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


class DivergenceLoss(Loss):
    """A divergence of the student's distribution from the teacher's."""

    Targets, HeadTargets = Teacher, TeacherHead
    Stats = DivergenceStats

    def check(self, targets: Teacher | TeacherHead, tokens: Tokens, settings: Settings) -> None:
        check_hard_weight(settings, targets.labels)
        if isinstance(targets, TeacherHead):
            hidden, weight, bias, *_ = targets
            remedy = "convert it, because autocast leaves the teacher as it is"
            checks.check_head(weight, bias, hidden, hidden.dtype, of="teacher.", remedy=remedy)

    def in_order(self, targets: TeacherHead, order: Any, settings: Settings) -> TeacherHead:
        ordered: TeacherHead = super().in_order(targets, order, settings)
        return ordered._replace(token_of_row=order.token_of_row)

    def at(self, targets: TeacherHead, rows: slice) -> Teacher:
        """Make the teacher's logits of these rows."""
        states, weight, bias, labels, token_of_row = targets
        if token_of_row is None:
            states = states[rows]
        else:
            states = states.index_select(0, token_of_row[rows].clamp(max=states.shape[0] - 1))
        return Teacher(F.linear(states, weight, bias), None if labels is None else labels[rows])

    def options(self, settings: Settings, vocab_size: int | None, *, class_weight: bool) -> DivergenceOptions:
        options = divergence_options(settings)
        loss_options(settings, vocab_size)
        return options

    def launchers(self, options: DivergenceOptions, shard: VocabShard, kernels: ModuleType | None) -> Launchers:
        if kernels is None:
            return reference.launchers(self, options, shard)
        return bound(kernels, kernels.divergence_rows.divergence_loss(shard, options), self.exchanges(options))

    def exchanges(self, options: DivergenceOptions) -> tuple[tuple[str, ...], ...]:
        is_js = options.divergence == "js"
        hard = ("target", "hard_sum") if options.hard_weight else ()
        first = (*DivergenceStats._fields[:4], *(() if is_js else ("cross",)), *hard)
        return (first, ("teacher_kl", "student_kl")) if is_js else (first,)

    def tile(self, x: Tensor, targets: Teacher, shard: VocabShard, options: DivergenceOptions) -> DivergenceStats:
        x, w, labels = *_both(x, targets), targets.labels
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
            column = labels.long() - shard.start
            owned = (column >= 0) & (column < x.shape[-1])
            at_label = x.gather(-1, torch.where(owned, column, 0).unsqueeze(-1)).squeeze(-1)
            target = torch.where(owned, at_label, NEG_INF)
        student_sum, teacher_sum, hard_sum = (value.exp().sum(dim=-1) for value in (a, b, x_shifted))
        return DivergenceStats(x_max, student_sum, w_max, teacher_sum, cross, target, hard_sum)

    def merge(self, a: DivergenceStats, b: DivergenceStats, options: DivergenceOptions) -> DivergenceStats:
        student_max, teacher_max = (
            torch.maximum(a.student_max, b.student_max),
            torch.maximum(a.teacher_max, b.teacher_max),
        )
        student_shift, teacher_shift = _finite_or_zero(student_max), _finite_or_zero(teacher_max)

        def moved(part: DivergenceStats) -> tuple[Tensor, Tensor, Tensor, Tensor]:
            student_raised = _raised_by(part.student_max, student_shift) / options.temperature
            teacher_raised = _raised_by(part.teacher_max, teacher_shift) / options.temperature
            student_decay = ((part.student_max - student_shift) / options.temperature).exp()
            teacher_decay = ((part.teacher_max - teacher_shift) / options.temperature).exp()
            student_terms = (part.student_sum, student_raised, teacher_raised, student_decay)
            teacher_terms = (part.teacher_sum, teacher_raised, student_raised, teacher_decay)
            cross = _moved(part.cross, *(teacher_terms if options.divergence == "forward" else student_terms))
            hard_decay = (part.student_max - student_shift).exp()
            return (
                part.student_sum * student_decay,
                part.teacher_sum * teacher_decay,
                cross,
                part.hard_sum * hard_decay,
            )

        student_sum, teacher_sum, cross, hard_sum = (x + y for x, y in zip(moved(a), moved(b), strict=True))
        target = torch.maximum(a.target, b.target)
        return DivergenceStats(student_max, student_sum, teacher_max, teacher_sum, cross, target, hard_sum)

    def second(
        self, x: Tensor, targets: Teacher, stats: DivergenceStats, shard: VocabShard, options: DivergenceOptions
    ) -> Tensor:
        """Return the parts of ``KL(t || m)`` and ``KL(s || m)`` of these columns."""
        s, t, log_s, log_t = _probabilities(x, targets, stats, options)
        student_ratio, teacher_ratio = log_ratios(log_s, log_t, options.beta)
        parts = torch.where(t == 0, 0.0, t * teacher_ratio), torch.where(s == 0, 0.0, s * student_ratio)
        return torch.stack([part.sum(dim=-1) for part in parts], dim=-1)

    def output(
        self,
        name: str,
        stats: DivergenceStats,
        second: Tensor | None,
        targets: Teacher,
        shard: VocabShard,
        options: DivergenceOptions,
    ) -> Tensor:
        log_student, log_teacher = stats.student_sum.log(), stats.teacher_sum.log()
        if options.divergence == "forward":
            value = stats.cross / stats.teacher_sum - log_teacher + log_student
        elif options.divergence == "reverse":
            value = stats.cross / stats.student_sum - log_student + log_teacher
        else:
            assert second is not None
            value = options.beta * second[:, 0] + (1 - options.beta) * second[:, 1]
        if options.hard_weight:
            hard = stats.hard_sum.log() + (stats.student_max - stats.target)
            value = hard if options.hard_weight == 1 else (1 - options.hard_weight) * value + options.hard_weight * hard
        if targets.labels is None:
            return value
        value = torch.where(_outside(targets.labels, shard.vocab_size), NAN, value)
        return torch.where(is_ignored(targets.labels, options.ignore_index), 0.0, value)

    def gradient(
        self,
        x: Tensor,
        targets: Teacher,
        stats: DivergenceStats,
        second: Tensor | None,
        shard: VocabShard,
        options: DivergenceOptions,
    ) -> Tensor:
        s, t, log_s, log_t = _probabilities(x, targets, stats, options)
        x, labels = _both(x, targets)[0], targets.labels
        if options.divergence == "forward":
            grad = s - t
        elif options.divergence == "reverse":
            kl = stats.cross / stats.student_sum - stats.student_sum.log() + stats.teacher_sum.log()
            grad = torch.where(s == 0, 0.0, s * (log_s - log_t - kl.unsqueeze(-1)))
        else:
            assert second is not None
            student_ratio, _ = log_ratios(log_s, log_t, options.beta)
            grad = (1 - options.beta) * torch.where(s == 0, 0.0, s * (student_ratio - second[:, 1:]))
        grad = (
            grad * ((1 - options.hard_weight) / options.temperature) if options.hard_weight < 1 else grad.new_zeros(())
        )
        if options.hard_weight:
            assert labels is not None
            p = (x - stats.student_max.unsqueeze(-1)).exp() / stats.hard_sum.unsqueeze(-1)
            column = torch.arange(shard.start, shard.start + x.shape[-1], device=x.device)
            grad = grad + options.hard_weight * (p - (column == labels.long().unsqueeze(-1)).to(p))
        is_finite = (stats.student_sum.isfinite() & (stats.student_max != NEG_INF)).unsqueeze(-1)
        grad = torch.where((log_s == NEG_INF) & is_finite, 0.0, grad)
        return grad if labels is None else torch.where(_outside(labels, shard.vocab_size).unsqueeze(-1), NAN, grad)

    def ignored(self, targets: Teacher, options: DivergenceOptions) -> Tensor | None:
        return None if targets.labels is None else is_ignored(targets.labels, options.ignore_index)


DIVERGENCE = DivergenceLoss()


def divergence_options(settings: Settings) -> DivergenceOptions:
    """Check what the mathematics takes."""
    checks.check_choice("divergence", settings.divergence, DIVERGENCES)
    checks.check_number("beta", settings.beta)
    if not 0 < settings.beta < 1:
        raise ValueError(
            f"beta: must be above 0 and below 1, got {settings.beta}; its limits are 'forward' and 'reverse'"
        )
    if settings.divergence != "js" and settings.beta != 0.5:
        raise ValueError(f"beta: expected divergence='js' with it, got {settings.divergence!r}")
    checks.check_number("hard_weight", settings.hard_weight, at_most=1)
    checks.check_number("temperature", settings.temperature, positive=True)
    checks.check_number("1 / temperature", 1 / settings.temperature, positive=True)
    checks.check_integer("ignore_index", settings.ignore_index)
    numbers = float(settings.temperature), float(settings.beta), float(settings.hard_weight)
    return DivergenceOptions(settings.divergence, *numbers, int(settings.ignore_index))


def check_hard_weight(settings: Settings, labels: Tensor | None) -> None:
    if settings.hard_weight and labels is None:
        divergence_options(settings)  # a wrong number is named first
        raise ValueError(f"hard_weight: expected labels with it, got {settings.hard_weight} and labels=None")


def _both(x: Tensor, targets: Teacher) -> tuple[Tensor, Tensor]:
    """The columns of student and teacher, in the compute dtype of the student's logits."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    teacher = targets.logits.reshape(-1, targets.logits.shape[-1])[:, : x.shape[-1]]
    return x.to(dtype), teacher.to(dtype)


def _probabilities(
    x: Tensor, targets: Teacher, stats: DivergenceStats, options: DivergenceOptions
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``(s, t, log s, log t)`` of columns."""
    student, teacher = _both(x, targets)
    logs = []
    sides = (student, stats.student_max, stats.student_sum), (teacher, stats.teacher_max, stats.teacher_sum)
    for logits, row_max, sum_exp in sides:
        shifted = (logits - row_max.unsqueeze(-1)) / options.temperature
        logs.append(shifted - sum_exp.log().unsqueeze(-1))
    return logs[0].exp(), logs[1].exp(), logs[0], logs[1]


def log_ratios(log_s: Tensor, log_t: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    """``(log(s / m), log(t / m))`` with ``m = beta * t + (1 - beta) * s``; finite, or NaN if both are 0.

    With the smaller share q, ``log1p(q * (t / s - 1))`` keeps the digits that the logarithm of m rounds away. Its
    exponent is cut where its 1 is rounded away, and what is beyond it is added.
    """
    is_teachers, share, limits = beta <= 0.5, min(beta, 1 - beta), torch.finfo(log_s.dtype)
    apart = (log_t - log_s if is_teachers else log_s - log_t).clamp(-1e30, 1e30)
    kept = apart.clamp(max=min(math.log(2 / limits.eps) - math.log(share), math.log(limits.max) - 1))
    near = (share * kept.expm1()).log1p()
    small_ratio, large_ratio = kept - near, -(near + (apart - kept))
    return (large_ratio, small_ratio) if is_teachers else (small_ratio, large_ratio)


def _cross(weights: Tensor, others: Tensor) -> Tensor:
    """``[N]`` sum of ``exp(w) * (w - o)``; an excluded ``w`` counts as 0, an excluded ``o`` of another as inf."""
    terms = weights.exp() * (weights - others)
    terms = torch.where(others == NEG_INF, INF, terms)
    return torch.where(weights == NEG_INF, 0.0, terms).sum(dim=-1)


def _moved(cross: Tensor, weight_sum: Tensor, weight_raised: Tensor, other_raised: Tensor, decay: Tensor) -> Tensor:
    """``cross`` relative to larger maxima."""
    shift = torch.where(weight_sum == 0, 0.0, weight_sum * (_bounded(weight_raised) - other_raised))
    return torch.where(cross == INF, INF, (cross + shift) * decay)
