"""Memory that holds a gradient where logits were, so that another loss over it is refused.

A record is valid as long as the overwritten tensor lives, and void once somebody has written to it. PyTorch
raises the version at each write that it sees, for a tensor and all views of it. It does not see a replayed
CUDA graph that fills static logits anew. Their node in the autograd graph is then younger than the loss.
"""

from __future__ import annotations

import weakref
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


# By the id of the tensor whose memory was overwritten, itself or in a view: a weak reference to it, its
# version then, the age of the loss, and the rows of views (None: all of it). Plain tuples: every backward
# makes one.
_Record = tuple["weakref.ref[Tensor]", int, int, tuple[_Rows, ...] | None]
_records: dict[int, _Record] = {}
# A leaf may be another's memory, detached, and die before it: its record lies on the storage.
_ON_STORAGE = "_vocab_parallel_ce_overwritten"
_marks_storages = False
NEVER = 2**63
_most_records = 64  # before those of freed tensors are dropped


def reference_to(logits: Tensor) -> weakref.ref[Tensor]:
    """To the tensor that a record is of: ``logits``, or the base of the view that they are."""
    base = logits._base
    return weakref.ref(logits if base is None else base)


def mark_overwritten(logits: Tensor, version_before: int, reference: weakref.ref[Tensor], age: int) -> None:
    """Record that ``logits [..., C]``, as autograd has saved them, now hold their gradient.

    ``version_before`` is their version before the write: an earlier record of that version stays valid.
    ``reference`` is :func:`reference_to` what the caller passed. Saved-tensor hooks may have replaced it by a
    copy, or by another tensor of the same memory. ``age`` is above the number of every node before the loss.
    """
    owner = reference()
    if owner is None:
        return
    base = logits._base
    if owner is not (logits if base is None else base):
        if owner.untyped_storage()._cdata != logits.untyped_storage()._cdata:
            return
        base = owner
    rows: tuple[_Rows, ...] | None = None
    if base is not None:
        rows = (_Rows.of(logits),)
        earlier = _records.get(id(owner))
        if earlier is not None and earlier[0]() is owner and earlier[1] == version_before:
            rows = None if earlier[3] is None else rows + earlier[3]
    if owner.is_leaf:
        global _marks_storages
        _marks_storages = True
        setattr(owner.untyped_storage(), _ON_STORAGE, (reference, logits._version, NEVER, None))
    if len(_records) >= _most_records:
        _drop_freed()
    _records[id(owner)] = (reference, logits._version, age, rows)


def _drop_freed() -> None:
    global _most_records
    for key, record in list(_records.items()):
        if record[0]() is None:
            _records.pop(key, None)
    _most_records = max(64, 2 * len(_records))


def check_not_overwritten(logits: Tensor, base: Tensor | None) -> None:
    """Raise ValueError if an earlier call has written its gradient over a part of ``logits [..., C]``.

    ``base`` is their base if they are a view. Does not look while a CUDA graph is captured, or warmed up,
    which is done on another stream.
    """
    owner = logits if base is None else base
    record = _records.get(id(owner))
    if record is None or record[0]() is not owner:
        # In a graph of its own, memory has one owner. A detached tensor shares somebody else's.
        record = _record_of_alias(logits) if owner.is_leaf and _records else None
        if record is None and _marks_storages:
            record = getattr(logits.untyped_storage(), _ON_STORAGE, None)
        if record is None:
            return
    _, version, age, rows = record
    node = owner.grad_fn
    if (
        logits.is_inference()
        or logits._version > version
        or (node is not None and node._sequence_nr() >= age)
    ):
        return
    if logits.is_cuda and _may_be_captured(logits.device):
        return
    if rows is None or any(written.overlap(_Rows.of(logits)) for written in rows):
        raise ValueError(
            "logits: expected logits, got memory in which an earlier call has left its gradient; ask for "
            "gradient='out_of_place' (overwrite_input=False) in the earlier call, or compute them again. If "
            "something that autograd cannot see has written new logits there, call "
            "torch.autograd.graph.increment_version(logits) after it"
        )


def _record_of_alias(logits: Tensor) -> _Record | None:
    """The record of a tensor that shares its storage with ``logits``, which are in no graph."""
    storage = logits.untyped_storage()._cdata
    for record in list(_records.values()):
        owner = record[0]()
        if owner is not None and owner.untyped_storage()._cdata == storage:
            return record
    return None


def _may_be_captured(device: torch.device) -> bool:
    current = torch.cuda.current_stream(device)
    return torch.cuda.is_current_stream_capturing() or current != torch.cuda.default_stream(device)
