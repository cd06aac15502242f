"""Time and memory of the loss, forward and backward, beside a device copy of the same logits.

    python scripts/bench_cross_entropy.py                                  one GPU
    torchrun --nproc-per-node 2 scripts/bench_cross_entropy.py             the vocabulary over two
    python scripts/bench_cross_entropy.py --sweep vocabulary --sweep tokens

This project, PyTorch and other projects' losses that are installed; the others are named with the reason.
Metric: time over that of ``out.copy_(logits)``, one read and one write of the shard, interleaved with it
round by round; the median over the rounds, of the slowest rank. ``ratio`` and ``microseconds`` are the
device's time, with the calls queued before it begins. ``microseconds_eager`` is a call's time in a loop of
calls, the host included; ``microseconds_graph`` a replayed CUDA graph's. Every provider's first rows are
checked against fp64 before it is timed. Logits are no leaf, as in training, and each call has its own; they
are overwritten where a provider can. This project's reduced losses are timed in both ways:
``vocab_parallel_ce`` is the default, ``gradient="auto"``, and ``vocab_parallel_ce[in_forward]`` that mode.

Prints a table, the cost model beside it, and as the last line of standard output one JSON document, which
``--json`` writes too, after every case. Exits with 3 when ``--budget-seconds`` left cases out.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from bench.cases import DTYPES, REDUCTIONS, SWEEPS, Case, Effort, Workload, chosen_workloads
from bench.cost_model import Assumptions, Machine, described_assumptions, predictions
from bench.host import measured_host
from bench.latency import measured_latency
from bench.measure import Result, measure, measure_graphs
from bench.others import PROVIDERS, chosen_providers
from bench.providers import Provider
from bench.report import predictions_text, results_text
from bench.runner import Ranks, argument_parser, host_description, joined_ranks, quiet, write_document
from bench.timing import DeviceTimer
from tqdm import tqdm

MISSING_CASES = 3


class Plan(NamedTuple):
    """What one run measures."""

    ranks: Ranks
    workloads: list[Workload]
    providers: list[Provider]
    rounds: int

    def case(self, workload: Workload) -> Case:
        dtype = getattr(torch, workload.dtype)
        return Case(workload.rows, workload.columns, dtype, self.ranks.group, self.ranks.size)

    def effort(self, workload: Workload) -> Effort:
        return Effort.of(workload.shard_bytes, self.rounds)


def arguments() -> argparse.Namespace:
    parser = argument_parser(__doc__)
    names = ", ".join(provider.name for provider in PROVIDERS)
    parser.add_argument("--providers", metavar="NAMES", help=f"comma-separated, or all; of {names}")
    parser.add_argument("--table", action="store_true", help="the targets' shapes; the default")
    parser.add_argument("--sweep", action="append", choices=SWEEPS, default=[])
    parser.add_argument("--dtype", choices=DTYPES)
    parser.add_argument("--reduction", choices=REDUCTIONS)
    parser.add_argument("--graphs", choices=("ours", "all"), default="ours", help="whose CUDA graphs to time")
    parser.add_argument("--budget-seconds", type=float, metavar="S", help="begin no case after this time")
    return parser.parse_args()


def run_plan(plan: Plan, document: dict[str, Any], options: argparse.Namespace, deadline: float) -> None:
    """Fill ``document['results']`` case by case; what the budget left out is ``document['missing']``."""
    results: list[Result] = document["results"]
    with tqdm(plan.workloads, unit="case", disable=not plan.ranks.is_first) as progress:
        for workload in progress:
            progress.set_description(str(workload))
            if is_over(deadline, plan.ranks):
                document["missing"].append(str(workload))
                continue
            results += measure(
                plan.case(workload),
                workload,
                plan.providers,
                DeviceTimer(plan.ranks.size),
                plan.effort(workload),
                graphs_of=lambda provider: provider.is_ours,
            )
            if plan.ranks.is_first:
                write_document(document, options.json)
    if options.graphs == "all":
        add_graphs(plan, document, deadline)


def add_graphs(plan: Plan, document: dict[str, Any], deadline: float) -> None:
    """Other projects' CUDA graphs, after all else: a capture that fails can break what comes after it."""
    results: list[Result] = document["results"]
    with tqdm(plan.workloads, unit="case", disable=not plan.ranks.is_first) as progress:
        for workload in progress:
            progress.set_description(f"graphs, {workload}")
            timed = {
                result["provider"]: result
                for result in results
                if "refused" not in result and all(result[key] == v for key, v in workload._asdict().items())
            }
            others = [p for p in plan.providers if p.name in timed and not p.is_ours]
            if not others:
                continue
            if is_over(deadline, plan.ranks):
                document["missing"].append(f"graphs, {workload}")
                continue
            timer = DeviceTimer(plan.ranks.size)
            found = measure_graphs(plan.case(workload), workload, others, timer, plan.effort(workload))
            for name, numbers in found.items():
                timed[name].pop("graph_error")
                timed[name] |= numbers


