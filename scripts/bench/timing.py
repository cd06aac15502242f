"""How a call is timed: the device's time, the time in a loop with the host, a CUDA graph's, and memory.

All are the slowest rank's. :class:`DeviceTimer` is what a measurement is handed, so that a test can hand
it another one.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

SLEEP_SECONDS = 0.01
LONGEST_SLEEP_SECONDS = 0.25
CYCLES_PER_SECOND = 2.0e9  # of a GPU at its fastest: a slower one sleeps longer
CAPTURE_WARM_UPS = 3
Run = Callable[[], object]


def nothing() -> None: ...


class Timer(Protocol):
    """Milliseconds and bytes of what it is handed."""

    def queued(self, name: str, run: Run, prepare: Run = nothing) -> float: ...

    def was_queued(self, name: str) -> bool: ...

    def eager(self, run: Run) -> float: ...

    def captured(self, call: Callable[[Tensor], object], buffers: Sequence[Tensor]) -> Run: ...

    def extra_peak_bytes(self, run: Run) -> int: ...

    def release(self) -> None: ...


class DeviceTimer:
    """Times on this rank's current GPU, and takes the slowest rank's where there are several."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self._token = torch.zeros(1, device="cuda") if ranks > 1 else None
        self._sleeps: dict[str, float] = {}
        self._not_queued: set[str] = set()

    def queued(self, name: str, run: Run, prepare: Run = nothing) -> float:
        """The device's time of ``run``, which the host queues while the device sleeps.

        The sleep is made as long as the host needs for the ``run`` of this name. One that waits for
        the device cannot be queued: its time has the host's in it, and :meth:`was_queued` says so.
        ``prepare`` runs before every attempt, outside what is timed.
        """
        while True:
            prepare()
            sleep = self._sleeps.get(name, SLEEP_SECONDS)
            elapsed, host = self._slowest(*self._time(run, sleep))
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
        """Wall-clock time from the first call's start on the host to the last one's end on the device."""
        collects = gc.isenabled()
        gc.disable()
        try:
            self._meet()
            start = time.perf_counter()
            run()
            torch.cuda.synchronize()
            elapsed = 1e3 * (time.perf_counter() - start)
        finally:
            if collects:
                gc.enable()
        return self._slowest(elapsed, 0.0)[0]

    def captured(self, call: Callable[[Tensor], object], buffers: Sequence[Tensor]) -> Run:
        """A replay of ``call`` on each of ``buffers``, a CUDA graph each, in one pool of memory."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(CAPTURE_WARM_UPS):
                call(buffers[0])
        torch.cuda.current_stream().wait_stream(side)
        self._meet()
        pool = torch.cuda.graph_pool_handle()
        graphs = []
        for buffer in buffers:
            graph = torch.cuda.CUDAGraph()
            # Threads of the communication library ask about events meanwhile.
            with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
                call(buffer)
            graphs.append(graph)

        def replay() -> None:
            for graph in graphs:
                graph.replay()

        return replay

    def extra_peak_bytes(self, run: Run) -> int:
        return extra_peak_bytes(run)

    def release(self) -> None:
        """Memory that was held for something that is gone."""
        gc.collect()
        torch.cuda.empty_cache()

    def _meet(self) -> None:
        torch.cuda.synchronize()
        if self.ranks > 1:
            dist.barrier()
            torch.cuda.synchronize()

    def _time(self, run: Run, sleep_seconds: float) -> tuple[float, float]:
        """Milliseconds of the device, and seconds of the host until all was queued."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._meet()
        if sleep_seconds:
            torch.cuda._sleep(int(sleep_seconds * CYCLES_PER_SECOND))
        if self._token is not None:
            dist.all_reduce(self._token)  # the devices begin together, whenever their hosts came
        began = time.perf_counter()
        start.record()
        run()
        end.record()
        host = time.perf_counter() - began
        torch.cuda.synchronize()
        return start.elapsed_time(end), host

    def _slowest(self, elapsed: float, host: float) -> tuple[float, float]:
        if self.ranks == 1:
            return elapsed, host
        both = torch.tensor([elapsed, host], dtype=torch.float64, device="cuda")
        dist.all_reduce(both, op=dist.ReduceOp.MAX)
        slowest_elapsed, slowest_host = both.tolist()
        return slowest_elapsed, slowest_host


def milliseconds(run: Run, *, queued: bool) -> float:
    """GPU time of ``run``; ``queued`` makes the GPU wait until the host has queued all of it."""
    timer = DeviceTimer(dist.get_world_size() if dist.is_initialized() else 1)
    elapsed, _ = timer._slowest(*timer._time(run, SLEEP_SECONDS if queued else 0.0))
    return elapsed


def extra_peak_bytes(run: Run) -> int:
    """Memory that ``run`` takes beyond what is there before, at the worst moment."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before
