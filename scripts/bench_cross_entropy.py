"""Time and memory of the loss, forward and backward, beside a device copy of the same logits.

    python scripts/bench_cross_entropy.py                                  one GPU
    torchrun --nproc-per-node 2 scripts/bench_cross_entropy.py             the vocabulary over two

Metric: time over that of ``out.copy_(logits)``, one read and one write of the shard, interleaved with it
round by round; the median over the rounds of the slowest rank. ``ratio`` is calls back to back with the
GPU kept ahead of by the host where it can; ``ratio_queued`` has the calls queued before the GPU begins, so
that only the device's time is in it. Every variant is checked against fp64 before it is timed.

Prints a table, and as the last line of standard output one JSON document, which ``--json`` writes too.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import triton
from torch import Tensor
from tqdm import tqdm

from vocab_parallel_ce import vocab_parallel_cross_entropy

SHAPES = ((4096, 128256), (8192, 32064), (8192, 64128), (4096, 50257), (1024, 32000), (262144, 1000))
REDUCTIONS = ("mean", "none")
CHECKED_ROWS = 64
BUFFERS = 4  # calls a timing, each on logits that no earlier call of the round has overwritten
SLEEP_CYCLES = 20_000_000  # about 10 ms: longer than the host takes to queue BUFFERS calls
FP32_EPS = 2.0**-23


class Case(NamedTuple):
    """One shard and what is asked of it."""

    rows: int
    columns: int
    dtype: torch.dtype
    group: Any
    ranks: int

    def call(self, logits: Tensor, labels: Tensor, reduction: str) -> tuple[Tensor, Tensor]:
        """Loss and gradient as a training step gets them: through autograd, from a fresh graph."""
        loss = vocab_parallel_cross_entropy(logits, labels, group=self.group, reduction=reduction)
        upstream = torch.ones_like(loss)
        return loss, torch.autograd.grad(loss, logits, upstream)[0]

    def inputs(self) -> tuple[Tensor, Tensor]:
        """This rank's logits, different on each rank, and the labels that are the same on all."""
        rank = dist.get_rank() if self.ranks > 1 else 0
        generator = torch.Generator("cuda").manual_seed(rank)
        logits = torch.randn(self.rows, self.columns, generator=generator, device="cuda") * 3
        generator.manual_seed(1000)
        labels = torch.randint(0, self.columns * self.ranks, (self.rows,), generator=generator, device="cuda")
        return logits.to(self.dtype), labels


def check(case: Case, logits: Tensor, labels: Tensor, reduction: str) -> None:
    """Raise unless loss and gradient of the first rows agree with PyTorch's in fp64."""
    shard, labels = logits[:CHECKED_ROWS].clone().requires_grad_(), labels[:CHECKED_ROWS]
    whole, first = shard.detach(), 0
    if case.ranks > 1:
        parts = [torch.empty_like(whole) for _ in range(case.ranks)]
        dist.all_gather(parts, whole, group=case.group)
        whole, first = torch.cat(parts, dim=1), dist.get_rank() * case.columns
    source = whole.double().requires_grad_()
    expected = torch.nn.functional.cross_entropy(source, labels, reduction=reduction)
    (expected_grad,) = torch.autograd.grad(expected.sum(), source)
    loss, grad = case.call(shard, labels, reduction)
    torch.testing.assert_close(loss.double(), expected, rtol=1e-5, atol=1e-5)
    # Relative to each element: most probabilities are far below any absolute tolerance.
    rtol = torch.finfo(case.dtype).eps + 64 * FP32_EPS
    expected_grad = expected_grad[:, first : first + case.columns]
    atol = torch.finfo(case.dtype).smallest_normal
    torch.testing.assert_close(grad.double(), expected_grad, rtol=rtol, atol=atol)


