"""A projection and its loss on R ranks: results of the whole vocabulary, and the collectives they took."""

from functools import partial

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard

from tests.support.cases import linear
from tests.support.cases.flat import linear_cross_entropy, linear_objective
from tests.support.cases.inputs import IGNORE_INDEX, transposed_grad_output
from tests.support.cases.weights import weights
from tests.support.ranks import linear as sizes
from tests.support.ranks.case import Case, check, chunked, distributed, even, run
from tests.support.ranks.collectives import assert_refused, messages_of
from tests.support.ranks.pools import device_of, in_four_ranks, in_ranks, in_several_ranks, in_two_ranks, subgroups
from vocab_parallel_ce import Teacher, VocabShard


def made(world, kind="some_ignored", **settings):
    """Tokens whose logits have :data:`COLUMNS` columns on each rank."""
    return linear.projection(kind, sizes.ROWS, sizes.COLUMNS * world, shards=world, **settings)


@pytest.mark.quick
@sizes.BY_WAY
@in_ranks((2, 3), (2,), (2, 4))
def test_results_are_those_of_the_whole_vocabulary(rank_pool, impl, way):
    """One all_gather and one all_reduce a chunk; without a gradient in forward one all_gather in all."""
    world = rank_pool.world_size
    for kind, dtype, options in (
        ("some_ignored", torch.float16, {"chunk_size": 1}),
        ("some_ignored", torch.float32, {"class_weight": weights(sizes.COLUMNS * world), "label_smoothing": 0.1}),
        ("peaked", torch.float32, {"chunk_size": 4}),
        ("shard_edges", torch.bfloat16, {"chunk_size": 4, "logits_dtype": torch.float32, "label_smoothing": 0.1}),
    ):
        inputs = made(world, kind, dtype=dtype, bias=kind == "peaked")
        case = Case(inputs, impl, {**way, **options})
        results = rank_pool.run(run, case)
        check(case, results)
        sizes.check_sent(case, results, leaves_out=rank_pool.backend == "gloo")
        if kind != "some_ignored":  # whose tokens may be left out
            sizes.check_collectives(case, results, extra=2 * ("label_smoothing" in options))


@linear.TWO_WAYS
@in_ranks((2,), (), (2,))
def test_a_chunk_of_many_tokens_sends_its_statistics_in_two_parts(rank_pool, impl, way):
    """Each travels while the loss's kernels read the other. 300 tokens in chunks of 200: 128 and 72, then 100."""
    case = Case(linear.many_tokens(300, sizes.COLUMNS * rank_pool.world_size), impl, {**way, "chunk_size": 200})
    results = rank_pool.run(run, case)
    check(case, results)
    parts = [128, 72, 100] if way.get("gradient") == "in_forward" else [300]
    for result in results:
        sent = [call.nbytes for call in result.in_forward if "gather" in call.name]
        assert sent == [12 * tokens for tokens in parts]


@in_several_ranks
def test_shards_in_another_order_and_shards_that_are_all_padding(rank_pool, impl):
    """Padded rows of the weight hold large numbers, which would show in every gradient."""
    world = rank_pool.world_size
    for vocab_size, bounds in ((50, even(26, world)[::-1]), (13, even(13, world))):
        for way in sizes.WAYS.values():
            inputs = linear.projection("shard_edges", sizes.ROWS, vocab_size, bias=True)
            inputs.labels[0], inputs.labels[1] = vocab_size - 1, IGNORE_INDEX
            case = Case(inputs, impl, {**way, "label_smoothing": 0.1}, bounds, "shard")
            check(case, rank_pool.run(run, case))


@in_two_ranks
def test_class_weights_of_shards_that_are_all_padding(rank_pool, impl):
    """The first rank's columns are as many as the vocabulary: the two forms are one there."""
    options = {"class_weight": weights(13), "gradient": "in_forward"}
    case = Case(linear.projection(vocab_size=13), impl, options, [(0, 13), (13, 20)], "shard")
    for form in ("whole", "columns"):
        case = case._replace(weight_form=form)
        check(case, rank_pool.run(run, case))


@linear.TWO_WAYS
@in_two_ranks
def test_a_gradient_that_nobody_needs_or_a_framework_reduces_is_not_sent(rank_pool, impl, way):
    inputs = made(rank_pool.world_size, "peaked", dtype=torch.bfloat16, bias=True)
    for options, frozen in (
        ({"reduce_hidden_grad": False, "chunk_size": 4}, ()),
        ({}, ("weight",)),
        ({}, ("hidden",)),
        ({}, ("hidden", "weight", "bias")),
    ):
        case = Case(inputs, impl, {**way, **options}, frozen=frozen)
        results = rank_pool.run(run, case)
        check(case, results)
        sizes.check_collectives(case, results)


