"""The command line: ``python -m vocab_parallel_ce doctor``."""

from __future__ import annotations

import argparse
import platform
import sys

import torch

import vocab_parallel_ce
from vocab_parallel_ce.collectives import available_backends
from vocab_parallel_ce.head.chunks import choose_chunk_tokens, default_tokens
from vocab_parallel_ce.in_place import can_tell
from vocab_parallel_ce.integrations import framework_lines
from vocab_parallel_ce.one_pass import obstacle_of_gpu
from vocab_parallel_ce.plan import top_saved_tensor_hooks
from vocab_parallel_ce.selection import IMPLEMENTATIONS, select, triton_state, triton_version
from vocab_parallel_ce.versions import how_tested

# Tokens, hidden size and columns per rank: a model of 8 B parameters on one rank and on four.
HEADS = ((4096, 4096, 128256), (32768, 4096, 128256), (16384, 4096, 32064))


def main(arguments: list[str] | None = None) -> int:
    """Run the command that ``arguments`` name, and return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m vocab_parallel_ce")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("doctor", help="print what can run on this machine, and why the rest cannot")
    parser.parse_args(arguments)
    print("\n".join(doctor_lines()))
    return 0


def doctor_lines() -> list[str]:
    """Return what is installed, the GPUs, and for each implementation whether it runs."""
    lines = [
        f"vocab_parallel_ce {vocab_parallel_ce.__version__}",
        f"python {platform.python_version()} ({sys.executable})",
        f"torch {torch.__version__}",
        f"triton {triton_version() or 'not installed'} ({triton_state()})",
        how_tested(torch.__version__, triton_version()),
    ]
    if triton_state() not in ("absent", "too old"):
        from vocab_parallel_ce.kernels.launch import launch_path

        lines.append(launch_path())
    n_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    gpus = [torch.cuda.get_device_properties(index) for index in range(n_gpus)]
    for index, gpu in enumerate(gpus):
        size = f"{gpu.total_memory / 2**30:.0f} GiB, {gpu.multi_processor_count} multiprocessors"
        lines.append(f"gpu {index}: {gpu.name}, {size}")
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        lines.append("gpu: none that torch can use")
    lines.append(f"torch.distributed: {', '.join(available_backends()) or 'not in this build of torch'}")
    for device in ["cpu"] if accelerator is None else [accelerator.type, "cpu"]:
        for requested in ("auto", *IMPLEMENTATIONS):
            lines.append(f"{device}, impl={requested!r}: {_outcome(device, requested)}")
    default = "over the logits if nobody else can see them in backward, otherwise into a new tensor"
    if top_saved_tensor_hooks is None or not can_tell():
        default = "always into a new tensor: this Python or torch cannot say who can see the logits"
    lines.append(f"gradient='auto': {default}")
    for n_tokens, hidden_size, n_columns in HEADS:
        by_default = default_tokens(hidden_size, n_columns, 2, 2)
        chunk = choose_chunk_tokens(n_tokens, hidden_size, n_columns, 2, *by_default)
        what = f"{n_tokens} tokens x {hidden_size} by {n_columns} columns of bf16: chunks of {chunk} tokens"
        lines.append(f"linear_cross_entropy, {what}, {chunk * n_columns * 2 / 2**30:.2f} GiB of logits")
    return lines + framework_lines()


def _outcome(device: str, requested: str) -> str:
    """Return what runs, and why, or why nothing does."""
    try:
        name, reason = select(device, requested)
    except ValueError as error:
        return f"no: {error}"
    obstacle = obstacle_of_gpu(torch.cuda.current_device()) if name == "one_pass" else None
    return f"{name} ({reason})" if obstacle is None else f"no: it needs {obstacle}"


if __name__ == "__main__":
    raise SystemExit(main())
