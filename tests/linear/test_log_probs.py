"""Log-probabilities and entropies of tokens from hidden states: values, gradients, edges."""

from functools import partial

import pytest
import torch

from tests.support import linear
from tests.support.inputs import IGNORE_INDEX
from tests.support.linear import COLUMNS, ROWS, WIDTH, Results, assert_right, projection, record_matmuls
from vocab_parallel_ce import linear_cross_entropy, linear_token_log_probs, token_log_probs

NAN, INF = float("nan"), float("inf")
check = partial(linear.check, function=linear_token_log_probs)
run = partial(linear.run, function=linear_token_log_probs)


def _grad_outputs(rows=ROWS, used="both"):
    first, second = linear.zero_first_grad_output(rows), linear.zero_first_grad_output(rows, seed=1)
    return {"both": (first, second), "log_probs": (first, None), "entropy": (None, second)}[used]


def test_log_probs_are_those_of_the_loss(impl_device):
    inputs = projection("peaked", dtype=torch.bfloat16, bias=True)
    options = {"softcap": 10.0, "logit_scale": 0.4, "chunk_tokens": 2}
    log_probs = run(impl_device, inputs, torch.tensor(-1.0), **options)
    loss = linear.run(impl_device, inputs, reduction="none", function=linear_cross_entropy, **options)
    assert torch.equal(log_probs.outputs[0], -loss.outputs[0])
    assert torch.equal(log_probs.hidden, loss.hidden) and torch.equal(log_probs.weight, loss.weight)


@pytest.mark.parametrize("bad", [NAN, INF])
def test_ignored_tokens_are_positive_zero(impl_device, bad):
    inputs = projection("peaked")
    inputs.hidden[0, 3], inputs.hidden[2] = bad, bad
    inputs.labels[[0, 2]] = IGNORE_INDEX
    grad_outputs = _grad_outputs()
    grad_outputs[0][0] = grad_outputs[1][2] = bad
    for chunk in ("auto", 2):
        outputs, hidden, weight, _ = check(impl_device, inputs, *grad_outputs, entropy=True, chunk_tokens=chunk)
        for values in (*outputs, hidden):
            assert not values[[0, 2]].any() and not values[[0, 2]].signbit().any()
        assert weight.isfinite().all()


@pytest.mark.parametrize("more", [0, 1, 100])
@pytest.mark.parametrize("used", ["both", "log_probs", "entropy"])
def test_valid_tokens_drops_the_ignored_and_changes_nothing_else(impl_device, used, more):
    inputs = projection("some_ignored", dtype=torch.bfloat16, bias=True)
    ignored = inputs.labels == IGNORE_INDEX
    inputs.hidden[ignored] = NAN
    options = {"valid_tokens": int((~ignored).sum()) + more, "chunk_tokens": 2, "logits_dtype": torch.float32}
    (log_probs, entropy), hidden, _, _ = check(impl_device, inputs, *_grad_outputs(used=used), entropy=True, **options)
    for tensor in (log_probs, entropy, hidden):
        assert not tensor[ignored].any()


@pytest.mark.parametrize("used", ["both", "log_probs", "entropy"])
def test_more_labels_than_were_promised_make_everything_nan(impl_device, used):
    inputs = projection("peaked", bias=True)
    results = run(impl_device, inputs, *_grad_outputs(used=used), entropy=True, valid_tokens=ROWS - 1)
    for tensor in (*results.outputs, results.weight, results.bias):
        assert tensor.isnan().all()


def _leaves(impl_device, inputs):
    device = impl_device[1]
    leaves = [tensor.clone().to(device).requires_grad_() for tensor in (inputs.hidden, inputs.weight)]
    return *leaves, inputs.labels.to(device)


def test_main_grad_and_a_frozen_weight(impl_device):
    inputs = projection(dtype=torch.bfloat16)
    main_grad = torch.zeros(COLUMNS, WIDTH, device=impl_device[1])
    result = run(impl_device, inputs, *_grad_outputs(), entropy=True, main_grad=main_grad)
    assert result.weight is None
    given = {"function": linear_token_log_probs, "entropy": True}
    assert_right(result._replace(weight=main_grad.bfloat16()), inputs, *_grad_outputs(), **given)
    check(impl_device, inputs, *_grad_outputs(), entropy=True, frozen=("weight",))


@pytest.mark.parametrize("chunk", [ROWS, 3])
def test_four_matmuls_a_chunk_and_one_without_gradients(impl_device, chunk):
    hidden, weight, labels = _leaves(impl_device, projection("peaked"))
    options = {"entropy": True, "impl": impl_device[0], "chunk_tokens": chunk}
    chunks = -(-ROWS // chunk)
    with record_matmuls() as matmuls:
        log_probs, entropy = linear_token_log_probs(hidden, weight, labels, **options)
        assert len(matmuls) == chunks
        (log_probs + entropy).sum().backward()
    assert len(matmuls) == 4 * chunks
    for context in (torch.no_grad, torch.inference_mode):
        with context(), record_matmuls() as matmuls:
            outputs = linear_token_log_probs(hidden, weight, labels, **options)
        assert len(matmuls) == chunks and not any(out.requires_grad for out in outputs)
        assert torch.equal(outputs[0], log_probs) and torch.equal(outputs[1], entropy)


def test_each_output_may_be_differentiated_by_itself_and_again(impl_device):
    """The logits are computed anew each time, so that nothing is consumed by a backward."""
    inputs = projection()
    hidden, weight, labels = _leaves(impl_device, inputs)
    outputs = linear_token_log_probs(hidden, weight, labels, entropy=True, impl=impl_device[0])
    for used, output in zip(("log_probs", "entropy", "log_probs"), (*outputs, outputs[0]), strict=True):
        grad_outputs = _grad_outputs(used=used)
        (grad_output,) = (given for given in grad_outputs if given is not None)
        gradients = torch.autograd.grad(output, (hidden, weight), grad_output.to(hidden.device), retain_graph=True)
        assert_right(Results(outputs, *gradients, None), inputs, *grad_outputs, function=linear_token_log_probs)
        with pytest.raises(RuntimeError, match="cannot be differentiated again"):
            torch.autograd.grad(output.sum(), hidden, create_graph=True)


@pytest.mark.parametrize("chunk_tokens", ["auto", 2])
def test_the_largest(impl_device, chunk_tokens):
    """Those of the logits and the label's rank, in the order of the tokens, of which ignored ones are left out."""
    impl, device = impl_device
    inputs = projection("some_ignored", exact=True)
    given = [tensor.to(device) for tensor in inputs[:3]]
    found = linear_token_log_probs(*given, top_k=4, outputs=("rank",), impl=impl, chunk_tokens=chunk_tokens)
    want = token_log_probs(inputs.logits(), inputs.labels, top_k=4, outputs=("rank",))
    assert torch.equal(found.top_ids.cpu(), want.top_ids) and torch.equal(found.rank.cpu(), want.rank)
    torch.testing.assert_close(found.top_log_probs.cpu(), want.top_log_probs, rtol=1e-6, atol=1e-6)
