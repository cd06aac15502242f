"""Where the device time of a step goes: kernels by category, and how much of NCCL's time is hidden."""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypeAlias

from torch.profiler import ProfilerActivity, profile

from bench_lib.timing import LONGEST_SLEEP_SECONDS, DeviceTimer, Run

STEPS = 5
# The first pattern found in a kernel's name. Matmuls are libraries'; names of Triton's are plain words.
CATEGORIES = {
    "nccl": re.compile("nccl", re.IGNORECASE),
    "matmul": re.compile("gemm|nvjet|cutlass|xmma|splitK|cublas", re.IGNORECASE),
    "loss": re.compile(r"^[A-Za-z_]\w*$"),
    "other": re.compile(""),
}
Span: TypeAlias = tuple[float, float]


def profiled(run: Run, timer: DeviceTimer) -> dict[str, Any]:
    """The median of several steps, each queued before the device begins with it, in microseconds."""
    run()
    return sorted((summary_of(traced(run, timer)) for _ in range(STEPS)), key=lambda s: s["step"])[STEPS // 2]


def traced(run: Run, timer: DeviceTimer) -> list[dict[str, Any]]:
    """The device's events of one ``run``: those after the sleep and the ranks' common beginning."""
    timer.meet()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        timer.sleep(LONGEST_SLEEP_SECONDS)
        run()
        timer.meet()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        return step_of(json.loads(path.read_text())["traceEvents"], timer.ranks)


def step_of(events: Iterable[dict[str, Any]], ranks: int) -> list[dict[str, Any]]:
    """On several ranks the first and the last NCCL kernel are the timer's: how it begins and how it meets."""
    kept = [e for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset") and "spin" not in e["name"]]
    kept.sort(key=lambda event: float(event["ts"]))
    if ranks > 1:
        nccl = [index for index, event in enumerate(kept) if category_of(event["name"]) == "nccl"]
        kept = kept[nccl[0] + 1 : nccl[-1]]
    return kept


def category_of(kernel: str) -> str:
    return next(name for name, pattern in CATEGORIES.items() if pattern.search(kernel))


def length(spans: Iterable[Span]) -> float:
    """The time in any of ``spans``."""
    total, end = 0.0, float("-inf")
    for first, last in sorted(spans):
        total += max(0.0, last - max(first, end))
        end = max(end, last)
    return total


def summary_of(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The time of each category, and of NCCL's what runs alongside other kernels and what does not."""
    spans: dict[str, list[Span]] = {name: [] for name in CATEGORIES}
    for event in events:
        spans[category_of(event["name"])].append((event["ts"], event["ts"] + event["dur"]))
    compute = [span for name, found in spans.items() if name != "nccl" for span in found]
    nccl, every = spans["nccl"], [*spans["nccl"], *compute]
    step, exposed = (max(end for _, end in every) - min(start for start, _ in every), length(every) - length(compute))
    return {
        "step": step,
        "by_category": {name: sum(end - start for start, end in found) for name, found in spans.items()},
        "nccl": length(nccl),
        "nccl_overlapped": length(nccl) - exposed,
        "nccl_exposed": exposed,
        "idle": step - length(every),
    }
