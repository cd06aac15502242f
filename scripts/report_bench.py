"""The README's tables of measured times, as text, from the documents that ``bench_cross_entropy.py`` writes.

``scripts/plot_bench.py`` is the command. All but ``read_documents`` and ``read_targets`` are pure functions.

Providers are compared at the decimals that a table shows, and equals there are both winners; a target is
compared with the number itself. What a provider was not timed for is "-" with its reason; a case that a
provider neither was timed for nor refused is an error.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "scripts" / "results"
TABLES = {1: "bench_table_1gpu.json", 2: "bench_table_2gpu.json", 4: "bench_table_4gpu.json"}
SWEEPS = {"vocabulary": "bench_sweep_vocabulary_*.json", "tokens": "bench_sweep_tokens_*.json"}
TARGETS = "targets.json"
NOTHING = "No measurements committed."

OURS = "vocab_parallel_ce"
IMPLEMENTATIONS = (f"{OURS}[triton]", f"{OURS}[one_pass]")
PROVIDERS = (
    OURS,
    *IMPLEMENTATIONS,
    "quack-kernels",
    "flash-attn",
    "transformer-engine",
    "transformer-engine (overwrite)",
    "liger-kernel",
    "torch.compile",
    "torch eager",
    "megatron-core",
    "loss_parallel",
)
BOUNDS = {
    "ratio": "{} x copy",
    "microseconds": "{} us",
    "ratio_eager": "{} x copy eager",
    "microseconds_eager": "{} us eager",
    "ratio_graph": "{} x copy in a CUDA graph",
    "microseconds_graph": "{} us in a CUDA graph",
}
COMPARED = {
    "ratio": "Device time, over the copy",
    "microseconds_eager": "Eager, in us",
    "microseconds_graph": "CUDA graph, in us",
}
SHORT_DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
REASON_LENGTH = 200
Document = dict[str, Any]
Result = dict[str, Any]


class Case(NamedTuple):
    """What is computed; ``columns`` are those of one rank."""

    reduction: str
    rows: int
    columns: int
    ranks: int
    dtype: str

    @property
    def vocabulary(self) -> int:
        return self.columns * self.ranks

    @property
    def short_dtype(self) -> str:
        return SHORT_DTYPES[self.dtype]

    @property
    def shape(self) -> str:
        whole = f" ({self.vocabulary})" if self.ranks > 1 else ""
        return f"{self.rows} x {self.columns}{whole}"

    def __str__(self) -> str:
        return f"{self.reduction} {self.shape} {self.short_dtype}"


class Notes:
    """The reasons for the dashes of a table, numbered in the order of their first use."""

    def __init__(self) -> None:
        self._providers: dict[tuple[str, str], list[str]] = {}

    def dash(self, provider: str, kind: str, reason: str) -> str:
        key = (kind, one_line(reason))
        providers = self._providers.setdefault(key, [])
        providers += [] if provider in providers else [provider]
        return f"- ({list(self._providers).index(key) + 1})"

    def text(self) -> str:
        return "\n".join(
            f"- ({number}) {', '.join(providers)}, {kind}: {reason}"
            for number, ((kind, reason), providers) in enumerate(self._providers.items(), start=1)
        )


def one_line(reason: str) -> str:
    """An error's text as code of one line of Markdown, which can then hold no markup of its own."""
    words = " ".join(reason.encode("ascii", "replace").decode().replace("`", "'").split())
    return f"`{words if len(words) <= REASON_LENGTH else words[:REASON_LENGTH] + '...'}`"


def decimals(value: float) -> str:
    """A ratio as the tables show it."""
    return f"{value:.2f}" if value < 9.995 else f"{value:.1f}"


def microseconds(value: float) -> str:
    return f"{value:.1f}" if value < 99.95 else f"{value:.0f}"


def shown(metric: str, value: float) -> str:
    return decimals(value) if metric.startswith("ratio") else microseconds(value)


def is_ours(provider: str) -> bool:
    return provider == OURS or provider in IMPLEMENTATIONS


def is_timed(result: Result | None) -> bool:
    return result is not None and "refused" not in result


