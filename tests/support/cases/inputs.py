"""Logits, labels, layouts and grad_outputs that are hard on a cross-entropy.

Near-uniform logits give every probability about 1 / V, where a missing term, a wrong row or a wrong
scale stays under any tolerance. These are peaked, far from zero, masked or confident instead.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

NAN = float("nan")
NEG_INF = float("-inf")
IGNORE_INDEX = -100
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Log-odds of the label: its probability is about 0.9, 0.99, 0.999 and 0.99999; and 0.1 in one row,
# without which losses would be far smaller than the sums they come from.
CONFIDENT_GAPS = (2.2, 4.6, 6.9, 11.5, -2.2)


class Batch(NamedTuple):
    """Logits over the whole vocabulary and global labels."""

    logits: Tensor  # [N, V]
    labels: Tensor  # [N] int64


def batch(
    kind: str,
    *,
    rows: int,
    vocab_size: int,
    shards: int = 1,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    gaps: Sequence[float] = CONFIDENT_GAPS,
) -> Batch:
    """Rows of one kind of :data:`KINDS`, the same for the same arguments.

    Args:
        shards: number of equal shards that the kinds with "shard" in their name are made for.
        gaps: of ``"confident"`` rows in turn: log-odds of the label against all other columns.
    """
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, vocab_size, (rows,), generator=generator)
    x = torch.randn(rows, vocab_size, generator=generator) * 2
    x, labels = KINDS[kind](_Draft(x, labels, shards, tuple(gaps), generator))
    return Batch(x.to(dtype), labels)


class _Draft(NamedTuple):
    x: Tensor
    labels: Tensor
    shards: int
    gaps: tuple[float, ...]
    generator: torch.Generator


def _peaked(draft: _Draft) -> tuple[Tensor, Tensor]:
    rows, vocab_size = draft.x.shape
    peak = torch.randint(0, vocab_size, (rows,), generator=draft.generator)
    peak[::2] = draft.labels[::2]
    return draft.x.scatter_add(1, peak.unsqueeze(1), torch.full((rows, 1), 12.0)), draft.labels


def _confident(draft: _Draft) -> tuple[Tensor, Tensor]:
    label = draft.labels.unsqueeze(1)
    others = draft.x.scatter(1, label, NEG_INF).logsumexp(dim=1, keepdim=True)
    gaps = torch.tensor(draft.gaps)[torch.arange(len(draft.labels)) % len(draft.gaps)].unsqueeze(1)
    return draft.x.scatter(1, label, others + gaps), draft.labels


def _excluded_columns(draft: _Draft) -> tuple[Tensor, Tensor]:
    rows, vocab_size = draft.x.shape
    excluded = torch.rand(rows, vocab_size, generator=draft.generator) < 0.3
    width = vocab_size // draft.shards
    excluded[:, ::width] = True
    excluded[:, width - 1 :: width] = True
    excluded.scatter_(1, draft.labels.unsqueeze(1), False)
    return draft.x.masked_fill(excluded, NEG_INF), draft.labels


def _excluded_shard(draft: _Draft) -> tuple[Tensor, Tensor]:
    rows, vocab_size = draft.x.shape
    pieces = max(draft.shards, 2)
    width = vocab_size // pieces
    # Even rows lose the last shard, as a padded vocabulary does; odd rows lose each in turn.
    lost = torch.full((rows,), pieces - 1)
    lost[1::2] = torch.arange(len(lost[1::2])) % pieces
    column_shard = (torch.arange(vocab_size) // width).clamp(max=pieces - 1)
    label = draft.labels % (vocab_size // pieces * pieces)
    label = torch.where(label // width == lost, (label + width) % (width * pieces), label)
    return draft.x.masked_fill(column_shard == lost.unsqueeze(1), NEG_INF), label


def _shard_edges(draft: _Draft) -> tuple[Tensor, Tensor]:
    vocab_size = draft.x.shape[1]
    width = vocab_size // draft.shards
    starts = torch.arange(0, vocab_size, width)
    edges = torch.stack([starts, starts + width - 1], dim=1).flatten().clamp(max=vocab_size - 1)
    return draft.x * 3, edges[torch.arange(len(draft.labels)) % len(edges)]


def _some_ignored(draft: _Draft) -> tuple[Tensor, Tensor]:
    x, labels = _peaked(draft)
    ignored = torch.rand(len(labels), generator=draft.generator) < 0.4
    ignored[:1] = True
    ignored[1:2] = False
    ignored[-1:] |= len(labels) > 2
    return x, labels.masked_fill(ignored, IGNORE_INDEX)


def _mixture(draft: _Draft) -> tuple[Tensor, Tensor]:
    makers = [make for name, make in KINDS.items() if name not in ("times_1000", "all_ignored", "mixture")]
    x, labels = torch.empty_like(draft.x), torch.empty_like(draft.labels)
    for turn, make in enumerate(makers):
        made_x, made_labels = make(draft)
        x[turn :: len(makers)] = made_x[turn :: len(makers)]
        labels[turn :: len(makers)] = made_labels[turn :: len(makers)]
    return x, labels


KINDS: dict[str, Callable[[_Draft], tuple[Tensor, Tensor]]] = {
    "peaked": _peaked,
    "confident": _confident,
    "far_negative": lambda draft: (draft.x * 8 - 1000, draft.labels),
    "times_1000": lambda draft: (draft.x * 1000, draft.labels),
    "excluded_columns": _excluded_columns,
    "excluded_shard": _excluded_shard,
    "shard_edges": _shard_edges,
    "some_ignored": _some_ignored,
    "all_ignored": lambda draft: (draft.x, torch.full_like(draft.labels, IGNORE_INDEX)),
    "mixture": _mixture,
}


def with_a_broad_row(made: Batch) -> Batch:
    """``made`` and a last row whose loss, entropy and gradient are of the order of 1.

    Confident rows alone have gradients and entropies that are differences of nearly equal numbers. Whether
    PyTorch's rounding or another's is nearer to the truth there is luck; beside this row it does not matter.
    """
    logits, labels = made
    row = torch.randn(1, logits.shape[1], generator=torch.Generator().manual_seed(0)) * 2
    return Batch(torch.cat([logits, row.to(logits)]), torch.cat([labels, row.argmin(dim=1)]))


def shard_of(logits: Tensor, rank: int, world_size: int) -> Tensor:
    """A copy of the columns that ``rank`` owns, ``[..., V / world_size]`` contiguous."""
    return logits.chunk(world_size, dim=-1)[rank].clone(memory_format=torch.contiguous_format)


def padded_shard(logits: Tensor, start: int, stop: int, fill: float = NAN) -> Tensor:
    """A copy of the columns ``[start, stop)`` of ``logits [..., V]``, contiguous; ``fill`` from V on."""
    shard = logits.new_full((*logits.shape[:-1], stop - start), fill)
    columns = logits[..., start:stop]
    shard[..., : columns.shape[-1]] = columns
    return shard


def transposed_grad_output(*shape: int) -> Tensor:
    """fp32 gradient of an unreduced loss of ``shape``, different in every token, whose strides are in reverse."""
    backwards = torch.randn(*reversed(shape), generator=torch.Generator().manual_seed(0))
    return backwards.permute(*reversed(range(len(shape))))
