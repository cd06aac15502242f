"""The gradient of the outputs alongside the loss, and temperatures of rows; see ``spec`` for the mathematics."""

from __future__ import annotations

import torch
from torch import Tensor

from vocab_parallel_ce.spec import (
    INF,
    NAN,
    PLAIN,
    GradOutputs,
    LossOptions,
    RowStats,
    _bounded,
    _gradient_at_the_edges,
    _times,
    sum_exp,
    transformed,
)


def at_rows(options: LossOptions, temperature: Tensor | None, threshold: Tensor | None = None) -> LossOptions:
    """The options of rows whose z is divided by ``temperature [N]``, and NaN where it is not positive and finite.

    Logits below ``threshold [N]`` are excluded.
    """
    if threshold is not None:
        options = options._replace(threshold=threshold.unsqueeze(-1))
    if temperature is None:
        return options
    inverse = 1 / temperature
    known = torch.where((inverse > 0) & (inverse < INF), temperature, NAN)
    return options._replace(temperature=known.unsqueeze(-1))


def outputs_gradient(
    logits: Tensor,
    stats: RowStats,
    labels: Tensor,
    start: int,
    vocab_size: int,
    grads: GradOutputs,
    options: LossOptions = PLAIN,
) -> Tensor:
    """``[N, C]`` derivative by the logits of each row's outputs except the loss, each times its ``grads``, summed."""
    z, slope = transformed(logits, options)
    column = torch.arange(start, start + z.shape[-1], device=z.device)
    shifted = z - stats.row_max.unsqueeze(-1)
    all_sum = sum_exp(stats).unsqueeze(-1)
    p = shifted.exp() / all_sum
    grad = torch.zeros_like(p)
    if grads.entropy is not None:
        mean_shifted = stats.exp_shifted_sum.unsqueeze(-1) / all_sum
        grad = grad + p * (mean_shifted - _bounded(shifted)) * grads.entropy.unsqueeze(-1)
    if grads.lse is not None:
        grad = grad + p * grads.lse.unsqueeze(-1)
    if grads.sum_sq_probs is not None:
        mean_p = stats.sum_exp_sq.unsqueeze(-1) / all_sum**2
        grad = grad + 2 * p * (p - mean_p) * grads.sum_sq_probs.unsqueeze(-1)
    if grads.mean_logit is not None:
        grad = grad + grads.mean_logit.unsqueeze(-1) / vocab_size
    return _gradient_at_the_edges(_times(grad, slope), z, stats, labels, column, vocab_size, options)