PARTS = {  # shape of the tokens, and options by the number of ranks
    "one chunk": lambda n: ((2 * n, 2), {}),
    "chunks": lambda n: ((2 * n, 2), {"chunk_size": n, "logits_dtype": torch.float32}),
    "chunks of sequences": lambda n: ((2 * n, 3), {"chunk_size": 3 * n}),
    "three dimensions": lambda n: ((n, 2, 2), {"chunk_size": 3 * n}),
}


@pytest.mark.parametrize("name", PARTS)
@linear.TWO_WAYS
@in_several_ranks
def test_sequence_parallel_takes_and_gives_parts_of_the_sequence(rank_pool, impl, way, name):
    """In several chunks, the tokens are then not in their order."""
    world = rank_pool.world_size
    shape, more = PARTS[name](world)
    rows = torch.Size(shape).numel()
    inputs = linear.many_tokens(rows, sizes.COLUMNS * world, torch.bfloat16 if more else torch.float32).shaped(*shape)
    inputs.labels.view(-1)[[1, -2]] = IGNORE_INDEX
    options = {**way, **more, "sequence_parallel": True, "label_smoothing": 0.1}
    given = linear.zero_first_grad_output(rows).view(shape)
    if name == "one chunk":
        given = transposed_grad_output(*shape)
    case = Case(inputs, impl, options, grad_outputs=(given if way["reduction"] == "none" else torch.tensor(0.75),))
    results = rank_pool.run(run, case)
    check(case, results)
    # Hidden states are gathered in each pass over them, statistics once, gradients scattered once.
    sizes.check_sent(case, results, leaves_out=False)


@in_four_ranks
def test_a_subgroup_is_a_vocabulary_of_its_own(rank_pool, impl):
    members = (1, 3)
    for sequence_parallel in (False, True):
        options = {**sizes.WAYS["mean"], "sequence_parallel": sequence_parallel}
        case = Case(linear.projection("shard_edges", 4, 37), impl, options, chunked(37, 2), "vocab_size")
        results = rank_pool.run(run, case, (members,))
        assert results[0] is None and results[2] is None
        check(case, [results[rank] for rank in members])


@pytest.mark.parametrize(("vocab_size", "main_grad"), [(24, False), (49, True)])
@linear.TWO_WAYS
@in_several_ranks
def test_a_dtensor_knows_its_rows_and_gets_a_dtensor(rank_pool, impl, way, vocab_size, main_grad):
    """49 rows are uneven on any number of ranks, which the width of a shard does not tell."""
    inputs = linear.projection("shard_edges", sizes.ROWS, vocab_size, dtype=torch.bfloat16, bias=True)
    bounds = chunked(vocab_size, rank_pool.world_size)
    case = Case(inputs, impl, {**way, "chunk_size": 4}, bounds, main_grad=main_grad, as_dtensors=True)
    check(case, rank_pool.run(run, case))


@linear.TWO_WAYS
@in_two_ranks
def test_padded_rows_of_a_dtensor_are_those_beyond_the_vocabulary(rank_pool, impl, way):
    """A cut of 7 rows is 4 and 3; of a vocabulary of 6 it would be 3 and 3, on the second rank alone."""
    world = rank_pool.world_size
    rows, vocab_size = 4 * world - 1, 4 * world - 2
    inputs = linear.projection("shard_edges", sizes.ROWS, vocab_size)
    case = Case(inputs, impl, way, chunked(rows, world), "vocab_size", as_dtensors=True)
    check(case, rank_pool.run(run, case))


def _check_chunks(rank_pool, impl, way, bounds, chunk, **options):
    """64 tokens in the chunks that a memory budget gives, on every rank."""
    case = Case(linear.many_tokens(64, bounds[-1][1]), impl, {**way, **options}, bounds, "shard")
    results = rank_pool.run(run, case)
    check(case, results)
    sizes.check_collectives(case._replace(options={**case.options, "chunk_size": chunk}), results)


@linear.TWO_WAYS
@in_two_ranks
def test_ranks_of_unequal_shards_cut_the_tokens_alike(rank_pool, impl, way):
    """16 and 8 columns: 26 tokens' logits of 12 columns fit, on the narrow rank 40 of its own would."""
    _check_chunks(rank_pool, impl, way, [(0, 16), (16, 24)], 26, chunk_size="1280B")


@linear.TWO_WAYS
@in_four_ranks
def test_a_last_rank_of_fewer_columns_cuts_the_tokens_as_the_others(rank_pool, impl, way):
    _check_chunks(rank_pool, impl, way, chunked(7, 4), 20, chunk_size="160B")


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


