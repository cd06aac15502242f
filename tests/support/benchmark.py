"""The benchmark of the loss over logits, small and on the CPU: a workload, and a timer that is told times."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

from bench import others, providers  # noqa: E402
from bench.cases import Case, Effort, Workload  # noqa: E402
from bench.measure import measure  # noqa: E402

SMALL = Workload(96, 40, "float32", "none")


class ScriptedTimer:
    """Runs what it is handed, and says that a copy takes 2 ms and another call as told, round by round."""

    def __init__(self, times: dict[str, list[float]] | None = None) -> None:
        self.times = times or {}
        self.order: list[str] = []

    def queued(self, name: str, run: Callable[[], object], prepare: Callable[[], object] = object) -> float:
        """As where the first attempt's sleep was too short for the host."""
        self.order.append(name)
        for _ in range(2):
            prepare()
            run()
        name = name.removeprefix("graph of ")
        if name == "copy":
            return 2.0
        series = self.times.get(name, [3.0])
        return series[self.order.count(name) % len(series)]

    def was_queued(self, name: str) -> bool:
        return name != "torch eager"

    def eager(self, run: Callable[[], object]) -> float:
        run()
        return 10.0

    def captured(self, call, buffers):
        return lambda: [call(logits) for logits in buffers]

    def extra_peak_bytes(self, run: Callable[[], object]) -> int:
        run()
        return 192

    def release(self) -> None: ...


def case_of(workload: Workload) -> Case:
    return Case(workload.rows, workload.columns, getattr(torch, workload.dtype), None, 1)


def measured(names, timer=None, workload=SMALL, extra=(), graphs_of=lambda provider: provider.is_ours):
    chosen = [*others.chosen_providers(",".join(names)), *extra]
    effort = Effort(4, 3, 8, 2)
    timer = timer or ScriptedTimer()
    results = measure(case_of(workload), workload, chosen, timer, effort, graphs_of=graphs_of, device="cpu")
    return {result["provider"]: result for result in results}


def provider_of(step, **fields):
    fixed = {"in_place": False, "package": "torch", "distribution": "torch"} | fields
    return providers.Provider("other", lambda: step, providers.fixed(3), **fixed)


def wrong_step(logits, labels, reduction, group):
    loss = torch.nn.functional.cross_entropy(logits, labels, reduction=reduction)
    return loss, torch.autograd.grad(loss.sum(), logits)[0] * 1.05
