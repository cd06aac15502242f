"""Which columns of the vocabulary a rank owns."""

from __future__ import annotations

from typing import NamedTuple


class VocabShard(NamedTuple):
    """Columns ``[start, stop)`` of a vocabulary of ``vocab_size``."""

    start: int
    stop: int
    vocab_size: int

    @classmethod
    def even(cls, n_columns: int, rank: int, n_ranks: int) -> VocabShard:
        """Shard ``rank`` of ``n_ranks`` that own ``n_columns`` each: rank 1 of 2 with 3 is [3, 6) of 6."""
        start = rank * n_columns
        return cls(start, start + n_columns, n_ranks * n_columns)
