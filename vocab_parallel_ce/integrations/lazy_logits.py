"""Logits that are made only if somebody looks at them.

A head returns a :class:`LazyLogits` instead of its logits. It remembers the hidden states, the head, and what was
done to the logits. ``F.cross_entropy`` of it calls the fused loss. Every other operation makes the real logits, as
the head would have made them, and works on those.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook
from torch.utils._pytree import tree_map_only
from torch.utils.hooks import RemovableHandle

from vocab_parallel_ce.options import REDUCTIONS
from vocab_parallel_ce.plan import top_saved_tensor_hooks

METADATA = {
    *("shape", "dtype", "device", "layout", "ndim", "dim", "size", "numel", "nelement", "element_size", "stride"),
    *("requires_grad", "is_leaf", "grad_fn", "is_cuda", "is_cpu", "is_meta", "is_sparse", "is_nested", "is_complex"),
    *("is_quantized", "is_contiguous", "is_floating_point", "is_inference", "get_device", "_base"),
    *("__len__", "__hash__"),
}
MULTIPLY, DIVIDE = ("mul", "multiply", "__mul__", "__rmul__"), ("div", "divide", "true_divide", "__truediv__")

_stepped: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
_steps = itertools.count(1)


def _note_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Number an optimizer's step, by the counter of the heads' calls: fused steps change parameters and no version."""
    _stepped[optimizer] = next(_steps)


register_optimizer_step_post_hook(_note_step)


def checkpoint_hook() -> object:
    """Return the hook of the checkpoint that is entered (with ``use_reentrant=False``), or None."""
    hooks: Any = None if top_saved_tensor_hooks is None else top_saved_tensor_hooks(True)
    return hooks[0] if hooks and getattr(hooks[0], "__module__", "") == "torch.utils.checkpoint" else None


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor


class _WithHistory(torch.autograd.Function):
    """The values of one tensor, with the autograd history of another."""

    @staticmethod
    def forward(ctx: Any, history: Tensor, values: Tensor) -> Tensor:
        return values.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class Modes(NamedTuple):
    """PyTorch's modes that decide what an operation computes."""

    grad: bool
    inference: bool
    autocast: bool
    autocast_dtype: torch.dtype
    device_type: str

    @classmethod
    def now(cls, device_type: str) -> Modes:
        autocast = torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type)
        return cls(torch.is_grad_enabled(), torch.is_inference_mode_enabled(), *autocast, device_type)

    def dtype_of(self, hidden: Tensor) -> torch.dtype:
        """Return the dtype of a product with ``hidden``."""
        return self.autocast_dtype if self.autocast else hidden.dtype

    def autocasting(self) -> torch.autocast:
        """Return the autocast of then."""
        return torch.autocast(self.device_type, dtype=self.autocast_dtype, enabled=self.autocast)

    def run(self, function: Callable[[], Tensor]) -> Tensor:
        """Call ``function`` as if it had been called then."""
        # A checkpoint around this would not run it again: what it saves is not the checkpoint's.
        saving = saved_tensors_hooks(_as_it_is, _as_it_is) if checkpoint_hook() else contextlib.nullcontext()
        with torch.inference_mode(self.inference), torch.set_grad_enabled(self.grad), self.autocasting(), saving:
            return function()


