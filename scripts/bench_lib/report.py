"""``docs/performance.md`` and the README's block, from the committed documents. Pure functions.

Providers are compared at the decimals that a table shows; a target is compared with the number itself.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from bench_lib.cases import IN_FORWARD, LINEAR_TARGETS, LOGITS_TARGETS, LOSSES_TARGETS, OPTIONS, OURS, Case, LogitsCase
from bench_lib.documents import (
    LOSSES,
    Document,
    Result,
    case_of,
    is_ours,
    is_timed,
    name_of,
    package_versions,
    results_by_case,
)

TEMPLATE = Path(__file__).with_name("performance.template.md")
PICTURE = "bench_speed.png"
GIB = 2**30
UNITS = {
    "ratio": "x copy",
    "ratio_graph": "x copy in a CUDA graph",
    "microseconds_eager": "us eager",
    "microseconds_graph": "us in a CUDA graph",
    "gib_over_fp32_weight_gradient": "GiB over an fp32 gradient of the weight",
}
SHOWN = ("ratio", "microseconds", "microseconds_eager", "microseconds_graph")
README_CASES = [(LogitsCase("mean", 4096, 128256, 1), provider) for provider in (OURS, IN_FORWARD)]
README_SHAPES = ((4096, 128256, 1), (8192, 32064, 1), (16384, 64128, 2), (16384, 32064, 4))
README_CASES += [(LogitsCase("none", *shape), OURS) for shape in README_SHAPES]


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def shown(metric: str, value: float | None) -> str:
    """A ratio or microseconds as the tables show them."""
    if value is None:
        return "-"
    if metric.startswith("ratio"):
        return f"{value:.2f}" if value < 9.995 else f"{value:.1f}"
    return f"{value:.1f}" if value < 99.95 else f"{value:.0f}"


def gib(n_bytes: float) -> str:
    return f"{n_bytes / GIB:.2f}"


def gpus(count: int) -> str:
    return f"{count} GPU{'s' * (count > 1)}"


def row_name(case: Case, provider: str, count: int | None = None) -> str:
    """A case of this project, and the number of GPUs if it is given."""
    of_gpus = "" if count is None else f", {gpus(count)}"
    return f"{case}{of_gpus}{', in_forward' * (provider == IN_FORWARD)}"


def one_line(reason: str) -> str:
    """An error's text as one line of code, which then holds no Markdown of its own."""
    text = re.sub(r"\x1b\[[0-9;]*m", "", reason).encode("ascii", "replace").decode()
    text = " ".join(text.replace("`", "'").replace("|", "/").split())
    return f"`{text if len(text) <= 160 else text[:160] + '...'}`"


def number(result: Result | None, metric: str) -> float | None:
    """The number of a timed result; None if there is none."""
    if result is None or not is_timed(result):
        return None
    if metric == "gib_over_fp32_weight_gradient":
        weight = result["vocabulary"] // result["ranks"] * result["hidden_size"]
        return float(result["extra_peak_bytes"] - 4 * weight) / GIB
    return result.get(metric)


def best_other(results: dict[str, Result], metric: str) -> tuple[str, float] | None:
    """The fastest provider that is not of this project, and its number."""
    numbers = {name: number(result, metric) for name, result in results.items() if not is_ours(name)}
    found = [(name, value) for name, value in numbers.items() if value is not None]
    return min(found, key=lambda pair: (pair[1], pair[0]), default=None)


def host_line(document: Document) -> str:
    host = document["host"]
    versions = f"torch {host['torch']}, Triton {host['triton']}, CUDA {host['cuda']}, Python {host['python']}"
    packages = ", ".join(package_versions(document)) or "no other package"
    return f"{host['gpus_used']} x {host['gpu']}; {versions}; {packages}; commit {host['commit'][:12]}."


