"""Where a projection and its loss on several ranks has gone wrong before, by error or by waiting for ever."""

from functools import partial

import torch

from tests.ranks.test_linear import made
from tests.support.collectives import assert_refused, messages_of
from tests.support.linear import TWO_WAYS, WIDTH, many_tokens
from tests.support.linear_ranks import BY_WAY, COLUMNS, Case, check, check_collectives, distributed, run
from tests.support.logits_ranks import chunked
from tests.support.ranks import device_of, in_four_ranks, in_two_ranks
from vocab_parallel_ce import linear_cross_entropy


def _check_chunks(rank_pool, impl, way, bounds, chunk, **options):
    """64 tokens in the chunks that a memory budget gives, on every rank."""
    case = Case(many_tokens(64, bounds[-1][1]), impl, {**way, **options}, bounds, "shard")
    results = rank_pool.run(run, case)
    check(case, results)
    check_collectives(case._replace(options={**case.options, "chunk_tokens": chunk}), results)


@BY_WAY
@in_two_ranks
def test_ranks_of_unequal_shards_cut_the_tokens_alike(rank_pool, impl, way):
    """16 and 8 columns: 26 tokens' logits of 12 columns fit, on the narrow rank 40 of its own would."""
    _check_chunks(rank_pool, impl, way, [(0, 16), (16, 24)], 26, memory_budget=1280)


@BY_WAY
@in_four_ranks
def test_a_last_rank_of_fewer_columns_cuts_the_tokens_as_the_others(rank_pool, impl, way):
    _check_chunks(rank_pool, impl, way, chunked(7, 4), 20, memory_budget=160)


class _Sent:
    """Counts works that were begun and that nobody has waited for yet."""

    def __init__(self, begin):
        self.begin, self.in_flight, self.most, self.begun = begin, 0, 0, 0

    def __call__(self, *args, **kwargs):
        work, wait = self.begin(*args, **kwargs), self.waited
        self.begun, self.in_flight = self.begun + 1, self.in_flight + 1
        self.most = max(self.most, self.in_flight)
        return type("Work", (), {"wait": lambda _: wait(work)})()

    def waited(self, work):
        self.in_flight -= 1
        return work.wait()


def _works_in_flight(rank, group, case):
    sent = torch.distributed.all_reduce = _Sent(torch.distributed.all_reduce)
    try:
        result = run(rank, group, case)
    finally:
        torch.distributed.all_reduce = sent.begin
    return result, sent.begun, sent.most, sent.in_flight


@TWO_WAYS
@in_two_ranks
def test_gradients_of_two_chunks_at_most_are_on_their_way(rank_pool, impl, way):
    """Each keeps its memory until it has arrived."""
    case = Case(many_tokens(16, 2 * COLUMNS), impl, {**way, "chunk_tokens": 2})
    results, *counts = zip(*rank_pool.run(_works_in_flight, case), strict=True)
    check(case, results)
    assert counts == [(8, 8), (2, 2), (0, 0)]


@BY_WAY
@in_two_ranks
def test_no_tokens_of_a_sequence_that_ranks_share(rank_pool, impl, way):
    none = made(rank_pool.world_size, bias=True)
    none = none._replace(hidden=none.hidden[:0].view(0, 2, WIDTH), labels=none.labels[:0].view(0, 2))
    case = Case(none, impl, {**way, "sequence_parallel": True}, grad_outputs=(torch.ones(()),))
    for result in rank_pool.run(run, case):
        assert result.outputs[0].shape == ((0, 2) if way["reduction"] == "none" else ())
        assert result.hidden.shape == (0, 2, WIDTH) and result.weight.shape == (COLUMNS, WIDTH)
        for tensor in (result.outputs[0], result.weight, result.bias):
            assert torch.equal(tensor, torch.zeros_like(tensor))
        assert not result.in_forward + result.in_backward


def _attempts_on_a_dtensor(rank, group, impl, attempts):
    device = device_of(rank, group)
    weight = distributed(torch.ones(5, WIDTH), device, group)
    tokens = torch.ones(4, WIDTH, device=device), weight, torch.zeros(4, device=device).long()
    call = partial(linear_cross_entropy, *tokens, impl=impl, group=group)
    return messages_of({name: partial(call, **options) for name, options in attempts.items()})


@in_four_ranks
def test_a_dtensor_that_leaves_a_rank_without_rows_is_refused_on_every_rank(rank_pool, impl):
    """2, 2, 1 and 0 rows: refused by the last rank alone it would leave the others waiting."""
    attempts = {"alone": {}, "with its size": {"vocab_size": 5}, "with less": {"vocab_size": 4}}
    expected = dict.fromkeys(attempts, "ValueError: vocab_size: must leave a column to the last of 4 ranks")
    assert_refused(rank_pool.run(_attempts_on_a_dtensor, impl, attempts), expected)


@BY_WAY
@in_two_ranks
def test_chunks_of_a_sequence_with_an_ignore_index_that_int32_labels_cannot_hold(rank_pool, impl, way):
    """No label is it, and labels that are put in the order of the chunks are none of it either."""
    world = rank_pool.world_size
    inputs = many_tokens(4 * world, COLUMNS * world)
    options = {**way, "sequence_parallel": True, "chunk_tokens": 2 * world, "ignore_index": 2**40}
    case = Case(inputs, impl, options)
    wide = rank_pool.run(run, case)
    check(case, wide)
    narrow = rank_pool.run(run, case._replace(inputs=inputs._replace(labels=inputs.labels.int())))
    for result, expected in zip(narrow, wide, strict=True):
        assert all(map(torch.equal, (*result.outputs, *result[1:3]), (*expected.outputs, *expected[1:3])))
