"""Whether the running backward is all that can still see the saved logits. Then it may write over them.

Whoever can see a tensor's memory holds a counted reference: to its Python object, also a weak one, to its C++ object
(other graph nodes do), to its storage (views, ``detach()``, saved outputs and numpy do), or to the storage's Python
object. For a view the references to its base count too. Other processes that share a storage are seen as well.

The right counts depend on the versions of PyTorch and Python. So they are measured once, on logits that nobody shares.
Any other count means that somebody else may read.

Cost: about a microsecond per backward.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

# Private functions. Without one of them, nothing is overwritten by default.
_storage_use_count: Callable[[int], int] | None = getattr(torch._C, "_storage_Use_Count", None)
_keeps_graph: Callable[[], bool] | None = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", None)
_modes: Callable[[], int] | None = getattr(torch._C, "_len_torch_dispatch_stack", None)
_has_gil: bool = getattr(sys, "_is_gil_enabled", lambda: True)()

_expected: dict[bool, tuple[Any, ...]] = {}  # for logits that are no view, and for a view


def can_tell() -> bool:
    """Return whether this Python and this PyTorch can count references."""
    found = _storage_use_count, _keeps_graph, _modes, getattr(Tensor, "_use_count", None)
    return _has_gil and None not in found


def measure() -> None:
    """Measure the counts of logits that nobody shares, unless that was done or something disturbs it."""
    if len(_expected) == 2 or not can_tell():
        return
    assert _modes is not None
    # A tracer or a mode may hold what it sees. Counts that are too high would hide a reader later.
    if sys.gettrace() is not None or sys.getprofile() is not None or _modes():
        return
    with torch._C.DisableTorchFunction(), torch.enable_grad():  # a function mode may hold them too
        source = torch.ones(2, 2, device="cpu", requires_grad=True)
        for is_view in (False, True):
            loss = _SavesLogits.apply((source * 1).view(1, 4) if is_view else source * 1)
            _expected[is_view] = _counts(loss.grad_fn.saved_tensors)


def is_sole_owner(saved: tuple[Any, ...]) -> bool:
    """Return whether nobody but the running backward can see ``saved[0]``, now or later.

    ``saved`` is a tuple of ``ctx.saved_tensors``, and the caller must hold its tensors in no other way.
    """
    if len(_expected) < 2 or _keeps_graph is None or _keeps_graph():
        return False
    return _counts(saved) == _expected[saved[0]._is_view()]


def _counts(saved: tuple[Any, ...]) -> tuple[Any, ...]:
    logits = saved[0]
    storage = logits.untyped_storage()
    assert _storage_use_count is not None
    counts = (
        sys.getrefcount(logits),
        logits._use_count(),
        sys.getrefcount(storage),
        _storage_use_count(storage._cdata),
        weakref.getweakrefcount(logits),
        # Not if another library or another process has the memory. Every CUDA storage says that it is shared.
        storage.resizable() and not (logits.is_cpu and storage.is_shared()),
    )
    if not logits._is_view():
        return counts
    base = logits._base
    return (*counts, sys.getrefcount(base), base._use_count())


class _SavesLogits(torch.autograd.Function):
    """What a loss does with its logits."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor) -> Tensor:
        ctx.save_for_backward(logits)
        return logits.new_ones(())

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Tensor:
        raise NotImplementedError
