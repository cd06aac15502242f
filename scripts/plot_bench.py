"""Draws the sweeps of ``bench_cross_entropy.py`` and keeps the README's tables the same as its documents.

    python scripts/plot_bench.py            draw scripts/results/bench_sweep_*.png, print the README's section
    python scripts/plot_bench.py --write    draw, and rewrite the section between the README's two markers
    python scripts/plot_bench.py --check    change nothing; name what is stale and exit with 1 if anything is
    python scripts/plot_bench.py --compare OLD.json NEW.json    change nothing; print both runs' ratios

A picture carries the digest of the document it was drawn from, so that a check needs no drawing.
"""

from __future__ import annotations

import argparse
import fnmatch
import hashlib
import io
import json
import math
import os
import re
import statistics
import struct
import sys
import textwrap
from pathlib import Path
from typing import Any

from bench.comparison import compared_runs, earlier_default
from bench.documents import (
    PROVIDERS,
    RESULTS,
    ROOT,
    SWEEPS,
    TABLES,
    WAYS,
    Case,
    Document,
    Result,
    formulas_of,
    is_timed,
    package_versions,
    position,
    providers_of,
    read_documents,
    read_targets,
    results_by_case,
)
from report_bench import NOTHING, WAITS, predictions_part, table_part, targets_part

BEGIN = "<!-- begin: python scripts/plot_bench.py --write -->"
END = "<!-- end: python scripts/plot_bench.py --write -->"
LIMIT_OF_ONE_PASS, LIMIT = 1.0, 1.5  # a read and a write; two reads and a write
ELEMENT_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
PANEL_ROWS = {"ratio": "time / copy", "terabytes_per_second": "TB/s of the bytes stated below"}
LABEL_GAP = 0.056  # of a panel's height
Y_TICKS = [mantissa * 10.0**power for power in range(-5, 5) for mantissa in (1, 1.5, 2, 3, 5)]
COLOURS = 64
LARGEST_PNG = 200_000  # bytes
DIGEST_KEY = "Source"
INTRODUCTION = """\
`us`, and `time / copy` over `out.copy_(logits)` of the same round, are the device's time with the calls
queued before it begins; `predicted us` is the cost model's time for it, and in brackets its error; `eager us`
is a call's time in a loop, host included; `CUDA graph us` a replay's. Medians over interleaved rounds, of the
slowest rank. The lowest ratio is bold, and its equals at two decimals. `extra B/row`: peak memory beyond what
there was before the call."""

# Colour, line, marker and whether that is filled: in grey the last three tell the providers apart.
STYLES = dict(
    zip(
        PROVIDERS,
        (
            ("black", "-", "o", "full"),
            ("black", "-", "o", "none"),
            ("black", "--", "o", "none"),
            ("black", ":", "o", "left"),
            ("#0072B2", "-", "s", "full"),
            ("#0072B2", "--", "s", "none"),
            ("#0072B2", ":", "s", "left"),
            ("#D55E00", "--", "^", "full"),
            ("#007A58", "-", "D", "full"),
            ("#007A58", "--", "D", "none"),
            ("#A8437F", "-.", "v", "full"),
            ("#B87A00", "-", "x", "full"),
            ("#2F86B5", ":", "P", "full"),
            ("#6E6E1E", "--", "*", "full"),
            ("#606060", "-.", "<", "none"),
        ),
        strict=True,
    )
)


def digest(document: Document) -> str:
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()


def panels_of(document: Document) -> dict[tuple[str, str], dict[Case, dict[str, Result]]]:
    """The cases of each (reduction, dtype), mean first."""
    panels: dict[tuple[str, str], dict[Case, dict[str, Result]]] = {}
    for case, results in sorted(results_by_case(document).items()):
        panels.setdefault((case.reduction, case.dtype), {})[case] = results
    return panels


def series(
    cases: dict[Case, dict[str, Result]], axis: str, provider: str, metric: str
) -> tuple[list[int], list[float]]:
    """One provider's line; NaN, which breaks the line, where it has no number."""
    places = [position(case, axis) for case in cases]
    if len(set(places)) != len(places):
        raise ValueError(f"{axis}: expected one case a place, got {sorted(places)}")
    points = {}
    for case, results in cases.items():
        result = results.get(provider)
        points[position(case, axis)] = result[metric] if result and is_timed(result) else math.nan
    return sorted(points), [points[place] for place in sorted(points)]


