"""Options and token outputs of the mathematics, against fp64 autograd over the formulas term by term."""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.support.budget import assert_fp64_equal, assert_within_budget
from tests.support.inputs import DTYPES, KINDS, batch
from vocab_parallel_ce import spec
from vocab_parallel_ce.spec import PLAIN, LossOptions

pytestmark = pytest.mark.reference

NAN, INF = float("nan"), float("inf")
ROWS, VOCAB = 10, 60
FP64 = torch.float64
ALL = LossOptions(-100, 0.1, 0.01, 0.5, 20.0, entropy=True, predictions=True)
OPTIONS = {
    "torch smoothing": LossOptions(smoothing=0.1),
    "all torch smoothing": LossOptions(smoothing=1.0),
    "megatron smoothing": LossOptions(smoothing=0.1 * VOCAB / (VOCAB - 1)),
    "all megatron smoothing": LossOptions(smoothing=VOCAB / (VOCAB - 1)),
    "z_loss": LossOptions(z_loss=0.01),
    "logit_scale": LossOptions(logit_scale=0.25),
    "softcap": LossOptions(softcap=20.0),
    "softcap and logit_scale": LossOptions(softcap=5.0, logit_scale=3.0),
    "entropy": LossOptions(entropy=True),
    "all": ALL,
}
BY_OPTION = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)


class Rows(NamedTuple):
    """What rows come to, and the gradients of their losses and entropies by the logits."""

    loss: Tensor
    gradient: Tensor
    entropy: Tensor
    entropy_gradient: Tensor
    lse: Tensor
    predictions: Tensor


def _by_spec(logits, labels, options=PLAIN, shards=1, vocab_size=None):
    """From ``shards`` equal shards; columns at ``vocab_size`` and beyond are padding."""
    width = logits.shape[1] // shards
    vocab_size = logits.shape[1] if vocab_size is None else vocab_size
    pieces = [(logits[:, start : start + width], start) for start in range(0, logits.shape[1], width)]
    known = [spec.local_stats(piece, labels, start, vocab_size, options) for piece, start in pieces]
    stats = functools.reduce(spec.merge, known)

    def gradient_by(function):
        pieced = [function(piece, stats, labels, start, vocab_size, options) for piece, start in pieces]
        return torch.cat(pieced, dim=1)

    return Rows(
        spec.loss(stats, labels, vocab_size, options),
        gradient_by(spec.gradient),
        spec.entropy(stats, labels, vocab_size, options),
        gradient_by(spec.entropy_gradient),
        spec.lse(stats, labels, options),
        spec.predictions(stats, labels, options),
    )


def _by_autograd(logits, labels, options, dtype=FP64):
    """Of rows with a finite column and labels inside the vocabulary, in ``dtype``."""
    leaf = logits.to(dtype, copy=True).requires_grad_()
    excluded, ignored = leaf.detach() == -INF, labels == options.ignore_index
    z = leaf.masked_fill(excluded, 0.0) * options.logit_scale
    if options.softcap is not None:
        z = options.softcap * torch.tanh(z / options.softcap)
    log_p = z.masked_fill(excluded, -INF).log_softmax(dim=1)
    lse = z.masked_fill(excluded, -INF).logsumexp(dim=1)
    nll = F.nll_loss(log_p, labels, ignore_index=options.ignore_index, reduction="none")
    uniform_nll = -log_p.masked_fill(excluded, 0.0).sum(dim=1) / logits.shape[1]
    if options.smoothing:
        # The log-probability of an excluded column is -inf, but still lse alone is to be differentiated.
        uniform_nll = uniform_nll + lse * excluded.sum(dim=1) / logits.shape[1]
    loss = (1 - options.smoothing) * nll + options.smoothing * uniform_nll + options.z_loss * lse.square()
    entropy = -(log_p.exp() * log_p.masked_fill(excluded, 0.0)).sum(dim=1)
    loss, entropy = loss.masked_fill(ignored, 0.0), entropy.masked_fill(ignored, 0.0)
    (gradient,) = torch.autograd.grad(loss.sum(), leaf, retain_graph=True)
    (entropy_gradient,) = torch.autograd.grad(entropy.sum(), leaf)
    if options.smoothing:
        loss = loss.masked_fill(excluded.any(dim=1) & ~ignored, INF)
    predictions = z.masked_fill(excluded, -INF).argmax(dim=1).masked_fill(ignored, -1)
    rows = (loss, gradient, entropy, entropy_gradient, lse.masked_fill(ignored, 0.0), predictions)
    return Rows(*(value.detach() for value in rows))


