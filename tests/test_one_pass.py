"""Loss and gradient in one launch: what only a GPU shows of it. Conformance has the options of the other kernels."""

from __future__ import annotations

import math

import pytest
import torch

from tests.support.cases.inputs import DTYPES, batch
from tests.support.cases.logits import DIVISORS
from tests.support.cases.one_pass import (
    EPS_32,
    MIDDLE,
    NARROW,
    OPTIONS,
    WIDE,
    assert_equal,
    check,
    made,
    options_of,
    require_one_pass,
    run,
)
from tests.support.cases.pairs import covering
from tests.support.truth.oracle import cross_entropy_fp64
from vocab_parallel_ce.one_pass import WIDTHS

pytestmark = pytest.mark.cuda

INF, NAN = float("inf"), float("nan")


@pytest.fixture(autouse=True)
def _runs_here():
    require_one_pass()


@pytest.fixture
def multiprocessors(monkeypatch):
    """Let few programs walk all rows, so that rows follow each other through the buffer."""

    def limit(count=1):
        monkeypatch.setattr("vocab_parallel_ce.one_pass.kernel._multiprocessors", lambda device: count)

    return limit


def test_worked_example():
    """Two equal rows of 8192 columns, one logit 8 and the others 0."""
    logits = torch.zeros(2, 8192, device="cuda", dtype=torch.bfloat16)
    logits[:, 1] = 8
    loss, grad = run(logits, torch.tensor([1, 1], device="cuda"))
    assert loss.item() == pytest.approx(1.3212, abs=1e-4)
    assert grad[:, 1].tolist() == pytest.approx([-0.3666] * 2, rel=5e-3)
    assert grad[:, 2:].unique().tolist() == pytest.approx([4.475e-5], rel=5e-3)


# Columns beyond the first and the last rows of a configuration, and beyond a whole number of pieces. Rows that are no
# whole vectors have edges, and their body ends in the last piece or in the one before.
PLACES = [("first", more) for more in (0, 1, 2, 3, 4, 5, 7, 60, 63, 65)]
PLACES += [("whole", more) for more in (-8, -1, 0, 1, 7, 8, 63, 71)] + [("last", more) for more in (-5, 0)]