def spread(heights: list[float], gap: float) -> list[float]:
    """Heights at least ``gap`` apart, in the same order and near the given ones, between 0 and 1."""
    order = sorted(range(len(heights)), key=heights.__getitem__)
    placed = [0.0] * len(heights)
    floor = -math.inf
    for index in order:
        placed[index] = floor = max(heights[index], floor + gap)
    ceiling = 1.0 + gap
    for index in reversed(order):
        placed[index] = ceiling = min(placed[index], ceiling - gap)
    return placed


def look_of(provider: str) -> dict[str, Any]:
    colour, pattern, marker, fill = STYLES[provider]
    width, size, order = (3.2, 7.5, 5) if provider in WAYS else (1.3, 6, 4)
    look = {"color": colour, "linestyle": pattern, "marker": marker, "fillstyle": fill}
    return look | {"linewidth": width, "markersize": size, "zorder": order}


def label_lines(axes: Any, ends: dict[str, tuple[int, float]], limit: str) -> None:
    """To the right of the panel each line's sample and name, with a hair line to its last point."""
    transform = axes.transData + axes.transAxes.inverted()
    heights = spread([transform.transform(end)[1] for end in ends.values()], LABEL_GAP)
    for (name, end), height in zip(ends.items(), heights, strict=True):
        leader = {"arrowstyle": "-", "linewidth": 0.5, "color": "0.55", "shrinkA": 0, "shrinkB": 4}
        place = {"textcoords": "axes fraction", "annotation_clip": False}
        axes.annotate("", xy=end, xytext=(1.05, height), arrowprops=leader, **place)
        look = {"color": "black", "linewidth": 0.8} if name == limit else look_of(name)
        sample = [1.055, 1.09, 1.125], [height] * 3
        axes.plot(*sample, transform=axes.transAxes, clip_on=False, markevery=[1], **look)
        weight = "bold" if name in WAYS else "normal"
        axes.text(1.14, height, name, transform=axes.transAxes, va="center", fontsize=8.5, weight=weight)


def copy_series(cases: dict[Case, dict[str, Result]], axis: str) -> tuple[list[int], list[float]]:
    """TB/s of the copy itself, one read and one write, as measured in this project's rounds."""
    points = {}
    for case, results in cases.items():
        times = [result["copy_microseconds"] for result in results.values() if is_timed(result)]
        moved = 2 * case.rows * case.columns * ELEMENT_BYTES[case.dtype]
        points[position(case, axis)] = moved / statistics.median(times) / 1e6
    return sorted(points), [points[place] for place in sorted(points)]


def limit_of(case: Case) -> float:
    """Time over copy of a call that moves no byte too many: one rank's mean needs one read and one write."""
    return LIMIT_OF_ONE_PASS if case.reduction == "mean" and case.ranks == 1 else LIMIT


def draw_panel(
    axes: Any, cases: dict[Case, dict[str, Result]], axis: str, metric: str, providers: list[str]
) -> list[str]:
    """Draw one panel; returns the providers that have no point in it."""
    limit = limit_of(next(iter(cases)))
    if metric == "ratio":
        places, values, name = copy_series(cases, axis)[0], [limit] * len(cases), f"limit {limit}"
    else:
        (places, values), name = copy_series(cases, axis), "copy"
    axes.plot(places, values, color="black", linewidth=0.8)
    ends, left_out = {name: (places[-1], values[-1])}, []
    lowest, highest = min(values), max(values)
    for provider in providers:
        places, values = series(cases, axis, provider, metric)
        finite = [(x, y) for x, y in zip(places, values, strict=True) if not math.isnan(y)]
        if not finite:
            left_out.append(provider)
            continue
        axes.plot(places, values, **look_of(provider))
        ends[provider] = finite[-1]
        lowest, highest = min(lowest, *(y for _, y in finite)), max(highest, *(y for _, y in finite))
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_ylim(lowest / 1.15, highest * 1.15)
    axes.set_xticks(places, [str(place) for place in places], fontsize=8, rotation=40)
    ticks = [t for t in Y_TICKS if lowest / 1.15 <= t <= highest * 1.15]
    axes.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    axes.grid(alpha=0.35, linewidth=0.6)
    label_lines(axes, ends, name)
    return left_out


