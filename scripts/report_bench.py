"""The README's tables of measured times, as text, from the documents that ``bench_cross_entropy.py`` writes.

``scripts/plot_bench.py`` is the command. Pure functions.

Providers are compared at the decimals that a table shows, and equals there are both winners; a target is
compared with the number itself. What a provider was not timed for is "-" with its reason; a case that one of
a document's providers neither was timed for nor refused is an error.
"""

from __future__ import annotations

import math
import re
from typing import NamedTuple

from bench.comparison import best_other, comparison_text, number, ways_of
from bench.documents import (
    IN_FORWARD,
    OURS,
    SHORT_DTYPES,
    TABLES,
    WAYS,
    Case,
    Document,
    Result,
    has_both_ways,
    is_timed,
    our_result,
    package_versions,
    point_case,
    providers_of,
    results_by_case,
)
from bench.texts import bold, decimals, microseconds, table

NOTHING = "No measurements committed."

BOUNDS = {
    "ratio": "{} x copy",
    "microseconds": "{} us",
    "ratio_eager": "{} x copy eager",
    "microseconds_eager": "{} us eager",
    "ratio_graph": "{} x copy in a CUDA graph",
    "microseconds_graph": "{} us in a CUDA graph",
}
BOTH_WAYS = (
    f'`{OURS}` is the default, `gradient="auto"`, which is in backward; the rows "in_forward" and the column '
    f'`{IN_FORWARD}` are `gradient="in_forward"`, asked for by name.'
)
NOT_ASKED_FOR = "not asked for"
WAITS = "waits for the device: its time has the host's in it"
KERNEL_ALONE = {
    "quack-kernels (kernel alone)": "loss and gradient of one launch, without autograd and the mean's weight"
}
TERMINAL_COLOURS = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
REASON_LENGTH = 200


class Notes:
    """What must be said of cells of the tables, numbered in the order of its first use."""

    def __init__(self) -> None:
        self._providers: dict[str, list[str]] = {}

    def mark(self, provider: str, text: str) -> str:
        providers = self._providers.setdefault(text, [])
        providers += [] if provider in providers else [provider]
        return f"({list(self._providers).index(text) + 1})"

    def dash(self, provider: str, kind: str, reason: str) -> str:
        return f"- {self.mark(provider, f'{kind}: {one_line(reason)}')}"

    def lines(self) -> list[str]:
        return [
            f"({number}) {', '.join(providers)}, {text}"
            for number, (text, providers) in enumerate(self._providers.items(), start=1)
        ]


def one_line(reason: str) -> str:
    """An error's text as code of one line of Markdown, which can then hold no markup of its own."""
    reason = TERMINAL_COLOURS.sub("", reason).encode("ascii", "replace").decode().replace("`", "'")
    words = " ".join(reason.split())
    return f"`{words if len(words) <= REASON_LENGTH else words[:REASON_LENGTH] + '...'}`"


def host_line(document: Document) -> str:
    host = document["host"]
    gpus = f"{host['gpus_used']} x {host['gpu']}"
    versions = f"torch {host['torch']}, Triton {host['triton']}, CUDA {host['cuda']}, Python {host['python']}"
    return f"{gpus}; {versions}; {', '.join(package_versions(document))}; commit {host['commit'][:12]}."


class Bounds(NamedTuple):
    """What a case must reach, and which of this project's ways must reach it."""

    provider: str
    at_most: dict[str, float]  # by the result's field


def bounds_by_case(targets: Document) -> dict[Case, Bounds]:
    """The bounds of each case that has some."""
    return {
        Case(
            target["reduction"],
            target["rows"],
            target["vocabulary"] // target["ranks"],
            target["ranks"],
            target["dtype"],
        ): Bounds(target.get("provider", OURS), target["at_most"])
        for target in targets["cases"]
    }


def verdict(value: float | None, bound: float) -> str:
    if value is None:
        return "not measured"
    return "met" if value <= bound else f"missed by {100 * (value / bound - 1):.1f} %"


def bound_text(metric: str, bound: float) -> str:
    return "<= " + BOUNDS[metric].format(f"{bound:.2f}" if metric.startswith("ratio") else f"{bound:g}")


def ratio_cell(provider: str, result: Result, lowest: str, notes: Notes) -> str:
    ratio = decimals(result["ratio"])
    return bold(ratio, ratio == lowest) + ("" if result["queued"] else f" {notes.mark(provider, WAITS)}")


def graph_cell(result: Result, notes: Notes) -> str:
    if result["microseconds_graph"] is not None:
        return microseconds(result["microseconds_graph"])
    reason = result.get("graph_error", NOT_ASKED_FOR)
    return "-" if reason == NOT_ASKED_FOR else notes.dash(result["provider"], "CUDA graph", reason)


def predicted_cell(document: Document, case: Case, provider: str) -> str:
    for point in document["predictions"]:
        if point_case(point) == case and point["provider"] == provider and point["error_percent"] is not None:
            return f"{microseconds(point['predicted_microseconds'])} ({point['error_percent']:+.0f} %)"
    return "-"


