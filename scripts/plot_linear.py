"""Draws what ``bench_linear_cross_entropy.py`` wrote and keeps the README's part about it the same.

    python scripts/plot_linear.py            draw scripts/results/linear_*.png, print the README's part
    python scripts/plot_linear.py --write    draw, and rewrite the part between the README's two markers
    python scripts/plot_linear.py --check    change nothing; name what is stale and exit with 1 if anything is

A picture carries the digest of the document it was drawn from, so that a check needs no drawing.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from bench.documents import OURS, Document, is_timed
from bench.linear_documents import GIB, MEMORY, PROFILES, TABLES, case_of, read_documents, read_targets
from plot_bench import (
    digest,
    drawn_digest,
    parse_arguments,
    picture_of,
    save,
    section_of,
    split_readme,
    split_section,
    wrapped,
)
from report_bench import NOTHING
from report_linear import (
    INTRODUCTION,
    growth_text,
    heading,
    host_line,
    overlap_text,
    table_part,
    targets_part,
)

BEGIN = "<!-- begin: python scripts/plot_linear.py --write -->"
END = "<!-- end: python scripts/plot_linear.py --write -->"
# Colour, line and marker: in grey the last two tell the lines apart.
LOOKS = (
    ("black", "-", "o"),
    ("#0072B2", "--", "s"),
    ("#D55E00", "-.", "^"),
    ("#007A58", ":", "D"),
    ("#A8437F", "--", "v"),
    ("#B87A00", "-.", "x"),
    ("#606060", ":", "P"),
)
# Fill and hatching of a category: in grey the hatching and the lightness tell them apart.
FILLS = {
    "matmul": ("#8FB1D9", ""),
    "loss": ("#F4A259", "///"),
    "other": ("#FFFFFF", "..."),
    "all_gather": ("#7A0015", ""),
    "all_reduce": ("#9BC995", "\\\\\\"),
    "reduce_scatter": ("#C9B6E4", "xxx"),
    "nccl, other": ("#DDDDDD", "---"),
}
BAR_HEIGHT = 0.7


def draw_memory(document: Document, path: Path) -> None:
    """Extra peak memory against tokens, log-log: a line a provider, and one of the gradients alone."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    points = document["points"]
    names = list(dict.fromkeys(point["provider"] for point in points))
    if len(names) > len(LOOKS):
        raise ValueError(f"points: expected at most {len(LOOKS)} providers, got {', '.join(names)}")
    figure, axes = pyplot.subplots(figsize=(9, 6.2))
    tokens = sorted({point["tokens"] for point in points})
    gradients = {point["tokens"]: point["gradient_bytes"] / GIB for point in points}
    floor = [gradients[count] for count in tokens]
    axes.plot(tokens, floor, color="black", linewidth=0.9, label="both gradients")
    below = []
    for name, (colour, pattern, marker) in zip(names, LOOKS, strict=False):
        line = [point for point in points if point["provider"] == name and is_timed(point)]
        refused = [point for point in points if point["provider"] == name and not is_timed(point)]
        below += [f"{name}: {refused[0]['refused']}."] if refused else []
        look: dict[str, Any] = {"color": colour, "linestyle": pattern, "marker": marker}
        look |= {"linewidth": 2.8, "markersize": 8} if name == OURS else {"linewidth": 1.4, "markersize": 6}
        sizes = [point["extra_peak_bytes"] / GIB for point in line]
        axes.plot([point["tokens"] for point in line], sizes, label=name, **look)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xticks(tokens, [str(count) for count in tokens])
    ticks = [2.0**power for power in range(-2, 9)]
    low, high = axes.get_ylim()
    shown = [tick for tick in ticks if low <= tick <= high]
    axes.set_yticks(shown, [f"{tick:g}" for tick in shown])
    axes.minorticks_off()
    axes.grid(alpha=0.35, linewidth=0.6)
    axes.set_xlabel("tokens")
    axes.set_ylabel("GiB beyond the inputs, gradients included")
    axes.legend(fontsize=9, framealpha=1, loc="upper left")
    case = case_of(points[0])
    title = f"Linear cross-entropy, forward + backward, {case.vocabulary} x {case.hidden_size} {case.dtype}"
    below += [f"Absent: {', '.join(document['absent'])}."] if document["absent"] else []
    finish(figure, document, title, below, path)


