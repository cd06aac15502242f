"""The two kernels that walk rows, called as the autograd function calls them, against ``spec`` in fp64."""

import pytest
import torch

from tests.core.test_spec import by_spec
from tests.kernels.rows import (
    ALL,
    EVERY_STATISTIC,
    INF,
    NAN,
    OPTIONS,
    assert_gradient,
    assert_stats,
    gradient_by_kernel,
    gradient_by_spec,
    grads_of,
    stats_by_kernel,
    walked_layouts,
)
from tests.support.budget import assert_within_budget
from tests.support.inputs import KINDS, batch
from vocab_parallel_ce.spec import PLAIN


def run(logits, labels, options=PLAIN, **arguments):
    """(loss, gradient) by the two kernels of one rank."""
    stats, _ = stats_by_kernel(logits, labels, options)
    return gradient_by_kernel(logits, stats.unsqueeze(0), labels, options, **arguments)


def check(logits, labels, options=PLAIN, in_place=True, **grads):
    """Statistics of ``logits [..., C]`` on any device and, if ``in_place``, loss and gradient, which replaces them."""
    rows, labels_there = logits.cpu().reshape(-1, logits.shape[-1]).clone(), labels.to(logits.device)
    stats, valid_rows = stats_by_kernel(logits, labels_there, options)
    assert_stats(stats, rows, labels, options)
    assert valid_rows == int((labels != options.ignore_index).sum())
    if not in_place:
        return
    grads = grads or grads_of(len(labels), options, logits.device)
    loss, grad = gradient_by_kernel(logits, stats.unsqueeze(0), labels_there, options, **grads)
    truth, peer = (by_spec(rows.to(dtype), labels, options).loss for dtype in (torch.float64, torch.float32))
    assert_within_budget(loss.cpu(), truth, peer)
    assert_gradient(grad.cpu(), rows, labels, options, **grads)


def test_worked_example(kernel_device):
    logits = torch.tensor([[1.0, 3.0, 2.0]], device=kernel_device)
    loss, grad = run(logits, torch.tensor([1], device=kernel_device))
    close = {"rtol": 0, "atol": 1e-6}
    torch.testing.assert_close(loss.cpu(), torch.tensor([0.4076059]), **close)
    torch.testing.assert_close(grad.cpu(), torch.tensor([[0.0900306, -0.3347590, 0.2447285]]), **close)


HARD = [
    *((kind, torch.float32, options) for kind in KINDS for options in (PLAIN, EVERY_STATISTIC)),
    *((kind, torch.bfloat16, ALL) for kind in KINDS),
    *(("mixture", torch.float32, options) for options in OPTIONS.values()),
    ("mixture", torch.bfloat16, PLAIN),
    ("mixture", torch.float16, EVERY_STATISTIC),
]


@pytest.mark.parametrize("kind, dtype, options", HARD, ids=str)
def test_hard_rows_and_each_option_alone(kernel_device, kind, dtype, options):
    """One launch packs the statistics of its options and no other. Rows of options have two tiles of either kernel."""
    logits, labels = batch(kind, rows=6, vocab_size=2251 if kind == "mixture" else 587, dtype=dtype)
    check(logits.to(kernel_device), labels, options)


@pytest.mark.parametrize("columns", (1, 2, 7, 8, 9, 15, 16, 17, 255, 256, 257, 4099, 8201))
@pytest.mark.parametrize("dtype, options", ((torch.float32, PLAIN), (torch.bfloat16, ALL)), ids=("fp32", "bf16-all"))
def test_every_width(kernel_device, columns, dtype, options):
    """Rows with no whole vector, with none but edges, with a head and a tail, and of several tiles.

    With options, one element off a boundary: rows have a head too.
    """
    logits, labels = batch("peaked", rows=3, vocab_size=columns, dtype=dtype)
    labels[:2] = torch.tensor([0, columns - 1])
    off = 0 if options is PLAIN else 1
    storage = torch.zeros(off + logits.numel(), dtype=dtype, device=kernel_device)
    check(storage[off:].view_as(logits).copy_(logits), labels, options)


@pytest.mark.parametrize("columns", (1, 7, 8, 64, 96, 255, 2080, 8201))
@pytest.mark.parametrize("dtype, options", ((torch.bfloat16, PLAIN), (torch.float16, ALL)), ids=("bf16", "fp16-all"))
def test_a_16_bit_gradient_of_fp32_logits(kernel_device, columns, dtype, options):
    """Rows of 96 columns are whole lines of fp32 and not of 16 bits."""
    logits, labels = batch("peaked", rows=3, vocab_size=columns)
    there, grads = logits.to(kernel_device), grads_of(3, options, kernel_device)
    storage = torch.full((logits.numel() + 64,), NAN, dtype=dtype, device=kernel_device)
    into = storage[: logits.numel()].view_as(logits)
    _, grad = run(there, labels.to(kernel_device), options, **grads, into=into)
    assert torch.equal(there.cpu(), logits) and storage[logits.numel() :].isnan().all()
    assert_gradient(grad.cpu(), logits, labels, options, **grads)


