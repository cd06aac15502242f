"""Class weights on R ranks, whole or cut: one collective with 4 bytes more a row, and the oracle's results."""

import pytest

from tests.logits.test_class_weight import FORMS, weights
from tests.support.inputs import NAN, padded_shard
from tests.support.logits import DIVISORS, GRADIENTS, SMOOTHING, broad_rows
from tests.support.logits_ranks import Case, bounds_of, check, run
from tests.support.pairs import covering
from tests.support.ranks import device_of, in_several_ranks, in_two_ranks

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
