"""Loss and gradient through the public function: shapes, labels, grad_outputs, and hard rows."""

from __future__ import annotations

import warnings

import pytest
import torch

from tests.support.budget import assert_within_budget
from tests.support.inputs import DTYPES, IGNORE_INDEX, KINDS, batch, upstream_gradients
from tests.support.layouts import label_layouts
from tests.support.oracle import cross_entropy_fp64, cross_entropy_same_dtype
from vocab_parallel_ce import vocab_parallel_cross_entropy

COLUMNS = 21
REDUCTIONS = ("mean", "sum", "none")
GRADIENTS = ("in_forward", "in_backward", "out_of_place")
NAN, INF = float("nan"), float("inf")


def _loss_and_grad(impl_device, logits, labels, grad_output=None, **options):
    impl, device = impl_device
    leaf = logits.to(device).requires_grad_()
    loss = vocab_parallel_cross_entropy(leaf, labels.to(device), impl=impl, **options)
    loss.backward(torch.ones_like(loss) if grad_output is None else grad_output.to(device))
    return loss.detach(), leaf.grad


def _check(impl_device, logits, labels, grad_output=None, *, gradient="auto", **options):
    """Loss and gradient are the oracle's; ``logits`` are copied before."""
    loss, grad = _loss_and_grad(
        impl_device, logits.clone(), labels, grad_output, gradient=gradient, **options
    )
    grad_output = None if grad_output is None else grad_output.cpu()
    oracle = cross_entropy_fp64(logits, labels, grad_output=grad_output, **options)
    peer = cross_entropy_same_dtype(logits, labels, grad_output=grad_output, **options)
    assert_within_budget(loss, oracle.loss, peer.loss)
    assert_within_budget(grad, oracle.grad, peer.grad)
    return loss, grad


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("leading", [(4,), (2, 3), (2, 1, 3), (1, 1), (1,)])
def test_reduced_losses_are_scalars_and_others_have_the_labels_shape(impl_device, leading, dtype):
    """Shape (1,) instead of () defeats the comparison with a scalar 1."""
    rows = torch.Size(leading).numel()
    logits, labels = batch("peaked", rows=rows, vocab_size=COLUMNS, dtype=dtype)
    logits, labels = logits.view(*leading, COLUMNS), labels.view(leading)
    for reduction in REDUCTIONS:
        loss, grad = _loss_and_grad(impl_device, logits.clone(), labels, reduction=reduction)
        assert loss.shape == (torch.Size(leading) if reduction == "none" else torch.Size([]))
        assert loss.dtype == torch.float32
        assert grad.shape == logits.shape and grad.dtype == dtype


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_no_rows(impl_device, reduction):
    logits, labels = torch.zeros(0, 3, COLUMNS), torch.zeros(0, 3, dtype=torch.int64)
    loss, grad = _loss_and_grad(impl_device, logits, labels, reduction=reduction)
    assert loss.shape == ((0, 3) if reduction == "none" else ())
    assert loss.sum().item() == 0.0 and grad.shape == logits.shape


@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
@pytest.mark.parametrize("kind", KINDS)
def test_hard_rows(impl_device, kind, label_smoothing):
    logits, labels = batch(kind, rows=10, vocab_size=COLUMNS)
    grad_output = dict(upstream_gradients((10,)))["random"]
    _check(impl_device, logits, labels, grad_output, reduction="none", label_smoothing=label_smoothing)


@pytest.mark.parametrize("kind", KINDS)
def test_full_smoothing(impl_device, kind):
    """Also in rows far from 0, where the fp32 sum of a row's logits would hold no digit of the loss."""
    logits, labels = batch(kind, rows=9, vocab_size=COLUMNS)
    grad_output = dict(upstream_gradients((9,)))["random"]
    _check(impl_device, logits, labels, grad_output, reduction="none", label_smoothing=1)


def test_a_long_sum_is_accumulated_in_fp32(impl_device):
    """A bf16 accumulator stops growing at 256 times its terms."""
    impl, device = impl_device
    rows = 48 if device == "cpu" and impl == "triton" else 8192
    logits, labels = batch("far_negative", rows=rows, vocab_size=8, dtype=torch.bfloat16)
    loss, _ = _check(impl_device, logits, labels, reduction="sum")
    assert loss.dtype == torch.float32


@pytest.mark.parametrize("columns", [1000, 1025])
def test_columns_beyond_the_last_add_nothing(impl_device, columns):
    """Padding that counts as a logit of 0 shows where logits are small."""
    logits, labels = batch("peaked", rows=2, vocab_size=columns)
    _check(impl_device, logits * 1e-3 - 5, labels, label_smoothing=0.1)


