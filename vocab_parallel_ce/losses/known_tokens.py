"""Distillation from a teacher's k most probable tokens: statistics, losses and gradient.

With ``q_k = exp(log_probs)`` of the tokens ``ids``, ``Q = sum_k q_k``, ``s = softmax(x / T)`` and
``S = sum_k s_k``:

    rest="ignore"   loss = sum_k q_k (log q_k - log s_k)
                    dx_i = (Q s_i - q_i) / T,  q_i = 0 for a token that is not among the k
    rest="bucket"   loss = the same + r (log r - log(1 - S)),  r = max(1 - Q, 0)
                    dx_i = ((Q + r) s_i - q_i) / T for the k tokens,  s_i (Q + r - r / (1 - S)) / T for the others

The passes over the shard are those of cross-entropy: its kernels find the sums and write the columns that are not
among the k. What there is of k tokens is small, and plain PyTorch.

``1 - S`` comes from ``outside``, the sum of the exponentials of the other tokens: the sum without a rank's largest of
the k tokens, which is its label, less those of the others. It is at least 2^-24 of the former: less is rounding; and
2^-110 of the rank's largest, so that its inverse times a loss scale of 2^16 is finite. In fp64, 2^-53 and 2^-1006.
"""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from vocab_parallel_ce import checks, spec
from vocab_parallel_ce.beside import check_beside, check_labels_beside, check_no_gradient, check_requires_no_gradient
from vocab_parallel_ce.layout import compute_dtype, flat
from vocab_parallel_ce.losses.base import Launchers, Loss
from vocab_parallel_ce.losses.divergences import divergence_options, rows_of_mean
from vocab_parallel_ce.losses.given_ids import (
    IGNORED,
    at_least_rounding,
    is_dead,
    logits_at,
    marked,
    sums_without,
    write_columns,
)
from vocab_parallel_ce.losses.labels import LABELS
from vocab_parallel_ce.options import Settings, loss_options
from vocab_parallel_ce.shard import VocabShard
from vocab_parallel_ce.spec import (
    NAN,
    NEG_INF,
    GradOutputs,
    LossOptions,
    TokenOutputs,
    _finite_or_zero,
    _raised_by,
    is_ignored,
)

# Of the probabilities of a row. Log-probabilities of bf16 come to less than 1.03; probabilities in their place to k.
MOST_MASS = 1.125


class TopKStats(NamedTuple):
    """What a set of columns contributes to each row, each ``[N]``."""

    row_max: Tensor  # largest z = x / T
    outside: Tensor  # sum of exp(z - row_max) over the columns that are not among the k
    inside: Tensor  # the same over the k tokens
    cross: Tensor  # sum of q_k * (z_k - row_max - log q_k)
    mass: Tensor  # sum of q_k


class Tokens(NamedTuple):
    """What stands alongside the student's logits."""

    log_probs: Tensor  # [..., k]; for launchers [N, k]
    ids: Tensor  # [..., k] global ids; for launchers [N, k] int64 columns of this rank, of known_columns
    labels: Tensor | None = None  # [...]; for launchers they are in the ids

    @property
    def class_weight(self) -> None:
        """No loss of a teacher has weights."""

    def at(self, rows: slice) -> Tokens:
        """Return what stands alongside these rows."""
        return Tokens(self.log_probs[rows], self.ids[rows])


class TopKOptions(NamedTuple):
    """What is computed of a row."""

    rest: str
    temperature: float

    @property
    def of_logits(self) -> LossOptions:
        return LossOptions(ignore_index=IGNORED, logit_scale=1 / self.temperature)


