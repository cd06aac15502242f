"""Cross-entropy with labels: what stands alongside the logits, and its launchers.

``spec`` has the mathematics, except the gradient of the outputs alongside the loss, which is here.
"""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vocab_parallel_ce import checks, reference, spec
from vocab_parallel_ce.beside import at_rows, temperature_of_rows, weights_of_columns
from vocab_parallel_ce.blocks import ONE_PASS, ONE_PASS_SMOOTHING, OnePassConfig, one_pass_config
from vocab_parallel_ce.layout import compute_dtype, flat
from vocab_parallel_ce.losses.base import Launchers, Loss
from vocab_parallel_ce.options import Settings, loss_options
from vocab_parallel_ce.shard import VocabShard
from vocab_parallel_ce.spec import (
    NEG_INF,
    PLAIN,
    GradOutputs,
    LossOptions,
    RowStats,
    TokenOutputs,
    _bounded,
    _gradient_at_the_edges,
    _times,
    sum_exp,
    transformed,
)


class Labels(NamedTuple):
    """What stands alongside the logits."""

    labels: Tensor  # [N], contiguous
    class_weight: Tensor | None = None  # of this rank's columns without padding
    temperature: Tensor | None = None  # [N]; None: that of the options
    threshold: Tensor | None = None  # [N], filled by ``top``: smaller logits are excluded

    def at(self, rows: slice) -> Labels:
        """Return what stands alongside these rows."""
        of_rows = [None if values is None else values[rows] for values in self[2:]]
        return Labels(self.labels[rows], self.class_weight, *of_rows)


