"""Log-probabilities and entropies of tokens from hidden states: values, gradients, edges."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from tests.support import linear
from tests.support.inputs import DTYPES, IGNORE_INDEX, upstream_gradients
from tests.support.linear import (
    Results,
    assert_results,
    cube,
    linear_fp64,
    linear_same_dtype,
    projection,
    random_upstream,
    record_matmuls,
)
from tests.logits.test_options import _covering
from vocab_parallel_ce import linear_cross_entropy, linear_token_log_probs

ROWS, COLUMNS, WIDTH = 5, 21, 8
NAN, INF = float("nan"), float("inf")
TRANSFORMS = {
    "plain": {},
    "temperature": {"temperature": 0.6},
    "capped": {"softcap": 10.0, "temperature": 2},
    "scaled": {"logit_scale": 0.4, "softcap": 10, "temperature": 0.6},
}
check = partial(linear.check, function=linear_token_log_probs)
run = partial(linear.run, function=linear_token_log_probs)


def _made(kind="some_ignored", rows=ROWS, **settings):
    return projection(kind, rows=rows, vocab_size=COLUMNS, width=WIDTH, **settings)


def _upstreams(rows=ROWS, used="both"):
    first, second = random_upstream(rows), random_upstream(rows, seed=1)
    return {"both": (first, second), "log_probs": (first, None), "entropy": (None, second)}[used]


CASES = _covering(
    kind=("peaked", "confident", "shard_edges", "some_ignored"),
    dtype=DTYPES,
    transform=tuple(TRANSFORMS),
    used=("both", "log_probs", "entropy"),
    chunk_tokens=("auto", 1, 3),
    bias=(False, True),
    padding=(0, 5),
)


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case['kind']}-{case['transform']}-{case['used']}")
def test_every_pair_of_what_a_call_can_be(impl_device, case):
    inputs = _made(case["kind"], dtype=case["dtype"], bias=case["bias"])
    options = {name: case[name] for name in ("chunk_tokens", "padding")} | TRANSFORMS[case["transform"]]
    check(impl_device, inputs, *_upstreams(used=case["used"]), entropy=True, **options)


@pytest.mark.parametrize("leading", [(4,), (2, 3), (2, 1, 2), (1, 1), (0, 3)])
def test_shapes_and_dtypes(impl_device, leading):
    rows = torch.Size(leading).numel()
    inputs = _made("peaked", rows or 1, dtype=torch.bfloat16)
    inputs = inputs._replace(hidden=inputs.hidden[:rows], labels=inputs.labels[:rows].int()).shaped(*leading)
    for entropy in (False, True):
        outputs, hidden, weight, _ = run(impl_device, inputs, entropy=entropy)
        assert len(outputs) == 1 + entropy
        assert all(out.shape == leading and out.dtype == torch.float32 for out in outputs)
        assert hidden.shape == inputs.hidden.shape and hidden.dtype == weight.dtype == torch.bfloat16


def test_log_probs_are_those_of_the_loss(impl_device):
    inputs = _made("peaked", dtype=torch.bfloat16, bias=True)
    options = {"softcap": 10.0, "logit_scale": 0.4, "chunk_tokens": 2}
    log_probs = run(impl_device, inputs, torch.tensor(-1.0), **options)
    loss = linear.run(impl_device, inputs, reduction="none", function=linear_cross_entropy, **options)
    assert torch.equal(log_probs.outputs[0], -loss.outputs[0])
    assert torch.equal(log_probs.hidden, loss.hidden) and torch.equal(log_probs.weight, loss.weight)


def test_upstream_gradients_of_every_layout(impl_device):
    """Each output's has strides of its own: one value for all tokens, or a transposed view."""
    inputs = _made("peaked", 4).shaped(2, 2)
    layouts = [grad_output for _, grad_output in upstream_gradients((2, 2))]
    for turn, grad_output in enumerate(layouts):
        check(impl_device, inputs, grad_output, layouts[turn - 1], entropy=True, chunk_tokens=3)


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_every_dtype_can_hold_is_computed_without_any_error(impl_device, dtype):
    """An entropy of log 1, 2 or 4 has no gradient where all columns that count are equal."""
    inputs = cube(dtype, (5, 4, 3))
    upstreams = torch.tensor([0.0, 1.0, 2.0, -1.0]).repeat(4), None
    result = check(impl_device, inputs, *upstreams, entropy=True, chunk_tokens=7)
    truth = linear_fp64(inputs, *upstreams, function=linear_token_log_probs)
    assert torch.equal(result.hidden, truth.hidden.to(dtype)) and torch.equal(
        result.weight, truth.weight.to(dtype)
    )
    single = torch.arange(len(inputs.labels)) % 3 == 0
    assert torch.equal(result.outputs[0][single], truth.outputs[0][single].float())
    assert not result.outputs[1][single].any()


