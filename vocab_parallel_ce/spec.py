"""The mathematics of the loss, in plain PyTorch: the specification that every implementation meets.

Legend, used in every file: ``N`` token rows, ``V`` global vocabulary, ``C`` columns this rank owns,
``R`` ranks, ``K`` packed statistics per row. A rank owns the columns ``[start, start + C)`` of the
vocabulary; those at ``V`` and beyond are padding and take no part.

One rank's knowledge of a row is a :class:`RowStats`; :func:`merge` combines what two ranks know. ``row_max`` and
``sum_exp`` are ``m`` and ``d`` of the online softmax (Milakov and Gimelshein, arXiv:1805.02867). With

    u    = logit_scale * x
    z    = softcap * tanh(u / softcap), or u without softcap; with a temperature t of the row, that divided by t
    sum_exp = others_sum + exp(z_y - row_max)                           over the whole vocabulary
    lse  = row_max + log(sum_exp)
    p_i  = exp(z_i - row_max) / sum_exp
    e    = smoothing

the loss of a row with label ``y``, its derivative by ``z``, and the same of the entropy are

    loss  = (1 - e) * (lse - z_y) + e * (lse - mean_i z_i) + z_loss * lse^2
    dz_i  = p_i * (1 + 2 * z_loss * lse) - (1 - e) * [i == y] - e / V
    H     = -sum_i p_i log p_i = log(sum_exp) - mean_shifted,  mean_shifted = sum_i p_i (z_i - row_max)
    dH/dz_i = p_i * (mean_shifted - (z_i - row_max))

Of the other outputs ``lse`` has a gradient, ``sum_sq_probs`` and ``mean_logit`` have none:

    dlse/dz_i = p_i
    sum_sq_probs = sum_i p_i^2 = sum_exp_sq / sum_exp^2
    mean_logit = mean_i z_i = row_max + shifted_sum / V

and ``dx_i = dz_i * (1 - (z_i / softcap)^2) * logit_scale``, with a temperature ``(t * z_i / softcap)^2`` and ``/ t``.

With class weights ``w``, as in PyTorch's ``CrossEntropyLoss``, and ``W = sum_i w_i``

    loss  = w_y * ((1 - e) * (lse - z_y) + z_loss * lse^2) + e / V * sum_i w_i (lse - z_i)
    dz_i  = p_i * (w_y * (1 - e + 2 * z_loss * lse) + e / V * W) - (1 - e) * w_y * [i == y] - e / V * w_i

and the mean is divided by the sum of ``w_y``. ``w_y`` is communicated. ``shifted_sum`` and ``n_columns`` are then
sums with weights. A weight of 0 times an infinite logit is 0.

The label's column is not in ``others_sum``, which is communicated instead of ``sum_exp``. A confident label's own
term is 1. A sum that holds it loses the others' digits, and ``1 - p_y = others_sum / sum_exp`` is all of the
gradient.

Edges. A row whose label is ``ignore_index``: all outputs and the gradient 0, whatever the row holds. A label outside
``[0, V)``, NaN or ``+inf`` in a row: NaN outputs and gradient. A column of ``-inf`` in any other row is
excluded, also with softcap: gradient 0. A padded column: gradient 0 in every row. A finite logit stays finite under
softcap, however large. Without softcap, one that ``logit_scale`` takes beyond the dtype counts as infinite.

All functions compute in fp32, for an oracle of fp64 logits in fp64. Everything is relative to ``row_max``, and loses
nothing in rows far from 0.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

NEG_INF = float("-inf")
INF = float("inf")
NAN = float("nan")


class RowStats(NamedTuple):
    """What a set of columns contributes to each row, each ``[N]``. All but ``others_sum`` count the label's column."""

    row_max: Tensor  # largest z
    others_sum: Tensor  # sum of exp(z - row_max) over the columns that are not the label's
    label_logit: Tensor  # the label's z, -inf if the label's column is not in the set
    shifted_sum: Tensor  # sum of z - row_max, of w_i * (z_i - row_max) with class weights
    n_columns: Tensor  # the sum of w_i with class weights
    exp_shifted_sum: Tensor  # sum of exp(z - row_max) * (z - row_max)
    argmax: Tensor  # global id of the first column with row_max, inf if row_max is not finite
    label_weight: Tensor  # w_y, 0 if the label's column is not in the set
    sum_exp_sq: Tensor  # sum of exp(2 * (z - row_max))


