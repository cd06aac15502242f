"""A ledger of launches: with which options, and over rows of which kind, each kernel was launched.

What there is to launch is read from the kernels: an option is a field of ``loss_options`` or ``weights`` that a kernel
or a function that it calls compares with None, a tensor that may be None, a kind, or three ranks.
"""

import ast
import functools
import importlib
import inspect
import pkgutil
import re
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import Tensor

PLAIN = "launched"
ROWS = ("several tiles", "edges", "no edges", "padded")


class Entry(NamedTuple):
    kernel: str
    option: str
    rows: str  # one of ROWS, or PLAIN of a kernel that walks no rows


def kernels() -> dict[str, Any]:
    """Every kernel of the package."""
    from vocab_parallel_ce import kernels as package

    found = {}
    for module in pkgutil.iter_modules(package.__path__):
        members = vars(importlib.import_module(f"{package.__name__}.{module.name}"))
        found |= {name: value for name, value in members.items() if name.endswith("_kernel") and hasattr(value, "fn")}
    return found


@functools.cache
def _compared(function: Any) -> frozenset[tuple[str, str]]:
    """``(owner, name)`` of what a jit function and those it calls compare with None, and ``("KIND", kind)``."""
    found: set[tuple[str, str]] = set()
    for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(function)))):
        if isinstance(node, ast.Compare):
            left, right = node.left, node.comparators[0]
            if isinstance(left, ast.Attribute) and isinstance(left.value, ast.Name):
                found.add((left.value.id, left.attr))
            elif isinstance(left, ast.Name) and isinstance(right, ast.Constant) and isinstance(right.value, str):
                found.add((left.id, right.value))
        if isinstance(node, ast.Call):
            owner = function.__globals__
            called = None
            if isinstance(node.func, ast.Name):
                called = owner.get(node.func.id)
            elif isinstance(node.func, ast.Attribute) and isinstance(node.func.value, ast.Name):
                called = getattr(owner.get(node.func.value.id), node.func.attr, None)
            if hasattr(called, "fn") and str(getattr(called.fn, "__module__", "")).startswith("vocab_parallel_ce"):
                found |= _compared(called.fn)
    return frozenset(found)


def options_of(kernel: Any) -> set[str]:
    """The options of a kernel, ``"none"`` among them."""
    source, parameters = inspect.getsource(kernel.fn), set(inspect.signature(kernel.fn).parameters)
    found = {"none"} | {f"ranks={n}" for n in (2, 3) if "RANKS" in parameters}
    found |= set(re.findall(r"^    (\w+),  # \[.*\bNone\b", source, re.MULTILINE)) & parameters  # pointers
    for owner, name in _compared(kernel.fn):
        if owner in ("loss_options", "weights", "KIND") and owner in parameters:
            found.add(f"{owner}.{name}")
    return found


def wanted() -> set[Entry]:
    """Everything that there is to launch."""
    entries = set()
    for name, kernel in kernels().items():
        walks = "HAS_EDGES" in inspect.signature(kernel.fn).parameters
        for option in options_of(kernel):
            entries |= {Entry(name, option, rows) for rows in (ROWS if walks else (PLAIN,))}
    return entries


def entries_of(launch: Any, tensors: tuple[Any, ...]) -> set[Entry]:
    """What one launch is entered as."""
    parameters = list(inspect.signature(launch.kernel.fn).parameters)
    given = dict(zip(parameters, (*tensors, *launch.values), strict=False)) | launch.constants
    options = {"none"} | {name for name, value in given.items() if isinstance(value, Tensor)}
    for owner in {"loss_options", "weights"} & given.keys():
        options |= {f"{owner}.{name}" for name, value in given[owner]._asdict().items() if value is not None}
    if given.get("temperature") is not None:
        options.add("loss_options.temperature")
    options |= {f"KIND.{given.get('KIND')}", f"ranks={given.get('n_ranks')}"}
    name = launch.kernel.fn.__name__
    return {Entry(name, option, rows) for option in options for rows in _rows(given, tensors)}


def _rows(given: dict[str, Any], tensors: tuple[Any, ...]) -> set[str]:
    """Of which kind the rows of a launch are."""
    if "HAS_EDGES" not in given:
        return {PLAIN}
    if "sizes" in given:
        n_columns, n_valid = given["sizes"].n_columns, given["sizes"].n_valid
        n_valid = n_columns if n_valid is None else n_valid
    else:
        n_columns, n_valid = tensors[0].shape[-1], given["n_columns"]  # of logits off a boundary, 1
    rows = {"padded"} if n_columns > n_valid else set()
    # A body may be without a head of 8 vectors and a part of one.
    if n_valid - 9 * given["VECTOR"] > given["LANES"] * given["VECTOR"]:
        rows.add("several tiles")
    return rows | {"edges" if given["HAS_EDGES"] else "no edges"}


@contextmanager
def recorded() -> Iterator[set[Entry]]:
    """The set it yields grows by the entries of every launch, none of which happens."""
    from vocab_parallel_ce.kernels.launch import Launch

    entries: set[Entry] = set()

    def record(launch: Any, n_programs: int, tensors: tuple[Any, ...], sizes: tuple[int, ...]) -> None:
        if n_programs:
            entries.update(entries_of(launch, tensors))

    original, Launch.__call__ = Launch.__call__, record  # type: ignore[method-assign]
    try:
        yield entries
    finally:
        Launch.__call__ = original  # type: ignore[method-assign]
