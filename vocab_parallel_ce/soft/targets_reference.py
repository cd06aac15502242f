"""Cross-entropy with probability targets in plain PyTorch: ``targets_spec`` behind the launchers' signatures."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from vocab_parallel_ce.reference import _divided, _rows
from vocab_parallel_ce.shard import VocabShard
from vocab_parallel_ce.soft import targets_spec as spec
from vocab_parallel_ce.spec import LossOptions


def statistics(
    logits: Tensor,
    targets: Tensor,
    labels: Tensor | None,
    stats: Tensor,
    mixture: None,
    rank: int,
    loss: Tensor | None,
    divisor: Tensor | None,
    *,
    shard: VocabShard,
    options: LossOptions,
) -> None:
    """Fill ``stats[rank]`` of ``stats [R, N, K]``, and ``loss`` where given: then the rank must be the only one."""
    row_stats = spec.local_stats(_rows(logits), _rows(targets), shard.start, shard.vocab_size, options)
    stats[rank] = torch.stack(row_stats[: stats.shape[-1]], dim=-1)
    if loss is not None:
        losses(stats, None, labels, divisor, loss, shard=shard, options=options)


def losses(
    stats: Tensor,
    mixture: None,
    labels: Tensor | None,
    divisor: Tensor | None,
    loss: Tensor,
    *,
    shard: VocabShard,
    options: LossOptions,
) -> None:
    """Fill ``loss``, of any shape, from ``stats [R, N, K]``; ``divisor [1]`` divides it if given."""
    value = spec.loss(_merged(stats), shard.vocab_size, options)
    loss.copy_(_divided(value, divisor).view(loss.shape))


def gradient(
    logits: Tensor,
    targets: Tensor,
    labels: Tensor | None,
    stats: Tensor,
    mixture: None,
    divisor: Tensor | None,
    grad_output: Tensor,
    grad_logits: Tensor,
    *,
    shard: VocabShard,
    options: LossOptions,
) -> None:
    """Fill ``grad_logits [..., C]``, which may be ``logits``; ``grad_output [N]`` multiplies it per row."""
    grad = spec.gradient(_rows(logits), _rows(targets), _merged(stats), shard.start, shard.vocab_size, options)
    grad = _divided(grad, divisor) * grad_output.unsqueeze(-1)
    if divisor is not None:
        grad = torch.where(divisor.float() == 0, 0.0, grad)  # 0 under an infinite grad_output too
    grad[:, shard.n_valid :] = 0.0
    grad_logits.copy_(grad.view(grad_logits.shape))


def _merged(stats: Tensor) -> spec.TargetStats:
    """Merge ``stats [R, N, K]`` over the ranks, in the order of the ranks on every rank."""
    nothing = torch.zeros_like(stats[0, :, 0])

    def of_rank(packed: Tensor) -> spec.TargetStats:
        carried = packed.unbind(-1)
        return spec.TargetStats(*carried, *(nothing,) * (len(spec.IDENTITY) - len(carried)))

    return functools.reduce(spec.merge, map(of_rank, stats))
