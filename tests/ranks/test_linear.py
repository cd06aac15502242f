"""A projection and its loss on R ranks: results of the whole vocabulary, and the collectives they took."""

from collections import Counter
from functools import partial

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard

from tests.support.collectives import assert_refused, messages_of
from tests.support.inputs import IGNORE_INDEX, grad_output_layouts
from tests.support.linear import WIDTH, many_tokens, projection, zero_first_grad_output
from tests.support.linear_ranks import (
    BY_WAY,
    COLUMNS,
    ROWS,
    WAYS,
    Case,
    check,
    check_collectives,
    check_sent,
    distributed,
    run,
)
from tests.support.logits_ranks import chunked, even
from tests.support.ranks import device_of, in_four_ranks, in_ranks, in_several_ranks, in_two_ranks, subgroups
from tests.support.weights import weights
from vocab_parallel_ce import VocabShard, linear_cross_entropy


def made(world, kind="some_ignored", rows=ROWS, **settings):
    """Tokens whose logits have :data:`COLUMNS` columns on each rank."""
    return projection(kind, rows, COLUMNS * world, shards=world, **settings)


@pytest.mark.quick
@pytest.mark.parametrize("label_smoothing", [0.1, 0.0])
@BY_WAY
@in_ranks((2, 3), (2,), (2, 4))
def test_results_are_those_of_the_whole_vocabulary(rank_pool, impl, way, label_smoothing):
    """One all_gather and one all_reduce a chunk; without a gradient in forward one all_gather in all."""
    world = rank_pool.world_size
    for kind, dtype, chunk in (
        ("some_ignored", torch.float16, {"chunk_tokens": 1}),
        ("some_ignored", torch.float32, {"class_weight": weights(COLUMNS * world)}),
        ("peaked", torch.float32, {"chunk_tokens": 4}),
        ("shard_edges", torch.bfloat16, {"chunk_tokens": 4, "logits_dtype": torch.float32}),
    ):
        inputs = made(world, kind, dtype=dtype, bias=kind == "peaked")
        case = Case(inputs, impl, {**way, **chunk, "label_smoothing": label_smoothing})
        results = rank_pool.run(run, case)
        check(case, results)
        check_sent(case, results, leaves_out=rank_pool.backend == "gloo")
        if kind != "some_ignored":  # whose tokens may be left out
            check_collectives(case, results, extra=2 * (label_smoothing > 0))


@BY_WAY
@in_ranks((2,), (), (2,))
def test_a_chunk_of_many_tokens_sends_its_statistics_in_two_parts(rank_pool, impl, way):
    """Each travels beside the other's products. 300 tokens in chunks of 200: 128 and 72, then 100."""
    case = Case(many_tokens(300, COLUMNS * rank_pool.world_size), impl, {**way, "chunk_tokens": 200})
    results = rank_pool.run(run, case)
    check(case, results)
    parts = [128, 72, 100] if way.get("gradient") == "in_forward" else [300]
    for result in results:
        sent = [call.nbytes for call in result.in_forward if "gather" in call.name]
        assert sent == [12 * tokens for tokens in parts]


@pytest.mark.parametrize(
    ("vocab_size", "size", "bounds_of"),
    [
        (50, "vocab_size", lambda world: chunked(50, world)),
        (50, "vocab_size", lambda world: even(26, world)),
        (50, "shard", lambda world: even(26, world)[::-1]),
        (13, "shard", lambda world: even(13, world)),
    ],
    ids=["uneven", "padded", "in another order", "all padding"],
)
@in_several_ranks
def test_uneven_and_padded_shards(rank_pool, impl, vocab_size, size, bounds_of):
    """Padded rows of the weight hold large numbers, which would show in every gradient."""
    bounds = bounds_of(rank_pool.world_size)
    for way in WAYS.values():
        inputs = projection("shard_edges", ROWS, vocab_size, bias=True)
        inputs.labels[0], inputs.labels[1] = vocab_size - 1, IGNORE_INDEX
        case = Case(inputs, impl, {**way, "label_smoothing": 0.1}, bounds, size)
        check(case, rank_pool.run(run, case))


NEEDED = [({"reduce_hidden_grad": False, "chunk_tokens": 4}, ())]
NEEDED += [({}, frozen) for frozen in (("weight",), ("hidden",), ("hidden", "weight", "bias"))]