class Head:
    """One call of a head that makes no logits yet: subclasses say how to make them, and the loss without them."""

    def __init__(self, hidden: Tensor, parameters: tuple[Tensor, ...]) -> None:
        """``hidden [..., D]`` is what the head was called with, ``parameters`` what it uses."""
        self.hidden, self.modes = hidden, Modes.now(hidden.device.type)
        self.is_made = self.is_fused = False
        self.checkpoint = checkpoint_hook()
        self.lazy: list[weakref.ref[LazyLogits]] = []
        self._versions = [(tensor, _version(tensor)) for tensor in (hidden, *parameters)]
        self._step = next(_steps)
        self.requires_grad = torch.is_grad_enabled() and any(t.requires_grad for t in (hidden, *parameters))

    def logits(self) -> Tensor:
        """Make ``[..., V]``, as the head's own forward does."""
        raise NotImplementedError

    def loss(self, hidden: Tensor, labels: Tensor, n_columns: int, **options: Any) -> Tensor:
        """Return the loss of ``hidden [N, D]`` over the first columns, with options of :func:`linear_cross_entropy`."""
        raise NotImplementedError

    def report(self, event: str) -> None:
        """Note ``"fused"``, or what made the real logits."""

    def check_unchanged(self, freed: bool = True) -> None:
        """Raise RuntimeError if the logits would not be those of the call any more, or if memory was freed."""
        used = {id(tensor) for tensor, _ in self._versions}
        # keyrefs() takes them at once: another thread's optimizer may be new.
        optimizers = [reference() for reference in _stepped.keyrefs()]
        since = [each for each in optimizers if each is not None and _stepped.get(each, 0) > self._step]
        groups = [group for optimizer in since for group in optimizer.param_groups]
        is_stepped = any(id(parameter) in used for group in groups for parameter in group["params"])
        if is_stepped or any(_version(tensor) != version for tensor, version in self._versions):
            raise RuntimeError(
                "logits: used after the head's weight or its hidden states have changed (an optimizer's step), which "
                "would give other logits; use them before, or call the model again"
            )
        if freed and any(tensor.untyped_storage().size() == 0 < tensor.numel() for tensor, _ in self._versions):
            raise RuntimeError(
                "logits: looked at after the memory of the head's weight was freed (FSDP has resharded it); look at "
                "them inside the model's forward, or uninstall the lazy logits for this call"
            )


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
    """Stands for logits that do not exist. It is pickled, gathered, printed and computed with as real ones."""

    _head: Head
    _recorded: Recorded
    _make: Callable[[], Tensor]
    _modes: Modes
    _made: Tensor | None
    _hooks: OrderedDict[int, Callable[[Tensor], Any]]

    @staticmethod
    def __new__(
        cls, head: Head, recorded: Recorded, dtype: torch.dtype, make: Callable[[], Tensor], requires_grad: bool
    ) -> LazyLogits:
        shape = (*recorded.hidden.shape[:-1], recorded.n_columns)
        device = recorded.hidden.device
        # A leaf that requires a gradient: what sees it without overrides still differentiates it.
        lazy = Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device, requires_grad=requires_grad)
        lazy._head, lazy._recorded, lazy._made, lazy._hooks = head, recorded, None, OrderedDict()
        lazy._make, lazy._modes = make, Modes.now(device.type)
        head.lazy.append(weakref.ref(lazy))
        if requires_grad:
            with torch._C.DisableTorchFunctionSubclass():
                lazy.register_post_accumulate_grad_hook(_pass_gradient_on)
        return lazy

    def make(self, reason: str = "make") -> Tensor:
        """Return the real logits."""
        if self._made is None:
            if not self._head.is_made:
                self._head.check_unchanged()
                self._head.report(f"{reason} made the logits")
                self._head.is_made = True
            # All that was recorded: it must not see what is written to the real logits from now on.
            for relative in [self, *(reference() for reference in self._head.lazy)]:
                if relative is not None:
                    relative._real()
        return self._real()

    def _real(self) -> Tensor:
        if self._made is None:
            self._made = self._modes.run(self._make)
            with torch._C.DisableTorchFunctionSubclass():
                if self.grad_fn is not None:  # an autograd Function returned it
                    self._made = _WithHistory.apply(self, self._made)
            for hook in self._hooks.values():
                self._made.register_hook(hook)
        return self._made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, func.__name__
        if name == "__get__":
            name = func.__self__.__name__
        if func is F.cross_entropy and not args:
            args, kwargs = (kwargs["input"],), {key: value for key, value in kwargs.items() if key != "input"}
        lazy = args[0] if args else None
        if isinstance(lazy, LazyLogits) and lazy._made is None:
            result = lazy._answer(func, name, args, kwargs)
            if result is not NotImplemented:
                return result
        return _run_on_real(func, name, args, kwargs)

    def _answer(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        """Return what ``func`` returns if that needs no logits, else NotImplemented."""
        if name in METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            has_history = self.grad_fn is not None  # of an autograd Function, which the fused loss would skip
            hides_gradient = self.requires_grad and not torch.is_grad_enabled()
        # A checkpoint runs its region again: it must find these logits as they were, real ones.
        if has_history or checkpoint_hook() not in (None, self._head.checkpoint):
            return NotImplemented
        if name == "register_hook" and getattr(args[1], "__module__", "").startswith("torch.distributed."):
            handle = RemovableHandle(self._hooks)  # FSDP's, which gathers weights for a backward through the logits
            self._hooks[handle.id] = args[1]
            return handle
        if name in ("register_hook", "retain_grad") and self._head.is_fused:
            raise RuntimeError(
                f"logits: {name} would see no gradient, because the loss was fused and did not use them; call it "
                "before the loss, or uninstall the lazy logits for this call"
            )
        # Inside an autograd Function, what is recorded would not be its output. DDP's function clones what it ignores.
        if self._head.is_made or (hides_gradient and name != "clone"):
            return NotImplemented
        return _cross_entropy(*args, **kwargs) if func is F.cross_entropy else _record(func, name, args, kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return _run_on_real(func, func.__name__, args, kwargs or {})


def lazy_logits(head: Head, n_columns: int) -> LazyLogits:
    """Return what stands for the logits ``[..., n_columns]`` of a head's call."""
    dtype = head.modes.dtype_of(head.hidden)
    return LazyLogits(head, Recorded(head.hidden, n_columns), dtype, head.logits, head.requires_grad)


def _run_on_real(func: Any, name: str, args: Any, kwargs: Any) -> Any:
    """Call ``func`` with the real logits."""

    def made(lazy: LazyLogits) -> Tensor:
        return lazy.make(name)

    return func(*tree_map_only(LazyLogits, made, args), **tree_map_only(LazyLogits, made, kwargs))


def _record(func: Any, name: str, args: Any, kwargs: Any) -> Any:
    """Return new lazy logits if the fused loss can do what ``func`` does, else NotImplemented."""
    lazy: LazyLogits = args[0]
    recorded = lazy._recorded
    dtype: torch.dtype | None = lazy.dtype
    if name in MULTIPLY or name in DIVIDE:
        new = _scaled(recorded, args[1:], kwargs, name in DIVIDE)
    elif name == "tanh" and recorded.softcap is None:
        new = recorded._replace(softcap=1.0)
    elif name in ("float", "to", "contiguous", "clone"):
        new, dtype = recorded, _dtype_after(lazy, name, args[1:], kwargs)
    elif name in ("view", "reshape", "flatten"):
        new = _viewed(lazy, func, args, kwargs)
    elif name == "__getitem__":
        new = _indexed(recorded, args[1], lazy.dim())
    else:
        return NotImplemented
    if new is None or dtype is None:
        return NotImplemented
    requires_grad = lazy.requires_grad and torch.is_grad_enabled()
    return LazyLogits(lazy._head, new, dtype, lambda: func(lazy._real(), *args[1:], **kwargs), requires_grad)


def _scaled(recorded: Recorded, others: Any, kwargs: Any, divides: bool) -> Recorded | None:
    """Record a multiplication or division by one positive number."""
    if kwargs or len(others) != 1 or isinstance(others[0], bool) or not isinstance(others[0], (int, float)):
        return None
    factor = float(others[0])
    if not 0.0 < factor < math.inf:
        return None
    return recorded.scaled(1.0 / factor if divides else factor)


def _dtype_after(lazy: LazyLogits, name: str, others: Any, kwargs: Any) -> torch.dtype | None:
    """Return the dtype after a cast that changes no value and no device, else None."""
    if name in ("contiguous", "clone"):
        return lazy.dtype
    if name == "float":
        return torch.float32 if not others and not kwargs else None
    with torch._C.DisableTorchFunctionSubclass():
        parsed = torch._C._nn._parse_to(*others, **{k: v for k, v in kwargs.items() if k != "copy"})
    device, dtype = parsed[0] or lazy.device, parsed[1] or lazy.dtype
    same_device = device.type == lazy.device.type and device.index in (None, lazy.device.index)
    return dtype if same_device and dtype in (lazy.dtype, torch.float32) else None


def _viewed(lazy: LazyLogits, func: Any, args: Any, kwargs: Any) -> Recorded | None:
    """Record a view that keeps the columns together."""
    if any(isinstance(arg, torch.dtype) for arg in (*args[1:], *kwargs.values())):
        return None
    shape = func(torch.empty(lazy.shape, device="meta"), *args[1:], **kwargs).shape
    recorded = lazy._recorded
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
    if not plain or not labels or logits.dim() != 2:
        return NotImplemented
    options = {"ignore_index": ignore_index, "reduction": reduction, "label_smoothing": label_smoothing}
    options |= {"logit_scale": recorded.logit_scale, "softcap": recorded.softcap}
    head.check_unchanged(freed=False)
    wants_gradient = torch.is_grad_enabled() and logits.requires_grad
    with head.modes.autocasting(), torch.set_grad_enabled(wants_gradient):
        loss = head.loss(recorded.hidden, target, recorded.n_columns, **options)
    head.is_fused = True
    head.report("fused")
    is_autocast = torch.is_autocast_enabled(logits.device.type)
    return loss if is_autocast else loss.to(logits.dtype)


def _pass_gradient_on(lazy: Tensor) -> None:
    """Continue a backward that reached lazy logits, from an operation that saw no override, to the real ones."""
    assert isinstance(lazy, LazyLogits)
    with torch._C.DisableTorchFunctionSubclass():
        grad, lazy.grad = lazy.grad, None
    if grad is not None:  # DistributedDataParallel passes logits on that nobody has used
        torch.autograd.backward(lazy.make("backward"), grad)


def _version(tensor: Tensor) -> tuple[int, int]:
    """Return what changes with every write, and with every assignment to ``tensor.data``."""
    return 0 if tensor.is_inference() else tensor._version, tensor.untyped_storage()._cdata
