"""Which columns of the vocabulary a rank owns."""

from __future__ import annotations

from typing import NamedTuple


class VocabShard(NamedTuple):
    """A rank's logits have the columns ``[start, stop)`` of a vocabulary of ``vocab_size``.

    Columns at ``vocab_size`` and beyond are padding: no part of the softmax, gradient exactly 0. A
    shard may be all padding. The shards of a group together must have every column once.

    Example: 1003 columns over 3 ranks are ``(0, 335, 1003)``, ``(335, 670, 1003)`` and
    ``(670, 1003, 1003)``; padded to 384 a rank the last is ``(768, 1152, 1003)``, of which 235 count.
    """

    start: int
    stop: int
    vocab_size: int

    @property
    def n_columns(self) -> int:
        """Columns of the rank's logits, padding included."""
        return self.stop - self.start

    @property
    def n_valid(self) -> int:
        """Columns that are no padding: the first ones."""
        return max(0, min(self.stop, self.vocab_size) - self.start)

    def check(self, n_columns: int, n_ranks: int) -> None:
        """Raise ValueError unless this can be the shard of logits with ``n_columns``, one of ``n_ranks``."""
        if not (0 <= self.start < self.stop and self.vocab_size >= 1):
            raise ValueError(f"shard: must be columns of a vocabulary, 0 <= start < stop, got {self}")
        if self.n_columns != n_columns:
            raise ValueError(
                f"logits: last dimension must be the shard width {self.n_columns}, got {n_columns} for {self}"
            )
        if n_ranks == 1 and (self.start, self.n_valid) != (0, self.vocab_size):
            raise ValueError(f"shard: must be the whole vocabulary where there is one rank, got {self}")

    @classmethod
    def even(cls, n_columns: int, rank: int, n_ranks: int) -> VocabShard:
        """Shard ``rank`` of ``n_ranks`` that own ``n_columns`` each: rank 1 of 2 with 3 is [3, 6) of 6."""
        start = rank * n_columns
        return cls(start, start + n_columns, n_ranks * n_columns)

    @classmethod
    def of_rank(cls, vocab_size: int, rank: int, n_ranks: int, n_columns: int | None = None) -> VocabShard:
        """Shard ``rank`` of ``n_ranks``: cut as ``torch.chunk`` and DTensor cut, or equal and padded.

        A rank has ``ceil(vocab_size / n_ranks)`` columns and the last one what is left. Where a rank's
        logits have ``n_columns`` of at least that, all ranks have as many, and what lies beyond the
        vocabulary is padding (Megatron's way).

        Raises:
            ValueError: ``n_columns`` is neither; it holds the whole vocabulary on one of several ranks;
                or a rank would have no column.
        """
        widest = -(-vocab_size // n_ranks)
        if n_columns is not None and n_columns >= widest and (n_columns < vocab_size or n_ranks == 1):
            return cls(rank * n_columns, (rank + 1) * n_columns, vocab_size)
        if n_columns is None and widest * (n_ranks - 1) >= vocab_size:
            raise ValueError(
                f"vocab_size: must leave each of {n_ranks} ranks a column, which {widest} a rank do not, "
                f"got {vocab_size}"
            )
        start = min(rank * widest, vocab_size)
        shard = cls(start, min(start + widest, vocab_size), vocab_size)
        if n_columns is not None and n_columns != shard.n_columns:
            padded = f"less than {vocab_size}" if n_ranks > 1 else "more"
            raise ValueError(
                f"logits: last dimension must be {shard.n_columns} on rank {rank} of {n_ranks} for "
                f"vocab_size {vocab_size}, or {padded} and at least {widest} with padding, got {n_columns}"
            )
        return shard
