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

from vocab_parallel_ce import spec
from vocab_parallel_ce.losses.base import Launchers, Loss, Stats
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
    """What the statistics of all ranks come to; in a kernel of one row, a lane for each id."""

    row_max: Tensor  # [N] largest z
    z: Tensor  # [N, k], -inf for an id that is not in the vocabulary
    others: Tensor  # [N] sum of exp(z - row_max) over the columns except one that has the largest given z
    best_term: Tensor  # [N] that column's


class GivenIds:
    """Launchers around those of cross-entropy; :class:`Launchers` says what each fills.

    Kernels override the last four functions. ``columns`` are ``[N, k]``, negative if not owned.
    """

    def __init__(self, options: IdsOptions, shard: VocabShard, kernels: ModuleType | None) -> None:
        self.options, self.shard = options, shard
        self.softmax = LABELS.launchers(options.softmax, shard, kernels)

    def statistics(self, logits: Tensor, targets: Ids, stats: Stats, rank: int) -> None:
        label, *of_rank = self.best_ids(logits, targets, stats[0], rank)
        self.softmax.statistics(logits, Labels(label, temperature=targets.temperature), *of_rank)

    def outputs(
        self, stats: Stats, targets: Ids, divisor: Tensor | None, outputs: TokenOutputs, total: Tensor | None = None
    ) -> None:
        self.log_probs(stats[0], targets, outputs.loss)

    def gradient(
        self,
        logits: Tensor,
        targets: Ids,
        stats: Stats,
        divisor: Tensor | None,
        grads: GradOutputs,
        grad_logits: Tensor,
    ) -> None:
        assert grads.loss is not None
        columns, values, merged, weight, label = self.column_gradients(logits, targets, stats[0], grads.loss)
        labels = Labels(label, temperature=targets.temperature)
        self.softmax.gradient(logits, labels, (merged,), None, GradOutputs(weight), grad_logits)
        self.write_columns(columns, values, grad_logits)

    def columns(self, targets: Ids) -> Tensor:
        """Return ``[N, k]`` columns of this rank, or what stands for one that is not among them."""
        ids, shard = targets.ids.long(), self.shard
        columns = ids - shard.start
        columns = columns.masked_fill_(spec._outside(columns, shard.n_valid), ELSEWHERE)
        columns = columns.masked_fill_(spec._outside(ids, shard.vocab_size), OUTSIDE)
        return columns.masked_fill_(spec.is_ignored(ids, self.options.ignore_index), IGNORED)

    def best_ids(self, logits: Tensor, targets: Ids, stats: Tensor, rank: int) -> tuple[Tensor, tuple[Tensor], int]:
        """Store z into ``stats [R, N, 3 + k]``; return what cross-entropy's statistics take.

        These are a label ``[N]``, this rank's id with the largest z, IGNORED if all are, and where the statistics are.
        """
        columns, shard = self.columns(targets), self.shard
        z, _ = z_at(logits, columns, at_rows(self.options.softmax, targets.temperature))
        stats[rank, :, 3:] = z
        label = columns.gather(-1, z.max(dim=-1, keepdim=True).indices).squeeze(-1).clamp(min=ELSEWHERE) + shard.start
        # As those of one rank: no sum is cut into units.
        return label.masked_fill_(is_dead(columns), IGNORED), (stats[rank : rank + 1],), 0

    def log_probs(self, stats: Tensor, targets: Ids, values: Tensor) -> None:
        """Fill ``values [..., k]`` from the statistics of all ranks."""
        columns, known = self.columns(targets), merged_ids(stats)
        log_sum = (known.others + (known.best_term - 1)).log1p()  # the digits of others survive if an id has row_max
        z = (known.z - known.row_max.unsqueeze(-1)) - log_sum.unsqueeze(-1)
        z = z.masked_fill_(columns == OUTSIDE, NAN).masked_fill_(columns == IGNORED, 0.0)
        values.copy_(z.view(values.shape))

    def column_gradients(self, logits: Tensor, targets: Ids, stats: Tensor, grads: Tensor) -> tuple[Tensor, ...]:
        """Return ``[N, k]`` columns and their gradients, equal ones of equal columns, and what cross-entropy's takes.

        These are the statistics ``[1, N, 3]`` of the whole vocabulary, what multiplies the softmax ``[N]``, and a label
        ``[N]`` whose column is written again; if none of the columns is owned, it is another rank's.
        """
        columns, known, shard = self.columns(targets), merged_ids(stats), self.shard
        dead = is_dead(columns)
        grad_values = grads.expand_as(columns).masked_fill(columns == IGNORED, 0.0)
        z, slope = z_at(logits, columns, at_rows(self.options.softmax, targets.temperature))
        is_best = columns == columns.gather(-1, z.argmax(dim=-1, keepdim=True))
        other_total, sum_exp = grad_values.masked_fill(is_best, 0.0).sum(dim=-1), known.others + known.best_term
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
        last = columns.amax(dim=-1)
        label = torch.where(last < 0, (shard.start + shard.n_valid) % shard.vocab_size, last + shard.start)
        return columns, values, merged, -total, label.masked_fill_(dead, IGNORED)

    def write_columns(self, columns: Tensor, values: Tensor, grad_logits: Tensor) -> None:
        """Write ``values [N, k]`` into ``columns [N, k]`` of ``grad_logits [..., C]``."""
        # Without waiting for the device: a column that is not owned writes what the last owned one writes. If there is
        # none, column 0 stays.
        values, owned = values.to(grad_logits.dtype), columns >= 0
        last, place = columns.max(dim=-1, keepdim=True)
        last_value = torch.where(last < 0, grad_logits[..., :1].reshape(-1, 1), values.gather(-1, place))
        values, columns = torch.where(owned, values, last_value), torch.where(owned, columns, last.clamp(min=0))
        shape = *grad_logits.shape[:-1], columns.shape[-1]
        grad_logits.scatter_(-1, columns.view(shape), values.view(shape))