def main_rows(
    document: Document, case: Case, results: dict[str, Result], targets: Document, notes: Notes
) -> list[list[str]]:
    """This project's numbers of one case, a row for each of its ways, its target, the best of the others."""
    ways = ways_of(case, results)
    others, other_ratio = best_other(results, "ratio")
    ratios = [number(results[way], "ratio") for way in ways] + [other_ratio]
    lowest = decimals(min((ratio for ratio in ratios if ratio is not None), default=math.inf))
    best = "-"
    if other_ratio is not None:
        best = f"{', '.join(others)} {bold(decimals(other_ratio), decimals(other_ratio) == lowest)}"
    bounds = bounds_by_case(targets).get(case, Bounds(OURS, {}))
    rows = []
    for way in ways:
        reached = []
        if way == bounds.provider or bounds.provider not in ways:
            result = our_result(results, bounds.provider)
            reached = [
                f"{bound_text(metric, bound)}: {verdict(number(result, metric), bound)}"
                for metric, bound in bounds.at_most.items()
            ]
        numbers = number_cells(document, case, results[way], lowest, targets, notes)
        rows.append([str(case) + ", in_forward" * (way == IN_FORWARD), *numbers, "; ".join(reached), best])
    return rows


def number_cells(
    document: Document, case: Case, ours: Result, lowest: str, targets: Document, notes: Notes
) -> list[str]:
    """The numbers of one of this project's results."""
    provider = ours["provider"]
    if not is_timed(ours):
        return [notes.dash(provider, "refused", ours["refused"])] * 6
    memory, below = ours["extra_peak_bytes_per_row"], targets["extra_peak_bytes_per_row_below"]
    return [
        ratio_cell(provider, ours, lowest, notes),
        microseconds(ours["microseconds"]),
        predicted_cell(document, case, provider),
        microseconds(ours["microseconds_eager"]),
        graph_cell(ours, notes),
        f"{memory:.1f}" + ("" if memory < below else f" (must be < {below})"),
    ]


def provider_row(case: Case, results: dict[str, Result], providers: list[str], notes: Notes) -> list[str]:
    """Every provider's ratio in one case."""
    lowest = decimals(min((r["ratio"] for r in results.values() if is_timed(r)), default=math.inf))
    cells = [str(case)]
    for provider in providers:
        if provider not in results:
            raise ValueError(f"{case}: expected a result or a refusal of {provider}, got neither")
        result = results[provider]
        if is_timed(result):
            cells.append(ratio_cell(provider, result, lowest, notes))
        else:
            cells.append(notes.dash(provider, "refused", result["refused"]))
    return cells


def spread_text(cases: dict[Case, dict[str, Result]]) -> str:
    """How far this project's ratios are apart over the rounds."""
    spreads = []
    for results in cases.values():
        for result in (results[way] for way in WAYS if way in results and is_timed(results[way])):
            least, most = result["ratio_spread"]
            spreads.append((most - least) / result["ratio"])
    return f"{OURS}'s ratios are at most {100 * max(spreads, default=0):.1f} % apart over the rounds."


def columns_of(document: Document) -> list[str]:
    """The providers of the second table: without this project's second way where nothing has two."""
    providers = providers_of(document)
    return [name for name in providers if name != IN_FORWARD or has_both_ways(document)]


def notes_text(document: Document, notes: Notes) -> str:
    """What the numbers in brackets stand for, and what was not timed at all."""
    reasons: dict[str, list[str]] = {}
    left_out = [name for name in providers_of(document) if name not in columns_of(document)]
    refused = {r["provider"]: r["refused"] for r in document["results"] if r["provider"] in left_out}
    for provider, reason in [*refused.items(), *document["absent"].items()]:
        reasons.setdefault(one_line(reason), []).append(provider)
    lines = notes.lines()
    lines += [f"{name}: {text}" for name, text in KERNEL_ALONE.items() if name in providers_of(document)]
    lines += [f"{', '.join(providers)}, not timed: {reason}" for reason, providers in reasons.items()]
    missing = document["missing"]
    lines += [f"not measured within the run's time: {', '.join(missing)}"] if missing else []
    return f"{'; '.join(lines)}." if lines else ""


def host_time_text(document: Document) -> str:
    """What of an eager call of a small shard is autograd's and the communication library's."""
    times = {name: microseconds(time) for name, time in document.get("host_microseconds", {}).items()}
    if not times:
        return ""
    gather = f", the all_gather alone {times['all_gather']} us" if "all_gather" in times else ""
    return (
        f"The host's part, none 1024 x 32000 in a loop of 100 eager calls of this project alone: "
        f"{times['loss']} us; an autograd Function that does nothing {times['nothing']} us{gather}. With "
        f"`torch.autograd.set_multithreading_enabled(False)`, whose backward runs in the caller's thread: "
        f"{times['loss_one_thread']} and {times['nothing_one_thread']} us."
    )


