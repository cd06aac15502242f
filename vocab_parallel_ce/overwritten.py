"""Memory that holds a gradient where logits were, so that another loss over it is refused.

The record lies on the storage, which views and detached tensors share, and is freed with it. It is void once
somebody has written to the tensor: PyTorch raises the version at each write that it sees. What it does not
see is a replayed CUDA graph that fills static logits anew: these have a new node in the autograd graph.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

_RECORD = "_vocab_parallel_ce_overwritten"


class _Rows(NamedTuple):
    """Where the rows of ``[..., C]`` logits lie in their storage, in elements."""

    offset: int
    shape: torch.Size
    stride: tuple[int, ...]
    itemsize: int

    @classmethod
    def of(cls, logits: Tensor) -> _Rows:
        return cls(int(logits.storage_offset()), logits.shape, logits.stride(), logits.itemsize)

    def intervals(self) -> tuple[Tensor, int]:
        """Sorted first bytes of the rows, and the bytes that each reaches over."""
        starts = torch.tensor([self.offset])
        for size, stride in zip(self.shape[:-1], self.stride[:-1], strict=True):
            starts = (starts.unsqueeze(1) + torch.arange(size) * stride).view(-1)
        reach = (self.shape[-1] - 1) * self.stride[-1] + 1
        return starts.sort().values * self.itemsize, reach * self.itemsize

    def overlap(self, other: _Rows) -> bool:
        """Whether a row of one shares memory with a row of the other."""
        if self == other:
            return 0 not in self.shape
        (mine, my_reach), (others, other_reach) = self.intervals(), other.intervals()
        if mine.numel() == 0 or others.numel() == 0:
            return False
        following = torch.searchsorted(mine, others)
        before = mine[(following - 1).clamp(min=0)]
        after = mine[following.clamp(max=mine.numel() - 1)]
        reached = (following > 0) & (before + my_reach > others)
        reaches = (following < mine.numel()) & (after < others + other_reach)
        return bool((reached | reaches).any())


class _Record(NamedTuple):
    """Rows of one storage that hold gradients, as of a version of its tensors."""

    version: int
    producer: int | None  # sequence number of the node that made the logits
    rows: tuple[_Rows, ...]


def mark_overwritten(logits: Tensor, version_before: int) -> None:
    """Record that ``logits [..., C]``, as the caller has them, now hold their gradient.

    ``version_before`` is their version before the write: earlier records of that version stay valid.
    """
    storage = logits.untyped_storage()
    earlier: _Record | None = getattr(storage, _RECORD, None)
    rows = _Rows.of(logits)
    others: tuple[_Rows, ...] = ()
    if earlier is not None and earlier.version == version_before:
        others = tuple(written for written in earlier.rows if written != rows)
    setattr(storage, _RECORD, _Record(logits._version, _producer(logits), (rows, *others)))


def check_not_overwritten(logits: Tensor) -> None:
    """Raise ValueError if an earlier call has written its gradient over a part of ``logits [..., C]``.

    Does not look while a CUDA graph is captured, or warmed up, which is done on another stream.
    """
    record: _Record | None = getattr(logits.untyped_storage(), _RECORD, None)
    if record is None or logits._version > record.version:
        return
    producer = _producer(logits)
    if None not in (producer, record.producer) and producer != record.producer:
        return
    if logits.is_cuda and _may_be_captured(logits.device):
        return
    rows = _Rows.of(logits)
    if any(rows.overlap(written) for written in record.rows):
        raise ValueError(
            "logits: expected logits, got memory in which an earlier call has left its gradient; ask for "
            "gradient='out_of_place' (overwrite_input=False) in the earlier call, or compute them again. If "
            "something that autograd cannot see has written new logits there, call "
            "torch.autograd.graph.increment_version(logits) after it"
        )


def _producer(logits: Tensor) -> int | None:
    base = logits._base
    node = (logits if base is None else base).grad_fn
    return None if node is None else node._sequence_nr()


def _may_be_captured(device: torch.device) -> bool:
    current = torch.cuda.current_stream(device)
    return torch.cuda.is_current_stream_capturing() or current != torch.cuda.default_stream(device)
