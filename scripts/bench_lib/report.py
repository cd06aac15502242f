"""``docs/performance.md``, from the committed documents. Pure functions.

Providers are compared at the decimals that a table shows; a target is compared with the number itself.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench_lib.cases import IN_FORWARD, LOSSES_TARGETS, OURS, TARGETS, Case
from bench_lib.documents import (
    FILES,
    Document,
    Result,
    case_of,
    is_ours,
    is_timed,
    name_of,
    require_one_commit,
    results_by_case,
    short_commit,
)
from bench_lib.modes import modes_part
from bench_lib.tables import host_line, shown, table

TEMPLATE = Path(__file__).with_name("performance.template.md")
PICTURE = "bench_speed.png"
OPTIONS_VOCABULARIES = (128256, 32064, 50257)  # the others are in the document
GIB = 2**30
UNITS = {
    "ratio": "x copy",
    "ratio_graph": "x copy in a CUDA graph",
    "microseconds_eager": "us eager",
    "microseconds_graph": "us in a CUDA graph",
    "gib_over_fp32_weight_gradient": "GiB over an fp32 gradient of the weight",
}


def gib(n_bytes: float) -> str:
    return f"{n_bytes / GIB:.2f}"


def per_row(result: Result) -> str:
    """Bytes of new memory for each token."""
    return f"{result['peak_bytes'] / result['tokens']:.1f}"


def gpus(count: int) -> str:
    return f"{count} GPU{'s' * (count > 1)}"


def row_name(case: Case, provider: str) -> str:
    """A case of this project, and the number of GPUs."""
    return f"{case}, {gpus(case.ranks)}{', in_forward' * (provider == IN_FORWARD)}"


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
        return float(result["peak_bytes"] - 4 * weight) / GIB
    if metric == "microseconds":
        return round(1e3 * result["ms"], 2)
    return result.get(metric)


def best_other(results: dict[str, Result], metric: str) -> tuple[str, float] | None:
    """The fastest provider that is not of this project, and its number."""
    numbers = {name: number(result, metric) for name, result in results.items() if not is_ours(name)}
    found = [(name, value) for name, value in numbers.items() if value is not None]
    return min(found, key=lambda pair: (pair[1], pair[0]), default=None)


def place_of(document: Document) -> str:
    """The GPUs and the commit."""
    host = document["host"]
    return f"{host['gpus_used']} x {host['gpu']} ({short_commit(document)})"


def providers_of(cases: dict[Any, dict[str, Result]]) -> list[str]:
    """This project's first, then the others from the fastest to the slowest."""

    def order(name: str) -> tuple[bool, bool, float]:
        ratios = [number(results.get(name), "ratio") for results in cases.values()]
        return name != OURS, not is_ours(name), statistics.median([r for r in ratios if r] or [1e9])

    return sorted({name for results in cases.values() for name in results}, key=order)


def notes(document: Document) -> str:
    """Who waits for the device, who was refused and why, and who was absent; the document says why."""
    timed = {result["provider"] for result in document["results"] if is_timed(result)}
    absent = {name for name, reason in document["absent"].items() if not reason.startswith("needs ")} - timed
    said = [("absent", name) for name in document["absent"] if name in absent]
    for result in document["results"]:
        name = result["provider"]
        if not is_timed(result) and not is_ours(name):
            said.append((f"refused in some or all cases: {one_line(result['refused'])}", name))
        elif is_timed(result) and not result.get("queued", True):
            said.append(("waits for the device, so its time includes the host's", name))
    names: dict[str, dict[str, None]] = {}
    for text, name in said:
        names.setdefault(text, {})[name] = None
    return "\n".join(f"- {', '.join(found)}: {text}." for text, found in names.items())


def provider_table(
    cases: dict[Case, dict[str, Result]], title: str, first: str, cell: Any = None, more: dict[str, Any] | None = None
) -> str:
    """One row per case and one column per provider; the fastest is bold. The ratio is the default cell.

    ``more`` has columns of this project's default.
    """
    names = [n for n in providers_of(cases) if any(is_timed(r.get(n)) for r in cases.values())]
    rows = []
    for case, results in cases.items():
        ratios = {name: shown("ratio", number(results.get(name), "ratio")) for name in names}
        best = min((float(ratio) for ratio in ratios.values() if ratio != "-"), default=None)
        cells = [cell(results[n]) if cell and ratios[n] != "-" else ratios[n] for n in names]
        fastest = [ratios[name] != "-" and float(ratios[name]) == best for name in names]
        of_default = [column(results[OURS]) for column in (more or {}).values()]
        rows.append([str(case), *(f"**{c}**" if f else c for c, f in zip(cells, fastest, strict=True)), *of_default])
    return f"{title}\n\n{table([first, *names, *(more or {})], rows)}"


