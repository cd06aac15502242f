"""Cross-entropy with labels: what stands alongside the logits, and its launchers.

``spec`` has the mathematics, except the gradient of the outputs alongside the loss, which is here.
"""

from __future__ import annotations

from types import ModuleType
from typing import Annotated, NamedTuple

import torch
from torch import Tensor

from vocab_parallel_ce import checks, reference, spec
from vocab_parallel_ce.losses.base import Launchers, Loss, bound
from vocab_parallel_ce.options import DIFFERENTIABLE, OUTPUTS, Settings, loss_options
from vocab_parallel_ce.shard import VocabShard
from vocab_parallel_ce.spec import (
    NEG_INF,
    PLAIN,
    GradOutputs,
    LossOptions,
    RowStats,
    _bounded,
    _gradient_at_the_edges,
    _times,
    sum_exp,
    transformed,
)
from vocab_parallel_ce.targets import Role, at_rows


class Labels(NamedTuple):
    """The targets: a label of each row."""

    labels: Annotated[Tensor, Role("ids", ("rows",))]
    class_weight: Annotated[Tensor | None, Role("numbers", ("columns",))] = None
    temperature: Annotated[Tensor | None, Role("numbers", ("rows",), fill=1.0)] = None  # None: that of the options
    threshold: Annotated[Tensor | None, Role("numbers", ("rows",), fill=NEG_INF)] = None  # smaller logits are excluded


class LabelLoss(Loss):
    """Cross-entropy with labels, and the outputs alongside it."""

    Targets = Labels
    Stats = RowStats

    def options(self, settings: Settings, vocab_size: int | None, *, class_weight: bool) -> LossOptions:
        return loss_options(settings, vocab_size, class_weight=class_weight)

    def outputs(self, options: LossOptions) -> dict[str, bool]:
        return {name: name in DIFFERENTIABLE for name in OUTPUTS if getattr(options, name)}

    def launchers(self, options: LossOptions, shard: VocabShard, kernels: ModuleType | None) -> Launchers:
        if kernels is None:
            return reference.launchers(self, options, shard)
        return bound(kernels, kernels.label_rows.label_loss(shard, options), self.exchanges(options))

    def exchanges(self, options: LossOptions) -> tuple[tuple[str, ...], ...]:
        return (options.statistics,)

    def tile(self, x: Tensor, targets: Labels, shard: VocabShard, options: LossOptions) -> RowStats:
        names, options = options.statistics, at_rows(options, targets.temperature, targets.threshold)
        return spec.local_stats(x, targets.labels, shard.start, shard.vocab_size, options, names, targets.class_weight)

    def merge(self, a: RowStats, b: RowStats, options: LossOptions) -> RowStats:
        return spec.merge(a, b)

    def output(
        self, name: str, stats: RowStats, second: None, targets: Labels, shard: VocabShard, options: LossOptions
    ) -> Tensor:
        if name == "predictions":
            return spec.predictions(stats, targets.labels, options)
        if name == "loss" and targets.threshold is not None and stats.row_max.device.type == "cpu":
            ignored = spec.is_ignored(targets.labels, options.ignore_index)
            checks.check_some_kept(targets.threshold.masked_fill(ignored, NEG_INF), stats.row_max)
        value: Tensor = getattr(spec, name)(stats, targets.labels, shard.vocab_size, options)
        return value

    def gradient(
        self, x: Tensor, targets: Labels, stats: RowStats, second: None, shard: VocabShard, options: LossOptions
    ) -> Tensor:
        options = at_rows(options, targets.temperature, targets.threshold)
        return spec.gradient(x, stats, targets.labels, shard.start, shard.vocab_size, options, targets.class_weight)

    def outputs_gradient(
        self,
        x: Tensor,
        targets: Labels,
        stats: RowStats,
        second: None,
        grads: GradOutputs,
        shard: VocabShard,
        options: LossOptions,
    ) -> Tensor:
        options = at_rows(options, targets.temperature, targets.threshold)
        return outputs_gradient(x, stats, targets.labels, shard.start, shard.vocab_size, grads, options)

    def ignored(self, targets: Labels, options: LossOptions) -> Tensor:
        return spec.is_ignored(targets.labels, options.ignore_index)


LABELS = LabelLoss()


def outputs_gradient(
    logits: Tensor,
    stats: RowStats,
    labels: Tensor,
    start: int,
    vocab_size: int,
    grads: GradOutputs,
    options: LossOptions = PLAIN,
) -> Tensor:
    """``[N, C]`` derivative by the logits of each row's outputs except the loss, each times its ``grads``, summed."""
    z, slope = transformed(logits, options)
    column = torch.arange(start, start + z.shape[-1], device=z.device)
    shifted = z - stats.row_max.unsqueeze(-1)
    all_sum = sum_exp(stats).unsqueeze(-1)
    p = shifted.exp() / all_sum
    grad = torch.zeros_like(p)
    if grads.entropy is not None:
        mean_shifted = stats.exp_shifted_sum.unsqueeze(-1) / all_sum
        grad = grad + p * (mean_shifted - _bounded(shifted)) * grads.entropy.unsqueeze(-1)
    if grads.lse is not None:
        grad = grad + p * grads.lse.unsqueeze(-1)
    return _gradient_at_the_edges(_times(grad, slope), z, stats, labels, column, vocab_size, options)
