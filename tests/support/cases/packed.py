"""Sequences of labels in one row, in plain lists: shifted, and cut over the ranks of a context-parallel group."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

LAYOUTS = ("contiguous", "zigzag")


class Packed(NamedTuple):
    """Sequences of ids, and how many tokens of padding each rank has after them."""

    sequences: Sequence[Sequence[int]]
    n_padding: int = 0

    def cu_seqlens(self, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.tensor([0, *accumulate(map(len, self.sequences))], dtype=dtype)

    def held(self, layout: str, rank: int, n_ranks: int) -> list[int]:
        """Return what a rank holds; 77 is the padding."""
        parts = [held(sequence, layout, rank, n_ranks) for sequence in self.sequences]
        return [*sum(parts, []), *[77] * self.n_padding]

    def ahead(self, ignore_index: int, layout: str, rank: int, n_ranks: int) -> list[int]:
        """Return the labels of the next tokens that a rank should have."""
        shifted = [[*sequence[1:], ignore_index] if sequence else [] for sequence in self.sequences]
        found = Packed(shifted).held(layout, rank, n_ranks)
        return [*found, *[ignore_index] * self.n_padding]


def held(sequence: Sequence[int], layout: str, rank: int, n_ranks: int) -> list[int]:
    """Return the part of a sequence that a rank holds."""
    if n_ranks == 1:
        return list(sequence)
    n_chunks = n_ranks if layout == "contiguous" else 2 * n_ranks
    size, rest = divmod(len(sequence), n_chunks)
    assert rest == 0
    chunks = [list(sequence[i * size : (i + 1) * size]) for i in range(n_chunks)]
    return chunks[rank] if layout == "contiguous" else chunks[rank] + chunks[-1 - rank]