class TopK:
    """The launchers of this loss, over those of cross-entropy; :class:`Launchers` says what each fills."""

    def __init__(self, softmax: Launchers, options: TopKOptions, shard: VocabShard) -> None:
        self.softmax, self.options, self.shard = softmax, options, shard

    def statistics(
        self,
        logits: Tensor,
        beside: Tokens,
        stats: tuple[Tensor],
        rank: int,
        count: None = None,
        outputs: TokenOutputs | None = None,
        divisor: Tensor | None = None,
    ) -> None:
        log_probs, columns, _ = beside
        z, _ = logits_at(logits, columns, self.options.of_logits)
        best = z.argmax(dim=-1, keepdim=True)
        row_max, without_best = sums_without(self.softmax, logits, best, columns, is_dead(columns), self.shard)
        shifted = z - _finite_or_zero(row_max).unsqueeze(-1)
        terms, q = shifted.exp(), log_probs.exp().masked_fill_(columns < 0, 0.0)
        cross = (q * (shifted - log_probs)).masked_fill_(q == 0, 0.0).sum(dim=-1)
        inside = terms.sum(dim=-1)
        outside = without_best - terms.scatter_(-1, best, 0.0).sum(dim=-1)
        outside = at_least_rounding(outside, without_best, row_max)
        torch.stack(TopKStats(row_max, outside, inside, cross, q.sum(dim=-1)), dim=-1, out=stats[0][rank])
        if outputs is not None:
            self.outputs(stats, beside, divisor, outputs)

    def outputs(self, stats: tuple[Tensor], beside: Tokens, divisor: Tensor | None, outputs: TokenOutputs) -> None:
        merged = _merged(stats[0])
        log_sum = (merged.inside + merged.outside).log()
        value = merged.mass * log_sum - merged.cross
        if self.options.rest == "bucket":
            r = (1 - merged.mass).clamp(min=0)
            value += (r * (r.log() - merged.outside.log() + log_sum)).masked_fill_(r == 0, 0.0)
        if divisor is not None:
            value = (value / divisor.to(value.dtype)).masked_fill_(divisor == 0, 0.0)
        value = value.masked_fill_(beside.ids[:, 0] == IGNORED, 0.0)
        outputs.loss.copy_(value.view(outputs.loss.shape))

    def gradient(
        self,
        logits: Tensor,
        beside: Tokens,
        stats: tuple[Tensor],
        divisor: Tensor | None,
        grads: GradOutputs,
        loss: None,
        grad_logits: Tensor,
    ) -> None:
        log_probs, columns, _ = beside
        merged, dead = _merged(stats[0]), is_dead(columns)
        weight = torch.ones_like(merged.mass) if grads.loss is None else grads.loss
        if divisor is not None:
            weight, dead = weight / divisor.to(merged.mass.dtype), dead | (divisor == 0)
        mass, sum_exp = merged.mass, merged.inside + merged.outside
        of_others = mass
        if self.options.rest == "bucket":
            r = (1 - mass).clamp(min=0)
            mass = mass + r
            of_others = mass - r * sum_exp / merged.outside
        of_known = weight / self.options.temperature
        finite_max = merged.row_max.masked_fill(merged.row_max.isinf(), NAN)  # such a row is NaN
        shifted = logits_at(logits, columns, self.options.of_logits)[0] - finite_max.unsqueeze(-1)
        values = shifted.exp() * (of_known * mass / sum_exp).unsqueeze(-1) - log_probs.exp() * of_known.unsqueeze(-1)
        values.masked_fill_((shifted == NEG_INF) | dead.unsqueeze(-1), 0.0)
        softmax = torch.stack([merged.row_max, sum_exp, torch.full_like(sum_exp, NEG_INF)], dim=-1).unsqueeze(0)
        weight = weight * of_others
        write_columns(self.softmax, logits, columns, dead, self.shard, softmax, weight, values, grad_logits)


