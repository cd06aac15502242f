"""Runs cases one after the other into one document, and times whole training steps as cases."""

from __future__ import annotations

import argparse
import logging
import warnings
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from torch import Tensor
from tqdm import tqdm

from bench_lib.cases import Effort
from bench_lib.documents import Document, Result, new_document, write_document
from bench_lib.measure import Subject, measure
from bench_lib.oracle import require
from bench_lib.providers import Provider, version_of
from bench_lib.timing import Ranks, Run

SAME_LOSS = 0.02  # of whole steps, relative to the first provider's


class StepSubject(Subject):
    """Whole steps of a model, alongside those of the first provider.

    ``step`` runs one and returns its loss, and ``forget`` drops the gradients.
    """

    def __init__(self, name: str, ranks: Ranks, rounds: int, step: Callable[[], Tensor], forget: Run) -> None:
        super().__init__(name, ranks, {"case": name})
        self.effort = Effort(1, rounds, is_queued=False)
        self.step, self.forget = step, forget
        self._first: float | None = None

    def call(self, provider: Provider, inputs: Any) -> tuple[Tensor, ...]:
        return (self.step(),)

    def operands(self, count: int, *, fresh: bool) -> list[Any]:
        self.forget()
        return [None] * count

    def check(self, provider: Provider) -> Result:
        self.forget()
        loss = float(self.step().detach())
        self._first = loss if self._first is None else self._first
        require({"loss": abs(loss - self._first) / max(abs(self._first), 1e-6)}, (SAME_LOSS,))
        return {"loss": loss}


def parser_of(description: str | None, rounds: int = 10, *, add_help: bool = True) -> argparse.ArgumentParser:
    """Return a parser of the arguments that all scripts of steps have."""
    lines = argparse.RawTextHelpFormatter
    parser = argparse.ArgumentParser(description=description, formatter_class=lines, add_help=add_help)
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the document here")
    return parser


def quiet() -> None:
    """Silence other projects' warnings, which say nothing about a time."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)


def run(
    document: Document,
    cases: Iterable[Any],
    measure_case: Callable[[Any], list[Result]],
    ranks: Ranks,
    path: Path | None,
) -> None:
    """Fill the document case by case; the first rank shows each, and writes what there is until then."""
    quiet()
    for case in tqdm(list(cases), unit="case", disable=not ranks.is_first):
        found = measure_case(case)
        document["results"] += found
        if ranks.is_first:
            write_document(document, path)
            show(found)
    document["finished"] = True
    if ranks.is_first:
        write_document(document, path)
        for name, reason in document["absent"].items():
            print(f"absent: {name}: {reason}")


def show(results: Iterable[Result]) -> None:
    for result in results:
        print("  ".join(f"{name}={value}" for name, value in result.items()), flush=True)


def document_of(kind: str, modules: Mapping[str, str], rounds: int | None = None) -> Document:
    """Return the beginning of a document, with the versions of the packages that have these ``modules``."""
    document = new_document(kind, rounds)
    document["host"]["packages"] = {package: version_of(package, module) for package, module in modules.items()}
    return document


def measured(
    case: str,
    contexts: Mapping[str, Callable[[], AbstractContextManager[Any]]],
    step: Callable[[], Tensor],
    forget: Run,
    ranks: Ranks,
    rounds: int,
) -> list[Result]:
    """Return the results of one case: steps in the context of each provider, by name.

    Args:
        step: runs one step and returns its loss.
        forget: drops the gradients; not timed.
    """
    providers = [
        Provider(name, lambda m: None, "torch", "torch", is_step=True, context=context)
        for name, context in contexts.items()
    ]
    return measure(StepSubject(case, ranks, rounds, step, forget), providers, ranks.timer())
