"""Log-probabilities at k given ids of each token: statistics, values and gradient.

With ``s = softmax(z)``, ``g_k`` the gradient of the k-th log-probability and ``G = sum_k g_k``:

    value_k = z_k - lse
    dz_i    = sum_k [id_k = i] g_k - s_i G

The passes over the shard are those of cross-entropy: it finds the sums, and writes the columns that are not among the
ids. Each rank takes its largest of the given logits as its label, so that the digits of ``1 - s`` survive where that is
close to 1.
"""

from __future__ import annotations

from types import ModuleType
from typing import Annotated, NamedTuple

import torch
from torch import Tensor

from vocab_parallel_ce import reference, spec
from vocab_parallel_ce.layout import compute_dtype
from vocab_parallel_ce.losses.base import Launchers, Loss
from vocab_parallel_ce.losses.labels import LABELS, Labels
from vocab_parallel_ce.options import Settings, loss_options
from vocab_parallel_ce.shard import VocabShard
from vocab_parallel_ce.spec import NAN, NEG_INF, GradOutputs, LossOptions, TokenOutputs, _finite_or_zero
from vocab_parallel_ce.targets import Role, at_rows

# What stands for a column that this rank does not own.
ELSEWHERE = -1
OUTSIDE = -2  # of the vocabulary
IGNORED = -(2**62)


class Ids(NamedTuple):
    """The targets: k ids of each row."""

    ids: Annotated[Tensor, Role("ids", ("rows", "k"), "labels")]
    temperature: Annotated[Tensor | None, Role("numbers", ("rows",), fill=1.0)] = None  # None: that of the options


class IdsOptions(NamedTuple):
    """What is computed of a row."""

    n_ids: int
    ignore_index: int
    softmax: LossOptions  # its labels are one of the ids, or IGNORED


class Known(NamedTuple):
    """What the statistics of all ranks come to."""

    row_max: Tensor  # [N] largest z
    z: Tensor  # [N, k], -inf for an id that is not in the vocabulary
    best: Tensor  # [N] largest of these
    others: Tensor  # [N] sum of exp(z - row_max) over the columns except one that has the largest given z

    @property
    def sum_exp(self) -> Tensor:
        return self.others + (self.best - _finite_or_zero(self.row_max)).exp()

    @property
    def log_sum(self) -> Tensor:
        """Log of the sum: the digits of ``others`` survive if a given id has ``row_max``."""
        return (self.others + ((self.best - _finite_or_zero(self.row_max)).exp() - 1)).log1p()


