"""What each option of the loss costs, forward and backward: time over a device copy, and extra peak memory.

    python scripts/bench_options.py                                  one GPU
    torchrun --nproc-per-node 2 scripts/bench_options.py             the vocabulary over two
    python scripts/bench_options.py --baseline ../other-checkout     also the loss of another commit

Every call is interleaved with ``out.copy_(logits)`` and with the loss without options, round by round;
ratios are medians over the rounds of the slowest rank, of the device's time with the calls queued. Each is
checked against ``impl="reference"`` before it is timed. Logits are no leaf, as in training, and each call
has its own. ``--baseline`` needs a checkout whose ``vocab_parallel_cross_entropy`` takes ``logits, labels,
group, reduction``: it shows what a change costs those who use none of it.

Prints a table, and as the last line of standard output one JSON document, which ``--json`` writes too.
"""

from __future__ import annotations

import importlib
import shutil
import statistics
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from bench.cases import FEWEST_BUFFERS as BUFFERS
from bench.cases import Case
from bench.logits import as_produced
from bench.oracle import CHECKED_ROWS
from bench.runner import argument_parser, run_benchmark
from bench.timing import extra_peak_bytes, milliseconds
from torch import Tensor
from tqdm import tqdm

from vocab_parallel_ce import token_log_probs, vocab_parallel_cross_entropy

SHAPES = ((4096, 128256), (8192, 32064), (8192, 64128))
PACKAGE = "vocab_parallel_ce"
OPTIONS: dict[str, dict[str, Any]] = {
    "mean": {},
    "mean, in_forward": {"gradient": "in_forward"},
    "mean, label_smoothing": {"label_smoothing": 0.1},
    "mean, z_loss": {"z_loss": 1e-4},
    "mean, softcap": {"softcap": 30.0},
    "mean, logit_scale": {"logit_scale": 0.0625},
    "mean, return_metrics": {"return_metrics": True},
    "sum, num_items": {"reduction": "sum", "num_items": 1000},
    "none": {"reduction": "none"},
    "none, all options": {
        "reduction": "none",
        "label_smoothing": 0.1,
        "smoothing_formula": "megatron",
        "z_loss": 1e-4,
        "softcap": 30.0,
        "logit_scale": 0.0625,
        "return_metrics": True,
    },
}
LOG_PROBS: dict[str, dict[str, Any]] = {
    "token_log_probs": {},
    "token_log_probs, entropy": {"entropy": True, "temperature": 0.7},
}
Step = Callable[[Tensor, Tensor], list[Tensor]]


def baseline_loss(checkout: Path) -> Callable[..., Any]:
    """The public function of another checkout, beside this one's: imported under a name of its own."""
    name = f"baseline_{PACKAGE}"
    parent = Path(tempfile.mkdtemp())
    shutil.copytree(checkout / PACKAGE, parent / name, ignore=shutil.ignore_patterns("__pycache__"))
    for source in (parent / name).rglob("*.py"):
        source.write_text(source.read_text().replace(PACKAGE, name))
    sys.path.insert(0, str(parent))
    loss: Callable[..., Any] = importlib.import_module(name).vocab_parallel_cross_entropy
    return loss


def step(function: Callable[..., Any], logits: Tensor, labels: Tensor) -> list[Tensor]:
    """The outputs of ``function`` that require a gradient, and the gradient of their sums."""
    returned = function(logits, labels)
    results = [returned] if isinstance(returned, Tensor) else list(returned)
    outputs = [out for out in results if isinstance(out, Tensor)]
    (grad,) = torch.autograd.grad(outputs, logits, [torch.ones_like(out) for out in outputs])
    return [*outputs, grad]


def steps_of(case: Case, baseline: Callable[..., Any] | None) -> dict[str, Step]:
    """Forward and backward of every call that is timed."""
    losses = {name: partial(vocab_parallel_cross_entropy, **options) for name, options in OPTIONS.items()}
    if baseline is not None:
        losses |= {f"{name}, baseline": partial(baseline, reduction=name) for name in ("mean", "none")}
    functions = losses | {name: partial(token_log_probs, **options) for name, options in LOG_PROBS.items()}
    return {name: partial(step, partial(function, group=case.group)) for name, function in functions.items()}


def check(case: Case, logits: Tensor, labels: Tensor) -> None:
    """Raise unless every call's first rows agree with the reference implementation's."""
    eps = torch.finfo(case.dtype).eps
    for functions, table in ((vocab_parallel_cross_entropy, OPTIONS), (token_log_probs, LOG_PROBS)):
        for options in table.values():
            results = []
            for impl in ("auto", "reference"):
                shard = as_produced(logits[:CHECKED_ROWS].clone())
                function = partial(functions, group=case.group, impl=impl, **options)
                results.append(step(function, shard, labels[:CHECKED_ROWS]))
            for actual, expected in zip(*results, strict=True):
                rtol = max(1e-4, eps if actual.dtype == case.dtype else 0.0)
                torch.testing.assert_close(actual, expected, rtol=2 * rtol, atol=2e-5)


def measure(
    baseline: Callable[..., Any] | None, case: Case, rounds: int, progress: tqdm
) -> list[dict[str, Any]]:
    """One row of results for each call."""
    source, labels = case.inputs()
    check(case, source, labels)
    out = torch.empty_like(source)
    buffers = [source.clone() for _ in range(BUFFERS)]
    steps = steps_of(case, baseline)

    def copies() -> None:
        for _ in range(BUFFERS):
            out.copy_(source)

    def calls(name: str, all_logits: list[Tensor]) -> None:
        for logits in all_logits:
            steps[name](logits, labels)

    times: dict[str, list[float]] = {name: [] for name in ("copy", *steps)}
    for round_index in range(rounds + 2):  # two rounds warm up
        for name, series in times.items():
            for buffer in buffers:
                buffer.copy_(source)
            run = copies if name == "copy" else partial(calls, name, list(map(as_produced, buffers)))
            elapsed = milliseconds(run, queued=True) / BUFFERS
            if round_index >= 2:
                series.append(elapsed)
        progress.update()

    def ratio(name: str, other: str) -> float:
        pairs = zip(times[name], times[other], strict=True)
        return round(statistics.median(a / b for a, b in pairs), 3)

    extra = {
        name: extra_peak_bytes(partial(run, as_produced(buffers[0]), labels)) for name, run in steps.items()
    }
    return [
        {
            "rows": case.rows,
            "columns": case.columns,
            "dtype": str(case.dtype).removeprefix("torch."),
            "ranks": case.ranks,
            "call": name,
            "ratio_to_copy": ratio(name, "copy"),
            "ratio_to_plain": ratio(name, "mean" if name.startswith(("mean", "sum")) else "none"),
            "microseconds": round(1e3 * statistics.median(times[name]), 1),
            "extra_peak_bytes_per_row": round(extra[name] / case.rows, 2),
            "logits_bytes_per_row": case.columns * source.element_size(),
        }
        for name in steps
    ]


def line_of(result: dict[str, Any]) -> str:
    return (
        f"{result['call']:26s}  {result['ratio_to_copy']:6.3f} x copy  "
        f"{result['ratio_to_plain']:6.3f} x plain  {result['microseconds']:8.1f} us  "
        f"{result['extra_peak_bytes_per_row']:6.1f} B/row"
    )


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--baseline", type=Path, metavar="DIR", help="another checkout of this project")
    options = parser.parse_args()
    baseline = baseline_loss(options.baseline) if options.baseline else None
    run_benchmark(options, SHAPES, torch.bfloat16, partial(measure, baseline), line_of)


if __name__ == "__main__":
    main()
