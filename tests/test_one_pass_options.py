"""Options, edges and wide rows of the one-launch kernel: what it computes besides the plain loss of aligned rows."""

from __future__ import annotations

import pytest
import torch

from tests.support.confident import Rows, assert_as_exact_as_fp32, confident_rows
from tests.support.one_pass import assert_equal, check, made, run, skip_where_it_cannot_run
from vocab_parallel_ce import linear_cross_entropy
from vocab_parallel_ce.blocks import ONE_PASS, ONE_PASS_SMOOTHING

pytestmark = pytest.mark.cuda

INF, NAN = float("inf"), float("nan")
NARROW = -(-ONE_PASS[0][0] // 16) * 8
MIDDLE = ONE_PASS[len(ONE_PASS) // 2][1] // 16 * 8
# With smoothing at every width: the table leaves out those for which two kernels are faster.
SMOOTHING = (*ONE_PASS[:-2], ONE_PASS_SMOOTHING[-1])
WIDE = SMOOTHING[-1][1] // 16 * 8
DTYPES = (torch.bfloat16, torch.float32, torch.float16)

# "weights": random class weights, some of them 0.
OPTIONS = {
    "smoothing": {"label_smoothing": 0.1},
    "all smoothing": {"label_smoothing": 1.0},
    "scale": {"logit_scale": 0.3},
    "weights": {"weights": True},
    "all with weights": {"weights": True, "logit_scale": 0.5, "z_loss": 1e-3},
    "all with smoothing": {"label_smoothing": 0.1, "logit_scale": 0.5, "z_loss": 1e-3},
}


@pytest.fixture(autouse=True)
def _runs_here(monkeypatch):
    skip_where_it_cannot_run()
    monkeypatch.setattr("vocab_parallel_ce.losses.labels.ONE_PASS_SMOOTHING", SMOOTHING)


@pytest.fixture
def one_multiprocessor(monkeypatch):
    """Let few programs walk all rows, so that rows follow each other through the buffer."""
    monkeypatch.setattr("vocab_parallel_ce.kernels.one_pass._multiprocessors", lambda device: 1)


def options_of(name, columns):
    options = dict(OPTIONS[name])
    if options.pop("weights", False):
        weights = torch.rand(columns, generator=torch.Generator().manual_seed(5)) * 2
        weights[::7] = 0
        options["class_weight"] = weights.cuda()
    return options


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("columns", (NARROW, NARROW + 3, MIDDLE - 1), ids=str)
@pytest.mark.parametrize("name", OPTIONS)
def test_every_option(one_multiprocessor, name, columns, dtype):
    columns //= dtype.itemsize // 2
    logits, labels = made("some_ignored", 7, columns, dtype)
    for reduction in ("mean", "none"):
        check(logits.clone(), labels, reduction=reduction, **options_of(name, columns))
    num_items = torch.tensor(5, device="cuda")
    check(logits.clone(), labels, reduction="sum", num_items=num_items, **options_of(name, columns))


def configurations():
    for name, options in OPTIONS.items():
        yield from ((name, most) for _, most, _ in (SMOOTHING if "label_smoothing" in options else ONE_PASS))


@pytest.mark.parametrize("name, most", configurations())
def test_every_configuration_with_every_option(one_multiprocessor, most, name):
    for columns in (most // 16 * 8, most // 16 * 8 - 5):
        check(*made("some_ignored", 3, columns), **options_of(name, columns))


def edges_of(columns, rows=17):
    """Labels at both ends of rows: in heads, in tails, in the first and last vectors of bodies."""
    at = [*range(0, 8), 31, 32, 55, 56, 57, 62, 63, 64, 65, 71, 72, *range(columns - 20, columns)]
    labels = torch.tensor(at, device="cuda")
    return labels.repeat_interleave(rows)[torch.randperm(len(at) * rows, generator=torch.Generator().manual_seed(2))]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("excess", (1, 2, 3, 4, 5, 7, 60, 63, 65))
def test_rows_with_edges_of_every_width(one_multiprocessor, excess, dtype):
    """Rows begin everywhere in a line; a label is in the head, in the tail, and at both ends of the body."""
    columns = NARROW // (dtype.itemsize // 2) + excess
    labels = edges_of(columns, 2)
    logits, _ = made("peaked", len(labels), columns, dtype)
    check(logits, labels, reduction="none", z_loss=1e-3)


@pytest.mark.parametrize("name", ("all with smoothing", "all with weights"))
def test_options_at_the_edges(one_multiprocessor, name):
    columns = NARROW + 5
    labels = edges_of(columns, 1)
    labels[::9] = -100
    logits, _ = made("peaked", len(labels), columns)
    check(logits, labels, reduction="none", **options_of(name, columns))


def body_widths():
    """Widths whose body ends just before, at and just after a whole number of chunks."""
    for least, most, config in ONE_PASS:
        chunk = 256 * config.num_warps
        whole = (least + most) // 4 // chunk * chunk
        yield from (n for n in (whole - 1, whole + 1, whole + 7, whole + 63, whole + 71) if least <= 2 * n <= most)


@pytest.mark.parametrize("columns", list(body_widths()))
def test_a_body_that_ends_in_the_last_two_chunks(one_multiprocessor, columns):
    logits, labels = made("mixture", 9, columns)
    labels[::4] = -100
    check(logits.clone(), labels)
    if 2 * columns <= SMOOTHING[-1][1]:
        check(logits, labels, label_smoothing=0.1)


@pytest.mark.parametrize("columns", (NARROW, NARROW + 1, MIDDLE - 3, WIDE - 1, WIDE))
def test_ignored_rows_with_edges_and_options(one_multiprocessor, columns):
    """They are not read: their NaN is in no sum, and their gradient is 0."""
    logits, labels = made("peaked", 11, columns)
    labels[::3] = -100
    values = logits.clone()
    logits[::3, ::3], logits[::3, 1::3] = NAN, INF
    for name in ("all with weights", "all with smoothing"):
        options = options_of(name, columns)
        expected = check(values.clone(), labels, **options)
        assert_equal(run(logits.clone(), labels, **options), expected)


@pytest.mark.parametrize("columns", (NARROW, NARROW + 1))
def test_zero_items_leave_no_gradient(columns):
    """Zero divides the loss alone. What the gradient would be, NaN, is seen nowhere."""
    logits, labels = made("peaked", 6, columns)
    logits[1, 3] = NAN
    labels[4], labels[5] = -100, -1
    options = {"reduction": "sum", "num_items": torch.tensor(0, device="cuda")}
    for more in ({}, {"label_smoothing": 0.1}, options_of("all with weights", columns)):
        loss, grad = run(logits.clone(), labels, **options, **more)
        assert loss == 0 and not grad.any()


def test_a_mean_is_divided_by_the_sum_of_the_labels_weights():
    columns, rows = NARROW + 3, 4500
    logits, labels = made("some_ignored", rows, columns)
    options = options_of("weights", columns)
    check(logits.clone()[:40], labels[:40], **options)
    # As many labels as a program counts in several steps, next to the two launches.
    loss, grad = run(logits.clone(), labels, **options)
    other, expected = run(logits.clone(), labels, impl="triton", **options)
    torch.testing.assert_close(loss, other, rtol=2e-6, atol=0)
    torch.testing.assert_close(grad.float(), expected.float(), rtol=2**-6, atol=1e-12)


def test_weights_that_are_zero_infinite_or_missing():
    columns = NARROW + 1
    logits, labels = made("peaked", 6, columns)
    weights = options_of("weights", columns)["class_weight"]
    outside = labels.clone()
    outside[2] = columns
    loss, grad = run(logits.clone(), outside, class_weight=weights)
    assert loss.isnan() and grad.isnan().all()
    loss, grad = run(logits.clone(), labels, class_weight=weights * 0)
    assert loss == 0 and not grad.any()
    logits[:, 21] = -INF
    weights[21] = 0
    check(logits.clone(), labels.masked_fill(labels == 21, 22), class_weight=weights)


@pytest.mark.parametrize("name", OPTIONS)
def test_labels_outside_and_excluded_columns(one_multiprocessor, name):
    columns = NARROW + 9
    logits, labels = made("peaked", 8, columns)
    labels[1], labels[3], labels[5] = -1, columns, 2**40
    logits[6, 100:200] = -INF
    labels[6] = 150
    logits[7, 100:200] = -INF
    labels[7] = 7
    options = options_of(name, columns)
    _, grad = check(logits, labels, reduction="none", **options)
    assert grad[1::2][:3].isnan().all() and grad[::2][:3].isfinite().all()
    assert not grad[6, 100:200].any()


@pytest.mark.parametrize("columns", (NARROW // 2 + 1, WIDE // 2 - 1))
def test_confident_labels_in_edges_lose_no_digits(one_multiprocessor, columns):
    logits, labels = (t.cuda() for t in confident_rows(columns, 32))
    new_labels = torch.tensor([0, 1, 2, 30, columns - 1, columns - 2, columns - 3, columns - 31], device="cuda")
    rows = torch.arange(8, device="cuda")
    at_label, others = logits[rows, labels[:8]], logits[rows, new_labels]
    logits[rows, labels[:8]], logits[rows, new_labels], labels[:8] = others, at_label, new_labels
    assert_as_exact_as_fp32(Rows(*run(logits.clone(), labels, reduction="none")), logits, labels)


@pytest.mark.parametrize("columns", (NARROW + 1, MIDDLE - 3))
def test_views_with_edges_and_nothing_beside_them(one_multiprocessor, columns):
    base = torch.randn(9, columns + 77, generator=torch.Generator().manual_seed(0)).bfloat16().cuda() * 3
    for first in (0, 1, 3, 8, 64, 77):
        whole = base.clone()
        view = whole[:, first : first + columns]
        labels = torch.randint(0, columns, (9,), generator=torch.Generator().manual_seed(first)).cuda()
        labels[::4] = -100
        check(view, labels, label_smoothing=0.1)
        view.copy_(base[:, first : first + columns])
        assert torch.equal(whole, base)


@pytest.mark.parametrize("columns", (NARROW + 1, WIDE))
@pytest.mark.parametrize("name", ("all with weights", "all with smoothing"))
def test_equal_bits_every_time(columns, name):
    logits, labels = made("mixture", 150, columns)
    options = options_of(name, columns)
    expected = run(logits.clone(), labels, **options)
    for _ in range(5):
        assert_equal(run(logits.clone(), labels, **options), expected)
    # A row's bits are its own.
    options["reduction"] = "none"
    loss, grad = run(logits.clone(), labels, **options)
    assert_equal(run(logits[3:5].clone(), labels[3:5], **options), (loss[3:5], grad[3:5]))


@pytest.mark.parametrize("name", ("smoothing", "weights"))
def test_a_head(name):
    """Its chunks take one launch each, and a width that has edges."""
    columns = NARROW + 1
    hidden = torch.randn(300, 64, generator=torch.Generator().manual_seed(0)).bfloat16().cuda()
    weight = torch.randn(columns, 64, generator=torch.Generator().manual_seed(1)).bfloat16().cuda()
    labels = made("some_ignored", 300, columns)[1]
    found = []
    for impl in ("one_pass", "triton"):
        leaves = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        options = {"impl": impl, "chunk_size": 128, **options_of(name, columns)}
        loss = linear_cross_entropy(*leaves, labels, **options)
        found.append((loss.detach(), *torch.autograd.grad(loss, leaves)))
    for actual, expected in zip(*found, strict=True):
        torch.testing.assert_close(actual.float(), expected.float(), rtol=2**-6, atol=float(expected.abs().max()) / 256)
