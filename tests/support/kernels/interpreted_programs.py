"""Programs of launches where kernels are interpreted: there are none, because nothing is launched in C."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch

from vocab_parallel_ce.kernels.launch import Launch
from vocab_parallel_ce.layout import VECTOR_BYTES
from vocab_parallel_ce.program import Step, recording


def step_of(launch: Launch, n_programs: int, sizes: Any, dtypes: tuple[Any, ...]) -> Step:
    """What stands for a Launch's step: an interpreted kernel that gets addresses."""

    def run(*arguments: Any) -> None:
        tensors = [_at(*each) for each in zip(arguments[4:], dtypes, strict=True)]
        launch.kernel[(n_programs,)](*tensors, *launch.values, *sizes, **launch.constants, **launch.compiler)

    return Step(run, n_programs, abs)


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
        steps = recording.steps
        given = [tensor for tensor in tensors if tensor is not None]
        if steps is None or not n_programs or any(tensor.data_ptr() % VECTOR_BYTES for tensor in given):
            return
        dtypes = tuple([None if t is None else t.dtype for t in tensors])
        steps[-1] = step_of(self, n_programs, sizes, dtypes), tensors

    with patch.object(Launch, "__call__", recorded):
        yield
