"""The mathematics of cross-entropy with probability targets, in plain PyTorch; see ``spec`` for legend and edges.

PyTorch's ``CrossEntropyLoss`` with class probabilities. With targets ``t`` as they are, class weights ``w`` (1 if there
are none), ``z`` and ``e`` as in ``spec``, and ``t'_i = w_i * ((1 - e) * t_i + e / V)``, ``T' = sum_i t'_i``:

    loss = -sum_i t'_i log p_i + z_loss * lse^2
         = T' * log(sum_exp) - target_shifted + z_loss * lse^2,    target_shifted = sum_i t'_i (z_i - row_max)
    dz_i = p_i * (T' + 2 * z_loss * lse) - t'_i

A column of ``-inf`` with ``t'_i = 0`` is excluded. With ``t'_i > 0`` the loss is ``inf``. Its gradient is 0.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from vocab_parallel_ce.spec import NEG_INF, PLAIN, LossOptions, _finite_or_zero, _raised_by


class TargetStats(NamedTuple):
    """What a set of columns contributes to each row, each ``[N]``."""

    row_max: Tensor  # largest z
    sum_exp: Tensor  # sum of exp(z - row_max)
    target_sum: Tensor  # sum of t'
    target_shifted: Tensor  # sum of t' * (z - row_max)


IDENTITY = (NEG_INF, 0.0, 0.0, 0.0)
N_STATISTICS = len(TargetStats._fields)  # that travel, in this order


def smoothed(targets: Tensor, vocab_size: int, options: LossOptions, class_weight: Tensor | None) -> Tensor:
    """Return ``t'`` of columns, from targets of the compute dtype and the columns' weights."""
    t = (1 - options.smoothing) * targets + options.smoothing / vocab_size
    return t if class_weight is None else t * class_weight.to(t.dtype)


def local_stats(z: Tensor, t: Tensor) -> TargetStats:
    """Statistics of columns with transformed logits ``z [N, C]`` and ``t' [N, C]``."""
    if z.shape[-1] == 0:
        return TargetStats(*(z.new_full(z.shape[:1], value) for value in IDENTITY))
    row_max = z.amax(dim=-1)
    shifted = z - _finite_or_zero(row_max).unsqueeze(-1)
    return TargetStats(row_max, shifted.exp().sum(dim=-1), t.sum(dim=-1), _times(t, shifted).sum(dim=-1))


def merge(a: TargetStats, b: TargetStats) -> TargetStats:
    """Statistics of the union of two disjoint sets of columns: associative and commutative."""
    row_max = torch.maximum(a.row_max, b.row_max)
    shift = _finite_or_zero(row_max)
    a_shift, b_shift = _raised_by(a.row_max, shift), _raised_by(b.row_max, shift)
    return TargetStats(
        row_max,
        a.sum_exp * (a.row_max - shift).exp() + b.sum_exp * (b.row_max - shift).exp(),
        a.target_sum + b.target_sum,
        (a.target_shifted + _times(a.target_sum, a_shift)) + (b.target_shifted + _times(b.target_sum, b_shift)),
    )


def loss(stats: TargetStats, options: LossOptions = PLAIN) -> Tensor:
    """``[N]`` unreduced loss, from the statistics of the whole vocabulary."""
    log_sum = stats.sum_exp.log()
    value = stats.target_sum * log_sum - stats.target_shifted
    return value + options.z_loss * (stats.row_max + log_sum) ** 2 if options.z_loss else value


def gradient(z: Tensor, slope: Tensor | float, t: Tensor, stats: TargetStats, options: LossOptions = PLAIN) -> Tensor:
    """``[N, C]`` derivative of each row's loss by its logits, which ``slope`` is that of ``z`` by."""
    p = (z - stats.row_max.unsqueeze(-1)).exp() / stats.sum_exp.unsqueeze(-1)
    p_factor = stats.target_sum
    if options.z_loss:
        p_factor = p_factor + 2 * options.z_loss * (stats.row_max + stats.sum_exp.log())
    grad = (p * p_factor.unsqueeze(-1) - t) * slope
    is_finite = (stats.sum_exp.isfinite() & (stats.row_max != NEG_INF)).unsqueeze(-1)
    return torch.where((z == NEG_INF) & is_finite, 0.0, grad)


def _times(target: Tensor, shifted: Tensor) -> Tensor:
    """``target * shifted``, 0 for a target of 0, also in an excluded column."""
    return torch.where(target == 0, 0.0, target * shifted)
