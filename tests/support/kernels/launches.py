"""A ledger of launches: with which options, and over rows of which kind, each kernel was launched.

What there is to launch is read from the kernels: an option is a field of ``loss_options`` that a kernel or a function
that it calls compares with None, a tensor that may be None, or three ranks. A kernel that takes an algebra, ``LOSS``,
is one kernel for each loss.
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
from types import SimpleNamespace
from typing import Any, NamedTuple

from torch import Tensor

PLAIN = "launched"
WALKS = ("SHAPE", "HAS_EDGES")  # either is a parameter of a kernel that walks rows
ROWS = ("several tiles", "edges", "no edges", "padded")


class Entry(NamedTuple):
    kernel: str
    option: str
    rows: str  # one of ROWS, or PLAIN of a kernel that walks no rows


def kernels() -> dict[str, tuple[Any, Any]]:
    """Every kernel of the package, and the algebra of a loss, for each that the kernel takes, or None."""
    from vocab_parallel_ce import kernels as package

    found, algebras = {}, []
    names = [f"{package.__name__}.{module.name}" for module in pkgutil.iter_modules(package.__path__)]
    for name in (*names, "vocab_parallel_ce.one_pass.kernel"):
        members = vars(importlib.import_module(name))
        found |= {name: value for name, value in members.items() if name.endswith("_kernel") and hasattr(value, "fn")}
        algebras += [members["ALGEBRA"]] if "ALGEBRA" in members else []
    pairs = [(kernel, loss) for kernel in found.values() for loss in (algebras if takes(kernel, "LOSS") else [None])]
    return {name_of(*pair): pair for pair in pairs}


def takes(kernel: Any, parameter: str) -> bool:
    return parameter in inspect.signature(kernel.fn).parameters


def name_of(kernel: Any, algebra: Any) -> str:
    name: str = kernel.fn.__name__
    return name if algebra is None else f"{name} of {algebra.tile.fn.__module__.rpartition('.')[2]}"


@functools.cache
def _compared(function: Any, algebra: Any) -> frozenset[tuple[str, str]]:
    """``(owner, name)`` of what a jit function and those it calls or passes on compare with None."""
    found: set[tuple[str, str]] = set()
    for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(function)))):
        if isinstance(node, ast.Compare):
            left = node.left
            if isinstance(left, ast.Attribute) and isinstance(left.value, ast.Name):
                found.add((left.value.id, left.attr))
        used = None
        if isinstance(node, ast.Name) and node.id not in function.__code__.co_varnames:
            used = function.__globals__.get(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            owner = algebra if node.value.id == "LOSS" else function.__globals__.get(node.value.id)
            used = getattr(owner, node.attr, None)
        inner = getattr(used, "fn", None)
        if inner is not function and str(getattr(inner, "__module__", "")).startswith("vocab_parallel_ce"):
            found |= _compared(inner, algebra)
    return frozenset(found)


def options_of(kernel: Any, algebra: Any = None) -> set[str]:
    """The options of a kernel, ``"none"`` among them."""
    source, parameters = inspect.getsource(kernel.fn), set(inspect.signature(kernel.fn).parameters)
    found = {"none"} | {f"ranks={n}" for n in (2, 3) if "RANKS" in parameters}
    found |= set(re.findall(r"^    (\w+),  # \[.*\bNone\b", source, re.MULTILINE)) & parameters  # pointers
    if "loss_options" in parameters:
        options = {name for owner, name in _compared(kernel.fn, algebra) if owner == "loss_options"}
        found |= {f"loss_options.{name}" for name in options}
    return found


def wanted() -> set[Entry]:
    """Everything that there is to launch."""
    entries = set()
    for name, (kernel, algebra) in kernels().items():
        kinds = ROWS if any(takes(kernel, each) for each in WALKS) else (PLAIN,)
        for option in options_of(kernel, algebra):
            entries |= {Entry(name, option, rows) for rows in kinds}
    return entries


def entries_of(launch: Any, tensors: tuple[Any, ...]) -> set[Entry]:
    """What one launch is entered as."""
    parameters = list(inspect.signature(launch.kernel.fn).parameters)
    given = dict(zip(parameters, (*tensors, *launch.values), strict=False)) | launch.constants
    options = {"none"} | {name for name, value in given.items() if isinstance(value, Tensor)}
    if "loss_options" in given:
        options |= {f"loss_options.{name}" for name, v in given["loss_options"]._asdict().items() if v is not None}
    options.add(f"ranks={given.get('RANKS')}")
    name = name_of(launch.kernel, given.get("LOSS"))
    return {Entry(name, option, rows) for option in options for rows in _rows(given, tensors)}


def _rows(given: dict[str, Any], tensors: tuple[Any, ...]) -> set[str]:
    """Of which kind the rows of a launch are."""
    if not any(each in given for each in WALKS):
        return {PLAIN}
    shape = given["SHAPE"] if "SHAPE" in given else SimpleNamespace(**given)
    if "sizes" in given:
        n_columns, n_valid = given["sizes"].n_columns, given["sizes"].n_valid
        n_columns = n_valid if n_columns is None else n_columns
    else:
        n_columns, n_valid = tensors[0].shape[-1], given["n_columns"]  # of logits off a boundary, 1
    rows = {"padded"} if n_columns > n_valid else set()
    # A body may be without a head of 8 vectors and a part of one.
    if n_valid - 9 * shape.VECTOR > shape.LANES * shape.VECTOR:
        rows.add("several tiles")
    return rows | {"edges" if shape.HAS_EDGES else "no edges"}


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
