"""Edges of a fused projection and loss: what lies in memory, what ignored tokens hold, divisors, casts, chunks."""

import contextlib
import weakref
from itertools import product
from unittest.mock import patch

import pytest
import torch
from torch import nn

from tests.linear.test_autograd import AT_ANY_MOMENT, MOMENTS
from tests.support.cases import linear
from tests.support.cases.flat import linear_cross_entropy, linear_token_log_probs
from tests.support.cases.inputs import IGNORE_INDEX
from tests.support.cases.linear import (
    COLUMNS,
    TWO_WAYS,
    WAYS,
    WIDTH,
    Leaves,
    Results,
    assert_right,
    check,
    grad_output_of,
    run,
)
from tests.support.cases.linear import N_LEAVES as ROWS
from tests.support.cases.logits import METRICS, flat_outputs
from tests.support.host.gpu import captured
from tests.support.truth.budget import K, assert_within_budget
from vocab_parallel_ce.head.loops import Products

NAN, INF = float("nan"), float("inf")
FP32 = {"logits_dtype": torch.float32}
TOLERANCE = {"rtol": 1.3e-6, "atol": 1e-5}


def test_chunks_of_one_token_whose_stride_is_no_multiple_of_8_bytes(impl_device):
    """One row is contiguous, whatever its stride."""
    impl, device = impl_device
    hidden = torch.randn(3, 11).bfloat16()[:, :8].to(device)
    weight = torch.randn(21, 8).bfloat16().to(device).requires_grad_()
    labels, gradients = torch.tensor([3, 0, 20], device=device), []
    for states in (hidden, hidden.contiguous()):
        linear_cross_entropy(states, weight, labels, impl=impl, chunk_size=1).backward()
        gradients.append(weight.grad)
        weight.grad = None
    assert torch.equal(*gradients)


@TWO_WAYS
def test_no_tokens(impl_device, way):
    inputs = linear.Projection(torch.zeros(0, 3, WIDTH), torch.randn(COLUMNS, WIDTH), torch.zeros(0, 3).long())
    (loss,), hidden, weight, _ = run(impl_device, inputs, **way)
    assert loss.shape == ((0, 3) if way["reduction"] == "none" else ()) and loss.sum().item() == 0
    assert hidden.shape == (0, 3, WIDTH) and torch.equal(weight, torch.zeros(COLUMNS, WIDTH))


@AT_ANY_MOMENT
def test_1024_chunks_lose_no_more_of_the_weights_gradient_than_one(impl_device, way):
    """Accumulated in bf16 from chunk to chunk it would lose most of its digits."""
    if impl_device == ("triton", "cpu"):
        pytest.skip("thousands of interpreted launches")
    inputs = linear.many_tokens(1024, 16, torch.bfloat16)
    grad_output = grad_output_of(way, 1024)
    truth = linear.linear_fp64(inputs, grad_output, **way).weight
    one, many = (run(impl_device, inputs, grad_output, chunk_size=chunk, **way).weight.double() for chunk in (1024, 1))
    assert (many - truth).norm() <= K * (one - truth).norm()
    assert (many - truth).abs().max() <= K * (one - truth).abs().max()


@TWO_WAYS
def test_the_gradient_of_a_confident_label_keeps_its_digits(impl_device, way):
    """At p = 0.999 the label's gradient is -0.001: p rounded to bf16 first would lose all of it."""
    for dtype in (torch.bfloat16, torch.float16):
        inputs = linear.projection("confident", dtype=dtype, exact=True, broad=False, gaps=(6.9,))
        _, *gradients = run(impl_device, inputs, grad_output_of(way), **way)
        assert_right(Results((), *gradients), inputs, grad_output_of(way), **way)


CALLS = {name: WAYS[name] for name in MOMENTS}
CALLS["log-probabilities"] = {"function": linear_token_log_probs, "outputs": ("entropy",)}
BY_CALL = pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)


def grad_outputs_of(call):
    if "function" in call:
        return [linear.zero_first_grad_output(linear.ROWS, seed=seed) for seed in (0, 1)]
    return [grad_output_of(call)]


@BY_CALL
@pytest.mark.parametrize("bad", [NAN, INF])
def test_what_ignored_tokens_hold_is_seen_by_nobody(impl_device, bad, call):
    """0 times NaN in the matmul of the weight's gradient would be NaN, as would the grad_output's.

    A promise of how many tokens count leaves the others out, and changes nothing else.
    """
    for valid_tokens, chunk in ((None, "auto"), (None, 2), (3, "auto"), (3, 2), (4, 3), (1000, 100), ("count", 2)):
        inputs, grads = linear.projection("peaked", bias=True), grad_outputs_of(call)
        inputs.hidden[0], inputs.hidden[2, 3] = bad, bad
        inputs.labels[[0, 2]] = IGNORE_INDEX
        for grad in grads:
            if grad.dim():
                grad[2] = bad
        result = check(impl_device, inputs, *grads, valid_tokens=valid_tokens, chunk_size=chunk, **call)
        assert not result.hidden[[0, 2]].any() and result.weight.isfinite().all()
        for output in result.outputs:
            assert not output.dim() or not output[[0, 2]].any() and not output[[0, 2]].signbit().any()