def draw_profile(document: Document, path: Path) -> None:
    """One step on the first rank: what ran when, a lane a stream."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot
    from matplotlib.patches import Patch

    timeline = document["timeline"]
    lanes, intervals = timeline["lanes"], timeline["intervals"]
    figure, axes = pyplot.subplots(figsize=(13, 2.9 + 0.75 * len(lanes)))
    found = [name for name in FILLS if any(i["category"] == name for i in intervals)]
    for name in found:
        colour, hatch = FILLS[name]
        for lane in range(len(lanes)):
            spans = [
                (i["start"] / 1e3, (i["end"] - i["start"]) / 1e3)
                for i in intervals
                if i["category"] == name and i["lane"] == lane
            ]
            look: dict[str, Any] = {
                "facecolor": colour,
                "hatch": hatch,
                "edgecolor": "black",
                "linewidth": 0.5,
            }
            axes.broken_barh(spans, (-lane - BAR_HEIGHT / 2, BAR_HEIGHT), **look)
    labels = [f"{name} stream" for name in lanes]
    axes.set_yticks([-lane for lane in range(len(lanes))], labels)
    axes.set_ylim(-len(lanes) + 0.5, 0.5)
    axes.set_xlim(0, max(i["end"] for i in intervals) / 1e3)
    axes.set_xlabel("ms")
    axes.grid(axis="x", alpha=0.35, linewidth=0.6)
    patches = [
        Patch(facecolor=FILLS[name][0], hatch=FILLS[name][1], edgecolor="black", label=name) for name in found
    ]
    axes.legend(handles=patches, ncols=len(found), loc="lower left", bbox_to_anchor=(0, 1.01), frameon=False)
    title = f"One step of {document['case']['provider']}, {heading(case_of(document['case']))}, on rank 0"
    below = [f"Rank {rank}, ms: {overlap_text(of)}." for rank, of in enumerate(document["ranks"])]
    finish(figure, document, title, below, path, above=0.75)


def finish(
    figure: Any, document: Document, title: str, below: list[str], path: Path, above: float = 0.45
) -> None:
    """Title, host and small print around the axes, which have ``above`` inches over them, and the file."""
    width, height = figure.get_size_inches()
    small = wrapped([host_line(document), *below], int(17 * width))
    lines = 0.16 * len(small) + 0.1
    figure.text(0.02, 0.08 / height, "\n".join(small), fontsize=8, va="bottom")
    figure.suptitle(title, x=0.02, y=1 - 0.1 / height, ha="left", va="top", fontsize=12)
    figure.subplots_adjust(1.4 / width, (lines + 0.6) / height, 1 - 0.2 / width, 1 - above / height)
    save(figure, document, path)


def draw(name: str, document: Document, path: Path) -> None:
    (draw_memory if name == MEMORY else draw_profile)(document, path)


def parts_of(documents: dict[str, Document], targets: Document, pictures: str) -> dict[str, str]:
    """The README's parts by title; ``pictures`` is the pictures' folder, seen from the README."""
    if not documents:
        return {"": NOTHING}
    parts = {"": INTRODUCTION}
    for ranks, name in TABLES.items():
        if name in documents:
            title = f"Linear cross-entropy on {ranks} GPU{'s' * (ranks > 1)} (`{name}`)"
            parts[title] = table_part(documents[name], targets)
    if any(name in documents for name in TABLES.values()):
        parts["Targets of the linear cross-entropy"] = targets_part(documents, targets)
    if MEMORY in documents:
        picture = f"![Extra peak memory of every provider against tokens]({pictures}/{picture_of(MEMORY)})"
        growth = growth_text(documents[MEMORY]["points"], targets)
        parts[f"Peak memory against tokens (`{MEMORY}`)"] = f"{growth}\n\n{picture}"
    for ranks, name in PROFILES.items():
        if name in documents:
            picture = f"![One step's kernels on rank 0, a lane a stream]({pictures}/{picture_of(name)})"
            case = heading(case_of(documents[name]["case"]))
            text = f"{case}, rank 0, in ms: {overlap_text(documents[name]['ranks'][0])}."
            parts[f"Overlap on {ranks} GPUs (`{name}`)"] = f"{text}\n\n{picture}"
    return parts


def stale(readme: str, parts: dict[str, str], documents: dict[str, Document], results: Path) -> list[str]:
    """What differs from the documents: the README's parts by their titles, and pictures."""
    written = split_section(split_readme(readme, BEGIN, END)[1])
    titles = dict.fromkeys([*parts, *written])
    found = [
        f"README: {title or 'the text before the tables'}"
        for title in titles
        if parts.get(title) != written.get(title)
    ]
    for name in drawn_of(documents):
        if drawn_digest(results / picture_of(name)) != digest(documents[name]):
            found.append(f"{picture_of(name)}: not drawn from this {name}")
    return found


def drawn_of(documents: dict[str, Document]) -> list[str]:
    return [name for name in documents if name == MEMORY or name in PROFILES.values()]


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(arguments)
    documents = read_documents(options.results)
    pictures = Path(os.path.relpath(options.results, options.readme.parent)).as_posix()
    parts = parts_of(documents, read_targets(options.results), pictures)
    if options.check:
        differences = stale(options.readme.read_text(encoding="utf-8"), parts, documents, options.results)
        for difference in differences:
            print(f"stale: {difference}; python scripts/plot_linear.py --write renews it")
        return 1 if differences else 0
    for name in drawn_of(documents):
        path = options.results / picture_of(name)
        draw(name, documents[name], path)
        print(f"drawn: {path}")
    if not options.write:
        print(section_of(parts))
        return 0
    before, _, after = split_readme(options.readme.read_text(encoding="utf-8"), BEGIN, END)
    options.readme.write_text(f"{before}\n\n{section_of(parts)}\n\n{after}", encoding="utf-8")
    print(f"written: {options.readme}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
