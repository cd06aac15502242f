"""Frameworks: each module is switched on by name, imports its framework only then, and can be undone."""

from __future__ import annotations

import functools
import importlib
import logging
import re
from collections.abc import Iterable, Mapping
from importlib import metadata
from types import ModuleType

# The versions that the tests ran with.
TESTED = {
    "transformers": ("5.17.0", "5.23.0"),
    "trl": ("1.16.0",),
    "megatron-core": ("0.16.1", "0.17.1", "0.18.2", "0.19.2"),
    "torchtitan": ("0.3.0",),
    "verl": ("0.9.1",),
    "nemo-rl": ("0.7.0",),
    "openrlhf": ("0.11.2",),
    "deepspeed": ("0.19.8",),
    "ms-swift": ("4.6.0",),
    "nemo-automodel": ("0.7.0",),
    "skyrl": ("0.4.0",),
    "areal": ("1.0.4",),
    "lightning": ("2.6.6",),
    "accelerate": ("1.15.0",),
}

logger = logging.getLogger("vocab_parallel_ce")

MODULES = (
    *("areal", "deepspeed", "dtensor", "megatron", "nemo_automodel", "nemo_rl", "openrlhf", "skyrl", "swift"),
    *("torchtitan", "transformers", "trl", "verl"),
)


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
            found = metadata.version(name)
        except metadata.PackageNotFoundError:
            lines.append(f"{name}: not installed (tested with {tested})")
            continue
        is_tested = _key(found) in map(_key, versions)
        lines.append(f"{name} {found}: {'tested' if is_tested else f'not tested, only {tested}'}")
    return lines


@functools.cache
def warn_if_newer(name: str) -> None:
    """Log, once per process, that the installed version of a framework is newer than those that are tested."""
    try:
        found, newest = metadata.version(name), TESTED[name][-1]
    except (metadata.PackageNotFoundError, KeyError):  # not installed as a package, as in a test
        return
    if _key(found) > _key(newest):
        logger.warning(
            "vocab_parallel_ce: %s %s is newer than the newest tested, %s; compare a step with and without install()",
            *(name, found, newest),
        )


def log_installed(framework: str, computed: Iterable[str], left: Mapping[str, str]) -> None:
    """Log, in one line, what of a framework this package computes from now on, and what it does not, and why."""
    what = ", ".join(sorted(computed)) or "nothing"
    why = "; ".join(f"{name} ({reason})" for name, reason in left.items()) or "nothing"
    logger.info("vocab_parallel_ce: %s: computes %s; left to the framework: %s", framework, what, why)


def _key(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])
