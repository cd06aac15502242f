"""Which implementation runs, and why: a pure function of what the machine and the call are."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
from functools import cache
from typing import NamedTuple

import torch

IMPLEMENTATIONS = ("reference", "triton", "one_pass")


class Selection(NamedTuple):
    """An implementation's name and the reason it was chosen."""

    name: str
    reason: str


class Workload(NamedTuple):
    """What of a call decides whether one launch can do it."""

    n_ranks: int
    gradient: str
    options_on: tuple[str, ...]  # beside those that every implementation has
    whole_vectors: bool  # every row begins at 16 bytes and is a multiple of 16 bytes; no padded columns
    fits: bool  # a row on a multiprocessor, by the table of measurements


class Gpu(NamedTuple):
    """What of a GPU and of the installed Triton decides it."""

    is_nvidia: bool
    shared_memory: int  # bytes that a program may have
    has_gluon: bool  # a Triton whose Gluon has asynchronous copies


ONE_PASS_SHARED_MEMORY = 227 * 1024


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


def select(
    device_type: str,
    requested: str = "auto",
    *,
    triton: str | None = None,
    workload: Workload | None = None,
    gpu: Gpu | None = None,
) -> Selection:
    """Choose the implementation for tensors on ``device_type``, e.g. ``"cuda"`` (ROCm's name too).

    ``auto`` is ``one_pass`` where a GPU can do the ``workload`` in one launch, else ``triton`` on a GPU, and
    ``reference`` elsewhere. Nothing falls back: a GPU without triton is an error that names the remedy.

    Args:
        triton: what :func:`triton_state` returns; asked for when None.
        workload: of the call; None: of no call in particular.
        gpu: what :func:`gpu_of` returns; None: none that ``one_pass`` knows.

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
    obstacle = _obstacle_to_one_pass(device_type, triton, workload, gpu)
    if requested == "one_pass" and obstacle:
        raise ValueError(f"impl: 'one_pass' needs {obstacle}; 'auto' chooses what can run")
    if obstacle is None and requested != "triton":
        return Selection("one_pass", "asked for" if requested == "one_pass" else "one read and one write")
    if device_type == "cuda":
        if requested == "triton":
            return Selection("triton", "asked for")
        return Selection("triton", f"a GPU, and triton is installed; one_pass needs {obstacle}")
    if device_type == "cpu" and triton == "interpreter":
        return Selection("triton", "asked for, under triton's interpreter")
    raise ValueError(
        f"impl: 'triton' needs tensors on a CUDA or ROCm GPU, or on the CPU with TRITON_INTERPRET=1 "
        f"set before triton is imported, got tensors on {device_type}"
    )


def _obstacle_to_one_pass(
    device_type: str, triton: str, workload: Workload | None, gpu: Gpu | None
) -> str | None:
    """The first condition of ``one_pass`` that is not met, and what is there instead."""
    if device_type != "cuda" or triton != "compiler":
        return f"a GPU and triton's compiler, got {device_type} and triton's {triton}"
    if gpu is None or workload is None:
        return "a call to decide about, by its shape and options"
    if not gpu.is_nvidia:
        return "an NVIDIA GPU, got another maker's"
    if not gpu.has_gluon:
        return f"a triton with Gluon's asynchronous copies (3.5 or later), got {triton_version()}"
    if gpu.shared_memory < ONE_PASS_SHARED_MEMORY:
        return f"{ONE_PASS_SHARED_MEMORY} bytes of shared memory a program, got {gpu.shared_memory}"
    if workload.n_ranks != 1:
        return f"one rank, got {workload.n_ranks}"
    if workload.gradient != "in_forward":
        return f"gradient 'in_forward', got {workload.gradient!r}"
    if workload.options_on:
        return f"no option but ignore_index and z_loss, got {', '.join(workload.options_on)}"
    if not workload.whole_vectors:
        return "rows of whole, aligned 16-byte vectors without padding, got others"
    if not workload.fits:
        return "rows of a width in its table of measurements (kernels/blocks.py), got another"
    return None


@cache
def gpu_of(index: int) -> Gpu:
    """The GPU ``index`` of this process."""
    properties = torch.cuda.get_device_properties(index)
    return Gpu(
        is_nvidia=torch.version.hip is None,
        shared_memory=getattr(properties, "shared_memory_per_block_optin", 0),
        has_gluon=_has_gluon(),
    )


def _has_gluon() -> bool:
    try:
        return importlib.util.find_spec("triton.experimental.gluon.language.nvidia.ampere") is not None
    except ModuleNotFoundError:
        return False


@cache
def _triton_is_installed() -> bool:
    return importlib.util.find_spec("triton") is not None
