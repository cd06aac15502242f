"""Ranks without processes: one thread each, of which one runs at a time, up to the next all_gather."""

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

SECONDS = 300.0


class _Meeting:
    """Where the ranks of one call exchange what they have."""

    def __init__(self, n_ranks: int) -> None:
        self.turn = threading.Lock()  # Triton's interpreter is not made for threads
        self.barrier = threading.Barrier(n_ranks, timeout=SECONDS)
        self.own: list[Any] = [None] * n_ranks


class _Group(dist.ProcessGroup):
    """What the losses over logits use of a process group."""

    def __init__(self, rank: int, n_ranks: int, meeting: _Meeting) -> None:
        super().__init__(rank, n_ranks)
        self.meeting = meeting

    def _exchange(self, gathered: Tensor, own: Tensor, options: Any = None) -> None:
        meeting = self.meeting
        meeting.own[self.rank()] = own.clone()
        meeting.turn.release()
        try:
            meeting.barrier.wait()
        finally:
            meeting.turn.acquire()
        for place, part in zip(gathered.unbind(0), meeting.own, strict=True):
            place.copy_(part.view(place.shape))
        meeting.turn.release()
        try:
            meeting.barrier.wait()  # nobody begins the next exchange before all have read this one
        finally:
            meeting.turn.acquire()

    all_gather_single = _allgather_base = _exchange


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
