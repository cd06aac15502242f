"""Programs of launches where kernels are interpreted: ``replay`` has none there, because nothing is launched in C."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest.mock import patch

import torch

from vocab_parallel_ce.kernels import launch as launching
from vocab_parallel_ce.kernels.launch import Launch
from vocab_parallel_ce.layout import VECTOR_BYTES


class Interpreted(NamedTuple):
    """In the place of a compiled variant: an interpreted kernel that gets addresses."""

    launch: Launch
    dtypes: tuple[torch.dtype | None, ...]  # of its tensors
    sizes: tuple[int, ...]

    def bound(self, grid: int, device: int, addresses_of: Callable[[Any], Any], others: Any) -> Callable[[Any], None]:
        made, dtypes, sizes = self

        def run(addresses: list[Any]) -> None:
            tensors = [_at(*each) for each in zip(addresses_of(addresses), dtypes, strict=True)]
            made.kernel[(grid,)](*tensors, *made.values, *sizes, **made.constants, **made.compiler)

        return run


def _at(address: int | None, dtype: torch.dtype | None) -> torch.Tensor | None:
    """Return a tensor of one element in memory that somebody else has; a kernel goes on from there."""
    assert (address is None) == (dtype is None)
    if address is None or dtype is None:
        return None
    return torch.frombuffer((ctypes.c_char * dtype.itemsize).from_address(address), dtype=dtype)


@contextmanager
def interpreted_programs() -> Iterator[None]:
    """Let plans have programs where kernels are interpreted."""
    launch = Launch.__call__

    def recorded(self: Launch, n_programs: int, tensors: Any, sizes: Any) -> None:
        launch(self, n_programs, tensors, sizes)
        record = launching._recording.record
        given = [tensor for tensor in tensors if tensor is not None]
        if record is None or not n_programs or any(tensor.data_ptr() % VECTOR_BYTES for tensor in given):
            return
        variant = Interpreted(self, tuple([None if t is None else t.dtype for t in tensors]), sizes)
        record.launches[-1] = (variant, *record.launches[-1][1:])  # type: ignore[assignment]

    with patch.object(Launch, "__call__", recorded):
        yield
