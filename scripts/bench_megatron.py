"""Measures a training step of Megatron-Core's GPTModel: its own losses, and this project's over logits and linear.

    torchrun --nproc-per-node 2 scripts/bench_megatron.py --json results.json

Forward and backward of one model of random weights, in bf16, with tensor parallelism over all ranks. The providers take
turns in every round. ``--curves`` trains 20 steps with each instead. ``--plot results.json`` only draws.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from functools import partial
from importlib import import_module
from typing import Any

import torch
from bench_lib.steps import head_of, measured, parser_of, run, save
from bench_lib.timing import Ranks, joined_ranks
from megatron.core import parallel_state

from vocab_parallel_ce.integrations import megatron

example = import_module("examples.megatron_gpt")
SHAPE = {"columns": 128256, "width": 4096, "heads": 32, "length": 1024}
ROWS = (8, 24)  # of that length: 8192 and 24576 tokens
PROVIDERS: dict[str, Any] = {
    "Megatron-Core": None,
    "Megatron-Core, fused": None,
    "vocab_parallel_ce, logits": {},
    "vocab_parallel_ce, linear": {"linear": True},
}


@contextlib.contextmanager
def provided(name: str, model: Any) -> Iterator[None]:
    model.config.cross_entropy_loss_fusion = name.endswith("fused")
    options = PROVIDERS[name]
    with contextlib.nullcontext() if options is None else megatron.installed(**options):
        yield


def measure(model: Any, rows: int, shape: dict[str, Any], ranks: Ranks, rounds: int) -> dict[str, Any]:
    inputs = example.batch(shape["columns"], (rows, shape["length"]), ranks.device, seed=0)

    def step(name: str) -> torch.Tensor:
        loss = example.loss_of(model, inputs)
        loss.backward()
        return loss.detach()

    def forget() -> None:
        model.zero_grad(set_to_none=True)

    contexts = {name: partial(provided, name, model) for name in PROVIDERS}
    return measured(f"{rows * shape['length']} tokens", contexts, step, forget, ranks.timer(), rounds)


def main() -> None:
    parser = parser_of(__doc__, has_tiny=False)
    parser.add_argument("--curves", action="store_true", help="20 steps of a small model with each loss")
    words = parser.parse_args()
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # as Megatron asks for
    modules = {"megatron-core": "megatron.core"}
    with joined_ranks() as ranks:
        parallel_state.initialize_model_parallel(ranks.size)
        if words.curves:
            curves = example.compare(20, ranks.device)
            if ranks.is_first:
                save(head_of("megatron_curves", modules) | {"shape": example.SMALL, "curves": curves}, words.json)
        else:
            model, head = example.build(**SHAPE), head_of("megatron", modules) | {"shape": SHAPE}
            run(head, ROWS, lambda rows: measure(model, rows, SHAPE, ranks, words.rounds), ranks, words.json)
        parallel_state.destroy_model_parallel()


if __name__ == "__main__":
    main()
