"""The gradient kernel, called as the autograd function calls it, against ``spec`` in fp64."""

import pytest
import torch

from tests.kernels.rows import (
    ALL,
    INF,
    NAN,
    OPTIONS,
    assert_gradient,
    gradient_by_kernel,
    gradient_by_spec,
    grads_of,
    outputs_by_spec,
    stats_by_kernel,
    walked_layouts,
)
from tests.support.budget import assert_within_budget
from tests.support.inputs import KINDS, batch
from vocab_parallel_ce.shard import VocabShard
from vocab_parallel_ce.spec import PLAIN, LossOptions


def run(logits, labels, options=PLAIN, **arguments):
    """(loss, gradient) by the two kernels of one rank."""
    stats, _ = stats_by_kernel(logits, labels, options)
    return gradient_by_kernel(logits, stats.unsqueeze(0), labels, options, **arguments)


def check(logits, labels, options=PLAIN, **grads):
    """Out of place, with random gradients from above unless ``grads`` are given."""
    grads = grads or grads_of(len(labels), options, logits.device)
    actual = run(logits, labels, options, into=torch.empty_like(logits), **grads)
    assert_row_results(actual, logits, labels, options, **grads)


def assert_row_results(actual, logits, labels, options=PLAIN, **grads):
    loss, grad = (t.cpu() for t in actual)
    logits, labels = logits.cpu(), labels.cpu()
    assert_within_budget(
        loss, *(outputs_by_spec(logits, labels, options, d).loss for d in (torch.float64, torch.float32))
    )
    assert_gradient(grad, logits, labels, options, **grads)


def test_worked_example(kernel_device):
    logits = torch.tensor([[1.0, 3.0, 2.0]], device=kernel_device)
    loss, grad = run(logits, torch.tensor([1], device=kernel_device))
    close = {"rtol": 0, "atol": 1e-6}
    torch.testing.assert_close(loss.cpu(), torch.tensor([0.4076059]), **close)
    torch.testing.assert_close(grad.cpu(), torch.tensor([[0.0900306, -0.3347590, 0.2447285]]), **close)


@pytest.mark.parametrize(
    "kind, dtype",
    [*((kind, torch.float32) for kind in KINDS), ("mixture", torch.bfloat16), ("mixture", torch.float16)],
    ids=str,
)
def test_loss_and_gradient_of_hard_rows(kernel_device, kind, dtype):
    logits, labels = (t.to(kernel_device) for t in batch(kind, rows=5, vocab_size=587, dtype=dtype))
    check(logits, labels)


@pytest.mark.parametrize("kind", KINDS)
def test_hard_rows_with_options(kernel_device, kind):
    """From the statistics of two ranks, with a cap of the size of the logits: there is no gradient beyond."""
    options = ALL._replace(z_loss=1e-6, softcap=2e4) if kind == "times_1000" else ALL
    logits, labels = (t.to(kernel_device) for t in batch(kind, rows=5, vocab_size=300, shards=2))
    shards = [VocabShard.even(150, rank, 2) for rank in range(2)]
    stats = torch.stack([stats_by_kernel(logits[:, s.start : s.stop], labels, options, s)[0] for s in shards])
    grads = grads_of(len(labels), options, kernel_device)
    actual = gradient_by_kernel(logits, stats, labels, options, into=torch.empty_like(logits), **grads)
    assert_row_results(actual, logits, labels, options, **grads)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_each_option_alone(kernel_device, options):
    logits, labels = (t.to(kernel_device) for t in batch("mixture", rows=6, vocab_size=300, shards=2))
    check(logits, labels, options)


@pytest.mark.parametrize("columns", (1, 2, 7, 8, 9, 15, 16, 17, 255, 257, 8201))
@pytest.mark.parametrize("dtype, options", ((torch.float32, PLAIN), (torch.bfloat16, ALL)), ids=("fp32", "bf16-all"))
def test_every_width_in_place(kernel_device, columns, dtype, options):
    """With options, one element off a boundary: rows have a head too."""
    logits, labels = batch("peaked", rows=3, vocab_size=columns, dtype=dtype)
    labels[:2] = torch.tensor([0, columns - 1])
    off = 0 if options is PLAIN else 1
    storage = torch.zeros(off + logits.numel(), dtype=dtype, device=kernel_device)
    grads = grads_of(3, options, kernel_device)
    actual = run(storage[off:].view_as(logits).copy_(logits), labels.to(kernel_device), options, **grads)
    assert_row_results(actual, logits, labels, options, **grads)