def milliseconds(run: Callable[[], None], *, queued: bool) -> float:
    """GPU time of ``run``; ``queued`` makes the GPU wait until the host has queued all of it."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    if dist.is_initialized():
        dist.barrier()
    if queued:
        torch.cuda._sleep(SLEEP_CYCLES)
    start.record()
    run()
    end.record()
    torch.cuda.synchronize()
    elapsed = start.elapsed_time(end)
    if dist.is_initialized():
        slowest = torch.tensor(elapsed, device="cuda")
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        elapsed = float(slowest)
    return elapsed


def extra_peak_bytes(run: Callable[[], object]) -> int:
    """Memory that ``run`` takes beyond what is there before, at the worst moment."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def measure(case: Case, rounds: int, progress: tqdm) -> list[dict[str, Any]]:
    """One row of results for each reduction."""
    source, labels = case.inputs()
    out = torch.empty_like(source)
    buffers = [source.clone().requires_grad_() for _ in range(BUFFERS)]
    for reduction in REDUCTIONS:
        check(case, source, labels, reduction)

    def copies() -> None:
        for _ in range(BUFFERS):
            out.copy_(source)

    def steps(reduction: str) -> Callable[[], None]:
        def run() -> None:
            for logits in buffers:
                case.call(logits, labels, reduction)

        return run

    runs = {"copy": copies} | {reduction: steps(reduction) for reduction in REDUCTIONS}
    times: dict[tuple[str, bool], list[float]] = {(name, q): [] for name in runs for q in (False, True)}
    for round_index in range(rounds + 2):  # two rounds warm up
        for (name, queued), series in times.items():
            with torch.no_grad():
                for logits in buffers:
                    logits.copy_(source)
            elapsed = milliseconds(runs[name], queued=queued) / BUFFERS
            if round_index >= 2:
                series.append(elapsed)
        progress.update()
    results = []
    copy_ms = statistics.median(times["copy", True])
    for reduction in REDUCTIONS:
        ratios = {
            queued: [t / c for t, c in zip(times[reduction, queued], times["copy", queued], strict=True)]
            for queued in (False, True)
        }
        extra = extra_peak_bytes(partial(case.call, buffers[0], labels, reduction))
        results.append(
            {
                "rows": case.rows,
                "columns": case.columns,
                "dtype": str(case.dtype).removeprefix("torch."),
                "ranks": case.ranks,
                "reduction": reduction,
                "ratio": round(statistics.median(ratios[False]), 3),
                "ratio_queued": round(statistics.median(ratios[True]), 3),
                "ratio_queued_spread": [round(min(ratios[True]), 3), round(max(ratios[True]), 3)],
                "microseconds": round(1e3 * statistics.median(times[reduction, False]), 1),
                "microseconds_queued": round(1e3 * statistics.median(times[reduction, True]), 1),
                "copy_microseconds": round(1e3 * copy_ms, 1),
                "copy_terabytes_per_second": round(
                    2 * source.numel() * source.element_size() / copy_ms / 1e9, 3
                ),
                "extra_peak_bytes_per_row": round(extra / case.rows, 2),
            }
        )
    return results


def host_description() -> dict[str, Any]:
    git = ["git", "rev-parse", "HEAD"]
    root = Path(__file__).parents[1]
    commit = subprocess.run(git, cwd=root, capture_output=True, text=True).stdout.strip()
    return {
        "gpu": torch.cuda.get_device_name(),
        "gpus_used": int(os.environ.get("WORLD_SIZE", "1")),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "commit": os.environ.get("VPCE_COMMIT") or commit or None,
    }


def argument_parser(description: str | None) -> argparse.ArgumentParser:
    """The arguments that all benchmarks take."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15, help="timed rounds of each shape")
    parser.add_argument("--shape", action="append", metavar="ROWSxCOLUMNS", help="columns are a rank's")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the JSON document here as well")
    return parser


def run_benchmark(
    options: argparse.Namespace,
    shapes: Sequence[tuple[int, ...]],
    dtype: torch.dtype,
    measured: Callable[[Case, int, tqdm], list[dict[str, Any]]],
    line: Callable[[dict[str, Any]], str],
) -> None:
    """Measure every shape on the GPUs of this run; rank 0 prints a ``line`` a result, and the JSON."""
    if not torch.cuda.is_available():
        raise SystemExit("benchmark: needs a GPU, torch finds none")
    ranks, local_rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("LOCAL_RANK", "0"))
    torch.cuda.set_device(local_rank)
    group = None
    if ranks > 1:
        dist.init_process_group("nccl", device_id=torch.device("cuda", local_rank))
        group = dist.group.WORLD
    shapes = [tuple(map(int, shape.split("x"))) for shape in options.shape or ()] or shapes
    results = []
    with tqdm(total=len(shapes) * (options.rounds + 2), unit="round", disable=local_rank != 0) as progress:
        for rows, columns in shapes:
            progress.set_description(f"{rows} x {columns}")
            results += measured(Case(rows, columns, dtype, group, ranks), options.rounds, progress)
    if local_rank == 0:
        for result in results:
            print(f"{result['rows']:6d} x {result['columns']:6d}  {line(result)}")
        document = json.dumps({"host": host_description(), "results": results})
        if options.json:
            options.json.write_text(json.dumps(json.loads(document), indent=1) + "\n")
        print(document, flush=True)
    if ranks > 1:
        dist.destroy_process_group()


def line_of(result: dict[str, Any]) -> str:
    return (
        f"{result['reduction']:4s}  {result['ratio']:6.3f} x copy ({result['ratio_queued']:.3f} queued)  "
        f"{result['microseconds']:8.1f} us  {result['extra_peak_bytes_per_row']:.1f} B/row"
    )


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    options = parser.parse_args()
    run_benchmark(options, SHAPES, getattr(torch, options.dtype), measure, line_of)


if __name__ == "__main__":
    main()
