"""The implementation in plain PyTorch, for any device: ``spec`` behind the kernels' launchers' signatures.

Each function does what the launcher of the same name in ``kernels`` does, on the same buffers.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vocab_parallel_ce import spec


def online_softmax(
    logits: Tensor,
    labels: Tensor,
    stats: Tensor,
    valid_rows: Tensor | None,
    *,
    start: int,
    ignore_index: int,
) -> None:
    """Fill ``stats [N, K]`` for ``logits [..., C]`` and ``labels [N]``, and ``valid_rows [1]``."""
    row_stats = spec.local_stats(_rows(logits), labels, start)
    stats.copy_(torch.stack(row_stats[: stats.shape[-1]], dim=-1))
    if valid_rows is not None:
        valid_rows.copy_((labels != ignore_index).sum())


def cross_entropy_loss(
    stats: Tensor,
    labels: Tensor,
    valid_rows: Tensor | None,
    loss: Tensor,
    *,
    vocab_size: int,
    ignore_index: int,
    label_smoothing: float,
) -> None:
    """Fill ``loss [N]`` from ``stats [R, N, K]``; the mean's weight is folded in with ``valid_rows``."""
    value = spec.loss(
        _merged(stats),
        labels,
        vocab_size,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
    )
    loss.copy_(value if valid_rows is None else value / valid_rows.clamp(min=1))


def cross_entropy(
    logits: Tensor,
    stats: Tensor,
    labels: Tensor,
    valid_rows: Tensor | None,
    upstream: Tensor | None,
    loss: Tensor | None,
    grad_logits: Tensor,
    *,
    start: int,
    vocab_size: int,
    ignore_index: int,
    label_smoothing: float,
) -> None:
    """Fill ``grad_logits [..., C]``, which may be ``logits``, and ``loss [N]`` where given."""
    if loss is not None:
        cross_entropy_loss(
            stats,
            labels,
            valid_rows,
            loss,
            vocab_size=vocab_size,
            ignore_index=ignore_index,
            label_smoothing=label_smoothing,
        )
    grad = spec.gradient(
        _rows(logits),
        _merged(stats),
        labels,
        start,
        vocab_size,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
    )
    if valid_rows is not None:
        grad /= valid_rows.clamp(min=1)
    if upstream is not None:
        ignored = (labels == ignore_index).unsqueeze(-1)
        grad = torch.where(ignored, 0.0, grad * upstream.unsqueeze(-1))
    grad_logits.copy_(grad.view(grad_logits.shape))


def element_mul(grad_logits: Tensor, upstream: Tensor) -> None:
    """Multiply row r of ``grad_logits [..., C]`` by ``upstream [N]`` in place; 0 stays 0."""
    grad = _rows(grad_logits).float()
    scaled = torch.where(grad == 0, 0.0, grad * upstream.float().unsqueeze(-1))
    grad_logits.copy_(scaled.view(grad_logits.shape))


def _rows(logits: Tensor) -> Tensor:
    return logits.reshape(-1, logits.shape[-1])


def _merged(stats: Tensor) -> spec.RowStats:
    """Merge ``stats [R, N, K]`` over the ranks, in the order of the ranks on every rank."""
    per_rank = [_row_stats(of_rank) for of_rank in stats]
    merged = per_rank[0]
    for of_rank in per_rank[1:]:
        merged = spec.merge(merged, of_rank)
    return merged


def _row_stats(stats: Tensor) -> spec.RowStats:
    row_max, sum_exp, target_logit, *logit_sum = stats.unbind(-1)
    return spec.RowStats(row_max, sum_exp, target_logit, *logit_sum or (torch.zeros_like(row_max),))
