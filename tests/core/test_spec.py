"""The mathematics, from shards of the vocabulary: PyTorch's autograd over the whole of it, in fp64."""

from __future__ import annotations

import functools
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from tests.support.cases.inputs import KINDS, batch
from tests.support.cases.pairs import covering
from tests.support.cases.weights import weights
from tests.support.truth import oracle
from tests.support.truth.budget import assert_fp64_equal
from vocab_parallel_ce import spec
from vocab_parallel_ce.layout import compute_dtype
from vocab_parallel_ce.losses.labels import outputs_gradient
from vocab_parallel_ce.spec import PLAIN, GradOutputs, LossOptions

pytestmark = pytest.mark.reference

NAN, INF = float("nan"), float("inf")
ROWS, VOCAB = 10, 60
FP64 = torch.float64
ALL = LossOptions(
    -100, 0.1, 0.01, 0.5, 20.0, entropy=True, predictions=True, lse=True, sum_sq_probs=True, mean_logit=True
)
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
    "temperature": LossOptions(temperature=True, lse=True),
    "entropy": LossOptions(entropy=True),
    "outputs": LossOptions(lse=True, sum_sq_probs=True, mean_logit=True),
    "all": ALL,
}


class Rows(NamedTuple):
    """Per row: outputs, and the gradients of loss and entropy by the logits."""

    loss: Tensor
    gradient: Tensor
    entropy: Tensor
    entropy_gradient: Tensor
    lse: Tensor
    predictions: Tensor
    sum_sq_probs: Tensor
    mean_logit: Tensor
    lse_gradient: Tensor


def tensors_of(options, n_rows, n_columns):
    """``(class_weight, temperature)`` of options that ask for them: of the columns, and of the rows."""
    temperature = torch.rand(n_rows, generator=torch.Generator().manual_seed(0)) + 0.5
    return weights(n_columns) if options.class_weight else None, temperature if options.temperature else None


def with_tensors(options, labels, vocab_size, dtype):
    """The options of ``spec``, and the weights of the vocabulary in the dtype of its arithmetic."""
    weight, temperature = tensors_of(options, len(labels), vocab_size)
    dtype = compute_dtype(dtype)
    options = options._replace(temperature=None if temperature is None else temperature.to(dtype).unsqueeze(-1))
    return options, None if weight is None else weight.to(dtype)


