"""The README's picture: time over copy of each provider, a panel per case."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from bench_lib.cases import LogitsCase
from bench_lib.documents import Document, is_ours, name_of, results_by_case
from bench_lib.report import gpus, number, providers_of, shown

SHAPES = (("mean", 4096, 128256, 1), ("none", 4096, 128256, 1), ("none", 16384, 32064, 4))
CASES = [LogitsCase(*shape) for shape in SHAPES]
LONGEST_BAR = 6.5
LIMITS = {"mean": 1.0, "none": 1.5}  # one read and one write; two reads and one write


def digest(documents: dict[str, Document]) -> str:
    """Of what the picture shows; it carries it, so that a check needs no drawing."""
    shown_documents = [documents[name_of("table", case.ranks)]["results"] for case in CASES]
    return hashlib.sha256(json.dumps(shown_documents, sort_keys=True).encode()).hexdigest()


def is_drawn_from(path: Path, documents: dict[str, Document]) -> bool:
    return path.exists() and digest(documents).encode() in path.read_bytes()


def draw(documents: dict[str, Document], path: Path) -> None:
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, len(CASES), figsize=(13, 4), layout="constrained")
    for axes, case in zip(panels, CASES, strict=True):
        results = results_by_case(documents[name_of("table", case.ranks)])[case]
        ratios = {name: number(results[name], "ratio") for name in providers_of({case: results})}
        bars = {name: ratio for name, ratio in reversed(ratios.items()) if ratio is not None}
        colours = ["#0072B2" if is_ours(name) else "#B0B0B0" for name in bars]
        lengths = [min(ratio, LONGEST_BAR) for ratio in bars.values()]
        drawn = axes.barh(list(bars), lengths, color=colours)
        axes.bar_label(drawn, [shown("ratio", ratio) for ratio in bars.values()], padding=3, fontsize=8)
        axes.axvline(LIMITS[case.reduction], color="black", linewidth=0.8, linestyle="--")
        axes.set_xlim(0, LONGEST_BAR * 1.15)
        axes.set_title(f"{case}, {gpus(case.ranks)}", fontsize=9)
        axes.tick_params(labelsize=8)
    caption = "time over that of a copy of the logits; dashed: the fewest reads and writes; bars end at 6.5"
    figure.supxlabel(caption, fontsize=9)
    figure.savefig(path, dpi=100, metadata={"Source": digest(documents)})
    pyplot.close(figure)
