"""The tables of README and of the pages of docs/, and a picture, from the committed documents.

``<!-- begin: NAME -->`` and ``<!-- end: NAME -->`` are around what NAME stands for: a function here, or the file of a
document without its ending. ``readme.json`` has the rows of README's figures: what a row shows ``without`` this
package, and what is ``given`` with it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from bench_lib import tables
from bench_lib.cases import OURS, Case
from bench_lib.documents import Document, is_ours, is_timed, name_of, read_documents, results_by_case
from bench_lib.tables import cost, shown, table
from vocab_parallel_ce.versions import TESTED

MARKED = re.compile(r"(<!-- begin: ([\w.]+) -->\n).*?(<!-- end: \2 -->)", flags=re.DOTALL)
# What makes the block of a document, by the beginning of its name; otherwise it is tables.steps_part.
BLOCKS: dict[str, Callable[..., str]] = {
    "bench_table": tables.logits_part,
    "bench_few": tables.few_part,
    "bench_options": tables.options_part,
    "linear_memory": tables.memory_part,
    "linear": tables.linear_part,
    "losses": tables.losses_part,
    "objective": tables.objective_part,
}
ROWS: list[dict[str, Any]] = json.loads(Path(__file__).with_name("readme.json").read_text("utf-8"))
PICTURE = "bench_speed.png"
CASES = [Case("mean", 4096, 128256, 1), Case("none", 4096, 128256, 1), Case("none", 16384, 128256, 2)]
LONGEST_BAR = 6.5
LIMITS = {"mean": 1.0, "none": 1.5}  # one read and one write; two reads and one write


def place_of(document: Document) -> str:
    """The GPUs and the commit."""
    host = document["host"]
    return f"{host['gpus_used']} x {host['gpu']} ({tables.short_commit(document)})"


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
    places = "; ".join(dict.fromkeys(map(place_of, used.values())))
    return f"{every}\n\nMeasured on {places}. Bold is the least."


def lanes_of(results: Path) -> dict[str, dict[str, Any]]:
    """The documents that ``--lanes-json`` wrote on GPUs, by name."""
    found = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(results.glob("lanes_*.json"))}
    return {name: document for name, document in found.items() if document["gpu_model"] is not None}


def pairs_block() -> str:
    """Pairs of torch and Triton, as ``doctor`` reads them, and the command that tests one."""
    rows = [[*row, f"`bash scripts/test_versions.sh {row.torch} {row.triton}`"] for row in TESTED]
    return table(["torch", "Triton", "Python", "quick lane", "compile-only lane", "GPU", "repeat it"], rows)


def lanes_block(documents: Mapping[str, dict[str, Any]]) -> str:
    """Counts of every lane that ran on GPUs, and which frameworks were installed."""
    rows = []
    for name, document in documents.items():
        versions = [document[key].partition("+")[0] for key in ("torch", "triton", "python")]
        model = document["gpu_model"].removeprefix("NVIDIA ").partition(" ")[0]
        here = [line.partition(":")[0] for line in document["frameworks"] if "not installed" not in line]
        for lane, counts in document["lanes"].items():
            if counts["passed"] + counts["failed"]:
                said = ", ".join(f"{counts[outcome]} {outcome}" for outcome in ("passed", "failed", "skipped"))
                cells = [f"{document['gpu_count']} x {model}", *versions, lane, said, document["commit"][:7]]
                rows.append([*cells, f"`{name}`", ", ".join(here)])
    return table(["GPUs", "torch", "Triton", "Python", "lane", "tests", "commit", "document", "frameworks there"], rows)


def blocks(documents: dict[str, Document], lanes: dict[str, dict[str, Any]]) -> dict[str, Callable[[], str]]:
    """What makes each block, by name."""
    made: dict[str, Callable[[], str]] = {
        "numbers": partial(numbers_block, documents),
        "pairs": pairs_block,
        "lanes": partial(lanes_block, lanes),
    }
    for name, document in documents.items():
        part = next((part for beginning, part in BLOCKS.items() if name.startswith(beginning)), tables.steps_part)
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
    made, readme, found = blocks(read_documents(results), lanes_of(results)), root / "README.md", {}
    for path in (readme, *sorted((root / "docs").glob("*.md"))):
        needed = ("numbers",) if path == readme else ()
        found[path] = with_blocks(path.read_text(encoding="utf-8"), made, path.name, needed)
    return found


def draw(documents: dict[str, Document], path: Path) -> None:
    """Draw the time over that of a copy, in each of some cases, by provider."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 4), layout="constrained")
    for axes, case in zip(figure.subplots(1, len(CASES)), CASES, strict=True):
        results = results_by_case(documents[name_of("table", case.ranks)])[case]
        slowest_first = reversed(tables.providers_of({case: results}))
        bars = {name: results[name]["ratio"] for name in slowest_first if is_timed(results[name])}
        colours = ["#0072B2" if is_ours(name) else "#B0B0B0" for name in bars]
        drawn = axes.barh(list(bars), [min(ratio, LONGEST_BAR) for ratio in bars.values()], color=colours)
        axes.bar_label(drawn, [shown(ratio) for ratio in bars.values()], padding=3, fontsize=8)
        axes.axvline(LIMITS[case.kind], color="black", linewidth=0.8, linestyle="--")
        axes.set_xlim(0, LONGEST_BAR * 1.15)
        axes.set_title(f"{case}, {tables.gpus(case.ranks)}", fontsize=9)
        axes.tick_params(labelsize=8)
    caption = "time over that of a copy of the logits; dashed: the fewest reads and writes; bars end at 6.5"
    figure.supxlabel(caption, fontsize=9)
    figure.savefig(path, dpi=100)