@pytest.mark.parametrize(("options", "frozen"), NEEDED, ids=str)
@BY_WAY
@in_two_ranks
def test_a_gradient_that_nobody_needs_or_a_framework_reduces_is_not_sent(rank_pool, impl, way, options, frozen):
    inputs = made(rank_pool.world_size, "peaked", dtype=torch.bfloat16, bias=True)
    case = Case(inputs, impl, {**way, **options}, frozen=frozen)
    results = rank_pool.run(run, case)
    check(case, results)
    check_collectives(case, results)


@BY_WAY
@in_several_ranks
def test_sequence_parallel_takes_and_gives_parts_of_the_sequence(rank_pool, impl, way):
    world = rank_pool.world_size
    shape = (2 * world, 2)
    rows = shape[0] * shape[1]
    grad_output = dict(grad_output_layouts(shape))["transposed"] if way["reduction"] == "none" else torch.tensor(0.75)
    for dtype, chunk in (
        (torch.float32, {}),
        (torch.bfloat16, {"chunk_tokens": world}),
        (torch.bfloat16, {"chunk_tokens": 3 * world, "logits_dtype": torch.float32}),
    ):
        inputs = many_tokens(rows, COLUMNS * world, dtype).shaped(*shape)
        inputs.labels[0, 1] = inputs.labels[-1, 0] = IGNORE_INDEX
        options = {**way, **chunk, "sequence_parallel": True, "label_smoothing": 0.1}
        case = Case(inputs, impl, options, grad_outputs=(grad_output,))
        results = rank_pool.run(run, case)
        check(case, results)
        # Hidden states are gathered in each pass over them, statistics once, gradients scattered once.
        whole, passes = inputs.hidden.nbytes, 1 if way.get("gradient") == "in_forward" else 2
        gathered = passes * whole // world + 4 * 5 * rows
        for result in results:
            sent = Counter()
            for call in result.in_forward + result.in_backward:
                sent[call.name] += call.nbytes
            assert sent == {"_allgather_base_": gathered, "_reduce_scatter_base_": whole}


@BY_WAY
@in_several_ranks
def test_parts_of_the_sequences_of_a_batch(rank_pool, impl, way):
    """Hidden states [b, s / R, D]: every sequence is cut. In one chunk too, the tokens are not in their order."""
    world, dtype = rank_pool.world_size, torch.bfloat16
    shapes = {"one chunk": (3, 2 * world), "chunks": (3, 2 * world), "inner": (2, world, 2), "last": (2, 2, 2 * world)}
    for name, shape in shapes.items():
        rows, dim = torch.Size(shape).numel(), 2 if name == "last" else 1
        inputs = many_tokens(rows, COLUMNS * world, dtype).shaped(*shape)
        inputs.labels.view(-1)[[1, -2]] = IGNORE_INDEX
        options = {**way, "sequence_parallel": True, "sequence_dim": dim}
        options["chunk_tokens"] = rows if name == "one chunk" else 3 * world
        given = zero_first_grad_output(rows).view(shape) if way["reduction"] == "none" else torch.tensor(0.75)
        case = Case(inputs, impl, options, grad_outputs=(given,))
        results = rank_pool.run(run, case)
        check(case, results)
        passes = 1 if way.get("gradient") == "in_forward" else 2
        for result in results:
            sent = Counter()
            for call in result.in_forward + result.in_backward:
                sent[call.name] += call.nbytes
            gathered = passes * inputs.hidden.nbytes // world + 4 * 3 * rows
            assert sent == {"_allgather_base_": gathered, "_reduce_scatter_base_": inputs.hidden.nbytes}


@in_four_ranks
def test_a_subgroup_is_a_vocabulary_of_its_own(rank_pool, impl):
    members = (1, 3)
    for sequence_parallel in (False, True):
        options = {**WAYS["mean"], "sequence_parallel": sequence_parallel}
        case = Case(projection("shard_edges", 4, 37), impl, options, chunked(37, 2), "vocab_size")
        results = rank_pool.run(run, case, members)
        assert results[0] is None and results[2] is None
        check(case, [results[rank] for rank in members])


@pytest.mark.parametrize(("vocab_size", "main_grad"), [(24, False), (49, False), (49, True)])
@BY_WAY
@in_several_ranks
def test_a_dtensor_knows_its_rows_and_gets_a_dtensor(rank_pool, impl, way, vocab_size, main_grad):
    """49 rows are uneven on any number of ranks, which the width of a shard does not tell."""
    inputs = projection("shard_edges", ROWS, vocab_size, dtype=torch.bfloat16, bias=True)
    bounds = chunked(vocab_size, rank_pool.world_size)
    case = Case(inputs, impl, {**way, "chunk_tokens": 4}, bounds, main_grad=main_grad)
    check(case, rank_pool.run(run, case, None, True))


