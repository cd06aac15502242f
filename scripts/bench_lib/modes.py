"""When the gradient is written: is a mode slower than another that may run in its place?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from bench_lib.cases import BY_NAME, IN_FORWARD, OURS, Case
from bench_lib.documents import Document, Result, is_timed, results_by_case
from bench_lib.report import host_line, shown, table

NOISE = 1.02
SCALE_US = 1.5  # of the launch with which backward looks at grad_output: the host does not know that it is 1


class Slower(NamedTuple):
    """A case in which ``in_forward`` takes longer than another mode that may run in its place."""

    case: Case
    us: float  # of in_forward
    ratio: float  # over the other mode's time
    other: str


def found_slower(document: Document) -> list[Slower]:
    """Return the cases in which ``in_forward`` takes longer than its other ways, or than the default and a scale."""
    found = []
    for case, results in results_by_case(document).items():
        times = {name: 1e3 * result["ms"] for name, result in results.items() if is_timed(result)}
        if OURS in times:
            times[OURS] += SCALE_US
        chosen = times.pop(IN_FORWARD, 0.0)
        name = min(times, key=lambda other: times[other], default=IN_FORWARD)
        least = 1e3 * results[IN_FORWARD].get("ms_quartiles", [chosen / 1e3])[0] if chosen else 0.0
        if least > NOISE * times.get(name, least):
            found.append(Slower(case, chosen, chosen / times[name], name))
    return found


def slower(document: Document) -> list[str]:
    """One line per case that is found slower."""
    found = found_slower(document)
    return [f"slower: {each.case}: {IN_FORWARD} {each.us:.2f} us, {each.ratio:.2f} x {each.other}" for each in found]


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
    """In how many cases ``in_forward`` is slower than each of the others, and by how much at most."""
    found, parts = found_slower(document), []
    for other in sorted({each.other for each in found}):
        worst = max((each for each in found if each.other == other), key=lambda each: each.ratio)
        count = sum(each.other == other for each in found)
        name = f"`{other}`" + (f" and {SCALE_US} us" if other == OURS else "")
        parts.append(f"in {count} than {name}, up to {worst.ratio:.2f} times its time ({worst.case})")
    said = f"Of {len(results_by_case(document))} cases, `{IN_FORWARD}` is slower {'; '.join(parts) or 'in none'}."
    return f"{host_line(document, commit)} {said}"
