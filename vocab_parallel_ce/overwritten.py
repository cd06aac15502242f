"""Remember which logits hold their gradient because a mode was asked for by name: another loss over them is an error.

The record is an attribute of the storage. So every tensor of that memory finds it, and it ends with the memory.
A write to the logits that autograd sees voids it: PyTorch raises the version of a tensor and its views. It misses
a replayed CUDA graph that fills static logits, but their autograd node is then younger than the loss.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor


class _Record(NamedTuple):
    """Gradients in the memory of logits."""

    version: int  # of the logits after the last write
    age: int  # above the sequence numbers of all autograd nodes that are older than the loss
    spans: tuple[range, ...]  # the bytes from the first to the last of each gradient


_RECORD = "_vocab_parallel_ce_overwritten"
_OLDEST = 2**63  # for a leaf: its loss may have run in another thread, which counts its own sequence numbers
# Of this thread: the number of the next autograd node. A private function: without it no node is new.
current_age: Callable[[], int] = getattr(torch._C._autograd, "_get_sequence_nr", lambda: _OLDEST)


def mark_overwritten(logits: Tensor, version_before: int, age: int) -> None:
    """Record that ``logits [..., C]``, as autograd saved them, now hold their gradient.

    An earlier record stays valid if it is of ``version_before``, the version before the write. ``age`` is the
    :func:`current_age` of the loss's forward.
    """
    storage = logits.untyped_storage()
    earlier = getattr(storage, _RECORD, None)
    spans = earlier.spans if earlier is not None and earlier.version == version_before else ()
    base = logits._base
    age = _OLDEST if (logits if base is None else base).is_leaf else age
    setattr(storage, _RECORD, _Record(logits._version, age, (*spans, _span(logits))))


def check_not_overwritten(logits: Tensor, name: str = "logits") -> None:
    """Raise ValueError if a part of ``logits [..., C]``, the caller's ``name``, holds the gradient of an earlier call.

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
    own = _span(logits)
    if any(own.start < written.stop and written.start < own.stop for written in record.spans):
        raise ValueError(
            f"{name}: expected logits, got memory in which an earlier call has left its gradient; ask for "
            "gradient='out_of_place' (overwrite_input=False) in the earlier call, or compute them again. If "
            "autograd cannot see who wrote new logits there, call "
            "torch.autograd.graph.increment_version(logits) after it"
        )


def _span(logits: Tensor) -> range:
    """Return the bytes of the storage from the first to the last that ``logits`` use; none if they are empty."""
    reach = logits.numel()
    if reach and not logits.is_contiguous():
        reach = sum((size - 1) * stride for size, stride in zip(logits.shape, logits.stride(), strict=True)) + 1
    first = logits.storage_offset() * logits.itemsize
    return range(first, first + reach * logits.itemsize)
