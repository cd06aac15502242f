"""Log-probabilities of tokens and entropies of their distributions: values, gradients, edges."""

from __future__ import annotations

import math

import pytest
import torch

from tests.support.budget import assert_within_budget
from tests.support.inputs import (
    DTYPES,
    IGNORE_INDEX,
    KINDS,
    batch,
    padded_shard,
    upstream_gradients,
    with_a_broad_row,
)
from tests.support.oracle import token_outputs_fp64, token_outputs_same_dtype
from vocab_parallel_ce import VocabShard, token_log_probs, vocab_parallel_cross_entropy

# Few rows: the interpreter takes tens of milliseconds for each.
COLUMNS, ROWS = 21, 4
GRADIENTS = ("in_backward", "out_of_place")
OPTIONS = ("temperature", "softcap", "logit_scale", "ignore_index")
NAN, INF = float("nan"), float("inf")


def _call(impl_device, logits, labels, grad_output=None, grad_entropy=None, **options):
    """``(log_probs, entropy, gradient)`` of a copy of ``logits``; an grad_output of None: not used."""
    impl, device = impl_device
    leaf = logits.clone().to(device).requires_grad_()
    outputs = token_log_probs(leaf, labels.to(device), entropy=True, impl=impl, **options)
    pairs = zip(outputs, (grad_output, grad_entropy), strict=True)
    used = [(output, weight.to(device)) for output, weight in pairs if weight is not None]
    torch.autograd.backward(*zip(*used, strict=True))
    return (*(out.detach().cpu() for out in outputs), leaf.grad.cpu())


def _check(impl_device, logits, labels, grad_output=None, grad_entropy=None, **options):
    results = _call(impl_device, logits, labels, grad_output, grad_entropy, **options)
    of_oracle = {name: value for name, value in options.items() if name in OPTIONS}
    upstreams = {"grad_output": grad_output, "grad_entropy": grad_entropy}
    oracle = token_outputs_fp64(logits, labels, **upstreams, **of_oracle)
    peer = token_outputs_same_dtype(logits, labels, **upstreams, **of_oracle)
    for result, expected, same_dtype in zip(results, oracle, peer, strict=True):
        assert_within_budget(result, expected, same_dtype)
    return results


def _rows(kind, rows=ROWS, dtype=torch.float32):
    return with_a_broad_row(batch(kind, rows=rows - 1, vocab_size=COLUMNS, dtype=dtype))


def _random(rows=ROWS, seed=0):
    grad_output = dict(upstream_gradients((rows,), seed=seed))["random"]
    grad_output[-1] = 1.5  # the broad row's is not near 0
    return grad_output


HARD = [(kind, dtype) for turn, kind in enumerate(KINDS) for dtype in (DTYPES[0], DTYPES[1 + turn % 2])]


@pytest.mark.parametrize(("kind", "dtype"), HARD)
def test_hard_rows(impl_device, kind, dtype):
    """Gaps above 100 between columns, excluded columns, ignored rows; both outputs used at once."""
    rows = 9 if kind == "mixture" else ROWS
    _check(impl_device, *_rows(kind, rows, dtype), _random(rows), _random(rows, seed=1))


TRANSFORMS = [
    {"temperature": 0.6},
    {"temperature": 3},
    {"softcap": 10.0, "temperature": 0.6},
    {"logit_scale": 0.4, "temperature": 0.6},
    {"softcap": 10.0},
    {"softcap": 10, "logit_scale": 0.4, "temperature": 2},
]


@pytest.mark.parametrize("options", TRANSFORMS, ids=lambda options: "-".join(options))
@pytest.mark.parametrize("gradient", GRADIENTS)
def test_temperature_softcap_and_scale(impl_device, options, gradient):
    """The cap comes before the temperature: the two do not commute."""
    for kind, dtype in (("peaked", torch.float32), ("some_ignored", torch.bfloat16)):
        upstreams = _random(), _random(seed=1)
        _check(impl_device, *_rows(kind, dtype=dtype), *upstreams, gradient=gradient, **options)


@pytest.mark.parametrize("gradient", GRADIENTS)
@pytest.mark.parametrize("used", ["log_probs", "entropy"])
def test_one_of_the_outputs_used(impl_device, used, gradient):
    made = _rows("some_ignored")
    upstreams = (_random(), None) if used == "log_probs" else (None, _random())
    _check(impl_device, *made, *upstreams, gradient=gradient)


def test_upstream_gradients_of_every_layout(impl_device):
    """Each output's has strides of its own: one value for all tokens, or a transposed view."""
    logits, labels = _rows("peaked", 4)
    logits, labels = logits.view(2, 2, COLUMNS), labels.view(2, 2)
    layouts = [grad_output for _, grad_output in upstream_gradients((2, 2))]
    for turn, grad_output in enumerate(layouts):
        other, gradient = layouts[turn - 1], GRADIENTS[turn % 2]
        before = grad_output.clone()
        log_probs, entropy, _ = _check(impl_device, logits, labels, grad_output, other, gradient=gradient)
        assert log_probs.shape == entropy.shape == (2, 2) and torch.equal(grad_output, before)


