"""This project beside the other providers of a run, and a run beside an earlier one. Pure functions."""

from __future__ import annotations

from collections.abc import Sequence

from bench.documents import (
    IN_FORWARD,
    OURS,
    WAYS,
    Case,
    Document,
    Result,
    gradient_of,
    has_both_ways,
    is_ours,
    is_timed,
    results_by_case,
)
from bench.texts import shown

COMPARED = {
    "ratio": "Device time, over the copy",
    "microseconds_eager": "Eager, in us",
    "microseconds_graph": "CUDA graph, in us",
}


def number(result: Result | None, metric: str) -> float | None:
    """What a bound of ``metric`` is compared with; None where it was not timed."""
    return result[metric] if result is not None and is_timed(result) else None


def ways_of(case: Case, results: dict[str, Result]) -> list[str]:
    """This project's ways to compute ``case``: one, or for a reduced loss both."""
    return [way for way in WAYS if way == OURS or (way in results and case.reduction != "none")]


def best_other(results: dict[str, Result], metric: str) -> tuple[list[str], float | None]:
    """The providers besides this project whose shown ``metric`` is the lowest, and its value."""
    values = {
        provider: result[metric]
        for provider, result in results.items()
        if not is_ours(provider) and is_timed(result) and result[metric] is not None
    }
    if not values:
        return [], None
    best = min(values.values())
    return [name for name, value in values.items() if shown(metric, value) == shown(metric, best)], best


def our_best(results: dict[str, Result], metric: str, ways: Sequence[str]) -> float | None:
    """The lowest ``metric`` of those of ``ways`` that were timed."""
    values = [number(results.get(way), metric) for way in ways]
    return min((value for value in values if value is not None), default=None)


def cases_where_others_win(
    cases: dict[Case, dict[str, Result]], metric: str, ways: Sequence[str]
) -> list[str]:
    """The cases in which another provider's shown ``metric`` is below the lowest of ``ways``, with both."""
    lost = []
    for case, results in cases.items():
        others, other = best_other(results, metric)
        ours = our_best(results, metric, ways)
        if other is None:
            continue
        if ours is None or float(shown(metric, other)) < float(shown(metric, ours)):
            here = "not timed here" if ours is None else f"here {shown(metric, ours)}"
            lost.append(f"{case} ({', '.join(others)} {shown(metric, other)}, {here})")
    return lost


def who_wins(cases: dict[Case, dict[str, Result]], ways: Sequence[str] = (OURS,)) -> str:
    """One sentence a way of timing, for the cases in which none of this project's ``ways`` is the fastest."""
    sentences = []
    for metric, name in COMPARED.items():
        compared = {case: results for case, results in cases.items() if best_other(results, metric)[0]}
        lost = cases_where_others_win(compared, metric, ways)
        if not compared:
            sentences.append(f"{name}: no other provider was timed.")
        elif lost:
            count = f"{len(lost)} of {len(compared)}"
            sentences.append(f"{name}: another provider is faster in {count} cases: {'; '.join(lost)}.")
        else:
            sentences.append(f"{name}: no other provider is faster in any of {len(compared)} cases.")
    return " ".join(sentences)


def comparison_text(document: Document, cases: dict[Case, dict[str, Result]]) -> str:
    """Who is faster than this project; where it has two ways, than the faster one, and than its default."""
    if not has_both_ways(document):
        return who_wins(cases)
    reduced = {case: results for case, results in cases.items() if len(ways_of(case, results)) > 1}
    return (
        f"The other providers beside the faster of `{OURS}` and `{IN_FORWARD}`: {who_wins(cases, WAYS)}\n\n"
        f"Beside the default `{OURS}` alone, in the {len(reduced)} cases that have both: {who_wins(reduced)}"
    )


def earlier_default(sweep: Document, others: Sequence[Document]) -> str:
    """What must be said of a sweep beside newer documents, which have both ways."""
    is_earlier = any(
        result["provider"] == OURS and result["reduction"] != "none" and gradient_of(result) == "in_forward"
        for result in sweep["results"]
    )
    if not is_earlier or not any(map(has_both_ways, others)):
        return ""
    return f"The default of a mean was in_forward then: its `{OURS}` is what `{IN_FORWARD}` is above."


def compared_runs(old: Document, new: Document) -> str:
    """Both runs' ratios of what this project computes in the same way, case by case, and their difference.

    Results are of the same way if the gradient is written at the same time: a mean in forward was the default
    once, and is then compared with ``IN_FORWARD``.
    """
    lines = [f"{'case':36} {'provider':30} {'old':>7} {'new':>7} {'difference':>11}"]
    before = results_by_case(old)
    for case, results in results_by_case(new).items():
        for way in ways_of(case, results):
            same = [
                result
                for name, result in before.get(case, {}).items()
                if name in WAYS and gradient_of(result) == gradient_of(results[way])
            ]
            was, now = number(same[0] if same else None, "ratio"), number(results[way], "ratio")
            ratios = " ".join(f"{'-' if ratio is None else format(ratio, '.3f'):>7}" for ratio in (was, now))
            change = "-" if was is None or now is None else f"{100 * (now / was - 1):+.1f} %"
            lines.append(f"{case!s:36} {way:30} {ratios} {change:>11}")
    return "\n".join(lines)
