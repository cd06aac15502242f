"""Memory that the package allocates without a value holds NaN in tests, so an unwritten output shows.

Freshly mapped memory is usually zero, and a zero gradient or loss looks plausible.
"""

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

PACKAGE = "vocab_parallel_ce"
_ALLOCATORS = (
    (torch, "empty"),
    (torch, "empty_like"),
    (torch, "empty_strided"),
    (Tensor, "new_empty"),
    (Tensor, "new_empty_strided"),
)


def poison(tensor: Tensor) -> Tensor:
    """Fill ``tensor`` with NaN, or with its dtype's largest integer."""
    with torch.no_grad():
        if tensor.is_floating_point() or tensor.is_complex():
            return tensor.fill_(float("nan"))
        if tensor.dtype == torch.bool:
            return tensor.fill_(True)
        return tensor.fill_(torch.iinfo(tensor.dtype).max)


def _capturing() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def _poisoning(allocate: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(allocate)
    def wrapper(*args: Any, **kwargs: Any) -> Tensor:
        tensor = allocate(*args, **kwargs)
        caller = sys._getframe(1).f_globals.get("__name__", "")
        if caller.partition(".")[0] == PACKAGE and not _capturing():
            poison(tensor)
        return tensor

    return wrapper


@contextmanager
def poisoned_allocations() -> Iterator[None]:
    """Within it, the torch.empty family poisons what it returns to the package's own modules."""
    with torch.device("cpu"):
        # The first call under a device makes torch's set of constructors, which it keeps: not of the wrappers below.
        torch.empty(0)
    originals = [(owner, name, getattr(owner, name)) for owner, name in _ALLOCATORS]
    for owner, name, allocate in originals:
        setattr(owner, name, _poisoning(allocate))
    try:
        yield
    finally:
        for owner, name, allocate in originals:
            setattr(owner, name, allocate)