# The empty set's. Where row_max is not finite, 0 takes its place in differences.
IDENTITY = (NEG_INF, 0.0, NEG_INF, 0.0, 0.0, 0.0, INF, 0.0, 0.0)


class LossOptions(NamedTuple):
    """What is computed of a row; the flags ask for outputs and statistics."""

    ignore_index: int = -100
    smoothing: float = 0.0  # e of the formulas
    z_loss: float = 0.0
    logit_scale: float = 1.0  # positive
    softcap: float | None = None  # positive
    entropy: bool = False
    predictions: bool = False
    class_weight: bool = False  # whether there are class weights, a tensor that is passed on its own
    lse: bool = False
    sum_sq_probs: bool = False
    mean_logit: bool = False
    negated: bool = False  # log-probabilities: 0 - loss
    # Of rows, [N, 1], in plain PyTorch; never in a plan.
    temperature: Any = None  # t
    threshold: Any = None  # smaller logits are excluded, as if they were -inf

    @property
    def statistics(self) -> tuple[str, ...]:
        """Names of the ``K`` statistics that are communicated, in the order in which they are packed."""
        smoothed = ("shifted_sum", "n_columns") if self.smoothing or self.mean_logit else ()
        entropy = ("exp_shifted_sum",) if self.entropy else ()
        predictions = ("argmax",) if self.predictions else ()
        weighted = ("label_weight",) if self.class_weight else ()
        sum_sq_probs = ("sum_exp_sq",) if self.sum_sq_probs else ()
        names = (*smoothed, *entropy, *predictions, *weighted, *sum_sq_probs)
        return ("row_max", "others_sum", "label_logit", *names)


PLAIN = LossOptions()


class TokenOutputs(NamedTuple):
    """Per-token outputs, or buffers to fill; None if not requested. Those with a gradient come first."""

    loss: Tensor  # [...] fp32
    entropy: Tensor | None = None  # [...] fp32
    lse: Tensor | None = None  # [...] fp32
    divergence: Tensor | None = None  # [...] fp32, from a teacher
    sum_sq_probs: Tensor | None = None  # [...] fp32
    mean_logit: Tensor | None = None  # [...] fp32
    predictions: Tensor | None = None  # [...] int64


class GradOutputs(NamedTuple):
    """What multiplies the gradient of each output, one number per row, in the order of the outputs.

    None is 0; to launchers, a None loss is 1.
    """

    loss: Any = None  # a Tensor; in kernels a pointer or a stride
    entropy: Any = None
    lse: Any = None
    divergence: Any = None


