"""The ranks of a run, and how they time a call: device, eager and CUDA graph time of the slowest, and memory.

A measurement is handed a :class:`DeviceTimer`, so that a test can hand it another timer.
"""

from __future__ import annotations

import faulthandler
import gc
import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.distributed as dist

SLEEP_SECONDS = 0.01
LONGEST_SLEEP_SECONDS = 0.25
CYCLES_PER_SECOND = 2.0e9  # of a GPU at its fastest: a slower one sleeps longer
CAPTURE_WARM_UPS = 3
TIMEOUT = timedelta(minutes=5)
GRAPH_MIXING = "NCCL_GRAPH_MIXING_SUPPORT"
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
            self._sleeps[name] = 2 * host
            if 2 * host > LONGEST_SLEEP_SECONDS:
                self._not_queued.add(name)
                self._sleeps[name] = SLEEP_SECONDS

    def was_queued(self, name: str) -> bool:
        return name not in self._not_queued

    def eager(self, name: str, run: Run, prepare: Run = nothing) -> float:
        """Milliseconds from the first call's start on the host to the last call's end on the device."""
        prepare()
        gc.disable()
        try:
            self.meet()
            start = time.perf_counter()
            run()
            self._synchronize()
            elapsed = 1e3 * (time.perf_counter() - start)
        finally:
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

    def release(self) -> None: ...

    def extra_peak_bytes(self, run: Run) -> int | None:
        run()
        return None

    def _synchronize(self) -> None: ...

    def _time(self, run: Run, sleep_seconds: float) -> tuple[float, float]:
        self.meet()
        began = time.perf_counter()
        run()
        return 1e3 * (time.perf_counter() - began), 0.0


class Ranks(NamedTuple):
    """This process among those of the run; ``group`` is None if it is alone."""

    rank: int
    size: int
    group: Any
    device: str

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def timer(self) -> DeviceTimer:
        return DeviceTimer(self.size) if self.device == "cuda" else CpuTimer(self.size)

    def gathered(self, own: Any) -> list[Any]:
        """What every rank has, in their order."""
        everyone: list[Any] = [own] * self.size
        if self.size > 1:
            dist.all_gather_object(everyone, own, group=self.group)
        return everyone


@contextmanager
def joined_ranks() -> Iterator[Ranks]:
    """The ranks that ``torchrun`` started, one per GPU, and their process group while this lasts.

    A process that is terminated, since it waits for ever, writes where it was.
    """
    faulthandler.register(signal.SIGTERM, file=2, chain=True)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    # NCCL guards against several graphs that run at once, of which there are none here, with launches of its
    # own: 13 to 30 us in every graph. It reads this when the group is made.
    os.environ.setdefault(GRAPH_MIXING, "0")
    size, local_rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("LOCAL_RANK", "0"))
    if device == "cuda":
        torch.cuda.set_device(local_rank)
    if size > 1:
        where = torch.device("cuda", local_rank) if device == "cuda" else None
        dist.init_process_group("nccl" if where else "gloo", timeout=TIMEOUT, device_id=where)
    try:
        yield Ranks(dist.get_rank() if size > 1 else 0, size, dist.group.WORLD if size > 1 else None, device)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
