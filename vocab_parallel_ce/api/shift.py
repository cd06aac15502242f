"""Losses of the next token: token t predicts the label at t + 1 of the last dimension.

The labels are copied one position ahead; logits and hidden states stay where they are. The last token has no label.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vocab_parallel_ce import checks
from vocab_parallel_ce.spec import TokenOutputs


def next_labels(labels: Tensor, ignore_index: int) -> Tensor:
    """Return ``[..., T]`` int64: at t the label of t + 1, and ``ignore_index`` at the end.

    Raises:
        TypeError: ``labels`` are no labels.
        ValueError: ``T`` is below 2, or there is no such dimension, or no other, so that it may be of many sequences.
    """
    checks.check_labels(labels, labels)
    checks.check_integer("ignore_index", ignore_index)
    if labels.dim() == 1:
        raise ValueError(
            "shift: expected labels of at least two dimensions, [..., T], because flattened labels do not say where a "
            f"sequence ends, got shape {tuple(labels.shape)}; pass a single sequence as [1, T]"
        )
    if labels.dim() == 0 or labels.shape[-1] < 2:
        expected = "labels whose last dimension has at least 2 tokens"
        raise ValueError(f"shift: expected {expected}, got shape {tuple(labels.shape)}")
    last = labels.new_full((*labels.shape[:-1], 1), ignore_index, dtype=torch.int64)
    return torch.cat([labels[..., 1:].long(), last], dim=-1)


def without_last(outputs: TokenOutputs, dim: int) -> TokenOutputs:
    """Return the outputs of all tokens except the last of dimension ``dim``. What is reduced stays."""
    found = (v if v is None or v.dim() == 0 else v.narrow(dim, 0, v.shape[dim] - 1) for v in outputs)
    return TokenOutputs(*found)  # type: ignore[arg-type]