class KnownTokensLoss(Loss):
    """KL(t || s) of a teacher that is known at k tokens."""

    Beside = BesideHead = Tokens
    names: ClassVar[dict[str, str]] = {"log_probs": "teacher.log_probs", "ids": "teacher.ids"}

    def check(self, given: Tokens, logits: Tensor, settings: Settings) -> None:
        check_tokens(given, logits, settings, "student_logits")
        check_beside("teacher.log_probs", given.log_probs, logits, settings)
        check_labels_beside(given.labels, logits)

    def beside(
        self, given: Tokens, logits: Tensor, settings: Settings, shard: VocabShard, rank: int, n_ranks: int
    ) -> Tokens:
        if settings.check_labels and given.labels is not None:
            checks.check_label_range(given.labels, shard.vocab_size, settings.ignore_index)
        return _of_rank(given, logits, settings, shard)

    def check_head(self, given: Tokens, hidden: Tensor, settings: Settings) -> None:
        check_tokens(given, hidden, settings, "student.hidden")
        check_no_gradient("teacher.log_probs", given.log_probs)

    def beside_head(
        self, given: Tokens, hidden: Tensor, settings: Settings, plan: Any, order: Any, labels: Tensor
    ) -> Tokens:
        tokens = _of_rank(given, hidden, settings, plan.shard)
        if order is None:
            return tokens
        return Tokens(order.to_rows(tokens.log_probs, 0.0), order.to_rows(tokens.ids, IGNORED))

    def options(self, settings: Settings, vocab_size: int | None, *, class_weight: bool) -> TopKOptions:
        temperature = divergence_options(settings).temperature
        loss_options(settings, vocab_size)
        return TopKOptions(settings.rest, temperature)

    def launchers(self, options: TopKOptions, shard: VocabShard, kernels: ModuleType | None) -> Launchers:
        softmax = LABELS.launchers(options.of_logits, shard, kernels)
        own = TopK(softmax, options, shard)
        return Launchers(
            own.statistics,
            own.outputs,
            own.gradient,
            softmax.element_mul,
            widths=tuple(map(len, self.exchanges(options))),
        )

    def divisor(self, given: Tokens, logits: Tensor, settings: Settings) -> Tensor:
        return rows_of_mean(given.labels, logits, settings)

    def check_constants(self, given: Tokens) -> None:
        check_requires_no_gradient(**{"teacher.log_probs": given.log_probs})

    def exchanges(self, options: TopKOptions) -> tuple[tuple[str, ...], ...]:
        return (TopKStats._fields,)

    def compared(self, given: Tokens) -> dict[str, Any]:
        values = {"teacher.log_probs": given.log_probs}
        values |= {} if given.labels is None else {"labels": given.labels}
        own = {"options": {}, "values": values}
        return {"labels": given.ids, "beside": "teacher.ids", "subject": "teacher.ids", **own}

    def compared_head(self, given: Tokens) -> dict[str, Any]:
        values = {"teacher.ids": given.ids, "teacher.log_probs": given.log_probs}
        options = {"call": "a head and a TopKTeacher", "labels": given.labels is not None}
        return {"options": options, "values": values}


KNOWN_TOKENS = KnownTokensLoss()


def check_tokens(given: Tokens, student: Tensor, settings: Settings, subject: str) -> None:
    """Check that there are k ids and log-probabilities per row of ``student``, which is ``subject``."""
    log_probs, ids, _ = given
    checks.check_choice("teacher.rest", settings.rest, ("ignore", "bucket"))
    checks.check_tensor("teacher.ids", ids)
    checks.check_tensor("teacher.log_probs", log_probs)
    if ids.dtype not in checks.LABEL_DTYPES:
        raise TypeError(f"teacher.ids: dtype must be int64 or int32, got {ids.dtype}")
    if not log_probs.is_floating_point():
        raise TypeError(f"teacher.log_probs: dtype must be floating point, got {log_probs.dtype}")
    for name, tensor in {"teacher.ids": ids, "teacher.log_probs": log_probs}.items():
        if tensor.dim() == 0 or tensor.shape[:-1] != student.shape[:-1] or tensor.shape[-1] == 0:
            expected = f"{tuple(student.shape[:-1])} and k, for {subject} {tuple(student.shape)}"
            raise ValueError(f"{name}: shape must be {expected}, got {tuple(tensor.shape)}")
    if ids.shape != log_probs.shape:
        expected = f"that of teacher.log_probs, {tuple(log_probs.shape)}"
        raise ValueError(f"teacher.ids: shape must be {expected}, got {tuple(ids.shape)}")
    for name, tensor in {"teacher.ids": ids, "teacher.log_probs": log_probs}.items():
        if tensor.device != student.device:
            raise ValueError(f"{name}: device must be that of {subject}, {student.device}, got {tensor.device}")
        if tensor.layout is not torch.strided:
            raise TypeError(f"{name}: expected a dense tensor, got layout {tensor.layout}")


def _of_rank(given: Tokens, logits: Tensor, settings: Settings, shard: VocabShard) -> Tokens:
    """Return checked tokens as launchers take them; ``logits`` may be hidden states."""
    log_probs, ids, labels = given
    if settings.check_labels:
        check_values(given, settings.ignore_index, shard.vocab_size)
    log_probs = log_probs.detach().to(compute_dtype(logits.dtype))
    return Tokens(*known_columns(ids, log_probs, labels, shard, settings.ignore_index))


