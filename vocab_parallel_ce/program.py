"""Programs: functions whose launches are launched again, with other addresses, in later calls of the same kind.

    function(tensors) -> what it makes and launches -> results    recorded in the second call of a kind
    later calls: tensors are made -> their addresses -> launches in C

Which kernels a call needs, with which grids and values, depends on shapes, strides, dtypes and the device. To work it
out takes longer than the launches. In calls of one kind all of these are equal. A call whose memory does not begin at
16 bytes, that an observer watches or that is not of the current GPU takes the function's own way, as the first call
of a kind does: many kinds come once.

A function that is run so must make its tensors with :func:`make`; launches and :func:`step` alone write to these and to
those that it gets. One that returns or launches over other tensors, or changes what it made, keeps its own way.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vocab_parallel_ce.layout import VECTOR_BYTES

Tensors = tuple[Any, ...]  # and None
MOST_PROGRAMS = 256  # of a kind of call

Take = Callable[[list[Any]], tuple[Any, ...]]
Run = Callable[[list[Any], list[Any]], object]  # of addresses, and of the tensors that have them


@dataclasses.dataclass
class Record:
    """What a function did while it was recorded."""

    # (device, take) -> how to do it again for what ``take`` takes of a list, None if it cannot be; the tensors.
    steps: list[tuple[Callable[[int, Take], Run] | None, Tensors]] = dataclasses.field(default_factory=list)
    made: list[Tensor] = dataclasses.field(default_factory=list)


class _Recording(threading.local):
    record: Record | None = None  # of this thread


recording = _Recording()


@contextmanager
def recorded() -> Iterator[Record]:
    """Record what this thread makes and launches."""
    recording.record = Record()
    try:
        yield recording.record
    finally:
        recording.record = None


def make(like: Tensor, *shape: int, dtype: torch.dtype) -> Tensor:
    """Allocate a tensor on the device of ``like``, for launches to fill."""
    made = like.new_empty(shape, dtype=dtype)
    if recording.record is not None:
        recording.record.made.append(made)
    return made


def step(function: Callable[..., object], *tensors: Tensor | None) -> None:
    """Call ``function``, which writes to some of ``tensors``, with operators of PyTorch."""
    function(*tensors)
    if recording.record is not None:
        recording.record.steps.append((lambda _, take: lambda addresses, own: function(*take(own)), tensors))


class Program(NamedTuple):
    """What a function launches in calls of one kind."""

    device: int
    allocate: Callable[..., Tensor]  # on this device
    made: tuple[tuple[tuple[int, ...], tuple[int, ...], torch.dtype], ...]  # shapes, strides and dtypes
    steps: tuple[Run, ...]  # of a call's tensors, None, and what is made
    results: tuple[int, ...]  # which of these tensors

    def run(self, tensors: Tensors) -> Tensors | None:
        """Return what the function returns, or None if it has to take its own way."""
        own: list[Any] = [*tensors, None]
        addresses = [None if t is None else t.data_ptr() for t in own]
        all_bits = 0
        for address in addresses:
            if address:
                all_bits |= address
        if all_bits % VECTOR_BYTES:
            return None
        for layout in self.made:
            made = self.allocate(*layout)
            own.append(made)
            addresses.append(made.data_ptr())
        for run in self.steps:
            run(addresses, own)
        return tuple([own[index] for index in self.results])


def program_of(record: Record, tensors: Tensors, results: Tensors) -> Program | None:
    """Return the program of a function that got ``tensors`` and returned ``results``, which it made or got.

    None if the steps are not all that it did.
    """
    own = [*tensors, None, *record.made]
    # By address: a view of a tensor begins where that does.
    indices = {None if t is None else t.data_ptr(): index for index, t in enumerate(own)}
    written, used = {id(t) for _, of_step in record.steps for t in of_step}, {len(tensors)}
    if len(indices) < len(own) - sum([t is None for t in tensors]):
        return None  # two begin at one address: which of them a step takes is not known
    if any([id(t) not in written and not t.is_inference() and t._version for t in record.made]):
        return None  # an operator that is no step has written to it
    first: Any = own[0]
    device, steps = first.get_device(), []
    for bind, of_step in record.steps:
        taken = [indices.get(None if t is None else t.data_ptr()) for t in of_step]
        if bind is None or None in taken:
            return None
        used.update(taken)  # type: ignore[arg-type]
        steps.append(bind(device, _taker(taken)))  # type: ignore[arg-type]
    returned = [next((i for i, each in enumerate(own) if each is result), -1) for result in results]
    if not steps or not all([index in used or 0 <= index < len(tensors) for index in returned]):
        return None
    made = tuple([(tuple(t.shape), t.stride(), t.dtype) for t in record.made])
    return Program(device, _allocator(first.device), made, tuple(steps), tuple(returned))


def _taker(indices: list[int]) -> Take:
    if len(indices) > 1:
        return itemgetter(*indices)
    (index,) = indices  # an itemgetter of one returns no tuple
    return lambda own: (own[index],)


def _allocator(device: torch.device) -> Callable[..., Tensor]:
    """Return a function of shape, strides and dtype that allocates on ``device``, the current one.

    That of compiled code takes a third of the time. It is private: without it, the public one.
    """

    def allocate(shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty_strided(shape, strides, dtype=dtype, device=device)

    return getattr(getattr(torch._C._dynamo, "guards", None), f"_empty_strided_{device.type}", allocate)


def _apart(tensors: Tensors) -> Tensors:
    """Return tensors that begin at an address each: the second of two that do not is a copy, with its strides.

    Backward often gets one gradient for two outputs.
    """
    apart, addresses = list(tensors), set[int]()
    for index, t in enumerate(tensors):
        if t is not None and t.numel() and t.data_ptr() in addresses:
            reach = 1 + sum([(size - 1) * stride for size, stride in zip(t.shape, t.stride(), strict=True)])
            apart[index] = t.as_strided((reach,), (1,)).clone().as_strided(t.shape, t.stride())
        elif t is not None:
            addresses.add(t.data_ptr())
    return tuple(apart)


def directly(key: Any, function: Callable[..., Tensors], tensors: Tensors, *others: Any) -> Tensors:
    """Return ``function(*others, *tensors)``, as :meth:`Programs.run` does."""
    return function(*others, *tensors)


class Programs:
    """The programs of the calls of one kind."""

    def __init__(self, can_launch: Callable[[int], bool]) -> None:
        self.can_launch = can_launch  # whether launches to a device are now the recorded ones
        # By what a function's calls may differ in. None: it does more than launch.
        self.programs: dict[Any, Program | None] = {}
        self.called: set[Any] = set()  # keys that have come

    def run(self, key: Any, function: Callable[..., Tensors], tensors: Tensors, *others: Any) -> Tensors:
        """Return ``function(*others, *tensors)``.

        The kind of the call and ``key`` say which function it is and all that its launches depend on, except memory.
        """
        program = self.programs.get(key)
        results = None if program is None or not self.can_launch(program.device) else program.run(tensors)
        return self._own_way(key, function, tensors, others) if results is None else results

    def _own_way(
        self, key: Any, function: Callable[..., Tensors], tensors: Tensors, others: tuple[Any, ...]
    ) -> Tensors:
        """Call the function. The second time that is recorded."""
        is_new, has_program = key not in self.called, key in self.programs
        if is_new:
            if len(self.called) >= MOST_PROGRAMS:
                self.called.clear()
                self.programs.clear()
            self.called.add(key)
        is_aligned = all([t is None or t.data_ptr() % VECTOR_BYTES == 0 for t in tensors])
        if is_new or has_program or not is_aligned or not self.can_launch(tensors[0].get_device()):
            return function(*others, *tensors)
        tensors = _apart(tensors)
        with recorded() as record:
            results = function(*others, *tensors)
        self.programs[key] = program_of(record, tensors, results)
        return results