@pytest.mark.parametrize("n_ignored", [0, 1, 7, 10])
def test_counted_tokens_alone_are_computed(impl_device, n_ignored):
    """Chunks are of as many tokens as count, without a bound that could be too low."""
    impl, device = impl_device
    inputs = linear.many_tokens(10, linear.COLUMNS)
    inputs.labels[:n_ignored] = IGNORE_INDEX
    gradients = []
    for valid_tokens in ("count", None):
        hidden, weight = (each.clone().to(device).requires_grad_() for each in inputs[:2])
        options = {"valid_tokens": valid_tokens, "impl": impl, "chunk_size": 5}
        with recorded_rows() as rows:
            loss = linear_cross_entropy(hidden, weight, inputs.labels.to(device), **options)
        assert sum(rows) == max(1, 10 - n_ignored) or device == "cuda" and valid_tokens is None
        gradients.append((loss.detach(), *torch.autograd.grad(loss, (hidden, weight))))
    torch.testing.assert_close(*gradients)


@contextlib.contextmanager
def recorded_rows():
    """The tokens of each chunk whose logits are made."""
    rows, fill = [], Products.fill_logits
    with patch.object(Products, "fill_logits", lambda self, *of: rows.append(len(of[0])) or fill(self, *of)):
        yield rows


@pytest.mark.cuda
def test_no_captured_graph_counts():
    inputs = linear.many_tokens(10, linear.COLUMNS)
    hidden, weight, labels = (each.cuda() for each in inputs[:3])
    with torch.no_grad(), pytest.raises(ValueError, match="valid_tokens: expected a number in a CUDA graph"):
        captured(lambda: [linear_cross_entropy(hidden, weight, labels, valid_tokens="count")])


@BY_CALL
@pytest.mark.parametrize("valid_tokens", [0, ROWS - 1])
@pytest.mark.usefixtures("unread_labels")
def test_more_labels_than_were_promised_make_every_value_nan(impl_device, valid_tokens, call):
    """Also the loss of a token that was left out, where a 0 would pass for one."""
    inputs = linear.projection("peaked", ROWS, bias=True)
    results = run(impl_device, inputs, valid_tokens=valid_tokens, **{"outputs": METRICS, **call})
    for tensor in (*results.outputs, results.weight, results.bias):
        assert tensor.isnan().all() or not tensor.is_floating_point()


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.usefixtures("unread_labels")
def test_an_ignore_index_that_int32_labels_cannot_hold(impl_device, reduction):
    """No label is it: all of them count, and there are more than were promised."""
    inputs = linear.projection("peaked", ROWS)
    options = {"reduction": reduction, "ignore_index": 2**40}
    for valid_tokens in (2, ROWS, None):
        narrow, wide = (
            run(impl_device, inputs._replace(labels=labels), valid_tokens=valid_tokens, **options)
            for labels in (inputs.labels.int(), inputs.labels)
        )
        for same, expected in zip((*narrow.outputs, *narrow[1:3]), (*wide.outputs, *wide[1:3]), strict=True):
            torch.testing.assert_close(same, expected, rtol=0, atol=0, equal_nan=True)
        assert wide.outputs[0].isnan().all() == (valid_tokens == 2)


@pytest.mark.reference
@pytest.mark.parametrize("function", (linear_cross_entropy, linear_token_log_probs))
def test_parameters_and_their_views_are_plain_tensors(function):
    hidden, weight, labels = torch.randn(6, WIDTH), torch.randn(COLUMNS, WIDTH), torch.arange(6)
    parameter = nn.Parameter(weight)
    for view in (parameter, parameter * 2, parameter[:, :], parameter.t().contiguous().t()):
        parameter.grad = None
        function(hidden, view, labels).sum().backward()
        assert parameter.grad.any()


@AT_ANY_MOMENT
def test_nothing_to_learn_from_is_0_whatever_comes_for_it(impl_device, way):
    """A loss scale that has overflowed: 0 times inf would be NaN in ``main_grad``, which is kept."""
    inputs = linear.projection("all_ignored", ROWS, bias=True, broad=False)
    for options in ({}, {"valid_tokens": ROWS}, {"valid_tokens": 0}, {"chunk_size": 2, "label_smoothing": 0.1}):
        for main_grad in (None, torch.zeros(COLUMNS, WIDTH, device=impl_device[1])):
            results = run(impl_device, inputs, torch.tensor(INF), main_grad=main_grad, **options, **way)
            d_weight = results.weight if main_grad is None else main_grad.cpu()
            for tensor in (*results.outputs, results.hidden, d_weight, results.bias):
                assert torch.equal(tensor, torch.zeros_like(tensor))


@pytest.mark.usefixtures("unread_labels")
def test_a_divisor_of_0_items_gives_no_loss_and_no_gradient(impl_device):
    inputs = linear.projection("peaked")
    inputs.labels[1] = COLUMNS
    for num_items, gradient in product((0, torch.tensor(0)), ("in_forward", "in_backward")):
        (loss,), hidden, weight, _ = run(impl_device, inputs, reduction="sum", num_items=num_items, gradient=gradient)
        assert loss.item() == 0 and not hidden.any() and not weight.any()


