"""The tables of README and of the pages of docs/, from the committed documents.

``<!-- begin: NAME -->`` and ``<!-- end: NAME -->`` are around what NAME stands for: a function here, or the file of a
document without its ending. ``readme.json`` has the rows of README's figures: what a row shows ``without`` this
package, and what is ``given`` with it. Providers are compared at the decimals that a table shows.
"""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from bench_lib.cases import IN_FORWARD, OURS, Case
from bench_lib.documents import (
    Document,
    Result,
    case_of,
    is_ours,
    is_timed,
    read_documents,
    results_by_case,
)
from vocab_parallel_ce.versions import TESTED

GIB = 2**30
MARKED = re.compile(r"(<!-- begin: ([\w.]+) -->\n).*?(<!-- end: \2 -->)", flags=re.DOTALL)
ROWS: list[dict[str, Any]] = json.loads(Path(__file__).with_name("readme.json").read_text("utf-8"))
MOST_COLUMNS = 8  # of numbers on a page
LIMITS = {"mean": 1.0, "none": 1.5}  # one read and one write; two reads and one write


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def short_commit(document: Document) -> str:
    """The commit, and the day of the measurement; of documents without it, the day on which they were committed."""
    host = document["host"]
    return ", ".join(str(part) for part in (str(host["commit"])[:12], host.get("date")) if part)


def with_host(document: Document, title: str, *parts: str) -> str:
    """Parts of a page below the GPU, the versions and the commit; the document has the rest of the machine."""
    host = document["host"]
    versions = {"torch": host["torch"].partition("+")[0], "Triton": host["triton"]} | host["packages"]
    measured = [f"{host['gpus_used']} x {host['gpu']}", *(f"{name} {version}" for name, version in versions.items())]
    return "\n\n".join([f"{', '.join(measured)}; {short_commit(document)}. {title}".strip(), *filter(None, parts)])


def shown(value: float | None) -> str:
    """A ratio, milliseconds or microseconds, to three digits."""
    if value is None:
        return "-"
    return f"{value:.2f}" if value < 9.995 else f"{value:.1f}" if value < 99.95 else f"{value:.0f}"


def gib(n_bytes: float) -> str:
    return f"{n_bytes / GIB:.2f}"


def per_row(result: Result) -> str:
    """Bytes of new memory for each token."""
    return f"{result['peak_bytes'] / result['tokens']:.1f}"


def number(result: Result | None, metric: str) -> float | None:
    """The number of a result; None if it was refused."""
    return None if result is None else result.get(metric)


def providers_of(cases: dict[Any, dict[str, Result]]) -> list[str]:
    """This project's first, then the others from the fastest to the slowest."""

    def order(name: str) -> tuple[bool, bool, float]:
        ratios = [number(results.get(name), "ratio") for results in cases.values()]
        return name != OURS, not is_ours(name), statistics.median([r for r in ratios if r] or [1e9])

    return sorted({name for results in cases.values() for name in results}, key=order)


def one_line(reason: str) -> str:
    """An error's text as one line of code, which then holds no Markdown of its own."""
    text = re.sub(r"\x1b\[[0-9;]*m", "", reason).encode("ascii", "replace").decode()
    text = " ".join(text.replace("`", "'").replace("|", "/").split())
    return f"`{text if len(text) <= 160 else text[:160] + '...'}`"


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


