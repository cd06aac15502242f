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

import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import CodeType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vocab_parallel_ce.kinds import Kind, Kinds
from vocab_parallel_ce.layout import VECTOR_BYTES

Tensors = tuple[Any, ...]  # and None
Program = Callable[..., Tensors | None]
MOST_PROGRAMS = 256  # of a kind of call


class Step(NamedTuple):
    """A recorded call of ``function``: of tensors, or a launch in C over their addresses."""

    function: Callable[..., object]
    grid: int = 0  # of a launch
    current_stream: Callable[[int], int] | None = None  # None: it is no launch
    start: tuple[Any, ...] = ()  # between the stream and the addresses
    others: tuple[Any, ...] = ()  # after them
    has_sequence: bool = False  # addresses and others are one argument
    kernel: Any = None  # from Triton 3.8 on, one that nobody holds is unloaded from the GPU

    def run(self, grid: int, device: int, addresses: list[int | None], others: tuple[Any, ...]) -> None:
        """Launch with another grid and ``others``, on the current stream of ``device``."""
        assert self.current_stream is not None
        start = grid, 1, 1, self.current_stream(device), *self.start
        arguments = *addresses, *others
        self.function(*start, arguments) if self.has_sequence else self.function(*start, *arguments)


Steps = list[tuple[Step | None, Tensors]]  # None: what cannot be repeated


class _Recording(threading.local):
    """What this thread has made and launched while it is recorded."""

    steps: Steps | None = None  # None: it is not
    made: list[Tensor]


recording = _Recording()


@contextmanager
def recorded() -> Iterator[tuple[Steps, list[Tensor]]]:
    """Record what this thread launches and makes."""
    steps: Steps = []
    made: list[Tensor] = []
    recording.steps, recording.made = steps, made
    try:
        yield steps, made
    finally:
        recording.steps = None


def make(like: Tensor, *shape: int, dtype: torch.dtype) -> Tensor:
    """Allocate a tensor on the device of ``like``, for launches to fill."""
    made = like.new_empty(shape, dtype=dtype)
    if recording.steps is not None:
        recording.made.append(made)
    return made


def step(function: Callable[..., object], *tensors: Tensor | None) -> None:
    """Call ``function``, which writes to some of ``tensors``, with operators of PyTorch."""
    function(*tensors)
    if recording.steps is not None:
        recording.steps.append((Step(function), tensors))


def _comes_again(*tensors: Any) -> None:
    """Stands for the program of a kind that has come once."""


def _has_none(*tensors: Any) -> None:
    """Stands for the program of a kind whose function does more than launch."""


def program_of(
    recorded: Steps, made: Sequence[Tensor], tensors: Tensors, results: Tensors, launch: Any
) -> Program | None:
    """Return the program of a function that got ``tensors`` and returned ``results``, which it made or got.

    It takes such tensors, and returns such results, or None: then the function has its own way. None in its place if
    the steps are not all that it did.
    """
    own = [*tensors, None, *made]
    # By address: a view of a tensor begins where that does.
    indices = {None if t is None else t.data_ptr(): index for index, t in enumerate(own)}
    written, used = {id(t) for _, of_step in recorded for t in of_step}, {len(tensors)}
    if len(indices) < len(own) - sum([t is None for t in tensors]):
        return None  # two begin at one address: which of them a step takes is not known
    if any([id(t) not in written and not t.is_inference() and t._version for t in made]):
        return None  # an operator that is no step has written to it
    steps = []
    for step, of_step in recorded:
        taken = [indices.get(None if t is None else t.data_ptr()) for t in of_step]
        if step is None or None in taken:
            return None
        used.update(taken)  # type: ignore[arg-type]
        steps.append((step, taken))
    returned = [next((i for i, each in enumerate(own) if each is result), -1) for result in results]
    if not steps or not all([index in used or 0 <= index < len(tensors) for index in returned]):
        return None
    return _written(tensors, made, steps, returned, launch)  # type: ignore[arg-type]


# As launch.can_launch asks it, without a frame.
_UNLESS_WATCHED = (
    "enter, leave = launch.knobs.runtime.launch_enter_hook, launch.knobs.runtime.launch_exit_hook",
    "if getattr(enter, 'calls', enter) or getattr(leave, 'calls', leave): return None",
)


