"""The mathematics of cross-entropy with probability targets, in plain PyTorch; see ``spec`` for legend and edges.

PyTorch's ``CrossEntropyLoss`` with class probabilities. With targets ``t`` as they are, ``T = sum_i t_i``, ``z`` and
``e`` as in ``spec``, and ``t'_i = (1 - e) * t_i + e / V``, ``T' = (1 - e) * T + e``:

    loss = -sum_i t'_i log p_i + z_loss * lse^2
         = (1 - e) * (T * log(sum_exp) - target_shifted) + e * (log(sum_exp) - shifted_sum / V) + z_loss * lse^2
    dz_i = p_i * (T' + 2 * z_loss * lse) - t'_i,    target_shifted = sum_i t_i (z_i - row_max)

A column of ``-inf`` with ``t_i = 0`` is excluded. With ``t_i > 0`` the loss is ``inf``. Its gradient is 0.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from vocab_parallel_ce.spec import NEG_INF, PLAIN, LossOptions, _finite_or_zero, _raised_by, transformed


class TargetStats(NamedTuple):
    """What a set of columns contributes to each row, each ``[N]``."""

    row_max: Tensor  # largest z
    sum_exp: Tensor  # sum of exp(z - row_max)
    target_sum: Tensor  # sum of t
    target_shifted: Tensor  # sum of t * (z - row_max)
    shifted_sum: Tensor  # sum of z - row_max
    n_columns: Tensor


IDENTITY = (NEG_INF, 0.0, 0.0, 0.0, 0.0, 0.0)


def statistics(options: LossOptions) -> tuple[str, ...]:
    """Names of the statistics that travel, in the order in which they are packed."""
    return TargetStats._fields if options.smoothing else TargetStats._fields[:4]


def local_stats(
    logits: Tensor, targets: Tensor, start: int, vocab_size: int, options: LossOptions = PLAIN
) -> TargetStats:
    """Statistics of the columns of ``logits [N, C]`` from global id ``start`` on, with ``targets [N, C]``."""
    n_valid = min(max(vocab_size - start, 0), logits.shape[-1])
    z, _ = transformed(logits[:, :n_valid], options)
    t = targets[:, :n_valid].to(z.dtype)
    if n_valid == 0:
        return TargetStats(*(z.new_full(z.shape[:1], value) for value in IDENTITY))
    row_max = z.amax(dim=-1)
    shifted = z - _finite_or_zero(row_max).unsqueeze(-1)
    return TargetStats(
        row_max,
        shifted.exp().sum(dim=-1),
        t.sum(dim=-1),
        _times(t, shifted).sum(dim=-1),
        shifted.sum(dim=-1),
        torch.full_like(row_max, n_valid),
    )


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
        (a.shifted_sum + a.n_columns * a_shift) + (b.shifted_sum + b.n_columns * b_shift),
        a.n_columns + b.n_columns,
    )


def loss(stats: TargetStats, vocab_size: int, options: LossOptions = PLAIN) -> Tensor:
    """``[N]`` unreduced loss, from the statistics of the whole vocabulary."""
    e, log_sum = options.smoothing, stats.sum_exp.log()
    value = stats.target_sum * log_sum - stats.target_shifted
    if e:
        value = (1 - e) * value + e * (log_sum - stats.shifted_sum / vocab_size)
    if options.z_loss:
        value = value + options.z_loss * (stats.row_max + log_sum) ** 2
    return value


def gradient(
    logits: Tensor, targets: Tensor, stats: TargetStats, start: int, vocab_size: int, options: LossOptions = PLAIN
) -> Tensor:
    """``[N, C]`` derivative of each row's loss by its logits, in the compute dtype; 0 in padded columns."""
    e, n_valid = options.smoothing, min(max(vocab_size - start, 0), logits.shape[-1])
    z, slope = transformed(logits[:, :n_valid], options)
    t = targets[:, :n_valid].to(z.dtype)
    p = (z - stats.row_max.unsqueeze(-1)).exp() / stats.sum_exp.unsqueeze(-1)
    grad = p * ((1 - e) * stats.target_sum + e).unsqueeze(-1) - ((1 - e) * t + e / vocab_size)
    if options.z_loss:
        grad = grad + p * (2 * options.z_loss * (stats.row_max + stats.sum_exp.log())).unsqueeze(-1)
    grad = grad * slope
    is_finite = (stats.sum_exp.isfinite() & (stats.row_max != NEG_INF)).unsqueeze(-1)
    grad = torch.where((z == NEG_INF) & is_finite, 0.0, grad)
    return torch.nn.functional.pad(grad, (0, logits.shape[-1] - n_valid))


def _times(target: Tensor, shifted: Tensor) -> Tensor:
    """``target * shifted``, 0 for a target of 0, also in an excluded column."""
    return torch.where(target == 0, 0.0, target * shifted)