def by_case(
    cases: Mapping[Any, Mapping[str, Result]], metrics: dict[str, Callable[[Result], str]], *, compares: bool = False
) -> list[str]:
    """One row per provider and one column per case and metric, of tables that fit on a page.

    If the rows are to be compared, the first metric's least of each case is bold.
    """
    n_tables = -(-len(cases) * len(metrics) // MOST_COLUMNS)
    step, found = -(-len(cases) // n_tables), []
    for some in (list(cases.items())[start : start + step] for start in range(0, len(cases), step)):
        header, columns = [""], []
        for case, results in some:
            for metric, text in metrics.items():
                is_first = metric == next(iter(metrics))
                header.append(metric if not is_first else f"{case}, {metric}" if len(metrics) > 1 else str(case))
                texts = {name: text(result) for name, result in results.items() if is_timed(result)}
                best = min(map(float, texts.values()), default=None) if compares and is_first else None
                columns.append({name: f"**{each}**" if float(each) == best else each for name, each in texts.items()})
        found.append(table(header, [[name, *(column.get(name, "-") for column in columns)] for name in some[0][1]]))
    return found


def by_reduction(document: Document, metrics: dict[str, Callable[[Result], str]]) -> list[str]:
    """Tables of the means, and of what is unreduced, whose providers go from the fastest to the slowest."""
    found = []
    for kind in dict.fromkeys(case.kind for case in results_by_case(document)):
        cases = {case: results for case, results in results_by_case(document).items() if case.kind == kind}
        timed = [name for name in providers_of(cases) if any(is_timed(each.get(name)) for each in cases.values())]
        found += by_case(
            {case: {n: each.get(n, {}) for n in timed} for case, each in cases.items()}, metrics, compares=True
        )
    return found


def faster_eagerly(cases: dict[Case, dict[str, Result]]) -> str:
    """Every case in which an eager call of another provider is faster than this project's fastest."""
    rows = []
    for case, results in cases.items():
        eager = [(number(result, "microseconds_eager"), name) for name, result in results.items()]
        others = [(us, name) for us, name in eager if us is not None and not is_ours(name)]
        fastest = min((us for us, name in eager if us is not None and name in (OURS, IN_FORWARD)), default=None)
        if others and (fastest is None or min(others)[0] < fastest):
            us, name = min(others)
            rows.append(f"{case} ({name} {shown(us)} / {shown(fastest)})")
    said = "; ".join(rows) or "none"
    return f"Eager calls in us, where another provider's is faster than this project's fastest: {said}."


def logits_part(document: Document) -> str:
    """Every provider's time over the copy's, and this project's memory."""
    ours = [result for result in document["results"] if is_ours(result["provider"]) and "ratio_spread" in result]
    spread = max(((r["ratio_spread"][1] - r["ratio_spread"][0]) / r["ratio"] for r in ours), default=0.0)
    most = max(result["peak_bytes"] / result["tokens"] for result in ours if result["provider"] == OURS)
    title = (
        f"This project's ratios vary by {100 * spread:.1f} % or less, and it takes at most {most:.0f} bytes per row."
    )
    every = by_reduction(document, {"time / copy": lambda result: shown(result["ratio"])})
    said = faster_eagerly(results_by_case(document)), notes(document)
    return with_host(document, f"{title} Time / copy:", *every, *said)


def linear_part(document: Document) -> str:
    """Every provider's time over the matmuls' and its memory."""
    metrics = {"time / matmuls": lambda each: f"{each['ratio']:.3f}", "GiB": lambda each: gib(each["peak_bytes"])}
    return with_host(document, "", *by_reduction(document, metrics), notes(document))


def few_part(document: Document) -> str:
    """Microseconds of a CUDA graph's replay of each provider and of the copy."""
    for results in results_by_case(document).values():
        ours = results[OURS]
        copied = {
            "provider": "copy",
            "ratio": 1.0,
            "microseconds_graph": ours["microseconds_graph"] / ours["ratio_graph"],
        }
        document = document | {"results": [*document["results"], ours | copied]}
    captured = [each for each in document["results"] if number(each, "microseconds_graph") is not None]
    every = by_reduction(document | {"results": captured}, {"us": lambda each: f"{each['microseconds_graph']:.1f}"})
    return with_host(document, "Microseconds of a CUDA graph's replay:", *every)


def options_part(document: Document) -> str:
    """One row per call: its ratio to the copy, and in brackets to the same reduction without options."""
    cases, rows = results_by_case(document), []
    first = next(iter(cases.values()))
    for name in dict.fromkeys(name for results in cases.values() for name in results):
        plain = "none" if name.startswith(("none", "token")) else "mean"
        found = [(results.get(name), results[plain]["ratio"]) for results in cases.values()]
        cells = [f"{r['ratio']:.2f} ({r['ratio'] / without:.2f})" if r else "-" for r, without in found]
        rows.append([name, *cells, per_row(first[name]) if name in first else "-"])
    header = ["call", *(str(case).removeprefix("options").strip() for case in cases), "extra B/row"]
    return with_host(document, "", table(header, rows))


def memory_part(document: Document) -> str:
    """Extra peak memory in GiB, one row per number of tokens."""
    names = list(dict.fromkeys(result["provider"] for result in document["results"]))
    rows = []
    for case, results in results_by_case(document).items():
        cells = [gib(results[n]["peak_bytes"]) if is_timed(results[n]) else "-" for n in names]
        rows.append([str(case), gib(next(iter(results.values()))["gradient_bytes"]), *cells])
    return with_host(document, "", table(["extra GiB", "both gradients alone", *names], rows), notes(document))


def cost(result: Result) -> str:
    return f"{shown(result['ms'])} ms, {gib(result['peak_bytes'])} GiB"


def step_tables(document: Document, **metrics: Callable[[Result], str]) -> list[str]:
    """Tables of all cases that have the same providers."""
    groups: dict[tuple[str, ...], dict[str, dict[str, Result]]] = {}
    for case, results in results_by_case(document).items():
        groups.setdefault(tuple(results), {})[case] = results
    return [
        each
        for cases in groups.values()
        for each in by_case(cases, metrics | {"GiB": lambda result: gib(result["peak_bytes"])})
    ]


def steps_part(document: Document) -> str:
    """Milliseconds and new memory at the peak."""
    spreads = [abs(each / result["ms"] - 1) for result in document["results"] for each in result["ms_quartiles"]]
    title = f"Quartiles are within {100 * max(spreads):.0f} % of the medians; GiB of new memory at the peak:"
    return with_host(document, title, *step_tables(document, ms=lambda result: shown(result["ms"])))


def objective_part(document: Document) -> str:
    """The time of each call over that of the three products, with a teacher four, and its memory."""
    every = step_tables(document, **{"time / products": lambda result: f"{result['ratio']:.2f}"})
    return with_host(document, "GiB of new memory at the peak:", *every)


def losses_part(document: Document) -> str:
    """Losses over logits in copies of them, and alongside the call without the last option; then those of heads."""
    cases = {case: results for case, results in results_by_case(document).items() if case.count(" x ") == 1}
    rows = []
    for name in next(iter(cases.values())):
        base = name.rpartition(", ")[0]
        cells, memory = [], []
        for case, results in cases.items():
            of_gpu = [each.get("queued", True) for each in (results[name], results.get(base, {}))]
            cell = f"{results[name]['ratio']:.2f}" + ("" if of_gpu[0] else " (host)")
            if base in results and all(of_gpu):
                cell += f" ({100 * (results[name]['ms'] / results[base]['ms'] - 1):+.1f} %)"
            cells.append(cell)
            memory.append(f"{results[name]['peak_bytes'] / int(case.partition(' ')[0]):.0f}")
        rows.append([f"`{name}`", *cells, ", ".join(dict.fromkeys(memory))])
    title = "Time over a copy of the logits, and over the same call without the last option:"
    every = table(["call", *cases, "bytes per row"], rows)
    of_heads = document | {"results": [each for each in document["results"] if each["case"] not in cases]}
    return with_host(document, title, every, "Heads:", *step_tables(of_heads, ms=lambda result: shown(result["ms"])))


def beside_baseline(document: Document, suffix: str) -> str:
    """Each call's time over that of another checkout in the same rounds: the median, and its range."""
    rows = []
    for result in document["results"]:
        found = [result.get(field) for field in ("over_baseline", "over_baseline_eager")]
        cells = ["-" if each is None else "{:.3f} ({:.3f}-{:.3f})".format(*each) for each in found]
        if not result["provider"].endswith(suffix):
            rows.append([str(case_of(result)), result["provider"], *cells])
    return table(["case", "call", "time / baseline", "eager"], rows)


# What makes the block of a document, by the beginning of its name; otherwise it is steps_part.
BLOCKS: dict[str, Callable[..., str]] = {
    "bench_table": logits_part,
    "bench_few": few_part,
    "bench_options": options_part,
    "linear_memory": memory_part,
    "linear": linear_part,
    "losses": losses_part,
    "objective": objective_part,
}


def numbers_block(documents: Mapping[str, Document]) -> str:
    """README's rows, and where each was measured. The least of each column is bold.

    Raises:
        ValueError: a row of ratios leaves out the fastest of the others.
    """
    rows, used = [], {row["document"]: documents[row["document"]] for row in ROWS}
    for row in ROWS:
        results = {str(case): found for case, found in results_by_case(used[row["document"]]).items()}[row["case"]]
        others = {n: each["ratio"] for n, each in results.items() if is_timed(each) and not n.startswith(OURS)}
        if row.get("is_ratio") and min(others, key=lambda name: others[name]) not in row["without"]:
            raise ValueError(f"README: {row['case']}: expected the fastest of {others}, got {row['without']}")
        cells = {}
        for name in (*row["without"], row["given"]):
            ratio = f"{shown(results[name]['ratio'])} x memcpy"
            cells[name] = [ratio] if row.get("is_ratio") else cost(results[name]).split(", ")
        best = [min(column, key=lambda text: float(text.split()[0])) for column in zip(*cells.values(), strict=True)]
        said = {
            name: ", ".join(f"**{text}**" if text == least else text for text, least in zip(texts, best, strict=True))
            for name, texts in cells.items()
        }
        without = "<br>".join(f"{name}: {said[name]}" for name in row["without"])
        rows.append([row["what"], without, said[row["given"]]])
    every = table(["bf16, forward and backward", "without", "with"], rows)
    hosts = [(each["host"]["gpus_used"], each["host"]["gpu"], short_commit(each)) for each in used.values()]
    places = "; ".join(f"{count} x {gpu} ({commit})" for count, gpu, commit in dict.fromkeys(hosts))
    return f"{every}\n\nMeasured on {places}: commit and day. Bold is the least; 3 % are noise."


def pairs_block() -> str:
    """Pairs of torch and Triton, as ``doctor`` reads them, and the command that tests one."""
    rows = [[*row, f"`bash scripts/test_versions.sh {row.torch} {row.triton}`"] for row in TESTED]
    return table(["torch", "Triton", "Python", "quick lane", "compile-only lane", "GPU", "repeat it"], rows)


def lanes_block(results: Path) -> str:
    """Counts of every lane that ran on GPUs, as ``--lanes-json`` wrote them, and which frameworks were installed."""
    rows = []
    for path in sorted(results.glob("lanes_*.json")):
        document = json.loads(path.read_text(encoding="utf-8"))
        versions = [document[key].partition("+")[0] for key in ("torch", "triton", "python")]
        model = document["gpu_model"].removeprefix("NVIDIA ").partition(" ")[0]
        here = [line.partition(":")[0] for line in document["frameworks"] if "not installed" not in line]
        for lane, counts in document["lanes"].items():
            if counts["passed"] + counts["failed"]:
                said = ", ".join(f"{counts[outcome]} {outcome}" for outcome in ("passed", "failed", "skipped"))
                cells = [f"{document['gpu_count']} x {model}", *versions, lane, said, document["commit"][:7]]
                rows.append([*cells, f"`{path.stem}`", ", ".join(here)])
    return table(["GPUs", "torch", "Triton", "Python", "lane", "tests", "commit", "document", "frameworks there"], rows)


def blocks(documents: dict[str, Document], results: Path) -> dict[str, Callable[[], str]]:
    """What makes each block, by name."""
    made: dict[str, Callable[[], str]] = {
        "numbers": partial(numbers_block, documents),
        "pairs": pairs_block,
        "lanes": partial(lanes_block, results),
    }
    for name, document in documents.items():
        part = next((part for beginning, part in BLOCKS.items() if name.startswith(beginning)), steps_part)
        made[name] = partial(part, document)
    return made


def with_blocks(text: str, made: Mapping[str, Callable[[], str]], page: str, needed: Iterable[str] = ()) -> str:
    """The text with every block anew.

    Raises:
        ValueError: a marker names no block, has no other end, or one that is ``needed`` is not there once.
    """
    names = [match[2] for match in MARKED.finditer(text)]
    if len(names) != text.count("<!-- begin: ") or len(names) != text.count("<!-- end: "):
        raise ValueError(f"{page}: expected an end after each begin, got others")
    for name in (*names, *needed):
        if name not in made or names.count(name) != 1:
            raise ValueError(f"{page}: expected one begin and end of {name!r}, one of {', '.join(made)}")
    return MARKED.sub(lambda match: f"{match[1]}\n{made[match[2]]()}\n\n{match[3]}", text)


def texts(root: Path, results: Path) -> dict[Path, str]:
    """README and the pages of docs/ with their blocks anew."""
    made, readme, found = blocks(read_documents(results), results), root / "README.md", {}
    for path in (readme, *sorted((root / "docs").glob("*.md"))):
        needed = ("numbers",) if path == readme else ()
        found[path] = with_blocks(path.read_text(encoding="utf-8"), made, path.name, needed)
    return found
