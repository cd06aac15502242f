"""Time and memory of the linear cross-entropy, forward and backward, beside its three bare matmuls.

    python scripts/bench_linear_cross_entropy.py                              one GPU
    torchrun --nproc-per-node 4 scripts/bench_linear_cross_entropy.py         the vocabulary over four
    python scripts/bench_linear_cross_entropy.py --memory-curve               peak memory against tokens
    torchrun --nproc-per-node 4 scripts/bench_linear_cross_entropy.py --profile

This project, PyTorch and other projects' losses that are installed; the others are named with the reason.
Metric: the device's time over that of ``hidden @ weight.T``, ``grad @ weight`` and ``grad.T @ hidden`` into
memory that is there, on several ranks with the all-reduce of the gradient of hidden behind them, interleaved
round by round; the median over the rounds, of the slowest rank. Extra peak memory includes the gradients.
All of a provider's loss and gradients is compared with fp64 before it is timed: this project must be right,
others are named where they are wrong.

Prints tables, and as the last line of standard output one JSON document, which ``--json`` writes too.
``scripts/plot_linear.py`` draws what ``--memory-curve`` and ``--profile`` write.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from bench.linear_cases import LinearEffort, chosen_cases, make_inputs
from bench.linear_documents import read_targets
from bench.linear_measure import measure_linear
from bench.linear_memory import CURVE_PROVIDERS, curve_cases, measure_memory
from bench.linear_profile import median_step, median_summary, timeline_of, traced_steps
from bench.linear_providers import LINEAR_PROVIDERS, LinearProvider, chosen_linear
from bench.measure import of_all_ranks
from bench.providers import OURS
from bench.runner import ROOT, Ranks, host_description, joined_ranks, quiet, write_document
from bench.timing import DeviceTimer
from report_linear import memory_text, profile_text, results_text
from tqdm import tqdm

PROFILED_CASE = "mean:16384x128256"


def arguments(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    names = ", ".join(provider.name for provider in LINEAR_PROVIDERS)
    parser.add_argument(
        "--cases", metavar="CASES", help="comma-separated, each REDUCTION:TOKENSxVOCABULARY[xD]"
    )
    parser.add_argument("--providers", metavar="NAMES", help=f"comma-separated, or all; of {names}")
    parser.add_argument("--rounds", type=int, default=9, help="timed rounds of each case")
    parser.add_argument(
        "--json", "--output", type=Path, metavar="PATH", help="write the JSON document here as well"
    )
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--memory-curve", action="store_true", help="only extra peak memory against tokens")
    what.add_argument("--profile", action="store_true", help="only what overlaps in one case of this project")
    return parser.parse_args(words)


def run_table(options: argparse.Namespace, ranks: Ranks, document: dict[str, Any]) -> str:
    providers = present(options.providers, ranks, document)
    document["results"] = []
    with tqdm(chosen_cases(options.cases, ranks.size), unit="case", disable=not ranks.is_first) as progress:
        for case in progress:
            progress.set_description(str(case))
            effort, timer = LinearEffort.of(case, options.rounds), DeviceTimer(ranks.size)
            document["results"] += measure_linear(case, ranks.group, ranks.rank, providers, timer, effort)
            if ranks.is_first:
                write_document(document, options.json)
    return results_text(document["results"], read_targets(ROOT / "scripts" / "results"))


def run_memory_curve(options: argparse.Namespace, ranks: Ranks, document: dict[str, Any]) -> str:
    if ranks.size > 1:
        raise SystemExit("benchmark: the memory curve is of one GPU")
    providers = present(options.providers or CURVE_PROVIDERS, ranks, document)
    document["points"] = []
    cases = chosen_cases(options.cases, 1) if options.cases else curve_cases(1)
    for case in tqdm(cases, unit="case"):
        timer = DeviceTimer(ranks.size)
        document["points"] += measure_memory(
            case, ranks.group, ranks.rank, providers, timer, document["points"]
        )
        write_document(document, options.json)
    return memory_text(document["points"], read_targets(ROOT / "scripts" / "results"))


def run_profile(options: argparse.Namespace, ranks: Ranks, document: dict[str, Any]) -> str:
    (provider,) = present(options.providers or OURS, ranks, document)
    (case,) = chosen_cases(options.cases or PROFILED_CASE, ranks.size)
    inputs = make_inputs(case, ranks.rank)
    steps = traced_steps(lambda: provider.call(inputs, case.reduction, ranks.group), DeviceTimer(ranks.size))
    document["case"] = case._asdict() | {"provider": provider.name}
    document["ranks"] = of_all_ranks(median_summary(steps), ranks.group, "cuda")
    document["timeline"] = timeline_of(median_step(steps))
    return profile_text(document)


def present(names: str | None, ranks: Ranks, document: dict[str, Any]) -> list[LinearProvider]:
    """The providers that can be timed; the document says why others cannot, and whose versions these are."""
    wanted = chosen_linear(names)
    reasons = {provider.name: provider.available(ranks.size) for provider in wanted}
    quiet()  # what was imported may have set filters of its own
    providers = [provider for provider in wanted if reasons[provider.name] is None]
    document["absent"] = {name: reason for name, reason in reasons.items() if reason is not None}
    document["host"]["packages"] = {
        provider.distribution: provider.version
        for provider in providers
        if not provider.is_ours and provider.package != "torch"
    }
    return providers


def main() -> int:
    options = arguments()
    quiet()
    run = run_memory_curve if options.memory_curve else run_profile if options.profile else run_table
    with joined_ranks() as ranks:
        document: dict[str, Any] = {"host": host_description(), "finished": False}
        text = run(options, ranks, document)
        document["finished"] = True
        if ranks.is_first:
            write_document(document, options.json)
            print(text)
            for name, reason in document["absent"].items():
                print(f"absent: {name}: {reason}")
            print(json.dumps(document), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
