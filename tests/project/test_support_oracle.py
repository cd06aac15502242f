"""The oracle is PyTorch's cross-entropy, and differs from it only where it says so; its options are exact."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from tests.support.budget import assert_fp64_equal, assert_within_budget
from tests.support.inputs import DTYPES, batch
from tests.support.oracle import (
    cross_entropy_fp64,
    cross_entropy_same_dtype,
    metrics_fp64,
    metrics_same_dtype,
    token_outputs_fp64,
    token_outputs_same_dtype,
)

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("label_smoothing", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("kind", ["peaked", "some_ignored", "shard_edges"])
def test_ordinary_rows_are_pytorchs(kind, label_smoothing, reduction):
    logits, labels = batch(kind, rows=7, vocab_size=19)
    options = {"label_smoothing": label_smoothing, "reduction": reduction}
    leaf = logits.double().requires_grad_()
    expected = F.cross_entropy(leaf, labels, **options)
    grad_output = torch.randn(expected.shape, dtype=torch.float64)
    expected.backward(grad_output)
    loss, grad = cross_entropy_fp64(logits, labels, grad_output=grad_output, **options)
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


def test_no_items_are_zero_whatever_rows_hold():
    logits, labels = torch.tensor([[NAN, 1.0], [0.0, INF], [0.0, 1.0]]), torch.tensor([0, 1, 2])
    options = {"reduction": "sum", "num_items": torch.tensor(0), "z_loss": 0.1}
    loss, grad = cross_entropy_fp64(logits, labels, **options)
    assert loss.item() == 0 and not grad.any() and metrics_fp64(logits, labels, **options).z_loss == 0


def test_excluded_columns_have_zero_gradient_even_under_smoothing():
    logits = torch.tensor([[0.0, float("-inf"), 1.0], [float("-inf")] * 3])
    _, grad = cross_entropy_fp64(logits, torch.tensor([0, 0]), label_smoothing=0.3, reduction="sum")
    assert grad[0, 1].item() == 0.0 and grad[0].isfinite().all()
    assert grad[1].isnan().all()


OPTIONS = {
    "z_loss": {"z_loss": 0.01},
    "softcap": {"softcap": 2.5},
    "logit_scale": {"logit_scale": 0.4},
    "megatron's smoothing": {"label_smoothing": 0.2, "smoothing_formula": "megatron"},
    "num_items": {"num_items": 5},
    "all": {
        "z_loss": 0.01,
        "softcap": 2.5,
        "logit_scale": 0.4,
        "label_smoothing": 0.2,
        "smoothing_formula": "megatron",
        "num_items": torch.tensor(5.0),
    },
}


def _central_difference(function, x):
    """Gradient of the scalar ``function`` at ``x [N, V]``, good to about 1e-9."""
    step = 1e-4
    grad = torch.empty_like(x)
    for index in range(x.numel()):
        offset = torch.zeros_like(x)
        offset.view(-1)[index] = step
        difference = function(x + offset) - function(x - offset)
        wide = function(x + 2 * offset) - function(x - 2 * offset)
        grad.view(-1)[index] = (8 * difference - wide) / (12 * step)
    return grad


@pytest.mark.parametrize("name", OPTIONS)
def test_gradients_are_the_finite_differences_of_the_losses(name):
    logits, labels = batch("some_ignored", rows=4, vocab_size=5, dtype=torch.float64)
    logits = logits.clamp(max=5)
    options = {"reduction": "sum", **OPTIONS[name]}
    grad_output = torch.tensor(-0.75)
    grad = cross_entropy_fp64(logits, labels, grad_output=grad_output, **options).grad
    differences = _central_difference(lambda x: -0.75 * cross_entropy_fp64(x, labels, **options).loss, logits)
    torch.testing.assert_close(grad, differences, rtol=0, atol=1e-9)
    plain = cross_entropy_fp64(logits, labels, grad_output=grad_output, reduction="sum").grad
    assert not torch.allclose(grad, plain, rtol=1e-2)


@pytest.mark.parametrize(("softcap", "logit_scale"), [(None, 1.0), (2.5, 0.4)])
@pytest.mark.parametrize("used", ["both", "log_probs", "entropy"])
def test_gradients_of_token_outputs_are_finite_differences(used, softcap, logit_scale):
    logits, labels = batch("some_ignored", rows=4, vocab_size=5, dtype=torch.float64)
    logits = logits.clamp(max=5)
    options = {"temperature": 1.3, "softcap": softcap, "logit_scale": logit_scale}
    upstreams = {"grad_output": torch.randn(4), "grad_entropy": torch.randn(4)}
    if used != "both":
        del upstreams["grad_entropy" if used == "log_probs" else "grad_output"]
    weights = [upstreams.get(name, torch.zeros(4)).double() for name in ("grad_output", "grad_entropy")]

    def weighted(x):
        log_probs, entropy, _ = token_outputs_fp64(x, labels, **options)
        return weights[0] @ log_probs + weights[1] @ entropy

    grad = token_outputs_fp64(logits, labels, **upstreams, **options).grad
    torch.testing.assert_close(grad, _central_difference(weighted, logits), rtol=0, atol=1e-9)


def test_the_values_of_a_row_worked_by_hand():
    """``x = [0, ln 3, -inf]``, label 1: p = 1/4, 3/4, 0 and lse = ln 4."""
    logits, labels = torch.tensor([[0.0, math.log(3), -INF]], dtype=torch.float64), torch.tensor([1])
    nll, lse = math.log(4 / 3), math.log(4)

    def loss(**options):
        return cross_entropy_fp64(logits, labels, reduction="sum", **options).loss.item()

    assert loss() == pytest.approx(nll)
    assert loss(z_loss=0.5) == pytest.approx(nll + 0.5 * lse**2)
    assert loss(num_items=4) == pytest.approx(nll / 4)
    assert loss(num_items=torch.tensor(0)) == 0.0
    # 3 ** 2 = 9: p = 1/10, 9/10.
    assert loss(logit_scale=2) == pytest.approx(math.log(10 / 9))
    # softcap 1 maps ln 3 to tanh(ln 3) = (9 - 1) / (9 + 1).
    assert loss(softcap=1) == pytest.approx(math.log1p(math.exp(-0.8)))
    # The scale comes before the cap: tanh(2 ln 3) = (81 - 1) / (81 + 1).
    assert loss(softcap=1, logit_scale=2) == pytest.approx(math.log1p(math.exp(-80 / 82)))
    two = logits[:, :2]
    smoothed = {"label_smoothing": 0.1, "reduction": "sum"}
    # e = 0.1, and 0.1 * 2 / 1 for Megatron; the mean of -log p is (ln 4 + ln (4 / 3)) / 2.
    mean = (math.log(4) + nll) / 2
    assert cross_entropy_fp64(two, labels, **smoothed).loss.item() == pytest.approx(0.9 * nll + 0.1 * mean)
    megatron = cross_entropy_fp64(two, labels, smoothing_formula="megatron", **smoothed)
    assert megatron.loss.item() == pytest.approx(0.8 * nll + 0.2 * mean)
    # Megatron's formula in its own words: 0.9 to the label, 0.1 to the other V - 1 columns.
    assert megatron.loss.item() == pytest.approx(0.9 * nll + 0.1 * math.log(4))


def test_token_outputs_of_a_row_worked_by_hand():
    logits, labels = torch.tensor([[0.0, math.log(3), -INF]], dtype=torch.float64), torch.tensor([1])
    log_probs, entropy, _ = token_outputs_fp64(logits, labels)
    assert log_probs.item() == pytest.approx(math.log(3 / 4))
    assert entropy.item() == pytest.approx(0.25 * math.log(4) + 0.75 * math.log(4 / 3))
    # The temperature divides what the cap leaves: tanh(ln 3) / 0.5 = 1.6.
    capped = token_outputs_fp64(logits, labels, softcap=1, temperature=0.5)
    assert capped.log_probs.item() == pytest.approx(-math.log1p(math.exp(-1.6)))


def test_an_infinite_logit_stays_infinite_under_softcap():
    logits = torch.tensor([[0.0, -INF, 1.0], [INF, 0.0, 1.0], [0.0, 1.0, -INF]])
    labels = torch.tensor([0, 1, 2])
    options = {"softcap": 3.0, "label_smoothing": 0.0, "z_loss": 0.1, "reduction": "none"}
    loss, grad = cross_entropy_fp64(logits, labels, **options)
    without = cross_entropy_fp64(logits[:1, [0, 2]], labels[:1], **options)
    assert_fp64_equal(loss[:1], without.loss, 1.0)
    assert grad[0, 1] == 0 and loss[1].isnan() and grad[1].isnan().all()
    assert loss[2] == INF
    outputs = token_outputs_fp64(logits, labels, softcap=3.0, grad_output=torch.ones(3))
    assert outputs.entropy[0].isfinite() and outputs.entropy[1].isnan() and outputs.grad[0, 1] == 0


def test_entropy_of_uniform_one_hot_and_excluded_columns():
    logits = torch.zeros(4, 8)
    logits[1, 3] = 1000.0
    logits[2, 2:] = -INF
    labels = torch.tensor([0, 3, 1, -100])
    outputs = token_outputs_fp64(logits, labels, grad_output=torch.randn(4), grad_entropy=torch.randn(4))
    expected = torch.tensor([math.log(8), 0.0, math.log(2), 0.0], dtype=torch.float64)
    assert_fp64_equal(outputs.entropy, expected, 1.0)
    assert outputs.grad.isfinite().all() and not outputs.grad[2, 2:].any() and not outputs.grad[3].any()


def test_metrics_worked_by_hand():
    rows = [[0.0, 2.0, 2.0], [3.0, -INF, 0.0], [NAN, 0.0, 1.0], [5.0, 0.0, 1.0], [1.0, 2.0, 0.0], [NAN] * 3]
    logits, labels = torch.tensor(rows), torch.tensor([1, 2, 2, -100, 1, -1])
    metrics = metrics_fp64(logits, labels, z_loss=0.5, reduction="none")
    assert metrics.predictions.tolist() == [1, 0, -1, -1, 1, -1]
    assert metrics.token_accuracy.item() == pytest.approx(2 / 5)
    torch.testing.assert_close(metrics.lse[[0, 1, 4]], logits[[0, 1, 4]].double().logsumexp(1))
    assert metrics.lse[3] == 0 and metrics.lse[2].isnan()
    torch.testing.assert_close(metrics.z_loss, 0.5 * metrics.lse**2, equal_nan=True)
    finite = [0, 1, 3, 4]
    shapes = {"mean": 3.0, "sum": 1.0}
    for reduction, divisor in shapes.items():
        reduced = metrics_fp64(logits[finite], labels[finite], z_loss=0.5, reduction=reduction).z_loss
        torch.testing.assert_close(reduced, metrics.z_loss[finite].sum() / divisor)


@pytest.mark.parametrize("dtype", DTYPES)
def test_same_dtype_options_are_fp32_and_near_fp64(dtype):
    logits, labels = batch("some_ignored", rows=6, vocab_size=11, dtype=dtype)
    options = {"z_loss": 0.01, "softcap": 5.0, "logit_scale": 0.5, "label_smoothing": 0.1}
    peer, oracle = (
        make(logits, labels, **options) for make in (cross_entropy_same_dtype, cross_entropy_fp64)
    )
    assert peer.loss.dtype == torch.float32 and peer.grad.dtype == dtype
    torch.testing.assert_close(peer.loss.double(), oracle.loss, rtol=1e-5, atol=0)
    metrics, metrics_oracle = (make(logits, labels, **options) for make in (metrics_same_dtype, metrics_fp64))
    assert torch.equal(metrics.predictions, metrics_oracle.predictions)
    torch.testing.assert_close(metrics.lse.double(), metrics_oracle.lse, rtol=1e-5, atol=0)
    upstreams = {"grad_output": torch.randn(6), "grad_entropy": torch.randn(6)}
    tokens, tokens_oracle = (
        make(logits, labels, temperature=0.7, softcap=5.0, **upstreams)
        for make in (token_outputs_same_dtype, token_outputs_fp64)
    )
    assert tokens.entropy.dtype == torch.float32 and tokens.grad.dtype == dtype
    torch.testing.assert_close(tokens.entropy.double(), tokens_oracle.entropy, rtol=1e-4, atol=1e-6)
    assert_within_budget(tokens.grad, tokens_oracle.grad, tokens_oracle.grad.to(dtype))
