"""The implementation in plain PyTorch, for any device: a loss's mathematics behind its launchers' signatures."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vocab_parallel_ce.blocks import units_of
from vocab_parallel_ce.layout import compute_dtype, sum_losses
from vocab_parallel_ce.losses.base import Launchers, Loss, Stats
from vocab_parallel_ce.shard import VocabShard
from vocab_parallel_ce.spec import GradOutputs, TokenOutputs
from vocab_parallel_ce.targets import at_columns


def launchers(loss: Loss, options: Any, shard: VocabShard) -> Launchers:
    """Return the launchers of a loss."""
    reference, exchanges = _Reference(loss, options, shard), loss.exchanges(options)
    return Launchers(
        reference.statistics,
        reference.outputs,
        reference.gradient,
        element_mul,
        widths=tuple(map(len, exchanges)),
        second=reference.second if len(exchanges) > 1 else None,
    )


class _Reference:
    """The launchers of one loss; :class:`Launchers` says what each fills."""

    def __init__(self, loss: Loss, options: Any, shard: VocabShard) -> None:
        self.loss, self.options, self.shard = loss, options, shard
        self.names = loss.exchanges(options)[0]

    def statistics(self, logits: Tensor, targets: Any, stats: Stats, rank: int) -> None:
        x, n_units = self._columns(logits), units_of(self.shard, rank, stats[0].shape[0], logits.element_size())
        if n_units > 1:
            tiles = [self.loss.tile(*unit, self.options) for unit in _units(x, targets, self.shard, n_units)]
            local = in_tree(functools.partial(self.loss.merge, options=self.options), tiles)
        else:
            local = self.loss.tile(x, targets, self.shard, self.options)
        # Those of given ids have k more.
        stats[0][rank, :, : len(self.names)] = torch.stack([getattr(local, name) for name in self.names], dim=-1)
        if len(stats) > 1 and stats[0].shape[0] == 1:
            self.second(logits, targets, stats, rank)

    def second(self, logits: Tensor, targets: Any, stats: Stats, rank: int) -> None:
        merged, x = self._merged(stats), self._columns(logits)
        units = [(x, targets, self.shard)]
        n_units = units_of(self.shard, rank, stats[0].shape[0], logits.element_size())
        if n_units > 1:
            units = _units(x, targets, self.shard, n_units)
        sums = [self.loss.second(x, of_unit, merged, shard, self.options) for x, of_unit, shard in units]
        stats[1][rank] = in_tree(torch.add, sums)

    def outputs(
        self, stats: Stats, targets: Any, divisor: Tensor | None, outputs: TokenOutputs, total: Tensor | None = None
    ) -> None:
        arguments = self._merged(stats), _second(stats), targets, self.shard, self.options
        for name, output in zip(TokenOutputs._fields, outputs, strict=True):
            if output is not None:
                value = self.loss.output(name, *arguments)
                output.copy_((divided(value, divisor) if name == "loss" else value).view(output.shape))
        if total is not None:
            sum_losses(outputs.loss, total)

    def gradient(
        self,
        logits: Tensor,
        targets: Any,
        stats: Stats,
        divisor: Tensor | None,
        grads: GradOutputs,
        grad_logits: Tensor,
    ) -> None:
        merged, second, constants = self._merged(stats), _second(stats), (self.shard, self.options)
        x = self._columns(logits)
        grad = divided(self.loss.gradient(x, targets, merged, second, *constants), divisor)
        if grads.loss is not None:
            grad = grad * grads.loss.unsqueeze(-1)
        # 0 under an infinite grad_output too. It divides the loss alone.
        if divisor is not None:
            grad = torch.where(divisor == 0, 0.0, grad)
        if any(grad_output is not None for grad_output in grads[1:]):
            grad = grad + self.loss.outputs_gradient(x, targets, merged, second, grads, *constants)
        ignored = self.loss.ignored(targets, self.options)
        if ignored is not None:
            grad.masked_fill_(ignored.unsqueeze(-1), 0.0)
        grad_logits.copy_(F.pad(grad, (0, logits.shape[-1] - grad.shape[-1])).view(grad_logits.shape))

    def _columns(self, logits: Tensor) -> Tensor:
        """Return ``[N, n]`` of these ``logits [..., C]``."""
        return _rows(logits)[:, : self.shard.n_valid]

    def _merged(self, stats: Stats) -> Any:
        """Merge ``stats[0] [R, N, K]`` over the ranks, in the same order on every rank."""
        record, nothing = self.loss.Stats, torch.zeros_like(stats[0][0, :, 0])

        def unpacked(packed: Tensor) -> Any:
            carried = dict(zip(self.names, packed.unbind(-1), strict=True))
            return record(*(carried.get(name, nothing) for name in record._fields))

        ranks = list(map(unpacked, stats[0]))
        return ranks[0] if len(ranks) == 1 else in_tree(functools.partial(self.loss.merge, options=self.options), ranks)


def _units(x: Tensor, targets: Any, shard: VocabShard, n_units: int) -> list[tuple[Tensor, Any, VocabShard]]:
    """Return the columns of each unit of ``x [N, n]``, what stands alongside them, and which they are."""
    width, units = shard.n_columns // n_units, []
    for begin in range(0, shard.n_columns, width):
        columns, start = slice(begin, begin + width), shard.start + begin
        unit = VocabShard(start, start + width, shard.vocab_size)
        units.append((x[:, columns], at_columns(targets, columns), unit))
    return units


def in_tree(merge: Callable[[Any, Any], Any], parts: Sequence[Any]) -> Any:
    """Merge neighbours, then neighbouring pairs, and so on; of more than 8 parts each 8, one after the other.

    So 8 units come to the same numbers in whichever pairs, or groups of 4, they were merged before.
    """
    if len(parts) > 8:
        groups = [in_tree(merge, parts[first : first + 8]) for first in range(0, len(parts), 8)]
        return functools.reduce(merge, groups)
    if len(parts) == 1:
        return parts[0]
    half = 4 if len(parts) > 4 else 2 if len(parts) > 2 else 1
    return merge(in_tree(merge, parts[:half]), in_tree(merge, parts[half:]))


def element_mul(grad_logits: Tensor, grad_output: Tensor) -> None:
    """Multiply row r of ``grad_logits [..., C]`` by ``grad_output [N]`` in place; 0 stays 0."""
    grad = _rows(grad_logits).to(compute_dtype(grad_logits.dtype))
    scaled = torch.where(grad == 0, 0.0, grad * grad_output.to(grad.dtype).unsqueeze(-1))
    grad_logits.copy_(scaled.view(grad_logits.shape))


def _rows(logits: Tensor) -> Tensor:
    return logits.reshape(-1, logits.shape[-1])


def _second(stats: Stats) -> Tensor | None:
    """Sum ``stats[1] [R, N, K]``, if there is one, over the ranks in the order in which they are merged."""
    return in_tree(torch.add, list(stats[1])) if len(stats) > 1 else None


def divided(value: Tensor, divisor: Tensor | None) -> Tensor:
    """``value`` by ``divisor [1]``, and 0 where there is nothing to divide among, whatever the value."""
    if divisor is None:
        return value
    n = divisor.to(value.dtype)
    return torch.where(n == 0, 0.0, value / n)
