"""The oracle is PyTorch's cross-entropy, and differs from it only where it says so."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.support.budget import assert_within_budget
from tests.support.inputs import DTYPES, batch
from tests.support.oracle import cross_entropy_fp64, cross_entropy_same_dtype

NAN = float("nan")


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("label_smoothing", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("kind", ["peaked", "some_ignored", "shard_edges"])
def test_ordinary_rows_are_pytorchs(kind, label_smoothing, reduction):
    logits, labels = batch(kind, rows=7, vocab_size=19)
    options = {"label_smoothing": label_smoothing, "reduction": reduction}
    leaf = logits.double().requires_grad_()
    expected = F.cross_entropy(leaf, labels, **options)
    upstream = torch.randn(expected.shape, dtype=torch.float64)
    expected.backward(upstream)
    loss, grad = cross_entropy_fp64(logits, labels, upstream=upstream, **options)
    torch.testing.assert_close(loss, expected.detach())
    torch.testing.assert_close(grad, leaf.grad)


@pytest.mark.parametrize("dtype", DTYPES)
def test_same_dtype_has_an_fp32_loss_and_a_gradient_in_the_logits_dtype(dtype):
    logits, labels = batch("mixture", rows=9, vocab_size=24, shards=3, dtype=dtype)
    oracle = cross_entropy_fp64(logits, labels)
    peer = cross_entropy_same_dtype(logits, labels)
    assert peer.loss.dtype == torch.float32 and peer.grad.dtype == dtype
    assert oracle.loss.dtype == oracle.grad.dtype == torch.float64
    assert_within_budget(peer.grad, oracle.grad, oracle.grad.to(dtype))


def test_leading_dimensions_are_kept():
    logits, labels = batch("peaked", rows=6, vocab_size=5)
    flat = cross_entropy_fp64(logits, labels, reduction="none")
    shaped = cross_entropy_fp64(logits.view(2, 3, 5), labels.view(2, 3), reduction="none")
    assert torch.equal(shaped.loss, flat.loss.view(2, 3))
    assert torch.equal(shaped.grad, flat.grad.view(2, 3, 5))


def test_a_label_outside_the_vocabulary_is_nan_in_its_row_and_nowhere_else():
    logits, labels = batch("peaked", rows=4, vocab_size=5)
    labels[1], labels[2] = 5, -1
    loss, grad = cross_entropy_fp64(logits, labels, reduction="none")
    assert loss.isnan().tolist() == [False, True, True, False]
    assert grad.isnan().all(dim=1).tolist() == grad.isnan().any(dim=1).tolist()
    assert grad.isnan().any(dim=1).tolist() == [False, True, True, False]
    mean = cross_entropy_fp64(logits, labels, reduction="mean")
    assert mean.loss.isnan()
    torch.testing.assert_close(mean.grad[0], grad[0] / 4)


def test_all_ignored_is_zero_and_ignored_rows_hide_what_they_hold():
    logits = torch.tensor([[NAN, 1.0], [float("inf"), 0.0]])
    for reduction in ("mean", "sum"):
        loss, grad = cross_entropy_fp64(logits, torch.tensor([-100, -100]), reduction=reduction)
        assert loss.item() == 0.0 and torch.equal(grad, torch.zeros(2, 2, dtype=torch.float64))


def test_excluded_columns_have_zero_gradient_even_under_smoothing():
    logits = torch.tensor([[0.0, float("-inf"), 1.0], [float("-inf")] * 3])
    _, grad = cross_entropy_fp64(logits, torch.tensor([0, 0]), label_smoothing=0.3, reduction="sum")
    assert grad[0, 1].item() == 0.0 and grad[0].isfinite().all()
    assert grad[1].isnan().all()
