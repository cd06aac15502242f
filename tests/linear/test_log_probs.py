"""Log-probabilities and entropies of tokens from hidden states: chunks, ignored tokens, each output by itself."""

from functools import partial

import pytest
import torch

from tests.support.cases import linear
from tests.support.cases.flat import linear_cross_entropy, linear_token_log_probs
from tests.support.cases.inputs import IGNORE_INDEX
from tests.support.cases.linear import ROWS, Results, assert_right, projection, record_matmuls
from tests.support.cases.logits import flat_outputs

NAN, INF = float("nan"), float("inf")
check = partial(linear.check, function=linear_token_log_probs)
run = partial(linear.run, function=linear_token_log_probs)


def _grad_outputs(rows=ROWS, used="both"):
    first, second = linear.zero_first_grad_output(rows), linear.zero_first_grad_output(rows, seed=1)
    return {"both": (first, second), "log_probs": (first, None), "entropy": (None, second)}[used]


def test_log_probs_are_those_of_the_loss(impl_device):
    inputs = projection("peaked", dtype=torch.bfloat16, bias=True)
    options = {"softcap": 10.0, "logit_scale": 0.4, "chunk_size": 2}
    log_probs = run(impl_device, inputs, torch.tensor(-1.0), **options)
    loss = linear.run(impl_device, inputs, reduction="none", function=linear_cross_entropy, **options)
    assert torch.equal(log_probs.outputs[0], -loss.outputs[0])
    assert torch.equal(log_probs.hidden, loss.hidden) and torch.equal(log_probs.weight, loss.weight)


@pytest.mark.parametrize("used", ["both", "log_probs", "entropy"])
def test_ignored_tokens_are_positive_zero_and_may_hold_anything(impl_device, used):
    for bad, valid_tokens, chunk in ((NAN, None, "auto"), (INF, None, 2), (NAN, 3, 2), (INF, 100, "auto")):
        inputs = projection("peaked", bias=True)
        inputs.hidden[0, 3], inputs.hidden[2] = bad, bad
        inputs.labels[[0, 2]] = IGNORE_INDEX
        grad_outputs = _grad_outputs(used=used)
        for grad_output, row in zip(grad_outputs, (0, 2), strict=True):
            if grad_output is not None:
                grad_output[row] = bad
        options = {"outputs": ("entropy",), "chunk_size": chunk, "valid_tokens": valid_tokens}
        outputs, hidden, weight, _ = check(impl_device, inputs, *grad_outputs, **options)
        for values in (*outputs, hidden):
            assert not values[[0, 2]].any() and not values[[0, 2]].signbit().any()
        assert weight.isfinite().all()


@pytest.mark.parametrize("used", ["both", "log_probs", "entropy"])
@pytest.mark.usefixtures("unread_labels")
def test_more_labels_than_were_promised_make_everything_nan(impl_device, used):
    inputs = projection("peaked", bias=True)
    results = run(impl_device, inputs, *_grad_outputs(used=used), outputs=("entropy",), valid_tokens=ROWS - 1)
    for tensor in (*results.outputs, results.weight, results.bias):
        assert tensor.isnan().all()


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
    for used, output in zip(("log_probs", "entropy", "log_probs"), (*outputs, outputs[0]), strict=True):
        grad_outputs = _grad_outputs(used=used)
        (grad_output,) = (given for given in grad_outputs if given is not None)
        gradients = torch.autograd.grad(output, (hidden, weight), grad_output.to(hidden.device), retain_graph=True)
        assert_right(Results(outputs, *gradients, None), inputs, *grad_outputs, function=linear_token_log_probs)
        with pytest.raises(RuntimeError, match="cannot be differentiated again"):
            torch.autograd.grad(output.sum(), hidden, create_graph=True)
