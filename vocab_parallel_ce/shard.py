"""Which columns of the vocabulary a rank owns."""

from __future__ import annotations

from typing import NamedTuple

from vocab_parallel_ce import checks

LOGITS = "logits: last dimension"  # what has a rank's columns, for messages


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

    def checked(self, n_columns: int | None, n_ranks: int, *, subject: str = LOGITS) -> VocabShard:
        """This shard in plain ints, unless it cannot be that of logits with ``n_columns`` (None: unknown).

        Raises:
            TypeError: a field is no integer.
            ValueError: the columns are none of the vocabulary's, as many as ``n_columns``; or there is
                one rank, and they are not all of them.
        """
        for name, value in self._asdict().items():
            checks.check_integer(f"shard: {name}", value)
        shard = VocabShard(*map(int, self))
        if not (0 <= shard.start < shard.stop and shard.vocab_size >= 1):
            raise ValueError(f"shard: must be columns of a vocabulary, 0 <= start < stop, got {shard}")
        if n_columns not in (None, shard.n_columns):
            raise ValueError(f"{subject} must be the width {shard.n_columns} of {shard}, got {n_columns}")
        if n_ranks == 1 and (shard.start, shard.n_valid) != (0, shard.vocab_size):
            raise ValueError(f"shard: must be the whole vocabulary where there is one rank, got {shard}")
        return shard

    @classmethod
    def even(cls, n_columns: int, rank: int, n_ranks: int) -> VocabShard:
        """Shard ``rank`` of ``n_ranks`` that own ``n_columns`` each: rank 1 of 2 with 3 is [3, 6) of 6."""
        start = rank * n_columns
        return cls(start, start + n_columns, n_ranks * n_columns)

    @classmethod
    def of_rank(
        cls, vocab_size: int, rank: int, n_ranks: int, n_columns: int | None = None, *, subject: str = LOGITS
    ) -> VocabShard:
        """Shard ``rank`` of ``n_ranks``: cut as ``torch.chunk`` and DTensor cut, or equal and padded.

        A rank has ``ceil(vocab_size / n_ranks)`` columns and the last one what is left. Where a rank's
        logits have ``n_columns`` of at least that, all ranks have as many, and what lies beyond the
        vocabulary is padding (Megatron's way).

        Raises:
            TypeError: an argument is no integer.
            ValueError: ``n_columns`` is neither; it holds the whole vocabulary on one of several ranks;
                or a rank would have no column.
        """
        checks.check_vocab_size(vocab_size)
        checks.check_integer("rank", rank)
        checks.check_integer("n_ranks", n_ranks)
        vocab_size, rank, n_ranks = int(vocab_size), int(rank), int(n_ranks)
        if not 0 <= rank < n_ranks:
            raise ValueError(f"rank: must be in [0, {n_ranks}), the ranks of the group, got {rank}")
        widest = -(-vocab_size // n_ranks)
        if n_columns is not None and n_columns >= widest and (n_columns < vocab_size or n_ranks == 1):
            return cls(rank * n_columns, (rank + 1) * n_columns, vocab_size)
        start = min(rank * widest, vocab_size)
        shard = cls(start, min(start + widest, vocab_size), vocab_size)
        all_have_columns = widest * (n_ranks - 1) < vocab_size
        if all_have_columns and n_columns in (None, shard.n_columns):
            return shard
        if n_columns is None:
            raise ValueError(
                f"vocab_size: must leave a column to the last of {n_ranks} ranks with {widest} each, "
                f"got {vocab_size}"
            )
        if n_ranks == 1:
            expected = f"at least vocab_size {vocab_size} without a group of several ranks"
            remedy = "pass group= if they are a shard"
        else:
            cut = f"{shard.n_columns}, or " if all_have_columns else ""
            expected = (
                f"{cut}with padding at least {widest} and less than {vocab_size}, on rank {rank} of "
                f"{n_ranks} for vocab_size {vocab_size}"
            )
            remedy = "whole logits take group=None, other shards shard=VocabShard(...)"
        raise ValueError(f"{subject} must be {expected}, got {n_columns}; {remedy}")
