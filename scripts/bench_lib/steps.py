"""Times whole training steps, which providers take in turns, and draws the times and the peak memory."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor
from tqdm import tqdm

from bench_lib.timing import DeviceTimer

Document = dict[str, Any]


def measured(
    case: str,
    providers: Mapping[str, Callable[[], AbstractContextManager[Any]]],
    step: Callable[[str], Tensor],
    forget: Callable[[], None],
    timer: DeviceTimer,
    rounds: int,
) -> Document:
    """Return of each provider the median milliseconds, the peak memory beyond what was there, and the loss.

    Args:
        providers: of each name, what makes the context of its steps.
        step: runs one step of a provider and returns its loss.
        forget: drops the gradients; not timed.
    """
    names = list(providers)
    times: dict[str, list[float]] = {name: [] for name in names}
    peaks, losses = dict.fromkeys(names, 0.0), dict.fromkeys(names, 0.0)
    for number in tqdm(range(rounds + 1), desc=case, disable=None):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            with providers[name]():
                forget()
                if number == 0:
                    losses[name] = step(name).item()  # compiles
                    forget()
                    timer.release()
                    peaks[name] = timer.slowest(timer.extra_peak_bytes(partial(step, name)) or 0)[0]
                else:
                    times[name].append(timer.eager(name, partial(step, name), forget))
            forget()
    return {
        "case": case,
        "results": [
            {
                "provider": name,
                "ms": round(statistics.median(times[name]), 3),
                "ms_all": [round(each, 3) for each in times[name]],
                "peak_gib": round(peaks[name] / 2**30, 3),
                "loss": losses[name],
            }
            for name in names
        ],
    }


def show(case: Document) -> None:
    for result in case["results"]:
        print(case["case"], {key: value for key, value in result.items() if key != "ms_all"}, flush=True)


def draw(cases: Sequence[Document], path: Path) -> None:
    """Draw a bar of each provider and case."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(12, 1 + 0.9 * len(cases)), layout="constrained")
    providers = [result["provider"] for result in cases[0]["results"]]
    height = 0.85 / len(providers)
    labels = ("step, ms", "new memory at the peak, GiB")
    for axis, key, label in zip(axes, ("ms", "peak_gib"), labels, strict=True):
        for index, provider in enumerate(providers):
            values = [case["results"][index][key] for case in cases]
            bars = axis.barh([number + height * index for number in range(len(cases))], values, height, label=provider)
            axis.bar_label(bars, fmt="%.4g", fontsize=7)
        axis.set(xlabel=label, yticks=[number + 0.4 for number in range(len(cases))])
        axis.set_yticklabels([case["case"] for case in cases] if key == "ms" else [], fontsize=7)
        axis.invert_yaxis()
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside right upper", fontsize=7)
    figure.savefig(path, dpi=110)
