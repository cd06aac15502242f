"""The mathematics of distillation, in plain PyTorch: divergences of a student's distribution from a teacher's.

Of the student's ``x`` and the teacher's ``w``, each after its softcap and scale, with the temperature ``T``, over the
whole vocabulary:

    s = softmax(x / T),  t = softmax(w / T)
    forward   KL(t || s) = sum_i t_i (log t_i - log s_i)          dx_i = (s_i - t_i) / T
    reverse   KL(s || t)                                          dx_i = s_i (log s_i - log t_i - KL(s || t)) / T
    js        beta * KL(t || m) + (1 - beta) * KL(s || m),  m = beta * t + (1 - beta) * s
                                                      dx_i = (1 - beta) * s_i (log(s_i / m_i) - KL(s || m)) / T

``forward`` is that of Hinton et al. (arXiv:1503.02531), without their factor ``T^2``; the others are those of GKD
(Agarwal et al., arXiv:2306.13649, equation 1 for ``js``). The divergence is the loss, or one more output alongside the
log-probabilities of labels: then a row has the statistics of both, and its gradient is the sum of all quantities'.

A rank knows of its columns the largest ``x`` and ``w``, and sums relative to both. With ``a_i = (x_i - x_max) / T`` and
``b_i = (w_i - w_max) / T``, so that rows far from 0 lose no digits:

    forward   cross = sum_i exp(b_i) * (b_i - a_i),  student_sum = sum_i exp(a_i),  teacher_sum = sum_i exp(b_i)
              KL = cross / teacher_sum - log(teacher_sum) + log(student_sum)

``reverse`` has student and teacher exchanged. ``js`` needs the normalised probabilities, so its two terms are summed
after a first exchange, and are exchanged themselves.

Edges. A column that both exclude by ``-inf`` takes no part. If only the student excludes it, ``forward`` is ``inf``; if
only the teacher does, ``reverse`` is ``inf``, and its gradient is not finite. The gradient is 0 where the student has
``-inf``, in padded columns, and in rows with ``ignore_index``, whose divergence is 0. A label outside ``[0, V)``, NaN
or ``+inf`` in a row: NaN.
"""

from __future__ import annotations

import math
from collections import namedtuple
from types import ModuleType
from typing import Annotated, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from vocab_parallel_ce import checks, reference
from vocab_parallel_ce.losses.base import Launchers, Loss, bound
from vocab_parallel_ce.losses.labels import LABELS, Labels
from vocab_parallel_ce.options import Settings, TeacherOptions, loss_options, settings_of
from vocab_parallel_ce.shard import VocabShard
from vocab_parallel_ce.spec import (
    INF,
    NAN,
    NEG_INF,
    PLAIN,
    GradOutputs,
    LossOptions,
    RowStats,
    TokenOutputs,
    _bounded,
    _finite_or_zero,
    _outside,
    _raised_by,
    is_ignored,
    transformed,
)
from vocab_parallel_ce.targets import Role, Tokens

DIVERGENCES = ("forward", "reverse", "js")


class TeacherLogits(NamedTuple):
    """The targets of a student's logits."""

    logits: Annotated[Tensor, Role("logits", ("rows", "columns"), "teacher", checks_memory=True)]
    labels: Annotated[Tensor | None, Role("ids", ("rows",))] = None
    # Of what a label has, not of the divergence.
    temperature: Annotated[Tensor | None, Role("numbers", ("rows",), fill=1.0)] = None
    threshold: Annotated[Tensor | None, Role("numbers", ("rows",), fill=NEG_INF)] = None


class TeacherHead(NamedTuple):
    """The targets of a student's head: another head, whose logits are made when needed."""

    hidden: Annotated[Tensor, Role("head", ("tokens", "features"), "teacher.hidden", checks_memory=True)]
    weight: Annotated[Tensor, Role("head", ("columns", "features"), "teacher.weight", checks_memory=True)]
    bias: Annotated[Tensor | None, Role("head", ("columns",), "teacher.bias", checks_memory=True)] = None
    labels: Annotated[Tensor | None, Role("ids", ("rows",))] = None
    temperature: Annotated[Tensor | None, Role("numbers", ("rows",), fill=1.0)] = None
    threshold: Annotated[Tensor | None, Role("numbers", ("rows",), fill=NEG_INF)] = None
    # [M], one past the end for none; None: rows are tokens.
    token_of_row: Annotated[Tensor | None, Role("ids", ("rows",))] = None


