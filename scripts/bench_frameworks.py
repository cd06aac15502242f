"""Measures losses and log-probabilities of DTensor logits: PyTorch's loss_parallel, torchtitan's functions, and ours.

Forward and backward over bf16 logits ``[1, N, V]`` that are cut over all ranks. The providers take turns in every
round. torchtitan is measured if it is installed.

    torchrun --nproc-per-node 2 scripts/bench_dtensor.py --json scripts/results/dtensor_2gpu.json

A machine without GPUs can try it with ``--tiny``.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from bench_lib.cases import OURS
from bench_lib.documents import host_description, write_document
from bench_lib.steps import measured, show
from bench_lib.timing import Ranks, joined_ranks
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import loss_parallel

from vocab_parallel_ce.integrations.dtensor import cross_entropy, token_log_probs
from vocab_parallel_ce.integrations.torchtitan import install

Providers = dict[str, Callable[..., Any]]
SHAPES, TINY = ((8192, 128256), (16384, 128256)), ((16, 1004),)


def loss_of_pytorch(logits: Any, labels: Any) -> Any:
    """Return the sum, as loss_parallel computes it; in fp32, as its users ask for."""
    replicated: Any = DTensor.from_local(labels.flatten(), logits.device_mesh, [Replicate()])
    with loss_parallel():
        loss: Any = F.cross_entropy(logits.flatten(0, 1).float(), replicated, reduction="sum")
        return loss.to_local()


def losses() -> Providers:
    found: Providers = {
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


def measure(providers: Providers, shape: tuple[int, int], ranks: Ranks, rounds: int) -> dict[str, Any]:
    """Return milliseconds, and peak memory beyond the logits, of each provider."""
    (n_tokens, vocab_size), device = shape, ranks.device
    mesh = init_device_mesh(device, (ranks.size,), mesh_dim_names=("tp",))
    generator = torch.Generator(device).manual_seed(0)
    source = torch.randn(1, n_tokens, vocab_size // ranks.size, device=device, generator=generator).bfloat16() * 3
    labels = torch.randint(0, vocab_size, (1, n_tokens), device=device, generator=generator)
    local = source.clone()
    leaf: Any = DTensor.from_local(local, mesh, [Shard(2)]).requires_grad_()

    def step(name: str) -> Tensor:
        loss = providers[name](leaf, labels)
        loss.backward()
        return loss.detach()

    def fresh() -> None:
        leaf.grad = None
        with torch.no_grad():
            leaf.to_local().copy_(source)

    contexts = dict.fromkeys(providers, nullcontext)
    return measured(f"{n_tokens} x {vocab_size}", contexts, step, fresh, ranks.timer(), rounds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the document here")
    words = parser.parse_args()
    with joined_ranks() as ranks:
        document: dict[str, Any] = {"kind": "dtensor", "host": host_description(), "cases": []}
        providers = losses()
        for shape in TINY if words.tiny else SHAPES:
            document["cases"].append(measure(providers, shape, ranks, words.rounds))
            if ranks.is_first:
                write_document(document, words.json)
                show(document["cases"][-1])


if __name__ == "__main__":
    main()
