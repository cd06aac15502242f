"""The mathematics in fp64 against torch.nn.functional.cross_entropy in fp64."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.nn.functional as F

from tests.support.budget import assert_fp64_equal, assert_within_budget
from tests.support.inputs import CONFIDENT_GAPS, DTYPES, KINDS, batch, shard_of
from tests.support.oracle import cross_entropy_fp64, cross_entropy_same_dtype
from vocab_parallel_ce import spec
from vocab_parallel_ce.spec import PLAIN, LossOptions

pytestmark = pytest.mark.reference

NAN, INF = float("nan"), float("inf")
ROWS, VOCAB = 10, 60
FP64 = torch.float64


def _loss_and_gradient(logits, labels, shards=1, options=PLAIN):
    """Unreduced loss and gradient over the whole vocabulary, from ``shards`` equal shards."""
    vocab_size = logits.shape[1]
    width = vocab_size // shards
    pieces = [(shard_of(logits, rank, shards), rank * width) for rank in range(shards)]
    known = [spec.local_stats(piece, labels, start, vocab_size, options) for piece, start in pieces]
    stats = functools.reduce(spec.merge, known)
    gradients = [spec.gradient(piece, stats, labels, start, vocab_size, options) for piece, start in pieces]
    return spec.loss(stats, labels, vocab_size, options), torch.cat(gradients, dim=1)


def _assert_equal(actual, expected, logits):
    magnitude = max([1.0, *logits[logits.isfinite()].abs().tolist()])
    assert_fp64_equal(actual, expected, magnitude)


@pytest.mark.parametrize("label_smoothing", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("shards", [1, 2, 3, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_shards_agree_with_the_whole_vocabulary(kind, shards, label_smoothing):
    logits, labels = batch(kind, rows=ROWS, vocab_size=VOCAB, shards=shards, dtype=FP64)
    oracle = cross_entropy_fp64(logits, labels, reduction="none", label_smoothing=label_smoothing)
    loss, gradient = _loss_and_gradient(logits, labels, shards, LossOptions(smoothing=label_smoothing))
    _assert_equal(loss, oracle.loss, logits)
    _assert_equal(gradient, oracle.grad, logits)


@pytest.mark.parametrize("label_smoothing", [0.0, 0.1, 1.0])
def test_pytorch_agrees_with_no_oracle_between(label_smoothing):
    logits, labels = batch("some_ignored", rows=ROWS, vocab_size=VOCAB, dtype=FP64)
    leaf = logits.clone().requires_grad_()
    expected = F.cross_entropy(leaf, labels, label_smoothing=label_smoothing, reduction="none")
    expected.sum().backward()
    loss, gradient = _loss_and_gradient(logits, labels, 3, LossOptions(smoothing=label_smoothing))
    _assert_equal(loss, expected.detach(), logits)
    _assert_equal(gradient, leaf.grad, logits)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_training_dtypes_are_computed_in_fp32(kind, dtype):
    logits, labels = batch(kind, rows=ROWS, vocab_size=VOCAB, shards=2, dtype=dtype)
    loss, gradient = _loss_and_gradient(logits, labels, 2)
    assert loss.dtype == gradient.dtype == torch.float32
    oracle = cross_entropy_fp64(logits, labels, reduction="none")
    peer = cross_entropy_same_dtype(logits, labels, reduction="none")
    assert_within_budget(loss, oracle.loss, peer.loss)
    assert_within_budget(gradient.to(dtype), oracle.grad, peer.grad)


@pytest.mark.parametrize("gap", CONFIDENT_GAPS)
def test_gradient_of_a_confident_label_keeps_its_digits(gap):
    """At p = 0.999 the label's gradient is -0.001: an error of 0.001 in p would be all of it."""
    made = batch("confident", rows=4, vocab_size=VOCAB, dtype=FP64, gaps=(gap,))
    loss, gradient = _loss_and_gradient(*made, 2)
    at_label = gradient.gather(1, made.labels.unsqueeze(1)).squeeze(1)
    others = made.logits.scatter(1, made.labels.unsqueeze(1), -INF).logsumexp(1)
    log_odds = others - made.logits.gather(1, made.labels.unsqueeze(1)).squeeze(1)
    true_gradient = -log_odds.sigmoid()
    relative = (at_label / true_gradient - 1).abs()
    # Cancellation in p - 1 costs the digits of 1 - p, no more.
    assert_fp64_equal(at_label, true_gradient, 1.0)
    assert float(relative.max()) < 1e-6
    _assert_equal(loss, F.softplus(log_odds), made.logits)


@pytest.mark.parametrize("smoothing", [0.0, 1.0])
@pytest.mark.parametrize("shift", [1e6, -1e6])
def test_adding_a_constant_to_a_row_changes_nothing(shift, smoothing):
    logits, labels = batch("mixture", rows=ROWS, vocab_size=VOCAB, shards=3, dtype=FP64)
    logits = (logits * 2**10).round() / 2**10
    options = LossOptions(smoothing=smoothing)
    plain = _loss_and_gradient(logits, labels, 3, options)
    moved = _loss_and_gradient(logits + shift, labels, 3, options)
    for actual, expected in zip(moved, plain, strict=True):
        _assert_equal(actual, expected, logits)


