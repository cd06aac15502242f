"""What the cost model takes from this host: the copy's bandwidth, a launch, the exchange of statistics."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch

from bench.cost_model import STATISTICS_BYTES
from bench.timing import DeviceTimer
from vocab_parallel_ce.collectives import all_gather_stats

GATHERED_ROWS = (64, 1024, 4096, 16384, 65536)
COPIED_ELEMENTS = 2**29  # 1 GiB of bf16, read and written
CALLS, ROUNDS = 20, 7


def measured_latency(ranks: int, group: Any, rank: int) -> dict[str, Any]:
    """The document's ``latency``: device times, of calls back to back and of the same in a CUDA graph."""
    timer = DeviceTimer(ranks)
    gathers, graph_gathers = {}, {}
    for rows in GATHERED_ROWS if ranks > 1 else ():
        stats = torch.zeros(ranks, rows, STATISTICS_BYTES // 4, device="cuda")

        def gather(stats: torch.Tensor = stats) -> None:
            all_gather_stats(stats, rank, group)

        size = str(STATISTICS_BYTES * rows)
        gathers[size] = _queued_microseconds(timer, f"gather {size}", gather)
        graph_gathers[size] = _graph_microseconds(timer, f"gather {size}", gather)
    source = torch.zeros(COPIED_ELEMENTS, dtype=torch.bfloat16, device="cuda")
    target = torch.empty_like(source)
    copy = _queued_microseconds(timer, "copy", lambda: target.copy_(source))
    moved = 2 * source.numel() * source.element_size()
    return {
        "all_gather_microseconds": gathers,
        "all_gather_graph_microseconds": graph_gathers,
        "launch_microseconds": _graph_microseconds(timer, "launch", lambda: torch.cuda._sleep(0)),
        "copy_terabytes_per_second": round(moved / copy / 1e6, 3),
    }


def _queued_microseconds(timer: DeviceTimer, name: str, call: Callable[[], object]) -> float:
    def run() -> None:
        for _ in range(CALLS):
            call()

    return _median_microseconds(timer, name, run)


def _graph_microseconds(timer: DeviceTimer, name: str, call: Callable[[], object]) -> float:
    """Of ``CALLS`` calls in one graph: what one adds to a step that is captured whole."""

    def calls(_: object) -> None:
        for _ in range(CALLS):
            call()

    replay = timer.captured(calls, [torch.empty(0)])
    return _median_microseconds(timer, f"graph of {name}", replay)


def _median_microseconds(timer: DeviceTimer, name: str, run: Callable[[], object]) -> float:
    times = [timer.queued(name, run) for _ in range(ROUNDS + 1)][1:]
    return round(1e3 * statistics.median(times) / CALLS, 2)
