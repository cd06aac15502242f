"""Measures a head and its loss, forward and backward: compiled by torch.compile, and eager. bf16, one GPU.

    python scripts/bench_compile.py --json scripts/results/compile_1gpu.json

The providers take turns in every round. A machine without a GPU can try it with ``--tiny``.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from bench_lib.cases import OURS
from bench_lib.steps import head_of, measured, parser_of, run
from bench_lib.timing import Ranks, joined_ranks
from torch import Tensor

from vocab_parallel_ce import linear_cross_entropy, vocab_parallel_cross_entropy

SHAPES, TINY = ((1024, 32000, 2048), (8192, 128256, 2048), (32768, 32000, 2048)), ((16, 100, 8),)
GRAPHS: dict[str, Any] = {"fullgraph": True, "mode": "reduce-overhead"}


def of_pytorch(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy((hidden @ weight.t()).float(), labels)


def over_logits(hidden: Tensor, weight: Tensor, labels: Tensor, gradient: str = "auto") -> Tensor:
    return vocab_parallel_cross_entropy(hidden @ weight.t(), labels, gradient=gradient)


def functions() -> dict[str, Callable[..., Tensor]]:
    compiled: Any = partial(torch.compile, fullgraph=True)
    return {
        "PyTorch, compiled": compiled(of_pytorch),
        OURS: over_logits,
        f"{OURS}, out_of_place": partial(over_logits, gradient="out_of_place"),
        f"{OURS}, compiled": compiled(over_logits),
        f"{OURS}, reduce-overhead": torch.compile(over_logits, **GRAPHS),
        f"{OURS}, linear": linear_cross_entropy,
        f"{OURS}, linear, compiled": compiled(linear_cross_entropy),
    }


def measure(shape: tuple[int, int, int], ranks: Ranks, rounds: int) -> dict[str, Any]:
    torch._dynamo.reset()
    (n_tokens, vocab_size, width), device = shape, ranks.device
    generator = torch.Generator(device).manual_seed(0)
    hidden = torch.randn(n_tokens, width, device=device, generator=generator).bfloat16().requires_grad_()
    weight = torch.randn(vocab_size, width, device=device, generator=generator).mul(0.05).bfloat16().requires_grad_()
    labels = torch.randint(0, vocab_size, (n_tokens,), device=device, generator=generator)
    providers = functions()

    def step(name: str) -> Tensor:
        torch.compiler.cudagraph_mark_step_begin()
        loss = providers[name](hidden, weight, labels)
        loss.backward()
        return loss.detach()

    def forget() -> None:
        hidden.grad = weight.grad = None

    for name in providers:  # compile, and record graphs
        for _ in range(3):
            step(name)
            forget()
    case = f"{n_tokens} x {vocab_size}, D = {width}"
    return measured(case, dict.fromkeys(providers, nullcontext), step, forget, ranks.timer(), rounds)


def main() -> None:
    words = parser_of(__doc__, rounds=15).parse_args()
    with joined_ranks() as ranks:
        shapes = TINY if words.tiny else SHAPES
        run(head_of("compile"), shapes, lambda shape: measure(shape, ranks, words.rounds), ranks, words.json)


if __name__ == "__main__":
    main()