def local_stats(
    logits: Tensor,
    labels: Tensor,
    start: int,
    vocab_size: int,
    options: LossOptions = PLAIN,
    wanted: tuple[str, ...] = RowStats._fields,
    class_weight: Tensor | None = None,
) -> RowStats:
    """Statistics of the columns of ``logits [N, C]`` from global id ``start`` on, with ``labels [N]``.

    Those that ``wanted`` does not name may be the empty set's. ``class_weight`` has the columns' weights, without those
    of padding.
    """
    z, _ = transformed(logits[:, : max(vocab_size - start, 0)], options)
    n_columns = z.shape[-1]
    if n_columns == 0:
        return RowStats(*(z.new_full(labels.shape, value) for value in IDENTITY))
    row_max = z.amax(dim=-1)
    column = labels.long() - start
    owned = ((column >= 0) & (column < n_columns)).unsqueeze(-1)
    at_label = torch.where(owned, column.unsqueeze(-1), 0)
    label_z = z.gather(-1, at_label)
    shift = _finite_or_zero(row_max).unsqueeze(-1)
    shifted, label_shifted = z - shift, label_z - shift
    shifted_sum = exp_shifted_sum = sum_exp_sq = label_weight = torch.zeros_like(row_max)
    argmax, total = torch.full_like(row_max, INF), torch.full_like(row_max, n_columns)
    if class_weight is not None:
        class_weight = class_weight.to(z.dtype)
        label_weight = label_weights(class_weight, labels, start, vocab_size, options)
        total = class_weight.sum().expand_as(row_max)
    if "shifted_sum" in wanted:
        shifted_sum = (shifted if class_weight is None else _weighted(shifted, class_weight)).sum(dim=-1)
    shifted.scatter_(-1, at_label, torch.where(owned, NEG_INF, label_shifted))
    exp_shifted = shifted.exp()  # of the other columns: 0 at the label's
    if "exp_shifted_sum" in wanted:
        label_term = torch.where(owned, label_shifted.exp() * _bounded(label_shifted), 0.0)
        exp_shifted_sum = (exp_shifted * _bounded(shifted)).sum(dim=-1) + label_term.squeeze(-1)
    if "sum_exp_sq" in wanted:
        label_term = torch.where(owned, label_shifted.exp() ** 2, 0.0)
        sum_exp_sq = (exp_shifted**2).sum(dim=-1) + label_term.squeeze(-1)
    if "argmax" in wanted:
        ids = torch.arange(start, start + n_columns, device=z.device, dtype=z.dtype)
        is_largest = (z == row_max.unsqueeze(-1)) & z.isfinite()
        argmax = torch.where(is_largest, ids, INF).amin(dim=-1)
    others_sum, label_logit = exp_shifted.sum(dim=-1), torch.where(owned, label_z, NEG_INF).squeeze(-1)
    others = (shifted_sum, total, exp_shifted_sum, argmax, label_weight, sum_exp_sq)
    return RowStats(row_max, others_sum, label_logit, *others)


def merge(a: RowStats, b: RowStats) -> RowStats:
    """Statistics of the union of two disjoint sets of columns: associative and commutative."""
    row_max = torch.maximum(a.row_max, b.row_max)
    shift = _finite_or_zero(row_max)
    a_shift, b_shift = _raised_by(a.row_max, shift), _raised_by(b.row_max, shift)
    a_scale, b_scale = (a.row_max - shift).exp(), (b.row_max - shift).exp()
    return RowStats(
        row_max,
        a.others_sum * a_scale + b.others_sum * b_scale,
        torch.maximum(a.label_logit, b.label_logit),
        (a.shifted_sum + a.n_columns * a_shift) + (b.shifted_sum + b.n_columns * b_shift),
        a.n_columns + b.n_columns,
        (a.exp_shifted_sum + sum_exp(a) * _bounded(a_shift)) * a_scale
        + (b.exp_shifted_sum + sum_exp(b) * _bounded(b_shift)) * b_scale,
        torch.minimum(*(torch.where(stats.row_max == row_max, stats.argmax, INF) for stats in (a, b))),
        a.label_weight + b.label_weight,
        a.sum_exp_sq * a_scale**2 + b.sum_exp_sq * b_scale**2,
    )


def sum_exp(stats: RowStats) -> Tensor:
    """``[N]`` sum over all columns; NaN in rows with NaN or +inf."""
    return stats.others_sum + _label_exp(stats)


def log_sum_exp(stats: RowStats) -> Tensor:
    """``[N]`` log of :func:`sum_exp`: the digits of ``others_sum`` survive if the label has ``row_max``."""
    return (stats.others_sum + (_label_exp(stats) - 1)).log1p()


def loss(stats: RowStats, labels: Tensor, vocab_size: int, options: LossOptions = PLAIN) -> Tensor:
    """``[N]`` unreduced loss, from the statistics of the whole vocabulary as all that follows."""
    e = options.smoothing
    log_sum = log_sum_exp(stats)
    # lse - z with the two large numbers subtracted first, so that rows far from 0 lose no digits.
    value = log_sum + (stats.row_max - stats.label_logit)
    if options.class_weight:
        value = _weighted(value, stats.label_weight)
    if e and options.class_weight:
        value = (1 - e) * value + e / vocab_size * (stats.n_columns * log_sum - stats.shifted_sum)
    elif e:
        value = (1 - e) * value + e * (log_sum - stats.shifted_sum / vocab_size)
    if options.z_loss and options.class_weight:
        value = value + stats.label_weight * (options.z_loss * (stats.row_max + log_sum) ** 2)
    elif options.z_loss:
        value = value + options.z_loss * (stats.row_max + log_sum) ** 2
    value = _at_the_edges(value, labels, vocab_size, options)
    return 0.0 - value if options.negated else value  # not -value: an ignored row has no -0


