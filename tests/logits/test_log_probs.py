"""Log-probabilities of tokens and entropies of their distributions: values, gradients, edges."""

import math
from functools import partial

import pytest
import torch

from tests.support import logits as of_logits
from tests.support.budget import assert_within_budget
from tests.support.inputs import IGNORE_INDEX, batch, grad_output_layouts
from tests.support.logits import COLUMNS, ROWS, broad_rows, random_grad_output
from vocab_parallel_ce import token_log_probs, vocab_parallel_cross_entropy

GRADIENTS = ("in_backward", "out_of_place")
NAN, INF = float("nan"), float("inf")
TRANSFORMS = {
    "plain": {},
    "temperature": {"temperature": 3},
    "capped": {"softcap": 10.0, "temperature": 0.6},
    "scaled": {"logit_scale": 0.4, "temperature": 0.6},
    "both": {"softcap": 10, "logit_scale": 0.4, "temperature": 2},
}
check = partial(of_logits.check, function=token_log_probs, entropy=True)
run = partial(of_logits.run, function=token_log_probs, entropy=True)


def _grad_outputs(rows=ROWS, used="both"):
    first, second = random_grad_output(rows), random_grad_output(rows, seed=1)
    return {"both": (first, second), "log_probs": (first, None), "entropy": (None, second)}[used]


def test_grad_outputs_of_every_layout(impl_device):
    """Each output's has strides of its own: one value for all tokens, or a transposed view."""
    logits, labels = broad_rows("peaked", 4)
    logits, labels = logits.view(2, 2, COLUMNS), labels.view(2, 2)
    layouts = [grad_output for _, grad_output in grad_output_layouts((2, 2), impl_device[1])]
    for turn, grad_output in enumerate(layouts):
        before = grad_output.clone()
        options = {"gradient": GRADIENTS[turn % 2]}
        results = check(impl_device, logits, labels, grad_output, layouts[turn - 1], **options)
        assert results.outputs[0].shape == results.outputs[1].shape == (2, 2)
        assert torch.equal(grad_output, before)


@pytest.mark.parametrize("leading", [(2, 3), (4,), (2, 1, 2), (1, 1), (0, 3)])
def test_shapes_and_dtypes_and_the_value_of_the_loss(impl_device, leading):
    impl, device = impl_device
    logits = torch.randn(*leading, COLUMNS, device=device, dtype=torch.bfloat16)
    labels = torch.zeros(leading, dtype=torch.int32, device=device)
    options = {"softcap": 10.0, "logit_scale": 0.4, "impl": impl}
    log_probs = token_log_probs(logits, labels, **options)
    outputs = token_log_probs(logits, labels, entropy=True, **options)
    assert isinstance(log_probs, torch.Tensor) and len(outputs) == 2
    for output in (log_probs, *outputs):
        assert output.shape == leading and output.dtype == torch.float32
    loss = vocab_parallel_cross_entropy(logits, labels, reduction="none", **options)
    assert torch.equal(log_probs, -loss)


@pytest.mark.interpreted(2)
@pytest.mark.parametrize("used", ["both", "log_probs", "entropy"])
@pytest.mark.parametrize("gradient", GRADIENTS)
@pytest.mark.parametrize("bad", [NAN, INF])
def test_ignored_tokens_are_positive_zero_and_labels_outside_the_vocabulary_nan(impl_device, bad, gradient, used):
    """Whatever rows of prompts and padding hold, and whatever comes from grad_output for them."""
    logits, labels = broad_rows("peaked", 6)
    logits[0, 3], labels[0] = bad, IGNORE_INDEX
    logits[2], labels[2] = bad, IGNORE_INDEX
    labels[1], labels[3] = -1, COLUMNS
    grad_outputs = [None if grad is None else grad.clone() for grad in _grad_outputs(6, used)]
    for grad, row in zip(grad_outputs, (0, 2), strict=True):
        if grad is not None:
            grad[row] = bad
    for options in ({}, TRANSFORMS["both"]):
        outputs, grad = check(impl_device, logits, labels, *grad_outputs, gradient=gradient, **options)
        for result in (*outputs, grad):
            assert not result[[0, 2]].any() and not result[[0, 2]].signbit().any()
            is_nan = result.isnan().view(6, -1)
            assert is_nan.all(1).tolist() == is_nan.any(1).tolist() == [False, True, False, True, False, False]