def test_a_weight_that_was_cast_for_the_call_lives_no_longer(impl_device):
    """Kept for backward it would be a second copy of the head, though gradients are there already."""
    case = Leaves(impl_device)
    weight = case.weight.to(torch.bfloat16)
    hidden, alive = case.hidden.to(torch.bfloat16), weakref.ref(weight)
    loss = linear_cross_entropy(hidden, weight, case.labels, impl=case.impl, gradient="in_forward")
    del weight
    assert alive() is None
    loss.backward()
    assert case.weight.grad.any()


@pytest.mark.parametrize("gradient", ["in_forward", "in_backward"])
@pytest.mark.parametrize(
    ("dtype", "other"), [(torch.float16, torch.bfloat16), (torch.bfloat16, torch.float16)], ids=str
)
def test_autocast_to_the_other_16_bits_sums_the_weights_gradient_in_fp32(impl_device, dtype, other, gradient):
    """One chunk, whose product is of another dtype than the gradient: a GPU does not multiply into that."""
    impl, device = impl_device
    inputs = linear.many_tokens(ROWS, COLUMNS, dtype)
    # Logits of a usual size, whose gradients fp16 cannot hold; those of the weight it can.
    inputs = inputs._replace(hidden=inputs.hidden * 1024, weight=inputs.weight / 1024)
    options = {"reduction": "sum", "num_items": 2**23 if dtype == torch.float16 else 1}
    leaves = [x.to(device).requires_grad_() for x in (inputs.hidden, inputs.weight)]
    with torch.autocast(device, other):
        loss = linear_cross_entropy(*leaves, inputs.labels.to(device), impl=impl, gradient=gradient, **options)
    loss.backward()
    truth = linear.linear_fp64(inputs, **options)
    peer = linear.linear_same_dtype(inputs.to(other), weight_dtype=torch.float32, **options)
    for leaf, name in zip(leaves, ("hidden", "weight"), strict=True):
        assert_within_budget(leaf.grad, getattr(truth, name), getattr(peer, name).to(dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("autocast", [False, True])
def test_log_probs_of_fp32_logits_are_those_of_an_fp32_head_and_the_default_ones_are_not(impl_device, dtype, autocast):
    impl, device = impl_device
    generator = torch.Generator().manual_seed(0)
    hidden, weight, bias = (torch.randn(*shape, generator=generator) for shape in ((24, 32), (200, 32), (200,)))
    labels = torch.randint(0, 200, (24,), generator=generator).to(device)
    short = [t.to(device, dtype) for t in (hidden, weight, bias)]
    options = {"impl": impl, "temperature": 0.7, "outputs": ("entropy",)}
    *exact, added = (t.float() for t in short)
    added = bias.to(device) if autocast else added  # which autocast need not round
    given = (*exact, added) if autocast else short
    truth = linear_token_log_probs(*exact, labels, bias=added, **options)
    with torch.autocast(device, dtype, enabled=autocast):
        found = linear_token_log_probs(*given[:2], labels, bias=given[2], **options, **FP32)
        rounded = linear_token_log_probs(*given[:2], labels, bias=given[2], **options)
    for value, default, expected in zip(*map(flat_outputs, (found, rounded, truth)), strict=True):
        torch.testing.assert_close(value, expected, **TOLERANCE)
        assert (default - expected).abs().max() > 100 * TOLERANCE["atol"]


@TWO_WAYS
def test_the_gradient_of_fp32_logits_is_rounded_once(impl_device, way):
    """Also if it is summed over chunks into main_grad."""
    inputs = linear.many_tokens(40, COLUMNS, torch.bfloat16)
    main_grad, grad_output = torch.zeros(COLUMNS, WIDTH, device=impl_device[1]), grad_output_of(way, 40)
    run(impl_device, inputs, grad_output, main_grad=main_grad, chunk_size=16, **way, **FP32)
    truth = linear.linear_fp64(inputs, grad_output, **way)
    peer = linear.linear_same_dtype(inputs, grad_output, weight_dtype=torch.float32, **way, **FP32)
    assert_within_budget(main_grad, truth.weight, peer.weight)


@pytest.mark.reference
def test_on_a_cpu_a_wrong_label_and_too_few_promised_labels_raise():
    hidden, weight = torch.randn(3, 4), torch.randn(8, 4, requires_grad=True)
    for function in (linear_cross_entropy, linear_token_log_probs):
        with pytest.raises(ValueError, match=r"^labels: .*1 outside, the first at position \(1,\): 8$"):
            function(hidden, weight, torch.tensor([1, 8, 2]))
        with pytest.raises(ValueError, match="^valid_tokens: must be at least .*, 3, got 2; pass an upper bound"):
            function(hidden, weight, torch.tensor([1, 7, 2]), valid_tokens=2)
        assert function(hidden, weight, torch.tensor([1, 7, 2]), valid_tokens=2, check_labels=False).isnan().all()
