"""The command line: ``python -m vocab_parallel_ce doctor``."""

from __future__ import annotations

import argparse
import platform
import sys

import torch

import vocab_parallel_ce
from vocab_parallel_ce.linear.chunks import choose_chunk_tokens
from vocab_parallel_ce.pipeline import can_see_saved_tensor_hooks
from vocab_parallel_ce.selection import (
    IMPLEMENTATIONS,
    Workload,
    gpu_of,
    select,
    triton_state,
    triton_version,
)

# Of a mean on one rank, over rows that suit one launch, with its gradient in backward and in forward.
BY_DEFAULT = Workload(1, "in_backward", (), whole_vectors=True, fits=True)
FOR_ONE_LAUNCH = BY_DEFAULT._replace(gradient="in_forward")

# Tokens, hidden size and a rank's columns: a model of 8 B parameters on one rank and on four.
HEADS = ((4096, 4096, 128256), (32768, 4096, 128256), (16384, 4096, 32064))


def main(arguments: list[str] | None = None) -> int:
    """Run the command that ``arguments`` name; the exit status."""
    parser = argparse.ArgumentParser(prog="python -m vocab_parallel_ce")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("doctor", help="print what this machine can run, and why not the rest")
    parser.parse_args(arguments)
    print("\n".join(doctor_lines()))
    return 0


def doctor_lines() -> list[str]:
    """What is installed, which GPUs there are, and for each implementation whether it runs."""
    lines = [
        f"vocab_parallel_ce {vocab_parallel_ce.__version__}",
        f"python {platform.python_version()} ({sys.executable})",
        f"torch {torch.__version__}",
        f"triton {triton_version() or 'not installed'} ({triton_state()})",
    ]
    devices = ["cpu"]
    if torch.cuda.is_available():
        devices.insert(0, "cuda")
        for index in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(index)
            memory = properties.total_memory / 2**30
            lines.append(
                f"gpu {index}: {properties.name}, {memory:.0f} GiB, "
                f"{properties.multi_processor_count} multiprocessors"
            )
    else:
        lines.append("gpu: none that torch can use")
    lines.append(f"torch.distributed: {_backends()}")
    for device in devices:
        for requested in ("auto", *IMPLEMENTATIONS):
            workload = FOR_ONE_LAUNCH if requested == "one_pass" else BY_DEFAULT
            lines.append(f"{device}, impl={requested!r}: {_outcome(device, requested, workload)}")
        lines.append(f"{device}, gradient='in_forward': {_outcome(device, 'auto', FOR_ONE_LAUNCH)}")
    lines.append(f"gradient='auto': {_default_gradient()}")
    for n_tokens, hidden_size, n_columns in HEADS:
        chunk = choose_chunk_tokens(n_tokens, hidden_size, n_columns, torch.bfloat16.itemsize)
        gigabytes = chunk * n_columns * torch.bfloat16.itemsize / 2**30
        lines.append(
            f"linear_cross_entropy, {n_tokens} tokens x {hidden_size} by {n_columns} columns of bf16: "
            f"chunks of {chunk} tokens, {gigabytes:.2f} GiB of logits"
        )
    return lines


def _default_gradient() -> str:
    if can_see_saved_tensor_hooks():
        return "in place in backward; out of place under saved-tensor hooks, for leaves and views of them"
    return "always out of place: this torch cannot say whether saved-tensor hooks are active"


def _outcome(device: str, requested: str, workload: Workload) -> str:
    """What runs the mean of one rank, the call that most implementations can do."""
    gpu = gpu_of(torch.cuda.current_device()) if device == "cuda" else None
    try:
        selection = select(device, requested, workload=workload, gpu=gpu)
    except ValueError as error:
        return f"no: {error}"
    return f"{selection.name} ({selection.reason})"


def _backends() -> str:
    from vocab_parallel_ce.collectives import available_backends

    return ", ".join(available_backends()) or "not in this build of torch"