class LabelLoss(Loss):
    """Cross-entropy with labels, and the outputs alongside it."""

    Beside = BesideHead = Labels
    Stats = RowStats
    counts = True

    def check(self, given: Labels, logits: Tensor, settings: Settings) -> None:
        checks.check_labels(given.labels, logits)
        checks.check_rows(given.labels, logits)
        if given.class_weight is not None or given.temperature is not None:
            checks.check_no_transforms(given.class_weight, given.temperature)

    def beside(
        self, given: Labels, logits: Tensor, settings: Settings, shard: VocabShard, rank: int, n_ranks: int
    ) -> Labels:
        labels, class_weight, temperature, _ = given
        rows = flat(labels)
        threshold = _thresholds(settings, logits, rows)
        if settings.check_labels:
            checks.check_label_range(labels, shard.vocab_size, settings.ignore_index)
        if class_weight is None and temperature is None and threshold is None:
            return given if rows is labels else Labels(rows)
        if class_weight is not None:
            class_weight = weights_of_columns(class_weight, shard, logits)
        if temperature is not None:
            temperature = temperature_of_rows(temperature, labels, logits)
        return Labels(rows, class_weight, temperature, threshold)

    def beside_head(
        self, given: Labels, hidden: Tensor, settings: Settings, plan: Any, order: Any, labels: Tensor
    ) -> Labels:
        weights, temperature = given.class_weight, given.temperature
        weights = None if weights is None else weights_of_columns(weights, plan.shard, hidden)
        temperature = temperature_of_rows(temperature, given.labels, hidden)
        if temperature is not None and order is not None:
            temperature = order.to_rows(temperature, 1.0)
        return Labels(labels, weights, temperature, _thresholds(settings, hidden, labels))

    def options(self, settings: Settings, vocab_size: int | None, *, class_weight: bool) -> LossOptions:
        return loss_options(settings, vocab_size, class_weight=class_weight)

    def outputs(self, options: LossOptions) -> dict[str, bool]:
        asked = zip(TokenOutputs._fields, options.outputs, options.differentiable, strict=True)
        return {name: has_gradient for name, is_asked, has_gradient in asked if is_asked and name != "loss"}

    def beyond_one_pass(self, options: LossOptions) -> tuple[str, ...]:
        # It has no statistics for these.
        lacks = [name for name in ("entropy", "sum_sq_probs", "mean_logit", "predictions") if getattr(options, name)]
        # These would need more registers than a program of wide rows has.
        if options.softcap is not None:
            lacks.append("softcap")
        if options.smoothing and options.class_weight:
            lacks.append("label_smoothing with class_weight")
        return tuple(lacks)

    def one_pass_config(self, options: LossOptions, row_bytes: int) -> OnePassConfig | None:
        return one_pass_config(row_bytes, ONE_PASS_SMOOTHING if options.smoothing else ONE_PASS)

    def launchers(self, options: LossOptions, shard: VocabShard, kernels: ModuleType | None) -> Launchers:
        if kernels is None:
            above = functools.partial(reference.sums_above, shard=shard, options=options)
            return reference.launchers(self, options, shard)._replace(sums_above=above)
        own = {"shard": shard, "options": options}
        return Launchers(
            functools.partial(kernels.online_softmax, **own),
            functools.partial(kernels.token_outputs, **own),
            functools.partial(kernels.cross_entropy, **own),
            kernels.element_mul,
            widths=(len(options.statistics),),
            sums_above=functools.partial(kernels.sums_above, **own),
        )

    def saved(self, beside: Labels, options: LossOptions) -> tuple[Tensor | None, ...]:
        labels, weights, temperature, threshold = beside
        if weights is None and temperature is None and threshold is None:
            return (labels,)
        return (labels, weights if options.smoothing else None, temperature, threshold)

    def check_constants(self, given: Labels) -> None:
        if given.class_weight is not None:
            checks.check_class_weight(given.class_weight)
        if given.temperature is not None:
            checks.check_temperature(given.temperature, given.labels)

    def compared(self, given: Labels) -> dict[str, Any]:
        options = {"class_weight": "None" if given.class_weight is None else "a tensor"}
        values = {} if given.temperature is None else {"temperature": given.temperature}
        return {"labels": given.labels, "options": options, "values": values}

    def exchanges(self, options: LossOptions) -> tuple[tuple[str, ...], ...]:
        return (options.statistics,)

    def tile(self, x: Tensor, beside: Labels, shard: VocabShard, options: LossOptions) -> RowStats:
        of_rows, names = at_rows(options, *beside[2:]), options.statistics
        return spec.local_stats(x, beside.labels, shard.start, shard.vocab_size, of_rows, names, beside.class_weight)

    def merge(self, a: RowStats, b: RowStats, options: LossOptions) -> RowStats:
        return spec.merge(a, b)

    def output(
        self, name: str, stats: RowStats, second: None, beside: Labels, shard: VocabShard, options: LossOptions
    ) -> Tensor:
        if name == "predictions":
            return spec.predictions(stats, beside.labels, options)
        value: Tensor = getattr(spec, name)(stats, beside.labels, shard.vocab_size, options)
        return value

    def gradient(
        self, x: Tensor, beside: Labels, stats: RowStats, second: None, shard: VocabShard, options: LossOptions
    ) -> Tensor:
        options = at_rows(options, *beside[2:])
        return spec.gradient(x, stats, beside.labels, shard.start, shard.vocab_size, options, beside.class_weight)

    def outputs_gradient(
        self, x: Tensor, beside: Labels, stats: RowStats, grads: GradOutputs, shard: VocabShard, options: LossOptions
    ) -> Tensor:
        options = at_rows(options, *beside[2:])
        return outputs_gradient(x, stats, beside.labels, shard.start, shard.vocab_size, grads, options)

    def ignored(self, beside: Labels, options: LossOptions) -> Tensor:
        return spec.is_ignored(beside.labels, options.ignore_index)


LABELS = LabelLoss()


def _thresholds(settings: Settings, like: Tensor, labels: Tensor) -> Tensor | None:
    """Return memory for what ``top`` finds, if it is asked for."""
    if settings.sample_k is None and settings.sample_p == 1:
        return None
    return like.new_full((labels.shape[0],), NEG_INF, dtype=compute_dtype(like.dtype))


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
    if grads.sum_sq_probs is not None:
        mean_p = stats.sum_exp_sq.unsqueeze(-1) / all_sum**2
        grad = grad + 2 * p * (p - mean_p) * grads.sum_sq_probs.unsqueeze(-1)
    if grads.mean_logit is not None:
        grad = grad + grads.mean_logit.unsqueeze(-1) / vocab_size
    return _gradient_at_the_edges(_times(grad, slope), z, stats, labels, column, vocab_size, options)
