"""Pools of rank processes: spawned once, used by many tests, killed whole on the first failure.

``pool.run(fn, *args)`` calls the module-level function ``fn(rank, group, *args)`` in every rank and
returns the results in the order of ranks; ``group`` is the world. Arguments and results travel by
pickle; result tensors come back on the CPU.
"""

import contextlib
import multiprocessing
import os
import pickle
import re
import signal
import sys
import tempfile
import time
import traceback
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _world
from torch.utils._pytree import tree_map

from tests.support.host.lanes import this_host
from tests.support.host.poison import poisoned_allocations
from tests.support.kernels import interpreter
from vocab_parallel_ce import checks

START_TIMEOUT = 180.0
DEATH_TIMEOUT = 2.0
RUN_TIMEOUT = 120.0
POOLS_ALIVE = 2
NCCL_GROUPS = 4


class RankFailure(RuntimeError):
    """A rank raised, died or did not answer; the message holds its traceback or exit code."""


class RankPool:
    """``world_size`` processes in one process group."""

    def __init__(self, backend: str, world_size: int) -> None:
        self.backend = backend
        self.world_size = world_size
        self._directory = tempfile.TemporaryDirectory(prefix="ranks-")
        store = str(Path(self._directory.name) / "store")
        context = multiprocessing.get_context("spawn")
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, world_size, backend, store, theirs), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)
        self._collect("start", START_TIMEOUT)

    @property
    def alive(self) -> bool:
        return bool(self._processes) and all(process.is_alive() for process in self._processes)

    @property
    def process_ids(self) -> list[int | None]:
        return [process.pid for process in self._processes]

    def run(self, fn: Callable[..., Any], *args: Any, timeout: float = RUN_TIMEOUT) -> list[Any]:
        """``[fn(rank, group, *args) for every rank]``, or RankFailure and no rank left alive."""
        payload = pickle.dumps((fn, args))
        for pipe in self._pipes:
            # A rank that died since the last run is reported by _collect.
            with contextlib.suppress(BrokenPipeError):
                pipe.send_bytes(payload)
        return self._collect(fn.__name__, timeout)

    def close(self) -> None:
        """End the ranks: by asking, then by force."""
        for pipe in self._pipes:
            with contextlib.suppress(OSError):
                pipe.send_bytes(b"")
        for process in self._processes:
            process.join(timeout=5)
        self._kill()

    def _collect(self, what: str, timeout: float) -> list[Any]:
        deadline = time.monotonic() + timeout
        results: dict[int, Any] = {}
        while len(results) < self.world_size:
            waiting = [rank for rank in range(self.world_size) if rank not in results]
            sources = [self._pipes[rank] for rank in waiting]
            sources += [self._processes[rank].sentinel for rank in waiting]
            ready = wait(sources, max(0.0, deadline - time.monotonic()))
            if not ready:
                self._fail(f"{what}: no answer from ranks {waiting} within {timeout:g} s")
            for rank in waiting:
                if self._pipes[rank] in ready:
                    results[rank] = self._reply(what, rank)
                elif self._processes[rank].sentinel in ready:
                    self._fail(f"{what}: {self._death(rank)}")
        return [results[rank] for rank in range(self.world_size)]

    def _reply(self, what: str, rank: int) -> Any:
        try:
            succeeded, value = pickle.loads(self._pipes[rank].recv_bytes())
        except (EOFError, ConnectionResetError):
            self._fail(f"{what}: {self._death(rank)}")
        if not succeeded:
            self._fail(f"{what}: {self._death_of_another(rank)}rank {rank} raised\n{value}")
        return value

    def _death_of_another(self, rank: int) -> str:
        """A rank that dies breaks the connections of the others, which may raise before it has ended."""
        others = {process.sentinel: r for r, process in enumerate(self._processes) if r != rank}
        ended = wait(list(others), DEATH_TIMEOUT) if others else []
        return "".join(f"{self._death(others[sentinel])}; " for sentinel in ended)  # type: ignore[index]

    def _death(self, rank: int) -> str:
        self._processes[rank].join(timeout=5)
        code = self._processes[rank].exitcode
        if code is not None and code < 0:
            return f"rank {rank} was killed by {signal.Signals(-code).name} (exit code {code})"
        return f"rank {rank} exited with code {code}"

    def _fail(self, message: str) -> NoReturn:
        self._kill()
        raise RankFailure(f"[{self.backend}, {self.world_size} ranks] {message}")

    def _kill(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join(timeout=10)
        for pipe in self._pipes:
            pipe.close()
        self._processes, self._pipes = [], []
        self._directory.cleanup()


class RankPools:
    """The pools of one pytest worker, at most ``POOLS_ALIVE`` at a time."""

    def __init__(self) -> None:
        self._pools: OrderedDict[tuple[str, int], RankPool] = OrderedDict()

    def get(self, backend: str, world_size: int) -> RankPool:
        """The living pool of this kind, or a new one in place of the pool unused for longest."""
        key = (backend, world_size)
        pool = self._pools.pop(key, None)
        if pool is not None and not pool.alive:
            pool.close()
            pool = None
        if pool is None:
            while len(self._pools) >= POOLS_ALIVE:
                self._pools.popitem(last=False)[1].close()
            pool = RankPool(backend, world_size)
        self._pools[key] = pool
        return pool

    def close(self) -> None:
        while self._pools:
            self._pools.popitem()[1].close()


def _param(backend: str, world_size: int, impl: str, *marks: Any) -> Any:
    marks = (getattr(pytest.mark, backend), *marks)
    return pytest.param((backend, world_size), impl, id=f"{backend}-{world_size}-{impl}", marks=marks)


def in_ranks(gloo: Sequence[int] = (2,), interpreter: Sequence[int] = (2,), nccl: Sequence[int] = (2,)) -> Any:
    """Parametrize a test with ``rank_pool, impl``: what this host can run in so many ranks. Interpreting is slow."""
    host = this_host()
    params = [_param("gloo", world, "reference") for world in gloo]
    if host.interprets:
        params += [_param("gloo", world, "triton", pytest.mark.interpreter) for world in interpreter]
    elif host.gpu_count:
        for world in nccl:
            reason = f"needs {world} GPUs, found {host.gpu_count}"
            needs_gpus = pytest.mark.skipif(host.gpu_count < world, reason=reason)
            params += [_param("nccl", world, impl, needs_gpus) for impl in ("reference", "triton")]
    return pytest.mark.parametrize(("rank_pool", "impl"), params, indirect=["rank_pool"])


in_two_ranks = in_ranks()
in_several_ranks = in_ranks((2, 4), (2,), (2, 4))
in_four_ranks = in_ranks((4,), (), (4,))


def pool_of_test(name: str) -> str | None:
    """Which tests share a worker, from a test's name ``test_x[...gloo-2-...]``: those of one pool.

    Those of NCCL compile most of their time: one worker would take half an hour. They are a few groups, and no more,
    since the pools of all workers are on the same GPUs, where they wait for each other.
    """
    match = re.search(r"[\[-](?:(gloo-\d+)|nccl-\d+)", name)
    return match and (match[1] or f"nccl, group {zlib.crc32(name.encode()) % NCCL_GROUPS}")


_groups: dict[tuple[int, ...], Any] = {}


def subgroups(*member_sets: Sequence[int]) -> list[Any]:
    """In a rank: the groups of these global ranks, made on first use.

    Every rank of the world must ask for the same sets in the same order, members or not, as
    ``torch.distributed.new_group`` demands. A rank gets ``GroupMember.NON_GROUP_MEMBER`` for a group it is not in.
    """
    for members in map(tuple, member_sets):
        if members not in _groups:
            _groups[members] = dist.new_group(list(members))
    return [_groups[tuple(members)] for members in member_sets]


@contextlib.contextmanager
def groups_of_its_own() -> Iterator[None]:
    """In a rank: end the groups that are made in the context. A thread of each wakes a hundred times a second."""
    before = [*_world.pg_map]
    yield
    dist.barrier()  # another rank may still connect to one of them
    for group in [*_world.pg_map]:
        if group not in before:
            dist.destroy_process_group(group)


def device_of(rank: int, group: Any) -> torch.device:
    """In a rank: where its tensors live."""
    return torch.device("cuda", rank) if dist.get_backend(group) == "nccl" else torch.device("cpu")


def _serve(rank: int, world_size: int, backend: str, store: str, pipe: Connection) -> None:
    try:
        torch.set_num_threads(1)
        checks.looks_at = lambda values, check_labels: check_labels is True  # as the fixture unread_labels
        if this_host().interprets:
            interpreter.mend()
        if sys.platform == "linux":
            # Without it gloo resolves the host's own name, which offline hosts need not be able to.
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        if backend == "nccl":
            torch.cuda.set_device(rank)
        dist.init_process_group(
            backend,
            store=dist.FileStore(store, world_size),
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=START_TIMEOUT),
        )
        _send(pipe, True, None)
    except BaseException:
        _send(pipe, False, traceback.format_exc())
        raise
    with poisoned_allocations():
        while payload := _receive(pipe):
            try:
                fn, args = pickle.loads(payload)
                _send(pipe, True, on_cpu(fn(rank, dist.group.WORLD, *args)))
            except Exception:
                _send(pipe, False, traceback.format_exc())
    dist.destroy_process_group()
    # There is nothing to flush, and an orderly exit of torch takes a second in every rank.
    os._exit(0)


def _send(pipe: Connection, succeeded: bool, value: Any) -> None:
    pipe.send_bytes(pickle.dumps((succeeded, value)))


def _receive(pipe: Connection) -> bytes:
    try:
        return pipe.recv_bytes()
    except (EOFError, ConnectionResetError):
        return b""


def on_cpu(value: Any) -> Any:
    """``value`` with all its tensors on the CPU and detached."""
    return tree_map(lambda item: item.detach().cpu() if isinstance(item, Tensor) else item, value)
