"""Records what a piece of code starts in this process: collectives, or any operators of PyTorch's."""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_NAMESPACES = ("c10d", "_c10d_functional", "_c10d_functional_autograd", "symm_mem")


class Collective(NamedTuple):
    """One call as this rank made it."""

    name: str  # the dispatcher's operator: "_allgather_base_", "allreduce_", "barrier", ...
    ranks: tuple[int, ...]  # global ranks of the group; () where the operator names none
    nbytes: int  # bytes that this rank contributes


class _Recorder(TorchDispatchMode):
    # The dispatcher is below every spelling of a collective in torch.distributed, old or new, so a
    # call cannot be missed by being made under another name.
    def __init__(self, describe: Callable[..., Any]) -> None:
        super().__init__()
        self.describe = describe
        self.calls: list[Any] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # True would import torch._dynamo at the first call: seconds, in every rank.
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        call = self.describe(func, args, kwargs)
        if call is not None:
            self.calls.append(call)
        return func(*args, **kwargs)


@contextmanager
def recorded(describe: Callable[..., Any]) -> Iterator[list[Any]]:
    """The list it yields grows by ``describe(operator, args, kwargs)`` for every operator, unless that is None."""
    with _Recorder(describe) as recorder:
        yield recorder.calls


def record_collectives() -> Any:
    """The list that this yields to ``with`` grows by one :class:`Collective` for every one started within it."""
    return recorded(_collective)


def _collective(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Collective | None:
    if func.namespace not in _NAMESPACES:
        return None
    names = [argument.name for argument in func._schema.arguments]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    inputs = [value for name, value in given.items() if name.startswith("input")]
    sent = tree_leaves(inputs or given.get("tensors"))
    group = given.get("process_group")
    ranks = (
        dist.get_process_group_ranks(dist.ProcessGroup.unbox(group)) if isinstance(group, torch.ScriptObject) else ()
    )
    nbytes = sum(tensor.nbytes for tensor in sent if isinstance(tensor, Tensor))
    return Collective(func.overloadpacket.__name__, tuple(ranks), nbytes)


def error_of(call: Callable[..., Any], *args: Any) -> str | None:
    """What ``call`` raises, or None."""
    try:
        call(*args)
    except (TypeError, ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return None


def messages_of(attempts: dict[str, Callable[[], Any]]) -> tuple[dict[str, str], list[Collective]]:
    """In a rank: what each attempt raises, and the collectives that all of them sent."""
    with record_collectives() as calls:
        messages = {name: error_of(attempt) or "accepted" for name, attempt in attempts.items()}
    return messages, calls


def assert_refused(results: Sequence[tuple[dict[str, str], list[Collective]]], expected: dict[str, str]) -> None:
    """Every rank refuses every attempt, in words that match these, before anything is sent."""
    for messages, calls in results:
        assert messages.keys() == expected.keys()
        for name, pattern in expected.items():
            assert re.match(pattern, messages[name]), (name, messages[name])
        assert calls == []