def _assert_equal(actual, expected, logits, options):
    """Equal up to the rounding of sums of terms as large as the logits and the z-loss."""
    largest = float(logits[logits.isfinite()].abs().max()) * max(options.logit_scale, 1)
    magnitude = 1 + largest + options.z_loss * largest**2
    for name, value, truth in zip(Rows._fields, actual, expected, strict=True):
        if name == "predictions":
            assert torch.equal(value, truth)
        else:
            assert_fp64_equal(value, truth, magnitude)


@BY_OPTION
@pytest.mark.parametrize("shards", [1, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_each_option_against_autograd(kind, shards, options):
    logits, labels = batch(kind, rows=ROWS, vocab_size=VOCAB, shards=shards, dtype=FP64)
    expected = _by_autograd(logits, labels, options)
    _assert_equal(_by_spec(logits, labels, options, shards), expected, logits, options)


def test_only_what_options_need_travels():
    """4 bytes a row and rank each."""
    names = ("row_max", "others_sum", "target_logit")
    assert PLAIN.statistics == LossOptions(7, 0.0, 0.1, 2.0, 30.0).statistics == names
    assert LossOptions(smoothing=0.1).statistics == (*names, "shifted_sum", "n_columns")
    assert LossOptions(entropy=True).statistics == (*names, "exp_shifted_sum")
    assert LossOptions(predictions=True).statistics == (*names, "argmax")
    assert ALL.statistics == spec.RowStats._fields


@BY_OPTION
def test_gradients_are_derivatives(options):
    logits, labels = batch("some_ignored", rows=5, vocab_size=8, dtype=FP64)
    rows = _by_spec(logits, labels, options, shards=2)
    for name in ("loss", "entropy"):

        def value_of(x, name=name):
            return getattr(_by_spec(x, labels, options, shards=2), name)

        leaf = logits.clone().requires_grad_()
        assert torch.autograd.gradcheck(value_of, leaf)
        (derived,) = torch.autograd.grad(value_of(leaf).sum(), leaf)
        assert_fp64_equal(derived, rows.gradient if name == "loss" else rows.entropy_gradient, 50.0)


@pytest.mark.parametrize("label_smoothing", [0.1, 1.0])
def test_megatron_smoothing_spreads_over_the_other_columns(label_smoothing):
    logits, labels = batch("peaked", rows=ROWS, vocab_size=VOCAB, dtype=FP64)
    nll = -logits.log_softmax(dim=1)
    at_label = nll.gather(1, labels.unsqueeze(1)).squeeze(1)
    others = (nll.sum(dim=1) - at_label) / (VOCAB - 1)
    expected = (1 - label_smoothing) * at_label + label_smoothing * others
    options = LossOptions(smoothing=label_smoothing * VOCAB / (VOCAB - 1))
    assert_fp64_equal(_by_spec(logits, labels, options, shards=3).loss, expected, float(nll.sum(1).max()))


@pytest.mark.parametrize("options", [PLAIN, LossOptions(smoothing=1.0), ALL], ids=["plain", "smooth", "all"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_training_dtypes_are_computed_in_fp32(kind, dtype, options):
    if kind == "times_1000" and dtype == torch.float16:
        pytest.skip("a thousand times the logits is past fp16's range")
    logits, labels = batch(kind, rows=ROWS, vocab_size=VOCAB, shards=2, dtype=dtype)
    truth = _by_autograd(logits, labels, options)
    peer = _by_autograd(logits, labels, options, dtype=torch.float32)
    actual = _by_spec(logits, labels, options, shards=2)
    for name in ("loss", "entropy", "lse"):
        assert_within_budget(*(getattr(rows, name) for rows in (actual, truth, peer)))
    gradients = [(rows.gradient, rows.gradient - rows.entropy_gradient) for rows in (actual, truth, peer)]
    for value, oracle, same_dtype in zip(*gradients, strict=True):
        assert_within_budget(value.to(dtype), oracle, same_dtype.to(dtype))


@pytest.mark.parametrize("smoothing", [0.1, 1.0])
def test_smoothing_keeps_its_digits_far_from_0(smoothing):
    """A mean of logits near -1000 loses three digits of a loss near 10; a mean of gaps does not."""
    logits, labels = batch("far_negative", rows=ROWS, vocab_size=VOCAB, shards=2)
    options = LossOptions(smoothing=smoothing)
    loss = _by_spec(logits, labels, options, shards=2).loss
    truth = _by_autograd(logits, labels, options).loss
    assert float(((loss - truth) / truth).abs().max()) < 4 * torch.finfo(torch.float32).eps


@pytest.mark.parametrize("temperature", [0.5, 3.0])
def test_a_temperature_is_a_scale_and_a_smaller_cap(temperature):
    logits, labels = batch("peaked", rows=ROWS, vocab_size=VOCAB, dtype=FP64)
    z = 20.0 * torch.tanh(1.5 * logits / 20.0) / temperature
    options = LossOptions(logit_scale=1.5 / temperature, softcap=20.0 / temperature)
    assert_fp64_equal(
        _by_spec(logits, labels, options, 2).loss, F.cross_entropy(z, labels, reduction="none"), 50.0
    )


@pytest.mark.parametrize("options", [PLAIN, ALL], ids=["plain", "all"])
@pytest.mark.parametrize("shards, columns", [(1, 61), (4, 64), (4, 72), (4, 80), (3, 180)])
def test_padding_takes_no_part(shards, columns, options):
    """A last shard that is partly padding, and shards that are nothing else."""
    logits, labels = batch("mixture", rows=ROWS, vocab_size=VOCAB, dtype=FP64)
    hostile = torch.tensor([NAN, INF, 1e30, -INF, 0.0], dtype=FP64).repeat(columns)[: columns - VOCAB]
    padded = torch.cat([logits, hostile.expand(ROWS, -1)], dim=1)
    actual = _by_spec(padded, labels, options, shards, vocab_size=VOCAB)
    for gradient in (actual.gradient, actual.entropy_gradient):
        assert torch.equal(gradient[:, VOCAB:], torch.zeros(ROWS, columns - VOCAB, dtype=FP64))
    actual = actual._replace(
        gradient=actual.gradient[:, :VOCAB], entropy_gradient=actual.entropy_gradient[:, :VOCAB]
    )
    _assert_equal(actual, _by_autograd(logits, labels, options), logits, options)


def test_a_shard_of_padding_is_the_empty_set():
    stats = spec.local_stats(torch.full((3, 5), NAN), torch.zeros(3, dtype=torch.int64), 60, 60, ALL)
    assert [tuple(row) for row in torch.stack(stats, dim=-1).tolist()] == [spec.IDENTITY] * 3


def test_padding_is_zero_in_rows_that_are_nan():
    logits = torch.full((2, 8), NAN, dtype=FP64)
    rows = _by_spec(logits, torch.tensor([1, 7]), ALL, 2, vocab_size=6)
    for gradient in (rows.gradient, rows.entropy_gradient):
        assert gradient[:, :6].isnan().all() and torch.equal(gradient[:, 6:], torch.zeros(2, 2, dtype=FP64))


@BY_OPTION
@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_a_row_that_is_not_finite_is_nan_in_every_output(bad, options):
    """Softcap would make a cap of +inf and a logit of -inf."""
    logits, labels = batch("peaked", rows=ROWS, vocab_size=VOCAB, dtype=FP64)
    logits[2] = logits[2] if bad != -INF else -INF
    logits[2, VOCAB // 2] = bad
    rows = _by_spec(logits, labels, options, shards=2)
    row_2 = torch.arange(ROWS) == 2
    for name in ("loss", "entropy"):
        assert torch.equal(getattr(rows, name).isnan(), row_2), name
        assert getattr(rows, name).isfinite().equal(~row_2), name
    assert rows.gradient[2].isnan().all() and rows.gradient[~row_2].isfinite().all()
    assert rows.entropy_gradient[~row_2].isfinite().all()
    assert rows.predictions[2] == -1 and bool((rows.predictions[~row_2] >= 0).all())


@pytest.mark.parametrize("bad", [NAN, INF])
def test_a_row_of_nan_is_nan_in_its_excluded_columns_too(bad):
    logits, labels = batch("excluded_columns", rows=2, vocab_size=VOCAB, dtype=FP64)
    logits[0, int(labels[0])] = bad
    rows = _by_spec(logits, labels, LossOptions(entropy=True), shards=2)
    for gradient in (rows.gradient, rows.entropy_gradient):
        assert gradient[0].isnan().all()
        assert torch.equal(gradient[1] == 0, logits[1] == -INF)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_statistics_that_are_not_wanted_change_none_that_are(options):
    logits, labels = batch("mixture", rows=ROWS, vocab_size=VOCAB, dtype=FP64)
    every = spec.local_stats(logits, labels, 0, VOCAB, options)
    wanted = spec.local_stats(logits, labels, 0, VOCAB, options, options.statistics)
    for name in options.statistics:
        assert torch.equal(getattr(wanted, name), getattr(every, name)), name


@pytest.mark.parametrize("label", [-1, VOCAB, VOCAB + 3])
def test_a_label_outside_the_vocabulary_is_nan_also_where_there_is_padding(label):
    logits, labels = batch("peaked", rows=ROWS, vocab_size=VOCAB + 4, dtype=FP64)
    labels = labels % VOCAB
    labels[4] = label
    rows = _by_spec(logits, labels, ALL, 2, vocab_size=VOCAB)
    row_4 = torch.arange(ROWS) == 4
    for value in (rows.loss, rows.entropy):
        assert torch.equal(value.isnan(), row_4)
    for gradient in (rows.gradient[:, :VOCAB], rows.entropy_gradient[:, :VOCAB]):
        assert torch.equal(gradient.isnan().all(dim=1), row_4) and gradient[~row_4].isfinite().all()


def test_ignored_rows_are_zero_in_every_output():
    logits, labels = batch("peaked", rows=ROWS, vocab_size=VOCAB, dtype=FP64)
    labels[:4] = -100
    logits[0], logits[1], logits[2] = NAN, -INF, INF
    rows = _by_spec(logits, labels, ALL, shards=2)
    for name, value in zip(Rows._fields, rows, strict=True):
        expected = torch.full_like(value[:4], -1 if name == "predictions" else 0)
        assert torch.equal(value[:4], expected), name
        assert value[4:].isfinite().all(), name


@pytest.mark.parametrize("shards", [1, 2, 5])
def test_the_first_of_equal_columns_is_predicted(shards):
    logits = torch.zeros(6, 10)
    for row, largest in enumerate([(0,), (9,), (4, 5), (7, 2, 9), (5, 6), ()]):
        logits[row, list(largest)] = 3.0
    labels = torch.zeros(6, dtype=torch.int64)
    predicted = _by_spec(logits, labels, LossOptions(predictions=True), shards).predictions
    assert predicted.tolist() == [0, 9, 4, 2, 5, 0]


def test_entropy_of_known_distributions():
    uniform, certain = torch.full((1, 64), -7.0, dtype=FP64), torch.zeros(1, 64, dtype=FP64)
    certain[0, 5] = 1e4
    halves = torch.full((1, 64), -INF, dtype=FP64)
    halves[0, [3, 60]] = 2.0
    logits = torch.cat([uniform, certain, halves])
    rows = _by_spec(logits, torch.tensor([0, 5, 3]), LossOptions(entropy=True), shards=4)
    expected = torch.tensor([math.log(64), 0.0, math.log(2)], dtype=FP64)
    assert_fp64_equal(rows.entropy, expected, 1.0)
    assert torch.equal(rows.entropy_gradient[1], torch.zeros(64, dtype=FP64))


@pytest.mark.parametrize("masked", [slice(0, 30), slice(30, 60), slice(1, 59)])
def test_columns_masked_with_the_lowest_number_are_as_good_as_excluded(masked):
    """Masks are often filled with finfo.min; the sum of a shard's is -inf, and -inf * 0 NaN."""
    logits, _ = batch("peaked", rows=ROWS, vocab_size=VOCAB)
    labels = torch.full((ROWS,), 0 if masked.start else 59)
    excluded, lowest = logits.clone(), logits.clone()
    excluded[:, masked], lowest[:, masked] = -INF, torch.finfo(torch.float32).min
    options = LossOptions(z_loss=0.01, entropy=True, predictions=True)
    expected = _by_spec(excluded, labels, options, shards=2)
    for name, value, want in zip(Rows._fields, _by_spec(lowest, labels, options, 2), expected, strict=True):
        assert torch.equal(value, want), name