def test_one_column(impl_device):
    """A shard of one column has stride 0 or anything in its last dimension."""
    base = torch.randn(4, 3)
    labels = torch.tensor([0, 0, IGNORE_INDEX, 0])
    for logits in (base[:, :1], base[:, 1:2].clone(), base[:1, :1].expand(4, 1)):
        loss, grad = _loss_and_grad(impl_device, logits.detach(), labels, reduction="sum")
        assert loss.item() == 0.0 and torch.equal(grad.cpu(), torch.zeros(4, 1))


@pytest.mark.parametrize("shape", [(2, 3), (1, 4), (4, 1)])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_labels_of_every_layout_and_width(impl_device, reduction, shape):
    """Shifted labels are not evenly spaced, nor on a 16-byte boundary; a size of 1 has any stride."""
    rows = torch.Size(shape).numel()
    logits, labels = batch("some_ignored", rows=rows, vocab_size=COLUMNS)
    logits, labels = logits.view(*shape, COLUMNS), labels.view(shape)
    impl, device = impl_device
    grad_output = torch.randn(shape).to(device) if reduction == "none" else None
    results = []
    for name, view in label_layouts(labels.to(device)):
        before, version = view.clone(), view._version
        leaf = logits.clone().to(device).requires_grad_()
        loss = vocab_parallel_cross_entropy(leaf, view, impl=impl, reduction=reduction)
        loss.backward(grad_output)
        assert torch.equal(view, before) and view._version == version, name
        results.append((name, loss, leaf.grad))
    for name, loss, grad in results:
        assert torch.equal(loss, results[0][1]) and torch.equal(grad, results[0][2]), name


@pytest.mark.parametrize("ignore_index", [-1, 0, 7, COLUMNS + 5])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_any_ignore_index(impl_device, reduction, ignore_index):
    """Also one inside the vocabulary, whose column is then a logit like any other."""
    logits, labels = batch("peaked", rows=8, vocab_size=COLUMNS)
    labels[::3] = ignore_index
    _check(impl_device, logits, labels, reduction=reduction, ignore_index=ignore_index)


def test_an_ignore_index_that_the_labels_cannot_hold_ignores_nothing(impl_device):
    """Compared in int32, 2**32 + 3 is 3."""
    logits, labels = batch("peaked", rows=3, vocab_size=COLUMNS)
    labels[1] = 3
    for reduction in ("mean", "none"):
        expected = _loss_and_grad(impl_device, logits.clone(), labels, reduction=reduction)
        actual = _loss_and_grad(
            impl_device, logits.clone(), labels.int(), reduction=reduction, ignore_index=2**32 + 3
        )
        assert torch.equal(actual[0], expected[0]) and torch.equal(actual[1], expected[1])


@pytest.mark.parametrize("bad", [NAN, INF])
def test_ignored_rows_hide_what_they_hold(impl_device, bad):
    """Padding may be uninitialised: its gradient is 0, not 0 * NaN."""
    logits, labels = batch("peaked", rows=6, vocab_size=COLUMNS)
    logits[0, 3], labels[0] = bad, IGNORE_INDEX
    logits[4], labels[4] = bad, IGNORE_INDEX
    for reduction in REDUCTIONS:
        for gradient in GRADIENTS:
            _check(impl_device, logits, labels, reduction=reduction, gradient=gradient)


@pytest.mark.parametrize("gradient", GRADIENTS)
@pytest.mark.parametrize("bad", [NAN, INF])
def test_ignored_rows_have_zero_gradient_whatever_comes_from_upstream(impl_device, gradient, bad):
    """A caller that divides by a row's weight has 0 / 0 where a row is ignored."""
    logits, labels = batch("peaked", rows=4, vocab_size=COLUMNS)
    labels[2] = IGNORE_INDEX
    grad_output = torch.tensor([1.0, 2.0, bad, -0.5])
    _check(impl_device, logits, labels, grad_output, reduction="none", gradient=gradient)


@pytest.mark.parametrize("label", [-1, COLUMNS, 2**31 - 1, -(2**31)])
@pytest.mark.parametrize("label_dtype", [torch.int64, torch.int32])
def test_a_label_outside_the_vocabulary_is_nan(impl_device, label, label_dtype):
    logits, labels = batch("peaked", rows=5, vocab_size=COLUMNS)
    labels[1] = label
    for gradient in GRADIENTS:
        loss, grad = _check(impl_device, logits, labels.to(label_dtype), reduction="none", gradient=gradient)
        assert loss.isnan().tolist() == [False, True, False, False, False]
        assert grad.isnan().any(dim=1).tolist() == loss.isnan().tolist()


