"""Whoever reads the logits of an installed model, and however, gets the gradients of the model without install()."""

import functools
from unittest.mock import patch

import pytest
import torch
from transformers import LlamaForCausalLM, MixtralForCausalLM

from tests.support.frameworks import logits_readers as readers
from vocab_parallel_ce.integrations.transformers import install
from vocab_parallel_ce.integrations.transformers.tiny import tiny_inputs, tiny_model

pytestmark = pytest.mark.reference
CELLS = [(reader, way) for reader in readers.READERS for way in readers.ways_of(reader)]
BOTH = ("lazy", "rewrite")
# Of each reader and each way in two places, the two mechanisms take turns.
CASES = [
    (reader, way, place, BOTH[(number + other) % 2])
    for number, (reader, way) in enumerate(CELLS)
    for other, place in enumerate(readers.PLACES)
]


@functools.cache
def model_of(cls):
    return tiny_model(cls)


def loss_of(model, reader=None, place="beside"):
    """The loss of a call with labels that a reader's is added to, or that it takes the place of."""
    inputs = tiny_inputs(model)

    def read(logits, labels, *_, **__):
        return readers.READERS[reader](logits, labels, None)

    if reader is None:
        return model(**inputs).loss
    if place == "inside":
        with patch.object(model, "_loss_function", read, create=True):
            return model(**inputs).loss
    outputs = model(**inputs)
    return read(outputs.logits, inputs["labels"]) + (outputs.loss if place == "beside" else 0.0)


@functools.cache
def expected(cls, reader=None, place="beside"):
    model = model_of(cls)
    return readers.differentiated(model, loss_of(model, reader, place))


def installed_for(model, mechanism, way):
    """A second backward needs gradients that are not computed in forward."""
    install(model, mechanism=mechanism, gradient="in_backward" if way == readers.RETAINED else "auto")


@pytest.mark.parametrize("reader,way,place,mechanism", CASES)
def test_a_reader_gets_the_gradients_of_the_model(reader, way, place, mechanism):
    model, truth = model_of(LlamaForCausalLM), expected(LlamaForCausalLM, readers.true_reader(reader, place), place)
    assert readers.matters(truth, expected(LlamaForCausalLM), "lm_head.weight")
    installed_for(model, mechanism, way)
    assert readers.differs(readers.differentiated(model, loss_of(model, reader, place), way), truth) is None


@pytest.mark.parametrize("mechanism", BOTH)
@pytest.mark.parametrize("way", readers.WAYS)
def test_a_routers_loss_beside_a_loss_function_of_this_package(way, mechanism, monkeypatch):
    model, step = model_of(MixtralForCausalLM), ("vocab_parallel_cross_entropy", "inside")
    router, truths = "model.layers.0.mlp.gate.weight", []
    for coefficient in (0.0, 10.0):
        monkeypatch.setattr(model, "router_aux_loss_coef", coefficient)
        truths.append(readers.differentiated(model, loss_of(model, *step)))
    assert readers.matters(truths[1], truths[0], router)
    installed_for(model, mechanism, way)
    assert readers.differs(readers.differentiated(model, loss_of(model, *step), way), truths[1]) is None


OF_LOGITS = {
    "grad": torch.autograd.grad,
    "unused": functools.partial(torch.autograd.grad, allow_unused=True),
    "inputs": lambda loss, logits: loss.backward(inputs=[logits]),
}


@pytest.mark.parametrize("mechanism", BOTH)
@pytest.mark.parametrize("way", OF_LOGITS)
def test_the_gradient_of_the_logits_beside_a_fused_loss_is_refused(way, mechanism):
    """The fused loss does not depend on the logits: their gradient would lack its part."""
    model = model_of(LlamaForCausalLM)
    install(model, mechanism=mechanism)
    outputs = model(**tiny_inputs(model))
    loss = outputs.loss + (0 if way == "unused" else outputs.logits.square().sum())
    with pytest.raises(RuntimeError, match="^logits: their gradient would lack the loss's part"):
        OF_LOGITS[way](loss, outputs.logits)


@pytest.mark.parametrize("mechanism", BOTH)
def test_the_gradient_of_what_the_fused_loss_does_not_use(mechanism):
    """A tensor made of the logits beside the loss is no input of the loss in the model either."""

    def gradient():
        outputs = model(**tiny_inputs(model))
        doubled = outputs.logits.float() * 2
        return torch.autograd.grad(outputs.loss + doubled.square().sum(), doubled)[0]

    model = model_of(LlamaForCausalLM)
    truth = gradient()
    install(model, mechanism=mechanism)
    torch.testing.assert_close(gradient(), truth, rtol=1e-5, atol=1e-5)