def title_of(document: Document, axis: str) -> list[str]:
    """What was measured on what: the GPU, the versions, the commit, and the size that the sweep keeps."""
    host = document["host"]
    cases = results_by_case(document)
    kept = sorted({case.rows if axis == "vocabulary" else case.vocabulary for case in cases})
    size = f"{kept[0]}" if len(kept) == 1 else f"{kept[0]} to {kept[-1]}"
    size = f"{size} tokens" if axis == "vocabulary" else f"vocabulary {size}"
    versions = f"torch {host['torch']}, Triton {host['triton']}, CUDA {host['cuda']}, Python {host['python']}"
    return [
        f"Cross-entropy, forward + backward, {size}: {host['gpus_used']} x {host['gpu']}",
        f"{versions}, commit {host['commit'][:12]}",
    ]


def small_print(document: Document, axis: str, left_out: dict[str, list[str]]) -> list[str]:
    """Below the panels: the bytes' formulas, the packages' versions, and who has no line."""
    lines = [
        f"Bytes: {formula}: {', '.join(users)}" for formula, users in formulas_of(document, axis).items()
    ]
    lines += [f"Versions: {', '.join(package_versions(document))}"]
    lines += [
        f"No line for {panel} (refused): {', '.join(names)}" for panel, names in left_out.items() if names
    ]
    absent = document["absent"]
    lines += [f"Absent: {', '.join(absent)}"] if absent else []
    waiting = {r["provider"] for r in document["results"] if is_timed(r) and not r["queued"]}
    lines += [f"{', '.join(sorted(waiting))}: {WAITS}"] if waiting else []
    return lines


def draw(document: Document, axis: str, path: Path) -> None:
    """One sweep: time over copy above TB/s, a column a reduction."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    panels = panels_of(document)
    count = len(panels)
    figure, grid = pyplot.subplots(2, count, figsize=(6.8 * count, 9), squeeze=False)
    left_out = {}
    for column, ((reduction, dtype), cases) in enumerate(panels.items()):
        name = f"{reduction}, {dtype}"
        for row, (metric, label) in enumerate(PANEL_ROWS.items()):
            left_out[name] = draw_panel(grid[row][column], cases, axis, metric, providers_of(document))
            grid[row][column].set_ylabel(label)
        grid[0][column].set_title(name, loc="left", weight="bold")
        grid[1][column].set_xlabel("tokens" if axis == "tokens" else "vocabulary, over all ranks")
    title = wrapped(title_of(document, axis), 68 * count)
    below = wrapped(small_print(document, axis, left_out), 105 * count)
    figure.suptitle("\n".join(title), x=0.02, y=0.985, ha="left", fontsize=12)
    figure.text(0.02, 0.012, "\n".join(below), fontsize=7.5, va="bottom")
    top, bottom = 0.948 - 0.024 * len(title), 0.098 + 0.0145 * len(below)
    figure.subplots_adjust(0.11 / count, bottom, 1 - 0.41 / count, top, wspace=0.96, hspace=0.2)
    save(figure, document, path)


def save(figure: Any, document: Document, path: Path) -> None:
    """A small PNG with the digest of the ``document`` that it shows; closes the figure."""
    from matplotlib import pyplot
    from PIL import Image
    from PIL.PngImagePlugin import PngInfo

    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110)
    pyplot.close(figure)
    text = PngInfo()
    text.add_text(DIGEST_KEY, digest(document))
    Image.open(buffer).convert("RGB").quantize(COLOURS).save(path, optimize=True, pnginfo=text)
    if path.stat().st_size > LARGEST_PNG:
        raise ValueError(f"{path}: expected at most {LARGEST_PNG} bytes, got {path.stat().st_size}")


def wrapped(lines: list[str], width: int) -> list[str]:
    return [part for line in lines for part in textwrap.wrap(line, width)]


def drawn_digest(path: Path) -> str | None:
    """The digest that ``draw`` left in a picture; None where there is no picture, or another's."""
    data = path.read_bytes() if path.exists() else b""
    offset = 8  # behind the signature; a chunk is its length, its type, its data and a checksum
    while offset + 8 <= len(data):
        length, kind = struct.unpack(">I4s", data[offset : offset + 8])
        key, _, value = data[offset + 8 : offset + 8 + length].partition(b"\0")
        if kind == b"tEXt" and key.decode("latin-1") == DIGEST_KEY:
            return value.decode("latin-1")
        offset += 12 + length
    return None


def sweeps_of(documents: dict[str, Document]) -> dict[str, str]:
    """The axis of each sweep among ``documents`` by file name."""
    return {
        name: axis for axis, pattern in SWEEPS.items() for name in documents if fnmatch.fnmatch(name, pattern)
    }


