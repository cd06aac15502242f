"""Measures the losses beside other projects', and reports what was measured.

    python scripts/bench.py table                           the loss over logits: the targets' shapes
    torchrun --nproc-per-node 2 scripts/bench.py table      the vocabulary over two GPUs
    python scripts/bench.py options --baseline DIR          what each option costs; the loss of a checkout DIR
    python scripts/bench.py linear                          the head and the loss together
    python scripts/bench.py report --write                docs/performance.md, the README's block, its picture
    python scripts/bench.py compare OLD.json NEW.json       the ratios of two runs

``docs/performance.md`` says how it is measured. A machine without a GPU can try a run on small shapes.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import warnings
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from bench_lib import cases, plot, report
from bench_lib.documents import RESULTS, ROOT, host_description, read_documents, write_document
from bench_lib.measure import LinearSubject, LogitsSubject, Result, Subject, attempt, measure
from bench_lib.options import option_providers
from bench_lib.profile import profiled
from bench_lib.providers import LINEAR_PROVIDERS, LOGITS_PROVIDERS, Provider, chosen
from bench_lib.timing import DeviceTimer, Ranks, joined_ranks
from tqdm import tqdm

MEMORY_PROVIDERS = f"{cases.OURS},torch eager,liger-kernel,cut-cross-entropy"


def arguments(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    measured = argparse.ArgumentParser(add_help=False)
    measured.add_argument("--shape", action="append", metavar="RxC", help="instead of the table's")
    measured.add_argument(
        "--providers", metavar="NAMES", help="comma-separated; all stands for the default ones"
    )
    measured.add_argument("--rounds", type=int, default=15, help="timed rounds of each case")
    measured.add_argument("--json", type=Path, metavar="PATH", help="write the document here")
    table = commands.add_parser(
        "table", parents=[measured], help="the loss over logits; C: one rank's columns"
    )
    table.add_argument("--sweep", choices=cases.SWEEPS)
    table.add_argument("--graphs", choices=("ours", "all"), default="ours", help="whose CUDA graphs to time")
    options = commands.add_parser("options", parents=[measured], help="each option; C: one rank's columns")
    options.add_argument("--baseline", type=Path, metavar="DIR", help="another checkout of this project")
    linear = commands.add_parser("linear", parents=[measured], help="shapes TOKENSxVOCABULARY[xHIDDEN]")
    what = linear.add_mutually_exclusive_group()
    what.add_argument("--memory-curve", action="store_true", help="only peak memory against tokens")
    what.add_argument("--profile", action="store_true", help="only what overlaps in one case of this project")
    for command in (table, linear):
        command.add_argument("--reduction", choices=cases.REDUCTIONS)
    pages = commands.add_parser("report", help="prints the page; --write writes it")
    how = pages.add_mutually_exclusive_group()
    how.add_argument("--write", action="store_true", help="the page, the README's block and the picture")
    how.add_argument("--check", action="store_true", help="exit with 1 and name what is stale")
    pages.add_argument("--root", type=Path, default=ROOT, help="the folder of README.md and docs/")
    pages.add_argument("--results", type=Path, default=RESULTS, help="the folder of the documents")
    comparison = commands.add_parser("compare", help="the ratios of two runs")
    comparison.add_argument("documents", type=Path, nargs=2, metavar=("OLD", "NEW"))
    return parser.parse_args(words)


def quiet() -> None:
    """Silence other projects' warnings, which say nothing about a time."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)


def present(known: Sequence[Provider], names: str | None, ranks: Ranks, document: Result) -> list[Provider]:
    """The providers that run here; the document has their versions, and why the others are absent."""
    wanted = chosen(names, known)
    absent = {provider.name: provider.absent(ranks.size) for provider in wanted}
    quiet()  # an import may have set warning filters
    document["absent"] = {name: reason for name, reason in absent.items() if reason is not None}
    found = [provider for provider in wanted if absent[provider.name] is None]
    document["host"]["providers"] = {provider.name: provider.version for provider in found}
    return found


