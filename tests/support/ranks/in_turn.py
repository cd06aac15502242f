"""Ranks without processes: one thread each, of which one runs at a time, up to the next collective.

Sums are those of the tensors' dtype, in the order of the ranks, so that they have the same bits each time.
"""

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

SECONDS = 300.0


class _Meeting:
    """Where the ranks of one call exchange what they have."""

    def __init__(self, n_ranks: int) -> None:
        self.turn = threading.Lock()  # Triton's interpreter is not made for threads
        self.barrier = threading.Barrier(n_ranks, timeout=SECONDS)
        self.own: list[Any] = [None] * n_ranks


class _Done:
    def wait(self) -> None:
        """The ranks have met already."""


class _Group(dist.ProcessGroup):
    """What the losses use of a process group."""

    def __init__(self, rank: int, n_ranks: int, meeting: _Meeting) -> None:
        super().__init__(rank, n_ranks)
        self.meeting = meeting

    def _meet(self) -> None:
        self.meeting.turn.release()
        try:
            self.meeting.barrier.wait()
        finally:
            self.meeting.turn.acquire()

    def _exchange(self, own: Tensor, take: Callable[[list[Tensor]], Any]) -> _Done:
        self.meeting.own[self.rank()] = own.clone()
        self._meet()
        take(self.meeting.own)
        self._meet()  # nobody begins the next exchange before all have read this one
        return _Done()

    def _all_gather(self, gathered: Tensor, own: Tensor, options: Any = None) -> _Done:
        places = gathered.view(self.size(), *own.shape)
        return self._exchange(own, lambda parts: places.copy_(torch.stack(parts)))

    def allreduce(self, tensors: list[Tensor], options: Any = None) -> _Done:
        (summed,) = tensors
        return self._exchange(summed, lambda parts: summed.copy_(functools.reduce(torch.add, parts)))

    def _reduce_scatter(self, own: Tensor, summed: Tensor, options: Any = None) -> _Done:
        rows = slice(self.rank() * len(own), (self.rank() + 1) * len(own))
        return self._exchange(
            summed, lambda parts: own.copy_(functools.reduce(torch.add, [part[rows] for part in parts]))
        )

    all_gather_single = _allgather_base = _all_gather
    reduce_scatter_single = _reduce_scatter_base = _reduce_scatter


def in_turn(n_ranks: int, function: Callable[[int, Any], Any]) -> Sequence[Any]:
    """Return ``function(rank, group)`` of every rank; the group is None for one rank."""
    if n_ranks == 1:
        return [function(0, None)]
    meeting, results, errors = _Meeting(n_ranks), [None] * n_ranks, []

    def run(rank: int) -> None:
        with meeting.turn:
            try:
                results[rank] = function(rank, _Group(rank, n_ranks, meeting))
            except threading.BrokenBarrierError:
                pass  # another rank has raised
            except BaseException as error:
                errors.append(error)
                meeting.barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(n_ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results