@pytest.mark.parametrize(
    "columns, dtype, options",
    ((64, torch.float32, PLAIN), (67, torch.bfloat16, OPTIONS["predictions"])),
    ids=("64", "67"),
)
def test_every_layout_and_nothing_beside_it(kernel_device, columns, dtype, options):
    """Transposed, shifted and size-1 views were read and written at the wrong rows elsewhere."""
    for layout in walked_layouts(columns, dtype=dtype, device=kernel_device):
        labels = torch.arange(layout.view.shape[:-1].numel()) * 31 % columns
        check(layout.view, labels, options, in_place=not layout.shares_elements)
        assert layout.shares_elements or layout.outside_is_untouched(), layout.name


@pytest.mark.parametrize("name", ("grad_output", "grad_entropy"))
def test_grad_output_of_every_stride(kernel_device, name):
    logits, labels = batch("peaked", rows=6, vocab_size=100)
    wide = torch.randn(6, 3, device=kernel_device)
    for grad in (wide[:, 1], wide[0, :1].expand(6), torch.zeros(6, device=kernel_device)):
        check(logits.clone().to(kernel_device), labels, OPTIONS["entropy"], **{name: grad})


def test_small_grad_output_is_rounded_once(kernel_device):
    """A gradient stored in bf16 and scaled afterwards is rounded twice."""
    logits, labels = (t.to(kernel_device) for t in batch("peaked", rows=12, vocab_size=300, dtype=torch.bfloat16))
    grad_output = torch.full((12,), 1.2345e-6, device=kernel_device)
    _, grad = run(logits, labels, grad_output=grad_output, into=torch.empty_like(logits))
    truth = gradient_by_spec(logits.cpu(), labels.cpu(), PLAIN, torch.float64, grad_output=grad_output)
    # 2**-8 is half a unit in the last digit of bf16: two roundings to nearest reach 1.5 of it.
    live = truth.abs() > 1e-30
    relative = ((grad.cpu().double() - truth) / truth).abs()[live]
    assert float(relative.max()) <= 2**-8 + 1e-5


@pytest.mark.parametrize("options", (PLAIN, ALL), ids=("plain", "all"))
def test_edge_rows(kernel_device, options):
    """Ignored rows of NaN, labels outside, NaN and +inf in a row, and a label in an excluded column."""
    logits = torch.randn(8, 50)
    logits[0] = NAN
    logits[3, 4], logits[4, 9], logits[5, 2], logits[7] = NAN, INF, -INF, -INF
    labels = torch.tensor([-100, -1, 50, 1, 1, 2, 3, 1])
    grads = grads_of(len(labels), options, kernel_device)
    loss, grad = run(logits.clone().to(kernel_device), labels.to(kernel_device), options, **grads)
    loss, grad = loss.cpu(), grad.cpu()
    assert loss[0] == 0 and torch.equal(grad[0], torch.zeros(50))
    assert loss[1:5].isnan().all() and grad[1:3].isnan().all() and loss[7].isnan()
    assert loss[5] == INF and grad[5, 2] == 0 and grad[5].isfinite().all()
    assert loss[6].isfinite() and grad[6].isfinite().all()


@pytest.mark.parametrize("options", (PLAIN, ALL), ids=("plain", "all"))
def test_excluded_columns_have_gradient_0_and_ignored_rows_whatever_comes_from_above(kernel_device, options):
    logits, labels = batch("excluded_columns", rows=6, vocab_size=150)
    excluded = logits == -INF
    labels[0] = -100
    grads = {name: grad for name, grad in grads_of(6, options, kernel_device).items() if grad is not None}
    for grad in grads.values():
        grad[0] = INF
    _, grad = run(logits.to(kernel_device), labels.to(kernel_device), options, **grads)
    grad = grad.cpu()
    assert torch.equal(grad[0], torch.zeros(150))
    assert torch.equal(grad[excluded], torch.zeros(int(excluded.sum())))
    assert grad.isfinite().all()


def test_zero_items_give_a_gradient_of_0_whatever_the_rows_hold(kernel_device):
    logits, labels = batch("peaked", rows=4, vocab_size=90)
    logits[0], logits[1], labels[2] = NAN, -INF, 90
    divisor = torch.zeros(1, device=kernel_device)
    grad_output = torch.tensor([1.0, INF, 1.0, INF], device=kernel_device)
    loss, grad = run(logits.to(kernel_device), labels.to(kernel_device), divisor=divisor, grad_output=grad_output)
    assert loss.tolist() == [0] * 4 and torch.equal(grad.cpu(), torch.zeros(4, 90))
