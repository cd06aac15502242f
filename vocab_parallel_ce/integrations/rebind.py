"""Lets names of a framework stand for this package's functions for a while, in every module that has them."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from typing import Any, NamedTuple

import torch

from vocab_parallel_ce.integrations import Report, log_installed, warn_if_newer

PACKAGE = __name__.partition(".")[0]


class Around(NamedTuple):
    """A stand-in that is made from what it replaces, whatever parameters that has."""

    make: Callable[[Any], Any]
    optional: bool = False  # versions without the name stay as they are
    everywhere: bool = True  # False: other modules that have it keep it


class Rebound(NamedTuple):
    """What a name stood and stands for, and where."""

    target: str
    old: Any
    new: Any
    holders: list[tuple[Any, str]]  # modules or classes, and their names for it; first the one that defines it


class Switch:
    """Rebinds names of one framework, and gives them back.

    Args:
        version: the framework and the versions that have these names, for messages.
        stand_ins: ``"module:name"`` or ``"module:Class.name"`` -> what shall compute it, or :class:`Around`.
        left: what the framework still computes -> why.
        calls: what the integration counts from :meth:`install` on, for the report.
    """

    def __init__(
        self,
        version: str,
        stand_ins: Mapping[str, Any],
        left: Mapping[str, str] | None = None,
        calls: Counter[str] | None = None,
    ) -> None:
        self.version, self.stand_ins, self.left = version, stand_ins, left or {}
        self.calls: Counter[str] = Counter() if calls is None else calls
        self._rebound: list[Rebound] = []
        self._left: dict[str, str] = {}

    def install(self) -> Report:
        """Rebind the names in every module that has them, and report; a second call changes nothing.

        A module that is imported later gets the new functions from the module that defines them. A function that was
        stored elsewhere (an instance, a closure) stays: call this before the framework builds its workers, in each
        process that computes.

        Raises:
            ImportError: the framework is not installed, or none of the modules can be imported.
            ValueError: a name is missing or has other parameters. Nothing has changed then.
        """
        if self._rebound:
            return self.report()
        roots = {target.partition(":")[0].partition(".")[0] for target in self.stand_ins}
        if not any(map(importlib.util.find_spec, roots)):
            raise ImportError(f"{self.version}: {' and '.join(roots)} is not installed")
        names: dict[tuple[Any, str], Rebound] = {}
        left = {}
        for target, stand_in in self.stand_ins.items():
            try:
                each = self._looked_up(target, stand_in)
                names[each.holders[0]] = each  # once, if a class has two names
            except ImportError as error:
                left[target] = str(error)
        if not names:
            raise ImportError(f"{self.version}: none of its modules can be imported: {left}")
        warn_if_newer(self.version.partition(" ")[0].lower())
        rebound = [*names.values()]
        alone = {target for target, each in self.stand_ins.items() if isinstance(each, Around) and not each.everywhere}
        other_names = _modules_with([each.old for each in rebound if each.target not in alone])
        for _, old, _, holders in rebound:
            holders += [each for each in other_names.pop(id(old), ()) if each not in names]
        try:
            for *_, new, holders in rebound:
                _bind(holders, new)
        except BaseException:
            for _, old, _, holders in rebound:
                _bind(holders, old)
            raise
        self._left, self._rebound = {**self.left, **left}, rebound
        self.calls.clear()
        log_installed(self.version, [holders[0][1] for *_, holders in rebound], self._left)
        return self._report(each for *_, holders in rebound for each in holders)

    def uninstall(self) -> None:
        """Give the framework its own functions back, also in modules imported since; does nothing if not installed.

        Raises:
            RuntimeError: something else has replaced a name since. Nothing has changed then.
        """
        for _, _, new, holders in self._rebound:
            for owner, name in holders:
                if vars(owner).get(name) is not new:
                    where = f"{_path(owner)}.{name}"
                    raise RuntimeError(f"{where}: something else replaced it after install(); undo that first")
        other_names = self._other_names()
        while self._rebound:
            _, old, new, holders = self._rebound.pop()
            _bind([*holders, *other_names[id(new)]], old)

    @contextmanager
    def installed(self) -> Iterator[Report]:
        """Install in a ``with`` block, and uninstall after it, unless it was installed before."""
        was_installed = bool(self._rebound)
        try:
            yield self.install()
        finally:
            if not was_installed:
                self.uninstall()

    def report(self) -> Report:
        """Return which names stand for this package's functions now, and what does not, and why."""
        return self._report([*(holders[0] for *_, holders in self._rebound), *chain(*self._other_names().values())])

    def _other_names(self) -> dict[int, list[tuple[Any, str]]]:
        """Return where modules, also those imported since, have what is installed; searches only if something is."""
        return _modules_with([new for _, _, new, _ in self._rebound]) if self._rebound else {}

    def _report(self, holders: Iterable[tuple[Any, str]]) -> Report:
        names = {f"{_path(owner)}.{name}" for owner, name in holders}
        return Report(self.version, tuple(sorted(names)), dict(self._left) if names else {}, dict(self.calls))

    def original(self, target: str) -> Any:
        """Return the framework's own function that ``target`` names, as in ``stand_ins``, installed or not."""
        for each in self._rebound:
            if each.target == target:
                return each.old
        owner, name = _owner(target)
        return getattr(owner, name)

    def _looked_up(self, target: str, stand_in: Any) -> Rebound:
        """Return what a target is now, and its own copy of the stand-in, which nothing else has."""
        module, _, path = target.partition(":")
        owner, name = _owner(target)
        old = None if owner is None else vars(owner).get(name)
        if isinstance(stand_in, Around):
            if old is None:
                if stand_in.optional:
                    raise ImportError("this version has no such name")
                raise ValueError(
                    f"{module}.{path}: expected that of {self.version}, got no such name; install that version"
                )
            return Rebound(target, old, stand_in.make(old), [(owner, name)])
        expected = _parameters(stand_in)
        got = None if old is None else _parameters(old)
        if got != expected:
            raise ValueError(
                f"{module}.{path}: expected the parameters of {self.version}, {expected}, "
                f"got {got or 'no such name'}; install that version, or call this package's functions yourself"
            )
        new = copy_of(stand_in)
        return Rebound(target, old, staticmethod(new) if isinstance(old, staticmethod) else new, [(owner, name)])


