"""Cross-entropy with probability targets in plain PyTorch: ``targets_spec`` behind the launchers' signatures."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from vocab_parallel_ce.reference import _divided, _rows
from vocab_parallel_ce.shard import VocabShard
from vocab_parallel_ce.soft import targets_spec as spec
from vocab_parallel_ce.spec import LossOptions, transformed


def statistics(
    logits: Tensor,
    targets: Tensor,
    class_weight: Tensor | None,
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
    z, _, t = _columns(logits, targets, class_weight, shard, options)
    stats[rank] = torch.stack(spec.local_stats(z, t), dim=-1)
    if loss is not None:
        losses(stats, None, class_weight, divisor, loss, shard=shard, options=options)


def losses(
    stats: Tensor,
    mixture: None,
    class_weight: Tensor | None,
    divisor: Tensor | None,
    loss: Tensor,
    *,
    shard: VocabShard,
    options: LossOptions,
) -> None:
    """Fill ``loss``, of any shape, from ``stats [R, N, K]``; ``divisor [1]`` divides it if given."""
    loss.copy_(_divided(spec.loss(_merged(stats), options), divisor).view(loss.shape))


def gradient(
    logits: Tensor,
    targets: Tensor,
    class_weight: Tensor | None,
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
    z, slope, t = _columns(logits, targets, class_weight, shard, options)
    grad = _divided(spec.gradient(z, slope, t, _merged(stats), options), divisor) * grad_output.unsqueeze(-1)
    if divisor is not None:
        grad = torch.where(divisor.float() == 0, 0.0, grad)  # 0 under an infinite grad_output too
    grad_logits.copy_(torch.nn.functional.pad(grad, (0, shard.n_columns - shard.n_valid)).view(grad_logits.shape))


def _columns(
    logits: Tensor, targets: Tensor, class_weight: Tensor | None, shard: VocabShard, options: LossOptions
) -> tuple[Tensor, Tensor | float, Tensor]:
    """Return ``z``, its slope and ``t'`` of the columns that are not padding."""
    z, slope = transformed(_rows(logits)[:, : shard.n_valid], options)
    targets = _rows(targets)[:, : shard.n_valid].to(z.dtype)
    return z, slope, spec.smoothed(targets, shard.vocab_size, options, class_weight)


def _merged(stats: Tensor) -> spec.TargetStats:
    """Merge ``stats [R, N, K]`` over the ranks, in the order of the ranks on every rank."""
    return functools.reduce(spec.merge, (spec.TargetStats(*packed.unbind(-1)) for packed in stats))
