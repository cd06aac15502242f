"""How a call is timed: device time, eager time, CUDA graph time, and peak memory; always the slowest rank's.

A measurement is handed a :class:`DeviceTimer`, so that a test can hand it another timer.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

SLEEP_SECONDS = 0.01
LONGEST_SLEEP_SECONDS = 0.25
CYCLES_PER_SECOND = 2.0e9  # of a GPU at its fastest: a slower one sleeps longer
CAPTURE_WARM_UPS = 3
Run: TypeAlias = Callable[[], object]


def nothing() -> None: ...


class DeviceTimer:
    """Times on this rank's current GPU."""

    device = "cuda"

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self._token = torch.zeros(1, device=self.device) if ranks > 1 else None
        self._sleeps: dict[str, float] = {}
        self._not_queued: set[str] = set()

    def queued(self, name: str, run: Run, prepare: Run = nothing) -> float:
        """Milliseconds of the device for ``run``, which the host queues while the device sleeps.

        The sleep grows until it is long enough for the host to queue the ``run`` of this name. A run that
        waits for the device cannot be queued: its time includes the host's, and :meth:`was_queued` says so.
        ``prepare`` runs before each attempt, outside the measured time.
        """
        while True:
            prepare()
            sleep = self._sleeps.get(name, SLEEP_SECONDS)
            elapsed, host = self.slowest(*self._time(run, sleep))
            if host < 0.8 * sleep or name in self._not_queued:
                return elapsed
            if 2 * host > LONGEST_SLEEP_SECONDS:
                self._not_queued.add(name)
                self._sleeps[name] = SLEEP_SECONDS
            else:
                self._sleeps[name] = 2 * host

    def was_queued(self, name: str) -> bool:
        return name not in self._not_queued

    def eager(self, run: Run) -> float:
        """Milliseconds from the first call's start on the host to the last call's end on the device."""
        collects = gc.isenabled()
        gc.disable()
        try:
            self.meet()
            start = time.perf_counter()
            run()
            self._synchronize()
            elapsed = 1e3 * (time.perf_counter() - start)
        finally:
            if collects:
                gc.enable()
        return self.slowest(elapsed)[0]

    def captured(self, call: Callable[[Any], object], operands: Iterable[Any]) -> Run:
        """A replay of ``call`` on each of ``operands``: one CUDA graph each, in one memory pool."""
        operands = list(operands)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(CAPTURE_WARM_UPS):
                call(operands[0])
        torch.cuda.current_stream().wait_stream(side)
        self.meet()
        pool = torch.cuda.graph_pool_handle()
        graphs = []
        for operand in operands:
            graph = torch.cuda.CUDAGraph()
            # NCCL's threads query events meanwhile.
            with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
                call(operand)
            graphs.append(graph)

        def replay() -> None:
            for graph in graphs:
                graph.replay()

        return replay

    def extra_peak_bytes(self, run: Run) -> int | None:
        """Peak memory of ``run`` beyond what was allocated before."""
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        run()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before

    def release(self) -> None:
        """Free memory that is held for what no longer exists."""
        gc.collect()
        torch.cuda.empty_cache()

    def meet(self) -> None:
        """Wait for this rank's device and for the other ranks."""
        self._synchronize()
        if self.ranks > 1:
            dist.barrier()
            self._synchronize()

    def slowest(self, *times: float) -> tuple[float, ...]:
        """Each time's maximum over the ranks."""
        if self.ranks == 1:
            return times
        together = torch.tensor(times, dtype=torch.float64, device=self.device)
        dist.all_reduce(together, op=dist.ReduceOp.MAX)
        return tuple(together.tolist())

    def sleep(self, seconds: float) -> None:
        """Let the device sleep, then begin on all ranks together, however late each host is."""
        torch.cuda._sleep(int(seconds * CYCLES_PER_SECOND))
        if self._token is not None:
            dist.all_reduce(self._token)

    def _synchronize(self) -> None:
        torch.cuda.synchronize()

    def _time(self, run: Run, sleep_seconds: float) -> tuple[float, float]:
        """Milliseconds of the device, and seconds of the host until everything was queued."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self.meet()
        self.sleep(sleep_seconds)
        began = time.perf_counter()
        start.record()
        run()
        end.record()
        host = time.perf_counter() - began
        self._synchronize()
        return start.elapsed_time(end), host


class CpuTimer(DeviceTimer):
    """Wall-clock times on a CPU, which has no queue, no CUDA graphs and no peak memory: for trying a run."""

    device = "cpu"

    def captured(self, call: Callable[[Any], object], operands: Iterable[Any]) -> Run:
        raise RuntimeError("CUDA graphs need a GPU")

    def extra_peak_bytes(self, run: Run) -> int | None:
        run()
        return None

    def release(self) -> None:
        gc.collect()

    def _synchronize(self) -> None: ...

    def _time(self, run: Run, sleep_seconds: float) -> tuple[float, float]:
        self.meet()
        began = time.perf_counter()
        run()
        return 1e3 * (time.perf_counter() - began), 0.0
