"""The losses of a head, in several chunks: every option, in rows of every kind of the logits that it makes."""

import pytest
import torch

from tests.conformance.widths import PLACE, WEIGHTING, class_weight, columns_of, each
from tests.soft import test_linear_distillation as of_teacher
from tests.support.cases import linear
from tests.support.cases.flat import linear_cross_entropy, linear_distillation_loss
from tests.support.cases.inputs import IGNORE_INDEX, padded_shard
from tests.support.cases.logits import METRICS, OUTPUTS, SMOOTHING, grads_of_every_output
from tests.support.cases.pairs import covering
from vocab_parallel_ce.losses.divergences import DIVERGENCES
from vocab_parallel_ce.options import DIFFERENTIABLE

OF_HEAD = {
    "width": PLACE["width"],
    "dtype": PLACE["dtype"],
    "padding": PLACE["padding"],
    "chunk_size": (2, "auto"),
    "bias": (False, True),
    "logits_dtype": (None, torch.float32),
}


def made_of(case):
    """Hidden states, a weight and labels: at both ends, ignored, of a negative weight, and random."""
    vocab_size = columns_of(case)[0]
    inputs = linear.projection("peaked", linear.ROWS, vocab_size, dtype=case["dtype"], bias=case["bias"], exact=True)
    inputs.labels[:4] = torch.tensor([vocab_size - 1, 0, IGNORE_INDEX, vocab_size // 4])
    return inputs


def is_narrow(parameters):
    """A program scales a row of the head's gradient, which is a column of the logits: many take minutes."""
    return parameters["case"]["width"] in ("no vector", "a tile", "two tiles of 32 and a tail", "three tiles of 32")


def ways_of(case, *names):
    n = columns_of(case)
    return {name: case[name] for name in ("chunk_size", "logits_dtype", *names)} | {"padding": n[1] - n[0]}


BESIDE_THE_LOSS = ((), METRICS, ("entropy", "lse"), OUTPUTS)


def allowed(case):
    """What forward computes of a mean over so many columns is too small for fp16, which needs a loss scale.

    It differentiates no outputs, as is done here; the parts of a sum that has class weights are not returned.
    """
    outputs, has_weights = case.get("outputs", ()), case.get("weighting", (None, None))[1]
    is_small = case.get("dtype") == torch.float16 and case.get("width") == "two tiles of 2048"
    is_in_forward = linear.WAYS[case.get("way", "none")].get("gradient") == "in_forward"
    if is_in_forward and (is_small or not set(DIFFERENTIABLE).isdisjoint(outputs)):
        return False
    return not has_weights or "mean_logit" not in outputs


LOSS = covering(
    allowed,
    **OF_HEAD,
    weighting=WEIGHTING,
    z_loss=(0.0, 0.02),
    softcap=(None, 10.0),
    logit_scale=(1.0, 0.4),
    outputs=BESIDE_THE_LOSS,
    way=tuple(linear.WAYS),
)


@pytest.mark.quick(6)
@each(LOSS, interpreted=16, among=is_narrow)
def test_the_loss(impl_device, case):
    way = linear.WAYS[case["way"]]
    options = ways_of(case, "z_loss", "softcap", "logit_scale", "outputs") | SMOOTHING[case["weighting"][0]] | way
    known, given = class_weight(case, impl_device[1])
    inputs, grads = made_of(case), [linear.grad_output_of(way)]
    function = linear_cross_entropy
    if not set(DIFFERENTIABLE).isdisjoint(case["outputs"]):
        function = linear.linear_loss_and_outputs
        grads += grads_of_every_output(linear.ROWS)[1 : 5 if case["outputs"] == OUTPUTS else 3]
    found = linear.run(impl_device, inputs, *grads, function=function, **options, **given)
    options.pop("padding")
    linear.assert_right(found, inputs, *grads, function=function, **options, **known)


LOG_PROBS = covering(
    **OF_HEAD, used=(0, 1, 2, 3, 4, "all"), softcap=(None, 10.0), logit_scale=(1.0, 0.4), temperature=(1.0, 0.7)
)


@pytest.mark.quick(6)
@each(LOG_PROBS, interpreted=6, among=is_narrow)
def test_log_probs(impl_device, case):
    options = ways_of(case, "softcap", "logit_scale", "temperature")
    grads = grads_of_every_output(linear.ROWS, case["used"])
    linear.check(impl_device, made_of(case), *grads, function=linear.linear_every_output, **options)


DISTILLATION = covering(
    **{name: values for name, values in OF_HEAD.items() if name != "logits_dtype"},
    kind=tuple((divergence, hard) for divergence in DIVERGENCES for hard in (None, 0.0, 0.3)),
    temperature=(1.0, 2.5),
    reduction=("mean", "none"),
    of_teacher=(torch.float32, torch.bfloat16),
)


@pytest.mark.quick(6)
@each(DISTILLATION, interpreted=8, among=is_narrow)
def test_distillation(impl_device, case):
    """The padding of both heads is large."""
    (impl, device), (vocab_size, n_columns), (divergence, hard) = impl_device, columns_of(case), case["kind"]
    made, labels = of_teacher.inputs(vocab_size)
    labels[[0, 1, 3, 5, 8]] = torch.tensor([vocab_size - 1, 0, 1, 2, IGNORE_INDEX])
    made = {n: t.to(case["of_teacher" if n.startswith("teacher") else "dtype"]) for n, t in made.items()}
    made = {n: t for n, t in made.items() if case["bias"] or "bias" not in n}
    own = {
        n: t if "hidden" in n else padded_shard(t.t(), 0, n_columns, 300.0).t().contiguous() for n, t in made.items()
    }
    own = {n: t.clone().to(device).requires_grad_(n.startswith("student")) for n, t in own.items()}
    options = {"divergence": divergence, "reduction": case["reduction"], "temperature": case["temperature"]}
    options |= {"hard_weight": hard} if hard else {}
    given = {"labels": None if hard is None else labels.to(device), "vocab_size": vocab_size, "impl": impl}
    chunk = 4 if case["chunk_size"] == 2 else of_teacher.TOKENS
    loss = linear_distillation_loss(*of_teacher.heads_of(own), **options, **given, chunk_size=chunk)
    loss.backward(of_teacher.factor_of(case["reduction"]).to(device))
    grads = [t.grad for n, t in own.items() if n.startswith("student")]
    assert not any(grad[vocab_size:].any() for grad in grads[1:]), "gradient of padded rows"
    grads[1:] = [grad[:vocab_size] for grad in grads[1:]]
    is_deferred = case["reduction"] == "none" or case["dtype"] == torch.float16
    of_teacher.check(loss, grads, made, labels, 2 - is_deferred, masked=hard is not None, chunk=chunk, **options)
