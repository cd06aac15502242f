"""Log-probabilities over logits and of a head: every option with every other, on 1, 2 and 4 ranks."""

import pytest
import torch

from tests.arrays.test_linear import HIDDEN
from tests.arrays.test_logits import SIZES, VOCAB
from tests.logits.test_temperature import FORMS, temperatures
from tests.support import linear, linear_ranks, logits_ranks, oracle
from tests.support.budget import assert_within_budget
from tests.support.inputs import DTYPES, IGNORE_INDEX, NAN
from tests.support.logits import broad_rows, every_output, grads_of_every_output, of_oracle
from tests.support.pairs import covering
from tests.support.ranks import in_several_ranks
from vocab_parallel_ce import linear_token_log_probs, token_log_probs

OF_HEAD = {  # and what they are without one
    "bias": (False, True),
    "chunk_tokens": ("auto", 1, 3),
    "hidden": ("reduced", *(name for name in HIDDEN if name != "reduced")),
    "valid_tokens": (None, 0, 2),  # by how many more there could be
    "logits_dtype": (None, torch.float32),
    "main_grad": (False, True),
}
FUNCTIONS = {  # over logits, of a head, and how many outputs have a gradient
    "log_probs": (token_log_probs, linear_token_log_probs, 1),
    "entropy": (token_log_probs, linear_token_log_probs, 2),
    "every": (every_output, linear.linear_every_output, 5),
}


def allowed(case):
    """What a call takes together: of a head or not; parts of tokens, or ignored ones left out."""
    of_head = any(case.get(name, values[0]) != values[0] for name, values in OF_HEAD.items())
    of_logits = case.get("gradient", "auto") != "auto" or case.get("kind", "peaked") not in linear.LINEAR_KINDS
    has_parts = case.get("hidden") in ("parts", "parts of each")
    return not (
        (case.get("head", of_head) and of_logits)
        or (of_head and not case.get("head", True))
        or (case.get("head", of_head) and case.get("dtype") == torch.float64)
        or (has_parts and case.get("valid_tokens") is not None)
        or (case.get("largest") and case.get("outputs", "every") != "every")
    )


PAIRS = covering(
    allowed,
    head=(False, True),
    outputs=tuple(FUNCTIONS),
    used=(0, 1, 2, 3, 4, "all"),
    largest=(False, True),
    temperature=(1.0, 0.6, 3, "one", "tokens"),  # the last two are tensors
    softcap=(None, 10.0),
    logit_scale=(1.0, 0.4),
    ignore_index=(IGNORE_INDEX, 5),
    gradient=("auto", "in_backward", "out_of_place"),
    columns=tuple(logits_ranks.BOUNDS),
    kind=("peaked", "some_ignored", "shard_edges", "confident", "excluded_shard"),
    dtype=(*DTYPES, torch.float64),  # fp64 over logits alone
    **OF_HEAD,
)
EACH = pytest.mark.parametrize("pair", PAIRS, ids=map(str, range(len(PAIRS))))


def temperature_of(pair, labels):
    form = pair["temperature"]
    return temperatures(form, labels.numel()).view(labels.shape if form == "tokens" else ()) if form in FORMS else form


