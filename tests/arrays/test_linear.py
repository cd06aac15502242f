"""The loss of a head: every option with every value of every other, on 1, 2 and 4 ranks."""

import pytest
import torch

from tests.arrays.test_logits import SIZES, VOCAB
from tests.support.inputs import DTYPES, IGNORE_INDEX, NAN
from tests.support.linear import WIDTH, projection
from tests.support.linear_ranks import Case, check, check_sent, grad_outputs_of, run, run_alone
from tests.support.logits import DIVISORS, SMOOTHING
from tests.support.logits_ranks import BOUNDS
from tests.support.pairs import covering
from tests.support.ranks import in_several_ranks
from tests.support.weights import WEIGHTS, class_weight

HIDDEN = {
    "reduced": {"reduce_hidden_grad": True},
    "own": {"reduce_hidden_grad": False},
    "parts": {"sequence_parallel": True},
    "parts of each": {"sequence_parallel": True, "sequence_dim": 1},
}


def allowed(case):
    """What a call takes together. An ``expected_grad_output`` comes with gradients in forward of unreduced losses."""
    has_metrics = case.get("class_weight") and case.get("z_loss") and case.get("return_metrics")
    is_expected = case.get("divisor") == "none" and case.get("gradient") == "in_forward"
    has_parts = case.get("hidden") in ("parts", "parts of each")
    return not (
        has_metrics
        or (is_expected and case.get("dtype") == torch.float16)
        or (has_parts and case.get("valid_tokens") is not None)
        or (case.get("hidden") == "parts" and case.get("shift"))
    )


PAIRS = covering(
    allowed,
    smoothing=tuple(SMOOTHING),
    divisor=tuple(DIVISORS),
    gradient=("in_forward", "in_backward"),
    dtype=DTYPES,
    z_loss=(0.0, 0.02),
    softcap=(None, 10.0),
    logit_scale=(1.0, 0.4),
    class_weight=(None, *WEIGHTS),
    ignore_index=(IGNORE_INDEX, 5),
    shift=(False, True),
    return_metrics=(False, True),
    columns=tuple(BOUNDS),
    kind=("peaked", "some_ignored", "shard_edges", "confident", "all_ignored"),
    bias=(False, True),
    chunk_tokens=("auto", 1, 3),
    hidden=tuple(HIDDEN),
    valid_tokens=(None, 0, 2),  # by how many more there could be
    logits_dtype=(None, torch.float32),
    main_grad=(False, True),
)
EACH = pytest.mark.parametrize("pair", PAIRS, ids=map(str, range(len(PAIRS))))


def case_of(pair, n_ranks, impl):
    inputs = projection(
        pair["kind"], WIDTH, VOCAB, dtype=pair["dtype"], shards=n_ranks, bias=pair["bias"], exact=pair["return_metrics"]
    )
    ignored = inputs.labels == IGNORE_INDEX
    inputs.hidden[ignored] = NAN
    inputs.labels[ignored] = pair["ignore_index"]
    if pair["shift"]:
        inputs = inputs._replace(hidden=inputs.hidden.roll(1, 0), labels=inputs.labels.roll(2, 0)).shaped(1, WIDTH)
    inputs = inputs.shaped(2, WIDTH // 2) if pair["hidden"] == "parts of each" else inputs
    same = ("gradient", "z_loss", "softcap", "logit_scale", "ignore_index", "shift", "return_metrics")
    options = {name: pair[name] for name in (*same, "chunk_tokens", "valid_tokens", "logits_dtype")}
    options |= SMOOTHING[pair["smoothing"]] | DIVISORS[pair["divisor"]]
    options |= HIDDEN[pair["hidden"]] if n_ranks > 1 else {}
    if pair["valid_tokens"] is not None:
        labels = inputs.labels[..., 1:] if pair["shift"] else inputs.labels
        options["valid_tokens"] += int((labels != pair["ignore_index"]).sum())
    given, form = class_weight(pair["class_weight"], VOCAB)
    bounds = BOUNDS[pair["columns"]].get(n_ranks)
    own = {"main_grad": pair["main_grad"], "weight_form": form}
    case = Case(inputs, impl, options | given, bounds, SIZES[pair["columns"]], **own)
    if pair["divisor"] == "none" and pair["gradient"] == "in_forward":
        case.options["expected_grad_output"] = grad_outputs_of(case)[0]
    return case


@pytest.mark.quick(3)
@pytest.mark.interpreted(8)
@EACH
def test_on_one_rank(impl_device, pair):
    case = case_of(pair, 1, impl_device[0])
    check(case, run_alone(impl_device, case))


@pytest.mark.quick(3)
@pytest.mark.interpreted(5)
@EACH
@in_several_ranks
def test_on_ranks(rank_pool, impl, pair):
    case = case_of(pair, rank_pool.world_size, impl)
    results = rank_pool.run(run, case)
    check(case, results)
    check_sent(case, results, leaves_out=rank_pool.backend == "gloo")
