"""Which columns of the vocabulary a rank has, and how its tensors lie in memory.

:class:`RowLayout` says where the rows of a strided tensor lie. What kernels cannot walk is copied, and labels and
factors are viewed per row. A kernel walks a view whose last dimension is dense. It gets the 1-D base tensor and six
integers. Row ``r`` of the flattened ``[N, C]`` view begins ``offset + i0 * stride0 + i1 * stride1 + i2 * stride2``
elements after the base, with ``r = (i0 * size1 + i1) * size2 + i2``. Dimensions of size 1 are dropped here, and
mergeable ones are merged.

Example: the view ``x[:, :-1]`` of a contiguous ``x [2, 5, 8]`` has its rows at 0, 8, 16, 24, 40, 48,
56, 64: ``RowLayout(offset=0, size1=4, size2=1, stride0=40, stride1=8, stride2=0)``.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from vocab_parallel_ce import checks

LOGITS = "logits: last dimension"  # what has a rank's columns, for messages
VECTOR_BYTES = 16
LINE_BYTES = 128


class VocabShard(NamedTuple):
    """The columns ``[start, stop)`` of a rank, of a vocabulary of ``vocab_size``.

    Columns at ``vocab_size`` and above are padding: outside the softmax, with gradient exactly 0. A shard may
    be all padding. The shards of a group must have every column once.

    Example:
        >>> from vocab_parallel_ce import VocabShard
        >>> VocabShard.of_rank(1003, 2, 3)  # the last of 3 ranks
        VocabShard(start=670, stop=1003, vocab_size=1003)
        >>> padded = VocabShard.of_rank(1003, 2, 3, n_columns=384)
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
            checks.check_integer(f"vocab_size: {name}", value)
        shard = VocabShard(*map(int, self))
        if not (0 <= shard.start < shard.stop and shard.vocab_size >= 1):
            raise ValueError(f"vocab_size: a shard must be columns of a vocabulary, 0 <= start < stop, got {shard}")
        if n_columns not in (None, shard.n_columns):
            raise ValueError(f"{subject} must be the width {shard.n_columns} of {shard}, got {n_columns}")
        if n_ranks == 1 and (shard.start, shard.n_valid) != (0, shard.vocab_size):
            raise ValueError(f"vocab_size: a shard must be the whole vocabulary where there is one rank, got {shard}")
        return shard

    @classmethod
    def even(cls, n_columns: int, rank: int, n_ranks: int) -> VocabShard:
        """Return shard ``rank`` of ``n_ranks`` equal ones: rank 1 of 2 with 3 columns has [3, 6) of 6."""
        start = rank * n_columns
        return cls(start, start + n_columns, n_ranks * n_columns)

    @classmethod
    def of_rank(
        cls, vocab_size: int, rank: int, n_ranks: int, n_columns: int | None = None, *, subject: str = LOGITS
    ) -> VocabShard:
        """Return shard ``rank`` of ``n_ranks``, cut as ``torch.chunk`` and DTensor cut, or padded.

        Each rank has ``ceil(vocab_size / n_ranks)`` columns; the last has the rest. If the logits have
        ``n_columns``, at least that many, then all ranks have ``n_columns``, and the columns beyond the
        vocabulary are padding, as in Megatron.

        Raises:
            TypeError: an argument is not an integer.
            ValueError: ``n_columns`` fits neither, or is the whole vocabulary on one of several ranks; or a
                rank would have no column.
        """
        vocab_size = checks.checked_count("vocab_size", vocab_size)
        checks.check_integer("rank", rank)
        checks.check_integer("n_ranks", n_ranks)
        rank, n_ranks = int(rank), int(n_ranks)
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
            left = f"a column to the last of {n_ranks} ranks with {widest} each"
            raise ValueError(f"vocab_size: must leave {left}, got {vocab_size}")
        if n_ranks == 1:
            expected = f"at least vocab_size {vocab_size} without a group of several ranks"
            remedy = "pass group= if they are a shard"
        else:
            cut = f"{shard.n_columns}, or " if all_have_columns else ""
            padded = f"with padding at least {widest} and less than {vocab_size}"
            expected = f"{cut}{padded}, on rank {rank} of {n_ranks} for vocab_size {vocab_size}"
            remedy = "whole logits take group=None, other shards vocab_size=VocabShard(...)"
        raise ValueError(f"{subject} must be {expected}, got {n_columns}; {remedy}")


class RowLayout(NamedTuple):
    """Element offsets of the rows of a view; see the module docstring."""

    offset: int
    size1: int
    size2: int
    stride0: int
    stride1: int
    stride2: int

    @property
    def pitch(self) -> int:
        """The largest number of elements that every row begins a multiple of after the base."""
        return math.gcd(self.offset, self.stride0, self.stride1, self.stride2)


