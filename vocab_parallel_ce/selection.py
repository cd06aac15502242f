"""Choose the implementation of a call, and say why. A pure function of the machine and the call."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
from contextlib import suppress
from functools import cache
from typing import Any

import torch

from vocab_parallel_ce import checks
from vocab_parallel_ce.blocks import units_of
from vocab_parallel_ce.environment import SAME_BITS
from vocab_parallel_ce.losses.base import Loss
from vocab_parallel_ce.options import IMPLEMENTATIONS
from vocab_parallel_ce.shard import VocabShard
from vocab_parallel_ce.versions import LOWEST_TRITON, is_older

ONE_PASS_SHARED_MEMORY = 227 * 1024  # bytes per program


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


def select(device_type: str, requested: str = "auto", obstacle: str | None = "a call to decide on") -> tuple[str, str]:
    """Return the implementation for tensors on ``"cpu"``, ``"cuda"``, also for ROCm, or another device, and why.

    ``auto`` is ``one_pass`` on a GPU if there is no ``obstacle``, which :func:`obstacle_of_call` returns. Otherwise it
    is ``triton`` on a GPU and ``reference`` elsewhere. Nothing falls back: what cannot run raises ValueError with the
    remedy, also ``auto`` on a GPU without triton.
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
    if device_type != "cuda" or triton != "compiler":
        obstacle = f"a GPU and triton's compiler, got {device_type} and triton's {triton}"
    if requested == "one_pass" and obstacle:
        raise ValueError(f"impl: 'one_pass' needs {obstacle}; 'auto' chooses what can run")
    if device_type == "cpu" and triton != "interpreter":
        raise ValueError(
            "impl: 'triton' needs tensors on a CUDA or ROCm GPU, or on the CPU with TRITON_INTERPRET=1 "
            "set before triton is imported, got tensors on cpu"
        )
    if requested != "auto":
        return requested, "asked for" if device_type == "cuda" else "asked for, under triton's interpreter"
    if obstacle is None:
        return "one_pass", "one read and one write"
    return "triton", f"a GPU, and triton is installed; one_pass needs {obstacle}"


def obstacle_of_call(loss: Loss, options: Any, shard: VocabShard, key: Any) -> str | None:
    """Return the first condition of ``one_pass`` that is not met, and what there is instead. ``key``: a ``PlanKey``."""
    beyond, size = ", ".join(loss.beyond_one_pass(options)), key.dtype.itemsize
    has_units = units_of(shard, key.rank, key.n_ranks, size) > 0
    config = loss.one_pass_config(options, key.n_columns * size)
    conditions = (
        (key.n_ranks == 1, f"one rank, got {key.n_ranks}"),
        (not has_units, f"a row in the order of one rank, got the bits of several ({SAME_BITS})"),
        (key.gradient == "in_forward", f"gradient 'in_forward', got {key.gradient!r}"),
        (not beyond, f"a loss that it computes, got {beyond}"),
        (shard.n_valid == shard.n_columns, "logits without padded columns, got some"),
        (key.is_aligned, "logits in memory that begins at 16 bytes, and a gradient of their dtype, got others"),
        (config is not None, "rows of a width in its table of measurements (blocks.py), got another"),
    )
    of_gpu = obstacle_of_gpu(key.device.index) if key.device.type == "cuda" else None
    return of_gpu or next((needed for is_met, needed in conditions if not is_met), None)


@cache
def obstacle_of_gpu(index: int) -> str | None:
    """Return what keeps GPU ``index``, or Triton, from ``one_pass``; None if nothing does."""
    memory = getattr(torch.cuda.get_device_properties(index), "shared_memory_per_block_optin", 0)
    if torch.version.hip is not None:
        return "an NVIDIA GPU, got another maker's"
    if not is_installed("triton.experimental.gluon.language.nvidia.ampere"):
        return f"a triton with Gluon's asynchronous copies, got {triton_version()}"
    if memory < ONE_PASS_SHARED_MEMORY:
        return f"{ONE_PASS_SHARED_MEMORY} bytes of shared memory a program, got {memory}"
    return None