class DivergenceOptions(NamedTuple):
    """What is computed of a row."""

    divergence: str = "forward"
    beta: float = 0.5  # of js
    temperature: float = 1.0  # divides the teacher's z
    student_temperature: float = 1.0  # divides the student's z, which that of the labels may have divided already
    labels: LossOptions = PLAIN  # of the student's z, and of what a label has
    teacher: LossOptions = PLAIN  # of the teacher's z
    is_alone: bool = True  # the divergence is the loss; otherwise an output alongside log-probabilities

    @property
    def ignore_index(self) -> int:
        return self.labels.ignore_index


class DivergenceStats(NamedTuple):
    """What a set of columns contributes to each row, each ``[N]``."""

    student_max: Tensor  # largest x
    student_sum: Tensor  # sum of exp((x - student_max) / T)
    teacher_max: Tensor
    teacher_sum: Tensor
    cross: Tensor  # 0 for js


IDENTITY = (NEG_INF, 0.0, NEG_INF, 0.0, 0.0)
N_LABEL_STATS = len(RowStats._fields)  # the first of TokenStats; without labels 0
TokenStats: Any = namedtuple("TokenStats", (*RowStats._fields, *DivergenceStats._fields))  # type: ignore[misc]


class DivergenceLoss(Loss):
    """A divergence of the student's distribution from the teacher's, alone or alongside what a label has."""

    Targets, HeadTargets = TeacherLogits, TeacherHead
    Stats = TokenStats

    def check(self, targets: TeacherLogits | TeacherHead, tokens: Tokens, settings: Settings) -> None:
        if isinstance(targets, TeacherHead):
            hidden, weight, bias, *_ = targets
            remedy = "convert it, because autocast leaves the teacher as it is"
            checks.check_head(weight, bias, hidden, hidden.dtype, of="teacher.", remedy=remedy)

    def in_order(self, targets: TeacherHead, order: Any, settings: Settings) -> TeacherHead:
        ordered: TeacherHead = super().in_order(targets, order, settings)
        return ordered._replace(token_of_row=order.token_of_row)

    def at(self, targets: TeacherHead, rows: slice) -> TeacherLogits:
        """Make the teacher's logits of these rows."""
        states, weight, bias, *by_row, token_of_row = targets
        if token_of_row is None:
            states = states[rows]
        else:
            states = states.index_select(0, token_of_row[rows].clamp(max=states.shape[0] - 1))
        return TeacherLogits(F.linear(states, weight, bias), *[None if t is None else t[rows] for t in by_row])

    def options(self, settings: Settings, vocab_size: int | None, *, class_weight: bool) -> DivergenceOptions:
        return divergence_options(settings, vocab_size)

    def outputs(self, options: DivergenceOptions) -> dict[str, bool]:
        found = {} if options.is_alone else LABELS.outputs(options.labels) | {"divergence": True}
        return {name: found[name] for name in TokenOutputs._fields if name in found}

    def launchers(self, options: DivergenceOptions, shard: VocabShard, kernels: ModuleType | None) -> Launchers:
        if kernels is None:
            return reference.launchers(self, options, shard)
        rows = kernels.divergence_rows if options.is_alone else kernels.teacher_rows
        return bound(kernels, rows.divergence_loss(shard, options), self.exchanges(options))

    def exchanges(self, options: DivergenceOptions) -> tuple[tuple[str, ...], ...]:
        is_js = options.divergence == "js"
        of_labels = () if options.is_alone else options.labels.statistics
        first = (*of_labels, *DivergenceStats._fields[: 4 if is_js else 5])
        return (first, ("teacher_kl", "student_kl")) if is_js else (first,)

    def tile(self, x: Tensor, targets: TeacherLogits, shard: VocabShard, options: DivergenceOptions) -> Any:
        of_labels = x.new_zeros(N_LABEL_STATS, len(x)).unbind()
        if not options.is_alone:
            of_labels = LABELS.tile(x, _labels(targets), shard, options.labels)
        return TokenStats._make([*of_labels, *self._tile(*_both(x, targets, options)[:2], options)])

    def _tile(self, x: Tensor, w: Tensor, options: DivergenceOptions) -> DivergenceStats:
        """Return what these columns of both contribute."""
        if x.shape[-1] == 0:
            return DivergenceStats(*(x.new_full(x.shape[:1], value) for value in IDENTITY))
        x_max, w_max = x.amax(dim=-1), w.amax(dim=-1)
        a = (x - _finite_or_zero(x_max).unsqueeze(-1)) / options.student_temperature
        b = (w - _finite_or_zero(w_max).unsqueeze(-1)) / options.temperature
        cross = torch.zeros_like(x_max)
        if options.divergence == "forward":
            cross = _cross(b, a)
        elif options.divergence == "reverse":
            cross = _cross(a, b)
        return DivergenceStats(x_max, a.exp().sum(dim=-1), w_max, b.exp().sum(dim=-1), cross)

    def merge(self, a: Any, b: Any, options: DivergenceOptions) -> Any:
        of_labels = _of_labels(a) if options.is_alone else LABELS.merge(_of_labels(a), _of_labels(b), options.labels)
        return TokenStats._make([*of_labels, *self._merge(_of_teacher(a), _of_teacher(b), options)])

    def _merge(self, a: DivergenceStats, b: DivergenceStats, options: DivergenceOptions) -> DivergenceStats:
        student_max, teacher_max = (
            torch.maximum(a.student_max, b.student_max),
            torch.maximum(a.teacher_max, b.teacher_max),
        )
        student_shift, teacher_shift = _finite_or_zero(student_max), _finite_or_zero(teacher_max)

        def moved(part: DivergenceStats) -> tuple[Tensor, Tensor, Tensor]:
            student_raised = _raised_by(part.student_max, student_shift) / options.student_temperature
            teacher_raised = _raised_by(part.teacher_max, teacher_shift) / options.temperature
            student_decay = ((part.student_max - student_shift) / options.student_temperature).exp()
            teacher_decay = ((part.teacher_max - teacher_shift) / options.temperature).exp()
            student_terms = (part.student_sum, student_raised, teacher_raised, student_decay)
            teacher_terms = (part.teacher_sum, teacher_raised, student_raised, teacher_decay)
            cross = _moved(part.cross, *(teacher_terms if options.divergence == "forward" else student_terms))
            return part.student_sum * student_decay, part.teacher_sum * teacher_decay, cross

        student_sum, teacher_sum, cross = (x + y for x, y in zip(moved(a), moved(b), strict=True))
        return DivergenceStats(student_max, student_sum, teacher_max, teacher_sum, cross)

    def second(
        self, x: Tensor, targets: TeacherLogits, stats: Any, shard: VocabShard, options: DivergenceOptions
    ) -> Tensor:
        """Return the parts of ``KL(t || m)`` and ``KL(s || m)`` of these columns."""
        s, t, log_s, log_t = _probabilities(*_both(x, targets, options)[:2], stats, options)
        student_ratio, teacher_ratio = log_ratios(log_s, log_t, options.beta)
        parts = torch.where(t == 0, 0.0, t * teacher_ratio), torch.where(s == 0, 0.0, s * student_ratio)
        return torch.stack([part.sum(dim=-1) for part in parts], dim=-1)

    def output(self, name: str, stats: Any, second: Any, targets: Any, shard: VocabShard, options: Any) -> Tensor:
        if not options.is_alone and name != "divergence":
            return LABELS.output(name, _of_labels(stats), None, _labels(targets), shard, options.labels)
        log_student, log_teacher = stats.student_sum.log(), stats.teacher_sum.log()
        if options.divergence == "forward":
            value = stats.cross / stats.teacher_sum - log_teacher + log_student
        elif options.divergence == "reverse":
            value = stats.cross / stats.student_sum - log_student + log_teacher
        else:
            assert second is not None
            value = options.beta * second[:, 0] + (1 - options.beta) * second[:, 1]
        if targets.labels is None:
            return value
        value = torch.where(_outside(targets.labels, shard.vocab_size), NAN, value)
        return torch.where(is_ignored(targets.labels, options.ignore_index), 0.0, value)

    def gradient(self, x: Tensor, targets: Any, stats: Any, second: Any, shard: VocabShard, options: Any) -> Tensor:
        if options.is_alone:
            return self._gradient(x, targets, stats, second, shard, options)
        return LABELS.gradient(x, _labels(targets), _of_labels(stats), None, shard, options.labels)

    def outputs_gradient(
        self, x: Tensor, targets: Any, stats: Any, second: Any, grads: GradOutputs, shard: VocabShard, options: Any
    ) -> Tensor:
        of_labels = _of_labels(stats)
        grad = LABELS.outputs_gradient(x, _labels(targets), of_labels, None, grads, shard, options.labels)
        if grads.divergence is not None:
            weight = grads.divergence.unsqueeze(-1)
            of_divergence = self._gradient(x, targets, stats, second, shard, options) * weight
            grad = grad + torch.where(weight == 0, 0.0, of_divergence)  # one that does not count may be infinite
        return grad

    def _gradient(self, x: Tensor, targets: Any, stats: Any, second: Any, shard: VocabShard, options: Any) -> Tensor:
        """Return the derivative of the divergence."""
        z, w, slope = _both(x, targets, options)
        s, t, log_s, log_t = _probabilities(z, w, stats, options)
        if options.divergence == "forward":
            grad = s - t
        elif options.divergence == "reverse":
            kl = stats.cross / stats.student_sum - stats.student_sum.log() + stats.teacher_sum.log()
            grad = torch.where(s == 0, 0.0, s * (log_s - log_t - kl.unsqueeze(-1)))
        else:
            assert second is not None
            student_ratio, _ = log_ratios(log_s, log_t, options.beta)
            grad = (1 - options.beta) * torch.where(s == 0, 0.0, s * (student_ratio - second[:, 1:]))
        grad = grad / options.student_temperature * slope
        is_finite = (stats.student_sum.isfinite() & (stats.student_max != NEG_INF)).unsqueeze(-1)
        grad = torch.where((log_s == NEG_INF) & is_finite, 0.0, grad)
        labels = targets.labels
        return grad if labels is None else torch.where(_outside(labels, shard.vocab_size).unsqueeze(-1), NAN, grad)

    def ignored(self, targets: TeacherLogits, options: DivergenceOptions) -> Tensor | None:
        return None if targets.labels is None else is_ignored(targets.labels, options.ignore_index)


