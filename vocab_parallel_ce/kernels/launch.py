"""What every launcher does alike: the launch itself, and the arguments that describe a strided tensor."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from triton import knobs
from triton.runtime import driver

from vocab_parallel_ce.layout import LINE_BYTES, VECTOR_BYTES, aligned_base, row_layout
from vocab_parallel_ce.spec import LossOptions

Dtypes = tuple[Any, ...]

MOST_LAUNCHES = 1024  # that each kernel keeps; widths and options come again every step


class Launch:
    """A kernel with all of its arguments but the tensors and the sizes.

    Triton works out on every call which compiled variant the arguments ask for, which takes longer than
    the launch. A Launch is for tensors of certain dtypes, with None in certain places (:func:`dtypes_of`),
    and remembers each device's variant. ``sizes`` must be arguments that the kernel does not specialise on.
    """

    def __init__(
        self, kernel: Any, values: tuple[Any, ...], constants: dict[str, Any], *, num_warps: int
    ) -> None:
        self.kernel = kernel
        self.values = values
        self.constants = constants
        self.num_warps = num_warps
        self.tail = tuple(constants.values())
        self.variants: dict[int, tuple[Any, Any, Any]] = {}

    def __call__(self, n_programs: int, tensors: tuple[Tensor | None, ...], sizes: tuple[int, ...]) -> None:
        """``kernel[(n_programs,)](*tensors, *values, *sizes, **constants)`` on the first tensor's device.

        Tensors off 16-byte boundaries take Triton's way, and so do launches that a profiler's hook observes.
        """
        device = tensors[0].get_device()  # type: ignore[union-attr]
        if device >= 0 and device != torch.cuda.current_device():
            # A launch goes to the current GPU, whichever holds the tensors.
            with torch.cuda.device(device):
                return self(n_programs, tensors, sizes)
        arguments: list[Any] = [None if tensor is None else tensor.data_ptr() for tensor in tensors]
        together = 0
        for address in arguments:
            if address is not None:
                together |= address
        special = together % VECTOR_BYTES or max(sizes) >= 2**31 or _is_observed()
        variant = self.variants.get(device)
        if special or variant is None:
            compiled = self.kernel[(n_programs,)](
                *tensors, *self.values, *sizes, **self.constants, num_warps=self.num_warps
            )
            # The interpreter compiles nothing. ROCm's variants also depend on whether a tensor has 2 GiB.
            if not special and compiled is not None and torch.version.hip is None:
                self.variants[device] = (compiled.run, compiled.function, compiled.packed_metadata)
            return
        run, function, metadata = variant
        stream = driver.active.get_current_stream(device)
        arguments += self.values + sizes + self.tail
        run(n_programs, 1, 1, stream, function, metadata, None, None, None, *arguments)


def dtypes_of(tensors: tuple[Tensor | None, ...]) -> tuple[torch.dtype | None, ...]:
    """What of the tensors a :class:`Launch` is for."""
    return tuple([None if tensor is None else tensor.dtype for tensor in tensors])


def _is_observed() -> bool:
    hooks = (knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook)
    return any([getattr(hook, "calls", hook) for hook in hooks])


def row_arguments(logits: Tensor) -> tuple[Tensor, tuple[int, ...], bool]:
    """``(base, layout, has_edges)`` for a kernel that walks the rows of ``logits [..., C]``.

    ``has_edges`` is False where every row begins at a line of 128 bytes and is whole vectors of 16: such
    rows have no head or tail.
    """
    n_columns = logits.shape[-1]
    line = LINE_BYTES // logits.element_size()
    if logits.is_contiguous() and logits.data_ptr() % VECTOR_BYTES == 0:
        return logits, (0, 1, 1, n_columns, 0, 0), n_columns % line != 0
    layout = row_layout(logits)
    assert layout is not None, "rows that kernels cannot walk are copied before any launch"
    base, misaligned = aligned_base(logits)
    layout = layout._replace(offset=misaligned)
    is_whole = n_columns * logits.element_size() % VECTOR_BYTES == 0
    return base, tuple(layout), not is_whole or layout.pitch % line != 0


def _bends(options: LossOptions) -> bool:
    """Whether the softcap changes any fp32 logit. If none, its inverse may be 0 in fp32, and is not used."""
    if options.softcap is None:
        return False
    largest = torch.finfo(torch.float32).max * options.logit_scale / options.softcap
    return largest > 2e-4  # tanh(a) = a * (1 - a^2 / 3) to fp32's last digit


def option_arguments(options: LossOptions) -> tuple[float | None, ...]:
    """``options`` as kernels take them: None where something is off, so that its code does not exist.

    In the order of :class:`LossOptions`; entropy and predictions are 1 where they are asked for.
    """
    return (
        options.ignore_index,
        options.smoothing or None,
        options.z_loss or None,
        None if options.logit_scale == 1 else options.logit_scale,
        options.softcap if _bends(options) else None,
        1 if options.entropy else None,
        1 if options.predictions else None,
    )
