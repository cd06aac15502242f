"""Measures a training step of models of transformers: their own head and loss, Liger's fused one, and this project's.

Forward and backward of one model, built from its configuration, in bf16 on one GPU. The providers take turns in
every round.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from types import MethodType
from typing import Any, NamedTuple

import torch
import transformers
from bench_lib.cases import IGNORE_INDEX, OURS
from bench_lib.clock import Ranks, joined_ranks
from bench_lib.documents import Result, new_document, parser_of, run
from bench_lib.measure import measured

from vocab_parallel_ce.integrations.transformers import install, uninstall

LLAMA = {
    **{"vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16},
    **{"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64, "max_position_embeddings": 131072},
    **{"rms_norm_eps": 1e-5, "tie_word_embeddings": True},
}
LLAMA_8B = {
    **{"vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 8},
    **{"num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5},
}
ALL_TOKENS = f"{OURS}[all tokens]"  # ignored ones take part, without a look at the labels
GEMMA = {"num_hidden_layers": 6}  # the others are Gemma 2 2B's by default


class Case(NamedTuple):
    name: str
    model: str  # transformers' prefix
    config: dict[str, Any]
    batch: int
    tokens: int
    checkpointed: bool = False
    gib: int = 0  # what a GPU must have
    ignored: float = 0.0  # share of each sequence's labels, from its beginning: the prompt


CASES = (
    Case("Llama-3.2-1B, 4 x 2048", "Llama", LLAMA, 4, 2048),
    Case("Llama-3.2-1B, 8 x 4096", "Llama", LLAMA, 8, 4096, gib=110),
    Case("Gemma 2 2B, 6 layers, 4 x 2048, checkpointed", "Gemma2", GEMMA, 4, 2048, checkpointed=True),
)
# Of ``--ignored``: instruction tuning, whose loss is of the answers alone.
IGNORED_CASES = tuple(
    Case(f"{name}, 4 x 2048, {share:.0%} ignored", "Llama", config, 4, 2048, ignored=share)
    for name, config in (("Llama-3.2-1B", LLAMA), ("Llama-3.1-8B, 8 layers", LLAMA_8B))
    for share in (0.0, 0.5, 0.8)
)


@contextlib.contextmanager
def fused(model: Any, **options: Any) -> Iterator[None]:
    install(model, **options)
    try:
        yield
    finally:
        uninstall(model)


@contextlib.contextmanager
def liger(model: Any) -> Iterator[None]:
    name = type(model).__name__.removesuffix("ForCausalLM").lower()
    model.forward = MethodType(import_module(f"liger_kernel.transformers.model.{name}").lce_forward, model)
    try:
        yield
    finally:
        del model.forward


PROVIDERS: dict[str, Callable[[Any], contextlib.AbstractContextManager[None]]] = {
    "transformers": lambda model: contextlib.nullcontext(),
    "liger-kernel": liger,
    OURS: fused,
    ALL_TOKENS: partial(fused, valid_tokens=None),
}
MODULES = {"transformers": "transformers", "liger-kernel": "liger_kernel"}


def build(case: Case, ranks: Ranks) -> tuple[Any, dict[str, Any]]:
    torch.manual_seed(0)
    config = getattr(transformers, f"{case.model}Config")(**case.config)
    with torch.device(ranks.device):
        model = getattr(transformers, f"{case.model}ForCausalLM")(config).bfloat16()
        ids = torch.randint(0, config.vocab_size, (case.batch, case.tokens))
    if case.checkpointed:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    labels = ids.clone()
    labels[:, : round(case.ignored * ids.shape[1])] = IGNORE_INDEX
    return model.train(), {"input_ids": ids, "labels": labels, "use_cache": False}


def measure(case: Case, ranks: Ranks, rounds: int, providers: list[str]) -> list[Result]:
    model, inputs = build(case, ranks)

    def step() -> torch.Tensor:
        loss = model(**inputs).loss
        loss.backward()
        return loss.detach()

    def forget() -> None:
        model.zero_grad(set_to_none=True)

    contexts = {name: partial(PROVIDERS[name], model) for name in providers}
    return measured(case.name, contexts, step, forget, ranks, rounds)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--ignored", action="store_true", help="cases in which a share of the labels is ignored")
    words = parser.parse_args()
    memory = torch.cuda.get_device_properties(0).total_memory if torch.cuda.is_available() else float("inf")
    cases = [case for case in (IGNORED_CASES if words.ignored else CASES) if case.gib * 2**30 <= memory]
    names = [name for name in PROVIDERS if words.ignored or name != ALL_TOKENS]
    with joined_ranks() as ranks:
        document = new_document("transformers", words.rounds, MODULES)
        run(document, cases, lambda case: measure(case, ranks, words.rounds, names), ranks, words.json)


if __name__ == "__main__":
    main()
