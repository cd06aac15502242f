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

IGNORED = -(2**62)  # the columns of a row that is ignored


class TopKStats(NamedTuple):
    """What a set of columns contributes to each row, each ``[N]``."""

    row_max: Tensor  # largest z = x / T
    outside: Tensor  # sum of exp(z - row_max) over the columns that are not among the k
    inside: Tensor  # the same over the k tokens
    cross: Tensor  # sum of q_k * (z_k - row_max - log q_k)
    mass: Tensor  # sum of q_k


N_STATISTICS = len(TopKStats._fields)


class TopKOptions(NamedTuple):
    """What is computed of a row."""

    rest: str
    temperature: float

    @property
    def of_logits(self) -> LossOptions:
        return LossOptions(ignore_index=IGNORED, logit_scale=1 / self.temperature)


class TopK:
    """The launchers of this loss, over those of cross-entropy in one implementation.

    ``log_probs`` and ``columns [N, k]`` are those that :func:`known_columns` returns.
    """

    def __init__(self, launchers: ModuleType) -> None:
        self.launchers = launchers

    def statistics(
        self,
        logits: Tensor,
        log_probs: Tensor,
        columns: Tensor,
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
        others = columns < 0
        z = _logits_at(logits, columns, options).masked_fill_(others, NEG_INF)
        place = z.argmax(dim=-1, keepdim=True)
        label = (columns.gather(-1, place) + shard.start).masked_fill_(columns[:, :1] == IGNORED, IGNORED).squeeze(-1)
        own = stats.new_empty(1, stats.shape[1], 3)
        self.launchers.online_softmax(logits, label, own, 0, None, shard=shard, options=options.of_logits)
        row_max, without_label, _ = own[0].unbind(-1)
        shifted = z - _finite_or_zero(row_max).unsqueeze(-1)
        terms, q = shifted.exp(), log_probs.exp().masked_fill_(others, 0.0)
        cross = (q * (shifted - log_probs)).masked_fill_(q == 0, 0.0).sum(dim=-1)
        inside, limits = terms.sum(dim=-1), torch.finfo(terms.dtype)
        outside = without_label - terms.scatter_(-1, place, 0.0).sum(dim=-1)
        outside = torch.maximum(outside, without_label * (limits.eps / 2))
        outside = torch.where(row_max == NEG_INF, outside, outside.clamp(min=limits.tiny * 2**16))
        torch.stack(TopKStats(row_max, outside, inside, cross, q.sum(dim=-1)), dim=-1, out=stats[rank])
        if loss is not None:
            self.losses(stats, None, columns, divisor, loss, shard=shard, options=options)

    def losses(
        self,
        stats: Tensor,
        mixture: None,
        columns: Tensor,
        divisor: Tensor | None,
        loss: Tensor,
        *,
        shard: VocabShard,
        options: TopKOptions,
    ) -> None:
        """Fill ``loss`` from the statistics of all ranks; ``divisor [1]`` divides it if given."""
        merged = _merged(stats)
        log_sum = (merged.inside + merged.outside).log()
        value = merged.mass * log_sum - merged.cross
        if options.rest == "bucket":
            r = (1 - merged.mass).clamp(min=0)
            value += (r * (r.log() - merged.outside.log() + log_sum)).masked_fill_(r == 0, 0.0)
        if divisor is not None:
            value = (value / divisor).masked_fill_(divisor == 0, 0.0)
        loss.copy_(value.masked_fill_(columns[:, 0] == IGNORED, 0.0).view(loss.shape))

    def gradient(
        self,
        logits: Tensor,
        log_probs: Tensor,
        columns: Tensor,
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
        merged, weight, dead = _merged(stats), grad_output, columns[:, 0] == IGNORED
        if divisor is not None:
            weight, dead = weight / divisor, dead | (divisor == 0)
        mass, sum_exp = merged.mass, merged.inside + merged.outside
        of_others = mass
        if options.rest == "bucket":
            r = (1 - mass).clamp(min=0)
            mass = mass + r
            of_others = mass - r * sum_exp / merged.outside
        of_known = weight / options.temperature
        finite_max = merged.row_max.masked_fill(merged.row_max.isinf(), NAN)  # such a row is NaN
        shifted = _logits_at(logits, columns, options) - finite_max.unsqueeze(-1)
        values = shifted.exp() * (of_known * mass / sum_exp).unsqueeze(-1) - log_probs.exp() * of_known.unsqueeze(-1)
        values.masked_fill_((shifted == NEG_INF) | dead.unsqueeze(-1), 0.0)
        softmax = torch.stack([merged.row_max, sum_exp, torch.full_like(sum_exp, NEG_INF)], dim=-1).unsqueeze(0)
        # The label's column is written again below. If none of the tokens is owned, it is another rank's.
        last, place = columns.max(dim=-1, keepdim=True)
        label = (last + shard.start).masked_fill_(last < 0, (shard.start + shard.n_valid) % shard.vocab_size)
        label, grads = label.squeeze(-1).masked_fill_(dead, IGNORED), GradOutputs(weight * of_others)
        own = {"shard": shard, "options": options.of_logits}
        self.launchers.cross_entropy(logits, softmax, label, None, grads, None, grad_logits, **own)
        # Without waiting for the device: a token that is not owned writes what the last owned token writes. If there
        # is none, column 0 stays.
        values, owned = values.to(grad_logits.dtype), columns >= 0
        of_last = torch.where(last < 0, grad_logits[..., :1].reshape(-1, 1), values.gather(-1, place))
        values, columns = torch.where(owned, values, of_last), torch.where(owned, columns, last.clamp(min=0))
        shape = *grad_logits.shape[:-1], columns.shape[-1]
        grad_logits.scatter_(-1, columns.view(shape), values.view(shape))


def _logits_at(logits: Tensor, columns: Tensor, options: TopKOptions) -> Tensor:
    """Return ``[N, k]`` logits at ``columns``, divided by the temperature; those of column 0 for a negative one."""
    index = columns.clamp(min=0).view(*logits.shape[:-1], columns.shape[-1])
    return spec.transformed(logits.gather(-1, index).view(columns.shape), options.of_logits)[0]


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


def known_columns(
    ids: Tensor, log_probs: Tensor, labels: Tensor | None, shard: VocabShard, ignore_index: int
) -> tuple[Tensor, Tensor]:
    """Return what :class:`TopK` takes: ``[N, k]`` log-probabilities and int64 columns of this rank's shard.

    A token that another rank owns, or that a log-probability of -inf leaves out, has column -1. A row without tokens,
    or one that labels ignore, has ``IGNORED``. In another, if an id or the label is outside the vocabulary, all
    log-probabilities are NaN, at column 0 if the shard has one.
    """
    ids, log_probs = ids.reshape(-1, ids.shape[-1]).long(), log_probs.reshape(-1, ids.shape[-1])
    is_left_out, columns = log_probs == NEG_INF, ids - shard.start
    is_wrong = (spec._outside(ids, shard.vocab_size) & ~is_left_out).any(dim=-1)
    ignored = is_left_out.all(dim=-1)
    if labels is not None:
        is_wrong |= spec._outside(flat(labels), shard.vocab_size)
        ignored |= spec.is_ignored(flat(labels), ignore_index)
    is_wrong = is_wrong.unsqueeze(-1)
    columns.masked_fill_(spec._outside(columns, shard.n_valid) | is_left_out, -1)
    columns.masked_fill_(is_wrong, 0 if shard.n_valid else -1).masked_fill_(ignored.unsqueeze(-1), IGNORED)
    return log_probs.masked_fill(is_wrong, NAN), columns