def entropy(stats: RowStats, labels: Tensor, vocab_size: int, options: LossOptions = PLAIN) -> Tensor:
    """``[N]`` entropy of the softmax, in nats."""
    value = log_sum_exp(stats) - stats.exp_shifted_sum / sum_exp(stats)
    return _at_the_edges(value, labels, vocab_size, options)


def lse(stats: RowStats, labels: Tensor, vocab_size: int, options: LossOptions = PLAIN) -> Tensor:
    """``[N]`` log-sum-exp of z."""
    return _at_the_edges(stats.row_max + log_sum_exp(stats), labels, vocab_size, options)


def sum_sq_probs(stats: RowStats, labels: Tensor, vocab_size: int, options: LossOptions = PLAIN) -> Tensor:
    """``[N]`` sum of the squared probabilities."""
    return _at_the_edges(stats.sum_exp_sq / sum_exp(stats) ** 2, labels, vocab_size, options)


def mean_logit(stats: RowStats, labels: Tensor, vocab_size: int, options: LossOptions = PLAIN) -> Tensor:
    """``[N]`` mean of z over the vocabulary; -inf if a column is excluded."""
    return _at_the_edges(stats.row_max + stats.shifted_sum / vocab_size, labels, vocab_size, options)


def predictions(stats: RowStats, labels: Tensor, options: LossOptions = PLAIN) -> Tensor:
    """``[N]`` int64 ``argmax``; -1 in ignored rows and where no z is finite."""
    known = ~is_ignored(labels, options.ignore_index) & sum_exp(stats).isfinite() & stats.argmax.isfinite()
    return torch.where(known, stats.argmax, -1.0).long()


def gradient(
    logits: Tensor,
    stats: RowStats,
    labels: Tensor,
    start: int,
    vocab_size: int,
    options: LossOptions = PLAIN,
    class_weight: Tensor | None = None,
) -> Tensor:
    """``[N, C]`` derivative of each row's loss by its logits, in the compute dtype.

    ``class_weight`` is that of :func:`local_stats`; only smoothing needs it.
    """
    e = options.smoothing
    z, slope = transformed(logits, options)
    column = torch.arange(start, start + z.shape[-1], device=z.device)
    all_sum = sum_exp(stats)
    p = (z - stats.row_max.unsqueeze(-1)).exp() / all_sum.unsqueeze(-1)
    # p_y - 1, which loses the digits of a confident label's 1 - p_y if p_y is rounded first.
    at_label = -(stats.others_sum / all_sum).unsqueeze(-1)
    is_label = column == labels.long().unsqueeze(-1)
    if not options.class_weight:
        if e:  # not at_label + e: if p_y is small and e near 1, that cancels
            at_label = (1 - e) * at_label + e * p
        grad = torch.where(is_label, at_label, p) - e / vocab_size
    else:
        weight = stats.label_weight.unsqueeze(-1)
        grad = (1 - e) * weight * torch.where(is_label, at_label, p)
        if e:
            assert class_weight is not None
            weights = torch.nn.functional.pad(class_weight.to(z.dtype), (0, z.shape[-1] - class_weight.shape[0]))
            grad = grad + e / vocab_size * (stats.n_columns.unsqueeze(-1) * p - weights)
        p = p * weight
    if options.z_loss:
        grad = grad + p * (2 * options.z_loss * (stats.row_max + log_sum_exp(stats))).unsqueeze(-1)
    grad = _gradient_at_the_edges(_times(grad, slope), z, stats, labels, column, vocab_size, options)
    return -grad if options.negated else grad


