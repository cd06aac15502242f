"""Where the time of a step goes on the device: kernels by category, and how much of NCCL's is hidden.

A step's kernels are those that were launched inside its annotation, and those of unknown launch that began
while these ran. Times are microseconds.
"""

from __future__ import annotations

import json
import re
import statistics
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torch.profiler import ProfilerActivity, profile, record_function

from bench.timing import Run, Timer

STEP = "vpce step"
PROFILED_STEPS = 5
ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
LAUNCHES = ("cuda_runtime", "cuda_driver")
# Of the first pattern found in a kernel's name. Matmuls are libraries'; names of Triton's are plain words.
CATEGORIES = {
    "all_gather": re.compile("nccl.*AllGather", re.IGNORECASE),
    "all_reduce": re.compile("nccl.*AllReduce", re.IGNORECASE),
    "reduce_scatter": re.compile("nccl.*ReduceScatter", re.IGNORECASE),
    "nccl, other": re.compile("nccl", re.IGNORECASE),
    "matmul": re.compile("gemm|nvjet|cutlass|xmma|splitK|cublas", re.IGNORECASE),
    "loss": re.compile(r"^[A-Za-z_]\w*$"),
}
OTHER = "other"
NCCL = tuple(name for name, pattern in CATEGORIES.items() if pattern.pattern.startswith("nccl"))
Span = tuple[float, float]


class Interval(NamedTuple):
    """One kernel, copy or fill on the device."""

    category: str
    stream: int
    start: float
    end: float


def traced_steps(run: Run, timer: Timer, steps: int = PROFILED_STEPS) -> list[list[Interval]]:
    """The intervals of ``steps`` and more calls of ``run``, each queued before the device begins with it."""

    def step() -> None:
        with record_function(STEP):
            run()

    for _ in range(2):
        timer.queued(STEP, step)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        for _ in range(steps):
            timer.queued(STEP, step)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    return steps_of(events)


def steps_of(events: Iterable[dict[str, Any]]) -> list[list[Interval]]:
    """Every annotated step's intervals, in the order of their starts.

    Raises:
        ValueError: there is no step, or one without a kernel.
    """
    events = [event for event in events if event.get("ph") == "X"]
    ranges = sorted(
        (event["ts"], event["ts"] + event["dur"])
        for event in events
        if event.get("cat") == "user_annotation" and event["name"] == STEP
    )
    launched = {
        event["args"]["correlation"]: event["ts"]
        for event in events
        if event.get("cat") in LAUNCHES and "correlation" in event.get("args", {})
    }
    steps: list[list[Interval]] = [[] for _ in ranges]
    unknown = []
    for event in events:
        if event.get("cat") not in ON_DEVICE:
            continue
        launch = launched.get(event["args"].get("correlation"))
        if launch is None:
            unknown.append(interval_of(event))
        for step, (start, end) in zip(steps, ranges, strict=True):
            if launch is not None and start <= launch <= end:
                step.append(interval_of(event))
    if not steps or not all(steps):
        raise ValueError(f"trace: expected kernels in every step, got {[len(step) for step in steps]}")
    for step in steps:
        start, end = min(i.start for i in step), max(i.end for i in step)
        step += [interval for interval in unknown if start <= interval.start < end]
    return [sorted(step, key=lambda interval: interval.start) for step in steps]


def interval_of(event: dict[str, Any]) -> Interval:
    stream = int(event["args"].get("stream", 0))
    return Interval(category_of(event["name"]), stream, event["ts"], event["ts"] + event["dur"])


def category_of(kernel: str) -> str:
    return next((name for name, pattern in CATEGORIES.items() if pattern.search(kernel)), OTHER)


def merged(spans: Iterable[Span]) -> list[Span]:
    """The same time without overlaps, in order."""
    union: list[Span] = []
    for start, end in sorted(spans):
        if union and start <= union[-1][1]:
            union[-1] = (union[-1][0], max(end, union[-1][1]))
        else:
            union.append((start, end))
    return union


def length(spans: Iterable[Span]) -> float:
    return sum(end - start for start, end in merged(spans))


def overlap(one: Iterable[Span], other: Iterable[Span]) -> float:
    """The time in both."""
    one, other = list(one), list(other)
    return length(one) + length(other) - length([*one, *other])


def summary_of(step: Sequence[Interval]) -> dict[str, Any]:
    """Microseconds of one step: of each category, and of NCCL what runs beside other kernels and what not."""
    categories = [*CATEGORIES, OTHER]
    spans = {name: [(i.start, i.end) for i in step if i.category == name] for name in categories}
    nccl = [span for name in NCCL for span in spans[name]]
    compute = [span for name in categories if name not in NCCL for span in spans[name]]
    total = max(i.end for i in step) - min(i.start for i in step)
    hidden = overlap(nccl, compute)
    return {
        "step": total,
        "by_category": {name: sum(end - start for start, end in spans[name]) for name in categories},
        "kernels_by_category": {name: len(spans[name]) for name in categories},
        "compute": length(compute),
        "nccl": length(nccl),
        "nccl_overlapped": hidden,
        "nccl_exposed": length(nccl) - hidden,
        "idle": total - length([*compute, *nccl]),
    }


def median_step(steps: Sequence[Sequence[Interval]]) -> Sequence[Interval]:
    """The step whose length is the (lower) median."""
    ordered = sorted(steps, key=lambda step: summary_of(step)["step"])
    return ordered[(len(ordered) - 1) // 2]


def median_summary(steps: Sequence[Sequence[Interval]]) -> dict[str, Any]:
    """Every number's median over the steps."""
    summaries = [summary_of(step) for step in steps]

    def median(of: list[Any]) -> Any:
        if isinstance(of[0], dict):
            return {name: median([values[name] for values in of]) for name in of[0]}
        return round(statistics.median(of), 1)

    result: dict[str, Any] = median(summaries)
    return result | {"steps": len(steps)}


def timeline_of(step: Sequence[Interval]) -> dict[str, Any]:
    """One step to be drawn: lanes, the one that computes most first and NCCL's last, and what ran in each."""
    begin = min(interval.start for interval in step)
    busy: dict[tuple[bool, int], float] = {}
    for interval in step:
        lane = (interval.category in NCCL, interval.stream)
        busy[lane] = busy.get(lane, 0.0) + interval.end - interval.start
    lanes = sorted(busy, key=lambda lane: (lane[0], -busy[lane]))
    return {
        "lanes": ["NCCL" if is_nccl else "compute" for is_nccl, _ in lanes],
        "intervals": [
            {
                "lane": lanes.index((interval.category in NCCL, interval.stream)),
                "category": interval.category,
                "start": round(interval.start - begin, 2),
                "end": round(interval.end - begin, 2),
            }
            for interval in step
        ],
    }