class GivenIdsLoss(Loss):
    """Log-probabilities at given ids."""

    Targets: type = Ids

    def options(self, settings: Settings, vocab_size: int | None, *, class_weight: bool) -> IdsOptions:
        softmax = loss_options(settings, vocab_size)._replace(ignore_index=IGNORED)
        return IdsOptions(settings.n_ids, int(settings.ignore_index), softmax)

    def row_shape(self, options: IdsOptions) -> tuple[int, ...]:
        return (options.n_ids,)

    def launchers(self, options: IdsOptions, shard: VocabShard, kernels: ModuleType | None) -> Launchers:
        kind = GivenIds if kernels is None else kernels.given_ids.KernelIds
        launch, widths = kind(options, shard, kernels), tuple(map(len, self.exchanges(options)))
        return Launchers(launch.statistics, launch.outputs, launch.gradient, launch.softmax.element_mul, widths=widths)

    def exchanges(self, options: IdsOptions) -> tuple[tuple[str, ...], ...]:
        return (("row_max", "without_best", "best", *(f"z_{k}" for k in range(options.n_ids))),)

    def ignored(self, targets: Ids, options: IdsOptions) -> Tensor:
        return spec.is_ignored(targets.ids, options.ignore_index).all(dim=-1)


GIVEN_IDS = GivenIdsLoss()


def is_dead(columns: Tensor) -> Tensor:
    """``[N]`` bool: all ids of the row are ignored."""
    return columns.amax(dim=-1) == IGNORED


def z_at(logits: Tensor, columns: Tensor, options: LossOptions) -> tuple[Tensor, Tensor | float]:
    """Return ``[N, k]`` z at ``columns``, -inf where they are not owned, and its derivative by the logits."""
    index = columns.clamp(min=0).view(*logits.shape[:-1], columns.shape[-1])
    z, slope = spec.transformed(logits.gather(-1, index).view(columns.shape), options)
    return z.masked_fill(columns < 0, NEG_INF), slope


def merged_ids(stats: Tensor) -> Known:
    """Merge ``stats [R, N, 3 + k]``, in the order of the ranks on every rank."""
    rank_max, without_best, rank_best, rank_z = stats[..., 0], stats[..., 1], stats[..., 2], stats[..., 3:]
    row_max = rank_max.amax(dim=0)
    shift, z = _finite_or_zero(row_max), rank_z.amax(dim=0)
    decay, best_terms = (rank_max - shift).exp(), (rank_best - shift).exp()
    # One rank's best is the best of all: its term is not among the others'.
    is_best = torch.zeros_like(best_terms, dtype=torch.bool).scatter_(0, rank_best.argmax(0, keepdim=True), True)
    others = (without_best * decay + best_terms.masked_fill(is_best, 0.0)).sum(dim=0)
    return Known(row_max, z, others, (z.amax(dim=-1) - shift).exp())


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
