"""The pool of ranks reports failures, dies whole, comes back, and counts collectives."""

import os

import pytest
import torch
import torch.distributed as dist

from tests.support.ranks.collectives import record_collectives
from tests.support.ranks.pools import RankFailure, pool_of_test

pytestmark = pytest.mark.gloo

in_two_ranks = pytest.mark.parametrize("rank_pool", [pytest.param(("gloo", 2), id="gloo-2")], indirect=True)


def _rank_and_process(rank, group, offset):
    return rank + offset, os.getpid(), dist.get_world_size(group), torch.get_num_threads()


def _raise_on_rank_1(rank, group):
    if rank == 1:
        raise ValueError("labels: planted on rank 1")
    dist.barrier(group)


def _record(rank, group):
    x = torch.zeros(6)
    with record_collectives() as calls:
        dist.all_reduce(x, group=group)
        dist.barrier(group)
        dist.broadcast(x, 0, group=group)
        dist.all_gather([torch.zeros(6) for _ in range(2)], x, group=group)
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        gather(torch.zeros(12), x, group=group)
    dist.all_reduce(x, group=group)
    return calls


@in_two_ranks
def test_results_come_in_rank_order_from_processes_that_persist(rank_pool):
    first = rank_pool.run(_rank_and_process, 10)
    second = rank_pool.run(_rank_and_process, 20)
    assert [value for value, *_ in first] == [10, 11]
    assert [value for value, *_ in second] == [20, 21]
    assert [process for _, process, *_ in first] == [process for _, process, *_ in second]
    assert [rest for _, _, *rest in first] == [[2, 1], [2, 1]]


@in_two_ranks
def test_an_exception_in_one_rank_is_raised_here_with_its_traceback_and_ends_all_ranks(rank_pool, rank_pools):
    processes = rank_pool.process_ids
    with pytest.raises(RankFailure, match=r"(?s)rank 1 raised.*_raise_on_rank_1.*planted on rank 1"):
        rank_pool.run(_raise_on_rank_1)
    assert not rank_pool.alive
    for process in processes:
        with pytest.raises(ProcessLookupError):
            os.kill(process, 0)
    assert [value for value, *_ in rank_pools.get("gloo", 2).run(_rank_and_process, 0)] == [0, 1]


@in_two_ranks
def test_collectives_are_counted_with_their_group_and_bytes(rank_pool):
    names = ["allreduce_", "barrier", "broadcast_", "allgather_", "_allgather_base_"]
    for calls in rank_pool.run(_record):
        assert [call.name for call in calls] == names
        assert all(call.ranks == (0, 1) for call in calls)
        assert [calls[i].nbytes for i in (0, 2, 3, 4)] == [24, 24, 24, 24]


def test_the_pool_of_a_test_is_in_its_name():
    pools = {"y[gloo-4-reference-mean]": "gloo-4", "y[mean-gloo-2-triton]": "gloo-2", "gloo-2[mean]": None, "y": None}
    assert {name: pool_of_test(f"tests/test_x.py::test_{name}") for name in pools} == pools
