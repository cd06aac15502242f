"""What every launcher does alike: the launch itself, and the arguments that describe a strided tensor."""

from __future__ import annotations

import functools
import math
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import triton
from torch import Tensor
from triton import knobs

from vocab_parallel_ce.kernels.layout import VECTOR_BYTES, aligned_base, row_layout
from vocab_parallel_ce.spec import LossOptions

NOTHING = nullcontext()
MOST_VARIANTS = 4096  # then all are looked up anew: shapes that never come again must not pile up
_compiled: dict[tuple[Any, ...], Any] = {}


def launch(
    kernel: Any,
    n_programs: int,
    arguments: tuple[Any, ...],
    sizes: tuple[int, ...],
    constants: dict[str, Any],
    *,
    num_warps: int,
) -> None:
    """``kernel[(n_programs,)](*arguments, *sizes, **constants)`` on the device of the first argument.

    Triton works out on every call which compiled variant the arguments ask for. Here the variant of the
    last such call is found by the arguments' values, and dtypes for tensors; ``sizes``, on which the kernel
    does not specialise, are left out. Tensors off 16-byte boundaries take Triton's way, and so do launches
    that a profiler's hook observes.
    """
    device = arguments[0].get_device()
    variant, values, addresses = _described(arguments)
    key = (id(kernel), device, num_warps, *variant, *constants.values())
    compiled = _compiled.get(key) if addresses % VECTOR_BYTES == 0 and max(sizes) < 2**31 else None
    with device_of(arguments[0]):
        if compiled is None or _is_observed():
            compiled = kernel[(n_programs,)](*arguments, *sizes, **constants, num_warps=num_warps)
            # The interpreter compiles nothing.
            if compiled is not None and addresses % VECTOR_BYTES == 0 and max(sizes) < 2**31:
                if len(_compiled) >= MOST_VARIANTS:
                    _compiled.clear()
                _compiled[key] = compiled
            return
        run, function, metadata = compiled.run, compiled.function, compiled.packed_metadata
        stream = triton.runtime.driver.active.get_current_stream(device)
        nothing = (None, None, None)  # for the hooks
        run(n_programs, 1, 1, stream, function, metadata, *nothing, *values, *sizes, *constants.values())


def _described(arguments: tuple[Any, ...]) -> tuple[list[Any], list[Any], int]:
    """What a variant depends on, the values to pass (addresses for tensors), and all addresses or-ed."""
    variant: list[Any] = []
    values: list[Any] = []
    addresses = 0
    for argument in arguments:
        if isinstance(argument, Tensor):
            address = argument.data_ptr()
            addresses |= address
            variant.append(argument.dtype)
            values.append(address)
        elif isinstance(argument, tuple) and any(isinstance(part, Tensor) for part in argument):
            inner = _described(argument)
            variant.append(tuple(inner[0]))
            values.append(tuple(inner[1]))
            addresses |= inner[2]
        else:
            variant.append(argument)
            values.append(argument)
    return variant, values, addresses


def _is_observed() -> bool:
    hooks = knobs.runtime.launch_enter_hook
    return bool(getattr(hooks, "calls", hooks))


def device_of(tensor: Tensor) -> AbstractContextManager[object]:
    """Make the tensor's GPU current: a launch goes to the current one, whichever holds the tensor."""
    if not tensor.is_cuda or tensor.get_device() == torch.cuda.current_device():
        return NOTHING
    return torch.cuda.device_of(tensor)


def row_arguments(logits: Tensor, vector: int) -> tuple[Tensor, tuple[int, ...], bool]:
    """``(base, layout, has_edges)`` for a kernel that walks the rows of ``logits [..., C]``.

    ``has_edges`` is False where every row begins at a line of 128 bytes and is whole vectors: such rows
    have no head or tail.
    """
    n_columns = logits.shape[-1]
    if logits.is_contiguous() and logits.data_ptr() % VECTOR_BYTES == 0:
        return logits, (0, 1, 1, n_columns, 0, 0), n_columns % (8 * vector) != 0
    layout = row_layout(logits)
    assert layout is not None, "rows that kernels cannot walk are copied before any launch"
    base, misaligned = aligned_base(logits)
    layout = layout._replace(offset=misaligned)
    offset, _, _, *strides = layout
    has_edges = n_columns % vector != 0 or math.gcd(offset, *strides) % (8 * vector) != 0
    return base, tuple(layout), has_edges


@functools.lru_cache
def option_arguments(options: LossOptions) -> tuple[float | None, ...]:
    """``options`` as kernels take them: None where something is off, so that its code does not exist.

    In the order of :class:`LossOptions`; entropy and predictions are 1 where they are asked for.
    """
    return (
        options.ignore_index,
        options.smoothing or None,
        options.z_loss or None,
        None if options.logit_scale == 1 else options.logit_scale,
        options.softcap,
        1 if options.entropy else None,
        1 if options.predictions else None,
    )