def table(header: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    header = list(header)
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def results_by_case(document: Document) -> dict[Case, dict[str, Result]]:
    """Every case's results by provider, in the order in which they were measured."""
    cases: dict[Case, dict[str, Result]] = {}
    for result in document["results"]:
        case = Case(*(result[field] for field in Case._fields))
        provider = result["provider"]
        if provider not in PROVIDERS:
            raise ValueError(f"provider: expected one of {PROVIDERS}, got {provider!r}")
        if provider in cases.setdefault(case, {}):
            raise ValueError(f"{case}: expected one result of {provider}, got several")
        cases[case][provider] = result
    return cases


def providers_of(document: Document) -> list[str]:
    """The providers that were timed, refused something or are absent, in the order of ``PROVIDERS``."""
    named = {result["provider"] for result in document["results"]} | set(document["absent"])
    return [provider for provider in PROVIDERS if provider in named]


def read_documents(results: Path) -> dict[str, Document]:
    """The tables and sweeps among ``results`` by file name."""
    paths = [results / name for name in TABLES.values() if (results / name).exists()]
    for pattern in SWEEPS.values():
        paths += sorted(results.glob(pattern))
    documents = {path.name: json.loads(path.read_text(encoding="utf-8")) for path in paths}
    for name, document in documents.items():
        if not document["host"]["commit"]:
            raise ValueError(f"{name}: host.commit must name the commit measured, got nothing")
    for ranks, name in TABLES.items():
        found = {result["ranks"] for result in documents[name]["results"]} if name in documents else {ranks}
        if found != {ranks}:
            raise ValueError(f"{name}: ranks of every result must be {ranks}, got {sorted(found)}")
    return documents


def read_targets(results: Path) -> Document:
    return json.loads((results / TARGETS).read_text(encoding="utf-8"))


def host_line(document: Document) -> str:
    host = document["host"]
    gpus = f"{host['gpus_used']} x {host['gpu']}"
    versions = f"torch {host['torch']}, Triton {host['triton']}, CUDA {host['cuda']}, Python {host['python']}"
    others = ", ".join(f"{name} {version}" for name, version in sorted(host["providers"].items()))
    return f"{gpus}; {versions}; {others or 'no other provider'}; commit {host['commit'][:12]}."


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


def bounds_by_case(targets: Document) -> dict[Case, dict[str, float]]:
    """The bounds of each case that has some, by the result's field that they are of."""
    return {
        Case(
            target["reduction"],
            target["rows"],
            target["vocabulary"] // target["ranks"],
            target["ranks"],
            target["dtype"],
        ): target["at_most"]
        for target in targets["cases"]
    }


def verdict(value: float | None, bound: float) -> str:
    if value is None:
        return "not measured"
    return "met" if value <= bound else f"missed by {100 * (value / bound - 1):.1f} %"


def bound_text(metric: str, bound: float) -> str:
    return "<= " + BOUNDS[metric].format(f"{bound:.2f}" if metric.startswith("ratio") else f"{bound:g}")


def bold(text: str, wins: bool) -> str:
    return f"**{text}**" if wins else text


def main_row(case: Case, results: dict[str, Result], targets: Document, notes: Notes) -> list[str]:
    """This project's numbers of one case, its target, and the best of the others."""
    ours = results[OURS]
    others, other_ratio = best_other(results, "ratio")
    ratios = [ours["ratio"] if is_timed(ours) else math.inf, math.inf if other_ratio is None else other_ratio]
    lowest = decimals(min(ratios))
    best = "-"
    if other_ratio is not None:
        best = f"{', '.join(others)} {bold(decimals(other_ratio), decimals(other_ratio) == lowest)}"
    numbers = [notes.dash(OURS, "refused", ours["refused"])] * 5 if not is_timed(ours) else []
    if is_timed(ours):
        memory, below = ours["extra_peak_bytes_per_row"], targets["extra_peak_bytes_per_row_below"]
        graph = ours["microseconds_graph"]
        numbers = [
            bold(decimals(ours["ratio"]), decimals(ours["ratio"]) == lowest),
            microseconds(ours["microseconds"]),
            microseconds(ours["microseconds_eager"]),
            notes.dash(OURS, "CUDA graph", ours["graph_error"]) if graph is None else microseconds(graph),
            f"{memory:.1f}" + ("" if memory < below else f" (must be < {below})"),
        ]
    reached = [
        f"{bound_text(metric, bound)}: {verdict(ours[metric] if is_timed(ours) else None, bound)}"
        for metric, bound in bounds_by_case(targets).get(case, {}).items()
    ]
    return [case.reduction, case.shape, case.short_dtype, *numbers, "; ".join(reached), best]


def provider_cell(
    case: Case, provider: str, results: dict[str, Result], absent: dict[str, str], notes: Notes
) -> str:
    result = results.get(provider)
    if result is None:
        if provider in absent:
            return notes.dash(provider, "absent", absent[provider])
        if provider in IMPLEMENTATIONS:
            return ""
        raise ValueError(f"{case}: expected a result or a refusal of {provider}, got neither")
    if not is_timed(result):
        return notes.dash(provider, "refused", result["refused"])
    lowest = min(float(decimals(other["ratio"])) for other in results.values() if is_timed(other))
    ratio = decimals(result["ratio"])
    return bold(ratio, float(ratio) == lowest)


def cases_where_others_win(cases: dict[Case, dict[str, Result]], metric: str) -> list[str]:
    """The cases in which another provider's shown ``metric`` is lower than this project's, with both."""
    lost = []
    for case, results in cases.items():
        others, other = best_other(results, metric)
        ours = results[OURS][metric] if is_timed(results[OURS]) else None
        if other is None:
            continue
        if ours is None or float(shown(metric, other)) < float(shown(metric, ours)):
            here = "not timed here" if ours is None else f"here {shown(metric, ours)}"
            lost.append(f"{case} ({', '.join(others)} {shown(metric, other)}, {here})")
    return lost


def who_wins(cases: dict[Case, dict[str, Result]]) -> str:
    """One sentence a way of timing, for the cases in which this project is not the fastest."""
    sentences = []
    for metric, name in COMPARED.items():
        compared = {case: results for case, results in cases.items() if best_other(results, metric)[0]}
        lost = cases_where_others_win(compared, metric)
        if not compared:
            sentences.append(f"{name}: no other provider was timed.")
        elif lost:
            count = f"{len(lost)} of {len(compared)}"
            sentences.append(f"{name}: another provider is faster in {count} cases: {'; '.join(lost)}.")
        else:
            sentences.append(f"{name}: no other provider is faster in any of {len(compared)} cases.")
    return "\n".join(f"- {sentence}" for sentence in sentences)


def table_part(document: Document, targets: Document) -> str:
    """Both tables of one number of GPUs, and the sentences and notes that belong to them."""
    cases = results_by_case(document)
    for case, results in cases.items():
        if OURS not in results:
            raise ValueError(f"{case}: expected a result of {OURS}, got those of {sorted(results)}")
    notes = Notes()
    shape = (
        "rows x columns" if document["host"]["gpus_used"] == 1 else "rows x columns of a rank (vocabulary)"
    )
    header = ["reduction", shape, "dtype", "time / copy", "us", "eager us", "CUDA graph us"]
    header += ["extra B/row", "must reach", "best other"]
    main = table(header, [main_row(case, results, targets, notes) for case, results in cases.items()])
    providers = providers_of(document)
    rows = [
        [f"{case.reduction}, {case.shape}, {case.short_dtype}"]
        + [provider_cell(case, name, results, document["absent"], notes) for name in providers]
        for case, results in cases.items()
    ]
    every = table(["time / copy", *providers], rows)
    return "\n\n".join(filter(None, [host_line(document), main, who_wins(cases), every, notes.text()]))


def targets_part(documents: dict[str, Document], targets: Document) -> str:
    """How many targets are met over all tables, and which are missed or have no measurement."""
    measured = {
        case: results[OURS]
        for name in TABLES.values()
        if name in documents
        for case, results in results_by_case(documents[name]).items()
    }
    missed, unmeasured, count = [], [], 0
    for case, bounds in bounds_by_case(targets).items():
        result = measured.get(case)
        name = f"{case}, {case.ranks} GPU{'s' * (case.ranks > 1)}"
        for metric, bound in bounds.items():
            count += 1
            value = result[metric] if result is not None and is_timed(result) else None
            if value is None:
                unmeasured.append(f"{name} ({bound_text(metric, bound)})")
            elif value > bound:
                missed.append(f"{name} ({bound_text(metric, bound)}: {verdict(value, bound)})")
    lines = [f"- {count - len(missed) - len(unmeasured)} of {count} targets are met."]
    lines += [f"- Missed: {'; '.join(missed)}."] if missed else []
    lines += [f"- Not measured: {'; '.join(unmeasured)}."] if unmeasured else []
    return "\n".join(lines)


def predictions_part(documents: dict[str, Document]) -> str:
    """The cost model's times beside the measured ones, of every table's document that has some."""
    parts = []
    for name in TABLES.values():
        document = documents.get(name, {})
        if not document.get("predictions"):
            continue
        rows = []
        for point in document["predictions"]:
            predicted, measured = point["predicted_microseconds"], point["measured_microseconds"]
            error = "-" if measured is None else f"{100 * (predicted / measured - 1):+.1f} %"
            found = "-" if measured is None else microseconds(measured)
            shape = [str(point["ranks"]), str(point["rows"]), str(point["columns"])]
            rows.append([*shape, microseconds(predicted), found, error])
        header = ["ranks", "rows", "columns of a rank", "predicted us", "measured us", "error"]
        parts.append(f"{latency_line(name, document)}\n\n{table(header, rows)}")
    return "\n\n".join(parts)


def latency_line(name: str, document: Document) -> str:
    latency = document["latency"]
    gathers = latency["all_gather_microseconds"].items()
    exchange = ", ".join(f"{size} B {microseconds(time)} us" for size, time in gathers)
    return (
        f"From what `{name}` measured: copy {latency['copy_terabytes_per_second']:.2f} TB/s, "
        f"launch {microseconds(latency['launch_microseconds'])} us, all_gather {exchange or 'none'}."
    )
