"""The mathematics of cross-entropy with probability targets, in plain PyTorch; see ``spec`` for legend and edges.

PyTorch's ``CrossEntropyLoss`` with class probabilities. With targets ``t`` as they are, class weights ``w`` (1 if there
are none), ``z`` and ``e`` as in ``spec``, and ``t'_i = w_i * ((1 - e) * t_i + e / V)``, ``T' = sum_i t'_i``:

    loss = -sum_i t'_i log p_i + z_loss * lse^2
         = T' * log(sum_exp) - target_shifted + z_loss * lse^2,    target_shifted = sum_i t'_i (z_i - row_max)
    dz_i = p_i * (T' + 2 * z_loss * lse) - t'_i

A column of ``-inf`` with ``t'_i = 0`` is excluded. With ``t'_i > 0`` the loss is ``inf``. Its gradient is 0.
"""

from __future__ import annotations

from types import ModuleType
from typing import Annotated, NamedTuple

import torch
from torch import Tensor

from vocab_parallel_ce import reference
from vocab_parallel_ce.losses.base import Launchers, Loss, bound
from vocab_parallel_ce.options import Settings, loss_options
from vocab_parallel_ce.shard import VocabShard
from vocab_parallel_ce.spec import NEG_INF, LossOptions, _finite_or_zero, _raised_by, transformed
from vocab_parallel_ce.targets import Role

# The settings that it has terms for; any other must have its default.
OF_SOFT_LABELS = ("label_smoothing", "z_loss", "softcap", "logit_scale", "reduction", "gradient", "impl", "vocab_size")


class SoftLabels(NamedTuple):
    """The targets: a probability of each row and column."""

    probs: Annotated[Tensor, Role("logits", ("rows", "columns"), "labels", checks_memory=True, same_columns=True)]
    class_weight: Annotated[Tensor | None, Role("numbers", ("columns",))] = None


class TargetStats(NamedTuple):
    """What a set of columns contributes to each row, each ``[N]``."""

    row_max: Tensor  # largest z
    sum_exp: Tensor  # sum of exp(z - row_max)
    target_sum: Tensor  # sum of t'
    target_shifted: Tensor  # sum of t' * (z - row_max)


IDENTITY = (NEG_INF, 0.0, 0.0, 0.0)


class SoftLabelLoss(Loss):
    """Cross-entropy with a probability per column."""

    Targets = SoftLabels
    Stats = TargetStats

    def options(self, settings: Settings, vocab_size: int | None, *, class_weight: bool) -> LossOptions:
        for name, default in Settings._field_defaults.items():
            value = getattr(settings, name)
            if name not in OF_SOFT_LABELS and value != default and (name, value) != ("check_labels", False):
                raise ValueError(f"{name}: has no use with probabilities as labels, got {value!r}; leave it out")
        return loss_options(settings, vocab_size)

    def launchers(self, options: LossOptions, shard: VocabShard, kernels: ModuleType | None) -> Launchers:
        if kernels is None:
            return reference.launchers(self, options, shard)
        return bound(kernels, kernels.KernelLoss(kernels.soft_labels.ALGEBRA, shard, options), self.exchanges(options))

    def exchanges(self, options: LossOptions) -> tuple[tuple[str, ...], ...]:
        return (TargetStats._fields,)

    def tile(self, x: Tensor, targets: SoftLabels, shard: VocabShard, options: LossOptions) -> TargetStats:
        z, _, t = _columns(x, targets, shard, options)
        if z.shape[-1] == 0:
            return TargetStats(*(z.new_full(z.shape[:1], value) for value in IDENTITY))
        row_max = z.amax(dim=-1)
        shifted = z - _finite_or_zero(row_max).unsqueeze(-1)
        return TargetStats(row_max, shifted.exp().sum(dim=-1), t.sum(dim=-1), _times(t, shifted).sum(dim=-1))

    def merge(self, a: TargetStats, b: TargetStats, options: LossOptions) -> TargetStats:
        row_max = torch.maximum(a.row_max, b.row_max)
        shift = _finite_or_zero(row_max)
        a_shift, b_shift = _raised_by(a.row_max, shift), _raised_by(b.row_max, shift)
        return TargetStats(
            row_max,
            a.sum_exp * (a.row_max - shift).exp() + b.sum_exp * (b.row_max - shift).exp(),
            a.target_sum + b.target_sum,
            (a.target_shifted + _times(a.target_sum, a_shift)) + (b.target_shifted + _times(b.target_sum, b_shift)),
        )

    def output(
        self, name: str, stats: TargetStats, second: None, targets: SoftLabels, shard: VocabShard, options: LossOptions
    ) -> Tensor:
        log_sum = stats.sum_exp.log()
        value = stats.target_sum * log_sum - stats.target_shifted
        return value + options.z_loss * (stats.row_max + log_sum) ** 2 if options.z_loss else value

    def gradient(
        self, x: Tensor, targets: SoftLabels, stats: TargetStats, second: None, shard: VocabShard, options: LossOptions
    ) -> Tensor:
        z, slope, t = _columns(x, targets, shard, options)
        p = (z - stats.row_max.unsqueeze(-1)).exp() / stats.sum_exp.unsqueeze(-1)
        p_factor = stats.target_sum
        if options.z_loss:
            p_factor = p_factor + 2 * options.z_loss * (stats.row_max + stats.sum_exp.log())
        grad = (p * p_factor.unsqueeze(-1) - t) * slope
        is_finite = (stats.sum_exp.isfinite() & (stats.row_max != NEG_INF)).unsqueeze(-1)
        return torch.where((z == NEG_INF) & is_finite, 0.0, grad)


SOFT_LABELS = SoftLabelLoss()


def _columns(
    x: Tensor, targets: SoftLabels, shard: VocabShard, options: LossOptions
) -> tuple[Tensor, Tensor | float, Tensor]:
    """Return ``z``, its slope and ``t'`` of columns."""
    z, slope = transformed(x, options)
    probs = targets.probs.reshape(-1, targets.probs.shape[-1])[:, : x.shape[-1]].to(z.dtype)
    t = (1 - options.smoothing) * probs + options.smoothing / shard.vocab_size
    return z, slope, t if targets.class_weight is None else t * targets.class_weight.to(t.dtype)


def _times(target: Tensor, shifted: Tensor) -> Tensor:
    """``target * shifted``, 0 for a target of 0, also in an excluded column."""
    return torch.where(target == 0, 0.0, target * shifted)