def _written(
    tensors: Tensors,
    made: Sequence[Tensor],
    steps: Sequence[tuple[Step, list[int]]],
    returned: Sequence[int],
    launch: Any,
) -> Program:
    """Return the program of these steps as a function in Python that is written here.

    Indices are of the tensors, None, and what is made. Of two tensors, and one that is made, it reads::

        def run(t0, t1):
            if recording.steps is not None or device != launch.current_device(): return None
            enter, leave = launch.knobs.runtime.launch_enter_hook, launch.knobs.runtime.launch_exit_hook
            if getattr(enter, "calls", enter) or getattr(leave, "calls", leave): return None
            a0 = t0.data_ptr()
            a1 = t1.data_ptr()
            if (a0 | a1) % 16: return None
            t3 = allocate(*layout3)
            a3 = t3.data_ptr()
            function0(grid0, 1, 1, current_stream0(device), *start0, a0, a1, None, a3, *others0)
            return (t3, )
    """
    first: Any = tensors[0]
    device = first.get_device()
    names: dict[str, Any] = {"allocate": _allocator(first.device), "device": device, "launch": launch}
    names["recording"] = recording
    nothing, launched = len(tensors), {i for step, taken in steps if step.current_stream for i in taken}
    given = [i for i, t in enumerate(tensors) if t is not None and i in launched]
    lines = [f"def run({', '.join([f't{i}' for i in range(nothing)])}):"]
    is_current = "" if device < 0 else " or device != launch.current_device()"
    lines += [f"if recording.steps is not None{is_current}: return None", *_UNLESS_WATCHED]
    lines += [f"a{i} = t{i}.data_ptr()" for i in given]
    lines += [f"if ({' | '.join([f'a{i}' for i in given] or '0')}) % {VECTOR_BYTES}: return None"]
    for i, t in enumerate(made, nothing + 1):
        names[f"layout{i}"] = tuple(t.shape), t.stride(), t.dtype
        lines += [f"t{i} = allocate(*layout{i})", f"a{i} = t{i}.data_ptr()"]
    for n, (step, taken) in enumerate(steps):
        names |= {f"{field}{n}": value for field, value in step._asdict().items()}
        if step.current_stream is None:
            lines.append(f"function{n}({', '.join(['None' if i == nothing else f't{i}' for i in taken])})")
            continue
        addresses = ", ".join(["None" if i == nothing else f"a{i}" for i in taken])
        arguments = f"({addresses}, *others{n})" if step.has_sequence else f"{addresses}, *others{n}"
        lines.append(f"function{n}(grid{n}, 1, 1, current_stream{n}(device), *start{n}, {arguments})")
    lines.append(f"return ({''.join(['None, ' if i == nothing else f't{i}, ' for i in returned])})")
    exec(_compiled("\n    ".join(lines)), names)
    run: Program = names["run"]
    return run


@functools.lru_cache(maxsize=1024)
def _compiled(source: str) -> CodeType:
    return compile(source, "<program>", "exec")


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

    def __init__(self, launch: Any) -> None:
        self.launch = launch  # the module
        self.forms = Kinds(MOST_PROGRAMS)  # of functions and tensors
        self.named: dict[Any, Kind] = {}  # of functions whose key says all

    def run(self, key: Any, function: Callable[..., Tensors], tensors: Tensors, *others: Any) -> Tensors:
        """Return ``function(*others, *tensors)``.

        The kind of the call and ``key`` say which function it is and all that its launches depend on, except memory.
        Without a key, None, it is the function and what kind of tensors it gets.
        """
        kind = self.named.get(key) if key is not None else self.forms.find((function, tensors[0].shape), tensors)
        if kind is not None and kind.made is not None:
            results: Tensors | None = kind.made(*tensors)
            if results is not None:
                return results
        return self._own_way(key, kind, function, tensors, others)

    def _own_way(
        self, key: Any, kind: Kind | None, function: Callable[..., Tensors], tensors: Tensors, others: tuple[Any, ...]
    ) -> Tensors:
        """Call the function. The second time that is recorded."""
        if recording.steps is not None or (kind is None and key is None):
            return function(*others, *tensors)  # a larger function has the program, or there is a subclass
        kind = kind or self.named.setdefault(key, Kind())
        is_second, kind.made = kind.made is _comes_again, kind.made or _comes_again
        is_aligned = all([t is None or t.data_ptr() % VECTOR_BYTES == 0 for t in tensors])
        if not is_second or not is_aligned or not self.launch.can_launch(tensors[0].get_device()):
            return function(*others, *tensors)
        tensors = _apart(tensors)
        with recorded() as (steps, made):
            results = function(*others, *tensors)
        kind.made = program_of(steps, made, tensors, results, self.launch) or _has_none
        return results