DIVERGENCE = DivergenceLoss()


def check_divergence(teacher: TeacherOptions, of: str = "") -> None:
    """Raise unless there is such a divergence; ``of`` stands before the names of its options."""
    checks.check_choice(f"{of}divergence", teacher.divergence, DIVERGENCES)
    checks.check_number(f"{of}beta", teacher.beta)
    if not 0 < teacher.beta < 1:
        raise ValueError(
            f"{of}beta: must be above 0 and below 1, got {teacher.beta}; its limits are 'forward' and 'reverse'"
        )
    if teacher.divergence != "js" and teacher.beta != 0.5:
        raise ValueError(f"{of}beta: expected divergence='js' with it, got {teacher.divergence!r}")
    checks.check_number(f"{of}temperature", teacher.temperature, positive=True)
    checks.check_number(f"1 / {of}temperature", 1 / teacher.temperature, positive=True)


def divergence_options(settings: Settings, vocab_size: int | None) -> DivergenceOptions:
    """Check what the mathematics takes."""
    alone = TeacherOptions(settings.divergence, settings.beta, settings.temperature)
    teacher = alone if settings.teacher is None else settings.teacher
    check_divergence(teacher, "" if settings.teacher is None else "teacher.")
    checks.check_number("hard_weight", settings.hard_weight, at_most=1)
    labels = loss_options(settings, vocab_size)
    of_teacher = settings_of(softcap=teacher.softcap, logit_scale=teacher.logit_scale)
    if settings.teacher is None:  # no option but these changes the student's z
        labels = PLAIN._replace(ignore_index=labels.ignore_index)
    student_temperature = float(teacher.temperature)
    if settings.teacher is not None:  # that of the labels has divided the student's z
        student_temperature /= float(settings.temperature)
        checks.check_number("teacher.temperature / temperature", student_temperature, positive=True)
        checks.check_number("temperature / teacher.temperature", 1 / student_temperature, positive=True)
    with checks.naming(softcap="teacher.softcap", logit_scale="teacher.logit_scale"):
        return DivergenceOptions(
            teacher.divergence,
            float(teacher.beta),
            float(teacher.temperature),
            student_temperature,
            labels,
            loss_options(of_teacher, None)._replace(ignore_index=labels.ignore_index),
            settings.teacher is None or not settings.negated,
        )