class GivenIds:
    """Launchers in plain PyTorch, over those of cross-entropy; :class:`Launchers` says what each fills."""

    def __init__(self, options: IdsOptions, shard: VocabShard) -> None:
        self.options, self.shard = options, shard
        self.softmax = LABELS.launchers(options.softmax, shard, None)
        self.element_mul = reference.element_mul

    def statistics(self, logits: Tensor, targets: Ids, stats: tuple[Tensor], rank: int) -> None:
        columns, temperature = self.columns(targets), targets.temperature
        dead = is_dead(columns)
        z, _ = z_at(logits, columns, at_rows(self.options.softmax, temperature))
        best, place = z.max(dim=-1, keepdim=True)
        row_max, without_best = sums_without(self.softmax, logits, place, columns, dead, self.shard, temperature)
        torch.cat([row_max.unsqueeze(-1), without_best.unsqueeze(-1), best, z], dim=-1, out=stats[0][rank])

    def outputs(
        self,
        stats: tuple[Tensor],
        targets: Ids,
        divisor: Tensor | None,
        outputs: TokenOutputs,
        total: Tensor | None = None,
    ) -> None:
        outputs.loss.copy_(self.values(stats[0], self.columns(targets)).view(outputs.loss.shape))

    def gradient(
        self,
        logits: Tensor,
        targets: Ids,
        stats: tuple[Tensor],
        divisor: Tensor | None,
        grads: GradOutputs,
        grad_logits: Tensor,
    ) -> None:
        columns, temperature = self.columns(targets), targets.temperature
        known, options, dead = self.merged(stats[0]), self.options, is_dead(columns)
        assert grads.loss is not None
        grad_values = grads.loss.expand_as(columns).masked_fill(columns == IGNORED, 0.0)
        z, slope = z_at(logits, columns, at_rows(options.softmax, temperature))
        is_best = columns == columns.gather(-1, z.argmax(dim=-1, keepdim=True))
        other_total, sum_exp = grad_values.masked_fill(is_best, 0.0).sum(dim=-1), known.sum_exp
        total = grad_values.sum(dim=-1).masked_fill((columns == OUTSIDE).any(dim=-1), NAN)
        shifted = z - known.row_max.masked_fill(known.row_max.isinf(), NAN).unsqueeze(-1)  # such a row is NaN
        s = shifted.exp() / sum_exp.unsqueeze(-1)
        values = sum_of_equals(columns, grad_values) - s * total.unsqueeze(-1)
        # Of a confident id, 1 - s and the sum of the other gradients: the digits that s and the total round away.
        best_value = (known.others / sum_exp * total - other_total).unsqueeze(-1)
        values = torch.where(s > 0.5, best_value, values)
        values = values * slope
        values.masked_fill_((shifted == NEG_INF) | dead.unsqueeze(-1), 0.0)
        merged = torch.stack([known.row_max, sum_exp, torch.full_like(sum_exp, NEG_INF)], dim=-1).unsqueeze(0)
        write_columns(self.softmax, logits, columns, dead, self.shard, merged, -total, values, grad_logits, temperature)

    def columns(self, targets: Ids) -> Tensor:
        """Return ``[N, k]`` columns of this rank, or what stands for one that is not among them."""
        ids, shard = targets.ids.long(), self.shard
        columns = ids - shard.start
        columns = columns.masked_fill_(spec._outside(columns, shard.n_valid), ELSEWHERE)
        columns = columns.masked_fill_(spec._outside(ids, shard.vocab_size), OUTSIDE)
        return columns.masked_fill_(spec.is_ignored(targets.ids, self.options.ignore_index), IGNORED)

    def values(self, stats: Tensor, columns: Tensor) -> Tensor:
        """Return ``[N, k]`` log-probabilities of all ranks."""
        known = self.merged(stats)
        values = (known.z - known.row_max.unsqueeze(-1)) - known.log_sum.unsqueeze(-1)
        return values.masked_fill_(columns == OUTSIDE, NAN).masked_fill_(columns == IGNORED, 0.0)

    def merged(self, stats: Tensor) -> Known:
        """Merge ``stats [R, N, 3 + k]``, in the order of the ranks on every rank."""
        rank_max, without_best, rank_best, rank_z = stats[..., 0], stats[..., 1], stats[..., 2], stats[..., 3:]
        row_max = rank_max.amax(dim=0)
        shift, z = _finite_or_zero(row_max), rank_z.amax(dim=0)
        decay, best_terms = (rank_max - shift).exp(), (rank_best - shift).exp()
        # One rank's best is the best of all: its term is not among the others'.
        is_best = torch.zeros_like(best_terms, dtype=torch.bool).scatter_(0, rank_best.argmax(0, keepdim=True), True)
        others = (without_best * decay + best_terms.masked_fill(is_best, 0.0)).sum(dim=0)
        return Known(row_max, z, z.amax(dim=-1), others)


class GivenIdsLoss(Loss):
    """Log-probabilities at given ids."""

    Targets: type = Ids

    def options(self, settings: Settings, vocab_size: int | None, *, class_weight: bool) -> IdsOptions:
        softmax = loss_options(settings, vocab_size)._replace(ignore_index=IGNORED)
        return IdsOptions(settings.n_ids, int(settings.ignore_index), softmax)

    def row_shape(self, options: IdsOptions) -> tuple[int, ...]:
        return (options.n_ids,)

    def launchers(self, options: IdsOptions, shard: VocabShard, kernels: ModuleType | None) -> Launchers:
        launch = GivenIds(options, shard) if kernels is None else kernels.given_ids.GivenIds(options, shard)
        widths = tuple(map(len, self.exchanges(options)))
        return Launchers(launch.statistics, launch.outputs, launch.gradient, launch.element_mul, widths=widths)

    def exchanges(self, options: IdsOptions) -> tuple[tuple[str, ...], ...]:
        return (("row_max", "without_best", "best", *(f"z_{k}" for k in range(options.n_ids))),)

    def ignored(self, targets: Ids, options: IdsOptions) -> Tensor:
        return spec.is_ignored(targets.ids, options.ignore_index).all(dim=-1)


