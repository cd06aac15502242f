"""Measures the losses beside other projects', and reports what was measured.

``docs/performance.md`` says how it is measured, and with which commands. ``torchrun --nproc-per-node R`` in
place of ``python`` cuts the vocabulary over R GPUs. A machine without a GPU can try a run on small shapes, such
as ``--shape 64x512``.
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

from bench_lib import cases, pages, plot, report
from bench_lib.documents import RESULTS, ROOT, host_description, read_documents, read_steps, write_document
from bench_lib.measure import Result, attempt, measure, subject_of
from bench_lib.options import option_providers
from bench_lib.profile import profiled
from bench_lib.providers import LINEAR_PROVIDERS, LOGITS_PROVIDERS, Provider, chosen
from bench_lib.timing import Ranks, joined_ranks
from tqdm import tqdm

MEMORY_PROVIDERS = f"{cases.OURS},torch eager,liger-kernel,cut-cross-entropy"


def arguments(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    measured = argparse.ArgumentParser(add_help=False)
    measured.add_argument("--shape", action="append", metavar="RxC", help="instead of the table's")
    measured.add_argument("--providers", metavar="NAMES", help="comma-separated; all: the default ones")
    measured.add_argument("--rounds", type=int, default=15, help="timed rounds of each case")
    measured.add_argument("--json", type=Path, metavar="PATH", help="write the document here")
    table = commands.add_parser("table", parents=[measured], help="the loss over logits; C: a rank's columns")
    table.add_argument("--sweep", choices=cases.SWEEPS)
    table.add_argument("--graphs", choices=("ours", "all"), default="ours", help="whose CUDA graphs to time")
    options = commands.add_parser("options", parents=[measured], help="each option; C: a rank's columns")
    options.add_argument("--baseline", type=Path, metavar="DIR", help="another checkout of this project")
    linear = commands.add_parser("linear", parents=[measured], help="shapes TOKENSxVOCABULARY[xHIDDEN]")
    what = linear.add_mutually_exclusive_group()
    what.add_argument("--memory-curve", action="store_true", help="only peak memory against tokens")
    what.add_argument("--profile", action="store_true", help="only what overlaps in one case of this project")
    for command in (table, linear):
        command.add_argument("--reduction", choices=cases.REDUCTIONS)
    pages = commands.add_parser("report", help="prints the page; --write writes it")
    how = pages.add_mutually_exclusive_group()
    how.add_argument("--write", action="store_true", help="the page, the tables of the others and the picture")
    how.add_argument("--check", action="store_true", help="exit with 1 and name what is stale")
    pages.add_argument("--root", type=Path, default=ROOT, help="the folder of README.md and docs/")
    pages.add_argument("--results", type=Path, default=RESULTS, help="the folder of the documents")
    comparison = commands.add_parser("compare", help="the ratios of two runs")
    comparison.add_argument("old", type=Path, help="a document, as --json writes it")
    comparison.add_argument("new", type=Path, help="another, of the same command")
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


def setting(options: argparse.Namespace, size: int) -> tuple[Sequence[Provider], Sequence[cases.Case]]:
    """The command's providers and cases."""
    shapes = options.shape
    if options.command == "table":
        return LOGITS_PROVIDERS, cases.logits_cases(size, shapes, options.sweep, options.reduction)
    if options.command == "options":
        shapes = shapes or (cases.OPTIONS_SHAPES if size == 1 else [f"4096x{128256 // size}"])
        return option_providers(options.baseline), cases.logits_cases(size, shapes, None, cases.OPTIONS)
    if options.memory_curve or options.profile:
        options.providers = options.providers or (cases.OURS if options.profile else MEMORY_PROVIDERS)
        options.reduction = options.reduction or "mean"
        shapes = shapes or (cases.MEMORY_SHAPES if options.memory_curve else [cases.PROFILE_SHAPE])
    return LINEAR_PROVIDERS, cases.linear_cases(size, shapes, options.reduction)


def measure_cases(options: argparse.Namespace, ranks: Ranks, document: Result) -> None:
    """Fill the document case by case, and write it after each."""
    known, found = setting(options, ranks.size)
    if not found:
        raise SystemExit(f"bench: no case of this reduction for {ranks.size} ranks: pass --shape")
    providers, timer = present(known, options.providers, ranks, document), ranks.timer()
    for case in tqdm(found, unit="case", disable=not ranks.is_first):
        subject = subject_of(case, ranks, options.rounds)
        if getattr(options, "profile", False):
            document["case"] = case._asdict() | {"provider": providers[0].name}
            step = partial(subject.call, providers[0], subject.inputs)
            document["ranks"] = ranks.gathered(profiled(step, timer))
        elif getattr(options, "memory_curve", False):
            for provider in providers:
                point = case._asdict() | {"provider": provider.name, "gradient_bytes": case.gradient_bytes}
                document.setdefault("points", []).append(point | attempt(subject, provider, timer))
        else:
            results = measure(subject, providers, timer, getattr(options, "graphs", "none"))
            document.setdefault("results", []).extend(results)
        del subject  # before the next case takes memory
        if ranks.is_first:
            write_document(document, options.json)


def run(options: argparse.Namespace) -> None:
    """Measure, print one line per result and write the document."""
    quiet()
    with joined_ranks() as ranks:
        document: Result = {"host": host_description(), "finished": False}
        measure_cases(options, ranks, document)
        document["finished"] = True
        if ranks.is_first:
            write_document(document, options.json)
            for result in document.get("results") or document.get("points") or document["ranks"]:
                print("  ".join(f"{name}={value}" for name, value in result.items()))
            for name, reason in document["absent"].items():
                print(f"absent: {name}: {reason}")


def report_command(options: argparse.Namespace) -> int:
    """Print the page, write it with the tables of the other pages and the picture, or name what is stale."""
    documents, picture = read_documents(options.results), options.results / report.PICTURE
    page, readme = options.root / "docs" / "performance.md", options.root / "README.md"
    texts = {page: report.page(documents)}
    made = pages.blocks(documents, read_steps(options.results))
    for path in (readme, *sorted(page.parent.glob("*.md"))):
        if path != page:
            text = path.read_text(encoding="utf-8")
            needed = ("speed", "head", "frameworks") if path == readme else ()
            texts[path] = pages.with_blocks(text, made, path.name, needed)
    if options.check:
        stale = [p for p, text in texts.items() if not p.exists() or p.read_text(encoding="utf-8") != text]
        stale += [] if plot.is_drawn_from(picture, documents) else [picture]
        for path in stale:
            print(f"stale: {path.name}; python scripts/bench.py report --write renews it")
        return 1 if stale else 0
    if not options.write:
        print(texts[page])
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
        documents = (json.loads(path.read_text(encoding="utf-8")) for path in (options.old, options.new))
        print(report.compared(*documents))
        return 0
    run(options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
