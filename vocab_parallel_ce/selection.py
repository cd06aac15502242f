"""Choose the implementation of a call, and say why. A pure function of the machine and the device."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
from contextlib import suppress
from functools import cache

from vocab_parallel_ce import checks
from vocab_parallel_ce.options import IMPLEMENTATIONS
from vocab_parallel_ce.versions import LOWEST_TRITON, is_older


def triton_state() -> str:
    """Return ``"absent"``, ``"too old"``, ``"compiler"``, or ``"interpreter"`` (slow, on the CPU, for tests)."""
    if not is_installed("triton"):
        return "absent"
    if is_older(triton_version() or "", LOWEST_TRITON):
        return "too old"
    interprets = os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "on", "yes", "y")
    return "interpreter" if interprets else "compiler"


@cache
def triton_version() -> str | None:
    """Return the installed version, or None. The package has another name on some platforms."""
    for name in ("triton", "pytorch-triton", "pytorch-triton-rocm"):
        with suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(name)
    return None


@cache
def is_installed(module: str) -> bool:
    """Return whether there is a module; this imports the packages that it is in."""
    with suppress(ModuleNotFoundError):
        return importlib.util.find_spec(module) is not None
    return False


def select(device_type: str, requested: str = "auto") -> tuple[str, str]:
    """Return the implementation for tensors on ``"cpu"``, ``"cuda"``, also for ROCm, or another device, and why.

    ``auto`` is ``triton`` on a GPU and ``reference`` elsewhere. ``one_pass.bind`` says which calls of either name
    ``one_pass`` runs. Nothing falls back: what cannot run raises ValueError with the remedy, also ``auto`` on a GPU
    without triton.
    """
    checks.check_choice("impl", requested, ("auto", *IMPLEMENTATIONS))
    if requested == "reference":
        return requested, "asked for"
    if requested == "auto" and device_type != "cuda":
        return "reference", f"{device_type} tensors: plain PyTorch runs on any device"
    if device_type not in ("cuda", "cpu"):  # first: no package helps there
        raise ValueError(
            f"impl: {requested!r} needs tensors on a CUDA or ROCm GPU, got tensors on {device_type}, for which there "
            "are no kernels; use impl='auto' (plain PyTorch there)"
        )
    triton = triton_state()
    if triton in ("absent", "too old"):
        lack = "which is not installed; install it" if triton == "absent" else f"got {triton_version()}; upgrade it"
        raise ValueError(
            f"impl: {requested!r} on {device_type} needs the package triton, {LOWEST_TRITON} or newer, {lack}, "
            "or ask for impl='reference' (plain PyTorch, several times slower)"
        )
    if requested == "one_pass" and (device_type, triton) != ("cuda", "compiler"):
        raise ValueError(
            f"impl: 'one_pass' needs a GPU and triton's compiler, got {device_type} and triton's {triton}; 'auto' "
            "chooses what can run"
        )
    if device_type == "cpu" and triton != "interpreter":
        raise ValueError(
            "impl: 'triton' needs tensors on a CUDA or ROCm GPU, or on the CPU with TRITON_INTERPRET=1 "
            "set before triton is imported, got tensors on cpu"
        )
    if requested == "auto":
        return "triton", "a GPU, and triton is installed"
    return requested, "asked for" if device_type == "cuda" else "asked for, under triton's interpreter"