GIVEN_IDS = GivenIdsLoss()


# Parts of the launchers; ``columns`` are ``[N, k]``, negative if not owned.


def is_dead(columns: Tensor) -> Tensor:
    """``[N]`` bool: all ids of the row are ignored."""
    return columns.amax(dim=-1) == IGNORED


def z_at(logits: Tensor, columns: Tensor, options: LossOptions) -> tuple[Tensor, Tensor | float]:
    """Return ``[N, k]`` z at ``columns``, -inf where they are not owned, and its derivative by the logits."""
    index = columns.clamp(min=0).view(*logits.shape[:-1], columns.shape[-1])
    z, slope = spec.transformed(logits.gather(-1, index).view(columns.shape), options)
    return z.masked_fill(columns < 0, NEG_INF), slope


def sums_without(
    softmax: Launchers,
    logits: Tensor,
    place: Tensor,
    columns: Tensor,
    dead: Tensor,
    shard: VocabShard,
    temperature: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return ``[N]`` the largest z of the shard, and the sum of exp(z - it) without the column at ``place [N, 1]``."""
    label = columns.gather(-1, place).squeeze(-1).clamp(min=ELSEWHERE) + shard.start
    stats = logits.new_empty(1, columns.shape[0], 3, dtype=compute_dtype(logits.dtype))
    softmax.statistics(logits, Labels(label.masked_fill_(dead, IGNORED), temperature=temperature), (stats,), 0)
    row_max, without, _ = stats[0].unbind(-1)
    return row_max, without


def write_columns(
    softmax: Launchers,
    logits: Tensor,
    columns: Tensor,
    dead: Tensor,
    shard: VocabShard,
    stats: Tensor,
    weight: Tensor,
    values: Tensor,
    grad_logits: Tensor,
    temperature: Tensor | None = None,
) -> None:
    """Fill ``grad_logits``: ``values [N, k]`` at ``columns``, and ``weight [N]`` times the softmax elsewhere.

    ``stats [1, N, 3]`` are cross-entropy's, of the whole vocabulary. Equal columns must have equal values.
    """
    # The label's column is written again below. If none of the columns is owned, it is another rank's.
    last, place = columns.max(dim=-1, keepdim=True)
    label = last + shard.start
    label = label.masked_fill_(last < 0, (shard.start + shard.n_valid) % shard.vocab_size).squeeze(-1)
    targets = Labels(label.masked_fill_(dead, IGNORED), temperature=temperature)
    softmax.gradient(logits, targets, (stats,), None, GradOutputs(weight), grad_logits)
    # Without waiting for the device: a column that is not owned writes what the last owned one writes. If there is
    # none, column 0 stays.
    values, owned = values.to(grad_logits.dtype), columns >= 0
    last_value = torch.where(last < 0, grad_logits[..., :1].reshape(-1, 1), values.gather(-1, place))
    values, columns = torch.where(owned, values, last_value), torch.where(owned, columns, last.clamp(min=0))
    shape = *grad_logits.shape[:-1], columns.shape[-1]
    grad_logits.scatter_(-1, columns.view(shape), values.view(shape))


def sum_of_equals(columns: Tensor, values: Tensor) -> Tensor:
    """Return ``[N, k]``: at each place the sum of the values of its row that have the same column.

    In one order, so that the bits are the same every time.
    """
    n = columns.shape[-1]
    if n == 1:
        return values
    in_order, order = columns.sort(dim=-1, stable=True)
    sums, step = values.gather(-1, order), 1
    while step < n:  # after it, a place has the sum of up to 2 * step equals before it
        is_equal = in_order[:, step:] == in_order[:, :-step]
        sums = torch.cat([sums[:, :step], sums[:, step:] + torch.where(is_equal, sums[:, :-step], 0.0)], dim=-1)
        step *= 2
    last = torch.searchsorted(in_order, columns, right=True) - 1
    return sums.gather(-1, last)
