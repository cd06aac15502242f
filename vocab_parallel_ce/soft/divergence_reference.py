"""Distillation in plain PyTorch: ``divergence_spec`` behind the launchers' signatures."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from vocab_parallel_ce.reference import _divided, _rows
from vocab_parallel_ce.shard import VocabShard
from vocab_parallel_ce.soft import divergence_spec as spec
from vocab_parallel_ce.soft.divergence_spec import DivergenceOptions, DivergenceStats
from vocab_parallel_ce.spec import is_ignored


def statistics(
    student: Tensor,
    teacher: Tensor,
    labels: Tensor | None,
    stats: Tensor,
    mixture: Tensor | None,
    rank: int,
    loss: Tensor | None,
    divisor: Tensor | None,
    *,
    shard: VocabShard,
    options: DivergenceOptions,
) -> None:
    """Fill ``stats[rank]`` of ``stats [R, N, K]``. ``mixture`` and ``loss``, if given: the rank is the only one."""
    own = spec.local_stats(_rows(student), _rows(teacher), labels, shard.start, shard.vocab_size, options)
    stats[rank] = torch.stack([getattr(own, name) for name in spec.statistics(options)], dim=-1)
    if mixture is not None:
        mix(student, teacher, labels, stats, mixture, rank, shard=shard, options=options)
    if loss is not None:
        losses(stats, mixture, labels, divisor, loss, shard=shard, options=options)


def mix(
    student: Tensor,
    teacher: Tensor,
    labels: Tensor | None,
    stats: Tensor,
    mixture: Tensor,
    rank: int,
    *,
    shard: VocabShard,
    options: DivergenceOptions,
) -> None:
    """Fill ``mixture[rank]`` of ``mixture [R, N, 2]``."""
    merged = _merged(stats, options)
    mixture[rank] = spec.local_mixture(_rows(student), _rows(teacher), merged, shard.start, shard.vocab_size, options)


def losses(
    stats: Tensor,
    mixture: Tensor | None,
    labels: Tensor | None,
    divisor: Tensor | None,
    loss: Tensor,
    *,
    shard: VocabShard,
    options: DivergenceOptions,
) -> None:
    """Fill ``loss``, of any shape, from the statistics of all ranks; ``divisor [1]`` divides it if given."""
    value = spec.loss(_merged(stats, options), _summed(mixture), labels, shard.vocab_size, options)
    loss.copy_(_divided(value, divisor).view(loss.shape))


def gradient(
    student: Tensor,
    teacher: Tensor,
    labels: Tensor | None,
    stats: Tensor,
    mixture: Tensor | None,
    divisor: Tensor | None,
    grad_output: Tensor,
    grad_student: Tensor,
    *,
    shard: VocabShard,
    options: DivergenceOptions,
) -> None:
    """Fill ``grad_student [..., C]``, which may be ``student``; ``grad_output [N]`` multiplies it per row."""
    own = (_merged(stats, options), _summed(mixture), labels, shard.start, shard.vocab_size, options)
    grad = spec.gradient(_rows(student), _rows(teacher), *own)
    grad = _divided(grad, divisor) * grad_output.unsqueeze(-1)
    # 0 under an infinite grad_output too.
    if divisor is not None:
        grad = torch.where(divisor.float() == 0, 0.0, grad)
    if labels is not None:
        grad.masked_fill_(is_ignored(labels, options.ignore_index).unsqueeze(-1), 0.0)
    grad[:, shard.n_valid :] = 0.0
    grad_student.copy_(grad.view(grad_student.shape))


def _merged(stats: Tensor, options: DivergenceOptions) -> DivergenceStats:
    """Merge ``stats [R, N, K]`` over the ranks, in the order of the ranks on every rank."""
    nothing = torch.zeros_like(stats[0, :, 0])

    def of_rank(packed: Tensor) -> DivergenceStats:
        carried = dict(zip(spec.statistics(options), packed.unbind(-1), strict=True))
        return DivergenceStats(*(carried.get(name, nothing) for name in DivergenceStats._fields))

    return functools.reduce(functools.partial(spec.merge, options=options), map(of_rank, stats))


def _summed(mixture: Tensor | None) -> Tensor | None:
    """Sum ``mixture [R, N, 2]`` over the ranks, in their order."""
    return None if mixture is None else functools.reduce(torch.add, mixture)
