"""Class weights on R ranks, whole or cut: one collective with 4 bytes more a row, and the oracle's results."""

import pytest

from tests.logits.test_class_weight import FORMS, weights
from tests.support import linear_ranks
from tests.support.collectives import error_of
from tests.support.inputs import NAN, padded_shard
from tests.support.linear import projection
from tests.support.logits import DIVISORS, GRADIENTS, SMOOTHING, broad_rows
from tests.support.logits_ranks import Case, bounds_of, check, run
from tests.support.pairs import covering
from tests.support.ranks import device_of, in_ranks, in_several_ranks, in_two_ranks
from vocab_parallel_ce import verify_calls

VOCAB, ROWS = 40, 5
PADDED = [(0, 16), (16, 32), (32, 48), (48, 64)]  # of 4 ranks the last has none of the 40 columns
PAIRS = covering(
    smoothing=tuple(SMOOTHING),
    divisor=tuple(DIVISORS),
    z_loss=(0.0, 0.02),
    softcap=(None, 10.0),
    return_metrics=(False, True),
    gradient=GRADIENTS,
    form=FORMS,
    size=("even", "shard"),
    kind=("some_ignored", "shard_edges", "confident"),
)


def run_with_weights(rank, group, case, form):
    """:func:`run` with the whole ``class_weight`` of ``case``, or this rank's columns, NaN in the padding."""
    given = case.options["class_weight"]
    if form == "columns":
        given = padded_shard(given, *bounds_of(case, group.size())[group.rank()], fill=NAN)
    given = given.to(device_of(rank, group))
    return run(rank, group, case._replace(options={**case.options, "class_weight": given}))


@pytest.mark.quick(2)
@pytest.mark.interpreted(4)
@pytest.mark.parametrize("pair", PAIRS, ids=map(str, range(len(PAIRS))))
@in_two_ranks
def test_with_other_options(rank_pool, impl, pair):
    options = {name: pair[name] for name in ("z_loss", "softcap", "return_metrics", "gradient")}
    options |= {**SMOOTHING[pair["smoothing"]], **DIVISORS[pair["divisor"]], "class_weight": weights(VOCAB)}
    options["return_metrics"] &= not pair["z_loss"]
    bounds = [(0, 24), (24, 48)] if pair["size"] == "shard" else None
    made = broad_rows(pair["kind"], ROWS, VOCAB, shards=2)
    case = Case(*made, impl, options, bounds, pair["size"])
    check(case, rank_pool.run(run_with_weights, case, pair["form"]))


@pytest.mark.parametrize("form", FORMS)
@in_several_ranks
def test_shards_with_padding_in_any_order(rank_pool, impl, form):
    world = rank_pool.world_size
    bounds = PADDED[::-1] if world == 4 else [(24, 48), (0, 24)]
    options = {"class_weight": weights(VOCAB), "label_smoothing": 0.1, "z_loss": 0.02}
    case = Case(*broad_rows("shard_edges", ROWS, VOCAB), impl, options, bounds, "shard")
    check(case, rank_pool.run(run_with_weights, case, form))


def run_linear_with_weights(rank, group, case, form):
    given = case.options["class_weight"]
    if form == "columns":
        given = padded_shard(given, *linear_ranks.bounds_of(case, group.size())[group.rank()], fill=NAN)
    given = given.to(device_of(rank, group))
    return linear_ranks.run(rank, group, case._replace(options={**case.options, "class_weight": given}))


@pytest.mark.parametrize("form", FORMS)
@linear_ranks.BY_WAY
@in_several_ranks
def test_the_loss_of_a_head(rank_pool, impl, way, form):
    """A mean whose gradients are computed in forward gathers 4 bytes first: the sum of the weights."""
    world = rank_pool.world_size
    inputs = projection("shard_edges", linear_ranks.ROWS, VOCAB, shards=world)
    options = {**way, "class_weight": weights(VOCAB), "label_smoothing": 0.1, "chunk_tokens": 4}
    case = linear_ranks.Case(inputs, impl, options)
    results = rank_pool.run(run_linear_with_weights, case, form)
    linear_ranks.check(case, results)
    sums = [("_allgather_base_", tuple(range(world)), 4)]
    for result in results:
        small = [tuple(call) for call in result.in_forward if call.nbytes == 4]
        assert small == (sums if way == linear_ranks.WAYS["mean"] else [])
        result.in_forward[:] = [call for call in result.in_forward if call.nbytes != 4]
    linear_ranks.check_collectives(case, results, extra=3)


@in_two_ranks
def test_shards_of_a_head_that_are_all_padding(rank_pool, impl):
    """The first rank's columns are as many as the vocabulary: the two forms are one there."""
    options = {"class_weight": weights(13), "gradient": "in_forward"}
    case = linear_ranks.Case(projection(vocab_size=13), impl, options, [(0, 13), (13, 20)], "shard")
    for form in FORMS:
        linear_ranks.check(case, rank_pool.run(run_linear_with_weights, case, form))


def _verified(rank, group, case):
    """In a rank: what a call raises if only the first rank has class weights."""
    weights_of_rank = case.options["class_weight"].to(device_of(rank, group))
    options = {"class_weight": weights_of_rank} if rank == 0 else {}
    with verify_calls():
        return error_of(run, rank, group, case._replace(options=options))


@in_ranks((2,), (), (2,))
def test_verification_notices_a_rank_without_it(rank_pool, impl):
    case = Case(*broad_rows("peaked", ROWS, VOCAB), impl, {"class_weight": weights(VOCAB)})
    for error in rank_pool.run(_verified, case):
        assert error == "ValueError: class_weight: rank 1 of 2 has None, rank 0 has a tensor"
