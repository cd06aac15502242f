"""What every launcher does alike: the launch itself, and the arguments that describe a strided tensor."""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import Tensor
from triton import knobs
from triton.runtime import driver

from vocab_parallel_ce.kernels.layout import VECTOR_BYTES, aligned_base, row_layout
from vocab_parallel_ce.spec import LossOptions

MOST_VARIANTS = 4096  # then all are looked up anew: shapes that never come again must not pile up
_variants: dict[tuple[Any, ...], tuple[Any, Any, Any]] = {}


def launch(
    kernel: Any,
    n_programs: int,
    tensors: tuple[Tensor | None, ...],
    values: tuple[Any, ...],
    sizes: tuple[int, ...],
    constants: dict[str, Any],
    *,
    num_warps: int,
) -> None:
    """``kernel[(n_programs,)](*tensors, *values, *sizes, **constants)`` on the first tensor's device.

    Triton works out on every call which compiled variant the arguments ask for, which takes longer than
    the launch. Here the variant of an earlier call is found by its dtypes, values and constants; ``sizes``,
    on which the kernel does not specialise, are left out. Tensors off 16-byte boundaries take Triton's way,
    and so do launches that a profiler's hook observes.
    """
    device = tensors[0].get_device()  # type: ignore[union-attr]
    if device >= 0 and device != torch.cuda.current_device():
        # A launch goes to the current GPU, whichever holds the tensors.
        with torch.cuda.device(device):
            return launch(kernel, n_programs, tensors, values, sizes, constants, num_warps=num_warps)
    dtypes: list[torch.dtype | None] = []
    addresses: list[int | None] = []
    together = 0
    for tensor in tensors:
        if tensor is None:
            dtypes.append(None)
            addresses.append(None)
        else:
            address = tensor.data_ptr()
            together |= address
            dtypes.append(tensor.dtype)
            addresses.append(address)
    known = together % VECTOR_BYTES == 0 and max(sizes) < 2**31 and not _is_observed()
    key = (id(kernel), device, num_warps, values, *dtypes, *constants.values())
    variant = _variants.get(key) if known else None
    if variant is None:
        compiled = kernel[(n_programs,)](*tensors, *values, *sizes, **constants, num_warps=num_warps)
        if known and compiled is not None:  # the interpreter compiles nothing
            if len(_variants) >= MOST_VARIANTS:
                _variants.clear()
            _variants[key] = (compiled.run, compiled.function, compiled.packed_metadata)
        return
    run, function, metadata = variant
    stream = driver.active.get_current_stream(device)
    arguments = (*addresses, *values, *sizes, *constants.values())
    run(n_programs, 1, 1, stream, function, metadata, None, None, None, *arguments)


def _is_observed() -> bool:
    hooks = knobs.runtime.launch_enter_hook
    return bool(getattr(hooks, "calls", hooks))


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
