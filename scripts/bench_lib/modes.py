"""When the gradient is written: is a mode slower than another that may run in its place?"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

from bench_lib.cases import BY_NAME, IN_FORWARD, OURS, Case
from bench_lib.documents import Document, Result, is_timed, results_by_case
from bench_lib.tables import host_line, shown, table

NOISE = 1.02
SCALE_US = 1.5  # of the launch with which backward looks at grad_output: the host does not know that it is 1


class Comparison(NamedTuple):
    """``in_forward`` alongside another mode that may run in its place."""

    case: Case
    other: str
    us: float  # of in_forward
    ratio: float  # over the other's time; over that of the default and a scale
    is_slower: bool


def comparisons(document: Document) -> list[Comparison]:
    """Every case, once for each other mode that was timed in it."""
    found = []
    for case, results in results_by_case(document).items():
        timed = {name: result for name, result in results.items() if is_timed(result)}
        if (chosen := timed.pop(IN_FORWARD, None)) is None:
            continue
        least, us = (1e3 * float(ms) for ms in (chosen.get("ms_quartiles", [chosen["ms"]])[0], chosen["ms"]))
        for name, result in timed.items():
            other = 1e3 * result["ms"] + SCALE_US * (name == OURS)
            found.append(Comparison(case, name, us, us / other, least > NOISE * other))
    return found


def slower(document: Document) -> list[str]:
    """One line per case in which ``in_forward`` is slower than another mode: than the fastest of them."""
    found = [each for each in comparisons(document) if each.is_slower]
    worst = [max(of_case, key=lambda each: each.ratio) for _, of_case in groupby(found, key=lambda each: each.case)]
    return [f"slower: {each.case}: {IN_FORWARD} {each.us:.2f} us, {each.ratio:.2f} x {each.other}" for each in worst]


def fewest_rows(document: Document) -> list[str]:
    """One line per width: the measured rows from which on ``one_pass`` is no slower than ``triton``."""
    triton, one_pass = BY_NAME
    faster: dict[int, list[int]] = {}
    for case, results in sorted(results_by_case(document).items(), reverse=True):
        if is_timed(results.get(triton)) and is_timed(results.get(one_pass)):
            rows = faster.setdefault(case.columns, [])
            is_faster = results[one_pass]["ms"] <= results[triton]["ms"]
            rows.append(case.tokens if is_faster and 0 not in rows else 0)
    return [
        f"one_pass of {n} columns: from {min(filter(None, rows), default='no')} rows on" for n, rows in faster.items()
    ]


def modes_table(cases: dict[Case, dict[str, Result]], names: Sequence[str]) -> str:
    """Microseconds of each of these modes and of the copy."""
    rows = []
    for case, results in cases.items():
        timed = {name: 1e3 * result["ms"] for name, result in results.items() if is_timed(result)}
        copy = next(1e3 * result["yardstick_ms"] for result in results.values() if is_timed(result))
        rows.append([str(case), *(shown("microseconds", us) for us in (copy, *map(timed.get, names)))])
    return table(["tokens x vocabulary", "copy", *names], rows)


def modes_part(document: Document, commit: str | None = None) -> str:
    """In how many cases ``in_forward`` is slower than each other mode, and by how much at most."""
    lines, every = [host_line(document, commit) + "\n"], comparisons(document)
    _, one_pass = BY_NAME
    for other, what in ((OURS, f"the default and {SCALE_US} us"), (one_pass, '`impl="one_pass"`')):
        found = [each for each in every if each.other == other]
        count, worst = sum(each.is_slower for each in found), max(found, key=lambda each: each.ratio)
        lines.append(
            f"- `in_forward` is slower than {what} in {count} of {len(found)} cases. The largest ratio is "
            f"{worst.ratio:.2f}, of {worst.case}."
        )
    return "\n".join(lines)
