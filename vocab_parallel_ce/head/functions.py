"""What can be known of a user's function before it is called."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

import torch


def key_of(function: Any) -> tuple[Any, ...]:
    """Return what stands for a function among those that are checked: its code, those of functions in its closure, its
    class, and the constants that a ``functools.partial`` gives it; of one without code, as ``torch.neg``, itself.
    """
    given: list[Any] = []
    keys: list[Any] = []  # of functions that a partial calls
    while isinstance(function, functools.partial):
        keys += [key_of(each) for each in function.args if callable(each)]
        given += [*function.args, *[each for pair in function.keywords.items() for each in pair]]
        function = function.func
    itself = function
    if isinstance(function, torch.nn.Module):
        function = function.forward
    elif not hasattr(function, "__code__"):
        function = type(function).__call__
    function, owner = inspect.unwrap(function), getattr(function, "__self__", None)
    with suppress(ValueError):  # a cell that is not filled yet
        given += [cell.cell_contents for cell in getattr(function, "__closure__", None) or ()]
    codes = [getattr(each, "__code__", type(each)) for each in given if callable(each)]
    constants = [each for each in given if isinstance(each, bool | int | float | str)]
    kind = owner if isinstance(owner, type) else type(owner)
    return getattr(function, "__code__", itself), kind, *codes, *constants, *keys


def check_takes(function: Callable[..., Any], names: Iterable[str], has_labels: bool) -> None:
    """Raise TypeError if a function cannot be called with log-probabilities of labels and keywords of these names."""
    first = ["log_probs"] if has_labels else []
    try:
        inspect.signature(function, follow_wrapped=False).bind(*first, **dict.fromkeys(names))
    except TypeError as error:
        called = ", ".join((*first, *(f"{name}=..." for name in names)))
        raise TypeError(f"objective: must take ({called}), and it does not: {error}") from error
    except ValueError:  # it has no signature that can be read
        return
