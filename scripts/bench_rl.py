"""Measures what RL frameworks call for log-probabilities and entropies on one GPU, beside this project's.

Forward and backward of both: over hidden states ``[N, D]`` and a head ``[V, D]``, and over logits ``[1, N, V]``; bf16.
The providers take turns in every round. A framework is measured if it can be imported.

    python scripts/bench_rl.py --json scripts/results/rl_1gpu.json

A machine without a GPU can try it with ``--tiny``.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from bench_lib.steps import head_of, measured, parser_of, run
from bench_lib.timing import Ranks, joined_ranks
from torch import Tensor

from vocab_parallel_ce.integrations import openrlhf, trl, verl

Step = Callable[..., tuple[Tensor, ...]]  # of the leaves and labels; returns what is differentiated
Provider = tuple[Step, Callable[[], AbstractContextManager[Any]]]
SHAPES, TINY = ((1024, 32000, 2048), (8192, 128256, 4096)), ((256, 1024, 128),)
OF_LOGITS = "logits"  # in the names of providers that take logits
TRL_COLUMNS = 32768  # of a chunk of the vocabulary, as TRL's trainers ask for


class _Activation(torch.autograd.Function):
    """Stands for the model before the logits: a gradient may be written over what it returns, as over no leaf."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor, logits: list[Tensor]) -> Tensor:
        return logits.pop()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def both(name: str, step: Step, installed: Callable[[], Any]) -> dict[str, Provider]:
    return {name: (step, nullcontext), f"{name}, installed": (step, installed)}


def of_verl() -> dict[str, Provider]:
    logits: Any = importlib.import_module("verl.utils.torch_functional")
    kernel: Any = importlib.import_module("verl.utils.kernel.linear_cross_entropy")
    ppo = importlib.import_module("verl.utils.experimental.torch_functional").FusedLinearForPPO()
    return (
        both("verl FusedLinearForPPO", ppo, verl.installed)
        | both("verl linear_cross_entropy", lambda h, w, y: kernel.linear_cross_entropy(h, w, y), verl.installed)
        | both(f"verl {OF_LOGITS}", lambda x, y: (logits.logprobs_from_logits(x, y),), verl.installed)
    )


def of_openrlhf() -> dict[str, Provider]:
    utils: Any = importlib.import_module("openrlhf.models.utils")

    def step(logits: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
        """As its actor: in fp32, the entropy first."""
        logits = logits.float()
        entropy = utils.compute_entropy(logits)
        return utils.log_probs_from_logits(logits, labels), entropy

    return both(f"OpenRLHF {OF_LOGITS}", step, openrlhf.installed)


def of_trl() -> dict[str, Provider]:
    utils: Any = importlib.import_module("trl.trainer.utils")

    def step(hidden: Tensor, weight: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
        given = hidden, weight, None, labels, 1.0, TRL_COLUMNS, None, 1.0
        found: tuple[Tensor, ...] = utils._ChunkedLogProbFunction.apply(*given, ("log_probs", "entropy"))
        return found[:2]

    return both("TRL fused head", step, trl.installed)


FRAMEWORKS = {"verl": of_verl, "openrlhf": of_openrlhf, "trl": of_trl}


def providers() -> tuple[dict[str, Provider], dict[str, str]]:
    """Return the providers, and the module of each framework that can be imported."""
    found: dict[str, Provider] = {}
    modules = {}
    for package, of_framework in FRAMEWORKS.items():
        with contextlib.suppress(ImportError):
            found |= of_framework()
            modules[package] = package
    if "verl" in modules:
        with contextlib.suppress(ImportError):
            importlib.import_module("flash_attn")
            modules["flash-attn"] = "flash_attn"
    return found, modules


def measure(known: dict[str, Provider], case: tuple[bool, tuple[int, int, int]], ranks: Ranks, rounds: int) -> Any:
    """Return milliseconds, and peak memory beyond the leaves, of each provider of logits, or of a head."""
    has_logits, (n_tokens, vocab_size, width) = case
    device, dtype = ranks.device, torch.bfloat16
    generator = torch.Generator(device).manual_seed(0)

    def normal(*shape: int, deviation: float) -> Tensor:
        return torch.randn(*shape, device=device, generator=generator).mul_(deviation).to(dtype)

    shape: tuple[int, ...] = (1, n_tokens) if has_logits else (n_tokens,)
    sources = [normal(*shape, vocab_size if has_logits else width, deviation=3.0 if has_logits else 1.0)]
    if not has_logits:
        sources.append(normal(vocab_size, width, deviation=2.0 / width**0.5))
    labels = torch.randint(0, vocab_size, shape, device=device, generator=generator)
    leaves = [source.clone().requires_grad_() for source in sources]

    def step(name: str) -> Tensor:
        inputs = (_Activation.apply(leaves[0], [leaves[0].detach()]),) if has_logits else leaves
        outputs = known[name][0](*inputs, labels)
        grads = [torch.full_like(*given) for given in zip(outputs, (-1.0, 0.001), strict=False)]
        torch.autograd.backward(outputs, grads)  # verl's kernel takes contiguous gradients alone
        losses = [(output.detach() * grad).sum().float() for output, grad in zip(outputs, grads, strict=True)]
        return torch.stack(losses).sum()

    def fresh() -> None:
        for leaf, source in zip(leaves, sources, strict=True):
            leaf.grad = None
            with torch.no_grad():
                leaf.copy_(source)

    contexts = {name: context for name, (_, context) in known.items() if (OF_LOGITS in name) == has_logits}
    name = f"{n_tokens} x {vocab_size}, " + (OF_LOGITS if has_logits else f"D = {width}")
    return measured(name, contexts, step, fresh, ranks.timer(), rounds)


def main() -> None:
    words = parser_of(__doc__).parse_args()
    with joined_ranks() as ranks:
        known, modules = providers()
        kinds = sorted({OF_LOGITS in name for name in known})
        cases = [(has_logits, shape) for shape in (TINY if words.tiny else SHAPES) for has_logits in kinds]
        run(head_of("rl", modules), cases, lambda case: measure(known, case, ranks, words.rounds), ranks, words.json)


if __name__ == "__main__":
    main()
