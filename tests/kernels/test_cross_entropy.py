"""The gradient kernel, called as the autograd function calls it, against ``spec`` in fp64."""

import pytest
import torch

from tests.support.budget import assert_within_budget
from tests.support.inputs import DTYPES, KINDS, batch
from tests.support.layouts import logits_layouts
from vocab_parallel_ce import spec


def expected(logits, labels, *, start=0, label_smoothing=0.0, upstream=None, dtype=torch.float64):
    """(loss, gradient) of whole-vocabulary rows by ``spec``, computed in ``dtype``."""
    x, labels = logits.cpu().to(dtype), labels.cpu()
    stats = spec.local_stats(x, labels, 0)
    loss = spec.loss(stats, labels, x.shape[-1], label_smoothing=label_smoothing)
    grad = spec.gradient(x, stats, labels, 0, x.shape[-1], label_smoothing=label_smoothing)
    if upstream is not None:
        grad = torch.where((labels == -100)[:, None], 0.0, grad * upstream.cpu().to(dtype)[:, None])
    return loss, grad


def run(logits, labels, *, label_smoothing=0.0, upstream=None, into=None, valid_rows=None):
    """(loss, gradient) by the kernels; the gradient over the logits, or in ``into``."""
    from vocab_parallel_ce.kernels import launchers

    device, n_rows = logits.device, labels.numel()
    stats = torch.full((1, n_rows, 4 if label_smoothing else 3), float("nan"), device=device)
    loss = torch.full((n_rows,), float("nan"), device=device)
    launchers.online_softmax(logits, labels, stats[0], valid_rows, start=0, ignore_index=-100)
    grad = logits if into is None else into
    options = {"vocab_size": logits.shape[-1], "ignore_index": -100, "label_smoothing": label_smoothing}
    launchers.cross_entropy(logits, stats, labels, valid_rows, upstream, loss, grad, start=0, **options)
    return loss, grad


def assert_row_results(actual, logits, labels, **options):
    oracle = expected(logits, labels, **options)
    peer = expected(logits, labels, dtype=torch.float32, **options)
    loss, grad = (t.cpu() for t in actual)
    assert_within_budget(loss, oracle[0], peer[0])
    assert_within_budget(grad.reshape(oracle[1].shape), oracle[1], peer[1].to(grad.dtype))


def test_worked_example(kernel_device):
    logits = torch.tensor([[1.0, 3.0, 2.0]], device=kernel_device)
    loss, grad = run(logits, torch.tensor([1], device=kernel_device))
    close = {"rtol": 0, "atol": 1e-6}
    torch.testing.assert_close(loss.cpu(), torch.tensor([0.4076059]), **close)
    torch.testing.assert_close(grad.cpu(), torch.tensor([[0.0900306, -0.3347590, 0.2447285]]), **close)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("label_smoothing", (0.0, 0.1))
def test_loss_and_gradient_of_hard_rows(kernel_device, kind, dtype, label_smoothing):
    if kind == "times_1000" and dtype == torch.float16:
        pytest.skip("a thousand times the logits is past fp16's range")
    logits, labels = (t.to(kernel_device) for t in batch(kind, rows=12, vocab_size=587, dtype=dtype))
    upstream = torch.rand(12, generator=torch.Generator().manual_seed(1)).to(kernel_device)
    actual = run(
        logits, labels, label_smoothing=label_smoothing, upstream=upstream, into=torch.empty_like(logits)
    )
    assert_row_results(actual, logits, labels, label_smoothing=label_smoothing, upstream=upstream)


@pytest.mark.parametrize("columns", (1, 2, 7, 8, 9, 15, 16, 17, 255, 257, 8201))
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
def test_every_width_in_place(kernel_device, columns, dtype):
    logits, labels = batch("peaked", rows=5, vocab_size=columns, dtype=dtype)
    labels[:2] = torch.tensor([0, columns - 1])
    actual = run(logits.clone().to(kernel_device), labels.to(kernel_device))
    assert_row_results(actual, logits, labels)