def table_part(document: Document, targets: Document) -> str:
    """Both tables of one number of GPUs, and the sentences and notes that belong to them."""
    cases = results_by_case(document)
    for case, results in cases.items():
        if OURS not in results:
            raise ValueError(f"{case}: expected a result of {OURS}, got those of {sorted(results)}")
    notes = Notes()
    shape = "rows x columns"
    if document["host"]["gpus_used"] > 1:
        shape = "rows x columns of a rank (vocabulary)"
    header = [shape, "time / copy", "us", "predicted us", "eager us", "CUDA graph us", "extra B/row"]
    header += ["must reach", "best other"]
    rows = [
        row for case, results in cases.items() for row in main_rows(document, case, results, targets, notes)
    ]
    main = table(header, rows)
    providers = columns_of(document)
    rows = [provider_row(case, results, providers, notes) for case, results in cases.items()]
    every = table(["time / copy", *providers], rows)
    host = f"{host_line(document)} {spread_text(cases)}"
    ways = BOTH_WAYS if has_both_ways(document) else ""
    faster, of_host = comparison_text(document, cases), host_time_text(document)
    parts = [host, ways, main, faster, of_host, every, notes_text(document, notes)]
    return "\n\n".join(filter(None, parts))


def targets_part(documents: dict[str, Document], targets: Document) -> str:
    """How many targets are met over all tables, and which are missed or have no measurement."""
    measured: dict[Case, dict[str, Result]] = {}
    for name in TABLES.values():
        measured |= results_by_case(documents[name]) if name in documents else {}
    missed, unmeasured, count = [], [], 0
    for case, (provider, bounds) in bounds_by_case(targets).items():
        result = our_result(measured[case], provider) if case in measured else None
        of_way = ", in_forward" * (result is not None and result["provider"] == IN_FORWARD)
        name = f"{case}{of_way}, {case.ranks} GPU{'s' * (case.ranks > 1)}"
        for metric, bound in bounds.items():
            count += 1
            value = number(result, metric)
            if value is None:
                unmeasured.append(f"{name} ({bound_text(metric, bound)})")
            elif value > bound:
                missed.append(f"{name} ({bound_text(metric, bound)}: {verdict(value, bound)})")
    lines = [f"{count - len(missed) - len(unmeasured)} of {count} targets are met."]
    if any(map(has_both_ways, documents.values())):
        lines.append(f"Those of a mean are of `{IN_FORWARD}`.")
    lines += [f"Missed: {'; '.join(missed)}."] if missed else []
    lines += [f"Not measured: {'; '.join(unmeasured)}."] if unmeasured else []
    return " ".join(lines)


def predictions_part(documents: dict[str, Document]) -> str:
    """The cost model's time against the number of ranks, from the table that was measured on the most.

    What any table measured stands beside it in brackets.
    """
    names = [name for name in TABLES.values() if name in documents]
    points = documents[names[-1]]["predictions"] if names else []
    measured = {
        point_case(point): point["measured_microseconds"]
        for name in names
        for point in documents[name]["predictions"]
        if point["provider"] == OURS and point["measured_microseconds"] is not None
    }
    shapes = {shape_over_ranks(point) for point in points if point["measured_microseconds"] is None}
    found: dict[tuple[str, int, int, str], dict[int, str]] = {}
    for point in points:
        shape, case = shape_over_ranks(point), point_case(point)
        if shape in shapes and point["provider"] == OURS:
            known = f" ({microseconds(measured[case])})" if case in measured else ""
            found.setdefault(shape, {})[case.ranks] = microseconds(point["predicted_microseconds"]) + known
    if not found:
        return ""
    ranks = sorted({n_ranks for cells in found.values() for n_ranks in cells})
    header = ["predicted us (measured)", *(f"{n} ranks" if n > 1 else "1 rank" for n in ranks)]
    rows = [
        [f"{reduction} {rows} x {vocabulary} {SHORT_DTYPES[dtype]}", *(cells.get(n, "-") for n in ranks)]
        for (reduction, rows, vocabulary, dtype), cells in sorted(found.items())
    ]
    return f"{latency_line(names[-1], documents[names[-1]])}\n\n{table(header, rows)}"


def shape_over_ranks(point: Result) -> tuple[str, int, int, str]:
    case = point_case(point)
    return case.reduction, case.rows, case.vocabulary, case.dtype


def latency_line(name: str, document: Document) -> str:
    """What the predictions are made from: the measured and the assumed."""
    latency, assumed = document["latency"], document["assumptions"]
    gathers = [
        f"{size} B {microseconds(time)} us" for size, time in latency["all_gather_microseconds"].items()
    ]
    exchange = ", ".join(gathers) or f"{assumed['all_gather_microseconds']:g} us (assumed)"
    hop, host_hop = assumed["hop_microseconds"], assumed["host_hop_microseconds"]
    link, host_link = assumed["link_gigabytes_per_second"], assumed["host_link_gigabytes_per_second"]
    return (
        f"Measured in `{name}`: copy {latency['copy_terabytes_per_second']:.2f} TB/s, launch "
        f"{microseconds(latency['launch_microseconds'])} us, all_gather {exchange}. Assumed: "
        f"{assumed['gpus_a_host']} GPUs a host; {hop:g} us for each rank more, {host_hop:g} between hosts; "
        f"links of {link:g} GB/s, {host_link:g} GB/s between hosts."
    )
