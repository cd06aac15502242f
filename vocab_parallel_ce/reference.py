"""The implementation in plain PyTorch, for any device: a loss's mathematics behind its launchers' signatures."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vocab_parallel_ce.layout import compute_dtype
from vocab_parallel_ce.losses.base import Launchers, Loss
from vocab_parallel_ce.shard import VocabShard
from vocab_parallel_ce.spec import GradOutputs, TokenOutputs


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

    def statistics(
        self,
        logits: Tensor,
        targets: Any,
        stats: tuple[Tensor, ...],
        rank: int,
        count: Tensor | None = None,
    ) -> None:
        local = self.loss.tile(self._columns(logits), targets, self.shard, self.options)
        stats[0][rank] = torch.stack([getattr(local, name) for name in self.names], dim=-1)
        if count is not None:
            ignored = self.loss.ignored(targets, self.options)
            assert ignored is not None
            count.copy_((~ignored).sum())
        if len(stats) > 1 and stats[0].shape[0] == 1:
            self.second(logits, targets, stats, rank)

    def second(self, logits: Tensor, targets: Any, stats: tuple[Tensor, ...], rank: int) -> None:
        merged = self._merged(stats)
        stats[1][rank] = self.loss.second(self._columns(logits), targets, merged, self.shard, self.options)

    def outputs(
        self,
        stats: tuple[Tensor, ...],
        targets: Any,
        divisor: Tensor | None,
        outputs: TokenOutputs,
        total: Tensor | None = None,
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
        stats: tuple[Tensor, ...],
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
            grad = grad + self.loss.outputs_gradient(x, targets, merged, grads, *constants)
        ignored = self.loss.ignored(targets, self.options)
        if ignored is not None:
            grad.masked_fill_(ignored.unsqueeze(-1), 0.0)
        grad_logits.copy_(F.pad(grad, (0, logits.shape[-1] - grad.shape[-1])).view(grad_logits.shape))

    def _columns(self, logits: Tensor) -> Tensor:
        """Return ``[N, n]`` of these ``logits [..., C]``."""
        return _rows(logits)[:, : self.shard.n_valid]

    def _merged(self, stats: tuple[Tensor, ...]) -> Any:
        """Merge ``stats[0] [R, N, K]`` over the ranks, in the order of the ranks on every rank."""
        record, nothing = self.loss.Stats, torch.zeros_like(stats[0][0, :, 0])

        def unpacked(packed: Tensor) -> Any:
            carried = dict(zip(self.names, packed.unbind(-1), strict=True))
            return record(*(carried.get(name, nothing) for name in record._fields))

        return functools.reduce(functools.partial(self.loss.merge, options=self.options), map(unpacked, stats[0]))


def sum_losses(losses: Tensor, total: Tensor) -> None:
    """Fill ``total []`` with the sum of ``losses``, contiguous."""
    torch.sum(losses.view(-1), 0, out=total)


def element_mul(grad_logits: Tensor, grad_output: Tensor) -> None:
    """Multiply row r of ``grad_logits [..., C]`` by ``grad_output [N]`` in place; 0 stays 0."""
    grad = _rows(grad_logits).to(compute_dtype(grad_logits.dtype))
    scaled = torch.where(grad == 0, 0.0, grad * grad_output.to(grad.dtype).unsqueeze(-1))
    grad_logits.copy_(scaled.view(grad_logits.shape))


def _rows(logits: Tensor) -> Tensor:
    return logits.reshape(-1, logits.shape[-1])


def _second(stats: tuple[Tensor, ...]) -> Tensor | None:
    """Sum ``stats[1] [R, N, K]``, if there is one, over the ranks in their order."""
    return functools.reduce(torch.add, stats[1]) if len(stats) > 1 else None


def divided(value: Tensor, divisor: Tensor | None) -> Tensor:
    """``value`` by ``divisor [1]``, and 0 where there is nothing to divide among, whatever the value."""
    if divisor is None:
        return value
    n = divisor.to(value.dtype)
    return torch.where(n == 0, 0.0, value / n)
