"""Train a small language model with a sharded vocabulary, and compare it with an unsharded run.

    torchrun --nproc-per-node 2 scripts/train_lm.py     # NCCL, a GPU for each rank; without any, gloo on the CPU
    python scripts/train_lm.py                          # one rank, no process group

Regime: fp32, tensor parallelism over the vocabulary alone, the same batch on all ranks. The text is
the running Python's own standard library. The first run takes its loss from `[tokens, V/R]` logits
with `vocab_parallel_cross_entropy`, or with `--loss linear` from the hidden states and the sharded head
with `linear_cross_entropy`, which has no logits. The second, on rank 0, starts from the same weights, sees
the same batches and takes its loss from all V columns with `torch.nn.functional.cross_entropy`.

Writes `train_lm.png` (both loss curves and their difference) and `train_lm.json` (the summary and the
curves) under `--out`. The last line of stdout is the summary as one JSON object. Exits non-zero when
the largest difference of the losses exceeds `--max-difference`, or when a loss did not fall.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

try:
    import torch
    import torch.distributed as dist
    import torch.nn.functional as F
    from bench_lib.clock import Ranks, joined_ranks
    from lm.data import IGNORE_INDEX, TokenIds, load_token_ids
    from lm.model import LanguageModel, Settings
    from lm.training import Run, equal_on_all_ranks, train
    from matplotlib.figure import Figure
    from torch import Tensor

    from vocab_parallel_ce import linear_cross_entropy, vocab_parallel_cross_entropy
    from vocab_parallel_ce.selection import select, triton_version
except ModuleNotFoundError as error:
    raise SystemExit(
        f"train_lm: Python package {error.name!r} is missing: run `bash scripts/demo.sh`, "
        "or `pip install -e '.[demo]'` in the repository and start again"
    ) from None

REPOSITORY = Path(__file__).resolve().parent.parent
VOCAB_SIZE = 8192

LOSSES = {"logits": "vocab_parallel_cross_entropy", "linear": "linear_cross_entropy"}

SMOKE_CORPUS_CHARACTERS = 1_500_000
SMOKE = Settings(VOCAB_SIZE, 96, 2, 3, 128, 8, 30, 3e-3)
DEFAULTS = {
    "cpu": Settings(VOCAB_SIZE, 160, 4, 5, 128, 8, 200, 2e-3),
    "cuda": Settings(VOCAB_SIZE, 256, 6, 8, 256, 32, 400, 1e-3),
}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="under a minute on 2 CPU cores")
    parser.add_argument("--loss", choices=tuple(LOSSES), default="logits", help="of the sharded run")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--max-difference", type=float, default=2e-3, help="of the losses, in nats")
    parser.add_argument("--out", type=Path, default=REPOSITORY / "out")
    parser.add_argument("--cache-dir", type=Path, default=REPOSITORY / ".cache" / "train_lm")
    return parser.parse_args()


def cpu_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def device_name(ranks: Ranks) -> str:
    if ranks.device == "cuda":
        return torch.cuda.get_device_name()
    return f"{platform.machine()} CPU, {cpu_cores()} cores"


def place_of(ranks: Ranks) -> str:
    """Where the ranks run, in words."""
    many = "1 rank" if ranks.size == 1 else f"{ranks.size} ranks"
    return f"{many}, {backend() or 'no process group'}, {device_name(ranks)}"


def backend() -> str | None:
    return dist.get_backend() if dist.is_initialized() else None


def load_on_all_ranks(arguments: argparse.Namespace, ranks: Ranks) -> TokenIds:
    """The first rank of each host builds the cache entry if there is none; the others wait."""
    builds = int(os.environ.get("LOCAL_RANK", "0")) == 0
    if ranks.group is not None and not builds:
        dist.barrier(ranks.group)
    max_characters = SMOKE_CORPUS_CHARACTERS if arguments.smoke else None
    ids = load_token_ids(arguments.cache_dir, VOCAB_SIZE, max_characters, show_progress=ranks.is_first)
    if ranks.group is not None and builds:
        dist.barrier(ranks.group)
    return TokenIds(*(part.to(ranks.device) for part in ids))


def draw(arguments: argparse.Namespace, runs: dict[str, Run], title: str, unit: str, path: Path) -> None:
    limit, labels = arguments.max_difference, (f"sharded, {LOSSES[arguments.loss]}", "unsharded, torch cross_entropy")
    styles: list[dict[str, Any]] = [{"color": "tab:blue", "linewidth": 3.0}, {"color": "black", "linestyle": "--"}]
    figure = Figure(figsize=(9, 6.5), layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    for run, label, style in zip(runs.values(), labels, styles, strict=True):
        text = f"{label}: {run.tokens_per_second:,.0f} tokens/s, held-out {run.held_out_loss:.3f}"
        upper.plot(range(1, len(run.losses) + 1), run.losses, label=text, **style)
    upper.set_ylabel("cross-entropy loss (nats per token)")
    upper.set_title(title)
    upper.legend()
    upper.grid(alpha=0.3)
    floor = 1e-8
    differences = [max(difference, floor) for difference in differences_of(runs)]
    lower.semilogy(range(1, len(differences) + 1), differences, ".", color="tab:red", label="|sharded - unsharded|")
    lower.axhline(limit, color="gray", linestyle=":", label=f"allowed: {limit:g}")
    lower.set_ylim(floor / 2, 3 * max(limit, *differences))
    lower.set_ylabel(f"loss difference (nats)\n0 drawn at {floor:g}")
    lower.set_xlabel(f"step ({unit})")
    lower.legend(loc="center right")
    lower.grid(alpha=0.3)
    figure.savefig(path, dpi=130)


def differences_of(runs: dict[str, Run]) -> list[float]:
    return [abs(a - b) for a, b in zip(*(run.losses for run in runs.values()), strict=True)]


def failures_of(runs: dict[str, Run], largest: float, max_difference: float, equal: bool) -> list[str]:
    """Say what of the runs is not as it must be."""
    failures = []
    if not largest <= max_difference:
        failures.append(f"largest loss difference: expected at most {max_difference:g}, got {largest:.3g}")
    if not equal:
        failures.append("sharded loss: expected the same bits on all ranks, got different ones")
    for name, run in runs.items():
        if not run.final_loss < run.losses[0]:
            failures.append(f"{name} loss: expected a fall from {run.losses[0]:.4f}, got {run.final_loss:.4f}")
    return failures


def report(
    arguments: argparse.Namespace,
    settings: Settings,
    place: str,
    host: dict[str, Any],
    runs: dict[str, Run],
    equal: bool,
) -> int:
    """Print and write what was found; returns the exit status."""
    sharded, differences = runs["sharded"], differences_of(runs)
    largest, parameters = max(differences), runs["unsharded"].parameters
    at_step = differences.index(largest) + 1
    picture = arguments.out / "train_lm.png"
    what = f"Decoder-only language model, {parameters / 1e6:.1f} M parameters, fp32"
    title, unit = (
        f"{what}\nvocabulary {VOCAB_SIZE} over {place}",
        f"{settings.tokens_per_step:,} tokens each",
    )
    draw(arguments, runs, title, unit, picture)
    failures = failures_of(runs, largest, arguments.max_difference, equal)
    summary = {
        "job": "train_lm",
        "loss": LOSSES[arguments.loss],
        "passed": not failures,
        "largest_loss_difference": largest,
        "largest_loss_difference_step": at_step,
        "max_difference": arguments.max_difference,
        **host,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": triton_version(),
        "dtype": "float32",
        "vocab_size": VOCAB_SIZE,
        "parameters": parameters,
        "steps": settings.steps,
        "tokens": settings.steps * settings.tokens_per_step,
        "ignored_labels": sharded.ignored_labels,
        "seed": arguments.seed,
        "first_loss": {name: run.losses[0] for name, run in runs.items()},
        "final_loss": {name: run.final_loss for name, run in runs.items()},
        "held_out_loss": {name: run.held_out_loss for name, run in runs.items()},
        "tokens_per_second": {name: round(run.tokens_per_second) for name, run in runs.items()},
        "loss_equal_on_all_ranks": equal,
        "png": os.path.relpath(picture),
    }
    summary_and_curves = {**summary, "losses": {name: run.losses for name, run in runs.items()}}
    picture.with_suffix(".json").write_text(json.dumps(summary_and_curves) + "\n")
    print(f"sharded loss: {sharded.losses[0]:.3f} at first, {sharded.final_loss:.3f} at the end")
    print(f"largest loss difference: {largest:.2e} at step {at_step} (allowed: {arguments.max_difference:g})")
    for failure in failures:
        print(f"FAILED: {failure}")
    print(json.dumps(summary, separators=(",", ":")), flush=True)
    return 1 if failures else 0


def main() -> int:
    arguments, begun = parse_arguments(), time.perf_counter()
    arguments.out.mkdir(parents=True, exist_ok=True)
    torch.set_float32_matmul_precision("highest")
    # Its backward adds in no fixed order; replicated layers must keep the same bits on all ranks.
    torch.backends.cuda.enable_mem_efficient_sdp(False)
    torch.set_num_threads(max(1, cpu_cores() // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))
    with joined_ranks() as ranks:
        settings, place = SMOKE if arguments.smoke else DEFAULTS[ranks.device], place_of(ranks)
        settings = replace(settings, steps=settings.steps if arguments.steps is None else arguments.steps)
        if ranks.is_first:
            print(f"train_lm: {place}", flush=True)
        ids = load_on_all_ranks(arguments, ranks)

        def sharded_loss(model: LanguageModel, ids: Tensor, labels: Tensor) -> Tensor:
            options: dict[str, Any] = {"group": ranks.group, "ignore_index": IGNORE_INDEX, "vocab_size": VOCAB_SIZE}
            if arguments.loss == "linear":
                head = model.vocabulary.weight
                loss: Tensor = linear_cross_entropy(model.hidden(ids), head, labels, **options)
            else:
                loss = vocab_parallel_cross_entropy(model(ids), labels, **options)
            return loss

        sharded = train("sharded", settings, arguments.seed, ids, sharded_loss, ranks.group, ranks.is_first)
        equal = equal_on_all_ranks(sharded, torch.device(ranks.device), ranks.group)
        host: dict[str, Any] = {"world_size": ranks.size, "backend": backend(), "device": device_name(ranks)}
    if not ranks.is_first:
        return 0

    def unsharded_loss(model: LanguageModel, ids: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(model(ids).flatten(0, 1), labels.flatten(), ignore_index=IGNORE_INDEX)

    unsharded = train("unsharded", settings, arguments.seed, ids, unsharded_loss, None, show_progress=True)
    host |= {"impl": select(ranks.device)[0], "seconds": round(time.perf_counter() - begun, 1)}
    return report(arguments, settings, place, host, {"sharded": sharded, "unsharded": unsharded}, equal)


if __name__ == "__main__":
    status = main()
    # Without Python's shutdown: a thread of gloo's that lets go of a collective's tensors during it aborts
    # the process.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