@pytest.mark.parametrize("bad", [NAN, INF])
def test_ignored_tokens_are_positive_zero(impl_device, bad):
    """Prompts and padding: whatever their hidden states hold, and whatever their grad_output is."""
    inputs = _made("peaked")
    inputs.hidden[0, 3], inputs.hidden[2] = bad, bad
    inputs.labels[[0, 2]] = IGNORE_INDEX
    upstreams = _upstreams()
    upstreams[0][0] = upstreams[1][2] = bad
    for chunk in ("auto", 2):
        outputs, hidden, weight, _ = check(impl_device, inputs, *upstreams, entropy=True, chunk_tokens=chunk)
        for values in (*outputs, hidden):
            assert not values[[0, 2]].any() and not values[[0, 2]].signbit().any()
        assert weight.isfinite().all()


def test_all_ignored_is_0_and_still_attached(impl_device):
    inputs = _made("all_ignored", broad=False)
    outputs, hidden, weight, _ = run(impl_device, inputs, *_upstreams(), entropy=True)
    for tensor in (*outputs, hidden, weight):
        assert torch.equal(tensor, torch.zeros_like(tensor))


def test_a_label_outside_the_vocabulary_is_nan(impl_device):
    inputs = _made("peaked")
    inputs.labels[1], inputs.labels[3] = -1, COLUMNS
    outputs, hidden, _, _ = check(impl_device, inputs, *_upstreams(), entropy=True)
    for values in (*outputs, hidden.sum(dim=1)):
        assert values.isnan().tolist() == [False, True, False, True, False]
    with pytest.raises(ValueError, match=r"^labels: .* 2 outside.*\(1,\): -1$"):
        run(impl_device, inputs, check_labels=True)


def _leaves(impl_device, inputs):
    device = impl_device[1]
    leaves = [tensor.clone().to(device).requires_grad_() for tensor in (inputs.hidden, inputs.weight)]
    return *leaves, inputs.labels.to(device)


def test_main_grad_and_a_frozen_weight(impl_device):
    inputs = _made(dtype=torch.bfloat16)
    options = {"function": linear_token_log_probs, "entropy": True}
    truth = linear_fp64(inputs, *_upstreams(), **options)
    peer = linear_same_dtype(inputs, *_upstreams(), **options)
    main_grad = torch.zeros(COLUMNS, WIDTH, device=impl_device[1])
    result = run(impl_device, inputs, *_upstreams(), entropy=True, main_grad=main_grad)
    assert result.weight is None
    assert_results(result._replace(weight=main_grad.bfloat16()), truth, peer)
    check(impl_device, inputs, *_upstreams(), entropy=True, frozen=("weight",))


@pytest.mark.parametrize("chunk", [ROWS, 3])
def test_four_matmuls_a_chunk_and_one_without_gradients(impl_device, chunk):
    hidden, weight, labels = _leaves(impl_device, _made("peaked"))
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
    inputs = _made()
    hidden, weight, labels = _leaves(impl_device, inputs)
    outputs = linear_token_log_probs(hidden, weight, labels, entropy=True, impl=impl_device[0])
    for which in (0, 1, 0):
        upstreams = [None, None]
        upstreams[which] = random_upstream(ROWS, seed=which)
        gradients = torch.autograd.grad(
            outputs[which], (hidden, weight), upstreams[which].to(hidden.device), retain_graph=True
        )
        expected = (
            compute(inputs, *upstreams, function=linear_token_log_probs)
            for compute in (linear_fp64, linear_same_dtype)
        )
        assert_results(Results(outputs, *gradients, None), *expected)
        with pytest.raises(RuntimeError, match="cannot be differentiated again"):
            torch.autograd.grad(outputs[which].sum(), hidden, create_graph=True)


def test_outputs_weighted_and_added_in_place_by_the_caller(impl_device):
    """A policy gradient: advantages times log-probabilities, and a bonus on the mean entropy."""
    inputs = _made("some_ignored", 6)
    hidden, weight, labels = _leaves(impl_device, inputs)
    advantages = random_upstream(6).to(hidden.device)
    log_probs, entropy = linear_token_log_probs(hidden, weight, labels, entropy=True, impl=impl_device[0])
    entropy += 1.0
    (-(advantages * log_probs).mean() - 0.01 * entropy.mean()).backward()
    upstreams = -random_upstream(6) / 6, torch.full((6,), -0.01 / 6)
    expected = (
        compute(inputs, *upstreams, function=linear_token_log_probs)
        for compute in (linear_fp64, linear_same_dtype)
    )
    assert_results(Results((log_probs,), hidden.grad, weight.grad, None), *expected)