def faster_eagerly(cases: dict[Case, dict[str, Result]]) -> str:
    """Every case in which an eager call of another provider is faster than this project's fastest."""
    rows = []
    for case, results in cases.items():
        other = best_other(results, "microseconds_eager")
        own = [number(results.get(name), "microseconds_eager") for name in (OURS, IN_FORWARD)]
        fastest = min((us for us in own if us is not None), default=None)
        if other and (fastest is None or other[1] < fastest):
            cells = (shown("microseconds", us) for us in (other[1], fastest))
            rows.append(f"{case} ({other[0]} {' / '.join(cells)})")
    said = "; ".join(rows) or "none"
    return f"Eager calls in us, where another provider's is faster than this project's fastest: {said}."


def logits_part(document: Document, commit: str | None = None) -> str:
    """Every provider's time over the copy's, and this project's eager call and memory."""
    cases = results_by_case(document)
    ours = [result for results in cases.values() for name, result in results.items() if is_ours(name)]
    spreads = [(r["ratio_spread"][1] - r["ratio_spread"][0]) / r["ratio"] for r in ours if "ratio_spread" in r]
    default = {
        "eager us": lambda result: shown("microseconds", number(result, "microseconds_eager")),
        "extra B/row": per_row,
    }
    varies = f"This project's ratios vary by {100 * max(spreads, default=0.0):.1f} % or less. Time / copy:"
    title = f"{host_line(document, commit)} {varies}"
    parts = [provider_table(cases, title, "tokens x vocabulary", more=default), faster_eagerly(cases), notes(document)]
    return "\n\n".join(filter(None, parts))


def few_part(document: Document, commit: str | None = None) -> str:
    """Microseconds of a CUDA graph's replay of each provider and of the copy."""
    cases = results_by_case(document)

    def cell(result: Result | None) -> str:
        microseconds = number(result, "microseconds_graph")
        return "-" if microseconds is None else f"{microseconds:.1f}"

    every = dict.fromkeys(name for results in cases.values() for name in results)
    names = [name for name in every if any(cell(results.get(name)) != "-" for results in cases.values())]

    rows = []
    for case, results in cases.items():
        ours = results[OURS]
        copy = ours["microseconds_graph"] / ours["ratio_graph"]
        rows.append([str(case), f"{copy:.1f}", *(cell(results.get(name)) for name in names)])
    title = f"{host_line(document, commit)} Microseconds of a CUDA graph's replay:"
    return f"{title}\n\n{table(['tokens x vocabulary', 'copy', *names], rows)}"


def options_part(document: Document, commit: str | None = None) -> str:
    """One row per call: its ratio to the copy, and in brackets to the same reduction without options."""
    every = results_by_case(document)
    columns = {
        str(case).removeprefix("options").strip(): of
        for case, of in every.items()
        if case.vocabulary in OPTIONS_VOCABULARIES
    }
    first = next(iter(columns.values()))
    rows = []
    for name in dict.fromkeys(name for results in columns.values() for name in results):
        plain = "none" if name.startswith(("none", "token")) else "mean"
        found = [(results.get(name), results[plain]["ratio"]) for results in columns.values()]
        cells = [f"{r['ratio']:.2f} ({r['ratio'] / without:.2f})" if r else "-" for r, without in found]
        rows.append([name, *cells, per_row(first[name]) if name in first else "-"])
    return f"{host_line(document, commit)}\n\n{table(['call', *columns, 'extra B/row'], rows)}"


def linear_part(document: Document, commit: str | None = None) -> str:
    """Every provider's time over the matmuls' and its memory, and this project's time."""

    def cell(result: Result) -> str:
        return f"{result['ratio']:.3f}, {gib(result['peak_bytes'])}"

    title = f"{host_line(document, commit)} Time / matmuls and extra GiB:"
    own = {"ms": lambda result: f"{result['ms']:.2f}"}
    every = provider_table(results_by_case(document), title, "case", cell, own)
    return "\n\n".join(filter(None, [every, notes(document)]))


def memory_part(document: Document, commit: str | None = None) -> str:
    """Extra peak memory in GiB, one row per number of tokens."""
    names = list(dict.fromkeys(result["provider"] for result in document["results"]))
    rows = []
    for case, results in results_by_case(document).items():
        cells = [gib(results[n]["peak_bytes"]) if is_timed(results[n]) else "-" for n in names]
        rows.append([str(case), gib(next(iter(results.values()))["gradient_bytes"]), *cells])
    every = table(["extra GiB", "both gradients alone", *names], rows)
    return "\n\n".join(filter(None, [host_line(document, commit), every, notes(document)]))


def profile_part(document: Document) -> str:
    """One row per rank, in ms."""
    rows = []
    for rank, summary in enumerate(document["ranks"]):
        names = ("step", "nccl", "nccl_overlapped", "nccl_exposed", "idle")
        of = summary["by_category"]
        numbers = [summary[name] for name in names] + [of["matmul"], of["loss"]]
        rows.append([str(rank), *(f"{value / 1e3:.2f}" for value in numbers)])
    header = ["rank", "step", "NCCL", "of it alongside other kernels", "exposed", "idle", "matmuls", "loss"]
    title = f"{host_line(document)} {case_of(document['case'])}, medians of several steps, in ms:"
    return f"{title}\n\n{table(header, rows)}"