def picture_of(name: str) -> str:
    return str(Path(name).with_suffix(".png"))


def parts_of(documents: dict[str, Document], targets: Document, pictures: str) -> dict[str, str]:
    """The generated section's parts by title; ``pictures`` is the pictures' folder, seen from the README."""
    if not documents:
        return {"": NOTHING}
    parts = {"": INTRODUCTION}
    for ranks, name in TABLES.items():
        if name in documents:
            title = f"Measured on {ranks} GPU{'s' * (ranks > 1)} (`{name}`)"
            parts[title] = table_part(documents[name], targets)
    if any(name in documents for name in TABLES.values()):
        parts["Targets"] = targets_part(documents, targets)
    for name, axis in sweeps_of(documents).items():
        alternative = f"Time over copy and TB/s of every provider against {axis}"
        picture = f"![{alternative}]({pictures}/{picture_of(name)})"
        said = earlier_default(documents[name], list(documents.values()))
        parts[f"Against {axis} (`{name}`)"] = f"{said}\n\n{picture}".strip()
    predictions = predictions_part(documents)
    if predictions:
        parts["Predicted time for more ranks"] = predictions
    return parts


def section_of(parts: dict[str, str]) -> str:
    return "\n\n".join(f"**{title}**\n\n{text}" if title else text for title, text in parts.items())


def split_section(section: str) -> dict[str, str]:
    """The parts of a section, back from its text."""
    pieces = re.split(r"^\*\*(.+)\*\*$", section, flags=re.MULTILINE)
    return {"": pieces[0].strip()} | {
        title: text.strip() for title, text in zip(pieces[1::2], pieces[2::2], strict=True)
    }


def split_readme(readme: str, begin: str = BEGIN, end: str = END) -> tuple[str, str, str]:
    """The text up to the first marker, between the two, and from the second on."""
    if readme.count(begin) != 1 or readme.count(end) != 1 or readme.index(begin) > readme.index(end):
        raise ValueError(f"README: expected one {begin!r} and then one {end!r}")
    start, stop = readme.index(begin) + len(begin), readme.index(end)
    return readme[:start], readme[start:stop].strip(), readme[stop:]


def stale(readme: str, parts: dict[str, str], documents: dict[str, Document], results: Path) -> list[str]:
    """What differs from the documents: the README's parts by their titles, and pictures."""
    written = split_section(split_readme(readme)[1])
    found = []
    for title in [*parts, *(title for title in written if title not in parts)]:
        if parts.get(title) != written.get(title):
            found.append(f"README: {title or 'the text before the tables'}")
    for name in sweeps_of(documents):
        if drawn_digest(results / picture_of(name)) != digest(documents[name]):
            found.append(f"{picture_of(name)}: not drawn from this {name}")
    return found


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    action = parser.add_mutually_exclusive_group()
    action.add_argument("--write", action="store_true", help="also rewrite the README's section")
    action.add_argument("--check", action="store_true", help="exit with 1 and say what is stale")
    action.add_argument("--compare", type=Path, nargs=2, metavar=("OLD", "NEW"), help="print two runs")
    parser.add_argument("--results", type=Path, default=RESULTS, help="the folder of the JSON and PNG files")
    parser.add_argument("--readme", type=Path, default=ROOT / "README.md")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(arguments)
    if options.compare:
        print(compared_runs(*(json.loads(path.read_text(encoding="utf-8")) for path in options.compare)))
        return 0
    documents = read_documents(options.results)
    pictures = Path(os.path.relpath(options.results, options.readme.parent)).as_posix()
    parts = parts_of(documents, read_targets(options.results), pictures)
    readme = options.readme.read_text(encoding="utf-8")
    if options.check:
        differences = stale(readme, parts, documents, options.results)
        for difference in differences:
            print(f"stale: {difference}; python scripts/plot_bench.py --write renews it")
        return 1 if differences else 0
    for name, axis in sweeps_of(documents).items():
        path = options.results / picture_of(name)
        draw(documents[name], axis, path)
        print(f"drawn: {path}")
    if options.write:
        before, _, after = split_readme(readme)
        options.readme.write_text(f"{before}\n\n{section_of(parts)}\n\n{after}", encoding="utf-8")
        print(f"written: {options.readme}")
    else:
        print(section_of(parts))
    return 0


if __name__ == "__main__":
    sys.exit(main())
