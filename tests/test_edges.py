"""Rows at the edges of what logits, labels and factors may hold, for every loss over labels, mode and implementation.

All rows are of one call, so that each must leave the others alone.
"""

from functools import partial

import pytest
import torch

from tests.support.cases import linear
from tests.support.cases.inputs import IGNORE_INDEX, batch
from tests.support.cases.logits import (
    COLUMNS,
    DIFFERENTIABLE,
    EVERY,
    GRADIENTS,
    Results,
    assert_right,
    broad_rows,
    check,
    every_output,
    grads_of_every_output,
    random_grad_output,
    run,
)
from tests.support.cases.weights import weights
from tests.support.truth import oracle
from vocab_parallel_ce import token_log_probs, vocab_parallel_cross_entropy

pytestmark = [
    pytest.mark.usefixtures("unread_labels"),
    pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning"),  # of the interpreter, about infinities
]

NAN, INF = float("nan"), float("inf")
AT_LABEL, ALL, BESIDE = "at the label", "everywhere", "beside the label"
OUTSIDE = {torch.int64: 2**32 + 3, torch.int32: 2**31 - 1}  # in int32 the first would be 3
# What a row holds, where, its label if that is not random, and what its results are: those of "nothing" are NaN, except
# the lse and the mean.
ROWS = {
    "usual": (None, None, None, "numbers"),
    "NaN": (NAN, BESIDE, None, "NaN"),
    "NaN at the label": (NAN, AT_LABEL, None, "NaN"),
    "infinity": (INF, BESIDE, None, "NaN"),
    "infinity at the label": (INF, AT_LABEL, None, "NaN"),
    "NaN everywhere": (NAN, ALL, None, "NaN"),
    "nothing": (-INF, ALL, None, "nothing"),
    "an excluded column": (-INF, BESIDE, None, "numbers"),
    "an excluded label": (-INF, AT_LABEL, None, "numbers"),
    "ignored": (None, None, IGNORE_INDEX, "zeros"),
    "NaN, ignored": (NAN, ALL, IGNORE_INDEX, "zeros"),
    "infinity, ignored": (INF, BESIDE, IGNORE_INDEX, "zeros"),
    "nothing, ignored": (-INF, ALL, IGNORE_INDEX, "zeros"),
    "a negative label": (None, None, -1, "outside"),
    "the label after the last": (None, None, "V", "outside"),
    "a label far outside": (None, None, "far", "outside"),
    "a class of weight 0": (None, None, "weight 0", "numbers"),
    "an excluded class of weight 0": (-INF, AT_LABEL, "weight 0", "numbers"),
    "NaN, a class of weight 0": (NAN, BESIDE, "weight 0", "NaN"),
    "infinity, a class of weight 0": (INF, BESIDE, "weight 0", "NaN"),
    "nothing, a class of weight 0": (-INF, ALL, "weight 0", "nothing"),
    "a class of a negative weight": (None, None, "weight < 0", "numbers"),
    "the last, broad": (None, None, None, "numbers"),
}
KINDS = [kind for *_, kind in ROWS.values()]