def row_layout(logits: Tensor) -> RowLayout | None:
    """Layout of ``logits [..., C]``, or None where rows are not dense or take more than three levels."""
    columns = logits.shape[-1]
    if logits.is_contiguous():
        return RowLayout(0, 1, 1, columns, 0, 0)
    levels = _merged_levels(logits)
    if (columns > 1 and logits.stride(-1) != 1) or len(levels) > 3:
        return None
    (_, stride0), (size1, stride1), (size2, stride2) = levels + [(1, 0)] * (3 - len(levels))
    return RowLayout(0, size1, size2, stride0, stride1, stride2)


def begins_at_a_boundary(logits: Tensor) -> bool:
    """Whether :func:`aligned_base` of logits on a GPU is at a boundary of 16 bytes."""
    if not logits.is_cuda:
        return False
    misaligned = logits.data_ptr() % VECTOR_BYTES
    return misaligned == 0 or logits.storage_offset() * logits.element_size() >= misaligned


def rows_are_disjoint(logits: Tensor) -> bool:
    """Whether writing one row of ``logits [..., C]``, dense in its last dimension, changes no other."""
    if logits.is_contiguous():
        return True
    reach = logits.shape[-1]
    for size, stride in sorted(_merged_levels(logits), key=lambda level: level[1]):
        if stride < reach:
            return False
        reach = stride * (size - 1) + reach
    return True


def aligned_base(logits: Tensor) -> tuple[Tensor, int]:
    """A 1-D tensor at a 16-byte boundary at or before ``logits``, and the elements between the two.

    Kernels see only the boundary, so the compiler can prove that a multiple of 16 bytes from it is
    aligned. Storage that begins off a boundary itself is returned as it is: correct, and slower.
    """
    misaligned = logits.data_ptr() % VECTOR_BYTES // logits.element_size()
    start = logits.storage_offset() - misaligned
    if misaligned == 0 or start < 0:
        return logits, 0
    return torch.as_strided(logits.detach(), (1,), (1,), start), misaligned


def walkable(logits: Tensor) -> Tensor:
    """Return ``logits``, or a contiguous copy if kernels cannot walk their rows."""
    return logits if logits.is_contiguous() or row_layout(logits) is not None else logits.contiguous()


def overwritable(logits: Tensor) -> Tensor:
    """Return ``logits``, or a contiguous copy if rows cannot be walked or share memory with each other."""
    if logits.is_contiguous():
        return logits
    logits = walkable(logits)
    return logits if rows_are_disjoint(logits) else logits.contiguous()


def source_and_new(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return the logits to read and a new tensor for their gradient, laid out alike: gaps cost a copy."""
    grad, is_contiguous = torch.empty_like(logits), logits.is_contiguous()
    if not is_contiguous and row_layout(grad) is None:
        grad = torch.empty_like(logits, memory_format=torch.contiguous_format)
    alike = (is_contiguous or grad.stride() == logits.stride()) and logits.data_ptr() % 16 == grad.data_ptr() % 16
    return (logits, grad) if alike else (grad.copy_(logits), grad)


def shares_storage(a: Tensor, b: Tensor) -> bool:
    """Whether both lie in one storage, also as parts that do not overlap."""
    return a.numel() > 0 and a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


def constant(values: Tensor, logits: Tensor) -> Tensor:
    """Return ``values``, which backward reads, or a copy if it may overwrite them or autograd cannot save them."""
    copies = torch.is_grad_enabled() and (values.is_inference() or shares_storage(values, logits))
    return values.clone() if copies else values


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of the arithmetic, the statistics and the loss of logits: fp32, or fp64 for fp64 logits."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def per_row(grad_output: Tensor, logits: Tensor) -> Tensor:
    """Return ``[N]``, a view of a ``grad_output`` of one element for all rows (stride 0) or one per row."""
    if grad_output.numel() == 1:
        return grad_output.as_strided((logits.numel() // logits.shape[-1],), (0,))
    return grad_output if grad_output.dim() == 1 else grad_output.reshape(-1)


def flat(values: Tensor) -> Tensor:
    """Return ``[N]`` contiguous values of rows: a view if they are contiguous already."""
    return values if values.dim() == 1 and values.is_contiguous() else values.reshape(-1).contiguous()


def _merged_levels(logits: Tensor) -> list[tuple[int, int]]:
    """(size, stride) of the leading dimensions, outermost first: no size 1, merged where possible."""
    levels: list[tuple[int, int]] = []
    for size, stride in zip(logits.shape[:-1], logits.stride()[:-1], strict=True):
        if size == 1:
            continue
        if levels and levels[-1][1] == size * stride:
            size, stride = size * levels.pop()[0], stride
        levels.append((size, stride))
    return levels
