"""The implementation in plain PyTorch, for any device: ``spec`` behind the kernels' launchers' signatures.

Each function does what the launcher of the same name in ``kernels`` does, on the same buffers.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from vocab_parallel_ce import spec
from vocab_parallel_ce.layout import compute_dtype
from vocab_parallel_ce.shard import VocabShard
from vocab_parallel_ce.spec import GradOutputs, LossOptions, RowStats, TokenOutputs
from vocab_parallel_ce.spec_outputs import at_temperature, outputs_gradient


def online_softmax(
    logits: Tensor,
    labels: Tensor,
    stats: Tensor,
    rank: int,
    valid_rows: Tensor | None,
    outputs: TokenOutputs | None = None,
    divisor: Tensor | None = None,
    *,
    shard: VocabShard,
    options: LossOptions,
    class_weight: Tensor | None = None,
    temperature: Tensor | None = None,
) -> None:
    """Fill ``stats[rank]`` of ``stats [R, N, K]``, ``valid_rows [1]`` and ``outputs``, where given."""
    names, of_rows = options.statistics, at_temperature(options, temperature)
    row_stats = spec.local_stats(_rows(logits), labels, shard.start, shard.vocab_size, of_rows, names, class_weight)
    stats[rank] = torch.stack([getattr(row_stats, name) for name in names], dim=-1)
    if valid_rows is not None:
        valid_rows.copy_((~spec.is_ignored(labels, options.ignore_index)).sum())
    if outputs is not None:
        token_outputs(stats, labels, divisor, outputs, shard=shard, options=options)


def count_larger(logits: Tensor, label_x: Tensor, counts: Tensor, *, shard: VocabShard) -> None:
    """Fill ``counts [N]``: how many logits of a row of ``logits [..., C]`` are larger than its ``label_x [N]``."""
    rows = _rows(logits)[:, : shard.n_valid]
    counts.copy_((rows > label_x.to(rows.dtype).unsqueeze(-1)).sum(dim=-1))  # label_x is one of them: exact


def token_outputs(
    stats: Tensor,
    labels: Tensor,
    divisor: Tensor | None,
    outputs: TokenOutputs,
    *,
    shard: VocabShard,
    options: LossOptions,
) -> None:
    """Fill ``outputs``, of any shape, from ``stats [R, N, K]``; ``divisor [1]`` divides the loss if given."""
    merged, shape = _merged(stats, options), outputs.loss.shape
    loss = _divided(spec.loss(merged, labels, shard.vocab_size, options), divisor)
    outputs.loss.copy_(loss.view(shape))
    for name in GradOutputs._fields[1:]:
        output = getattr(outputs, name)
        if output is not None:
            output.copy_(getattr(spec, name)(merged, labels, shard.vocab_size, options).view(shape))
    if outputs.predictions is not None:
        outputs.predictions.copy_(spec.predictions(merged, labels, options).view(shape))


def cross_entropy(
    logits: Tensor,
    stats: Tensor,
    labels: Tensor,
    divisor: Tensor | None,
    grads: GradOutputs,
    loss: Tensor | None,
    grad_logits: Tensor,
    *,
    shard: VocabShard,
    options: LossOptions,
    class_weight: Tensor | None = None,
    temperature: Tensor | None = None,
) -> None:
    """Fill ``grad_logits [..., C]``, which may be ``logits``, and ``loss [N]`` where given."""
    merged = _merged(stats, options)
    if loss is not None:
        loss.copy_(_divided(spec.loss(merged, labels, shard.vocab_size, options), divisor))
    options = at_temperature(options, temperature)
    row = (_rows(logits), merged, labels, shard.start, shard.vocab_size)
    grad = _divided(spec.gradient(*row, options, class_weight), divisor)
    if grads.loss is not None:
        grad = grad * grads.loss.unsqueeze(-1)
    if any(of_output is not None for of_output in grads[1:]):
        grad += outputs_gradient(*row, grads, options)
    # 0 under an infinite grad_output too.
    grad.masked_fill_(spec.is_ignored(labels, options.ignore_index).unsqueeze(-1), 0.0)
    grad[:, shard.n_valid :] = 0.0
    grad_logits.copy_(grad.view(grad_logits.shape))


def element_mul(grad_logits: Tensor, grad_output: Tensor) -> None:
    """Multiply row r of ``grad_logits [..., C]`` by ``grad_output [N]`` in place; 0 stays 0."""
    grad = _rows(grad_logits).to(compute_dtype(grad_logits.dtype))
    scaled = torch.where(grad == 0, 0.0, grad * grad_output.to(grad.dtype).unsqueeze(-1))
    grad_logits.copy_(scaled.view(grad_logits.shape))


def _rows(logits: Tensor) -> Tensor:
    return logits.reshape(-1, logits.shape[-1])


def _divided(value: Tensor, divisor: Tensor | None) -> Tensor:
    """``value`` by ``divisor [1]``, and 0 where there is nothing to divide among, whatever the value."""
    if divisor is None:
        return value
    n = divisor.to(value.dtype)
    return torch.where(n == 0, 0.0, value / n)


def _merged(stats: Tensor, options: LossOptions) -> RowStats:
    """Merge ``stats [R, N, K]`` over the ranks, in the order of the ranks on every rank."""
    nothing = torch.zeros_like(stats[0, :, 0])

    def of_rank(packed: Tensor) -> RowStats:
        carried = dict(zip(options.statistics, packed.unbind(-1), strict=True))
        return RowStats(*(carried.get(name, nothing) for name in RowStats._fields))

    return functools.reduce(spec.merge, map(of_rank, stats))