def test_entropy_of_distributions_that_are_known(impl_device):
    """Uniform, one-hot, uniform over a few columns, and two columns of 3/4 and 1/4."""
    logits = torch.zeros(6, 64)
    logits[1] = -700.0
    logits[2, 5] = 1e4
    logits[3, 7:] = -INF
    logits[4] = -INF
    logits[4, 63] = -5.0
    logits[5], logits[5, 1], logits[5, 2] = -INF, math.log(3.0) - 9, -9.0
    labels = torch.tensor([0, 1, 5, 2, 63, 2])
    mixed = 0.75 * math.log(4 / 3) + 0.25 * math.log(4)
    known = torch.tensor([math.log(64), math.log(64), 0.0, math.log(7), 0.0, mixed]).double()
    (_, entropy), grad = check(impl_device, logits, labels, None, torch.ones(6))
    assert_within_budget(entropy, known, known.float())
    assert float(grad[5].abs().max()) > 0.1 and not grad[logits == -INF].any()


def test_entropy_of_rows_far_from_zero_keeps_its_digits(impl_device):
    """``lse - sum p x`` would subtract two numbers near 10000."""
    logits, labels = broad_rows("peaked", 4)
    steps = (logits * 64).round() / 64
    near = run(impl_device, steps, labels, *_grad_outputs())
    for shift in (-8192.0, 8192.0):
        far = check(impl_device, steps + shift, labels, *_grad_outputs())
        torch.testing.assert_close(far, near, rtol=0, atol=0)


@pytest.mark.parametrize("entropy", [False, True])
def test_where_the_gradient_is_written(impl_device, entropy):
    impl, device = impl_device
    values, labels = (x.to(device) for x in batch("peaked", rows=3, vocab_size=COLUMNS))
    for gradient in ("auto", *GRADIENTS):
        logits = values.clone().requires_grad_() * 1
        outputs = token_log_probs(logits, labels, entropy=entropy, impl=impl, gradient=gradient)
        log_probs = outputs[0] if entropy else outputs
        assert torch.equal(logits, values) and logits._version == 0
        (grad,) = torch.autograd.grad(log_probs.sum(), logits)
        is_seen = gradient in ("auto", "out_of_place")  # the test holds the logits
        assert (grad.data_ptr() == logits.data_ptr()) != is_seen
        assert torch.equal(logits, values) == is_seen


def test_second_and_double_backward(impl_device):
    """In place a second one raises with the remedy, also if each backward is through one of the outputs."""
    impl, device = impl_device
    made = broad_rows("peaked", 3)
    values, labels = (x.to(device) for x in made)

    def outputs_of(gradient):
        logits = values.clone().requires_grad_() * 1
        return logits, token_log_probs(logits, labels, entropy=True, impl=impl, gradient=gradient)

    for first, second in ((0, 0), (0, 1), (1, 0)):
        logits, outputs = outputs_of("in_backward")
        torch.autograd.grad(outputs[first].sum(), logits, retain_graph=True)
        after_first = logits.detach().clone()
        with pytest.raises(RuntimeError, match="out_of_place"):
            torch.autograd.grad(outputs[second].sum(), logits)
        assert torch.equal(logits, after_first)
    logits, outputs = outputs_of("out_of_place")
    ones, grads = torch.ones(3), []
    for used, grad_outputs in ((0, (ones, None)), (1, (None, ones)), (0, (ones, None))):
        (grad,) = torch.autograd.grad(outputs[used].sum(), logits, retain_graph=True)
        grads.append(grad)
        results = of_logits.Results(outputs, grad)
        of_logits.assert_right(results, *made, *grad_outputs, function=token_log_probs, entropy=True)
    assert torch.equal(logits, values) and torch.equal(grads[0], grads[2])
    for gradient in GRADIENTS:
        for used in (0, 1):
            logits, outputs = outputs_of(gradient)
            with pytest.raises(RuntimeError, match="cannot be differentiated again"):
                torch.autograd.grad(outputs[used].sum(), logits, create_graph=True)