def transformed(logits: Tensor, options: LossOptions) -> tuple[Tensor, Tensor | float]:
    """``(z, dz/dx)`` in the compute dtype. Softcap leaves infinite logits infinite, and bounds all others."""
    x = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if options.threshold is not None:
        x = torch.where(x < options.threshold, NEG_INF, x)
    scale, cap, t = options.logit_scale, options.softcap, options.temperature
    if cap is None:
        slope = scale if t is None else scale / t
        return (x if t is None and scale == 1 else x * slope), slope
    # A product with a scale above 1 might overflow before the cap bounds it. The divisor may not become 0.
    u = x * scale if scale < 1 else x
    capped = (u / max(cap / max(scale, 1.0), torch.finfo(x.dtype).tiny)).tanh()
    scale, cap = (scale, cap) if t is None else (scale / t, cap / t)
    return torch.where(x.isinf(), x, cap * capped), scale * (1 - capped**2)


def is_ignored(labels: Tensor, ignore_index: int) -> Tensor:
    """``[N]`` bool. Compared in int64: torch wraps a number that does not fit in the labels' dtype."""
    return labels.long() == ignore_index


def label_weights(
    class_weight: Tensor, labels: Tensor, start: int, vocab_size: int, options: LossOptions = PLAIN
) -> Tensor:
    """``[N]`` weight of each label among the columns from ``start`` on, 0 for others and for ``ignore_index``.

    That of a label outside the vocabulary is NaN, so that it cannot vanish from a mean.
    """
    n_columns, column = class_weight.shape[0], labels.long() - start
    owned = (column >= 0) & (column < n_columns)
    weights = torch.nn.functional.pad(class_weight, (0, 1))[torch.where(owned, column, n_columns)]
    return _at_the_edges(weights, labels, vocab_size, options)


def _weighted(value: Tensor, weight: Tensor) -> Tensor:
    """``value * weight``, 0 for infinity times 0."""
    return torch.where((weight == 0) & value.isinf(), 0.0, value * weight)


def _at_the_edges(value: Tensor, labels: Tensor, vocab_size: int, options: LossOptions) -> Tensor:
    value = torch.where(_outside(labels, vocab_size), NAN, value)
    return torch.where(is_ignored(labels, options.ignore_index), 0.0, value)


def _times(grad: Tensor, slope: Tensor | float) -> Tensor:
    return grad if isinstance(slope, float) and slope == 1 else grad * slope


def _gradient_at_the_edges(
    grad: Tensor, z: Tensor, stats: RowStats, labels: Tensor, column: Tensor, vocab_size: int, options: LossOptions
) -> Tensor:
    row_is_finite = (sum_exp(stats).isfinite() & (stats.row_max != NEG_INF)).unsqueeze(-1)
    grad = torch.where((z == NEG_INF) & row_is_finite, 0.0, grad)
    grad = torch.where(_outside(labels, vocab_size).unsqueeze(-1), NAN, grad)
    without = is_ignored(labels, options.ignore_index).unsqueeze(-1) | (column >= vocab_size)
    return torch.where(without, 0.0, grad)


def _label_exp(stats: RowStats) -> Tensor:
    """The label's part of the sum: exactly 1 where it has the largest z, 0 where it is not in the set."""
    return (stats.label_logit - _finite_or_zero(stats.row_max)).exp()


def _finite_or_zero(row_max: Tensor) -> Tensor:
    """``row_max``, 0 where it is -inf: ``exp(-inf - 0)`` is the 0 that ``exp(-inf - -inf)`` is not."""
    return row_max.masked_fill(row_max == NEG_INF, 0.0)


def _raised_by(old_max: Tensor, new_shift: Tensor) -> Tensor:
    """``old_max - new_shift``, to move what was summed relative to ``old_max``; 0 where that is -inf."""
    return (old_max - new_shift).masked_fill(old_max == NEG_INF, 0.0)


def _bounded(shifted: Tensor) -> Tensor:
    """``shifted``, at least -1e30: its product with an exponential that is 0 is then 0, not NaN."""
    return shifted.clamp(min=-1e30)


def _outside(labels: Tensor, vocab_size: int) -> Tensor:
    return (labels < 0) | (labels >= vocab_size)