def providers_of(cases: dict[Any, dict[str, Result]]) -> list[str]:
    """This project's first, then the others from the fastest to the slowest."""

    def order(name: str) -> tuple[bool, bool, float]:
        ratios = [number(results.get(name), "ratio") for results in cases.values()]
        return name != OURS, not is_ours(name), statistics.median([r for r in ratios if r] or [1e9])

    return sorted({name for results in cases.values() for name in results}, key=order)


def notes(document: Document) -> str:
    """Who waits for the device, who was refused and why, and who is absent."""
    said = [(f"absent: {one_line(reason)}", name) for name, reason in document["absent"].items()]
    for result in document["results"]:
        name = result["provider"]
        if not is_timed(result) and (name, result["reduction"]) != (IN_FORWARD, "none"):  # the page says that
            said.append((f"refused in some or all cases: {one_line(result['refused'])}", name))
        elif not result.get("queued", True):
            said.append(("waits for the device, so its time includes the host's", name))
    names: dict[str, dict[str, None]] = {}
    for text, name in said:
        names.setdefault(text, {})[name] = None
    return "\n".join(f"- {', '.join(found)}: {text}." for text, found in names.items())


def provider_table(cases: dict[Case, dict[str, Result]], title: str, first: str, cell: Any = None) -> str:
    """One row per case and one column per provider; the fastest is bold. The ratio is the default cell."""
    names = [n for n in providers_of(cases) if any(is_timed(r.get(n)) for r in cases.values())]
    rows = []
    for case, results in cases.items():
        ratios = {name: shown("ratio", number(results[name], "ratio")) for name in names}
        best = min((float(ratio) for ratio in ratios.values() if ratio != "-"), default=None)
        cells = [cell(results[n]) if cell and ratios[n] != "-" else ratios[n] for n in names]
        fastest = [ratios[name] != "-" and float(ratios[name]) == best for name in names]
        rows.append([str(case), *(f"**{c}**" if f else c for c, f in zip(cells, fastest, strict=True))])
    return f"{title}\n\n{table([first, *names], rows)}"


def faster_elsewhere(cases: dict[Case, dict[str, Result]]) -> str:
    """Every case in which another provider is faster than this project's default, in a table."""
    rows = []
    for metric, label in (("ratio", "time / copy"), ("microseconds_eager", "eager us")):
        for case, results in cases.items():
            other = best_other(results, metric)
            ours, forward = (number(results.get(name), metric) for name in (OURS, IN_FORWARD))
            if other and (ours is None or float(shown(metric, other[1])) < float(shown(metric, ours))):
                numbers = [shown(metric, value) for value in (other[1], ours, forward)]
                rows.append([str(case), label, f"{other[0]} {numbers[0]}", *numbers[1:]])
    if not rows:
        return "No other provider is faster in any of these cases, by device time or eagerly."
    header = ["another provider is faster", "by", "the fastest other", OURS, IN_FORWARD]
    return table(header, rows)


def logits_part(document: Document) -> str:
    """The tables of one number of GPUs."""
    cases = results_by_case(document)
    rows, spreads = [], [0.0]
    for case, results in cases.items():
        for provider in (OURS, IN_FORWARD):
            result = results.get(provider)
            if result is None or not is_timed(result):
                continue
            other = best_other(results, "ratio")
            numbers = [shown(metric, result[metric]) for metric in SHOWN]
            spreads.append((result["ratio_spread"][1] - result["ratio_spread"][0]) / result["ratio"])
            numbers.append(f"{result['extra_peak_bytes_per_row']:.1f}")
            best = f"{other[0]} {shown('ratio', other[1])}" if other else "-"
            rows.append([row_name(case, provider), *numbers, best])
    header = ["tokens x vocabulary", "time / copy", "us", "eager us", "CUDA graph us", "extra B/row"]
    parts = [
        f"{host_line(document)} This project's ratios vary by {100 * max(spreads):.1f} % or less.",
        table([*header, "best other"], rows),
        provider_table(cases, "All providers, time / copy:", "tokens x vocabulary"),
        faster_elsewhere(cases),
        notes(document),
    ]
    return "\n\n".join(filter(None, parts))


