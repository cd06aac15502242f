"""Logits that are made only if somebody looks at them.

A head returns a :class:`LazyLogits` instead of its logits. It is the output of an autograd Function of the hidden
states and the head's parameters, so it has its place in the graph, but no values. It remembers what was done to the
logits, and ``F.cross_entropy`` of it calls the fused loss. Whatever reads it makes the values, as the head would have.
"""

from __future__ import annotations

import math
import threading
import types
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import enable_reentrant_dispatch
from torch.utils._pytree import tree_leaves, tree_map_only

from vocab_parallel_ce.integrations.lazy_head import Head, checkpoint_hook, history
from vocab_parallel_ce.options import REDUCTIONS
from vocab_parallel_ce.plan import saved_as_it_is

METADATA = {
    *("shape", "dtype", "device", "layout", "ndim", "dim", "size", "numel", "nelement", "element_size", "stride"),
    *("requires_grad", "is_leaf", "grad_fn", "is_cuda", "is_cpu", "is_meta", "is_sparse", "is_nested", "is_complex"),
    *("is_quantized", "is_contiguous", "is_floating_point", "is_inference", "get_device", "_base", "_is_view"),
    *("__len__", "__hash__", "storage_offset", "_version", "output_nr", "grad", "retains_grad", "requires_grad_"),
    "backward",
}
IN_PLACE = {"__setitem__", "__iadd__", "__isub__", "__imul__", "__idiv__", "__itruediv__"}  # and names with a last "_"
METHODS = (types.MethodDescriptorType, types.WrapperDescriptorType)  # of C
MULTIPLY, DIVIDE = ("mul", "multiply", "__mul__", "__rmul__"), ("div", "divide", "true_divide", "__truediv__")
FUSED = "node of the logits"  # of the metadata of a fused loss's node
POINTWISE = (torch.ops.aten.mul.Tensor, torch.ops.aten.div.Tensor, torch.ops.aten.tanh.default)

without_overrides = torch._C.DisableTorchFunctionSubclass


class Recorded(NamedTuple):
    """What the fused loss needs to know of operations on the logits."""

    hidden: Tensor  # [..., D], with the leading dimensions of the logits
    n_columns: int  # the first ones, of the head's
    logit_scale: float = 1.0
    softcap: float | None = None

    def scaled(self, factor: float) -> Recorded:
        if self.softcap is None:
            return self._replace(logit_scale=self.logit_scale * factor)
        # factor * softcap * tanh(scale * u / softcap) = c * tanh((scale * factor) * u / c) for c = factor * softcap
        return self._replace(logit_scale=self.logit_scale * factor, softcap=self.softcap * factor)


