"""Frameworks: each module is switched on by name, imports its framework only then, and can be undone."""

from __future__ import annotations

import functools
import importlib
import logging
import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from importlib import metadata
from types import ModuleType
from typing import Any, NamedTuple

from vocab_parallel_ce.options import HEAD_FIELDS, HeadOptions

# The versions that the tests ran with.
TESTED = {
    "transformers": ("5.16.1", "5.17.0", "5.23.0"),
    "trl": ("1.9.0", "1.16.0"),
    "axolotl": ("0.19.0",),
    "megatron-core": ("0.16.1", "0.17.1", "0.18.2", "0.19.2"),
    "torchtitan": ("0.3.0",),
    "verl": ("0.9.1",),
    "nemo-rl": ("0.7.0",),
    "openrlhf": ("0.11.2",),
    "deepspeed": ("0.19.8",),
    "ms-swift": ("4.6.0",),
    "nemo-automodel": ("0.7.0",),
    "skyrl": ("0.4.0",),
    "lightning": ("2.6.6",),
    "accelerate": ("1.15.0",),
}

logger = logging.getLogger("vocab_parallel_ce")

MODULES = (
    *("dtensor", "megatron", "nemo_automodel", "nemo_rl", "openrlhf", "skyrl", "swift", "torchtitan"),
    *("transformers", "trl", "verl"),
)


class Report(NamedTuple):
    """What ``install()`` of an integration did, and what became of the calls since. Its text fits a screen."""

    framework: str
    rebound: tuple[str, ...]  #: names that stand for this package's functions, with their modules, or what they will be
    left: dict[str, str]  #: what the framework still computes, or a name that is not there -> why
    calls: dict[str, int]  #: what became of calls since then -> how many; empty if the integration does not count them

    @property
    def installed(self) -> bool:
        """Return whether anything is installed."""
        return bool(self.rebound)

    def __repr__(self) -> str:
        if not self.installed:
            return f"{self.framework}: not installed"
        calls = [f"{event}: {number}" for event, number in self.calls.items()]
        short = {what: what.partition(":")[2] or what.rpartition(".")[2] for what in self.left if " " not in what}
        left = [f"{short.get(what, what)}: {why}" for what, why in self.left.items()]
        parts = {"computed by this package": self.rebound, "left to the framework": left, "calls so far": calls}
        lines = [f"{self.framework}: installed"]
        for part, each in parts.items():
            shown = [textwrap.shorten(line, 110, placeholder=" ...") for line in each]
            lines += [f"{part}:", textwrap.indent(_first(shown, "\n"), "  ")] if shown else []
        return "\n".join(lines)


def _first(parts: Sequence[str], separator: str, most: int = 5) -> str:
    """Return the first of some parts, and how many more there are."""
    more = [f"and {len(parts) - most} more"] if len(parts) > most else []
    return separator.join([*parts[:most], *more]) or "nothing"


def __getattr__(name: str) -> ModuleType:
    """Import and return ``integrations.transformers``, and so on, when it is used."""
    if name not in MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return importlib.import_module(f"{__name__}.{name}")


def framework_lines() -> list[str]:
    """Return, for each framework, the version that is installed and whether it is tested.

    Versions that differ in their third number alone are alike: 0.19.3 is tested if 0.19.2 is.
    """
    lines = []
    for name, versions in TESTED.items():
        tested = ", ".join(versions)
        try:
            installed = metadata.version(name)
        except metadata.PackageNotFoundError:
            lines.append(f"{name}: not installed (tested with {tested})")
            continue
        is_tested = _key(installed) in map(_key, versions)
        lines.append(f"{name} {installed}: {'tested' if is_tested else f'not tested, only {tested}'}")
    return lines


def check_known(options: Mapping[str, Any], known: Sequence[str]) -> None:
    """Raise TypeError for an option of an ``install()`` that is not ``known``."""
    for name in options:
        if name not in known:
            raise TypeError(f"{name}: expected an option of install(), one of {', '.join(known)}, got no such name")


def of_head(keywords: Mapping[str, Any]) -> dict[str, Any]:
    """Return keywords of a function of hidden states: ``keywords``, with the fields of HeadOptions in one."""
    fields = {name: value for name, value in keywords.items() if name in HEAD_FIELDS}
    others = {name: value for name, value in keywords.items() if name not in fields}
    return others | {"options": made_once(**fields)}


@functools.lru_cache(maxsize=1024, typed=True)
def made_once(**fields: Any) -> HeadOptions:
    """Return HeadOptions: one record for equal fields, since to make one takes microseconds."""
    return HeadOptions(**fields)


@functools.cache
def warn_if_newer(name: str) -> None:
    """Log, once per process, that the installed version of a framework is newer than those that are tested."""
    try:
        installed, newest = metadata.version(name), TESTED[name][-1]
    except (metadata.PackageNotFoundError, KeyError):  # not installed as a package, as in a test
        return
    if _key(installed) > _key(newest):
        logger.warning(
            "vocab_parallel_ce: %s %s is newer than the newest tested, %s; compare a step with and without install()",
            *(name, installed, newest),
        )


def log_installed(framework: str, computed: Iterable[str], left: Mapping[str, str]) -> None:
    """Log, in one line, what of a framework this package computes from now on, and what it does not, and why."""
    what = _first(sorted(computed, key=lambda name: (" " in name, name)), ", ")  # a sentence is the last
    why = _first([f"{name} ({reason})" for name, reason in left.items()], "; ")
    logger.info("vocab_parallel_ce: %s: computes %s; left to the framework: %s", framework, what, why)


def _key(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])
