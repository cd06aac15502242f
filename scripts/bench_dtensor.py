"""Measures losses and log-probabilities of DTensor logits: PyTorch's loss_parallel, torchtitan's functions, and ours.

Forward and backward over bf16 logits ``[1, N, V]`` that are cut over all ranks. The providers take turns in every
round. torchtitan is measured if it is installed.

    torchrun --nproc-per-node 2 scripts/bench_dtensor.py --json scripts/results/dtensor_2gpu.json

A machine without GPUs can try it with ``--tiny``.
"""

from __future__ import annotations

import argparse
import importlib
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from bench_lib.cases import OURS
from bench_lib.documents import host_description, write_document
from bench_lib.timing import Ranks, joined_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import loss_parallel

from vocab_parallel_ce.integrations.dtensor import cross_entropy, token_log_probs
from vocab_parallel_ce.integrations.torchtitan import install

SHAPES, TINY = ((8192, 128256), (16384, 128256)), ((16, 1004),)


def loss_of_pytorch(logits: Any, labels: Any) -> Any:
    """Return the sum, as loss_parallel computes it; in fp32, as its users ask for."""
    replicated: Any = DTensor.from_local(labels.flatten(), logits.device_mesh, [Replicate()])
    with loss_parallel():
        loss: Any = F.cross_entropy(logits.flatten(0, 1).float(), replicated, reduction="sum")
        return loss.to_local()


def losses() -> dict[str, Callable[..., Any]]:
    found: dict[str, Callable[..., Any]] = {
        "torch loss_parallel": loss_of_pytorch,
        OURS: lambda logits, labels: cross_entropy(logits, labels, reduction="sum"),
        f"{OURS}, in_backward": lambda logits, labels: cross_entropy(
            logits, labels, reduction="sum", gradient="in_backward"
        ),
        f"{OURS}, log-probabilities": lambda logits, labels: token_log_probs(logits, labels).sum(),
    }
    try:
        titan = importlib.import_module("torchtitan.components.loss")
    except ImportError as error:
        print(f"torchtitan is not measured: {error}", flush=True)
        return found
    importlib.import_module("torchtitan.distributed.utils").set_spmd_backend("partial_dtensor")
    own, log_probs = titan.cross_entropy_loss, titan.compute_logprobs
    install()
    found["torchtitan"] = own
    found["torchtitan, installed"] = titan.cross_entropy_loss
    found["torchtitan, log-probabilities"] = lambda logits, labels: log_probs(logits, labels).sum()
    return found


def measure(shape: tuple[int, int], ranks: Ranks, rounds: int) -> dict[str, Any]:
    """Return milliseconds, and peak memory beyond the logits, of each provider."""
    (n_tokens, vocab_size), device = shape, ranks.device
    mesh = init_device_mesh(device, (ranks.size,), mesh_dim_names=("tp",))
    generator = torch.Generator(device).manual_seed(0)
    source = torch.randn(1, n_tokens, vocab_size // ranks.size, device=device, generator=generator).bfloat16() * 3
    labels = torch.randint(0, vocab_size, (1, n_tokens), device=device, generator=generator)
    local = source.clone()
    leaf: Any = DTensor.from_local(local, mesh, [Shard(2)]).requires_grad_()
    timer, providers = ranks.timer(), losses()
    values: dict[str, torch.Tensor] = {}
    times: dict[str, list[float]] = {name: [] for name in providers}
    peaks = dict.fromkeys(providers, 0)

    def step() -> None:
        loss = providers[name](leaf, labels)
        loss.backward()
        values[name] = loss.detach()

    def fresh() -> None:
        leaf.grad = None
        with torch.no_grad():
            leaf.to_local().copy_(source)

    names = list(providers)
    for number in range(rounds + 1):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            fresh()
            if number == 0:
                step()  # compiles
                fresh()
                timer.release()
                peaks[name] = timer.extra_peak_bytes(step) or 0
            else:
                times[name].append(timer.eager(name, step, fresh))
    results = [
        {
            "provider": name,
            "ms": round(statistics.median(times[name]), 3),
            "ms_all": [round(each, 3) for each in times[name]],
            "peak_gib": round(peaks[name] / 2**30, 3),
            "value": values[name].item(),
        }
        for name in names
    ]
    return {"case": f"{n_tokens} x {vocab_size}", "results": results}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the document here")
    words = parser.parse_args()
    with joined_ranks() as ranks:
        document: dict[str, Any] = {"kind": "dtensor", "host": host_description(), "cases": []}
        for shape in TINY if words.tiny else SHAPES:
            document["cases"].append(measure(shape, ranks, words.rounds))
            if ranks.rank == 0:
                write_document(document, words.json)
                for result in document["cases"][-1]["results"]:
                    shown = {key: value for key, value in result.items() if key != "ms_all"}
                    print(document["cases"][-1]["case"], shown, flush=True)


if __name__ == "__main__":
    main()
