"""Class weights on R ranks, whole or cut: one collective with 4 bytes more a row, and the oracle's results."""

from tests.support import linear_ranks
from tests.support.collectives import error_of
from tests.support.linear import projection
from tests.support.logits import broad_rows
from tests.support.logits_ranks import Case, run
from tests.support.ranks import device_of, in_ranks, in_two_ranks
from tests.support.weights import weights
from vocab_parallel_ce import verify_calls

VOCAB, ROWS = 40, 5
FORMS = ("whole", "columns")


@in_two_ranks
def test_shards_of_a_head_that_are_all_padding(rank_pool, impl):
    """The first rank's columns are as many as the vocabulary: the two forms are one there."""
    options = {"class_weight": weights(13), "gradient": "in_forward"}
    case = linear_ranks.Case(projection(vocab_size=13), impl, options, [(0, 13), (13, 20)], "shard")
    for form in FORMS:
        case = case._replace(weight_form=form)
        linear_ranks.check(case, rank_pool.run(linear_ranks.run, case))


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