@pytest.mark.parametrize("dtype, columns", ((torch.float32, 64), (torch.bfloat16, 67)), ids=str)
def test_every_layout_in_place_and_nothing_beside_it(kernel_device, columns, dtype):
    """Transposed, shifted and size-1 views were read and written at the wrong rows elsewhere."""
    for layout in walked_layouts(columns, disjoint=True, dtype=dtype, device=kernel_device):
        before = layout.view.clone().reshape(-1, columns)
        labels = (torch.arange(len(before)) * 31 % columns).to(kernel_device)
        actual = run(layout.view, labels)
        assert_row_results(actual, before, labels)
        assert layout.outside_is_untouched(), layout.name


@pytest.mark.parametrize("name", ("grad_output", "grad_entropy"))
def test_grad_output_of_every_stride(kernel_device, name):
    logits, labels = (t.to(kernel_device) for t in batch("peaked", rows=6, vocab_size=100))
    wide = torch.randn(6, 3, device=kernel_device)
    for grad in (wide[:, 1], wide[0, :1].expand(6), torch.zeros(6, device=kernel_device)):
        check(logits, labels, LossOptions(entropy=True), **{name: grad})


def test_small_grad_output_is_rounded_once(kernel_device):
    """A gradient stored in bf16 and scaled afterwards is rounded twice."""
    logits, labels = (t.to(kernel_device) for t in batch("peaked", rows=12, vocab_size=300, dtype=torch.bfloat16))
    grad_output = torch.full((12,), 1.2345e-6, device=kernel_device)
    _, grad = run(logits, labels, grad_output=grad_output, into=torch.empty_like(logits))
    truth = gradient_by_spec(logits.cpu(), labels.cpu(), PLAIN, torch.float64, grad_output.cpu())
    # 2**-7 is one unit in the last digit of bf16: truncation (the interpreter's) stays below it, and
    # two roundings to nearest of a product reach 1.5 of half of it.
    live = truth.abs() > 1e-30
    relative = ((grad.cpu().double() - truth) / truth).abs()[live]
    assert float(relative.max()) <= (2**-7 if kernel_device == "cpu" else 2**-8 + 1e-5)


@pytest.mark.parametrize("margin", (2.2, 4.6, 6.9, 9.2))
def test_gradient_of_a_confident_label(kernel_device, margin):
    """p_y - 1 formed after rounding p_y is wrong by 20% at 0.99 in bf16; random logits never show it."""
    logits, labels = batch("confident", rows=4, vocab_size=200, gaps=(margin,))
    _, grad = run(logits.clone().to(kernel_device), labels.to(kernel_device))
    truth = gradient_by_spec(logits, labels, PLAIN, torch.float64)
    at_label = labels[:, None]
    relative = (grad.cpu().double().gather(1, at_label) / truth.gather(1, at_label) - 1).abs()
    # fp32 holds p_y within 2**-23, and 1 - p_y is exp(-margin).
    assert float(relative.max()) <= 4 * 2**-23 / torch.tensor(-margin).exp().item()


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


@pytest.mark.parametrize("dtype", (torch.int32, torch.int64, torch.float32), ids=str)
@pytest.mark.parametrize("options", (PLAIN, ALL), ids=("plain", "all"))
def test_the_divisor_divides_loss_and_gradient_and_no_entropy(kernel_device, options, dtype):
    logits, labels = (t.to(kernel_device) for t in batch("some_ignored", rows=6, vocab_size=90))
    grads = grads_of(6, options, kernel_device)
    divisor = torch.tensor([7], dtype=dtype, device=kernel_device)
    actual = run(logits, labels, options, into=torch.empty_like(logits), divisor=divisor, **grads)
    scaled = grads | {"grad_output": grads["grad_output"] / 7}
    plain = run(logits, labels, options, into=torch.empty_like(logits), **scaled)
    torch.testing.assert_close(actual[0], plain[0] / 7, rtol=1e-6, atol=0)
    torch.testing.assert_close(actual[1], plain[1], rtol=1e-5, atol=1e-8)


def test_zero_items_give_a_gradient_of_0_whatever_the_rows_hold(kernel_device):
    logits, labels = batch("peaked", rows=4, vocab_size=90)
    logits[0], logits[1], labels[2] = NAN, -INF, 90
    divisor = torch.zeros(1, device=kernel_device)
    grad_output = torch.tensor([1.0, INF, 1.0, INF], device=kernel_device)
    loss, grad = run(logits.to(kernel_device), labels.to(kernel_device), divisor=divisor, grad_output=grad_output)
    assert loss.tolist() == [0] * 4 and torch.equal(grad.cpu(), torch.zeros(4, 90))


def test_a_row_of_nan_is_nan_in_its_excluded_columns_too(kernel_device):
    logits = torch.randn(2, 50)
    logits[:, 7], logits[0, 20], logits[1, 20] = -INF, NAN, INF
    _, grad = run(logits.to(kernel_device), torch.tensor([1, 1], device=kernel_device))
    assert grad.isnan().all()
