"""Measures what frameworks call on shards of the vocabulary, beside this project's: losses and log-probabilities.

Forward and backward over bf16 logits ``[1, N, V]`` that are cut over all ranks. The providers take turns in every
round. torchtitan, NeMo-RL and verl are measured if they can be imported.

    torchrun --nproc-per-node 2 scripts/bench_frameworks.py --json scripts/results/frameworks_2gpu.json

A machine without GPUs can try it with ``--tiny``.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from bench_lib.steps import head_of, measured, parser_of, run
from bench_lib.timing import Ranks, joined_ranks
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import loss_parallel

from vocab_parallel_ce.integrations import dtensor, nemo_rl, torchtitan, verl

Step = Callable[[Any, Tensor], Tensor]  # of DTensor logits and labels
Provider = tuple[Step, Callable[[], contextlib.AbstractContextManager[Any]]]
SHAPES, TINY = ((1024, 32000), (8192, 128256), (16384, 128256)), ((16, 1004),)


def loss_parallel_of_pytorch(logits: Any, labels: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the sum; in bf16 the log-probabilities are rounded to it."""
    replicated: Any = DTensor.from_local(labels.flatten(), logits.device_mesh, [Replicate()])
    with loss_parallel():
        loss: Any = F.cross_entropy(logits.flatten(0, 1).to(dtype), replicated, reduction="sum")
        return loss.to_local()


def both(name: str, step: Step, installed: Callable[[], Any]) -> dict[str, Provider]:
    return {name: (step, contextlib.nullcontext), f"{name}, installed": (step, installed)}


def of_dtensor() -> dict[str, Provider]:
    options: Any = {"reduction": "sum", "gradient": "in_backward"}
    return {
        "torch loss_parallel": (loss_parallel_of_pytorch, contextlib.nullcontext),
        "torch loss_parallel, bf16": (partial(loss_parallel_of_pytorch, dtype=torch.bfloat16), contextlib.nullcontext),
        "DTensor loss": (lambda x, y: dtensor.cross_entropy(x, y, reduction="sum"), contextlib.nullcontext),
        "DTensor loss, in_backward": (lambda x, y: dtensor.cross_entropy(x, y, **options), contextlib.nullcontext),
    }


def of_torchtitan() -> dict[str, Provider]:
    titan = importlib.import_module("torchtitan.components.loss")
    importlib.import_module("torchtitan.distributed.utils").set_spmd_backend("partial_dtensor")
    loss = both("torchtitan loss", lambda x, y: titan.cross_entropy_loss(x, y), torchtitan.installed)
    return loss | both("torchtitan log-probs", lambda x, y: titan.compute_logprobs(x, y).sum(), torchtitan.installed)


def of_nemo_rl() -> dict[str, Provider]:
    nemo: Any = importlib.import_module("nemo_rl.distributed.model_utils")

    def log_probs(logits: Any, labels: Tensor) -> Tensor:
        group, local = logits.device_mesh.get_group(), logits.to_local()
        start = group.rank() * local.shape[-1]
        stop = start + local.shape[-1]
        return nemo.from_parallel_logits_to_logprobs(local, labels, start, stop, group).sum()

    return both("NeMo-RL log-probs", log_probs, nemo_rl.installed)


def of_verl() -> dict[str, Provider]:
    functions: Any = importlib.import_module("verl.utils.megatron.tensor_parallel")
    state: Any = importlib.import_module("megatron.core.parallel_state")
    state.initialize_model_parallel(tensor_model_parallel_size=torch.distributed.get_world_size())

    def log_probs(logits: Any, labels: Tensor) -> Tensor:
        loss: Tensor = functions.vocab_parallel_log_probs_from_logits(logits.to_local(), labels).sum()
        return loss

    def with_entropy(logits: Any, labels: Tensor) -> Tensor:
        """As verl's engine: log-probabilities from a copy."""
        kept = logits.to_local().clone()
        entropy = functions.vocab_parallel_entropy(logits.to_local())
        log_probs: Tensor = functions.vocab_parallel_log_probs_from_logits(kept, labels)
        return log_probs.sum() + 0.001 * entropy.sum()

    alone = both("verl log-probs", log_probs, verl.installed)
    return alone | both("verl log-probs and entropy", with_entropy, verl.installed)


FRAMEWORKS = {"torchtitan": of_torchtitan, "nemo-rl": of_nemo_rl, "verl": of_verl}


def providers() -> tuple[dict[str, Provider], dict[str, str]]:
    """Return the providers, and the module of each framework that can be imported."""
    found, modules = of_dtensor(), {}
    for package, of_framework in FRAMEWORKS.items():
        with contextlib.suppress(ImportError):
            found |= of_framework()
            modules[package] = package.replace("-", "_")
    return found, modules


def measure(known: dict[str, Provider], shape: tuple[int, int], ranks: Ranks, rounds: int) -> dict[str, Any]:
    """Return milliseconds, and peak memory beyond the logits, of each provider."""
    (n_tokens, vocab_size), device = shape, ranks.device
    mesh = init_device_mesh(device, (ranks.size,), mesh_dim_names=("tp",))
    generator = torch.Generator(device).manual_seed(0)
    source = torch.randn(1, n_tokens, vocab_size // ranks.size, device=device, generator=generator).bfloat16() * 3
    labels = torch.randint(0, vocab_size, (1, n_tokens), device=device, generator=generator)
    local = source.clone()
    leaf: Any = DTensor.from_local(local, mesh, [Shard(2)]).requires_grad_()

    def step(name: str) -> Tensor:
        loss = known[name][0](leaf, labels)
        loss.backward()
        return loss.detach()

    def fresh() -> None:
        leaf.grad = None
        with torch.no_grad():
            leaf.to_local().copy_(source)

    contexts = {name: context for name, (_, context) in known.items()}
    return measured(f"{n_tokens} x {vocab_size}", contexts, step, fresh, ranks.timer(), rounds)


def main() -> None:
    words = parser_of(__doc__).parse_args()
    with joined_ranks() as ranks:
        known, modules = providers()
        head, shapes = head_of("frameworks", modules), TINY if words.tiny else SHAPES
        run(head, shapes, lambda shape: measure(known, shape, ranks, words.rounds), ranks, words.json)


if __name__ == "__main__":
    main()
