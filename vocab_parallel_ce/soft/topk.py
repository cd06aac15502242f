"""Distillation from a teacher's k most probable tokens: statistics, losses and gradient.

With ``q_k = exp(teacher_log_probs)`` of the tokens ``teacher_ids``, ``Q = sum_k q_k``, ``s = softmax(x / T)`` and
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
from typing import NamedTuple

import torch
from torch import Tensor

from vocab_parallel_ce import spec
from vocab_parallel_ce.layout import flat
from vocab_parallel_ce.shard import VocabShard
from vocab_parallel_ce.spec import NAN, NEG_INF, GradOutputs, LossOptions, _finite_or_zero, _raised_by

IGNORED = -(2**62)  # the ids of a row that is ignored


class TopKStats(NamedTuple):
    """What a set of columns contributes to each row, each ``[N]``."""

    row_max: Tensor  # largest z = x / T
    outside: Tensor  # sum of exp(z - row_max) over the columns that are not among the k
    inside: Tensor  # the same over the k tokens
    cross: Tensor  # sum of q_k * (z_k - row_max)
    mass: Tensor  # sum of q_k


N_STATISTICS = len(TopKStats._fields)


class TopKOptions(NamedTuple):
    """What is computed of a row."""

    rest: str
    temperature: float

    @property
    def of_logits(self) -> LossOptions:
        return LossOptions(ignore_index=IGNORED, logit_scale=1 / self.temperature)


class _Rows(NamedTuple):
    """The k tokens of each row; a log-probability of -inf leaves a token out."""

    ids: Tensor  # [N, k]
    q: Tensor  # [N, k]
    entropy_part: Tensor  # [N] sum of q log q
    label: Tensor  # [N] one of the tokens, in the vocabulary; IGNORED in an ignored row
    owned: Tensor  # [N, k] whether this rank has the token's column
    has_none: Tensor  # [N] no token is left
    is_wrong: Tensor  # [N] an id is outside the vocabulary

    @classmethod
    def of(cls, ids: Tensor, log_probs: Tensor, shard: VocabShard) -> _Rows:
        ids, log_probs = ids.reshape(-1, ids.shape[-1]), log_probs.reshape(-1, ids.shape[-1])
        present, ignored = log_probs != NEG_INF, ids[:, 0] == IGNORED
        q = log_probs.exp()
        inside = (ids >= 0) & (ids < shard.vocab_size)
        is_wrong, has_none = (present & ~inside).any(dim=-1), ~present.any(dim=-1)
        label = ids.gather(-1, log_probs.argmax(dim=-1, keepdim=True)).squeeze(-1)
        return cls(
            ids,
            q,
            torch.where(present, q * log_probs, 0.0).sum(dim=-1),
            torch.where(ignored, IGNORED, torch.where(has_none | is_wrong, 0, label)),
            present & (ids >= shard.start) & (ids < shard.start + shard.n_valid),
            has_none,
            is_wrong,
        )


class TopK:
    """The launchers of this loss for one call, over those of cross-entropy in one implementation."""

    def __init__(self, launchers: ModuleType, log_probs: Tensor) -> None:
        self.launchers, self.log_probs = launchers, log_probs  # of the compute dtype

    def statistics(
        self,
        logits: Tensor,
        log_probs: Tensor,
        ids: Tensor,
        stats: Tensor,
        mixture: None,
        rank: int,
        loss: Tensor | None,
        divisor: Tensor | None,
        *,
        shard: VocabShard,
        options: TopKOptions,
    ) -> None:
        """Fill ``stats[rank]`` of ``stats [R, N, K]``, and ``loss`` if given: then the rank must be the only one."""
        rows = _Rows.of(ids, log_probs, shard)
        z = torch.where(rows.owned, _logits_of(logits, rows, shard, options), NEG_INF)
        largest = z.argmax(dim=-1, keepdim=True)
        is_label = torch.arange(z.shape[-1], device=z.device) == largest
        label = torch.where(rows.owned.any(dim=-1), rows.ids.gather(-1, largest).squeeze(-1), -1)
        label = torch.where(rows.label == IGNORED, IGNORED, label)
        own = stats.new_empty(1, stats.shape[1], 3)
        self.launchers.online_softmax(logits, label, own, 0, None, shard=shard, options=options.of_logits)
        row_max, without_label, _ = own[0].unbind(-1)
        shifted = z - _finite_or_zero(row_max).unsqueeze(-1)
        terms, q = shifted.exp(), torch.where(rows.owned, rows.q, 0.0)
        limits = torch.finfo(terms.dtype)
        outside = torch.maximum(without_label - (terms * ~is_label).sum(dim=-1), without_label * (limits.eps / 2))
        outside = torch.where(row_max == NEG_INF, outside, outside.clamp(min=limits.tiny * 2**16))
        cross = torch.where(q == 0, 0.0, q * shifted).sum(dim=-1)
        own_stats = TopKStats(row_max, outside, terms.sum(dim=-1), cross, q.sum(dim=-1))
        stats[rank] = torch.stack(own_stats, dim=-1)
        if loss is not None:
            self.losses(stats, None, ids, divisor, loss, shard=shard, options=options)

    def losses(
        self,
        stats: Tensor,
        mixture: None,
        ids: Tensor,
        divisor: Tensor | None,
        loss: Tensor,
        *,
        shard: VocabShard,
        options: TopKOptions,
    ) -> None:
        """Fill ``loss`` from the statistics of all ranks; ``divisor [1]`` divides it if given."""
        rows, merged = _Rows.of(ids, self.log_probs, shard), _merged(stats)
        log_sum, total = (merged.inside + merged.outside).log(), rows.q.sum(dim=-1)
        value = rows.entropy_part - merged.cross + total * log_sum
        if options.rest == "bucket":
            r = (1 - total).clamp(min=0)
            value = value + torch.where(r == 0, 0.0, r * (r.log() - merged.outside.log() + log_sum))
        value = torch.where(rows.has_none, 0.0, value)
        value = torch.where(rows.is_wrong, NAN, value)
        value = torch.where(rows.label == IGNORED, 0.0, value)
        if divisor is not None:
            value = torch.where(divisor == 0, 0.0, value / divisor)
        loss.copy_(value.view(loss.shape))

    def gradient(
        self,
        logits: Tensor,
        log_probs: Tensor,
        ids: Tensor,
        stats: Tensor,
        mixture: None,
        divisor: Tensor | None,
        grad_output: Tensor,
        grad_logits: Tensor,
        *,
        shard: VocabShard,
        options: TopKOptions,
    ) -> None:
        """Fill ``grad_logits [..., C]``, which may be ``logits``; ``grad_output [N]`` multiplies it per row."""
        rows, merged = _Rows.of(ids, log_probs, shard), _merged(stats)
        weight, mass = torch.where(rows.is_wrong, NAN, grad_output), rows.q.sum(dim=-1)
        dead = (rows.label == IGNORED) | rows.has_none
        if divisor is not None:
            weight, dead = weight / divisor, dead | (divisor == 0)
        of_others, sum_exp = mass, merged.inside + merged.outside
        if options.rest == "bucket":
            r = (1 - mass).clamp(min=0)
            mass = mass + r
            of_others = mass - r * sum_exp / merged.outside
        z = _logits_of(logits, rows, shard, options)
        s = (z - merged.row_max.unsqueeze(-1)).exp() / sum_exp.unsqueeze(-1)
        values = (mass.unsqueeze(-1) * s - rows.q) * (weight / options.temperature).unsqueeze(-1)
        has_columns = (merged.row_max != NEG_INF).unsqueeze(-1)
        values = torch.where((z == NEG_INF) & has_columns | dead.unsqueeze(-1), 0.0, values)
        # The label's column is written again below.
        softmax = torch.stack([merged.row_max, sum_exp, torch.full_like(sum_exp, NEG_INF)], dim=-1).unsqueeze(0)
        label = torch.where(dead, IGNORED, rows.label)
        own = {"shard": shard, "options": options.of_logits}
        factor = weight * of_others
        self.launchers.cross_entropy(logits, softmax, label, None, GradOutputs(factor), None, grad_logits, **own)
        _write(grad_logits, rows, values, shard)


def _logits_of(logits: Tensor, rows: _Rows, shard: VocabShard, options: TopKOptions) -> Tensor:
    """Return ``[N, k]`` logits of the k tokens, divided by the temperature; anything if they are not owned."""
    columns = torch.where(rows.owned, rows.ids - shard.start, 0).view(*logits.shape[:-1], rows.ids.shape[-1])
    return spec.transformed(logits.gather(-1, columns).view(rows.ids.shape), options.of_logits)[0]


def _write(grad_logits: Tensor, rows: _Rows, values: Tensor, shard: VocabShard) -> None:
    """Write ``values [N, k]`` over the columns of the k tokens that are owned, without waiting for the device.

    A token that is not owned writes what the row's first owned token writes. If there is none, column 0 stays.
    """
    first = rows.owned.long().argmax(dim=-1, keepdim=True)
    columns = torch.where(rows.owned, rows.ids - shard.start, 0)
    shape = (*grad_logits.shape[:-1], rows.ids.shape[-1])
    column_0 = grad_logits[..., :1].reshape(-1, 1)
    values = values.to(grad_logits.dtype)
    of_first = torch.where(rows.owned.any(dim=-1, keepdim=True), values.gather(-1, first), column_0)
    values = torch.where(rows.owned, values, of_first)
    columns = torch.where(rows.owned, columns, columns.gather(-1, first))
    grad_logits.scatter_(-1, columns.view(shape), values.view(shape))


def _merged(stats: Tensor) -> TopKStats:
    """Merge ``stats [R, N, K]`` over the ranks, in the order of the ranks on every rank."""
    return functools.reduce(merge, (TopKStats(*packed.unbind(-1)) for packed in stats))


def merge(a: TopKStats, b: TopKStats) -> TopKStats:
    """Statistics of the union of two disjoint sets of columns: associative and commutative."""
    row_max = torch.maximum(a.row_max, b.row_max)
    shift = _finite_or_zero(row_max)

    def moved(own: TopKStats) -> tuple[Tensor, Tensor, Tensor]:
        decay, raised = (own.row_max - shift).exp(), _raised_by(own.row_max, shift)
        return own.outside * decay, own.inside * decay, own.cross + torch.where(own.mass == 0, 0.0, own.mass * raised)

    outside, inside, cross = (x + y for x, y in zip(moved(a), moved(b), strict=True))
    return TopKStats(row_max, outside, inside, cross, a.mass + b.mass)


def packed_ids(ids: Tensor, labels: Tensor | None, vocab_size: int, ignore_index: int) -> Tensor:
    """Return ``[N, k]`` int64 ids: ``IGNORED`` in rows that labels ignore, -1 where a label is outside."""
    rows = ids.reshape(-1, ids.shape[-1]).long()
    rows = torch.where(rows == IGNORED, -1, rows)
    if labels is None:
        return rows
    label = flat(labels).unsqueeze(-1)
    rows = torch.where(spec._outside(label, vocab_size), -1, rows)
    return torch.where(spec.is_ignored(label, ignore_index), IGNORED, rows)
