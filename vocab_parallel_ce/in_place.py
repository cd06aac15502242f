"""Write gradients over the logits: which memory holds one, and whether nobody else can see the logits.

If a mode was passed explicitly, a record says which logits hold their gradient: another loss over them is an error. The
record is an attribute of the storage. So every tensor of that memory finds it, and it ends with the memory.
A write to the logits that autograd sees voids it: PyTorch raises the version of a tensor and its views. It misses
a replayed CUDA graph that fills static logits, but their autograd node is then younger than the loss.

By default backward writes over the saved logits only if nothing else can still see them (:func:`counts_of`).
Whoever can see a tensor's memory holds a counted reference: to its Python object, to its C++ object
(other graph nodes do), to its storage (views, ``detach()``, saved outputs and numpy do), or to the storage's Python
object. For a view the references to its base count too. Weak references to a Python object count as well. Other
processes that share a CPU storage are seen. Three readers are not: work queued on another CUDA stream, another process
with the memory of a CUDA tensor, and weak references of C++ (``StorageWeakRef``). Subclasses of tensors, whose values
may be another tensor's, are never overwritten (``plan.plan_call``).

The right counts depend on the versions of PyTorch and Python. So they are measured once, on logits that nobody shares.
Any other count means that somebody else may read.

Counting takes about a microsecond per backward.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

# Of a storage, the record of the gradients in it: the logits' version after the last write, an age above the sequence
# numbers of all autograd nodes that are older than the loss, and the bytes from the first to the last of each gradient.
OVERWRITTEN = "_vocab_parallel_ce_overwritten"
_OLDEST = 2**63  # for a leaf: its loss may have run in another thread, which counts its own sequence numbers
# Of this thread: the number of the next autograd node. A private function: without it no node is new.
current_age: Callable[[], int] = getattr(torch._C._autograd, "_get_sequence_nr", lambda: _OLDEST)


def mark_overwritten(logits: Tensor, version_before: int, age: int) -> None:
    """Record that ``logits [..., C]``, as autograd saved them, now hold their gradient.

    An earlier record stays valid if it is of ``version_before``, the version before the write. ``age`` is the
    :func:`current_age` of the loss's forward.
    """
    storage = logits.untyped_storage()
    version, _, spans = getattr(storage, OVERWRITTEN, (None, None, ()))
    spans = spans if version == version_before else ()
    base = logits._base
    age = _OLDEST if (logits if base is None else base).is_leaf else age
    setattr(storage, OVERWRITTEN, (logits._version, age, (*spans, _span(logits))))


def check_not_overwritten(logits: Tensor, name: str = "logits") -> None:
    """Raise ValueError if a part of ``logits [..., C]``, the caller's ``name``, holds the gradient of an earlier call.

    Skips the check while a CUDA graph is captured, and on other streams, where it is warmed up.
    """
    record = getattr(logits.untyped_storage(), OVERWRITTEN, None)
    if record is None or logits.is_inference():
        return
    version, oldest, spans = record
    if logits._version > version:
        return
    node = (logits if logits._base is None else logits._base).grad_fn
    if node is not None and node._sequence_nr() >= oldest:
        return
    if logits.is_cuda:
        other_stream = torch.cuda.current_stream(logits.device) != torch.cuda.default_stream(logits.device)
        if other_stream or torch.cuda.is_current_stream_capturing():
            return
    span = _span(logits)
    if any(span.start < written.stop and written.start < span.stop for written in spans):
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


# Private functions. Without one of these, nothing is overwritten by default.
_storage_use_count: Callable[[int], int] | None = getattr(torch._C, "_storage_Use_Count", None)
# Whether the running backward keeps its graph for another.
keeps_graph: Any = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", None)
_modes: Callable[[], int] | None = getattr(torch._C, "_len_torch_dispatch_stack", None)
_has_gil: bool = getattr(sys, "_is_gil_enabled", lambda: True)()

# The counts of logits that nobody else can see: of no view, and of a view. Empty until they are measured.
alone: list[tuple[Any, ...]] = []


def can_tell() -> bool:
    """Return whether this Python and this PyTorch can count references."""
    measured = _storage_use_count, keeps_graph, _modes, getattr(Tensor, "_use_count", None)
    return _has_gil and None not in measured


def measure() -> None:
    """Measure the counts of logits that nobody shares, unless that was done or something disturbs it."""
    if alone or not can_tell():
        return
    assert _modes is not None
    # A tracer or a mode may hold what it sees. Counts that are too high would hide a reader later.
    if sys.gettrace() is not None or sys.getprofile() is not None or _modes():
        return
    with torch._C.DisableTorchFunction(), torch.enable_grad():  # a function mode may hold them too
        source = torch.ones(2, 2, device="cpu", requires_grad=True)
        measured = []
        for is_view in (False, True):
            loss = _SavesLogits.apply((source * 1).view(1, 4) if is_view else source * 1)
            measured.append(counts_of(loss.grad_fn.saved_tensors))
        alone[:] = measured


def counts_of(saved: tuple[Any, ...]) -> tuple[Any, ...]:
    """Count who can see ``saved[0]``.

    ``saved`` is a tuple of ``ctx.saved_tensors``, and the caller must hold its tensors in no other way. If the counts
    are in ``alone``, nobody but the running backward can, now or later, unless it :func:`keeps_graph`.
    """
    logits = saved[0]
    storage = logits.untyped_storage()
    assert _storage_use_count is not None
    counts = (
        sys.getrefcount(logits),
        logits._use_count(),
        sys.getrefcount(storage),
        _storage_use_count(storage._cdata),
        weakref.getweakrefcount(logits) + weakref.getweakrefcount(storage),
        # Not if another library or another process has the memory. Every CUDA storage says that it is shared.
        storage.resizable() and not (logits.is_cpu and storage.is_shared()),
    )
    base = logits._base
    if base is None:
        return counts
    return (*counts, sys.getrefcount(base), base._use_count(), weakref.getweakrefcount(base))


class _SavesLogits(torch.autograd.Function):
    """What a loss does with its logits."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor) -> Tensor:
        ctx.save_for_backward(logits)
        return logits.new_ones(())
