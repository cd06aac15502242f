"""What both benchmarks share: the ranks of a run, the machine's description, the document that is written."""

from __future__ import annotations

import argparse
import json
import logging
import os
import platform
import subprocess
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from tqdm import tqdm

from bench.cases import Case, parsed_shape
from vocab_parallel_ce.selection import triton_version

ROOT = Path(__file__).parents[2]
TIMEOUT = timedelta(minutes=5)
GRAPH_MIXING = "NCCL_GRAPH_MIXING_SUPPORT"


class Ranks(NamedTuple):
    """This process among those of the run; ``group`` is None where it is alone."""

    rank: int
    size: int
    group: Any

    @property
    def is_first(self) -> bool:
        return self.rank == 0


@contextmanager
def joined_ranks() -> Iterator[Ranks]:
    """The ranks that ``torchrun`` started, one a GPU, and their process group while this lasts."""
    if not torch.cuda.is_available():
        raise SystemExit("benchmark: needs a GPU, torch finds none")
    # NCCL guards against calls of several graphs at a time, of which there are none here, with launches of
    # its own: 13 to 30 us in every graph. It is read when the group is made.
    os.environ.setdefault(GRAPH_MIXING, "0")
    size, local_rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("LOCAL_RANK", "0"))
    torch.cuda.set_device(local_rank)
    if size > 1:
        dist.init_process_group("nccl", device_id=torch.device("cuda", local_rank), timeout=TIMEOUT)
    try:
        yield Ranks(dist.get_rank() if size > 1 else 0, size, dist.group.WORLD if size > 1 else None)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def quiet() -> None:
    """Other projects' warnings say nothing about a time."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)


def host_description(versions: dict[str, str] | None = None) -> dict[str, Any]:
    git = ["git", "rev-parse", "HEAD"]
    commit = subprocess.run(git, cwd=ROOT, capture_output=True, text=True).stdout.strip()
    return {
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "gpus_used": int(os.environ.get("WORLD_SIZE", "1")),
        "torch": torch.__version__,
        "triton": triton_version(),
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "nccl_graph_mixing_support": os.environ.get(GRAPH_MIXING),
        "commit": os.environ.get("VPCE_COMMIT") or commit or None,
    } | ({} if versions is None else {"providers": versions})


def write_document(document: dict[str, Any], path: Path | None) -> None:
    if path:
        path.write_text(json.dumps(document, indent=1) + "\n")


def argument_parser(description: str | None) -> argparse.ArgumentParser:
    """The arguments that all benchmarks take."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15, help="timed rounds of each shape")
    parser.add_argument("--shape", action="append", metavar="ROWSxCOLUMNS", help="columns are a rank's")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the JSON document here as well")
    return parser


def run_benchmark(
    options: argparse.Namespace,
    shapes: Sequence[tuple[int, int]],
    dtype: torch.dtype,
    measured: Callable[[Case, int, tqdm], list[dict[str, Any]]],
    line: Callable[[dict[str, Any]], str],
) -> None:
    """Measure every shape on the GPUs of this run; rank 0 prints a ``line`` a result, and the JSON."""
    with joined_ranks() as ranks:
        shapes = [parsed_shape(shape) for shape in options.shape or ()] or shapes
        results = []
        total = len(shapes) * (options.rounds + 2)
        with tqdm(total=total, unit="round", disable=not ranks.is_first) as progress:
            for rows, columns in shapes:
                progress.set_description(f"{rows} x {columns}")
                case = Case(rows, columns, dtype, ranks.group, ranks.size)
                results += measured(case, options.rounds, progress)
        if ranks.is_first:
            for result in results:
                print(f"{result['rows']:6d} x {result['columns']:6d}  {line(result)}")
            document = {"host": host_description(), "results": results}
            write_document(document, options.json)
            print(json.dumps(document), flush=True)
