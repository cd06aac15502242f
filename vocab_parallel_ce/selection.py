"""Which implementation runs, and why: a pure function of what the machine and the call are."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
from functools import cache
from typing import NamedTuple

IMPLEMENTATIONS = ("reference", "triton")


class Selection(NamedTuple):
    """An implementation's name and the reason it was chosen."""

    name: str
    reason: str


def triton_state() -> str:
    """``"absent"``, ``"interpreter"`` (kernels run on the CPU, slowly, for tests) or ``"compiler"``."""
    if not _triton_is_installed():
        return "absent"
    interprets = os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "on", "yes", "y")
    return "interpreter" if interprets else "compiler"


def triton_version() -> str | None:
    """The installed version under any of the names that torch's platforms give the package, or None."""
    for distribution in ("triton", "pytorch-triton", "pytorch-triton-rocm"):
        try:
            return importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def select(device_type: str, requested: str = "auto", *, triton: str | None = None) -> Selection:
    """Choose the implementation for tensors on ``device_type``, e.g. ``"cuda"`` (ROCm's name too).

    ``auto`` is ``triton`` on a GPU and ``reference`` elsewhere. Nothing falls back: a GPU without
    triton is an error that names the remedy.

    Args:
        triton: what :func:`triton_state` returns; asked for when None.

    Raises:
        ValueError: the name is unknown, or its condition is not met.
    """
    if requested not in ("auto", *IMPLEMENTATIONS):
        names = ", ".join(map(repr, ("auto", *IMPLEMENTATIONS)))
        raise ValueError(f"impl: expected one of {names}, got {requested!r}")
    if requested == "reference":
        return Selection("reference", "asked for")
    if requested == "auto" and device_type != "cuda":
        return Selection("reference", f"{device_type} tensors: plain PyTorch runs on any device")
    triton = triton or triton_state()
    if triton == "absent":
        raise ValueError(
            f"impl: {requested!r} on {device_type} needs the package triton, which is not installed; "
            "install it, or ask for impl='reference' (plain PyTorch, several times slower)"
        )
    if device_type == "cuda":
        return Selection("triton", "a GPU, and triton is installed")
    if device_type == "cpu" and triton == "interpreter":
        return Selection("triton", "asked for, under triton's interpreter")
    raise ValueError(
        f"impl: 'triton' needs tensors on a CUDA or ROCm GPU, or on the CPU with TRITON_INTERPRET=1 "
        f"set before triton is imported, got tensors on {device_type}"
    )


@cache
def _triton_is_installed() -> bool:
    return importlib.util.find_spec("triton") is not None
