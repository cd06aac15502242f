"""Counts the collectives a piece of code starts in this process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_NAMESPACES = ("c10d", "_c10d_functional", "_c10d_functional_autograd", "symm_mem")


class Collective(NamedTuple):
    """One call as this rank made it."""

    name: str  # the dispatcher's operator: "_allgather_base_", "allreduce_", "barrier", ...
    ranks: tuple[int, ...]  # global ranks of the group; () where the operator names none
    nbytes: int  # bytes that this rank contributes


class _Recorder(TorchDispatchMode):
    # The dispatcher is below every spelling of a collective in torch.distributed, old or new, so a
    # call cannot be missed by being made under another name.
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Collective] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # True would import torch._dynamo at the first call: seconds, in every rank.
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace in _NAMESPACES:
            self.calls.append(_describe(func, args, kwargs))
        return func(*args, **kwargs)


@contextmanager
def record_collectives() -> Iterator[list[Collective]]:
    """The list it yields grows by one entry for every collective started within it."""
    with _Recorder() as recorder:
        yield recorder.calls


def _describe(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Collective:
    names = [argument.name for argument in func._schema.arguments]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    inputs = [value for name, value in given.items() if name.startswith("input")]
    sent = inputs or [given.get("tensors")]
    return Collective(
        name=func.overloadpacket.__name__,
        ranks=_ranks(given.get("process_group")),
        nbytes=sum(tensor.nbytes for tensor in _tensors(sent)),
    )


def _ranks(process_group: Any) -> tuple[int, ...]:
    if not isinstance(process_group, torch.ScriptObject):
        return ()
    return tuple(dist.get_process_group_ranks(dist.ProcessGroup.unbox(process_group)))


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)