def sweep_part(document: Document) -> str:
    title = f"{host_line(document)} Time / copy:"
    every = provider_table(results_by_case(document), title, "tokens x vocabulary")
    said = notes(document)
    if any(each["provider"] == OURS and "gradient" not in each for each in document["results"]):
        said += f"\n- {OURS}: its default wrote a mean's gradient in forward at that commit, as `in_forward` does."
    return f"{every}\n\n{said.strip()}"


def options_part(documents: Sequence[Document]) -> str:
    """One row per call: its ratio to the copy, and in brackets to the same reduction without options."""
    columns: dict[str, dict[str, Result]] = {}
    for document in documents:
        for case, results in results_by_case(document).items():
            columns[f"{str(case).removeprefix(OPTIONS)}, {gpus(case.ranks)}".strip()] = results
    names = list(dict.fromkeys(name for results in columns.values() for name in results))
    rows = []
    for name in names:
        plain = "none" if name.startswith(("none", "token")) else "mean"
        found = [(results.get(name), results[plain]["ratio"]) for results in columns.values()]
        cells = [f"{r['ratio']:.2f} ({r['ratio'] / without:.2f})" if r else "-" for r, without in found]
        memory = next(r["extra_peak_bytes_per_row"] for r, _ in found if r)
        rows.append([name, *cells, f"{memory:.1f}"])
    hosts = "\n".join(f"- {host_line(document)}" for document in documents)
    return f"{hosts}\n\n{table(['call', *columns, 'extra B/row'], rows)}"


def linear_part(document: Document) -> str:
    """This project's numbers, then every provider's."""

    def cell(result: Result) -> str:
        return f"{result['ratio']:.3f}, {gib(result['extra_peak_bytes'])}"

    cases, rows = results_by_case(document), []
    for case, results in cases.items():
        ours, other = results[OURS], best_other(results, "ratio")
        numbers = [f"{ours['ratio']:.3f}", f"{ours['milliseconds']:.2f}", gib(ours["extra_peak_bytes"])]
        rows.append([str(case), *numbers, f"{other[0]} {cell(results[other[0]])} GiB" if other else "-"])
    header = ["case", "time / matmuls", "ms", "extra GiB", "best other"]
    every = provider_table(cases, "All providers, time / matmuls and extra GiB:", "case", cell)
    return "\n\n".join([host_line(document), table(header, rows), every, notes(document)])


def memory_part(document: Document) -> str:
    """Extra peak memory in GiB, one row per number of tokens."""
    points = document["points"]
    names = list(dict.fromkeys(point["provider"] for point in points))
    rows = []
    for case, results in results_by_case({"results": points}).items():
        cells = [gib(results[n]["extra_peak_bytes"]) if is_timed(results[n]) else "-" for n in names]
        rows.append([str(case), gib(next(iter(results.values()))["gradient_bytes"]), *cells])
    every = table(["extra GiB", "both gradients alone", *names], rows)
    return "\n\n".join(filter(None, [host_line(document), every, notes(document | {"results": points})]))


def profile_part(document: Document) -> str:
    """One row per rank, in ms."""
    rows = []
    for rank, summary in enumerate(document["ranks"]):
        names = ("step", "nccl", "nccl_overlapped", "nccl_exposed", "idle")
        of = summary["by_category"]
        numbers = [summary[name] for name in names] + [of["matmul"], of["loss"]]
        rows.append([str(rank), *(f"{value / 1e3:.2f}" for value in numbers)])
    header = ["rank", "step", "NCCL", "of it beside other kernels", "exposed", "idle", "matmuls", "loss"]
    title = f"{host_line(document)} {case_of(document['case'])}, medians of several steps, in ms:"
    return f"{title}\n\n{table(header, rows)}"