def measure_cases(options: argparse.Namespace, ranks: Ranks, document: Result) -> None:
    """Fill the document's ``results``, or ``points`` of the memory curve, case by case."""
    timer, size, rounds = ranks.timer(), ranks.size, options.rounds
    key = "results"
    found: list[cases.Case] = []
    if options.command == "table":
        providers = present(LOGITS_PROVIDERS, options.providers, ranks, document)
        found += cases.logits_cases(size, options.shape, options.sweep, options.reduction)
    elif options.command == "options":
        providers = present(option_providers(options.baseline), options.providers, ranks, document)
        shapes = options.shape or (cases.OPTIONS_SHAPES if size == 1 else [f"4096x{128256 // size}"])
        found += cases.logits_cases(size, shapes, None, cases.OPTIONS)
    elif options.memory_curve:
        key, names = "points", options.providers or MEMORY_PROVIDERS
        providers = present(LINEAR_PROVIDERS, names, ranks, document)
        found += cases.linear_cases(size, options.shape or cases.MEMORY_SHAPES, options.reduction or "mean")
    else:
        providers = present(LINEAR_PROVIDERS, options.providers, ranks, document)
        found += cases.linear_cases(size, options.shape, options.reduction)
    if not found:
        raise SystemExit(f"bench: no case of this reduction for {size} ranks: pass --shape")
    document[key] = []
    for case in tqdm(found, unit="case", disable=not ranks.is_first):
        subject = subject_of(case, ranks, rounds)
        if key == "points":
            document[key] += memory_points(subject, providers, timer)
        else:
            document[key] += measure(subject, providers, timer, getattr(options, "graphs", "none"))
        del subject  # before the next case takes memory
        if ranks.is_first:
            write_document(document, options.json)


def subject_of(case: cases.Case, ranks: Ranks, rounds: int) -> Subject:
    effort = case.effort(rounds)
    if isinstance(case, cases.LinearCase):
        return LinearSubject(case, ranks, effort)
    # What an option costs the host is not asked.
    return LogitsSubject(
        case, ranks, effort._replace(eager_calls=0) if case.reduction == cases.OPTIONS else effort
    )


def memory_points(subject: Subject, providers: Sequence[Provider], timer: DeviceTimer) -> list[Result]:
    case, points = subject.case, []
    assert isinstance(case, cases.LinearCase)
    for provider in providers:
        found = attempt(subject, provider, timer)
        if "memory" in found:
            found["extra_peak_bytes"] = found.pop("memory")
        point = case._asdict() | {"provider": provider.name, "gradient_bytes": case.gradient_bytes}
        points.append(point | found)
    return points


def measure_profile(options: argparse.Namespace, ranks: Ranks, document: Result) -> None:
    (provider,) = present(LINEAR_PROVIDERS, options.providers or cases.OURS, ranks, document)
    shapes = options.shape or [cases.PROFILE_SHAPE]
    (case,) = cases.linear_cases(ranks.size, shapes, options.reduction or "mean")
    subject = subject_of(case, ranks, options.rounds)
    run = partial(subject.call, provider, subject.inputs)
    document["case"] = case._asdict() | {"provider": provider.name}
    document["ranks"] = ranks.gathered(profiled(run, ranks.timer()))


def run(options: argparse.Namespace) -> None:
    """Measure, print one line per result and write the document."""
    quiet()
    with joined_ranks() as ranks:
        document: Result = {"host": host_description(), "finished": False}
        if options.command == "linear" and options.profile:
            measure_profile(options, ranks, document)
        else:
            measure_cases(options, ranks, document)
        document["finished"] = True
        if ranks.is_first:
            write_document(document, options.json)
            for result in document.get("results") or document.get("points") or document["ranks"]:
                print("  ".join(f"{name}={value}" for name, value in result.items()))
            for name, reason in document["absent"].items():
                print(f"absent: {name}: {reason}")


def report_command(options: argparse.Namespace) -> int:
    """Print the page, write it with the README's block and the picture, or name what is stale."""
    documents = read_documents(options.results)
    readme_path, picture = options.root / "README.md", options.results / report.PICTURE
    readme = readme_path.read_text(encoding="utf-8")
    texts = {options.root / "docs" / "performance.md": report.page(documents)}
    texts[readme_path] = report.with_block(readme, report.readme_block(documents))
    if options.check:
        stale = [p for p, text in texts.items() if not p.exists() or p.read_text(encoding="utf-8") != text]
        stale += [] if plot.is_drawn_from(picture, documents) else [picture]
        for path in stale:
            print(f"stale: {path.name}; python scripts/bench.py report --write renews it")
        return 1 if stale else 0
    if not options.write:
        print(next(iter(texts.values())))
        return 0
    for path, text in texts.items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
    plot.draw(documents, picture)
    return 0


def main(words: Sequence[str] | None = None) -> int:
    options = arguments(words)
    if options.command == "report":
        return report_command(options)
    if options.command == "compare":
        old, new = (json.loads(path.read_text(encoding="utf-8")) for path in options.documents)
        print(report.compared(old, new))
        return 0
    run(options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