@pytest.mark.parametrize("shards", [1, 2, 3, 4])
@pytest.mark.parametrize("bad", [NAN, INF])
def test_a_row_with_nan_or_plus_infinity_is_nan_and_alone(bad, shards):
    logits, labels = batch("peaked", rows=ROWS, vocab_size=VOCAB, dtype=FP64)
    logits[2, VOCAB // 2] = bad
    loss, gradient = _loss_and_gradient(logits, labels, shards)
    row_2 = torch.arange(ROWS) == 2
    assert torch.equal(loss.isnan(), row_2)
    assert gradient[2].isnan().all() and gradient[~row_2].isfinite().all()


@pytest.mark.parametrize("shards", [1, 2, 3])
def test_a_row_excluded_throughout_is_nan_and_alone(shards):
    logits, labels = batch("peaked", rows=ROWS, vocab_size=VOCAB, dtype=FP64)
    logits[2] = -INF
    loss, gradient = _loss_and_gradient(logits, labels, shards)
    assert torch.equal(loss.isnan(), torch.arange(ROWS) == 2)
    assert gradient[torch.arange(ROWS) != 2].isfinite().all()


@pytest.mark.parametrize("shards", [1, 2, 3, 4])
@pytest.mark.parametrize("label", [-1, VOCAB, 2**31 - 1, -(2**31)])
def test_a_label_outside_the_vocabulary_is_nan_on_every_shard(label, shards):
    """Not 0 on one rank and the log-sum-exp on several."""
    logits, labels = batch("peaked", rows=ROWS, vocab_size=VOCAB, dtype=FP64)
    labels[4] = label
    loss, gradient = _loss_and_gradient(logits, labels, shards)
    row_4 = torch.arange(ROWS) == 4
    assert torch.equal(loss.isnan(), row_4)
    assert gradient[4].isnan().all() and gradient[~row_4].isfinite().all()


@pytest.mark.parametrize("ignore_index", [-100, -1, 7, VOCAB + 5])
def test_ignored_rows_are_zero_whatever_they_hold(ignore_index):
    logits, labels = batch("peaked", rows=ROWS, vocab_size=VOCAB, dtype=FP64)
    labels[labels == ignore_index] = 8
    labels[:3] = ignore_index
    logits[0], logits[1] = NAN, -INF
    loss, gradient = _loss_and_gradient(logits, labels, 2, LossOptions(ignore_index, smoothing=0.1))
    assert torch.equal(loss[:3], torch.zeros(3, dtype=FP64))
    assert torch.equal(gradient[:3], torch.zeros(3, VOCAB, dtype=FP64))
    assert bool((loss[3:] > 0).all()) and bool((gradient[3:] != 0).any(1).all())


def test_excluded_columns_have_zero_gradient_under_smoothing_too():
    logits, labels = batch("excluded_columns", rows=ROWS, vocab_size=VOCAB, shards=2, dtype=FP64)
    excluded = logits == -INF
    for smoothing in (0.0, 0.1):
        _, gradient = _loss_and_gradient(logits, labels, 2, LossOptions(smoothing=smoothing))
        assert torch.equal(gradient[excluded], torch.zeros(int(excluded.sum()), dtype=FP64))
        assert gradient.isfinite().all()


def test_an_excluded_label_has_an_infinite_loss():
    loss, gradient = _loss_and_gradient(
        torch.tensor([[-INF, 1.0, 2.0, 0.0]], dtype=FP64), torch.tensor([0]), 2
    )
    assert loss.item() == INF and gradient.isfinite().all()


def test_smoothing_uses_the_global_vocabulary():
    """The mean logit of a shard is not the mean logit: with it, the loss differs from rank to rank."""
    logits = torch.tensor([[3.0, 3.0, -5.0, -5.0]], dtype=FP64)
    loss, _ = _loss_and_gradient(logits, torch.tensor([0]), 2, LossOptions(smoothing=1.0))
    _assert_equal(loss, torch.logsumexp(logits, 1) + 1.0, logits)


def test_int32_labels_are_taken():
    logits, labels = batch("peaked", rows=ROWS, vocab_size=VOCAB, dtype=FP64)
    expected = _loss_and_gradient(logits, labels, 2)
    actual = _loss_and_gradient(logits, labels.int(), 2)
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


def test_no_argument_is_written():
    logits, labels = batch("mixture", rows=ROWS, vocab_size=VOCAB)
    before = logits.clone(), labels.clone()
    versions = logits._version, labels._version
    _loss_and_gradient(logits, labels, 1, LossOptions(smoothing=0.1, softcap=20.0))
    assert torch.equal(logits, before[0]) and torch.equal(labels, before[1])
    assert (logits._version, labels._version) == versions


def test_no_rows_are_no_losses():
    loss, gradient = _loss_and_gradient(torch.zeros(0, 6), torch.zeros(0, dtype=torch.int64), 2)
    assert loss.shape == (0,) and gradient.shape == (0, 6)