def test_outputs_summed_and_weighted_by_the_caller(impl_device):
    """A policy gradient: advantages times log-probabilities, and a bonus on the mean entropy."""
    impl, device = impl_device
    logits, labels = _rows("some_ignored", 6)
    advantages, kept = _random(6), (labels != IGNORE_INDEX).float()
    leaf = logits.clone().to(device).requires_grad_()
    log_probs, entropy = token_log_probs(leaf, labels.to(device), entropy=True, impl=impl)
    bonus = 0.01 * entropy.sum() / kept.sum().to(device)
    (-(advantages.to(device) * log_probs).mean() - bonus).backward()
    upstreams = {"grad_output": -advantages / 6, "grad_entropy": (-0.01 / kept.sum()).expand(6)}
    oracle = token_outputs_fp64(logits, labels, **upstreams)
    peer = token_outputs_same_dtype(logits, labels, **upstreams)
    assert_within_budget(leaf.grad, oracle.grad, peer.grad)


@pytest.mark.parametrize("leading", [(4,), (2, 3), (2, 1, 2), (1, 1), (0, 3)])
def test_shapes_and_dtypes(impl_device, leading):
    impl, device = impl_device
    logits = torch.randn(*leading, COLUMNS, device=device, dtype=torch.bfloat16)
    labels = torch.zeros(leading, dtype=torch.int32, device=device)
    for options in ({}, {"entropy": False}):
        log_probs = token_log_probs(logits, labels, impl=impl, **options)
        assert isinstance(log_probs, torch.Tensor)
        assert log_probs.shape == leading and log_probs.dtype == torch.float32
    outputs = token_log_probs(logits, labels, impl=impl, entropy=True)
    assert len(outputs) == 2
    assert all(out.shape == leading and out.dtype == torch.float32 for out in outputs)


def test_log_probs_are_those_of_the_loss(impl_device):
    impl, device = impl_device
    logits, labels = (x.to(device) for x in batch("peaked", rows=4, vocab_size=COLUMNS))
    options = {"softcap": 10.0, "logit_scale": 0.4, "impl": impl}
    loss = vocab_parallel_cross_entropy(logits, labels, reduction="none", **options)
    assert torch.equal(token_log_probs(logits, labels, **options), -loss)


@pytest.mark.parametrize("gradient", GRADIENTS)
@pytest.mark.parametrize("bad", [NAN, INF])
def test_ignored_tokens_are_positive_zero(impl_device, bad, gradient):
    """Prompts and padding: whatever their rows hold, and whatever comes from grad_output for them."""
    logits, labels = _rows("peaked", 4)
    logits[0, 3], labels[0] = bad, IGNORE_INDEX
    logits[2], labels[2] = bad, IGNORE_INDEX
    upstreams = torch.tensor([bad, 1.0, 1.0, -2.0]), torch.tensor([1.0, 0.5, bad, 3.0])
    for options in ({}, {"softcap": 10.0, "logit_scale": 0.4, "temperature": 0.6}):
        results = _check(impl_device, logits, labels, *upstreams, gradient=gradient, **options)
        for result in results:
            assert not result[[0, 2]].any() and not result[[0, 2]].signbit().any()


@pytest.mark.parametrize("gradient", GRADIENTS)
def test_a_label_outside_the_vocabulary_is_nan(impl_device, gradient):
    logits, labels = _rows("peaked", 4)
    labels[1], labels[2] = -1, COLUMNS
    for upstreams in ((_random(4), _random(4, 1)), (_random(4), None), (None, _random(4))):
        results = _check(impl_device, logits, labels, *upstreams, gradient=gradient)
        for result in results:
            per_row = result.isnan().view(4, -1)
            assert per_row.all(1).tolist() == per_row.any(1).tolist() == [False, True, True, False]
    with pytest.raises(ValueError, match=r"^labels: .* 2 outside.*\(1,\): -1$"):
        token_log_probs(logits, labels, check_labels=True)


def test_nan_and_infinity_are_nan(impl_device):
    logits, labels = _rows("peaked", 3)
    logits[0, 4], logits[1, 4] = NAN, INF
    for options in ({}, {"softcap": 10.0}):
        log_probs, entropy, grad = _check(impl_device, logits, labels, _random(3), _random(3), **options)
        assert log_probs.isnan().tolist() == entropy.isnan().tolist() == [True, True, False]
        assert grad.isnan().any(dim=1).tolist() == [True, True, False]


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
    _, entropy, grad = _check(impl_device, logits, labels, None, torch.ones(6))
    assert_within_budget(entropy, known, known.float())
    # No direction changes the entropy of the others at first order.
    assert float(grad[5].abs().max()) > 0.1 and not grad[logits == -INF].any()