@linear.TWO_WAYS
@in_two_ranks
def test_the_gradient_of_one_chunk_at_most_is_on_its_way(rank_pool, impl, way):
    """It keeps its memory until it has arrived."""
    case = Case(linear.many_tokens(16, 2 * sizes.COLUMNS), impl, {**way, "chunk_size": 2})
    results, *counts = zip(*rank_pool.run(_works_in_flight, case), strict=True)
    check(case, results)
    assert counts == [(8, 8), (1, 1), (0, 0)]


@linear.TWO_WAYS
@in_two_ranks
def test_no_tokens_of_a_sequence_that_ranks_share(rank_pool, impl, way):
    none = made(rank_pool.world_size, bias=True)
    none = none._replace(hidden=none.hidden[:0].view(0, 2, linear.WIDTH), labels=none.labels[:0].view(0, 2))
    case = Case(none, impl, {**way, "sequence_parallel": True}, grad_outputs=(torch.ones(()),))
    for result in rank_pool.run(run, case):
        assert result.outputs[0].shape == ((0, 2) if way["reduction"] == "none" else ())
        hidden, weight, bias = result.gradients
        assert hidden.shape == (0, 2, linear.WIDTH) and weight.shape == (sizes.COLUMNS, linear.WIDTH)
        for tensor in (result.outputs[0], weight, bias):
            assert torch.equal(tensor, torch.zeros_like(tensor))
        assert not result.in_forward + result.in_backward


def _refusals(rank, group, impl):
    device = device_of(rank, group)
    others = subgroups((0,), (1,))[1 - rank]
    whole = torch.randn(24, linear.WIDTH, generator=torch.Generator().manual_seed(0)).to(device)
    hidden, weight = torch.randn(4, linear.WIDTH, device=device), whole.chunk(2)[rank]
    labels = torch.zeros(4, dtype=torch.int64, device=device)
    cut = distributed(whole[:7], device, group)  # 4 and 3 rows: a bias of 8 fits the first rank's own
    uneven = VocabShard(2 * rank, (2, 3)[rank], 3)  # the width that decides is that of ceil(V / R)
    attempts = {
        "replicated": {"weight": distributed(whole, device, group, Replicate())},
        "in columns": {"weight": distributed(whole, device, group, Shard(1))},
        "bias of a DTensor": {"weight": cut, "bias": distributed(whole[:8, 0], device, group)},
        "vocab_size of a DTensor": {"weight": cut, "vocab_size": 8},
        "shard of a DTensor": {"weight": cut, "vocab_size": VocabShard(0, 4, 7)},
        "small budget": {"weight": whole[: uneven.n_columns], "vocab_size": uneven, "chunk_size": "7B"},
        "not a member": {"group": others},
        "labels of a part": {"sequence_parallel": True},
        "valid tokens of a part": {
            "sequence_parallel": True,
            "labels": labels.repeat(2),
            "valid_tokens": 3,
        },
        "whole weight": {"weight": whole, "vocab_size": 24},
        "hidden is a part": {"labels": labels.repeat(2)},
    }
    valid = {"hidden": hidden, "weight": weight, "labels": labels, "group": group, "impl": impl}
    calls = {name: partial(linear_cross_entropy, **valid | changed) for name, changed in attempts.items()}
    of_parts = valid | {"labels": labels.repeat(2), "objective": torch.add, "teacher": Teacher(hidden, weight)}
    calls["teacher of a part"] = partial(linear_objective, **of_parts, sequence_parallel=True)
    return messages_of(calls)


@in_two_ranks
def test_what_does_not_fit_the_group_is_refused(rank_pool, impl):
    """A replicated weight taken for a shard would make the loss larger by log(R)."""
    expected = {
        "replicated": r"ValueError: weight: .*Shard.0.* got \(Replicate.*plain tensor",
        "in columns": r"ValueError: weight: .*Shard.0.* got \(Shard.dim=1.*plain tensor",
        "bias of a DTensor": r"ValueError: bias: expected shape \(7,\), got \(8,\)",
        "vocab_size of a DTensor": "ValueError: vocab_size: must be at most 7, the rows of weight, got 8",
        "shard of a DTensor": "ValueError: vocab_size: expected a number or None with a DTensor .*got VocabShard",
        "small budget": "ValueError: chunk_size: must hold a token's logits, 8 bytes, got '7B'",
        "not a member": "ValueError: group: this rank must be a member",
        "labels of a part": r"ValueError: labels: .*\(8,\).*\(4,\)",
        "valid tokens of a part": "ValueError: valid_tokens: .*sequence_parallel",
        "teacher of a part": r"ValueError: teacher.hidden: .*all ranks' tokens.*, \(8,\), got \(4, ",
        "whole weight": "ValueError: (weight|vocab_size): .*24",
        "hidden is a part": r"ValueError: labels: .*\(4,\).*\(8,\)",
    }
    assert_refused(rank_pool.run(_refusals, impl), expected)
