"""The pictures of README and of docs/, from the committed documents."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from textwrap import fill
from typing import Any

from bench_lib.cases import OURS, Case
from bench_lib.documents import Document, is_ours, is_timed, name_of, results_by_case
from bench_lib.pages import GIB, ROWS, providers_of, shown

STEP, SPEED = "step.png", "bench_speed.png"
CASES = [Case("mean", 4096, 128256, 1), Case("none", 4096, 128256, 1), Case("none", 16384, 128256, 2)]
LONGEST_BAR = 6.5
LIMITS = {"mean": 1.0, "none": 1.5}  # one read and one write; two reads and one write
OURS_COLOUR, OTHER_COLOUR = "#0072B2", "#B0B0B0"


def draw(documents: Mapping[str, Document], folder: Path) -> None:
    """Draw README's picture and that of the loss over logits."""
    draw_step(documents, folder / STEP)
    draw_speed(documents, folder / SPEED)


def bars(axes: Any, values: Mapping[str, float], ours: set[str], longest: float) -> None:
    """Draw a bar for each name, from the bottom up, with its number."""
    colours = [OURS_COLOUR if name in ours else OTHER_COLOUR for name in values]
    drawn = axes.barh(list(values), [min(value, longest) for value in values.values()], color=colours)
    axes.bar_label(drawn, [shown(value) for value in values.values()], padding=3, fontsize=8)
    axes.set_xlim(0, longest * 1.25)
    axes.tick_params(labelsize=8)


def draw_step(documents: Mapping[str, Document], path: Path) -> None:
    """Draw time and memory of README's rows that have a ``picture``, which is their title."""
    from matplotlib.figure import Figure

    rows = [row for row in ROWS if "picture" in row]
    figure = Figure(figsize=(12, 3.6), layout="constrained")
    grid = figure.subplots(2, len(rows))
    for place, row in enumerate(rows):
        cases = results_by_case(documents[row["document"]])
        results = {str(case): found for case, found in cases.items()}[row["case"]]
        for axes, unit, field, scale in ((grid[0, place], "ms", "ms", 1), (grid[1, place], "GiB", "peak_bytes", GIB)):
            names = {row["given"]: OURS} | {name: fill(name, 20) for name in reversed(row["without"])}
            values = {text: results[name][field] / scale for name, text in names.items()}
            bars(axes, values, {OURS}, max(values.values()))
            axes.set_xlabel(unit, fontsize=8)
            axes.set_xticks([])
        grid[0, place].set_title(fill(row["picture"], 30), fontsize=9)
    figure.savefig(path, dpi=100)


def draw_speed(documents: Mapping[str, Document], path: Path) -> None:
    """Draw the time over that of a copy, in each of some cases, by provider."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 4), layout="constrained")
    for axes, case in zip(figure.subplots(1, len(CASES)), CASES, strict=True):
        results = results_by_case(documents[name_of("table", case.ranks)])[case]
        slowest_first = reversed(providers_of({case: results}))
        ratios = {name: results[name]["ratio"] for name in slowest_first if is_timed(results[name])}
        bars(axes, ratios, {name for name in ratios if is_ours(name)}, LONGEST_BAR)
        axes.axvline(LIMITS[case.kind], color="black", linewidth=0.8, linestyle="--")
        axes.set_title(f"{case}, {case.ranks} GPU{'s' * (case.ranks > 1)}", fontsize=9)
    caption = "time over that of a copy of the logits; dashed: the fewest reads and writes; bars end at 6.5"
    figure.supxlabel(caption, fontsize=9)
    figure.savefig(path, dpi=100)