def targets_part(documents: dict[str, Document]) -> str:
    """Every target, whether it is met, and where the documents are from."""
    rows: list[list[str]] = []
    used: dict[str, Document] = {}
    for case, bounds in TARGETS.items():
        name = name_of("head" if case.is_head else "table", case.ranks)
        used |= {name: documents[name]} if name in documents and bounds else {}
        results = results_by_case(documents[name]).get(case, {}) if name in documents else {}
        provider = IN_FORWARD if case.kind == "mean" and not case.is_head else OURS
        for metric, bound in bounds.items():
            value = number(results.get(provider), metric)
            unit = UNITS[metric].replace("copy", "matmuls" if case.is_head else "copy")
            measured = "-" if value is None else f"{value:.3f}".rstrip("0").rstrip(".")
            name = row_name(case, provider)
            rows.append([name, f"<= {bound:g} {unit}", measured, is_met([] if value is None else [value], bound)])
    losses = {name: documents[name] for name in [name_of("losses", 1)] if name in documents}
    used |= losses
    cases = {case: results for each in losses.values() for case, results in results_by_case(each).items()}
    for own, base, bound in LOSSES_TARGETS:
        found = {case: beside(results, own, base) for case, results in cases.items() if own in results}
        measured = ", ".join(f"{value:.3f} ({name})" for name, value in found.items()) or "-"
        rows.append([f"{own}, 1 GPU", f"<= {bound:g} x {base}", measured, is_met(list(found.values()), bound)])
    count = sum(row[-1] == "met" for row in rows)
    places = "; ".join(f"`{name}`, {place_of(document)}" for name, document in used.items())
    said = f"{count} of {len(rows)} targets are met. The numbers are those of {places}."
    return f"{said}\n\n{table(['case', 'target', 'measured', ''], rows)}"


def is_met(values: Sequence[float], bound: float) -> str:
    return "not measured" if not values else "met" if max(values) <= bound else "**missed**"


def beside(results: dict[str, Result], provider: str, base: str) -> float:
    """A provider's time over another's, or over the copy's."""
    own, other = results[provider], results.get(base)
    return float(own["ratio"] if other is None else own["ms"] / other["ms"])


def beside_baseline(document: Document, suffix: str) -> str:
    """Each call's time over that of another checkout in the same rounds: the median, and its range."""
    rows = []
    for result in document["results"]:
        cells = []
        for field in ("over_baseline", "over_baseline_eager"):
            found = result.get(field)
            cells.append("-" if found is None else f"{found[0]:.3f} ({found[1]:.3f}-{found[2]:.3f})")
        if not result["provider"].endswith(suffix):
            rows.append([str(case_of(result)), result["provider"], *cells])
    return table(["case", "call", "time / baseline", "eager"], rows)


def with_parts(text: str, documents: dict[str, Document]) -> str:
    """The template with each ``{{part}}`` in its place, and the commit at the top.

    Raises:
        ValueError: a section has documents of several commits.
    """
    parts = {logits_part: ["table"], linear_part: ["head", "unfused"], memory_part: ["memory"]}
    parts |= {few_part: ["few"], modes_part: ["modes"], options_part: ["options"]}
    first = documents.get(name_of("table", 1)) or next(iter(documents.values()))
    commit, sections = first["host"]["commit"], []
    for section in re.split(r"^(?=#)", text, flags=re.MULTILINE):
        named = {name: each for name, each in documents.items() if "{{" + name + "}}" in section}
        require_one_commit(section.partition("\n")[0], named)
        for name, document in named.items():
            part = next(part for part, kinds in parts.items() if name.startswith(tuple(FILES[kind] for kind in kinds)))
            section = section.replace("{{" + name + "}}", part(document, commit))
        sections.append(section)
    return "".join(sections).replace("{{commit}}", short_commit(first))


def page(documents: dict[str, Document]) -> str:
    """``docs/performance.md``."""
    return with_parts(TEMPLATE.read_text(encoding="utf-8"), documents)


def compared(old: Document, new: Document) -> str:
    """The ratios of both runs, case by case."""
    lines = [f"{'case':38} {'provider':32} {'old':>7} {'new':>7} {'difference':>10}"]
    before = results_by_case(old)
    for case, results in results_by_case(new).items():
        for name, result in results.items():
            was = before.get(case, {}).get(name)
            # The default once wrote a mean's gradient in forward: no comparison with that.
            if was is not None and case.kind == "mean" and was.get("gradient") != result.get("gradient"):
                was = None
            old_ratio, ratio = number(was, "ratio"), number(result, "ratio")
            cells = ["-" if each is None else f"{each:.3f}" for each in (old_ratio, ratio)]
            change = f"{100 * (ratio / old_ratio - 1):+.1f} %" if ratio and old_ratio else "-"
            lines.append(f"{case!s:38} {name:32} {cells[0]:>7} {cells[1]:>7} {change:>10}")
    return "\n".join(lines)
