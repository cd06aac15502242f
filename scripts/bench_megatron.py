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
import statistics
from collections.abc import Iterator
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

import torch
from bench_lib.documents import host_description, write_document
from bench_lib.timing import Ranks, joined_ranks
from megatron.core import parallel_state
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from tqdm import tqdm

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
    timer, names = ranks.timer(), list(PROVIDERS)
    inputs = example.batch(shape["columns"], (rows, shape["length"]), ranks.device, seed=0)
    times: dict[str, list[float]] = {name: [] for name in names}
    losses, peaks = dict.fromkeys(names, 0.0), dict.fromkeys(names, 0.0)
    found: list[torch.Tensor] = []

    def step() -> None:
        loss = example.loss_of(model, inputs)
        loss.backward()
        found[:] = [loss.detach()]

    def forget() -> None:
        model.zero_grad(set_to_none=True)

    for number in tqdm(range(rounds + 1), desc=f"{rows} x {shape['length']}", disable=None):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            with provided(name, model):
                forget()
                if number > 0:
                    times[name].append(timer.eager(name, step, forget))
                    continue
                step()  # compiles
                forget()
                timer.release()
                peaks[name] = timer.slowest(timer.extra_peak_bytes(step) or 0)[0]
                losses[name] = found[0].item()
            forget()
    held = torch.cuda.memory_allocated() if ranks.device == "cuda" else 0
    results = [
        {
            "provider": name,
            "ms": round(statistics.median(times[name]), 2),
            "ms_all": [round(each, 2) for each in times[name]],
            "peak_gib": round((held + peaks[name]) / 2**30, 3),
            "loss": losses[name],
        }
        for name in names
    ]
    return {"tokens": rows * shape["length"], "results": results}


def plot(document: dict[str, Any], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(11, 3.2), layout="constrained")
    if document["kind"] == "megatron_curves":
        curves = document["curves"]
        for name, losses in curves.items():
            axes[0].plot(losses, label=name, linestyle="-" if name == "native" else "--")
            axes[1].plot([own - other for own, other in zip(losses, curves["native"], strict=True)], label=name)
        axes[0].set(xlabel="step", ylabel="loss")
        axes[1].set(xlabel="step", ylabel="loss, less Megatron's")
    else:
        cases, providers = document["cases"], [result["provider"] for result in document["cases"][0]["results"]]
        for axis, key, label in zip(axes, ("ms", "peak_gib"), ("step, ms", "peak memory, GiB"), strict=True):
            for index, provider in enumerate(providers):
                values = [case["results"][index][key] for case in cases]
                bars = axis.barh([number + 0.2 * index for number in range(len(cases))], values, 0.19, label=provider)
                axis.bar_label(bars, fmt="%.4g", fontsize=7)
            names = [f"{case['tokens']} tokens" for case in cases]
            axis.set(xlabel=label, yticks=[number + 0.3 for number in range(len(cases))], yticklabels=names)
            axis.invert_yaxis()
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize=7)
    figure.savefig(path, dpi=110)


def run(words: argparse.Namespace, ranks: Ranks) -> dict[str, Any]:
    host = host_description() | {"megatron-core": metadata.version("megatron-core")}
    if words.curves:
        return {"kind": "megatron_curves", "host": host, "curves": example.compare(20, ranks.device)}
    document: dict[str, Any] = {"kind": "megatron", "host": host, "shape": SHAPE, "cases": []}
    model = example.build(**SHAPE)
    for rows in ROWS:
        document["cases"].append(measure(model, rows, SHAPE, ranks, words.rounds))
        for result in document["cases"][-1]["results"] if ranks.is_first else ():
            print(rows * SHAPE["length"], {k: v for k, v in result.items() if k != "ms_all"}, flush=True)
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
        model_parallel_cuda_manual_seed(0)
        document = run(words, ranks)
        parallel_state.destroy_model_parallel()
        if ranks.is_first:
            write_document(document, words.out)
            with contextlib.suppress(ImportError):
                plot(document, words.out.with_suffix(".png")) if words.out is not None else None


if __name__ == "__main__":
    main()
