"""Train a small language model with a sharded vocabulary, and compare it with an unsharded run.

    torchrun --nproc-per-node 2 scripts/train_lm.py     # NCCL on 2 GPUs, otherwise gloo on the CPU
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
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

try:
    import torch
    import torch.distributed as dist
    import torch.nn.functional as F
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


@dataclass(frozen=True)
class Place:
    """Where this process runs, as `torchrun` told it; the backend is None for a plain `python`."""

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    device: torch.device
    backend: str | None

    def __str__(self) -> str:
        ranks = "1 rank" if self.world_size == 1 else f"{self.world_size} ranks"
        return f"{ranks}, {self.backend or 'no process group'}, {self.device_name}"

    @property
    def device_name(self) -> str:
        if self.device.type == "cuda":
            return torch.cuda.get_device_name(self.device)
        return f"{platform.machine()} CPU, {cpu_cores()} cores"


def positive_int(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected a positive integer, got {text}")
    return value


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="under a minute on 2 CPU cores")
    parser.add_argument("--loss", choices=tuple(LOSSES), default="logits", help="of the sharded run")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--steps", type=positive_int)
    parser.add_argument("--batch-size", type=positive_int, help="sequences a step")
    parser.add_argument("--sequence-length", type=positive_int, help="tokens a sequence")
    parser.add_argument("--learning-rate", type=float, help="highest rate of the schedule")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--max-difference", type=float, default=2e-3, help="of the losses, in nats")
    parser.add_argument("--out", type=Path, default=REPOSITORY / "out")
    parser.add_argument("--cache-dir", type=Path, default=REPOSITORY / ".cache" / "train_lm")
    return parser.parse_args()


def find_place(requested: str) -> Place:
    names = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "LOCAL_WORLD_SIZE": 1}
    rank, local_rank, world_size, local_world_size = (int(os.environ.get(*pair)) for pair in names.items())
    gpus = torch.cuda.device_count()
    if requested == "cuda" and gpus < local_world_size:
        raise ValueError(f"--device cuda: expected {local_world_size} GPUs, one a rank, got {gpus}")
    on_gpu = requested != "cpu" and gpus >= local_world_size
    device = torch.device("cuda", local_rank) if on_gpu else torch.device("cpu")
    backend = ("nccl" if on_gpu else "gloo") if "LOCAL_RANK" in os.environ else None
    return Place(rank, local_rank, world_size, local_world_size, device, backend)


def cpu_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextmanager
def process_group(place: Place) -> Iterator[dist.ProcessGroup | None]:
    if place.backend is None:
        yield None
        return
    # A rank that fails leaves the others waiting for no longer than this.
    timeout = timedelta(minutes=5)
    device_id = place.device if place.device.type == "cuda" else None
    dist.init_process_group(place.backend, timeout=timeout, device_id=device_id)
    try:
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


def load_on_all_ranks(
    arguments: argparse.Namespace, settings: Settings, place: Place, group: dist.ProcessGroup | None
) -> TokenIds:
    """The first rank of each host builds the cache entry if there is none; the others wait."""
    builds = place.local_rank == 0
    if group is not None and not builds:
        dist.barrier(group)
    max_characters = SMOKE_CORPUS_CHARACTERS if arguments.smoke else None
    show_progress = place.rank == 0
    ids = load_token_ids(arguments.cache_dir, VOCAB_SIZE, max_characters, show_progress)
    if group is not None and builds:
        dist.barrier(group)
    length = settings.sequence_length
    if min(len(ids.train), len(ids.held_out)) <= length:
        tokens = f"the {len(ids.train)} training and {len(ids.held_out)} held-out tokens"
        raise ValueError(f"--sequence-length: expected less than {tokens}, got {length}")
    return TokenIds(*(part.to(place.device) for part in ids))


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
    arguments: argparse.Namespace, settings: Settings, place: Place, runs: dict[str, Run], equal: bool, seconds: float
) -> int:
    """Print and write what was found; returns the exit status."""
    sharded, differences = runs["sharded"], differences_of(runs)
    largest, parameters = max(differences), runs["unsharded"].parameters
    at_step = differences.index(largest) + 1
    picture = arguments.out / "train_lm.png"
    what = f"Decoder-only language model, {parameters / 1e6:.1f} M parameters, fp32"
    title, unit = f"{what}\nvocabulary {VOCAB_SIZE} over {place}", f"{settings.tokens_per_step:,} tokens each"
    draw(arguments, runs, title, unit, picture)
    failures = failures_of(runs, largest, arguments.max_difference, equal)
    summary = {
        "job": "train_lm",
        "loss": LOSSES[arguments.loss],
        "passed": not failures,
        "largest_loss_difference": largest,
        "largest_loss_difference_step": at_step,
        "max_difference": arguments.max_difference,
        "world_size": place.world_size,
        "backend": place.backend,
        "device": place.device_name,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": triton_version(),
        "impl": select(place.device.type)[0],
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
        "seconds": round(seconds, 1),
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
    arguments = parse_arguments()
    begun = time.perf_counter()
    place = find_place(arguments.device)
    arguments.out.mkdir(parents=True, exist_ok=True)
    options = ("steps", "batch_size", "sequence_length", "learning_rate")
    given = {name: getattr(arguments, name) for name in options if getattr(arguments, name) is not None}
    settings = replace(SMOKE if arguments.smoke else DEFAULTS[place.device.type], **given)
    torch.set_float32_matmul_precision("highest")
    if place.device.type == "cuda":
        torch.cuda.set_device(place.device)
        # Its backward adds in no fixed order; replicated layers must keep the same bits on all ranks.
        torch.backends.cuda.enable_mem_efficient_sdp(False)

    torch.set_num_threads(max(1, cpu_cores() // place.local_world_size))
    show = place.rank == 0
    if show:
        print(f"train_lm: {place}", flush=True)
    with process_group(place) as group:
        ids = load_on_all_ranks(arguments, settings, place, group)

        def sharded_loss(model: LanguageModel, ids: Tensor, labels: Tensor) -> Tensor:
            options: dict[str, Any] = {"group": group, "ignore_index": IGNORE_INDEX, "vocab_size": VOCAB_SIZE}
            if arguments.loss == "linear":
                head = model.vocabulary.weight
                loss: Tensor = linear_cross_entropy(model.hidden(ids), head, labels, **options)
            else:
                loss = vocab_parallel_cross_entropy(model(ids), labels, **options)
            return loss

        sharded = train("sharded", settings, arguments.seed, ids, sharded_loss, group, show)
        equal = equal_on_all_ranks(sharded, place.device, group)
    if place.rank != 0:
        return 0

    def unsharded_loss(model: LanguageModel, ids: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(model(ids).flatten(0, 1), labels.flatten(), ignore_index=IGNORE_INDEX)

    unsharded = train("unsharded", settings, arguments.seed, ids, unsharded_loss, None, show)
    seconds = time.perf_counter() - begun
    runs = {"sharded": sharded, "unsharded": unsharded}
    return report(arguments, settings, place, runs, equal, seconds)


if __name__ == "__main__":
    status = main()
    # Without Python's shutdown: a thread of gloo's that lets go of a collective's tensors during it aborts
    # the process.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