def _owner(target: str) -> tuple[Any, str]:
    """Return the module or class that a target is of, None if there is no such class, and its name there."""
    module, _, path = target.partition(":")
    *classes, name = path.split(".")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of an unstable module, which its user imports too
        owner: Any = importlib.import_module(module)
    for part in classes:
        owner = getattr(owner, part, None)
    return owner, name


def copy_of(stand_in: Any) -> Any:
    """Return a function or class of its own, so that undoing it leaves direct imports of the stand-in alone."""
    if isinstance(stand_in, type):
        return type(stand_in.__name__, (stand_in,), {"__module__": stand_in.__module__, "__doc__": stand_in.__doc__})

    @functools.wraps(stand_in)
    def call(*args: Any, **kwargs: Any) -> Any:
        return stand_in(*args, **kwargs)

    return call


def _parameters(value: Any) -> list[str]:
    """Return the names of the parameters of a function, or of what an autograd Function applies."""
    function: Callable[..., Any] = getattr(value, "apply", value)
    owner = getattr(function, "__self__", None)
    if isinstance(owner, type) and issubclass(owner, torch.autograd.Function):
        return [*inspect.signature(owner.forward).parameters][1:]
    return [*inspect.signature(function).parameters]


def _bind(holders: list[tuple[Any, str]], value: Any) -> None:
    for owner, name in holders:
        setattr(owner, name, value)


def _modules_with(values: list[Any]) -> dict[int, list[tuple[Any, str]]]:
    """Return, by the ``id`` of a value, all modules outside of this package that have it, with their names for it."""
    holders: dict[int, list[tuple[Any, str]]] = {id(value): [] for value in values}
    for path, module in [*sys.modules.items()]:
        if path.partition(".")[0] != PACKAGE:
            for name, value in [*getattr(module, "__dict__", {}).items()]:
                if id(value) in holders:
                    holders[id(value)].append((module, name))
    return holders


def _path(owner: Any) -> str:
    return f"{owner.__module__}.{owner.__qualname__}" if isinstance(owner, type) else owner.__name__
