"""The loss over logits and log-probabilities: every option, in rows of every kind."""

import pytest
import torch

from tests.conformance.widths import HARD, PLACE, WEIGHTING, class_weight, columns_of, each, made_of, placed, rows_of
from tests.support.cases.inputs import IGNORE_INDEX
from tests.support.cases.logits import (
    DIVISORS,
    GRADIENTS,
    METRICS,
    OUTPUTS,
    SMOOTHING,
    Results,
    assert_right,
    backward,
    flat_outputs,
    of_oracle,
    random_grad_output,
)
from tests.support.cases.pairs import covering
from tests.support.truth import oracle
from tests.support.truth.budget import assert_within_budget
from vocab_parallel_ce import Outputs, token_log_probs, vocab_parallel_cross_entropy
from vocab_parallel_ce.options import DIFFERENTIABLE

NUMBERS = ("entropy", "lse", "sum_sq_probs", "mean_logit")
BESIDE_THE_LOSS = ((), METRICS, ("entropy", "lse"), ("sum_sq_probs", "mean_logit", "predictions"))


def allowed(case):
    """In forward no outputs are differentiated, as they are here; a sum with class weights has no parts."""
    outputs, has_weights = case.get("outputs", ()), case.get("weighting", (None, None))[1]
    if case.get("gradient") == "in_forward" and not set(DIFFERENTIABLE).isdisjoint(outputs):
        return False
    return not has_weights or "mean_logit" not in outputs


LOSS = covering(
    allowed,
    **PLACE,
    weighting=WEIGHTING,
    z_loss=(0.0, 0.02),
    softcap=(None, 10.0),
    logit_scale=(1.0, 0.4),
    kind=(*HARD, "times_1000"),
    ignore_index=(IGNORE_INDEX, 2),
    divisor=tuple(DIVISORS),
    outputs=BESIDE_THE_LOSS,
    gradient=GRADIENTS,
)


@pytest.mark.quick(6)
@each(LOSS)
def test_the_loss(impl_device, case):
    (impl, device), (logits, labels), shape = impl_device, made_of(case), rows_of(case)
    names = ("z_loss", "softcap", "logit_scale", "ignore_index", "outputs", "gradient")
    options = {name: case[name] for name in names} | SMOOTHING[case["weighting"][0]] | DIVISORS[case["divisor"]]
    known, given = class_weight(case, device)
    grad_output = random_grad_output(len(labels)) if case["divisor"] == "none" else torch.tensor(0.75)
    leaf, x = placed(logits, case, device)
    ways = {**options, **given, "impl": impl, "vocab_size": columns_of(case)[0]}
    found = vocab_parallel_cross_entropy(x, labels.view(shape).to(device), **ways)
    found = found if isinstance(found, Outputs) else Outputs(loss=found)
    names = [name for name in NUMBERS if getattr(found, name) is not None]
    assert names == [name for name in NUMBERS if name in case["outputs"]]
    values = [value if value.dim() == 0 else value.view(-1) for value in (getattr(found, n) for n in ("loss", *names))]
    grads = [grad_output, *grads_of(names, len(labels), first=1)]
    backward(values, grads)
    if names:
        of_rows = ["loss", *names], values, leaf.grad, logits, labels, grads
        roundings = 1 + (case["gradient"] == "in_forward")  # backward multiplies what forward has written
        check_numbers(*of_rows, roundings=roundings, **of_oracle(options | known))
        if found.predictions is not None:
            truth = oracle.values(logits.double(), labels, **of_oracle(options | known)).predictions
            assert torch.equal(found.predictions.cpu().view(-1), truth)
        return
    outputs = tuple(each.view(-1) if each.shape == shape else each for each in flat_outputs(found))
    assert_right(Results(outputs, leaf.grad), logits, labels, grad_output, **options, **known)


LOG_PROBS = covering(
    **PLACE,
    kind=HARD[:2],
    temperature=(1.0, 0.7, "tokens"),
    softcap=(None, 10.0),
    logit_scale=(1.0, 0.4),
    outputs=((), ("entropy",), OUTPUTS, ("lse", "mean_logit")),
    gradient=("in_backward", "out_of_place"),
)


@pytest.mark.quick(6)
@each(LOG_PROBS)
def test_log_probs(impl_device, case):
    (impl, device), (logits, labels), shape = impl_device, made_of(case), rows_of(case)
    temperature = torch.rand(len(labels)) + 0.5 if case["temperature"] == "tokens" else case["temperature"]
    options = {"softcap": case["softcap"], "logit_scale": case["logit_scale"]}
    there = temperature.view(shape).to(device) if torch.is_tensor(temperature) else temperature
    ways = {name: case[name] for name in ("gradient", "outputs")} | {"vocab_size": columns_of(case)[0]}
    leaf, x = placed(logits, case, device)
    there = {"temperature": there, "impl": impl, **options, **ways}
    found = token_log_probs(x, labels.view(shape).to(device), **there)
    found = found if isinstance(found, Outputs) else Outputs(log_probs=found)
    names = [name for name in ("log_probs", *NUMBERS) if getattr(found, name) is not None]
    grads = grads_of(names, len(labels))
    outputs = [getattr(found, name).view(-1) for name in names]
    backward(outputs, grads)
    options["temperature"] = temperature
    check_numbers(names, outputs, leaf.grad, logits, labels, grads, **options)
    check_largest(found, logits.double(), labels)


def grads_of(names, n_rows, first=0):
    """A random gradient of each named output that has one."""
    is_constant = {"sum_sq_probs", "mean_logit"}
    seeds = enumerate(names, first)
    return [None if name in is_constant else random_grad_output(n_rows, seed=seed) for seed, name in seeds]


def check_numbers(names, outputs, gradient, logits, labels, grad_outputs, roundings=1, **options):
    """Outputs, which of them have a gradient, and that of the logits, are the oracle's."""
    assert [output.requires_grad for output in outputs] == [grad is not None for grad in grad_outputs]

    def asked(made):
        return tuple(getattr(made, name) for name in names)

    temperature = options.get("temperature", 1.0)
    *truth, grad = oracle.with_gradient(asked, logits.double(), labels, *grad_outputs, **options)
    *peer, peer_grad = oracle.with_gradient(asked, logits.float(), labels, *grad_outputs, **options)
    largest = float(logits.detach().double().abs().max()) / (temperature if isinstance(temperature, float) else 0.5)
    # Terms of these are rounded next to 1, those of the others next to a logit.
    magnitudes = {"sum_sq_probs": 1.0, "entropy": 1.0, "loss": 0.0}
    for name, *triple in zip(names, outputs, truth, peer, strict=True):
        assert_within_budget(*triple, magnitudes.get(name, largest))
    assert_within_budget(gradient, grad, peer_grad, roundings=roundings)


def check_largest(found, x, labels):
    """The prediction."""
    if found.predictions is not None:
        assert torch.equal(found.predictions.cpu().view(-1), x.argmax(1).where(labels != IGNORE_INDEX, -1))
