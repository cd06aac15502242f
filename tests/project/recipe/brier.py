"""The mathematics of the Brier score, in plain PyTorch; see ``spec`` for legend and edges.

With ``p`` the softmax of ``z`` and the label ``y``, over the whole vocabulary, and ``S = sum_i p_i^2``:

    loss = sum_i (p_i - [i == y])^2 = S - 2 * p_y + 1
    dz_i = 2 * p_i * (p_i - S + p_y) - 2 * p_y * [i == y]
"""

from __future__ import annotations

from types import ModuleType
from typing import Annotated, NamedTuple

import torch
from torch import Tensor

from vocab_parallel_ce import checks, reference
from vocab_parallel_ce.losses.base import Launchers, Loss
from vocab_parallel_ce.options import Settings, loss_options
from vocab_parallel_ce.shard import VocabShard
from vocab_parallel_ce.spec import NAN, NEG_INF, LossOptions, _finite_or_zero, _outside, is_ignored, transformed
from vocab_parallel_ce.targets import Role


class Answers(NamedTuple):
    """The targets: a label of each row."""

    labels: Annotated[Tensor, Role("ids", ("rows",))]


class BrierStats(NamedTuple):
    """What a set of columns contributes to each row, each ``[N]``."""

    row_max: Tensor  # largest z
    sum_exp: Tensor  # sum of exp(z - row_max)
    sum_exp_sq: Tensor  # sum of exp(2 * (z - row_max))
    target_logit: Tensor  # the label's z, -inf if it is not in the set


IDENTITY = (NEG_INF, 0.0, 0.0, NEG_INF)


class BrierLoss(Loss):
    """Squared error of the probabilities."""

    Targets = Answers
    Stats = BrierStats
    counts = True

    def options(self, settings: Settings, vocab_size: int | None, *, class_weight: bool) -> LossOptions:
        checks.check_choice("impl", settings.impl, ("auto", "reference"))  # it has no kernels
        return loss_options(settings, vocab_size)

    def launchers(self, options: LossOptions, shard: VocabShard, kernels: ModuleType | None) -> Launchers:
        return reference.launchers(self, options, shard)

    def exchanges(self, options: LossOptions) -> tuple[tuple[str, ...], ...]:
        return (BrierStats._fields,)

    def tile(self, x: Tensor, targets: Answers, shard: VocabShard, options: LossOptions) -> BrierStats:
        z, _ = transformed(x, options)
        if z.shape[-1] == 0:
            return BrierStats(*(z.new_full(z.shape[:1], value) for value in IDENTITY))
        row_max = z.amax(dim=-1)
        exp = (z - _finite_or_zero(row_max).unsqueeze(-1)).exp()
        target_logit = torch.where(_is_label(z, targets, shard), z, NEG_INF).amax(dim=-1)
        return BrierStats(row_max, exp.sum(dim=-1), (exp**2).sum(dim=-1), target_logit)

    def merge(self, a: BrierStats, b: BrierStats, options: LossOptions) -> BrierStats:
        row_max = torch.maximum(a.row_max, b.row_max)
        a_scale, b_scale = ((own.row_max - _finite_or_zero(row_max)).exp() for own in (a, b))
        return BrierStats(
            row_max,
            a.sum_exp * a_scale + b.sum_exp * b_scale,
            a.sum_exp_sq * a_scale**2 + b.sum_exp_sq * b_scale**2,
            torch.maximum(a.target_logit, b.target_logit),
        )

    def output(
        self, name: str, stats: BrierStats, second: None, targets: Answers, shard: VocabShard, options: LossOptions
    ) -> Tensor:
        p_label, sum_sq = _sums(stats)
        value = torch.where(_outside(targets.labels, shard.vocab_size), NAN, sum_sq - 2 * p_label + 1)
        return torch.where(self.ignored(targets, options), 0.0, value)

    def gradient(
        self, x: Tensor, targets: Answers, stats: BrierStats, second: None, shard: VocabShard, options: LossOptions
    ) -> Tensor:
        z, slope = transformed(x, options)
        p = (z - stats.row_max.unsqueeze(-1)).exp() / stats.sum_exp.unsqueeze(-1)
        p_label, sum_sq = (value.unsqueeze(-1) for value in _sums(stats))
        grad = 2 * p * (p - sum_sq + p_label) - 2 * p_label * _is_label(z, targets, shard)
        return torch.where(_outside(targets.labels, shard.vocab_size).unsqueeze(-1), NAN, grad * slope)

    def ignored(self, targets: Answers, options: LossOptions) -> Tensor:
        return is_ignored(targets.labels, options.ignore_index)


BRIER = BrierLoss()


def _is_label(z: Tensor, targets: Answers, shard: VocabShard) -> Tensor:
    column = torch.arange(shard.start, shard.start + z.shape[-1], device=z.device)
    return column == targets.labels.long().unsqueeze(-1)


def _sums(stats: BrierStats) -> tuple[Tensor, Tensor]:
    """Return ``p_y`` and ``S``."""
    p_label = (stats.target_logit - stats.row_max).exp() / stats.sum_exp
    return p_label, stats.sum_exp_sq / stats.sum_exp**2
