"""Remember which logits hold their gradient, so that another loss over them is an error.

The record is an attribute of the storage. So it dies with the memory, and every tensor of the memory has it.
A write to the logits voids it: PyTorch raises the version of a tensor and its views at each write. It misses
a replayed CUDA graph that fills static logits, but their autograd node is then younger than the loss.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class _Rows(NamedTuple):
    """Position of the rows of ``[..., C]`` logits in their storage, in elements."""

    offset: int
    shape: torch.Size
    stride: tuple[int, ...]
    itemsize: int

    @classmethod
    def of(cls, logits: Tensor) -> _Rows:
        return cls(int(logits.storage_offset()), logits.shape, logits.stride(), logits.itemsize)

    def intervals(self) -> tuple[Tensor, int]:
        """Return the sorted first bytes of the rows, and the bytes from the first to the last of a row."""
        starts = torch.tensor([self.offset], device="cpu")
        for size, stride in zip(self.shape[:-1], self.stride[:-1], strict=True):
            starts = (starts.unsqueeze(1) + torch.arange(size, device="cpu") * stride).view(-1)
        reach = (self.shape[-1] - 1) * self.stride[-1] + 1
        return starts.sort().values * self.itemsize, reach * self.itemsize

    def overlap(self, other: _Rows) -> bool:
        """Return whether a row of one shares memory with a row of the other."""
        (mine, my_reach), (others, other_reach) = self.intervals(), other.intervals()
        # A row of mine overlaps a row of the other if it starts in (start - my_reach, start + other_reach).
        first = torch.searchsorted(mine, others - my_reach, right=True)
        return bool((torch.searchsorted(mine, others + other_reach) > first).any())


class _Record(NamedTuple):
    """A gradient in the memory of logits."""

    version: int  # of the logits after the write
    age: int  # above the sequence numbers of all autograd nodes that are older than the loss
    rows: tuple[_Rows, ...] | None  # None: the whole storage


_RECORD = "_vocab_parallel_ce_overwritten"
_OLDEST = 2**63  # for a leaf: its loss may have run in another thread, which counts its own sequence numbers


def mark_overwritten(logits: Tensor, version_before: int, age: int) -> None:
    """Record that ``logits [..., C]``, as autograd saved them, now hold their gradient.

    An earlier record stays valid if it is of ``version_before``, the version before the write.
    """
    storage = logits.untyped_storage()
    rows: tuple[_Rows, ...] | None = None
    if storage.nbytes() != logits.numel() * logits.itemsize:
        rows = (_Rows.of(logits),)
        earlier = getattr(storage, _RECORD, None)
        if earlier is not None and earlier.version == version_before:
            rows = None if earlier.rows is None else rows + earlier.rows
    is_leaf = (logits if logits._base is None else logits._base).is_leaf
    setattr(storage, _RECORD, _Record(logits._version, _OLDEST if is_leaf else age, rows))


def check_not_overwritten(logits: Tensor) -> None:
    """Raise ValueError if a part of ``logits [..., C]`` holds the gradient of an earlier call.

    Skips the check while a CUDA graph is captured, and on other streams, where it is warmed up.
    """
    record: _Record | None = getattr(logits.untyped_storage(), _RECORD, None)
    if record is None or logits.is_inference() or logits._version > record.version:
        return
    node = (logits if logits._base is None else logits._base).grad_fn
    if node is not None and node._sequence_nr() >= record.age:
        return
    if logits.is_cuda:
        other_stream = torch.cuda.current_stream(logits.device) != torch.cuda.default_stream(logits.device)
        if other_stream or torch.cuda.is_current_stream_capturing():
            return
    if record.rows is None or any(written.overlap(_Rows.of(logits)) for written in record.rows):
        raise ValueError(
            "logits: expected logits, got memory in which an earlier call has left its gradient; ask for "
            "gradient='out_of_place' (overwrite_input=False) in the earlier call, or compute them again. If "
            "autograd cannot see who wrote new logits there, call "
            "torch.autograd.graph.increment_version(logits) after it"
        )