def test_entropy_of_rows_far_from_zero_keeps_its_digits(impl_device):
    """``lse - sum p x`` would subtract two numbers near 10000."""
    logits, labels = _rows("peaked", 4)
    steps = (logits * 64).round() / 64
    near = _call(impl_device, steps, labels, _random(4), _random(4, seed=1))
    for shift in (-8192.0, 8192.0):
        far = _check(impl_device, steps + shift, labels, _random(4), _random(4, seed=1))
        torch.testing.assert_close(far, near, rtol=0, atol=0)


@pytest.mark.parametrize(("vocab_size", "columns"), [(21, 22), (16, 32), (129, 136)])
def test_padded_columns_take_no_part(impl_device, vocab_size, columns):
    logits, labels = with_a_broad_row(batch("peaked", rows=2, vocab_size=vocab_size))
    upstreams = _random(3), _random(3, seed=1)
    oracle, peer = (
        compute(logits, labels, softcap=5.0, grad_output=upstreams[0], grad_entropy=upstreams[1])
        for compute in (token_outputs_fp64, token_outputs_same_dtype)
    )
    for size in ({"vocab_size": vocab_size}, {"shard": VocabShard(0, columns, vocab_size)}):
        padded = padded_shard(logits, 0, columns)
        *outputs, grad = _call(impl_device, padded, labels, *upstreams, softcap=5.0, **size)
        assert not grad[:, vocab_size:].any()
        results = [*outputs, grad[:, :vocab_size]]
        for result, expected, same_dtype in zip(results, oracle, peer, strict=True):
            assert_within_budget(result, expected, same_dtype)


@pytest.mark.parametrize("entropy", [False, True])
def test_where_the_gradient_is_written(impl_device, entropy):
    """Forward leaves the logits alone; backward writes over them, unless out of place."""
    impl, device = impl_device
    values, labels = (x.to(device) for x in batch("peaked", rows=3, vocab_size=COLUMNS))
    for gradient in ("auto", *GRADIENTS):
        logits = values.clone().requires_grad_() * 1
        outputs = token_log_probs(logits, labels, entropy=entropy, impl=impl, gradient=gradient)
        log_probs = outputs[0] if entropy else outputs
        assert torch.equal(logits, values) and logits._version == 0
        (grad,) = torch.autograd.grad(log_probs.sum(), logits)
        assert (grad.data_ptr() == logits.data_ptr()) == (gradient != "out_of_place")
        assert torch.equal(logits, values) == (gradient == "out_of_place")


@pytest.mark.parametrize("context", ["no_grad", "inference_mode", "requires_grad=False"])
def test_without_a_gradient_logits_are_never_touched(impl_device, context):
    impl, device = impl_device
    values, labels = (x.to(device) for x in batch("peaked", rows=3, vocab_size=COLUMNS))
    logits = values.clone().requires_grad_(context != "requires_grad=False")
    mode = torch.no_grad if context == "requires_grad=False" else getattr(torch, context)
    with torch.enable_grad() if context == "requires_grad=False" else mode():
        outputs = token_log_probs(logits, labels, entropy=True, impl=impl)
    assert torch.equal(logits, values) and logits._version == 0
    assert not any(out.requires_grad for out in outputs)


def test_second_backward(impl_device):
    """In place it raises with the remedy, also where each backward is through one of the outputs."""
    impl, device = impl_device
    values, labels = (x.to(device) for x in _rows("peaked", 3))

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
    log_probs, entropy, again = (
        torch.autograd.grad(outputs[i].sum(), logits, retain_graph=True)[0] for i in (0, 1, 0)
    )
    assert torch.equal(log_probs, again) and torch.equal(logits, values)
    for grad, used in ((log_probs, "grad_output"), (entropy, "grad_entropy")):
        oracle, peer = (
            compute(values.cpu(), labels.cpu(), **{used: torch.ones(3)}).grad
            for compute in (token_outputs_fp64, token_outputs_same_dtype)
        )
        assert_within_budget(grad, oracle, peer)


@pytest.mark.parametrize("gradient", GRADIENTS)
def test_double_backward_raises(impl_device, gradient):
    impl, device = impl_device
    values, labels = (x.to(device) for x in batch("peaked", rows=3, vocab_size=COLUMNS))
    for used in (0, 1):
        logits = values.clone().requires_grad_() * 1
        outputs = token_log_probs(logits, labels, entropy=True, impl=impl, gradient=gradient)
        with pytest.raises(RuntimeError, match="cannot be differentiated again"):
            torch.autograd.grad(outputs[used].sum(), logits, create_graph=True)
