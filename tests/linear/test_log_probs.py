"""Log-probabilities and entropies of tokens from hidden states: products, and each output by itself."""

from functools import partial

import pytest
import torch

from tests.support.cases import linear
from tests.support.cases.flat import linear_cross_entropy, linear_token_log_probs
from tests.support.cases.inputs import IGNORE_INDEX
from tests.support.cases.linear import ROWS, Results, assert_right, projection, record_matmuls
from tests.support.cases.logits import flat_outputs, grads_of_every_output

run = partial(linear.run, function=linear_token_log_probs)


def test_log_probs_are_those_of_the_loss(impl_device):
    inputs = projection("peaked", dtype=torch.bfloat16, bias=True)
    options = {"softcap": 10.0, "logit_scale": 0.4, "chunk_size": 2}
    log_probs = run(impl_device, inputs, torch.tensor(-1.0), **options)
    loss = linear.run(impl_device, inputs, reduction="none", function=linear_cross_entropy, **options)
    assert torch.equal(log_probs.outputs[0], -loss.outputs[0])
    assert torch.equal(log_probs.hidden, loss.hidden) and torch.equal(log_probs.weight, loss.weight)


def _leaves(impl_device, inputs):
    device = impl_device[1]
    leaves = [tensor.clone().to(device).requires_grad_() for tensor in (inputs.hidden, inputs.weight)]
    return *leaves, inputs.labels.to(device)


def test_four_matmuls_a_chunk_and_one_without_gradients(impl_device):
    hidden, weight, labels = _leaves(impl_device, projection("peaked"))
    options = {"outputs": ("entropy",), "impl": impl_device[0], "chunk_size": 3}
    with record_matmuls() as matmuls:
        found = linear_token_log_probs(hidden, weight, labels, **options)
        assert len(matmuls) == 2
        (found.log_probs + found.entropy).sum().backward()
    assert len(matmuls) == 4 * 2
    for context in (torch.no_grad, torch.inference_mode):
        with context(), record_matmuls() as matmuls:
            outputs = linear_token_log_probs(hidden, weight, labels, **options)
        assert len(matmuls) == 2 and not outputs.log_probs.requires_grad and not outputs.entropy.requires_grad
        assert torch.equal(outputs.log_probs, found.log_probs) and torch.equal(outputs.entropy, found.entropy)


def test_each_output_may_be_differentiated_by_itself_and_again(impl_device):
    """The logits are computed anew each time, so that nothing is consumed by a backward."""
    inputs = projection()
    hidden, weight, labels = _leaves(impl_device, inputs)
    outputs = flat_outputs(linear_token_log_probs(hidden, weight, labels, outputs=("entropy",), impl=impl_device[0]))
    for used in (0, 1, 0):
        output, grad_outputs = outputs[used], [None, None]
        grad_outputs[used] = linear.zero_first_grad_output(ROWS, seed=used)
        grad_output = grad_outputs[used].to(hidden.device)
        gradients = torch.autograd.grad(output, (hidden, weight), grad_output, retain_graph=True)
        assert_right(Results(outputs, *gradients, None), inputs, *grad_outputs, function=linear_token_log_probs)
        with pytest.raises(RuntimeError, match="cannot be differentiated again"):
            torch.autograd.grad(output.sum(), hidden, create_graph=True)


def test_few_valid_tokens_have_their_own_temperatures(impl_device):
    """Ignored tokens, which are left out, come first."""
    inputs, t = projection("peaked"), torch.linspace(0.4, 1.9, ROWS)
    inputs.labels[[0, 2]] = IGNORE_INDEX
    grads = grads_of_every_output(ROWS)
    options = {"function": linear.linear_every_output, "valid_tokens": 3, "chunk_size": 2}
    results = linear.run(impl_device, inputs, *grads, temperature=t.to(impl_device[1]), **options)
    assert_right(results, inputs, *grads, temperature=t, **options)