def check_values(given: Tokens, ignore_index: int, vocab_size: int | None) -> None:
    """Wait for the device; raise ValueError for an id outside the vocabulary, or twice in a row, or too much mass.

    Without a ``vocab_size`` ids may be any numbers.
    """
    log_probs, ids, labels = given
    known = marked(ids, log_probs == NEG_INF)
    if labels is not None:
        known = torch.where(is_ignored(labels, ignore_index).unsqueeze(-1), IGNORED, known)
    known = known.reshape(-1, ids.shape[-1])
    if vocab_size is not None:
        checks.check_label_range(known, vocab_size, IGNORED, subject="teacher.ids", names_ignored=False)
    in_order = known.sort(dim=-1).values
    if bool(((in_order[:, 1:] == in_order[:, :-1]) & (in_order[:, 1:] != IGNORED)).any()):
        raise ValueError("teacher.ids: must be different in a row, got an id twice")
    if not known.numel():
        return
    log_q = log_probs.reshape(known.shape).float().masked_fill(known == IGNORED, NEG_INF)
    most, mass = float(log_q.amax()), float(log_q.exp().sum(dim=-1).amax())
    remedy = "pass log-probabilities, not probabilities or logits"
    if most > 1e-3:  # beyond rounding
        raise ValueError(f"teacher.log_probs: must be at most 0, got {most:g}; {remedy}")
    if mass > MOST_MASS:
        raise ValueError(f"teacher.log_probs: exponentials of a row must sum to at most 1, got {mass:g}; {remedy}")


def _merged(stats: Tensor) -> TopKStats:
    """Merge ``stats [R, N, K]`` over the ranks, in the order of the ranks on every rank.

    The mass is NaN in a row that has more than a distribution can, and so is all that is computed of it.
    """
    merged = functools.reduce(merge, (TopKStats(*packed.unbind(-1)) for packed in stats))
    return merged._replace(mass=merged.mass.masked_fill(merged.mass > MOST_MASS, NAN))


def merge(a: TopKStats, b: TopKStats) -> TopKStats:
    """Statistics of the union of two disjoint sets of columns: associative and commutative."""
    row_max = torch.maximum(a.row_max, b.row_max)
    shift = _finite_or_zero(row_max)

    def moved(own: TopKStats) -> tuple[Tensor, Tensor, Tensor]:
        decay, raised = (own.row_max - shift).exp(), _raised_by(own.row_max, shift)
        cross = own.cross + (own.mass * raised).masked_fill_(own.mass == 0, 0.0)
        return own.outside * decay, own.inside * decay, cross

    outside, inside, cross = (x + y for x, y in zip(moved(a), moved(b), strict=True))
    return TopKStats(row_max, outside, inside, cross, a.mass + b.mass)


def known_columns(
    ids: Tensor, log_probs: Tensor, labels: Tensor | None, shard: VocabShard, ignore_index: int
) -> tuple[Tensor, Tensor]:
    """Return what :class:`TopK` takes: ``[N, k]`` log-probabilities and int64 columns of this rank's shard.

    A token that another rank owns, or that a log-probability of -inf leaves out, has column -1. A row that labels
    ignore, or without tokens and with no label outside the vocabulary, has ``IGNORED``. In another, if an id or the
    label is outside, all log-probabilities are NaN, at column 0 if the shard has one.
    """
    ids, log_probs = ids.reshape(-1, ids.shape[-1]).long(), log_probs.reshape(-1, ids.shape[-1])
    is_left_out, columns = log_probs == NEG_INF, ids - shard.start
    is_wrong = (spec._outside(ids, shard.vocab_size) & ~is_left_out).any(dim=-1)
    ignored = is_left_out.all(dim=-1)
    if labels is not None:
        is_outside = spec._outside(flat(labels), shard.vocab_size)
        is_wrong |= is_outside
        ignored = (ignored & ~is_outside) | spec.is_ignored(flat(labels), ignore_index)
    is_wrong = is_wrong.unsqueeze(-1)
    columns.masked_fill_(spec._outside(columns, shard.n_valid) | is_left_out, -1)
    columns.masked_fill_(is_wrong, 0 if shard.n_valid else -1).masked_fill_(ignored.unsqueeze(-1), IGNORED)
    return log_probs.masked_fill(is_wrong, NAN), columns
