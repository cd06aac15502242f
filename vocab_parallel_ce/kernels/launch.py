"""What every launcher does alike: the device guard and the arguments that describe a strided tensor."""

from __future__ import annotations

import functools
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from vocab_parallel_ce.kernels.layout import VECTOR_BYTES, aligned_base, row_layout
from vocab_parallel_ce.spec import LossOptions

NOTHING = nullcontext()


def device_of(tensor: Tensor) -> AbstractContextManager[object]:
    """Make the tensor's GPU current: a launch goes to the current one, whichever holds the tensor."""
    if not tensor.is_cuda or tensor.get_device() == torch.cuda.current_device():
        return NOTHING
    return torch.cuda.device_of(tensor)


def row_arguments(logits: Tensor, vector: int) -> tuple[Tensor, tuple[int, ...], bool]:
    """``(base, layout, has_edges)`` for a kernel that walks the rows of ``logits [..., C]``.

    ``has_edges`` is False where every row is whole vectors, aligned: such rows have no head or tail.
    """
    n_columns = logits.shape[-1]
    if logits.is_contiguous() and logits.data_ptr() % VECTOR_BYTES == 0:
        return logits, (0, 1, 1, n_columns, 0, 0), n_columns % vector != 0
    layout = row_layout(logits)
    assert layout is not None, "rows that kernels cannot walk are copied before any launch"
    base, misaligned = aligned_base(logits)
    layout = layout._replace(offset=misaligned)
    offset, _, _, *strides = layout
    has_edges = any(extent % vector for extent in (n_columns, offset, *strides))
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
