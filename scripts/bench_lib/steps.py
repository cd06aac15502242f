"""Times whole training steps, which providers take in turns: arguments, measurements, documents and pictures."""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor
from tqdm import tqdm

from bench_lib.documents import Document, host_description, version_of, write_document
from bench_lib.timing import DeviceTimer, Ranks


class _Plot(argparse.Action):
    """Draws a document beside it, and ends the program."""

    def __call__(self, parser: argparse.ArgumentParser, namespace: Any, values: Any, option: str | None = None) -> None:
        draw(json.loads(values.read_text()), values.with_suffix(".png"))
        parser.exit()


def parser_of(description: str | None, *, rounds: int = 10, has_tiny: bool = True) -> argparse.ArgumentParser:
    """Return a parser of the arguments that all scripts of steps have."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=rounds)
    if has_tiny:
        parser.add_argument("--tiny", action="store_true")
    whole = "write the document here, and draw it beside it"
    parser.add_argument("--json", "--out", type=Path, metavar="PATH", help=whole)
    parser.add_argument("--plot", type=Path, action=_Plot, metavar="DOCUMENT", help="only draw a document, beside it")
    return parser


def run(
    head: Document, cases: Iterable[Any], measure: Callable[[Any], Document], ranks: Ranks, path: Path | None
) -> None:
    """Measure the cases. The first rank shows each, writes what there is until then, and draws all at the end."""
    document = head | {"cases": []}
    for case in cases:
        document["cases"].append(measure(case))
        if ranks.is_first:
            write_document(document, path)
            show(document["cases"][-1])
    if ranks.is_first:
        save(document, path)


def head_of(kind: str, modules: Mapping[str, str] | None = None) -> Document:
    """Return the beginning of a document, with the versions of the packages that have these ``modules``."""
    versions = {package: version_of(package, module) for package, module in (modules or {}).items()}
    return {"kind": kind, "host": host_description() | versions}


def measured(
    case: str,
    providers: Mapping[str, Callable[[], AbstractContextManager[Any]]],
    step: Callable[[str], Tensor],
    forget: Callable[[], None],
    timer: DeviceTimer,
    rounds: int,
    *,
    is_queued: bool = False,
) -> Document:
    """Return of each provider the median milliseconds, the peak memory beyond what was there, and the loss.

    ``ratio`` is to the milliseconds of the first provider.

    Args:
        providers: of each name, what makes the context of its steps.
        step: runs one step of a provider and returns its loss.
        forget: drops the gradients; not timed.
        is_queued: time the device alone, for steps that are shorter than what the host does for them.
    """
    timed = timer.queued if is_queued else timer.eager
    names = list(providers)
    times: dict[str, list[float]] = {name: [] for name in names}
    peaks, losses = dict.fromkeys(names, 0.0), dict.fromkeys(names, 0.0)
    for number in tqdm(range(rounds + 1), desc=case, disable=None):
        turns = names[number % len(names) :] + names[: number % len(names)]
        if number // len(names) % 2:  # or one would always follow the same other, which may leave the device hotter
            turns.reverse()
        for name in turns:
            with providers[name]():
                forget()
                if number == 0:
                    losses[name] = step(name).item()  # compiles
                    forget()
                    timer.release()
                    peaks[name] = timer.slowest(timer.extra_peak_bytes(partial(step, name)) or 0)[0]
                else:
                    times[name].append(timed(name, partial(step, name), forget))
            forget()
    return {
        "case": case,
        "results": [
            {
                "provider": name,
                "ms": round(statistics.median(times[name]), 3),
                "ratio": round(statistics.median(times[name]) / statistics.median(times[names[0]]), 3),
                "ms_all": [round(each, 3) for each in times[name]],
                "peak_gib": round(peaks[name] / 2**30, 6),
                "loss": losses[name],
            }
            for name in names
        ],
    }


def show(case: Document) -> None:
    for result in case["results"]:
        print(case["case"], {key: value for key, value in result.items() if key != "ms_all"}, flush=True)


def save(document: Document, path: Path | None) -> None:
    """Write the document and draw it, or say why not."""
    write_document(document, path)
    if path is None:
        return
    try:
        draw(document, path.with_suffix(".png"))
    except ImportError as error:
        print(f"not drawn: {error}; --plot {path} draws it")


def draw(document: Document, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure = _curves(pyplot, document["curves"]) if "curves" in document else _bars(pyplot, document["cases"])
    figure.savefig(path, dpi=110)


def _bars(pyplot: Any, cases: Sequence[Document]) -> Any:
    """Return a figure with a bar of each provider and case."""
    found = [{result["provider"]: result for result in case["results"]} for case in cases]
    providers = [*dict.fromkeys(provider for results in found for provider in results)]
    size = 12, 1 + max(0.9, 0.14 * len(providers)) * len(cases)
    figure, axes = pyplot.subplots(1, 2, figsize=size, layout="constrained")
    height = 0.85 / len(providers)
    labels = ("step, ms", "new memory at the peak, GiB")
    for axis, key, label in zip(axes, ("ms", "peak_gib"), labels, strict=True):
        axis.set_prop_cycle(color=pyplot.get_cmap("tab20").colors)
        for index, provider in enumerate(providers):
            values = [results.get(provider, {}).get(key, math.nan) for results in found]
            bars = axis.barh([number + height * index for number in range(len(cases))], values, height, label=provider)
            axis.bar_label(bars, fmt="%.4g", fontsize=7)
        axis.set(xlabel=label, yticks=[number + 0.4 for number in range(len(cases))])
        axis.set_yticklabels([case["case"] for case in cases] if key == "ms" else [], fontsize=7)
        axis.invert_yaxis()
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside right upper", fontsize=7)
    return figure


def _curves(pyplot: Any, curves: Mapping[str, Sequence[float]]) -> Any:
    """Return a figure of the losses of each step, and of how far they are from the native ones."""
    figure, (whole, rest) = pyplot.subplots(1, 2, figsize=(11, 3.2), layout="constrained")
    for name, losses in curves.items():
        whole.plot(losses, label=name, linestyle="-" if name == "native" else "--")
        rest.plot([own - other for own, other in zip(losses, curves["native"], strict=True)], label=name)
    whole.set(xlabel="step", ylabel="loss")
    rest.set(xlabel="step", ylabel="loss, less Megatron's")
    rest.legend(fontsize=7)
    return figure