def edges(columns=COLUMNS, dtype=torch.int64):
    """``(logits, labels)`` of :data:`ROWS`."""
    logits, labels = broad_rows("peaked", len(ROWS), columns)
    known = {"V": columns, "far": OUTSIDE[dtype], "weight 0": columns // 3, "weight < 0": columns // 4}
    for row, (value, where, label, _) in enumerate(ROWS.values()):
        if label is not None:
            labels[row] = known.get(label, label)
        if value is not None:
            inside = int(labels[row].clamp(0, columns - 1))
            at = {ALL: slice(None), AT_LABEL: inside, BESIDE: (inside + 1) % columns}[where]
            logits[row, at] = value
    return logits, labels.to(dtype)


def rows_of(*kinds):
    return [row for row, kind in enumerate(KINDS) if kind in kinds]


CALLS = {
    "loss": {"reduction": "none"},
    "every option": {"reduction": "none", **EVERY},
    "smoothing": {"reduction": "none", "label_smoothing": 0.1},
    "class weights": {"reduction": "none", "class_weight": True, "z_loss": 0.02},
    "class weights and smoothing": {"reduction": "none", "class_weight": True, "label_smoothing": 0.1},
    "log-probabilities": {"function": every_output},
    "log-probabilities of a cap": {"function": every_output, "softcap": 10.0, "logit_scale": 0.4, "temperature": 0.7},
}
WIDTHS = ((COLUMNS, 0, NAN), (33, 15, NAN), (129, 171, INF), (128, 8, 1e30))  # columns, padding and what it holds


# Log-probabilities are not written in the forward pass.
WAYS = [(name, way) for name in CALLS for way in GRADIENTS if "function" not in CALLS[name] or way != "in_forward"]


@pytest.mark.quick(4)
@pytest.mark.interpreted(len(WAYS))
@pytest.mark.parametrize(("name", "gradient"), WAYS)
def test_rows(impl_device, name, gradient):
    of_widths = WIDTHS if impl_device != ("triton", "cpu") else WIDTHS[len(name) % 4 :][:1]
    for index, (columns, padding, fill) in enumerate(of_widths):
        options = CALLS[name] | {"gradient": gradient}
        if "class_weight" in options:
            options["class_weight"] = weights(columns)
        logits, labels = edges(columns, (torch.int64, torch.int32)[index % 2])
        grads = [random_grad_output(len(ROWS))]
        if "function" in options:
            grads = grads_of_every_output(len(ROWS))
        for grad in grads:
            grad[rows_of("zeros")] = (INF, NAN)[index % 2]
        on_device = {n: v.to(impl_device[1]) if torch.is_tensor(v) else v for n, v in options.items()}
        found = run(impl_device, logits, labels, *grads, padding=padding, fill=fill, **on_device)
        assert_rows(found, logits, labels, grads, **options)


def assert_rows(found, logits, labels, grads, **options):
    columns = logits.shape[1]
    usual, nans, zeros, nothing = map(rows_of, ("numbers", "NaN", "zeros", "nothing"))
    outputs, predictions = found.outputs, None
    if "function" in options:
        *outputs, predictions = outputs
        outputs[3] = outputs[3] - 1  # sum_sq_probs, as it is
    for result in (*outputs, found.grad[:, :columns]):
        rows = result.view(len(ROWS), -1)
        assert rows[nans].isnan().all() and rows[rows_of("outside")].isnan().all()
        assert not rows[zeros].any() and not rows[zeros].signbit().any()
        assert not rows[usual].isnan().any()
    assert found.grad[usual].isfinite().all() and not found.grad[:, columns:].any()
    assert not found.grad[:, :columns][logits.isneginf() & torch.tensor([[kind == "numbers"] for kind in KINDS])].any()
    assert found.grad[nothing, :columns].isnan().all() and outputs[0][nothing].isnan().all()
    if predictions is not None:
        known = rows_of("numbers", "outside")
        assert torch.equal(predictions[known], logits[known].argmax(-1))
        assert (predictions[rows_of("NaN", "zeros", "nothing")] == -1).all()
        for lse_and_mean in outputs[4][nothing], outputs[2][nothing]:
            assert lse_and_mean.isneginf().all()
    of_usual = Results(tuple(output[usual] for output in found.outputs), found.grad[usual, :columns])
    assert_right(of_usual, logits[usual], labels[usual], *(grad[usual] for grad in grads), **options)


@pytest.mark.interpreted(2)
@pytest.mark.parametrize("gradient", GRADIENTS)
@pytest.mark.parametrize("reduction", ("mean", "sum"))
def test_reduced(impl_device, reduction, gradient):
    """Ignored rows add nothing. Any other makes the loss NaN, and its own gradient."""
    every, labels = edges()
    options = {"reduction": reduction, "gradient": gradient}
    rows = [row for row in rows_of("numbers", "zeros") if row != list(ROWS).index("an excluded label")]
    rows.remove(list(ROWS).index("an excluded class of weight 0"))
    check(impl_device, every[rows], labels[rows], torch.tensor(0.75), **options)
    (loss,), grad = run(impl_device, every, labels, **options)
    is_nan = [kind in ("NaN", "nothing", "outside") for kind in KINDS]
    assert loss.isnan() and grad.isnan().all(1).tolist() == grad.isnan().any(1).tolist() == is_nan
    for none in (labels * 0 + IGNORE_INDEX, labels[:0]):
        (loss,), grad = run(impl_device, every[: len(none)], none, **options)
        assert loss == 0 and not grad.any()


ITEMS = (0, torch.tensor(0), torch.tensor(0.0), torch.tensor([0], dtype=torch.int32))


@pytest.mark.interpreted(4)
@pytest.mark.parametrize("reduction", ("mean", "sum"))
@pytest.mark.parametrize("name", (None, *DIFFERENTIABLE))
def test_a_divisor_of_0_takes_the_loss_and_its_gradient_alone(impl_device, name, reduction):
    """Whatever the rows hold, and whatever multiplies the loss. An output keeps its values and its gradient."""
    impl, device = impl_device
    every, labels = edges()
    usual = rows_of("numbers", "zeros")
    for index, gradient in enumerate(("auto", *GRADIENTS)):
        if gradient == "in_forward" and name is not None:
            continue
        options = {"reduction": reduction, "gradient": gradient, "num_items": ITEMS[index]}
        options |= {"outputs": ("predictions", *([name] if name else []))}
        (loss, *_), grad = run(impl_device, every, labels, torch.tensor(INF), **options)
        assert loss == 0 and not grad.any()
        leaf = every[usual].to(device).requires_grad_()
        found = vocab_parallel_cross_entropy(leaf * 1, labels[usual].to(device), impl=impl, **options)
        exact = every[usual].double().requires_grad_()
        truth = oracle.values(exact, labels[usual])
        assert torch.equal(found.predictions.cpu(), truth.predictions)
        if name is not None:
            output, true = getattr(found, name), getattr(truth, name)
            factor = (true.detach().isfinite()).float()  # the mean of an excluded column is none
            (found.loss * INF + (output.nan_to_num(0, 0, 0) * factor.to(device)).sum()).backward()
            (true.nan_to_num(0, 0, 0) * factor).sum().backward()
            torch.testing.assert_close(output.detach().cpu().double(), true.detach(), rtol=1e-5, atol=1e-6)
            torch.testing.assert_close(leaf.grad.cpu().double(), exact.grad, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("gradient", GRADIENTS)
def test_class_weights_that_sum_to_0(impl_device, gradient):
    """A mean of 0; PyTorch's is NaN. A label outside has no weight, and must not vanish with the others."""
    logits, labels = broad_rows("peaked", 3)
    weight = torch.zeros(COLUMNS, device=impl_device[1])
    for smoothing in (0.0, 0.1):
        options = {"class_weight": weight, "gradient": gradient, "label_smoothing": smoothing}
        (loss,), grad = run(impl_device, logits, labels, **options)
        assert loss == 0 and not grad.any()
        (loss,), grad = run(impl_device, logits, torch.tensor([1, COLUMNS, 2]), **options)
        assert loss.isnan() and grad[1].isnan().all()
    weight[1] = INF  # NaN, as PyTorch's
    (loss,), grad = run(impl_device, logits, torch.tensor([1, 0, 2]), class_weight=weight, gradient=gradient)
    assert loss.isnan() and grad[0].isnan().all()


@pytest.mark.interpreted(2)
@pytest.mark.parametrize("options", ({}, {"logit_scale": 0.5}, {"softcap": 10.0, "logit_scale": 0.4}), ids=str)
def test_what_is_no_temperature(impl_device, options):
    """NaN, except where ignored."""
    impl, device = impl_device
    bad = torch.tensor([NAN, INF, 0.0, -0.7, -INF, 0.7], device=device)
    logits, labels = broad_rows("peaked", 12)
    labels[:6] = IGNORE_INDEX
    leaf = (logits - 90.0).to(device).requires_grad_()  # all negative: none is +inf divided by 0
    call = partial(token_log_probs, impl=impl, temperature=bad.repeat(2), outputs=(*DIFFERENTIABLE, "predictions"))
    found = call(leaf * 1, labels.to(device), **options)
    differentiable = found.log_probs, *(getattr(found, name) for name in DIFFERENTIABLE)
    torch.autograd.backward(differentiable, [torch.ones(12, device=device)] * len(differentiable))
    for values in (*differentiable, leaf.grad):
        values = values.view(12, -1)
        assert not values[:6].any() and values[6:11].isnan().all() and values[11].isfinite().all()
    assert (found.predictions[:11] == -1).all() and found.predictions[11] >= 0


@pytest.mark.interpreted(2)
@pytest.mark.parametrize(("rows", "gradient"), [*zip((128, 129, 300), GRADIENTS, strict=True)])
def test_more_rows_than_a_program_sums(impl_device, rows, gradient):
    logits, labels = batch("some_ignored", rows=rows, vocab_size=9)
    for reduction in ("mean", "sum"):
        check(impl_device, logits, labels, reduction=reduction, gradient=gradient)


@pytest.mark.interpreted(1)
@pytest.mark.parametrize("reduction", ("mean", "none"))
def test_chunks_of_as_many_tokens_as_are_exchanged_at_once(impl_device, reduction):
    """128 tokens are not halved, and 129 are."""
    inputs = linear.many_tokens(257, COLUMNS)
    for chunk_size in (128, 129):
        linear.check(impl_device, inputs, reduction=reduction, chunk_size=chunk_size)