class LazyLogits(Tensor):
    """Stands for logits that do not exist. It is pickled, gathered, printed and computed with as real ones.

    To autograd it is a tensor like any other: its history is that of the operations that made it.
    """

    _head: Head
    _compute: Callable[[], Tensor] | None  # makes the values
    _real: Tensor | None
    _recorded: Recorded | None
    _node: object  # what made it: the fused loss would skip whatever else has a place in its history

    @staticmethod
    def __new__(cls, head: Head, like: Tensor, compute: Callable[[], Tensor], storage_offset: int = 0) -> LazyLogits:
        """``like`` is a tensor on ``meta`` of its shape, strides and dtype."""
        lazy = Tensor._make_wrapper_subclass(
            cls, like.shape, like.stride(), storage_offset, dtype=like.dtype, device=head.hidden.device
        )
        lazy._head, lazy._compute, lazy._real, lazy._recorded, lazy._node = head, compute, None, None, None
        head.lazy.append(weakref.ref(lazy))
        return lazy

    def make(self, reason: str = "make") -> Tensor:
        """Return the real logits: a plain tensor with the same values and the same autograd history."""
        self._read(reason)
        with without_overrides(), torch.enable_grad():
            return torch.ops.aten.alias(self)

    def _read(self, reason: str) -> Tensor:
        """Return the values, and compute those of all that was recorded before somebody writes to them."""
        if not self._head.is_made:
            self._head.check_unchanged()
            self._head.report(f"{reason} made the logits")
            self._head.is_made = True
            for relative in [reference() for reference in self._head.lazy]:
                if relative is not None:
                    relative._made()
        return self._made()

    def _made(self) -> Tensor:
        if self._compute is not None:
            modes = self._head.modes
            with modes._replace(grad=False, autocast=False).again():
                self._real, self._compute = self._compute(), None
        assert self._real is not None
        return self._real

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, func.__name__
        if name in ("__get__", "__set__"):
            name = func.__self__.__name__ if name == "__get__" else name
        if func is F.cross_entropy and not args:
            args, kwargs = (kwargs["input"],), {key: value for key, value in kwargs.items() if key != "input"}
        lazy = args[0] if args else None
        result = lazy._answer(func, name, args, kwargs) if isinstance(lazy, LazyLogits) else NotImplemented
        if result is not NotImplemented:
            return result
        if name in ("grad", "backward"):  # of torch.autograd: these logits may be its inputs
            _check_inputs(*args, **kwargs)
            return _direct(func, args, kwargs)
        return func(*_real_of(name, args), **_real_of(name, kwargs))

    def _answer(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        """Return what ``func`` returns if it needs no logits or must have these ones, else NotImplemented."""
        if name == "__set__" and func.__self__ is Tensor.data:
            raise RuntimeError("logits: expected no assignment to data, got one; write with copy_()")
        if name in METADATA or name == "__set__":
            return _direct(func, args, kwargs)
        if name in ("register_hook", "retain_grad"):
            # The loss uses the logits if somebody waits for their gradient; one that was fused before did not.
            self._head.watch() if self._head.is_fused else self._read(name)
            return _direct(func, args, kwargs)
        # What writes must have its place in the history of these logits.
        if name in IN_PLACE or (name[-1] == "_" != name[-2:-1] and isinstance(func, METHODS)):
            self._read(name)
            return _direct(func, (self, *_real_of(name, args[1:])), _real_of(name, kwargs))
        with without_overrides():
            is_as_made = self.grad_fn is self._node
            hides_gradient = self.requires_grad and not torch.is_grad_enabled()
            is_read_later = self.is_inference() and not torch.is_inference_mode_enabled()
        # A checkpoint runs its region again: it must find these logits as they were, real ones.
        other_checkpoint = checkpoint_hook() not in (None, self._head.checkpoint)
        if self._head.is_made or self._recorded is None or not is_as_made or other_checkpoint or is_read_later:
            return NotImplemented
        # Inside an autograd Function, what is recorded would not be its output, but what is recorded last may be: DDP's
        # function clones what it ignores, and that of ZeRO-3 detaches it.
        if name == "detach" and not hides_gradient or hides_gradient and name not in ("clone", "detach"):
            return NotImplemented
        return _cross_entropy(*args, **kwargs) if func is F.cross_entropy else _record(func, name, args, kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if _recording.rows is not None:
            return _deferred(func, args, kwargs or {}, _recording.rows)
        lazy_of: dict[int, LazyLogits] = {}

        def values(lazy: LazyLogits) -> Tensor:
            with enable_reentrant_dispatch():
                real = lazy._read(func.__name__)
            lazy_of[id(real)] = lazy
            return real

        made = func(*tree_map_only(LazyLogits, values, args), **tree_map_only(LazyLogits, values, kwargs or {}))
        # What writes returns what it wrote to.
        return tree_map_only(Tensor, lambda tensor: lazy_of.get(id(tensor), tensor), made)


def _run_as_it_is(*functions: Any) -> None:
    """Let Dynamo trace neither functions nor what they call: to trace a call with lazy logits, it looks at them."""
    api: Any = torch._C._dynamo.eval_frame
    if hasattr(api, "_FrameExecStrategy"):
        skip = api._FrameExecStrategy(api._FrameAction.SKIP, api._FrameAction.SKIP)
        for function in functions:
            api.set_code_exec_strategy(function.__func__.__code__, skip)


_run_as_it_is(LazyLogits.__torch_function__, LazyLogits.__torch_dispatch__)


class _Output(torch.autograd.Function):
    """Makes lazy logits an output of their head's hidden states and parameters."""

    @staticmethod
    def forward(ctx: Any, head: Head, lazy: list[LazyLogits], *inputs: Tensor) -> LazyLogits:
        ctx.head = head
        ctx.set_materialize_grads(False)
        return lazy[0]

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        needed = ctx.needs_input_grad[2:]
        return None, None, *([None] * len(needed) if grad is None else ctx.head.gradients(grad, needed))


def lazy_logits(head: Head, recorded: Recorded) -> LazyLogits:
    """Return what stands for the logits of a head's call, which ``recorded`` describes."""
    shape = (*recorded.hidden.shape[:-1], recorded.n_columns)
    like = torch.empty(shape, dtype=head.modes.dtype_of(head.hidden), device="meta")

    def values() -> Tensor:
        made = head.values().contiguous()
        if made.shape != like.shape or made.dtype != like.dtype:
            raise RuntimeError(f"logits: expected {like.dtype} {shape} of the head, got {made.dtype} {made.shape}")
        return made

    lazy = LazyLogits(head, like, values)
    if head.requires_grad:
        lazy = _Output.apply(head, [lazy], head.hidden, *head.parameters)
    return _as_recorded(lazy, recorded)


def _as_recorded(lazy: LazyLogits, recorded: Recorded) -> LazyLogits:
    with without_overrides():
        lazy._recorded, lazy._node = recorded, lazy.grad_fn
    return lazy


def _check_inputs(outputs: Any, *args: Any, inputs: Any = None, **kwargs: Any) -> None:
    """Raise if a fused loss in the graph of ``outputs`` would use lazy logits among ``inputs``, and does not."""
    inputs = args[0] if inputs is None and args else inputs  # of backward they are always named
    leaves = [leaf for leaf in tree_leaves(inputs) if isinstance(leaf, LazyLogits) and leaf._head.is_fused]
    if not leaves:
        return
    with without_overrides():
        nodes = [leaf.grad_fn if isinstance(leaf, Tensor) else leaf.node for leaf in tree_leaves(outputs)]
        wanted = {leaf.grad_fn for leaf in leaves}
    fused = [node.metadata[FUSED] for node in history(nodes) if FUSED in node.metadata]
    if not wanted.isdisjoint(history(fused)):
        raise RuntimeError(
            "logits: their gradient would lack the loss's part, because the loss was fused and did not use them; look "
            "at the logits before the loss, or uninstall the lazy logits for this call"
        )


def _direct(func: Any, args: Any, kwargs: Any) -> Any:
    """Call ``func`` with lazy logits as they are: if it reads them, it does so at the dispatcher."""
    with without_overrides():
        return func(*args, **kwargs)


def _real_of(reason: str, arguments: Any) -> Any:
    """Return the arguments with real logits in the place of lazy ones."""
    return tree_map_only(LazyLogits, lambda lazy: lazy.make(reason), arguments)


class _Recording(threading.local):
    """The leading dimensions of what is recorded in this thread, or None: operations are computed."""

    rows: torch.Size | None = None


_recording = _Recording()


def _record(func: Any, name: str, args: Any, kwargs: Any) -> Any:
    """Return new lazy logits if the fused loss can do what ``func`` does, else NotImplemented."""
    lazy: LazyLogits = args[0]
    recorded = lazy._recorded
    assert recorded is not None
    new: Recorded | None = recorded
    if name in MULTIPLY or name in DIVIDE:
        new = _scaled(recorded, args[1:], kwargs, name in DIVIDE)
    elif name == "tanh" and recorded.softcap is None:
        new = recorded._replace(softcap=1.0)
    elif name in ("float", "to", "contiguous", "clone", "detach"):
        new = recorded if _keeps_values(lazy, name, args[1:], kwargs) else None
    elif name in ("view", "reshape", "flatten"):
        new = _viewed(lazy, recorded, func, args, kwargs)
    elif name == "__getitem__":
        new = _indexed(recorded, args[1], lazy.dim())
    else:
        return NotImplemented
    if new is None:
        return NotImplemented
    return _as_recorded(_deferring(func, args, kwargs, new.hidden.shape[:-1]), new)


def _deferring(func: Any, args: Any, kwargs: Any, rows: torch.Size) -> LazyLogits:
    """Return what ``func`` returns, with its history and without its values."""
    with without_overrides(), saved_as_it_is():
        _recording.rows = rows
        try:
            return func(*args, **kwargs)
        finally:
            _recording.rows = None


def _deferred(func: Any, args: Any, kwargs: Any, rows: torch.Size) -> LazyLogits:
    """Return the output of an operation of the dispatcher without its values."""
    lazy: LazyLogits = args[0]
    meta = torch.empty_strided(lazy.shape, lazy.stride(), dtype=lazy.dtype, device="meta")
    if func is torch.ops.aten.index.Tensor:  # the last of an index's operations; ids need values
        like = torch.empty((*rows, lazy.shape[-1]), dtype=meta.dtype, device="meta")
        return LazyLogits(lazy._head, like, lambda: func(lazy._made(), *args[1:], **kwargs).contiguous())
    if func in POINTWISE:  # by a number: on meta they are ten times slower
        like = torch.empty_like(meta)
    else:
        like = func(meta, *args[1:], **{key: value for key, value in kwargs.items() if key != "device"})
    shares = like.untyped_storage()._cdata == meta.untyped_storage()._cdata
    offset = int(lazy.storage_offset() + like.storage_offset()) if shares else 0
    return LazyLogits(lazy._head, like, lambda: func(lazy._made(), *args[1:], **kwargs), offset)


def _scaled(recorded: Recorded, others: Any, kwargs: Any, divides: bool) -> Recorded | None:
    """Record a multiplication or division by one positive number."""
    if kwargs or len(others) != 1 or isinstance(others[0], bool) or not isinstance(others[0], (int, float)):
        return None
    factor = float(others[0])
    if not 0.0 < factor < math.inf:
        return None
    return recorded.scaled(1.0 / factor if divides else factor)


def _keeps_values(lazy: LazyLogits, name: str, others: Any, kwargs: Any) -> bool:
    """Return whether a cast changes no value and no device."""
    if name in ("contiguous", "clone", "detach"):
        return True
    if name == "float":
        return not others and not kwargs
    with without_overrides():
        parsed = torch._C._nn._parse_to(*others, **{k: v for k, v in kwargs.items() if k != "copy"})
    device, dtype = parsed[0] or lazy.device, parsed[1] or lazy.dtype
    same_device = device.type == lazy.device.type and device.index in (None, lazy.device.index)
    return same_device and dtype in (lazy.dtype, torch.float32)


def _viewed(lazy: LazyLogits, recorded: Recorded, func: Any, args: Any, kwargs: Any) -> Recorded | None:
    """Record a view that keeps the columns together."""
    if any(isinstance(arg, torch.dtype) for arg in (*args[1:], *kwargs.values())):
        return None
    shape = func(torch.empty(lazy.shape, device="meta"), *args[1:], **kwargs).shape
    if not shape or shape[-1] != recorded.n_columns or lazy.numel() == 0:
        return None
    return recorded._replace(hidden=recorded.hidden.reshape(*shape[:-1], recorded.hidden.shape[-1]))


def _indexed(recorded: Recorded, index: Any, n_dims: int) -> Recorded | None:
    """Record an index of leading dimensions and of the first columns."""
    parts = list(index) if isinstance(index, tuple) else [index]
    known = all(part is ... or type(part) in (int, slice, Tensor) for part in parts)
    if not known or sum(part is ... for part in parts) > 1:
        return None
    at = next((i for i, part in enumerate(parts) if part is ...), len(parts))
    n_whole = n_dims - sum(part.dim() if _is_mask(part) else 1 for part in parts if part is not ...)
    parts[at : at + 1] = [slice(None)] * n_whole
    columns = parts.pop()
    if not isinstance(columns, slice):
        return None
    start, stop, step = columns.indices(recorded.n_columns)
    if start != 0 or step != 1 or stop <= 0:
        return None
    parts.append(slice(None))
    hidden = recorded.hidden[tuple(parts)]
    return recorded._replace(hidden=hidden, n_columns=stop)


def _is_mask(part: Any) -> bool:
    return isinstance(part, Tensor) and part.dtype == torch.bool


def _cross_entropy(
    logits: Any,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    """Return the fused loss, of PyTorch's dtype and shape, or NotImplemented."""
    head, recorded = logits._head, logits._recorded
    plain = weight is None and size_average is None and reduce is None and reduction in REDUCTIONS
    labels = target.dtype == torch.int64 and target.device == logits.device and target.shape == logits.shape[:1]
    if not plain or not labels or logits.dim() != 2 or head.is_watched:
        return NotImplemented
    options = {"ignore_index": ignore_index, "reduction": reduction, "label_smoothing": label_smoothing}
    options |= {"logit_scale": recorded.logit_scale, "softcap": recorded.softcap}
    head.check_unchanged(freed=False)
    wants_gradient = torch.is_grad_enabled() and logits.requires_grad
    with head.modes.autocasting(), torch.set_grad_enabled(wants_gradient):
        loss = head.loss(recorded.hidden, target, recorded.n_columns, **options)
    head.is_fused = True
    if loss.grad_fn is not None:
        loss.grad_fn.metadata[FUSED] = logits._node
    head.report("fused")
    is_autocast = torch.is_autocast_enabled(logits.device.type)
    return loss if is_autocast else loss.to(logits.dtype)
