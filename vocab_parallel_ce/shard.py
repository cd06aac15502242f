"""Say which columns of the vocabulary a rank owns."""

from __future__ import annotations

from typing import NamedTuple

from vocab_parallel_ce import checks

LOGITS = "logits: last dimension"  # what has a rank's columns, for messages


class VocabShard(NamedTuple):
    """The columns ``[start, stop)`` of a rank, of a vocabulary of ``vocab_size``.

    Columns at ``vocab_size`` and above are padding: outside the softmax, with gradient exactly 0. A shard may
    be all padding, or have no columns. The shards of a group must have every column once.

    Example:
        >>> from vocab_parallel_ce import VocabShard
        >>> VocabShard.for_rank(1003, 2, 3)  # the last of 3 ranks
        VocabShard(start=670, stop=1003, vocab_size=1003)
        >>> padded = VocabShard.for_rank(1003, 2, 3, n_columns=384)
        >>> padded, padded.n_valid
        (VocabShard(start=768, stop=1152, vocab_size=1003), 235)
    """

    start: int  #: the first column
    stop: int  #: the one after the last
    vocab_size: int  #: of the whole vocabulary

    @property
    def n_columns(self) -> int:
        """Return the number of columns, with padding."""
        return self.stop - self.start

    @property
    def n_valid(self) -> int:
        """Return the number of columns without padding, which are the first ones."""
        return max(0, min(self.stop, self.vocab_size) - self.start)

    def checked(self, n_columns: int | None, n_ranks: int, *, subject: str = LOGITS) -> VocabShard:
        """Return this shard in plain ints, checked for logits with ``n_columns`` (None: not known yet).

        Raises:
            TypeError: a field is not an integer.
            ValueError: there is no such shard, it has another width, or it is not whole for one rank.
        """
        for name, value in self._asdict().items():
            checks.check_integer(f"vocab_size.{name}", value)
        shard = VocabShard(*map(int, self))
        if not (0 <= shard.start <= shard.stop and shard.vocab_size >= 1):
            raise ValueError(f"vocab_size: a shard must be columns of a vocabulary, 0 <= start <= stop, got {shard}")
        if n_columns not in (None, shard.n_columns):
            raise ValueError(f"{subject} must be the width {shard.n_columns} of {shard}, got {n_columns}")
        if n_ranks == 1 and (shard.start, shard.n_valid) != (0, shard.vocab_size):
            expected = "a shard must be the whole vocabulary on one rank"
            raise ValueError(f"vocab_size: {expected}, got {shard}; pass the group= of several")
        return shard

    @classmethod
    def for_rank(
        cls, vocab_size: int, rank: int, n_ranks: int, n_columns: int | None = None, *, subject: str = LOGITS
    ) -> VocabShard:
        """Return shard ``rank`` of ``n_ranks``, cut as ``torch.chunk`` and DTensor cut, or padded.

        Each rank has ``ceil(vocab_size / n_ranks)`` columns until none are left: the last ones may have fewer, or
        none. If the logits have ``n_columns``, at least that many, then all ranks have ``n_columns``, and the columns
        beyond the vocabulary are padding, as in Megatron.

        Raises:
            TypeError: an argument is not an integer.
            ValueError: ``n_columns`` fits neither, or is the whole vocabulary on one of several ranks.
        """
        vocab_size = checks.checked_count("vocab_size", vocab_size)
        checks.check_integer("rank", rank)
        checks.check_integer("n_ranks", n_ranks)
        rank, n_ranks = int(rank), int(n_ranks)
        if not 0 <= rank < n_ranks:
            raise ValueError(f"rank: must be in [0, {n_ranks}), the ranks of the group, got {rank}")
        widest = -(-vocab_size // n_ranks)
        whole = max(vocab_size, widest + 1)  # a vocabulary of 1 has no part that is less
        if n_columns is not None and n_columns >= widest and (n_columns < whole or n_ranks == 1):
            return cls(rank * n_columns, (rank + 1) * n_columns, vocab_size)
        start = min(rank * widest, vocab_size)
        shard = cls(start, min(start + widest, vocab_size), vocab_size)
        if n_columns in (None, shard.n_columns):
            return shard
        if n_ranks == 1:
            expected = f"at least vocab_size {vocab_size} without a group of several ranks"
            remedy = "pass group= if they are a shard"
        else:
            padded = f"with padding at least {widest} and less than {whole}"
            expected = f"{shard.n_columns}, or {padded}, on rank {rank} of {n_ranks} for vocab_size {vocab_size}"
            remedy = "unsharded logits take group=None, other shards vocab_size=VocabShard(...)"
        raise ValueError(f"{subject} must be {expected}, got {n_columns}; {remedy}")
