"""The loss over logits: every option with every value of every other, on 1, 2 and 4 ranks."""

import pytest
import torch

from tests.support.inputs import DTYPES, IGNORE_INDEX, NAN
from tests.support.logits import DIVISORS, GRADIENTS, SMOOTHING, broad_rows
from tests.support.logits_ranks import BOUNDS, Case, check, run, run_alone
from tests.support.pairs import covering
from tests.support.ranks import in_several_ranks
from tests.support.weights import WEIGHTS, class_weight
from vocab_parallel_ce import LossMetrics

VOCAB, ROWS = 40, 5
SIZES = {"even": "even", "padded": "vocab_size", "uneven": "shard"}
KINDS = ("peaked", "some_ignored", "shard_edges", "confident", "excluded_columns", "all_ignored")
PAIRS = covering(
    lambda case: not (case.get("class_weight") and case.get("z_loss") and case.get("return_metrics")),
    smoothing=tuple(SMOOTHING),
    divisor=tuple(DIVISORS),
    z_loss=(0.0, 0.02),
    softcap=(None, 10.0),
    logit_scale=(1.0, 0.4),
    class_weight=(None, *WEIGHTS),
    ignore_index=(IGNORE_INDEX, 5),
    shift=(False, True),
    return_metrics=(False, True),
    gradient=GRADIENTS,
    columns=tuple(BOUNDS),
    kind=KINDS,
    dtype=(*DTYPES, torch.float64),
)
EACH = pytest.mark.parametrize("pair", PAIRS, ids=map(str, range(len(PAIRS))))


def case_of(pair, n_ranks, impl):
    logits, labels = broad_rows(pair["kind"], ROWS, VOCAB, shards=n_ranks, dtype=pair["dtype"])
    # Ties, of which the first counts, and rows whose contents nobody may see.
    logits[1::2, VOCAB - 2] = logits[1::2].amax(dim=1)
    logits[labels == IGNORE_INDEX] = NAN
    labels[labels == IGNORE_INDEX] = pair["ignore_index"]
    if pair["shift"]:
        logits, labels = logits.roll(1, 0)[None], labels.roll(2, 0)[None]
    same = ("z_loss", "softcap", "logit_scale", "ignore_index", "shift", "return_metrics", "gradient")
    options = {name: pair[name] for name in same} | SMOOTHING[pair["smoothing"]] | DIVISORS[pair["divisor"]]
    given, form = class_weight(pair["class_weight"], VOCAB)
    bounds = BOUNDS[pair["columns"]].get(n_ranks)
    impl = "auto" if pair["dtype"] == torch.float64 else impl  # kernels have no fp64
    return Case(logits, labels, impl, options | given, bounds, SIZES[pair["columns"]], weight_form=form)


@pytest.mark.quick(3)
@pytest.mark.interpreted(12)
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # of the interpreter, about infinity - infinity
@EACH
def test_on_one_rank(impl_device, pair):
    case = case_of(pair, 1, impl_device[0])
    check(case, run_alone((case.impl, impl_device[1]), case))


@pytest.mark.quick(3)
@pytest.mark.interpreted(5)
@EACH
@in_several_ranks
def test_on_ranks(rank_pool, impl, pair):
    case = case_of(pair, rank_pool.world_size, impl)
    whole = check(case, rank_pool.run(run, case))
    assert len(whole.outputs) == 1 + len(LossMetrics._fields) * case.options["return_metrics"]
