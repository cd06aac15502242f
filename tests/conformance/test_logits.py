"""The loss over logits and log-probabilities: every option, in rows of every kind."""

import pytest
import torch

from tests.conformance.widths import HARD, PLACE, WEIGHTING, class_weight, columns_of, each, made_of, placed, rows_of
from tests.support import oracle
from tests.support.budget import assert_within_budget
from tests.support.inputs import IGNORE_INDEX
from tests.support.logits import (
    DIVISORS,
    GRADIENTS,
    OUTPUTS,
    SMOOTHING,
    Results,
    assert_right,
    flat_outputs,
    random_grad_output,
)
from tests.support.pairs import covering
from vocab_parallel_ce import Outputs, token_log_probs, vocab_parallel_cross_entropy

LOSS = covering(
    lambda case: not (case.get("z_loss") and case.get("return_metrics") and case.get("weighting", "  ")[1]),
    **PLACE,
    weighting=WEIGHTING,
    z_loss=(0.0, 0.02),
    softcap=(None, 10.0),
    logit_scale=(1.0, 0.4),
    kind=(*HARD, "times_1000"),
    ignore_index=(IGNORE_INDEX, 2),
    divisor=tuple(DIVISORS),
    return_metrics=(False, True),
    gradient=GRADIENTS,
)


@pytest.mark.quick(6)
@each(LOSS)
def test_the_loss(impl_device, case):
    (impl, device), (logits, labels), shape = impl_device, made_of(case), rows_of(case)
    names = ("z_loss", "softcap", "logit_scale", "ignore_index", "return_metrics", "gradient")
    options = {name: case[name] for name in names} | SMOOTHING[case["weighting"][0]] | DIVISORS[case["divisor"]]
    known, given = class_weight(case, device)
    grad_output = random_grad_output(len(labels)) if case["divisor"] == "none" else torch.tensor(0.75)
    leaf, x = placed(logits, case, device)
    ways = {"impl": impl, "vocab_size": columns_of(case)[0]}
    outputs = flat_outputs(vocab_parallel_cross_entropy(x, labels.view(shape).to(device), **options, **given, **ways))
    outputs[0].backward(grad_output.view_as(outputs[0]).to(device))
    outputs = tuple(each.view(-1) if each.shape == shape else each for each in outputs)
    assert_right(Results(outputs, leaf.grad), logits, labels, grad_output, **options, **known)


LOG_PROBS = covering(
    **PLACE,
    kind=HARD[:2],
    temperature=(1.0, 0.7, "tokens"),
    softcap=(None, 10.0),
    logit_scale=(1.0, 0.4),
    outputs=((), ("entropy",), OUTPUTS, ("lse", "mean_logit", "rank")),
    top_k=(None, 3),
    gradient=("in_backward", "out_of_place"),
)


@pytest.mark.quick(6)
@each(LOG_PROBS)
def test_log_probs(impl_device, case):
    (impl, device), (logits, labels), shape = impl_device, made_of(case), rows_of(case)
    temperature = torch.rand(len(labels)) + 0.5 if case["temperature"] == "tokens" else case["temperature"]
    options = {"softcap": case["softcap"], "logit_scale": case["logit_scale"]}
    there = temperature.view(shape).to(device) if torch.is_tensor(temperature) else temperature
    ways = {name: case[name] for name in ("gradient", "outputs", "top_k")} | {"vocab_size": columns_of(case)[0]}
    leaf, x = placed(logits, case, device)
    there = {"temperature": there, "impl": impl, **options, **ways}
    found = token_log_probs(x, labels.view(shape).to(device), **there)
    found = found if isinstance(found, Outputs) else Outputs(found, *[None] * 8)
    names = [n for n in ("log_probs", "entropy", "lse", "sum_sq_probs", "mean_logit") if getattr(found, n) is not None]
    grads = [random_grad_output(len(labels), seed=i) for i in range(len(names))]
    outputs = [getattr(found, name).view(-1) for name in names]
    torch.autograd.backward(outputs, [grad.to(device) for grad in grads])

    def asked(made):
        return tuple(made.lse_of_p if name == "lse" else getattr(made, name) for name in names)

    options["temperature"] = temperature
    *truth, grad = oracle.with_gradient(asked, logits.double(), labels, *grads, **options)
    *peer, peer_grad = oracle.with_gradient(asked, logits.float(), labels, *grads, **options)
    largest = float(logits.detach().double().abs().max()) / (temperature if isinstance(temperature, float) else 0.5)
    for name, *triple in zip(names, outputs, truth, peer, strict=True):
        # Terms of the former are rounded next to 1, those of the others next to a logit.
        assert_within_budget(*triple, 1.0 if name in ("sum_sq_probs", "entropy") else largest)
    magnitude = 8.0 if "sum_sq_probs" in names else 0.0
    assert_within_budget(leaf.grad, grad, peer_grad, magnitude)
    check_largest(found, logits.double(), labels)


def check_largest(found, x, labels):
    """The rank, the largest, and whether the label is."""
    live, own = labels != IGNORE_INDEX, x.gather(1, labels.clamp(min=0).unsqueeze(1))
    if found.rank is not None:
        assert torch.equal(found.rank.cpu().view(-1), (x > own).sum(1).where(live, -1))
    if found.top_ids is not None:
        ids = found.top_ids.cpu().view(len(x), -1)
        assert torch.equal(x.gather(1, ids.clamp(min=0))[live], x.topk(3).values[live])
    if found.is_top1 is not None:
        assert torch.equal(found.is_top1.cpu().view(-1), (x.argmax(1) == labels) & live)
