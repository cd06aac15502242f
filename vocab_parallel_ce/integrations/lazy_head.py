"""One call of a head that makes no logits yet: when it may still make them, and what its backward is."""

from __future__ import annotations

import contextlib
import functools
import itertools
import weakref
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from vocab_parallel_ce.integrations import logger
from vocab_parallel_ce.plan import saved_as_it_is, top_saved_tensor_hooks

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


def history(nodes: list[Any]) -> set[Any]:
    """Return the nodes of a graph that ends in ``nodes``, which are taken out of their list."""
    seen: set[Any] = set()
    while nodes:
        node = nodes.pop()
        if node is not None and node not in seen:
            seen.add(node)
            nodes += [following for following, _ in node.next_functions]
    return seen


@functools.cache
def _say_not_called() -> None:
    """Log, once per process, what the hooks of engines do not need, and somebody's own hook may."""
    logger.warning(
        "vocab_parallel_ce: a hook on the logits, or retain_grad, after the loss was fused: it is called only if "
        "something else differentiates the logits, and sees nothing of that loss (engines such as DeepSpeed and FSDP "
        "need no more); one before the loss sees it"
    )


def _outside_of_transforms() -> contextlib.AbstractContextManager[Any]:
    """Leave the transforms of ``torch.func`` that are entered: what they make ends with them."""
    if not torch._C._are_functorch_transforms_active():
        return contextlib.nullcontext()
    from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

    return temporarily_clear_interpreter_stack()


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

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """Enter these modes, whatever the modes are now."""
        inference, autocast = torch.inference_mode(self.inference), self.autocasting()
        with _outside_of_transforms(), inference, torch.set_grad_enabled(self.grad), autocast:
            yield


class Head:
    """One call of a head that makes no logits yet: subclasses say how to make them, and the loss without them."""

    def __init__(self, hidden: Tensor, parameters: tuple[Tensor, ...], watched: tuple[Tensor, ...] = ()) -> None:
        """``hidden [..., D]`` is what the head was called with, ``parameters`` what it uses.

        ``watched`` are further tensors whose change or freed memory would change the logits.
        """
        self.hidden, self.parameters, self.modes = hidden, parameters, Modes.now(hidden.device.type)
        self.is_made = self.is_fused = self.is_watched = False
        self.checkpoint = checkpoint_hook()
        self.lazy: list[weakref.ref[Any]] = []  # what stands for its logits
        self._versions = [(tensor, _version(tensor)) for tensor in (hidden, *parameters, *watched)]
        self._step = next(_steps)
        self._graph: tuple[Any, list[Tensor]] | None = None
        self.requires_grad = torch.is_grad_enabled() and any(t.requires_grad for t in (hidden, *parameters))

    def logits(self, hidden: Tensor, *parameters: Tensor) -> Tensor:
        """Make ``[..., V]``, as the head's own forward does, of these tensors: views of its own."""
        raise NotImplementedError

    def loss(self, hidden: Tensor, labels: Tensor, n_columns: int, **options: Any) -> Tensor:
        """Return the loss of ``hidden [N, D]`` over the first columns, with options of :func:`linear_cross_entropy`."""
        raise NotImplementedError

    def report(self, event: str) -> None:
        """Note ``"fused"``, or what made the real logits."""

    def watch(self) -> None:
        """Note that somebody waits for the logits' gradient: no later loss is fused."""
        self.is_watched = True
        _say_not_called()

    def values(self) -> Tensor:
        """Return the logits' values, and keep the graph that :meth:`gradients` differentiates, but no logits."""
        with self.modes.again(), saved_as_it_is():
            # Of views: hooks on the head's tensors run in the caller's graph, and not in this one too.
            inputs = [tensor.view_as(tensor) for tensor in (self.hidden, *self.parameters)]
            made = self.logits(*inputs)
            if self.requires_grad:
                self._graph = get_gradient_edge(made), inputs
            return made.detach()

    def graph(self) -> tuple[Any, list[Tensor]]:
        """Return the edge of the logits in a graph of their own, and the inputs of that graph."""
        if self._graph is None:  # nobody has read the logits
            self.check_unchanged()
            self.values()
        assert self._graph is not None
        return self._graph

    def gradients(self, grad: Tensor, needed: Sequence[bool]) -> list[Tensor | None]:
        """Return the gradients of hidden states and parameters, as the head's own backward does, or None.

        ``needed`` are those that the call needed. One that is frozen since has none either.
        """
        edge, inputs = self.graph()
        computed = [each and tensor.requires_grad for each, tensor in zip(needed, inputs, strict=True)]
        wanted = [tensor for tensor, is_computed in zip(inputs, computed, strict=True) if is_computed]
        again = {"retain_graph": True, "create_graph": torch.is_grad_enabled()}
        grads = iter(torch.autograd.grad(edge, wanted, grad, **again) if wanted else ())
        return [next(grads) if is_computed else None for is_computed in computed]

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


def _version(tensor: Tensor) -> tuple[int, int]:
    """Return what changes with every write, and with every assignment to ``tensor.data``."""
    return 0 if tensor.is_inference() else tensor._version, tensor.untyped_storage()._cdata