def is_over(deadline: float, ranks: Ranks) -> bool:
    """Rank 0's clock decides for all."""
    over = time.monotonic() > deadline
    if ranks.size == 1:
        return over
    verdict = [over]
    dist.broadcast_object_list(verdict, src=0)
    return verdict[0]


def add_predictions(plan: Plan, document: dict[str, Any]) -> None:
    """The cost model's time of every measured point of this project, and for more ranks."""
    ours = {provider.name: provider for provider in plan.providers if provider.is_ours}
    results = [r for r in document["results"] if r["provider"] in ours and "refused" not in r]
    passes = {}
    for result in results:
        workload = Workload(*(result[name] for name in Workload._fields))
        traffic = ours[result["provider"]].traffic(plan.case(workload), workload.reduction)
        key = (*workload, result["provider"])
        passes[key] = traffic.passes
    assumed = Assumptions()
    machine = Machine.of(document["latency"], plan.ranks.size, assumed)
    sizes = {name: getattr(torch, name).itemsize for name in DTYPES}
    document["assumptions"] = described_assumptions(assumed)
    document["predictions"] = predictions(machine, results, passes, sizes)


def print_document(document: dict[str, Any]) -> None:
    print(results_text(document["results"]))
    for name, reason in document["absent"].items():
        print(f"absent: {name}: {reason}")
    print(f"\ncost model; {document['assumptions']}\n{predictions_text(document['predictions'])}")
    print(json.dumps(document), flush=True)


def main() -> int:
    options = arguments()
    began = time.monotonic()
    deadline = began + (options.budget_seconds if options.budget_seconds is not None else float("inf"))
    quiet()
    with joined_ranks() as ranks:
        wanted = chosen_providers(options.providers)
        absent = {provider.name: provider.available(ranks.size) for provider in wanted}
        providers = [provider for provider in wanted if absent[provider.name] is None]
        quiet()  # what was imported may have set filters of its own
        workloads = chosen_workloads(
            ranks.size,
            table=options.table,
            sweeps=options.sweep,
            shapes=options.shape or (),
            dtype=options.dtype,
            reduction=options.reduction,
        )
        plan = Plan(ranks, workloads, providers, options.rounds)
        document: dict[str, Any] = {
            "host": host_description({provider.name: provider.version for provider in providers}),
            "absent": {name: reason for name, reason in absent.items() if reason is not None},
            "latency": measured_latency(ranks.size, ranks.group, ranks.rank),
            "host_microseconds": measured_host(ranks.size, ranks.group),
            "results": [],
            "missing": [],
        }
        run_plan(plan, document, options, deadline)
        add_predictions(plan, document)
        if ranks.is_first:
            write_document(document, options.json)
            print_document(document)
        for case in document["missing"] if ranks.is_first else ():
            print(f"benchmark: not measured within {options.budget_seconds} s: {case}", file=sys.stderr)
    return MISSING_CASES if document["missing"] else 0


if __name__ == "__main__":
    sys.exit(main())
