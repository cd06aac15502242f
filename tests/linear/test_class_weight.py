"""Class weights in the loss of a head: the oracle's results in every way that gradients are computed."""

import pytest
import torch

from tests.support.linear import COLUMNS, ROWS, WIDTH, projection
from tests.support.weights import weights
from vocab_parallel_ce import LinearCrossEntropy, linear_cross_entropy


@pytest.mark.reference
def test_the_module_has_it_as_a_buffer():
    inputs = projection()
    head = torch.nn.Linear(WIDTH, COLUMNS, bias=False)
    module = LinearCrossEntropy(head, class_weight=weights(), label_smoothing=0.1)
    assert module.state_dict().keys() == {"class_weight"} and not list(module.parameters())
    given = {"class_weight": weights(), "label_smoothing": 0.1}
    expected = linear_cross_entropy(inputs.hidden, head.weight, inputs.labels, **given)
    assert torch.equal(module(inputs.hidden, inputs.labels), expected)


@pytest.mark.reference
def test_weights_written_before_backward_are_noticed():
    inputs, weight = projection(rows=ROWS), weights()
    loss = linear_cross_entropy(
        inputs.hidden.requires_grad_(),
        inputs.weight,
        inputs.labels,
        class_weight=weight,
        label_smoothing=0.1,
        gradient="in_backward",
    )
    weight += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
