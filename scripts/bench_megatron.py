"""Measures a training step of Megatron-Core's GPTModel: its own losses, and this project's over logits and linear.

    torchrun --nproc-per-node 2 scripts/bench_megatron.py --out results.json

Forward and backward of one model of random weights, in bf16, with tensor parallelism over all ranks. The providers take
turns in every round. ``--curves`` trains 20 steps with each instead. ``--plot results.json`` only draws.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
from collections.abc import Iterator
from functools import partial
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

import torch
from bench_lib.documents import host_description, write_document
from bench_lib.steps import draw, measured, show
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


def draw_curves(curves: dict[str, list[float]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (whole, rest) = pyplot.subplots(1, 2, figsize=(11, 3.2), layout="constrained")
    for name, losses in curves.items():
        whole.plot(losses, label=name, linestyle="-" if name == "native" else "--")
        rest.plot([own - other for own, other in zip(losses, curves["native"], strict=True)], label=name)
    whole.set(xlabel="step", ylabel="loss")
    rest.set(xlabel="step", ylabel="loss, less Megatron's")
    rest.legend(fontsize=7)
    figure.savefig(path, dpi=110)


def plot(document: dict[str, Any], path: Path) -> None:
    if document["kind"] == "megatron_curves":
        draw_curves(document["curves"], path)
    else:
        draw(document["cases"], path)


def run(words: argparse.Namespace, ranks: Ranks) -> dict[str, Any]:
    host = host_description() | {"megatron-core": metadata.version("megatron-core")}
    if words.curves:
        return {"kind": "megatron_curves", "host": host, "curves": example.compare(20, ranks.device)}
    document: dict[str, Any] = {"kind": "megatron", "host": host, "shape": SHAPE, "cases": []}
    model = example.build(**SHAPE)
    for rows in ROWS:
        document["cases"].append(measure(model, rows, SHAPE, ranks, words.rounds))
        if ranks.is_first:
            show(document["cases"][-1])
    return document


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--curves", action="store_true", help="20 steps of a small model with each loss")
    parser.add_argument("--out", type=Path, metavar="PATH", help="write the document here, and draw it beside it")
    parser.add_argument("--plot", type=Path, metavar="DOCUMENT", help="only draw a document, beside it")
    words = parser.parse_args()
    if words.plot is not None:
        plot(json.loads(words.plot.read_text()), words.plot.with_suffix(".png"))
        return
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # as Megatron asks for
    with joined_ranks() as ranks:
        parallel_state.initialize_model_parallel(ranks.size)
        document = run(words, ranks)
        parallel_state.destroy_model_parallel()
        if ranks.is_first:
            write_document(document, words.out)
            with contextlib.suppress(ImportError):
                plot(document, words.out.with_suffix(".png")) if words.out is not None else None


if __name__ == "__main__":
    main()