def _labels(targets: TeacherLogits) -> Labels:
    assert targets.labels is not None
    return Labels(targets.labels, None, targets.temperature, targets.threshold)


def _of_labels(stats: Any) -> RowStats:
    return RowStats(*stats[:N_LABEL_STATS])


def _of_teacher(stats: Any) -> DivergenceStats:
    return DivergenceStats(*stats[N_LABEL_STATS:])


def _both(x: Tensor, targets: TeacherLogits, options: DivergenceOptions) -> tuple[Tensor, Tensor, Tensor | float]:
    """The z of the student's and the teacher's columns, in the compute dtype of the student's logits, and its slope."""
    z, slope = transformed(x, options.labels)
    teacher = targets.logits.reshape(-1, targets.logits.shape[-1])[:, : x.shape[-1]]
    return z, transformed(teacher.to(z.dtype), options.teacher)[0], slope


def _probabilities(
    student: Tensor, teacher: Tensor, stats: Any, options: DivergenceOptions
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``(s, t, log s, log t)`` of columns."""
    logs = []
    sides = (
        (student, stats.student_max, stats.student_sum, options.student_temperature),
        (teacher, stats.teacher_max, stats.teacher_sum, options.temperature),
    )
    for z, row_max, sum_exp, temperature in sides:
        logs.append((z - row_max.unsqueeze(-1)) / temperature - sum_exp.log().unsqueeze(-1))
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