def test_checked_labels_are_counted_and_the_first_is_named(impl_device):
    impl, device = impl_device
    logits = torch.randn(2, 3, COLUMNS, device=device).requires_grad_()
    labels = torch.tensor([[0, 5, IGNORE_INDEX], [COLUMNS - 1, COLUMNS, -1]], device=device)
    before = logits.detach().clone()
    message = rf"labels: must be in \[0, {COLUMNS}\) .*2 outside.*\(1, 1\): {COLUMNS}$"
    with pytest.raises(ValueError, match=f"^{message}"):
        vocab_parallel_cross_entropy(logits, labels, impl=impl, check_labels=True)
    assert torch.equal(logits, before) and logits._version == 0
    labels[1, 1:] = IGNORE_INDEX
    loss = vocab_parallel_cross_entropy(logits, labels, impl=impl, check_labels=True)
    assert loss.isfinite()


@pytest.mark.parametrize("gradient", GRADIENTS)
@pytest.mark.parametrize("shape", [(6,), (2, 3)])
def test_upstream_gradients_of_every_layout(impl_device, shape, gradient):
    """One value for all rows, a stride of 0 or a transposed view must not be read as dense memory."""
    logits, labels = batch("mixture", rows=6, vocab_size=COLUMNS)
    logits, labels = logits.view(*shape, COLUMNS), labels.view(shape)
    for name, grad_output in upstream_gradients(shape, impl_device[1]):
        before = grad_output.clone()
        _check(impl_device, logits, labels, grad_output, reduction="none", gradient=gradient)
        assert torch.equal(grad_output, before), name


@pytest.mark.parametrize("gradient", GRADIENTS)
def test_losses_are_summed_transposed_and_masked_by_the_caller(impl_device, gradient):
    """What training loops do with an unreduced loss: each hands backward another kind of tensor."""
    impl, device = impl_device
    logits, labels = batch("peaked", rows=6, vocab_size=COLUMNS)
    logits, labels = logits.view(2, 3, COLUMNS), labels.view(2, 3)
    mask = torch.tensor([[0.0, 1.0, 1.0], [1.0, 0.0, 2.0]])
    uses = {
        "sum": (lambda loss: loss.sum(), torch.ones(2, 3)),
        "mean": (lambda loss: loss.mean(), torch.full((2, 3), 1 / 6)),
        "transposed": (
            lambda loss: (loss.t().contiguous() * mask.t().to(loss.device)).sum(),
            mask,
        ),
        "masked": (lambda loss: (loss * mask.to(loss.device)).sum(), mask),
    }
    for use, grad_output in uses.values():
        leaf = logits.clone().to(device).requires_grad_()
        loss = vocab_parallel_cross_entropy(
            leaf, labels.to(device), impl=impl, reduction="none", gradient=gradient
        )
        use(loss).backward()
        oracle = cross_entropy_fp64(logits, labels, reduction="none", grad_output=grad_output)
        peer = cross_entropy_same_dtype(logits, labels, reduction="none", grad_output=grad_output)
        assert_within_budget(leaf.grad, oracle.grad, peer.grad)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("gradient", GRADIENTS)
def test_an_auxiliary_loss_is_added_in_place(impl_device, gradient, reduction):
    """A loss that autograd takes for a view of something refuses ``+=``."""
    impl, device = impl_device
    logits, labels = batch("peaked", rows=6, vocab_size=COLUMNS)
    leaf = logits.view(2, 3, COLUMNS).to(device).requires_grad_()
    loss = vocab_parallel_cross_entropy(
        leaf, labels.view(2, 3).to(device), impl=impl, reduction=reduction, gradient=gradient
    )
    before = loss.detach().clone()
    loss += 1.5
    assert torch.equal(loss, before + 1.5)
    loss.sum().backward()
    assert leaf.grad.isfinite().all()


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_a_second_consumer_of_the_logits_has_its_own_gradient(impl_device, reduction):
    """Out of place, an entropy of the same fp32 logits sees the logits and not a gradient."""
    impl, device = impl_device
    made, labels = batch("peaked", rows=6, vocab_size=COLUMNS)
    leaf = made.to(device).requires_grad_()
    logits = leaf * 1
    loss = vocab_parallel_cross_entropy(
        logits, labels.to(device), impl=impl, reduction=reduction, gradient="out_of_place"
    )
    (loss.sum() + (logits**2).sum()).backward()
    oracle = cross_entropy_fp64(made, labels, reduction=reduction)
    peer = cross_entropy_same_dtype(made, labels, reduction=reduction)
    assert torch.equal(logits.detach().cpu(), made)
    assert_within_budget(leaf.grad, oracle.grad + 2 * made.double(), peer.grad + 2 * made)


def test_no_process_group_is_needed(impl_device):
    logits, labels = batch("peaked", rows=3, vocab_size=COLUMNS)
    assert not torch.distributed.is_initialized()
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        _check(impl_device, logits, labels)
    assert not torch.distributed.is_initialized()