@pytest.mark.parametrize("dtype, columns", ((torch.float32, 64), (torch.bfloat16, 67)), ids=str)
def test_every_layout_in_place_and_nothing_beside_it(kernel_device, columns, dtype):
    """Transposed, shifted and size-1 views were read and written at the wrong rows elsewhere."""
    for layout in logits_layouts(columns, dtype=dtype, device=kernel_device):
        if layout.name in ("every other column", "column-major") or layout.shares_elements:
            continue
        before = layout.view.clone().reshape(-1, columns)
        labels = (torch.arange(len(before)) * 31 % columns).to(kernel_device)
        actual = run(layout.view, labels)
        assert_row_results(actual, before, labels)
        assert layout.outside_is_untouched(), layout.name


def test_upstream_of_every_stride(kernel_device):
    logits, labels = (t.to(kernel_device) for t in batch("peaked", rows=6, vocab_size=100))
    wide = torch.randn(6, 3, device=kernel_device)
    for upstream in (wide[:, 1], wide[0, :1].expand(6), torch.zeros(6, device=kernel_device)):
        actual = run(logits, labels, upstream=upstream, into=torch.empty_like(logits))
        assert_row_results(actual, logits, labels, upstream=upstream)


def test_small_upstream_gradient_is_rounded_once(kernel_device):
    """A gradient stored in bf16 and scaled afterwards is rounded twice."""
    logits, labels = (
        t.to(kernel_device) for t in batch("peaked", rows=12, vocab_size=300, dtype=torch.bfloat16)
    )
    upstream = torch.full((12,), 1.2345e-6, device=kernel_device)
    _, grad = run(logits, labels, upstream=upstream, into=torch.empty_like(logits))
    _, truth = expected(logits, labels, upstream=upstream)
    # 2**-7 is one unit in the last place of bf16: truncation (the interpreter's) stays below it, and
    # two roundings to nearest of a product reach 1.5 of half of it.
    live = truth.abs() > 1e-30
    relative = ((grad.cpu().double() - truth) / truth).abs()[live]
    assert float(relative.max()) <= (2**-7 if kernel_device == "cpu" else 2**-8 + 1e-5)


@pytest.mark.parametrize("gap", (2.2, 4.6, 6.9, 9.2))
def test_gradient_of_a_confident_label(kernel_device, gap):
    """p_y - 1 formed after rounding p_y is wrong by 20% at 0.99 in bf16; random logits never show it."""
    logits, labels = batch("confident", rows=4, vocab_size=200, gaps=(gap,))
    _, grad = run(logits.clone().to(kernel_device), labels.to(kernel_device))
    _, truth = expected(logits, labels)
    at_label = labels[:, None]
    relative = (grad.cpu().double().gather(1, at_label) / truth.gather(1, at_label) - 1).abs()
    # fp32 holds p_y within 2**-23, and 1 - p_y is exp(-gap).
    assert float(relative.max()) <= 4 * 2**-23 / torch.tensor(-gap).exp().item()


def test_edge_rows(kernel_device):
    """Ignored rows of NaN, labels outside, NaN and +inf in a row, and a label in an excluded column."""
    logits = torch.randn(7, 50)
    logits[0] = float("nan")
    logits[3, 4], logits[4, 9], logits[5, 2] = float("nan"), float("inf"), float("-inf")
    labels = torch.tensor([-100, -1, 50, 1, 1, 2, 3])
    loss, grad = (t.cpu() for t in run(logits.clone().to(kernel_device), labels.to(kernel_device)))
    assert loss[0] == 0 and torch.equal(grad[0], torch.zeros(50))
    assert loss[1:5].isnan().all() and grad[1:5].isnan().all(dim=1)[:2].all()
    assert loss[5] == float("inf") and grad[5, 2] == 0 and grad[5].isfinite().all()
    assert loss[6].isfinite() and grad[6].isfinite().all()


def test_mean_weight_is_folded_in(kernel_device):
    logits, labels = (t.to(kernel_device) for t in batch("some_ignored", rows=10, vocab_size=90))
    valid_rows = torch.full((1,), -1, dtype=torch.int32, device=kernel_device)
    loss, grad = run(logits, labels, into=torch.empty_like(logits), valid_rows=valid_rows)
    count = int((labels != -100).sum())
    plain_loss, plain_grad = run(logits, labels, into=torch.empty_like(logits))
    torch.testing.assert_close(loss, plain_loss / count, rtol=1e-6, atol=0)
    torch.testing.assert_close(grad, plain_grad / count, rtol=1e-6, atol=1e-12)
