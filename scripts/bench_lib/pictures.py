"""The pictures of the pages, from the committed documents. Each carries a digest of what it shows."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench_lib.cases import Case
from bench_lib.documents import Document, is_ours, name_of, results_by_case
from bench_lib.tables import GIB, gpus, number, providers_of, shown

RATIOS = "bench_speed.png"
CASES = [Case("mean", 4096, 128256, 1), Case("none", 4096, 128256, 1), Case("none", 16384, 128256, 2)]
LONGEST_BAR = 6.5
LIMITS = {"mean": 1.0, "none": 1.5}  # one read and one write; two reads and one write
STEPS = ("frameworks_2gpu", "megatron_2gpu", "transformers_step_1gpu")  # whose picture a page shows
Shown = dict[str, Any]  # case and provider, and what is drawn of it


def pictures(documents: dict[str, Document]) -> dict[str, tuple[Shown, Callable[[Any, Shown], Any]]]:
    """What each picture shows, and what draws it, by file name: time over copy, or milliseconds and GiB."""
    panels = {}
    for case in CASES:
        results = results_by_case(documents[name_of("table", case.ranks)])[case]
        ratios = {name: number(results[name], "ratio") for name in providers_of({case: results})}
        bars = {name: ratio for name, ratio in ratios.items() if ratio is not None}
        panels[f"{case}, {gpus(case.ranks)}"] = {"floor": LIMITS[case.kind], "bars": bars}
    steps = {
        f"{name}.png": {
            case: {n: [each["ms"], (each["peak_bytes"] or 0) / GIB] for n, each in results.items() if "ms" in each}
            for case, results in results_by_case(documents[name]).items()
        }
        for name in STEPS
        if name in documents
    }
    return {RATIOS: (panels, _draw_ratios)} | {name: (shown_here, _draw_steps) for name, shown_here in steps.items()}


def digest(shown_here: Shown) -> str:
    """Of what a picture shows; it carries it, so that a check needs no drawing."""
    return hashlib.sha256(json.dumps(shown_here, sort_keys=True).encode()).hexdigest()


def stale(documents: dict[str, Document], folder: Path) -> list[Path]:
    """The pictures that do not show the documents."""
    wanted = {folder / name: digest(shown_here) for name, (shown_here, _) in pictures(documents).items()}
    return [path for path, of in wanted.items() if not path.exists() or of.encode() not in path.read_bytes()]


def draw_all(documents: dict[str, Document], folder: Path) -> None:
    """Draw the pictures that are stale."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    for path in stale(documents, folder):
        shown_here, draw = pictures(documents)[path.name]
        figure = draw(pyplot, shown_here)
        figure.savefig(path, dpi=100, metadata={"Source": digest(shown_here)})
        pyplot.close(figure)


def _draw_ratios(pyplot: Any, panels: Shown) -> Any:
    figure, every = pyplot.subplots(1, len(panels), figsize=(13, 4), layout="constrained")
    for axes, (title, panel) in zip(every, panels.items(), strict=True):
        bars = dict(reversed(panel["bars"].items()))
        colours = ["#0072B2" if is_ours(name) else "#B0B0B0" for name in bars]
        drawn = axes.barh(list(bars), [min(ratio, LONGEST_BAR) for ratio in bars.values()], color=colours)
        axes.bar_label(drawn, [shown(ratio) for ratio in bars.values()], padding=3, fontsize=8)
        axes.axvline(panel["floor"], color="black", linewidth=0.8, linestyle="--")
        axes.set_xlim(0, LONGEST_BAR * 1.15)
        axes.set_title(title, fontsize=9)
        axes.tick_params(labelsize=8)
    caption = "time over that of a copy of the logits; dashed: the fewest reads and writes; bars end at 6.5"
    figure.supxlabel(caption, fontsize=9)
    return figure


def _draw_steps(pyplot: Any, cases: Shown) -> Any:
    """A bar of each provider and case, of time and of memory."""
    providers = [*dict.fromkeys(provider for results in cases.values() for provider in results)]
    size = 12, 1 + max(0.9, 0.14 * len(providers)) * len(cases)
    figure, axes = pyplot.subplots(1, 2, figsize=size, layout="constrained")
    height = 0.85 / len(providers)
    for which, (axis, label) in enumerate(zip(axes, ("step, ms", "new memory at the peak, GiB"), strict=True)):
        axis.set_prop_cycle(color=pyplot.get_cmap("tab20").colors)
        for index, provider in enumerate(providers):
            values = [results[provider][which] if provider in results else math.nan for results in cases.values()]
            bars = axis.barh([number + height * index for number in range(len(cases))], values, height, label=provider)
            axis.bar_label(bars, fmt="%.4g", fontsize=7)
        axis.set(xlabel=label, yticks=[number + 0.4 for number in range(len(cases))])
        axis.set_yticklabels([] if which else list(cases), fontsize=7)
        axis.invert_yaxis()
        axis.margins(x=0.12)  # for the numbers of the longest bars
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside right upper", fontsize=7)
    return figure
