"""Memory that holds a gradient where logits were, so that another loss over it is refused.

The record is an attribute of the storage: it dies with the memory, and every tensor of that memory has it.
It is void once somebody has written to the logits. PyTorch raises the version at each write that it sees, for
a tensor and all views of it. It does not see a replayed CUDA graph that fills static logits anew. Their node
in the autograd graph is then younger than the loss.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


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
        starts = torch.tensor([self.offset], device="cpu")
        for size, stride in zip(self.shape[:-1], self.stride[:-1], strict=True):
            starts = (starts.unsqueeze(1) + torch.arange(size, device="cpu") * stride).view(-1)
        reach = (self.shape[-1] - 1) * self.stride[-1] + 1
        return starts.sort().values * self.itemsize, reach * self.itemsize

    def overlap(self, other: _Rows) -> bool:
        """Whether a row of one shares memory with a row of the other."""
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
    """What an earlier call has overwritten."""

    version: int  # of the logits after the write
    age: int  # above the sequence number of every autograd node before the loss
    rows: tuple[_Rows, ...] | None  # None: the whole storage


_RECORD = "_vocab_parallel_ce_overwritten"
_OF_A_LEAF = 2**63  # its loss may have run in another thread, which has sequence numbers of its own


def mark_overwritten(logits: Tensor, version_before: int, age: int) -> None:
    """Record that ``logits [..., C]``, as autograd has saved them, now hold their gradient.

    ``version_before`` is their version before the write: an earlier record of that version stays valid.
    """
    storage = logits.untyped_storage()
    rows: tuple[_Rows, ...] | None = None
    if storage.nbytes() != logits.numel() * logits.itemsize:
        rows = (_Rows.of(logits),)
        earlier = getattr(storage, _RECORD, None)
        if earlier is not None and earlier.version == version_before:
            rows = None if earlier.rows is None else rows + earlier.rows
    is_leaf = (logits if logits._base is None else logits._base).is_leaf
    setattr(storage, _RECORD, _Record(logits._version, _OF_A_LEAF if is_leaf else age, rows))


def check_not_overwritten(logits: Tensor) -> None:
    """Raise ValueError if an earlier call has written its gradient over a part of ``logits [..., C]``.

    Does not look while a CUDA graph is captured, or warmed up, which is done on another stream.
    """
    record: _Record | None = getattr(logits.untyped_storage(), _RECORD, None)
    if record is None or logits.is_inference() or logits._version > record.version:
        return
    base = logits._base
    node = (logits if base is None else base).grad_fn
    if node is not None and node._sequence_nr() >= record.age:
        return
    if logits.is_cuda and _may_be_captured(logits.device):
        return
    if record.rows is None or any(written.overlap(_Rows.of(logits)) for written in record.rows):
        raise ValueError(
            "logits: expected logits, got memory in which an earlier call has left its gradient; ask for "
            "gradient='out_of_place' (overwrite_input=False) in the earlier call, or compute them again. If "
            "something that autograd cannot see has written new logits there, call "
            "torch.autograd.graph.increment_version(logits) after it"
        )


def _may_be_captured(device: torch.device) -> bool:
    current = torch.cuda.current_stream(device)
    return torch.cuda.is_current_stream_capturing() or current != torch.cuda.default_stream(device)