@BY_WAY
@in_two_ranks
def test_padded_rows_of_a_dtensor_are_those_beyond_the_vocabulary(rank_pool, impl, way):
    """A cut of 7 rows is 4 and 3; of a vocabulary of 6 it would be 3 and 3, on the second rank alone."""
    world = rank_pool.world_size
    rows, vocab_size = 4 * world - 1, 4 * world - 2
    case = Case(projection("shard_edges", ROWS, vocab_size), impl, way, chunked(rows, world), "vocab_size")
    check(case, rank_pool.run(run, case, None, True))


def _refusals(rank, group, impl):
    device = device_of(rank, group)
    others = subgroups((0,), (1,))[1 - rank]
    whole = torch.randn(24, WIDTH, generator=torch.Generator().manual_seed(0)).to(device)
    hidden, weight = torch.randn(4, WIDTH, device=device), whole.chunk(2)[rank]
    labels = torch.zeros(4, dtype=torch.int64, device=device)
    cut = distributed(whole[:7], device, group)  # 4 and 3 rows: a bias of 8 fits the first rank's own
    uneven = VocabShard(2 * rank, (2, 3)[rank], 3)  # the width that decides is that of ceil(V / R)
    attempts = {
        "replicated": {"weight": distributed(whole, device, group, Replicate())},
        "in columns": {"weight": distributed(whole, device, group, Shard(1))},
        "bias of a DTensor": {"weight": cut, "bias": distributed(whole[:8, 0], device, group)},
        "vocab_size of a DTensor": {"weight": cut, "vocab_size": 8},
        "shard of a DTensor": {"weight": cut, "shard": VocabShard(0, 4, 7)},
        "small budget": {"weight": whole[: uneven.n_columns], "shard": uneven, "memory_budget": 7},
        "not a member": {"group": others},
        "labels of a part": {"sequence_parallel": True},
        "valid tokens of a part": {"sequence_parallel": True, "labels": labels.repeat(2), "valid_tokens": 3},
        "whole weight": {"weight": whole, "vocab_size": 24},
        "no such dimension": {"sequence_parallel": True, "sequence_dim": 1, "labels": labels.repeat(2)},
        "shift of a part": {
            "hidden": hidden[:, None],
            "sequence_parallel": True,
            "labels": labels.repeat(2)[:, None].repeat(1, 2),
            "shift": True,
        },
        "hidden is a part": {"labels": labels.repeat(2)},
    }
    valid = {"hidden": hidden, "weight": weight, "labels": labels, "group": group, "impl": impl}
    return messages_of({name: partial(linear_cross_entropy, **valid | changed) for name, changed in attempts.items()})


@in_two_ranks
def test_what_does_not_fit_the_group_is_refused(rank_pool, impl):
    """A replicated weight taken for a shard would make the loss larger by log(R)."""
    expected = {
        "replicated": r"ValueError: weight: .*Shard.0.* got \(Replicate.*plain tensor",
        "in columns": r"ValueError: weight: .*Shard.0.* got \(Shard.dim=1.*plain tensor",
        "bias of a DTensor": r"ValueError: bias: expected shape \(7,\), got \(8,\)",
        "vocab_size of a DTensor": "ValueError: vocab_size: must be at most 7, the rows of weight, got 8",
        "shard of a DTensor": "ValueError: shard: expected None with a DTensor weight, .*got VocabShard",
        "small budget": "ValueError: memory_budget: must hold a token's logits, 8 bytes",
        "not a member": "ValueError: group: this rank must be a member",
        "labels of a part": r"ValueError: labels: .*\(8,\).*\(4,\)",
        "valid tokens of a part": "ValueError: valid_tokens: .*sequence_parallel",
        "whole weight": "ValueError: (weight|vocab_size): .*24",
        "no such dimension": r"ValueError: sequence_dim: hidden must have such a dimension .*got 1 and \(4,\)",
        "shift of a part": r"ValueError: shift: expected sequence_dim to be the last dimension.* 0 and .*\(8, 2\)",
        "hidden is a part": r"ValueError: labels: .*\(4,\).*\(8,\)",
    }
    assert_refused(rank_pool.run(_refusals, impl), expected)