def by_spec(logits, labels, options=PLAIN, shards=1, vocab_size=None):
    """From ``shards`` equal shards; columns at ``vocab_size`` and beyond are padding."""
    width = max(logits.shape[1] // shards, 1)
    vocab_size = logits.shape[1] if vocab_size is None else vocab_size
    options, weight = with_tensors(options, labels, vocab_size, logits.dtype)
    pieces = [(logits[:, start : start + width], start) for start in range(0, logits.shape[1], width)]
    own = [{} if weight is None else {"class_weight": weight[start : start + width]} for _, start in pieces]
    known = [
        spec.local_stats(piece, labels, start, vocab_size, options, **of)
        for (piece, start), of in zip(pieces, own, strict=True)
    ]
    stats = functools.reduce(spec.merge, known)

    def gradient_by(function, *grads):
        of_pieces = own if function is spec.gradient else [{}] * len(pieces)
        pieced = [
            function(piece, stats, labels, start, vocab_size, *grads, options, **of)
            for (piece, start), of in zip(pieces, of_pieces, strict=True)
        ]
        return torch.cat(pieced, dim=1)

    one = torch.ones_like(stats.row_max)
    return Rows(
        spec.loss(stats, labels, vocab_size, options),
        gradient_by(spec.gradient),
        spec.entropy(stats, labels, vocab_size, options),
        gradient_by(outputs_gradient, GradOutputs(entropy=one)),
        spec.lse(stats, labels, vocab_size, options),
        spec.predictions(stats, labels, options),
        spec.sum_sq_probs(stats, labels, vocab_size, options),
        spec.mean_logit(stats, labels, vocab_size, options),
        gradient_by(outputs_gradient, GradOutputs(lse=one)),
    )


def _by_oracle(logits, labels, options, dtype=FP64):
    leaf = logits.to(dtype, copy=True).requires_grad_()
    _, temperature = tensors_of(options, len(labels), logits.shape[1])
    computed = oracle.values(
        leaf,
        labels,
        temperature=1.0 if temperature is None else temperature,
        reduction="none",
        ignore_index=options.ignore_index,
        label_smoothing=options.smoothing,
        z_loss=options.z_loss,
        softcap=options.softcap,
        logit_scale=options.logit_scale,
    )
    (gradient,) = torch.autograd.grad(computed.loss.sum(), leaf, retain_graph=True)
    (entropy_gradient,) = torch.autograd.grad(computed.entropy.sum(), leaf, retain_graph=True)
    (lse_gradient,) = torch.autograd.grad(computed.lse.sum(), leaf)
    lse_gradient += 0 * entropy_gradient  # NaN beside +inf, where that of logsumexp is 0
    values = (computed.lse, computed.predictions, computed.sum_sq_probs, computed.mean_logit)
    loss, entropy, *values = (value.detach() for value in (computed.loss, computed.entropy, *values))
    return Rows(loss, gradient, entropy, entropy_gradient, *values, lse_gradient)


def _assert_equal(actual, expected, logits, options):
    """Equal up to the rounding of sums of terms as large as the logits and the z-loss."""
    largest = float(logits[logits.isfinite()].abs().max()) * max(options.logit_scale, 1)
    magnitude = 1 + largest + options.z_loss * largest**2
    for name, value, truth in zip(Rows._fields, actual, expected, strict=True):
        if name == "predictions":
            assert torch.equal(value, truth)
        else:
            assert_fp64_equal(value, truth, magnitude)


def test_only_what_options_need_travels():
    """4 bytes a row and rank each."""
    names = ("row_max", "others_sum", "target_logit")
    assert PLAIN.statistics == LossOptions(7, 0.0, 0.1, 2.0, 30.0).statistics == names
    assert LossOptions(smoothing=0.1).statistics == (*names, "shifted_sum", "n_columns")
    assert LossOptions(entropy=True).statistics == (*names, "exp_shifted_sum")
    assert LossOptions(predictions=True).statistics == (*names, "argmax")
    assert LossOptions(class_weight=True).statistics == (*names, "target_weight")
    assert LossOptions(lse=True).statistics == names
    assert LossOptions(mean_logit=True).statistics == (*names, "shifted_sum", "n_columns")
    assert LossOptions(sum_sq_probs=True).statistics == (*names, "sum_exp_sq")
    assert ALL._replace(class_weight=True).statistics == spec.RowStats._fields


@pytest.mark.parametrize("smoothing", [0.1, 1.0])
def test_smoothing_keeps_its_digits_far_from_0(smoothing):
    """A mean of logits near -1000 loses three digits of a loss near 10; a mean of shifted logits does not."""
    logits, labels = batch("far_negative", rows=ROWS, vocab_size=VOCAB, shards=2)
    options = LossOptions(smoothing=smoothing)
    loss, truth = by_spec(logits, labels, options, shards=2).loss, _by_oracle(logits, labels, options).loss
    assert float(((loss - truth) / truth).abs().max()) < 4 * torch.finfo(torch.float32).eps


CASES = covering(
    kind=tuple(KINDS),
    option=tuple(OPTIONS),
    ignore_index=(-100, -1, 7, VOCAB + 5),
    outside=(-1, VOCAB, VOCAB + 3, 2**31 - 1, -(2**31)),
    # (shards, columns): a last shard that is partly padding, and shards that are nothing else.
    cut=((1, 60), (2, 60), (1, 61), (4, 64), (4, 72), (4, 80), (3, 180)),
)


@pytest.mark.quick(12)
@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case.values())))
def test_hard_rows_of_padded_shards_against_autograd(case):
    """Ignored rows are 0, whatever they hold. Rows without a number, and labels outside, are NaN. Padding is unseen.

    A label among the padding was 0 on one rank and the log-sum-exp on several.
    """
    options = OPTIONS[case["option"]]._replace(ignore_index=case["ignore_index"])
    shards, columns = case["cut"]
    made = batch(case["kind"], rows=ROWS, vocab_size=VOCAB, shards=shards, dtype=FP64)
    edges = batch("peaked", rows=7, vocab_size=VOCAB, dtype=FP64)
    logits, labels = (torch.cat(both) for both in zip(edges, made, strict=True))
    labels[labels == -100] = case["ignore_index"]
    logits[0], logits[1], logits[2], labels[:3] = NAN, -INF, INF, case["ignore_index"]
    logits[3, VOCAB // 2], logits[4, VOCAB // 2], logits[5] = NAN, INF, -INF
    labels[6] = case["outside"]
    hostile = torch.tensor([NAN, INF, 1e30, -INF, 0.0], dtype=FP64).repeat(columns)[: columns - VOCAB]
    padded = torch.cat([logits, hostile.expand(len(logits), -1)], dim=1)
    actual = by_spec(padded, labels, options, shards, vocab_size=VOCAB)
    names = ("gradient", "entropy_gradient", "lse_gradient")
    for gradient in (getattr(actual, name) for name in names):
        assert torch.equal(gradient[:, VOCAB:], torch.zeros(len(logits), columns - VOCAB, dtype=FP64))
    gradients = {name: getattr(actual, name)[:, :VOCAB] for name in names}
    expected = _by_oracle(logits, labels, options)
    for name in ("lse", "mean_logit"):
        value = getattr(expected, name)
        expected = expected._replace(**{name: value.masked_fill(value == INF, NAN)})
    _assert_equal(actual._replace(**gradients), expected, logits, options)


@pytest.mark.parametrize("masked", [slice(0, 30), slice(30, 60), slice(1, 59)])
def test_columns_masked_with_the_lowest_number_are_as_good_as_excluded(masked):
    """Masks are often filled with finfo.min; the sum of a shard's is -inf, and -inf * 0 NaN."""
    logits, _ = batch("peaked", rows=ROWS, vocab_size=VOCAB)
    labels = torch.full((ROWS,), 0 if masked.start else 59)
    excluded, lowest = logits.clone(), logits.clone()
    excluded[:, masked], lowest[:, masked] = -INF, torch.finfo(torch.float32).min
    options = LossOptions(z_loss=0.01, entropy=True, predictions=True)
    expected = by_spec(excluded, labels, options, shards=2)
    for name, value, want in zip(Rows._fields, by_spec(lowest, labels, options, 2), expected, strict=True):
        if name == "gradient_of_others":
            value = value.masked_fill(excluded == -INF, 0.0)  # the mean has the lowest number's 1 / V
        assert torch.equal(value, want), name


def test_int32_labels_no_rows_and_arguments_that_stay_as_they_were():
    logits, labels = batch("mixture", rows=ROWS, vocab_size=VOCAB)
    before, versions = (logits.clone(), labels.clone()), (logits._version, labels._version)
    for narrow, wide in zip(by_spec(logits, labels.int(), ALL, 2), by_spec(logits, labels, ALL, 2), strict=True):
        torch.testing.assert_close(narrow, wide, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(logits, before[0]) and torch.equal(labels, before[1])
    assert (logits._version, labels._version) == versions
    rows = by_spec(torch.zeros(0, 6), torch.zeros(0, dtype=torch.int64), PLAIN, 2)
    assert rows.loss.shape == (0,) and rows.gradient.shape == (0, 6)
