"""The mathematics of the loss, in plain PyTorch: the specification that every implementation meets.

Legend, used in every file: ``N`` token rows, ``V`` global vocabulary, ``C`` columns this rank owns,
``R`` ranks, ``K`` packed statistics per row. A rank owns the columns ``[start, start + C)`` of the
vocabulary.

One rank's knowledge of a row is a :class:`RowStats`; :func:`merge` combines what two ranks know.
``row_max`` and ``sum_exp`` are ``m`` and ``d`` of the online softmax (Milakov and Gimelshein,
arXiv:1805.02867). With

    lse  = row_max + log(sum_exp)                                       over the whole vocabulary
    p_i  = exp(x_i - row_max) / sum_exp
    e    = label_smoothing

the loss of a row with label ``y`` and its gradient are those of ``torch.nn.functional.cross_entropy``:

    loss = (1 - e) * (lse - x_y) + e * (lse - mean_i x_i)
    dx_i = p_i - (1 - e) * [i == y] - e / V

All functions compute in ``promote_types(logits.dtype, float32)``: fp32 for training dtypes, fp64
for an oracle.

Edges. A row whose label is ``ignore_index``: loss 0, gradient 0, whatever the row holds. A label
outside ``[0, V)``: NaN loss and NaN gradient. A column of ``-inf`` is excluded: gradient 0. NaN or
``+inf`` in a row: NaN loss.

Precision. Label smoothing needs the mean logit, from a sum in the compute dtype: the smoothed part of an
fp32 loss is exact to about 2**-24 of the mean logit's magnitude. Everything else is relative to row_max,
and loses nothing in rows far from 0.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

NEG_INF = float("-inf")
NAN = float("nan")


class RowStats(NamedTuple):
    """What a set of columns contributes to each row; ``(-inf, 0, -inf, 0)`` is the empty set's."""

    row_max: Tensor  # [N] largest logit
    sum_exp: Tensor  # [N] sum of exp(logit - row_max)
    target_logit: Tensor  # [N] the label's logit, -inf where the label's column is not in the set
    logit_sum: Tensor  # [N] sum of the logits


def local_stats(logits: Tensor, labels: Tensor, start: int) -> RowStats:
    """Statistics of this rank's columns.

    Args:
        logits: ``[N, C]`` floating point.
        labels: ``[N]`` global vocabulary ids.
        start: global id of column 0.
    """
    x = logits.to(torch.promote_types(logits.dtype, torch.float32))
    row_max = x.amax(dim=-1)
    sum_exp = (x - _finite_or_zero(row_max).unsqueeze(-1)).exp().sum(dim=-1)
    column = labels.long() - start
    owned = (column >= 0) & (column < x.shape[-1])
    picked = x.gather(-1, torch.where(owned, column, 0).unsqueeze(-1)).squeeze(-1)
    target_logit = torch.where(owned, picked, NEG_INF)
    return RowStats(row_max, sum_exp, target_logit, x.sum(dim=-1))


def merge(a: RowStats, b: RowStats) -> RowStats:
    """Statistics of the union of two disjoint sets of columns: associative and commutative."""
    row_max = torch.maximum(a.row_max, b.row_max)
    shift = _finite_or_zero(row_max)
    return RowStats(
        row_max,
        a.sum_exp * (a.row_max - shift).exp() + b.sum_exp * (b.row_max - shift).exp(),
        torch.maximum(a.target_logit, b.target_logit),
        a.logit_sum + b.logit_sum,
    )


def loss(
    stats: RowStats,
    labels: Tensor,
    vocab_size: int,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Tensor:
    """``[N]`` unreduced loss from the statistics of the whole vocabulary."""
    log_sum_exp = stats.sum_exp.log()
    # lse - x with the two large numbers subtracted first, so that rows far from 0 lose no digits.
    value = log_sum_exp + (stats.row_max - stats.target_logit)
    if label_smoothing > 0:
        uniform = log_sum_exp + (stats.row_max - stats.logit_sum / vocab_size)
        value = (1 - label_smoothing) * value + label_smoothing * uniform
    value = torch.where(_outside(labels, vocab_size), NAN, value)
    return torch.where(labels == ignore_index, 0.0, value)


def gradient(
    logits: Tensor,
    stats: RowStats,
    labels: Tensor,
    start: int,
    vocab_size: int,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Tensor:
    """``[N, C]`` derivative of each row's loss by its logits, in the compute dtype."""
    x = logits.to(torch.promote_types(logits.dtype, torch.float32))
    grad = (x - stats.row_max.unsqueeze(-1)).exp() / stats.sum_exp.unsqueeze(-1)
    column = torch.arange(start, start + x.shape[-1], device=x.device)
    is_target = column == labels.long().unsqueeze(-1)
    # p - 1 first: for a confident label it cancels without rounding, which p - (1 - e) does not.
    grad = torch.where(is_target, grad - 1 + label_smoothing, grad) - label_smoothing / vocab_size
    some_column_is_finite = (stats.row_max != NEG_INF).unsqueeze(-1)
    grad = torch.where((x == NEG_INF) & some_column_is_finite, 0.0, grad)
    grad = torch.where(_outside(labels, vocab_size).unsqueeze(-1), NAN, grad)
    return torch.where((labels == ignore_index).unsqueeze(-1), 0.0, grad)


def _finite_or_zero(row_max: Tensor) -> Tensor:
    """``row_max``, 0 where it is -inf: ``exp(-inf - 0)`` is the 0 that ``exp(-inf - -inf)`` is not."""
    return torch.where(row_max == NEG_INF, 0.0, row_max)


def _outside(labels: Tensor, vocab_size: int) -> Tensor:
    return (labels < 0) | (labels >= vocab_size)
