"""The mathematics, from shards of the vocabulary: PyTorch's autograd over the whole of it, in fp64."""

from __future__ import annotations

import functools
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.support import oracle
from tests.support.budget import assert_fp64_equal, assert_within_budget
from tests.support.inputs import DTYPES, KINDS, batch
from tests.support.pairs import covering
from vocab_parallel_ce import spec
from vocab_parallel_ce.spec import PLAIN, LossOptions

pytestmark = pytest.mark.reference

NAN, INF = float("nan"), float("inf")
ROWS, VOCAB = 10, 60
FP64 = torch.float64
ALL = LossOptions(-100, 0.1, 0.01, 0.5, 20.0, entropy=True, predictions=True)
OPTIONS = {
    "plain": PLAIN,
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
    """Per row: outputs, and the gradients of loss and entropy by the logits."""

    loss: Tensor
    gradient: Tensor
    entropy: Tensor
    entropy_gradient: Tensor
    lse: Tensor
    predictions: Tensor


def _by_spec(logits, labels, options=PLAIN, shards=1, vocab_size=None):
    """From ``shards`` equal shards; columns at ``vocab_size`` and beyond are padding."""
    width = max(logits.shape[1] // shards, 1)
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


def _by_oracle(logits, labels, options, dtype=FP64):
    leaf = logits.to(dtype, copy=True).requires_grad_()
    computed = oracle.values(
        leaf,
        labels,
        reduction="none",
        ignore_index=options.ignore_index,
        label_smoothing=options.smoothing,
        z_loss=options.z_loss,
        softcap=options.softcap,
        logit_scale=options.logit_scale,
    )
    (gradient,) = torch.autograd.grad(computed.loss.sum(), leaf, retain_graph=True)
    (entropy_gradient,) = torch.autograd.grad(computed.entropy.sum(), leaf)
    loss, entropy = computed.loss.detach(), computed.entropy.detach()
    return Rows(loss, gradient, entropy, entropy_gradient, computed.lse, computed.predictions)


def _assert_equal(actual, expected, logits, options):
    """Equal up to the rounding of sums of terms as large as the logits and the z-loss."""
    largest = float(logits[logits.isfinite()].abs().max()) * max(options.logit_scale, 1)
    magnitude = 1 + largest + options.z_loss * largest**2
    for name, value, truth in zip(Rows._fields, actual, expected, strict=True):
        if name == "predictions":
            assert torch.equal(value, truth)
        else:
            assert_fp64_equal(value, truth, magnitude)


CASES = covering(kind=tuple(KINDS), option=tuple(OPTIONS), shards=(1, 2, 3, 4))


@pytest.mark.quick(12)
@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case.values())))
def test_shards_and_options_against_autograd(case):
    options, shards = OPTIONS[case["option"]], case["shards"]
    logits, labels = batch(case["kind"], rows=ROWS, vocab_size=VOCAB, shards=shards, dtype=FP64)
    expected = _by_oracle(logits, labels, options)
    _assert_equal(_by_spec(logits, labels, options, shards), expected, logits, options)


@pytest.mark.quick
@pytest.mark.parametrize("label_smoothing", [0.0, 0.1, 1.0])
def test_pytorch_agrees_with_no_oracle_between(label_smoothing):
    logits, labels = batch("some_ignored", rows=ROWS, vocab_size=VOCAB, dtype=FP64)
    leaf = logits.clone().requires_grad_()
    expected = F.cross_entropy(leaf, labels, label_smoothing=label_smoothing, reduction="none")
    expected.sum().backward()
    rows = _by_spec(logits, labels, LossOptions(smoothing=label_smoothing), shards=3)
    assert_fp64_equal(rows.loss, expected.detach(), 50.0)
    assert_fp64_equal(rows.gradient, leaf.grad, 50.0)


def test_only_what_options_need_travels():
    """4 bytes a row and rank each."""
    names = ("row_max", "others_sum", "target_logit")
    assert PLAIN.statistics == LossOptions(7, 0.0, 0.1, 2.0, 30.0).statistics == names
    assert LossOptions(smoothing=0.1).statistics == (*names, "shifted_sum", "n_columns")
    assert LossOptions(entropy=True).statistics == (*names, "exp_shifted_sum")
    assert LossOptions(predictions=True).statistics == (*names, "argmax")
    assert ALL.statistics == spec.RowStats._fields


@pytest.mark.parametrize("name", ["plain", "all megatron smoothing", "softcap and logit_scale", "all"])
def test_gradients_are_derivatives(name):
    options = OPTIONS[name]
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


DTYPE_CASES = covering(kind=tuple(KINDS), dtype=DTYPES, option=("plain", "all torch smoothing", "all"))


@pytest.mark.parametrize("case", DTYPE_CASES, ids=lambda case: "-".join(map(str, case.values())))
def test_training_dtypes_are_computed_in_fp32(case):
    kind, dtype, options = case["kind"], case["dtype"], OPTIONS[case["option"]]
    if kind == "times_1000" and dtype == torch.float16:
        pytest.skip("a thousand times the logits is past fp16's range")
    logits, labels = batch(kind, rows=ROWS, vocab_size=VOCAB, shards=2, dtype=dtype)
    truth, peer = (_by_oracle(logits, labels, options, made) for made in (FP64, torch.float32))
    actual = _by_spec(logits, labels, options, shards=2)
    for name in ("loss", "entropy", "lse"):
        assert_within_budget(*(getattr(rows, name) for rows in (actual, truth, peer)))
    gradients = [(rows.gradient, rows.gradient - rows.entropy_gradient) for rows in (actual, truth, peer)]
    for value, expected, same_dtype in zip(*gradients, strict=True):
        assert_within_budget(value.to(dtype), expected, same_dtype.to(dtype))


