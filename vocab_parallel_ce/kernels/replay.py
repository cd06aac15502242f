"""Launchers that launch again what they launched before, with other addresses.

    launcher -> launches, which are recorded in the second call of a kind
    later calls: addresses -> launches in C

Which kernels a call needs, with which grids and values, depends on shapes, strides, dtypes and the device. To work it
out takes longer than the launches. A plan in the cache of calls is of one kind, in which all of these are equal. So its
launchers need not work it out again. A call whose memory does not begin at 16 bytes, that an observer watches or that
is not of the current GPU takes the launchers' own way, as the first call of a kind does: many kinds come once.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton import knobs

from vocab_parallel_ce.kernels.launch import Record, current_device, recorded
from vocab_parallel_ce.kernels.rows import NOT_STORED
from vocab_parallel_ce.layout import VECTOR_BYTES
from vocab_parallel_ce.losses.base import Launchers
from vocab_parallel_ce.spec import GradOutputs, TokenOutputs

Tensors = tuple[Tensor | None, ...]
MOST_PROGRAMS = 64  # of a kind of call


class Program(NamedTuple):
    """What a launcher launches in calls of one kind."""

    device: int
    scratch: tuple[tuple[int, ...], ...]  # the shapes of fp32 tensors that only its launches see
    launches: tuple[Callable[[list[Any]], object], ...]  # of the addresses of a call's tensors, None, and scratch
    compiled: tuple[Any, ...]  # what must not be unloaded

    def run(self, tensors: Tensors) -> bool:
        """Launch for these tensors of a call, or return False if it has to take the launcher's own way."""
        addresses = [None if t is None else t.data_ptr() for t in tensors]
        all_bits = 0
        for address in addresses:
            if address:
                all_bits |= address
        enter, leave = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
        if all_bits % VECTOR_BYTES or getattr(enter, "calls", enter) or getattr(leave, "calls", leave):
            return False
        if self.device >= 0 and self.device != current_device():
            return False
        addresses.append(None)
        if self.scratch:
            like: Any = tensors[0]
            scratch = [like.new_empty(shape, dtype=torch.float32) for shape in self.scratch]  # until all is launched
            addresses += [t.data_ptr() for t in scratch]
        for launch in self.launches:
            launch(addresses)
        return True


def program_of(record: Record, tensors: Tensors, filled: Tensors) -> Program | None:
    """Return the program of a launcher that was called with ``tensors``, of which it had to fill ``filled``.

    None if its launches are not all that it did, or if they cannot be launched in C.
    """
    indices: dict[int, int] = {}
    for index, tensor in enumerate((*tensors, None, *record.scratch)):
        if tensor is not None and indices.setdefault(id(tensor), index) != index:
            return None  # it stands at two indices: which of them a kernel takes is not known
    first: Any = tensors[0]
    nothing, device, launches, used = len(tensors), first.get_device(), [], set[int | None]()
    for variant, grid, arguments, others in record.launches:
        taken = [nothing if tensor is None else indices.get(id(tensor)) for tensor in arguments]
        if variant is None or None in taken:
            return None
        assert len(taken) > 1, "an itemgetter of one index returns no tuple"
        used.update(taken)
        launches.append(variant.bound(grid, device, itemgetter(*taken), others))
    if any(tensor is not None and indices[id(tensor)] not in used for tensor in filled):
        return None
    compiled = tuple([variant for variant, *_ in record.launches])
    return Program(device, tuple([tuple(t.shape) for t in record.scratch]), tuple(launches), compiled)


class Replayed:
    """The launchers of a loss for the calls of one kind; their signatures are those of ``Launchers``."""

    def __init__(self, launchers: Launchers) -> None:
        self.launchers = launchers
        # By the launcher and what its calls may differ in. None: it does more than launch.
        self.programs: dict[Any, Program | None] = {}
        self.called: set[Any] = set()  # keys that have come

    def statistics(
        self,
        logits: Tensor,
        targets: Any,
        stats: tuple[Tensor, ...],
        rank: int,
        count: Tensor | None = None,
        outputs: TokenOutputs = NOT_STORED,
    ) -> None:
        tensors, program = (logits, *targets, *stats, count, *outputs), self.programs.get("statistics")
        if program is None or not program.run(tensors):
            own, filled = (logits, targets, stats, rank, count, outputs), (stats[0], count, *outputs)
            self._launch("statistics", self.launchers.statistics, own, tensors, filled)

    def outputs(
        self,
        stats: tuple[Tensor, ...],
        targets: Any,
        divisor: Tensor | None,
        outputs: TokenOutputs,
        total: Tensor | None = None,
    ) -> None:
        tensors, key = (*stats, *targets, divisor, *outputs, total), None if divisor is None else divisor.dtype
        program = self.programs.get(key)
        if program is None or not program.run(tensors):
            own = (stats, targets, divisor, outputs, total)
            self._launch(key, self.launchers.outputs, own, tensors, (*outputs, total))

    def gradient(
        self,
        logits: Tensor,
        targets: Any,
        stats: tuple[Tensor, ...],
        divisor: Tensor | None,
        grads: GradOutputs,
        grad_logits: Tensor,
    ) -> None:
        saved, new = (logits, *targets, *stats, divisor), None if grad_logits is logits else grad_logits
        # A checkpoint or a hook may return what was saved in another form.
        forms = [None if t is None else (t.dtype, t.get_device(), t.is_contiguous()) for t in saved]
        key = (new is None, *forms, *[None if grad is None else (grad.dtype, grad.stride(0)) for grad in grads])
        tensors, program = (*saved, *grads, new), self.programs.get(key)
        if program is None or not program.run(tensors):
            own = (logits, targets, stats, divisor, grads, grad_logits)
            are_contiguous = all([form is None or form[-1] for form in forms])
            self._launch(key, self.launchers.gradient, own, tensors, (grad_logits,), are_contiguous)

    def _launch(
        self,
        key: Any,
        launcher: Callable[..., None],
        own: tuple[Any, ...],
        tensors: Tensors,
        filled: Tensors,
        are_contiguous: bool = True,
    ) -> None:
        """Take the launcher's ``own`` way. The second time that is recorded."""
        is_known = key in self.programs or any([t is not None and t.data_ptr() % VECTOR_BYTES for t in tensors])
        is_new = key not in self.called
        if is_new:
            if len(self.called) >= MOST_PROGRAMS:
                self.called.clear()
                self.programs.clear()
            self.called.add(key)
        if is_new or is_known or not are_contiguous:
            launcher(*own)
            return
        with recorded() as record:
            launcher(*own)
        if any(variant is None for variant, *_ in record.launches):
            return  # of other memory, observed, or by a Triton whose variants are not known
        self.programs[key] = program_of(record, tensors, filled)


def replayed(launchers: Launchers) -> Launchers:
    """Return launchers for the calls of one kind, whose tensors are contiguous except for gradients of outputs."""
    own = Replayed(launchers)
    return launchers._replace(statistics=own.statistics, outputs=own.outputs, gradient=own.gradient)