def columns_of(case):
    least, most, config = WIDTHS[case["configuration"]]
    place, more = case["place"]
    piece = 512 * config.num_warps
    row_bytes = {"first": -(-least // 16) * 16, "last": most // 16 * 16, "whole": (least + most) // 2 // piece * piece}
    return row_bytes[place] // case["dtype"].itemsize + more


def allowed(case):
    """fp16 does not hold a thousand times the logits, and 0.3 rounds them."""
    kind = case.get("kind")
    is_rounded = case.get("option") == "scale" and kind in ("far_negative", "times_1000")
    return not is_rounded and (kind, case.get("dtype")) != ("times_1000", torch.float16)


CALLS = covering(
    allowed,
    configuration=tuple(range(len(WIDTHS))),
    place=tuple(PLACES),
    dtype=DTYPES,
    option=tuple(OPTIONS),
    kind=("mixture", "peaked", "confident", "far_negative", "times_1000", "excluded_columns", "excluded_shard"),
    labels=("of the kind", "at both ends", "some ignored", "all ignored"),
    divisor=tuple(DIVISORS),
    ignore_index=(-100, 3),
    grad_output=(None, "random"),
    rows=(11, 25),
    multiprocessors=(1, 3, 132),
)


def labels_of(name, labels, columns, ignore_index):
    """At both ends of rows: in heads, in tails, in the first and last vectors of bodies."""
    if name == "at both ends":
        at = [*range(8), 31, 32, 55, 56, 57, 62, 63, 64, 65, 71, 72, *range(columns - 20, columns)]
        return torch.tensor(at, device="cuda")
    ignored = {"some ignored": slice(None, None, 3), "all ignored": slice(None)}
    if name in ignored:
        labels[ignored[name]] = ignore_index
    return labels


@pytest.mark.parametrize("case", CALLS, ids=lambda case: f"{case['configuration']}-{case['place']}-{case['option']}")
def test_every_call(multiprocessors, case):
    """Few programs, whose rows follow each other, give the same bits. Ignored rows are not read."""
    columns, index = columns_of(case), case["ignore_index"]
    logits, labels = made(case["kind"], case["rows"], columns, case["dtype"])
    labels = labels_of(case["labels"], labels, columns, index)
    if len(labels) > len(logits):
        logits, _ = made(case["kind"], len(labels), columns, case["dtype"])
    options = options_of(case["option"], columns) | DIVISORS[case["divisor"]] | {"ignore_index": index}
    if torch.is_tensor(items := options.get("num_items")):
        options["num_items"] = items.cuda()
    grad_output = None
    if case["grad_output"] == "random":
        shape = labels.shape if case["divisor"] == "none" else ()
        grad_output = torch.rand(shape, generator=torch.Generator().manual_seed(3)).cuda() + 0.25
    expected = check(logits.clone(), labels, grad_output, **options)
    ignored = labels == index
    logits[ignored, ::3], logits[ignored, 1::3] = NAN, INF
    multiprocessors(case["multiprocessors"])
    assert_equal(run(logits, labels, grad_output, **options), expected)


@pytest.mark.parametrize("rows", (1, 133, 4100))
def test_more_and_fewer_rows_than_programs(rows):
    """A program counts 4100 labels in three steps, and sums their weights."""
    logits, labels = made("some_ignored", rows, NARROW)
    check(logits.clone(), labels)
    check(logits, labels, **options_of("weights", NARROW))


@pytest.mark.parametrize("dtype", (torch.int64, torch.int32), ids=str)
@pytest.mark.parametrize("ignore_index", (-100, 0, NARROW, 2**40), ids=str)
def test_labels_and_ignore_index(dtype, ignore_index):
    """The first and the last column, at pieces' edges; an index that int32 would wrap ignores nothing."""
    columns = [0, 1, 7, 8, 15, 16, 2047, 2048, 4095, 4096, NARROW - 2, NARROW - 1]
    logits, labels = made("peaked", 3 * len(columns), NARROW)
    labels[:] = torch.tensor(columns * 3, device="cuda")
    # Ignored or outside; int32 holds the last as 0.
    labels[::5], labels[1::5], labels[2::5], labels[3::5] = -1, -2, NARROW, 2**40
    check(logits, labels.to(dtype), ignore_index=ignore_index, reduction="none")


@pytest.mark.parametrize("option", OPTIONS)
def test_labels_outside_and_excluded_columns(multiprocessors, option):
    """A label outside is NaN in its row alone, except of a mean with class weights, which has no such weight."""
    multiprocessors()
    columns = NARROW + 9
    logits, labels = made("peaked", 8, columns)
    labels[1], labels[3], labels[5] = -1, columns, 2**40
    logits[6:, 100:200] = -INF
    labels[6], labels[7] = 150, 7
    for reduction in ("none",) if "weights" in option else ("none", "mean"):
        _, grad = check(logits.clone(), labels, reduction=reduction, **options_of(option, columns))
        assert grad.isnan().all(dim=1).tolist() == [False, True] * 3 + [False] * 2
        assert grad[::2].isfinite().all() and not grad[6, 100:200].any()


@pytest.mark.parametrize("reduction", ("mean", "none"))
@pytest.mark.parametrize("column", (0, 5000))
def test_rows_that_are_not_finite(reduction, column):
    """NaN and +inf anywhere, in the label's column too, reach their own row alone."""
    logits, labels = made("peaked", 6, NARROW)
    logits[1, column], logits[3, column] = NAN, INF
    logits[4, labels[4]] = INF
    _, grad = check(logits, labels, reduction=reduction)
    assert grad.isnan().all(dim=1).tolist() == [False, True, False, True, True, False]


@pytest.mark.parametrize("columns", (NARROW, NARROW + 1))
def test_zero_items_leave_no_gradient(columns):
    """Zero divides the loss alone. What the gradient would be, NaN, is seen nowhere."""
    logits, labels = made("peaked", 6, columns)
    logits[1, 3] = NAN
    labels[4], labels[5] = -100, -1
    for items in (0, torch.tensor(0, device="cuda")):
        options = {"reduction": "sum", "num_items": items} | options_of("all with weights", columns)
        loss, grad = run(logits.clone(), labels, **options)
        assert loss == 0 and not grad.any()


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


def test_no_rows():
    for reduction in ("mean", "sum", "none"):
        logits = torch.empty(0, NARROW, device="cuda", dtype=torch.bfloat16)
        labels = torch.empty(0, device="cuda", dtype=torch.int64)
        loss, grad = run(logits, labels, reduction=reduction)
        assert loss.sum() == 0 and grad.shape == logits.shape


def views(columns):
    """(name, base, view of it) with rows of ``columns`` and other elements between them."""
    generator = torch.Generator().manual_seed(0)
    sliced, wide, later = (
        (torch.randn(shape, generator=generator) * 3).bfloat16().cuda()
        for shape in ((3, 5, columns), (9, columns + 77), (1, 8 + 7 * columns))
    )
    yield "all but the first token", sliced, sliced[:, 1:]
    yield "transposed and cut", sliced, sliced.transpose(0, 1)[:, 1:]
    yield from ((f"columns from {first}", wide, wide[::2, first : first + columns]) for first in (0, 1, 8, 77))
    yield "storage off a boundary", later, later[0, 1 : 1 + 7 * columns].view(7, columns)


@pytest.mark.parametrize("columns", (NARROW, NARROW + 1, MIDDLE - 3, WIDE - 8))
def test_rows_of_views_and_nothing_between_them(multiprocessors, columns):
    multiprocessors(2)
    for name, base, view in views(columns):
        before = base.clone()
        geometry = (view.shape, view.stride(), view.storage_offset())
        labels = torch.randint(0, columns, view.shape[:-1], generator=torch.Generator().manual_seed(1)).cuda()
        labels.view(-1)[::4] = -100
        check(view, labels)
        assert not torch.equal(view, before.as_strided(*geometry)), name
        base.as_strided(*geometry).copy_(before.as_strided(*geometry))
        assert torch.equal(base, before), name


@pytest.mark.parametrize("columns", (NARROW, NARROW + 1, WIDE))
def test_equal_bits_every_time(columns):
    logits, labels = made("mixture", 600, columns)
    options = options_of("all with weights", columns)
    expected = run(logits.clone(), labels, **options)
    for _ in range(10):
        assert_equal(run(logits.clone(), labels, **options), expected)
    # A row's bits are its own, among few rows too, reduced or not.
    options["reduction"] = "none"
    loss, grad = run(logits.clone(), labels, **options)
    assert_equal(run(logits[3:5].clone(), labels[3:5], **options), (loss[3:5], grad[3:5]))
    options["reduction"] = "sum"
    assert_equal(run(logits[3:5].clone(), labels[3:5], **options)[1:], [grad[3:5]])


@pytest.mark.parametrize("columns", (NARROW // 2, NARROW // 2 + 1, MIDDLE // 2, WIDE // 2 - 1, WIDE // 2))
def test_confident_labels_lose_no_digits(multiprocessors, columns):
    """Labels in the first and the last vectors of rows and pieces and in edges, in rows that follow one another."""
    at = [0, 1, 2, 3, 4, 30, 2047, 2048, *(columns - back for back in (1, 2, 3, 4, 31))]
    gaps = tuple(math.log((1 - rest) / rest) for rest in (0.1, 1e-3, 1e-5, 1e-7))
    made_logits, made_labels = batch("confident", rows=4 * len(at), vocab_size=columns, gaps=gaps)
    logits, old, labels = made_logits - 7, made_labels.unsqueeze(1), torch.tensor(at).repeat(4)
    swapped = logits.gather(1, labels.unsqueeze(1)), logits.gather(1, old)
    logits.scatter_(1, old, swapped[0]).scatter_(1, labels.unsqueeze(1), swapped[1])
    truth = cross_entropy_fp64(logits, labels, reduction="none")
    multiprocessors()
    loss, grad = run(logits.cuda(), labels.cuda(), reduction="none")
    assert float((loss.double().cpu() / truth.loss - 1).abs().max()) <= 32 * EPS_32
    of_label, right = (each.gather(1, labels.unsqueeze(1)) for each in (grad.double().cpu(), truth.grad))
    assert float((of_label / right - 1).abs().max()) <= 32 * EPS_32