def case_of(pair, n_ranks, impl):
    *functions, n_outputs = FUNCTIONS[pair["outputs"]]
    options = {name: pair[name] for name in ("softcap", "logit_scale", "ignore_index")}
    options |= {"entropy": True} if pair["outputs"] == "entropy" else {}
    options |= {"top_k": 3, "rank": True} if pair["largest"] else {}
    given = {"bounds": logits_ranks.BOUNDS[pair["columns"]].get(n_ranks), "size": SIZES[pair["columns"]]}
    of_rows = {"dtype": pair["dtype"], "shards": n_ranks}
    used = pair["used"] if pair["used"] == "all" else min(pair["used"], n_outputs - 1)
    if not pair["head"]:
        values, labels = broad_rows(pair["kind"], 5, VOCAB, **of_rows)
        values[labels == IGNORE_INDEX] = NAN
        labels[labels == IGNORE_INDEX] = pair["ignore_index"]
        options |= {"gradient": pair["gradient"], "temperature": temperature_of(pair, labels)}
        grads = tuple(grads_of_every_output(len(labels), used)[:n_outputs])
        impl = "auto" if pair["dtype"] == torch.float64 else impl  # kernels have no fp64
        return logits_ranks.Case(values, labels, impl, options, **given, grad_outputs=grads, function=functions[0])
    inputs = linear.projection(pair["kind"], linear.WIDTH, VOCAB, bias=pair["bias"], **of_rows)
    ignored = inputs.labels == IGNORE_INDEX
    inputs.hidden[ignored] = NAN
    inputs.labels[ignored] = pair["ignore_index"]
    inputs = inputs.shaped(2, linear.WIDTH // 2) if pair["hidden"] == "parts of each" else inputs
    options["temperature"] = temperature_of(pair, inputs.labels)
    options |= {name: pair[name] for name in ("chunk_tokens", "valid_tokens", "logits_dtype")}
    options |= HIDDEN[pair["hidden"]] if n_ranks > 1 else {}
    if pair["valid_tokens"] is not None:
        options["valid_tokens"] += int((inputs.labels != pair["ignore_index"]).sum())
    shape, grads = inputs.labels.shape, grads_of_every_output(linear.WIDTH, used)[:n_outputs]
    given["grad_outputs"] = tuple(None if grad is None else grad.view(*shape, *grad.shape[1:]) for grad in grads)
    return linear_ranks.Case(inputs, impl, options, **given, function=functions[1], main_grad=pair["main_grad"])


def check_largest(found, labels, options, exact, rounded):
    """Ids have the values of the largest, in whatever order equals come; and the rank, if it is there.

    Args:
        exact, rounded: logits in fp64, and as the call has them.
    """
    kept = (labels != options["ignore_index"]).unsqueeze(-1)
    given = {name: value for name, value in of_oracle(options).items() if name != "ignore_index"}
    truth, peer = (
        torch.stack([oracle.values(z, torch.full_like(labels, i), **given).log_probs for i in range(VOCAB)], dim=-1)
        for z in (exact, rounded.to(found[-1].dtype))
    )
    truth, peer = truth.masked_fill(~kept, 0.0), peer.masked_fill(~kept, 0.0)
    rank, ids, values = found
    largest = truth.topk(3, dim=-1).values, peer.topk(3, dim=-1).values
    assert_within_budget(values, *largest)
    assert torch.equal(ids == -1, ~kept.expand_as(ids))
    assert_within_budget(truth.gather(-1, ids.clamp(min=0)).to(values.dtype), *largest)
    # A head's logits are rounded, and so is what is larger.
    of_label = truth.gather(-1, labels.clamp(min=0).unsqueeze(-1))
    rounding = 2 * (peer - truth).nan_to_num(0.0, 0.0, 0.0).abs().amax()  # -inf is of both
    most, least = ((truth > of_label + each).sum(-1).where(kept.squeeze(-1), -1) for each in (-rounding, rounding))
    assert ((rank >= least) & (rank <= most)).all()


def check(case, results, pair, leaves_out):
    if pair["head"]:
        linear_ranks.check(case, results)
        linear_ranks.check_sent(case, results, leaves_out)
        dtype, inputs = torch.promote_types(pair["logits_dtype"] or pair["dtype"], pair["dtype"]), case.inputs
        exact, rounded = (inputs.to(each).logits(pair["ignore_index"]) for each in (torch.float64, dtype))
        labels = inputs.labels
    else:
        logits_ranks.check(case, results)
        exact, rounded, labels = case.logits.double(), case.logits, case.labels
    if pair["largest"]:
        check_largest(results[0].outputs[6:], labels, case.options, exact, rounded)


@pytest.mark.quick(3)
@pytest.mark.interpreted(10)
@EACH
def test_on_one_rank(impl_device, pair):
    case = case_of(pair, 1, impl_device[0])
    support = linear_ranks if pair["head"] else logits_ranks
    check(case, support.run_alone((case.impl, impl_device[1]), case), pair, impl_device[1] == "cpu")


@pytest.mark.quick(3)
@pytest.mark.interpreted(5)
@EACH
@in_several_ranks
def test_on_ranks(rank_pool, impl, pair):
    case = case_of(pair, rank_pool.world_size, impl)
    support = linear_ranks if pair["head"] else logits_ranks
    check(case, rank_pool.run(support.run, case), pair, rank_pool.backend == "gloo")
