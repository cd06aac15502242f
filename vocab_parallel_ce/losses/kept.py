"""Log-probabilities and entropies over a kept set: k ids of each row, to which the softmax is renormalised.

It is the mathematics of labels, with every other logit -inf: a sampler's support, replayed. The gradient is 0
elsewhere, and nothing else of the vocabulary is read.
"""

from __future__ import annotations

from types import ModuleType
from typing import Annotated, NamedTuple

import torch
from torch import Tensor

from vocab_parallel_ce import reference, spec
from vocab_parallel_ce.losses.base import Launchers, Loss
from vocab_parallel_ce.losses.labels import LABELS, outputs_gradient
from vocab_parallel_ce.options import Settings, loss_options
from vocab_parallel_ce.shard import VocabShard
from vocab_parallel_ce.spec import NAN, NEG_INF, GradOutputs, LossOptions, RowStats
from vocab_parallel_ce.targets import Role, at_rows

NO_ID = -1  # fills the set of a row that has fewer


class Kept(NamedTuple):
    """The targets: a label and a kept set of each row."""

    labels: Annotated[Tensor, Role("ids", ("rows",))]
    kept: Annotated[Tensor, Role("ids", ("rows", "k"), fill=NO_ID)]
    temperature: Annotated[Tensor | None, Role("numbers", ("rows",), fill=1.0)] = None  # None: that of the options


class KeptLoss(Loss):
    """Log-probabilities over kept sets, and their entropies."""

    Targets = Kept
    Stats = RowStats

    def options(self, settings: Settings, vocab_size: int | None, *, class_weight: bool) -> LossOptions:
        return loss_options(settings, vocab_size)

    def outputs(self, options: LossOptions) -> dict[str, bool]:
        return LABELS.outputs(options)

    def launchers(self, options: LossOptions, shard: VocabShard, kernels: ModuleType | None) -> Launchers:
        return reference.launchers(self, options, shard) if kernels is None else kernels.kept.launchers(options, shard)

    def exchanges(self, options: LossOptions) -> tuple[tuple[str, ...], ...]:
        return (options.statistics,)

    def tile(self, x: Tensor, targets: Kept, shard: VocabShard, options: LossOptions) -> RowStats:
        names, options = options.statistics, at_rows(options, targets.temperature)
        x = kept_alone(x, targets.kept, shard)
        return spec.local_stats(x, targets.labels, shard.start, shard.vocab_size, options, names)

    def merge(self, a: RowStats, b: RowStats, options: LossOptions) -> RowStats:
        return spec.merge(a, b)

    def output(
        self, name: str, stats: RowStats, second: None, targets: Kept, shard: VocabShard, options: LossOptions
    ) -> Tensor:
        value: Tensor = getattr(spec, name)(stats, targets.labels, shard.vocab_size, options)
        return value

    def gradient(
        self, x: Tensor, targets: Kept, stats: RowStats, second: None, shard: VocabShard, options: LossOptions
    ) -> Tensor:
        options, kept = at_rows(options, targets.temperature), kept_alone(x, targets.kept, shard)
        grad = spec.gradient(kept, stats, targets.labels, shard.start, shard.vocab_size, options)
        return torch.where(is_among(x, targets.kept, shard), grad, 0.0)

    def outputs_gradient(
        self, x: Tensor, targets: Kept, stats: RowStats, grads: GradOutputs, shard: VocabShard, options: LossOptions
    ) -> Tensor:
        options, kept = at_rows(options, targets.temperature), kept_alone(x, targets.kept, shard)
        grad = outputs_gradient(kept, stats, targets.labels, shard.start, shard.vocab_size, grads, options)
        return torch.where(is_among(x, targets.kept, shard), grad, 0.0)

    def ignored(self, targets: Kept, options: LossOptions) -> Tensor:
        return spec.is_ignored(targets.labels, options.ignore_index)


KEPT = KeptLoss()


def is_among(x: Tensor, kept: Tensor, shard: VocabShard) -> Tensor:
    """Return ``[N, n]`` bool: the columns of ``x`` that are among the ids ``kept [N, k]``."""
    n, columns = x.shape[-1], kept.long() - shard.start
    columns = columns.masked_fill(spec._outside(columns, n), n)
    return torch.zeros(x.shape[0], n + 1, dtype=torch.bool, device=x.device).scatter_(-1, columns, True)[:, :n]


def kept_alone(x: Tensor, kept: Tensor, shard: VocabShard) -> Tensor:
    """Return ``x [N, n]``, -inf in columns that are not kept. A row with an id outside the vocabulary is NaN."""
    ids = kept.long()
    outside = (spec._outside(ids, shard.vocab_size) & (ids != NO_ID)).any(dim=-1, keepdim=True)
    return x.masked_fill(~is_among(x, kept, shard), NEG_INF).masked_fill(outside, NAN)