@pytest.mark.parametrize("smoothing", [0.1, 1.0])
def test_smoothing_keeps_its_digits_far_from_0(smoothing):
    """A mean of logits near -1000 loses three digits of a loss near 10; a mean of shifted logits does not."""
    logits, labels = batch("far_negative", rows=ROWS, vocab_size=VOCAB, shards=2)
    options = LossOptions(smoothing=smoothing)
    loss, truth = _by_spec(logits, labels, options, shards=2).loss, _by_oracle(logits, labels, options).loss
    assert float(((loss - truth) / truth).abs().max()) < 4 * torch.finfo(torch.float32).eps


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
    gradients = {"gradient": actual.gradient[:, :VOCAB], "entropy_gradient": actual.entropy_gradient[:, :VOCAB]}
    _assert_equal(actual._replace(**gradients), _by_oracle(logits, labels, options), logits, options)


def test_a_shard_of_padding_is_the_empty_set_and_padding_is_zero_in_rows_that_are_nan():
    stats = spec.local_stats(torch.full((3, 5), NAN), torch.zeros(3, dtype=torch.int64), 60, 60, ALL)
    assert [tuple(row) for row in torch.stack(stats, dim=-1).tolist()] == [spec.IDENTITY] * 3
    rows = _by_spec(torch.full((2, 8), NAN, dtype=FP64), torch.tensor([1, 7]), ALL, 2, vocab_size=6)
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


def test_excluded_columns_have_zero_gradient_unless_their_row_is_nan():
    logits, labels = batch("excluded_columns", rows=ROWS, vocab_size=VOCAB, shards=2, dtype=FP64)
    excluded = logits == -INF
    logits[0, int(labels[0])] = NAN
    for options in (PLAIN, LossOptions(smoothing=0.1, entropy=True)):
        rows = _by_spec(logits, labels, options, 2)
        for gradient in (rows.gradient, rows.entropy_gradient):
            assert gradient[0].isnan().all() and gradient[1:].isfinite().all()
            assert not gradient[1:][excluded[1:]].any()
    rows = _by_spec(torch.tensor([[-INF, 1.0, 2.0, 0.0]], dtype=FP64), torch.tensor([0]), PLAIN, 2)
    assert rows.loss.item() == INF and rows.gradient.isfinite().all()


@pytest.mark.parametrize("options", [PLAIN, ALL], ids=["plain", "all"])
@pytest.mark.parametrize("label", [-1, VOCAB, VOCAB + 3, 2**31 - 1, -(2**31)])
def test_a_label_outside_the_vocabulary_is_nan_also_among_padding(label, options):
    """Not 0 on one rank and the log-sum-exp on several."""
    logits, labels = batch("peaked", rows=ROWS, vocab_size=VOCAB + 4, dtype=FP64)
    labels = labels % VOCAB
    labels[4] = label
    row_4 = torch.arange(ROWS) == 4
    for shards in (1, 2, 4):
        rows = _by_spec(logits, labels, options, shards, vocab_size=VOCAB)
        assert torch.equal(rows.loss.isnan(), row_4) and torch.equal(rows.entropy.isnan(), row_4)
        for gradient in (rows.gradient[:, :VOCAB], rows.entropy_gradient[:, :VOCAB]):
            assert torch.equal(gradient.isnan().all(dim=1), row_4) and gradient[~row_4].isfinite().all()


@pytest.mark.parametrize("ignore_index", [-100, -1, 7, VOCAB + 5])
def test_ignored_rows_are_zero_in_every_output_whatever_they_hold(ignore_index):
    logits, labels = batch("peaked", rows=ROWS, vocab_size=VOCAB, dtype=FP64)
    labels[labels == ignore_index] = 8
    labels[:4] = ignore_index
    logits[0], logits[1], logits[2] = NAN, -INF, INF
    rows = _by_spec(logits, labels, ALL._replace(ignore_index=ignore_index), shards=2)
    for name, value in zip(Rows._fields, rows, strict=True):
        expected = torch.full_like(value[:4], -1 if name == "predictions" else 0)
        assert torch.equal(value[:4], expected), name
        assert value[4:].isfinite().all(), name
    assert bool((rows.loss[4:] > 0).all()) and bool((rows.gradient[4:] != 0).any(1).all())


@pytest.mark.parametrize("shards", [1, 2, 5])
def test_the_first_of_equal_columns_is_predicted(shards):
    logits = torch.zeros(6, 10)
    for row, largest in enumerate([(0,), (9,), (4, 5), (7, 2, 9), (5, 6), ()]):
        logits[row, list(largest)] = 3.0
    labels = torch.zeros(6, dtype=torch.int64)
    predicted = _by_spec(logits, labels, LossOptions(predictions=True), shards).predictions
    assert predicted.tolist() == [0, 9, 4, 2, 5, 0]


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


def test_int32_labels_no_rows_and_arguments_that_stay_as_they_were():
    logits, labels = batch("mixture", rows=ROWS, vocab_size=VOCAB)
    before, versions = (logits.clone(), labels.clone()), (logits._version, labels._version)
    for narrow, wide in zip(_by_spec(logits, labels.int(), ALL, 2), _by_spec(logits, labels, ALL, 2), strict=True):
        torch.testing.assert_close(narrow, wide, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(logits, before[0]) and torch.equal(labels, before[1])
    assert (logits._version, labels._version) == versions
    rows = _by_spec(torch.zeros(0, 6), torch.zeros(0, dtype=torch.int64), PLAIN, 2)
    assert rows.loss.shape == (0,) and rows.gradient.shape == (0, 6)
