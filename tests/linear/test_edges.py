"""Where a fused projection and loss has gone wrong before: casts, divisors, promises, memory layouts."""

import weakref

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from tests.linear.test_autograd import ROWS, Case
from tests.support.budget import assert_within_budget
from tests.support.linear import BY_WAY, COLUMNS, WIDTH, linear_fp64, linear_same_dtype, many_tokens, projection, run
from vocab_parallel_ce import linear_cross_entropy
from vocab_parallel_ce.linear.matmul import WeightGradient
from vocab_parallel_ce.linear.pipeline import Products

INF = float("inf")


def test_a_divisor_that_changes_before_backward_is_noticed(impl_device):
    """Counted up in place over a step's batches; the loss was divided by what it was then."""
    case = Case(impl_device)
    num_items = torch.tensor(5.0, device=case.device)
    loss = case.loss(reduction="sum", num_items=num_items, gradient="in_backward")
    num_items += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_weight_that_was_cast_for_the_call_lives_no_longer(impl_device):
    """Kept for backward it would be a second copy of the head, though gradients are there already."""
    case = Case(impl_device)
    weight = case.weight.to(torch.bfloat16)
    hidden, alive = case.hidden.to(torch.bfloat16), weakref.ref(weight)
    loss = linear_cross_entropy(hidden, weight, case.labels, impl=case.impl, gradient="in_forward")
    del weight
    assert alive() is None
    loss.backward()
    assert case.weight.grad.any()


@pytest.mark.reference
@pytest.mark.parametrize("gradient", ["in_forward", "in_backward"])
def test_a_chunks_logits_are_freed_before_the_weights_gradient_is_rounded(gradient, monkeypatch):
    """A loop variable held a view of the buffer: a third more memory than documented."""
    case, buffers, freed = Case(("reference", "cpu")), [], []
    make, rounded = Products.logits, WeightGradient.rounded

    def watched(self, *args):
        buffers.append(StorageWeakRef(self.buffer.untyped_storage()))
        return make(self, *args)

    def checked(self):
        freed.append(all(buffer.expired() for buffer in buffers))
        return rounded(self)

    monkeypatch.setattr(Products, "logits", watched)
    monkeypatch.setattr(WeightGradient, "rounded", checked)
    case.loss(gradient=gradient, chunk_tokens=2).backward()
    assert buffers and freed == [True]


@pytest.mark.parametrize("gradient", ["in_forward", "in_backward"])
@pytest.mark.parametrize(
    ("dtype", "other"), [(torch.float16, torch.bfloat16), (torch.bfloat16, torch.float16)], ids=str
)
def test_autocast_to_the_other_16_bits_sums_the_weights_gradient_in_fp32(impl_device, dtype, other, gradient):
    """One chunk, whose product is of another dtype than the gradient: a GPU does not multiply into that."""
    impl, device = impl_device
    inputs = many_tokens(ROWS, COLUMNS, dtype)
    # Logits of a usual size, whose gradients fp16 cannot hold; those of the weight it can.
    inputs = inputs._replace(hidden=inputs.hidden * 1024, weight=inputs.weight / 1024)
    options = {"reduction": "sum", "num_items": 2**23 if dtype == torch.float16 else 1}
    leaves = [x.to(device).requires_grad_() for x in (inputs.hidden, inputs.weight)]
    with torch.autocast(device, other):
        loss = linear_cross_entropy(*leaves, inputs.labels.to(device), impl=impl, gradient=gradient, **options)
    loss.backward()
    truth = linear_fp64(inputs, **options)
    peer = linear_same_dtype(inputs.to(other), weight_dtype=torch.float32, **options)
    for leaf, name in zip(leaves, ("hidden", "weight"), strict=True):
        assert_within_budget(leaf.grad, getattr(truth, name), getattr(peer, name).to(dtype))


@BY_WAY
def test_nothing_to_learn_from_is_0_whatever_comes_for_it(impl_device, way):
    """A loss scale that has overflowed: 0 times inf would be NaN in ``main_grad``, which is kept."""
    inputs = projection("all_ignored", ROWS, bias=True, broad=False)
    for options in ({}, {"valid_tokens": ROWS}, {"valid_tokens": 0}, {"chunk_tokens": 2, "label_smoothing": 0.1}):
        for main_grad in (None, torch.zeros(COLUMNS, WIDTH, device=impl_device[1])):
            results = run(impl_device, inputs, torch.tensor(INF), main_grad=main_grad, **options, **way)
            d_weight = results.weight if main_grad is None else main_grad.cpu()
            for tensor in (*results.outputs, results.hidden, d_weight, results.bias):
                assert torch.equal(tensor, torch.zeros_like(tensor))


@BY_WAY
@pytest.mark.parametrize("valid_tokens", [0, 1, ROWS - 1])
def test_more_labels_than_were_promised_make_every_value_nan(impl_device, valid_tokens, way):
    """Also the loss of a token that was left out, where a 0 would pass for one, and the accuracy of the others."""
    inputs = projection("peaked", ROWS, bias=True)
    results = run(impl_device, inputs, valid_tokens=valid_tokens, return_metrics=True, **way)
    loss, _, *metrics = results.outputs
    for tensor in (loss, *metrics, results.weight, results.bias):
        assert tensor.isnan().all()


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_an_ignore_index_that_int32_labels_cannot_hold(impl_device, reduction):
    """No label is it: all of them count, and there are more than were promised."""
    inputs = projection("peaked", ROWS)
    options = {"reduction": reduction, "ignore_index": 2**40}
    for valid_tokens in (2, ROWS, None):
        narrow, wide = (
            run(impl_device, inputs._replace(labels=labels), valid_tokens=valid_tokens, **options)
            for labels in (inputs.labels.int(), inputs.labels)
        )
        for same, expected in zip((*narrow.outputs, *narrow[1:3]), (*wide.outputs, *wide[1:3]), strict=True):
            torch.testing.assert_close(same, expected, rtol=0, atol=0, equal_nan=True)
        assert wide.outputs[0].isnan().all() == (valid_tokens == 2)


def test_chunks_of_one_token_whose_stride_is_no_multiple_of_8_bytes(impl_device):
    """One row is contiguous, whatever its stride."""
    impl, device = impl_device
    hidden = torch.randn(3, 11).bfloat16()[:, :8].to(device)
    weight = torch.randn(21, 8).bfloat16().to(device).requires_grad_()
    labels, gradients = torch.tensor([3, 0, 20], device=device), []
    for states in (hidden, hidden.contiguous()):
        linear_cross_entropy(states, weight, labels, impl=impl, chunk_tokens=1).backward()
        gradients.append(weight.grad)
        weight.grad = None
    assert torch.equal(*gradients)