def targets_part(documents: dict[str, Document]) -> str:
    """Every target, and whether it is met."""
    rows = []
    for kind, targets in (("table", LOGITS_TARGETS), ("linear_table", LINEAR_TARGETS)):
        for case, bounds in targets.items():
            document = documents.get(name_of(kind, case.ranks))
            results = results_by_case(document).get(case, {}) if document else {}
            provider = IN_FORWARD if kind == "table" and case.reduction == "mean" else OURS
            for metric, bound in bounds.items():
                value = number(results.get(provider), metric)
                met = "not measured" if value is None else "met" if value <= bound else "**missed**"
                unit = UNITS[metric].replace("copy", "matmuls" if kind == "linear_table" else "copy")
                measured = "-" if value is None else f"{value:.3f}".rstrip("0").rstrip(".")
                rows.append([row_name(case, provider, case.ranks), f"<= {bound:g} {unit}", measured, met])
    cases = documents.get(LOSSES, {"cases": []})["cases"]
    times = {case["case"]: {result["provider"]: result["ms"] for result in case["results"]} for case in cases}
    for provider, base, bound in LOSSES_TARGETS:
        found = {name: of[provider] / of[base] for name, of in times.items() if provider in of}
        measured = ", ".join(f"{value:.3f} ({name})" for name, value in found.items()) or "-"
        met = "not measured" if not found else "met" if max(found.values()) <= bound else "**missed**"
        rows.append([f"{provider}, 1 GPU", f"<= {bound:g} x {base}", measured, met])
    count = sum(row[-1] == "met" for row in rows)
    return f"{count} of {len(rows)} targets are met.\n\n{table(['case', 'target', 'measured', ''], rows)}"


def page(documents: dict[str, Document]) -> str:
    """``docs/performance.md``: the template with each ``{{part}}`` in its place."""
    text = TEMPLATE.read_text(encoding="utf-8")
    kinds = {"table": logits_part, "sweep": sweep_part, "linear_table": linear_part}
    kinds |= {"linear_memory": memory_part, "linear_profile": profile_part}
    for name, document in documents.items():
        stem = name.removesuffix(".json")
        part = next((p for kind, p in kinds.items() if stem.removeprefix("bench_").startswith(kind)), None)
        if part is not None:
            text = text.replace("{{" + stem + "}}", part(document))
    options = [document for name, document in documents.items() if "options" in name]
    text = text.replace("{{options}}", options_part(options))
    return text.replace("{{targets}}", targets_part(documents))


def readme_block(documents: dict[str, Document]) -> str:
    """Six rows and a picture."""
    rows = []
    for case, provider in README_CASES:
        results = results_by_case(documents[name_of("table", case.ranks)])[case]
        other = best_other(results, "ratio")
        best = f"{shown('ratio', other[1])} {other[0]}" if other else "-"
        rows.append([row_name(case, provider, case.ranks), shown("ratio", number(results[provider], "ratio")), best])
    picture = f"![Time over copy of each provider](scripts/results/{PICTURE})"
    return f"{table(['time / copy', OURS, 'best other'], rows)}\n\n{picture}"


def compared(old: Document, new: Document) -> str:
    """The ratios of both runs, case by case."""
    lines = [f"{'case':38} {'provider':32} {'old':>7} {'new':>7} {'difference':>10}"]
    before = results_by_case(old)
    for case, results in results_by_case(new).items():
        for name, result in results.items():
            was = before.get(case, {}).get(name)
            # The default once wrote a mean's gradient in forward: no comparison with that.
            if was is not None and case.reduction == "mean" and was.get("gradient") != result.get("gradient"):
                was = None
            old_ratio, ratio = number(was, "ratio"), number(result, "ratio")
            cells = ["-" if each is None else f"{each:.3f}" for each in (old_ratio, ratio)]
            change = f"{100 * (ratio / old_ratio - 1):+.1f} %" if ratio and old_ratio else "-"
            lines.append(f"{case!s:38} {name:32} {cells[0]:>7} {cells[1]:>7} {change:>10}")
    return "\n".join(lines)
