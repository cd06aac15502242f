"""Choose the implementation of a call, and say why. A pure function of the machine and the call."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
from contextlib import suppress
from functools import cache
from typing import NamedTuple

import torch

from vocab_parallel_ce import checks
from vocab_parallel_ce.environment import SAME_BITS
from vocab_parallel_ce.options import IMPLEMENTATIONS
from vocab_parallel_ce.versions import LOWEST_TRITON, is_older


class Selection(NamedTuple):
    name: str
    reason: str
    fewest_rows: int = 0  # calls of fewer rows run triton


class Workload(NamedTuple):
    """The properties of a call that decide whether ``one_pass`` can run."""

    n_ranks: int
    gradient: str
    beyond: tuple[str, ...]  # what of the loss one_pass lacks
    is_aligned: bool  # the logits' memory begins at a boundary of 16 bytes
    has_padding: bool
    fits: bool  # the row width is in the table of measurements
    fewest_rows: int = 0  # from which on one_pass is the faster one
    has_units: bool = False  # the row is summed as several ranks do


class Gpu(NamedTuple):
    """The properties of a GPU and of Triton that decide it."""

    is_nvidia: bool
    shared_memory: int  # bytes per program
    has_gluon: bool  # with asynchronous copies


ONE_PASS_SHARED_MEMORY = 227 * 1024


def triton_state() -> str:
    """Return ``"absent"``, ``"too old"``, ``"compiler"``, or ``"interpreter"`` (slow, on the CPU, for tests)."""
    if not _triton_is_installed():
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


def select(
    device_type: str,
    requested: str = "auto",
    *,
    triton: str | None = None,
    workload: Workload | None = None,
    gpu: Gpu | None = None,
) -> Selection:
    """Choose the implementation for tensors on ``device_type``: ``"cpu"``, ``"cuda"``, also for ROCm, or another.

    ``auto`` is ``one_pass`` if one launch on a GPU can do ``workload``, otherwise ``triton`` on a GPU and
    ``reference`` elsewhere. Calls of fewer than ``fewest_rows`` rows then run ``triton``, which is faster. Nothing
    falls back: what cannot run raises ValueError with the remedy, also ``auto`` on a GPU without triton.

    Args:
        triton: the result of :func:`triton_state`; None calls it.
        workload, gpu: the call, and the result of :func:`gpu_of`; ``one_pass`` needs both.
    """
    checks.check_choice("impl", requested, ("auto", *IMPLEMENTATIONS))
    if requested == "reference":
        return Selection("reference", "asked for")
    if requested == "auto" and device_type != "cuda":
        return Selection("reference", f"{device_type} tensors: plain PyTorch runs on any device")
    if device_type not in ("cuda", "cpu"):  # first: no package helps there
        raise ValueError(
            f"impl: {requested!r} needs tensors on a CUDA or ROCm GPU, got tensors on {device_type}, for which there "
            "are no kernels; use impl='auto' (plain PyTorch there)"
        )
    triton = triton or triton_state()
    if triton in ("absent", "too old"):
        lack = "which is not installed; install it" if triton == "absent" else f"got {triton_version()}; upgrade it"
        raise ValueError(
            f"impl: {requested!r} on {device_type} needs the package triton, {LOWEST_TRITON} or newer, {lack}, "
            "or ask for impl='reference' (plain PyTorch, several times slower)"
        )
    obstacle = _obstacle(device_type, triton, workload, gpu)
    if requested == "one_pass" and obstacle:
        raise ValueError(f"impl: 'one_pass' needs {obstacle}; 'auto' chooses what can run")
    if obstacle is None and requested == "one_pass":
        return Selection("one_pass", "asked for")
    if obstacle is None and requested == "auto":
        assert workload is not None
        few = f"; triton for fewer than {workload.fewest_rows} rows" if workload.fewest_rows else ""
        return Selection("one_pass", f"one read and one write{few}", workload.fewest_rows)
    if device_type == "cuda":
        why = f"a GPU, and triton is installed; one_pass needs {obstacle}"
        return Selection("triton", why if requested == "auto" else "asked for")
    if device_type == "cpu" and triton == "interpreter":
        return Selection("triton", "asked for, under triton's interpreter")
    raise ValueError(
        "impl: 'triton' needs tensors on a CUDA or ROCm GPU, or on the CPU with TRITON_INTERPRET=1 "
        "set before triton is imported, got tensors on cpu"
    )


def _obstacle(device_type: str, triton: str, workload: Workload | None, gpu: Gpu | None) -> str | None:
    """Return the first condition of ``one_pass`` that is not met, and what there is instead."""
    if device_type != "cuda" or triton != "compiler":
        return f"a GPU and triton's compiler, got {device_type} and triton's {triton}"
    if gpu is None or workload is None:
        return "a call to decide about, by its shape and options"
    memory, beyond = ONE_PASS_SHARED_MEMORY, ", ".join(workload.beyond)
    conditions = (
        (gpu.is_nvidia, "an NVIDIA GPU, got another maker's"),
        (gpu.has_gluon, f"a triton with Gluon's asynchronous copies, got {triton_version()}"),
        (gpu.shared_memory >= memory, f"{memory} bytes of shared memory a program, got {gpu.shared_memory}"),
        (workload.n_ranks == 1, f"one rank, got {workload.n_ranks}"),
        (not workload.has_units, f"a row in the order of one rank, got the bits of several ({SAME_BITS})"),
        (workload.gradient == "in_forward", f"gradient 'in_forward', got {workload.gradient!r}"),
        (not beyond, f"a loss that it computes, got {beyond}"),
        (not workload.has_padding, "logits without padded columns, got some"),
        (workload.is_aligned, "logits in memory that begins at 16 bytes, and a gradient of their dtype, got others"),
        (workload.fits, "rows of a width in its table of measurements (blocks.py), got another"),
    )
    return next((needed for is_met, needed in conditions if not is_met), None)


@cache
def gpu_of(index: int) -> Gpu:
    """Return the properties of GPU ``index``."""
    memory = getattr(torch.cuda.get_device_properties(index), "shared_memory_per_block_optin", 0)
    return Gpu(is_nvidia=torch.version.hip is None, shared_memory=memory, has_gluon=_has_gluon())


def _has_gluon() -> bool:
    try:
        return importlib.util.find_spec("triton.experimental.gluon.language.nvidia.ampere") is not None
    except ModuleNotFoundError:
        return False


@cache
def _triton_is_installed() -> bool:
    return importlib.util.find_spec("triton") is not None
