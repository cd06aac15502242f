"""Loss and gradient in one launch: widths, row counts, labels and layouts."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from tests.support.confident import Rows, assert_as_exact_as_fp32, confident_rows, truth_of
from tests.support.inputs import KINDS
from tests.support.one_pass import EPS_32, assert_equal, check, made, run, skip_where_it_cannot_run
from vocab_parallel_ce import cross_entropy_backward, cross_entropy_forward, vocab_parallel_cross_entropy
from vocab_parallel_ce.blocks import ONE_PASS

pytestmark = pytest.mark.cuda

INF, NAN = float("inf"), float("nan")
# bf16 columns of the narrowest rows, of the widest of the middle configuration, and of the widest.
NARROW = -(-ONE_PASS[0][0] // 16) * 8
MIDDLE = ONE_PASS[len(ONE_PASS) // 2][1] // 16 * 8
WIDE = ONE_PASS[-1][1] // 16 * 8


@pytest.fixture(autouse=True)
def _runs_here():
    skip_where_it_cannot_run()


@pytest.fixture
def one_multiprocessor(monkeypatch):
    """Let few programs walk all rows, so that rows follow each other through the buffer."""

    def limit(count=1):
        monkeypatch.setattr("vocab_parallel_ce.kernels.one_pass._multiprocessors", lambda device: count)

    return limit


def widths(dtype):
    """Columns of the first and last rows of each configuration, and about a whole number of chunks."""
    for least, most, config in ONE_PASS:
        chunk = 512 * config.num_warps
        first, last = -(-least // 16) * 16, most // 16 * 16
        whole = (first + last) // 2 // chunk * chunk
        row_bytes = {
            torch.bfloat16: (first, whole - 16, whole, whole + 16, last),
            torch.float32: (first, whole + 16),
            torch.float16: (last,),
        }
        yield from dict.fromkeys(n // dtype.itemsize for n in row_bytes[dtype] if first <= n <= last)


def test_worked_example():
    """Two equal rows of 8192 columns, one logit 8 and the others 0."""
    logits = torch.zeros(2, 8192, device="cuda", dtype=torch.bfloat16)
    logits[:, 1] = 8
    loss, grad = run(logits, torch.tensor([1, 1], device="cuda"))
    assert loss.item() == pytest.approx(1.3212, abs=1e-4)
    assert grad[:, 1].tolist() == pytest.approx([-0.3666] * 2, rel=5e-3)
    assert grad[:, 2:].unique().tolist() == pytest.approx([4.475e-5], rel=5e-3)


@pytest.mark.parametrize(
    ("dtype", "columns"),
    [(dtype, columns) for dtype in (torch.bfloat16, torch.float32, torch.float16) for columns in widths(dtype)],
    ids=str,
)
def test_every_width(one_multiprocessor, dtype, columns):
    """Rows that follow each other through a buffer give what each gives alone."""
    logits, labels = made("mixture", 11, columns, dtype)
    alone = logits.clone()
    expected = check(alone, labels)
    one_multiprocessor()
    assert_equal(run(logits, labels), expected)


@pytest.mark.parametrize(
    "rows, columns",
    [*((rows, NARROW) for rows in (1, 131, 132, 133, 264, 265, 1000, 4100)), (150, MIDDLE), (150, WIDE)],
)
def test_more_and_fewer_rows_than_programs(rows, columns):
    """A program counts 4100 labels in three steps."""
    check(*made("some_ignored", rows, columns))


@pytest.mark.parametrize("rows", (1, 2, 7, 25))
@pytest.mark.parametrize("multiprocessors", (1, 3))
def test_every_first_stage(one_multiprocessor, rows, multiprocessors):
    one_multiprocessor(multiprocessors)
    for columns in (NARROW, NARROW + 8, MIDDLE, WIDE):
        logits, labels = made("peaked", rows, columns, seed=rows)
        # No label at its row's peak: the loss of a single row is then as large as the sums it comes from.
        check(logits, (labels + 1) % columns)


def test_no_rows():
    for reduction in ("mean", "sum", "none"):
        logits = torch.empty(0, NARROW, device="cuda", dtype=torch.bfloat16)
        labels = torch.empty(0, device="cuda", dtype=torch.int64)
        loss, grad = run(logits, labels, reduction=reduction)
        assert loss.sum() == 0 and grad.shape == logits.shape


ITEMS = (7, torch.tensor(11), torch.tensor([2.5]), 0, torch.tensor(0.0))
REDUCTIONS = [("mean", None), ("sum", None), ("none", None), *(("sum", n_items) for n_items in ITEMS)]


@pytest.mark.parametrize("z_loss", (0.0, 1e-3))
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32, torch.float16), ids=str)
@pytest.mark.parametrize("reduction, n_items", REDUCTIONS, ids=str)
def test_reductions_and_grad_output(reduction, n_items, dtype, z_loss):
    """A grad_output of 1 writes nothing; others differ per row."""
    options = {"z_loss": z_loss, "reduction": reduction}
    if n_items is not None:
        options["num_items"] = n_items.cuda() if isinstance(n_items, torch.Tensor) else n_items
    logits, labels = made("some_ignored", 40, NARROW, dtype)
    loss, grad = check(logits.clone(), labels, **options)
    if n_items is not None and float(n_items) == 0:
        assert not loss.any() and not grad.any()
    grad_output = torch.rand(loss.shape, generator=torch.Generator().manual_seed(3)).cuda() + 0.25
    check(logits, labels, grad_output, **options)


def test_numbers_that_change_from_step_to_step():
    """A launch is known by its arguments: none that changes may come from an earlier one."""
    logits, labels = made("some_ignored", 20, NARROW)
    on_device = torch.tensor(5, device="cuda")
    for _ in range(2):
        items = ({"reduction": "sum", "num_items": n} for n in (on_device, on_device.float() + 1, 9))
        for options in ({"z_loss": 0.01}, {"z_loss": 0.02}, {}, {"ignore_index": 3}, *items):
            for rows, kind in product((20, 13), (torch.int64, torch.int32)):
                check(logits[:rows].clone(), labels[:rows].to(kind), **options)
        on_device += 1


IGNORED = {
    "none": lambda n: torch.zeros(n, dtype=torch.bool),
    "30%": lambda n: torch.rand(n, generator=torch.Generator().manual_seed(1)) < 0.3,
    "first": lambda n: torch.arange(n) == 0,
    "last": lambda n: torch.arange(n) == n - 1,
    "all but the first": lambda n: torch.arange(n) != 0,
    "all but the last": lambda n: torch.arange(n) != n - 1,
    "every other": lambda n: torch.arange(n) % 2 == 0,
    "runs of three": lambda n: torch.arange(n) // 3 % 2 == 0,
    "all": lambda n: torch.ones(n, dtype=torch.bool),
}


@pytest.mark.parametrize("columns", (NARROW, MIDDLE, WIDE))
@pytest.mark.parametrize("name", IGNORED)
def test_ignored_rows(one_multiprocessor, name, columns):
    """They are not read: their NaN is in no sum. Their stages are still refilled."""
    logits, labels = made("peaked", 23, columns)
    ignored = IGNORED[name](23).cuda()
    labels[ignored] = -100
    values = logits.clone()
    logits[ignored, ::3], logits[ignored, 1::3] = NAN, INF
    for reduction, multiprocessors in product(("mean", "none"), (1, 132)):
        one_multiprocessor(multiprocessors)
        expected = check(values.clone(), labels, reduction=reduction)
        assert_equal(run(logits.clone(), labels, reduction=reduction), expected)


@pytest.mark.parametrize("reduction", ("mean", "none"))
def test_a_label_outside_is_nan_in_its_row_alone(reduction):
    logits, labels = made("peaked", 9, NARROW)
    labels[1], labels[3], labels[5], labels[7] = -1, NARROW, 2**40, -(2**40)
    _, grad = check(logits, labels, reduction=reduction)
    assert grad.isnan().all(dim=1).tolist() == [False, True] * 4 + [False]
    assert grad[::2].isfinite().all()


@pytest.mark.parametrize("dtype", (torch.int64, torch.int32), ids=str)
@pytest.mark.parametrize("ignore_index", (-100, -1, -2, 0, 1, 16, NARROW, NARROW - 1, 2**40, -(2**63)), ids=str)
def test_labels_and_ignore_index(dtype, ignore_index):
    """The first and the last column, beside chunks' edges; an index that int32 would wrap ignores nothing."""
    columns = [0, 1, 7, 8, 15, 16, 2047, 2048, 4095, 4096, NARROW - 2, NARROW - 1]
    logits, labels = made("peaked", 3 * len(columns), NARROW)
    labels[:] = torch.tensor(columns * 3, device="cuda")
    # Ignored or outside; int32 holds the last as 0.
    labels[::5], labels[1::5], labels[2::5], labels[3::5] = -1, -2, NARROW, 2**40
    check(logits, labels.to(dtype), ignore_index=ignore_index, reduction="none")


@pytest.mark.parametrize("columns", (NARROW, WIDE))
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32, torch.float16), ids=str)
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "all_ignored"])
def test_hard_rows(kind, dtype, columns):
    """Peaks, confident rows, rows at -1000 and +500, masked columns and shards, huge spreads."""
    columns //= dtype.itemsize // 2
    if kind == "times_1000" and dtype == torch.float16:
        pytest.skip("a thousand times the logits is past fp16's range")
    logits, labels = made(kind, 10, columns, dtype)
    check(logits.clone(), labels, reduction="none")
    check(logits.clone(), labels, z_loss=1e-3)
    check(logits + 500, labels, reduction="sum")


@pytest.mark.parametrize("z_loss", (0.0, 1e-3))
def test_rows_of_excluded_columns(z_loss):
    """One column left, none left, and a label in an excluded column: an infinite loss, the others' p."""
    logits, labels = made("peaked", 6, NARROW)
    alone = logits[[0, 1], labels[[0, 1]]].clone()
    logits[[0, 1, 2]] = -INF
    logits[[0, 1], labels[[0, 1]]] = alone
    logits[3, labels[3]] = -INF
    logits[4, 100:] = -INF
    labels[4] = 7
    loss, grad = check(logits, labels, reduction="none", z_loss=z_loss)
    assert loss.isnan().tolist() == [False, False, True, False, False, False]
    assert loss[3] == INF and grad[3, labels[3]] == 0 and grad[3].isfinite().all()
    if not z_loss:
        assert not loss[:2].any() and not grad[:2].any()


@pytest.mark.parametrize("reduction", ("mean", "none"))
@pytest.mark.parametrize("column", (0, 5000, NARROW - 1))
def test_rows_that_are_not_finite(reduction, column):
    """NaN and +inf anywhere, in the label's column too, reach their own row alone."""
    logits, labels = made("peaked", 6, NARROW)
    logits[1, column], logits[3, column] = NAN, INF
    logits[4, labels[4]] = INF
    _, grad = check(logits, labels, reduction=reduction)
    assert grad.isnan().all(dim=1).tolist() == [False, True, False, True, True, False]


def views(columns):
    """(name, base, view of it) with aligned rows of ``columns`` and other elements between them."""

    def base(*shape):
        generator = torch.Generator().manual_seed(0)
        return (torch.randn(shape, generator=generator) * 3).bfloat16().cuda()

    sliced, tail, wide, middle = (base(3, 5, columns), base(3, 5, columns), base(9, columns + 8), base(9, 2 * columns))
    transposed, every_other, later = base(5, 3, columns), base(17, columns), base(1, 8 + 7 * columns)
    yield "all but the last token", sliced, sliced[:, :-1]
    yield "all but the first token", tail, tail[:, 1:]
    yield "rows of a wider tensor", wide, wide[:, :columns]
    yield "columns from the middle", middle, middle[:, 64 : 64 + columns]
    yield "transposed", transposed, transposed.transpose(0, 1)
    yield "transposed and cut", transposed, transposed.transpose(0, 1)[:, 1:4]
    yield "every other row", every_other, every_other[::2]
    yield "storage 16 bytes on", later, later[0, 8:].view(7, columns)


@pytest.mark.parametrize("columns", (NARROW, NARROW + 8, MIDDLE - 8, WIDE - 8))
def test_rows_of_views_and_nothing_beside_them(one_multiprocessor, columns):
    one_multiprocessor(2)
    for name, base, view in views(columns):
        before = base.clone()
        geometry = (view.shape, view.stride(), view.storage_offset())
        labels = torch.randint(0, columns, view.shape[:-1], generator=torch.Generator().manual_seed(1)).cuda()
        labels.view(-1)[::4] = -100
        check(view, labels)
        assert not torch.equal(view, before.as_strided(*geometry)), name
        base.as_strided(*geometry).copy_(before.as_strided(*geometry))
        assert torch.equal(base, before), name


@pytest.mark.parametrize("columns", (NARROW, WIDE))
def test_equal_bits_every_time(columns):
    logits, labels = made("mixture", 300, columns)
    expected = run(logits.clone(), labels)
    for _ in range(20):
        assert_equal(run(logits.clone(), labels), expected)


@pytest.mark.parametrize("columns", (NARROW // 2, MIDDLE // 2, WIDE // 2))
def test_confident_labels_lose_no_digits(one_multiprocessor, columns):
    """Labels in the first and the last vectors of rows and chunks too, in rows that follow one another."""
    logits, labels = (t.cuda() for t in confident_rows(columns, 256))
    new_labels = torch.tensor([0, 3, 4, 2047, 2048, columns - 4, columns - 2, columns - 1], device="cuda")
    rows = torch.arange(8, device="cuda")
    at_label, others = logits[rows, labels[:8]], logits[rows, new_labels]
    logits[rows, labels[:8]], logits[rows, new_labels], labels[:8] = others, at_label, new_labels
    assert_as_exact_as_fp32(Rows(*run(logits.clone(), labels, reduction="none")), logits, labels)
    one_multiprocessor()
    rows = slice(0, 24)
    actual = Rows(*run(logits[rows].clone(), labels[rows], reduction="none"))
    assert_as_exact_as_fp32(actual, logits[rows], labels[rows])
    logits, labels = (t.cuda() for t in confident_rows(2 * columns, 24, torch.bfloat16))
    truth = truth_of(logits, labels).loss
    loss, _ = run(logits, labels, reduction="none")
    assert float((loss.double().cpu() / truth - 1).abs().max()) <= 32 * EPS_32


def test_the_two_step_pair_and_no_gradient():
    logits, labels = made("some_ignored", 20, NARROW)
    loss, grad = run(logits.clone(), labels, torch.tensor(0.5, device="cuda"))
    with torch.no_grad():
        options = {"impl": "one_pass", "gradient": "in_forward"}
        alone = vocab_parallel_cross_entropy(unchanged := logits.clone(), labels, **options)
    assert torch.equal(unchanged, logits)
    torch.testing.assert_close(alone, loss, rtol=1e-5, atol=0)
    pair_loss, pair = cross_entropy_forward(logits, labels, 0.0, True, None, -100)
    cross_entropy_backward(pair, torch.tensor(0.5, device="cuda"))
    assert_equal((pair_loss, pair), (loss, grad))


REFUSED = {
    "padding": (NARROW, {"vocab_size": NARROW - 8}, "logits without padded columns"),
    "narrow": (NARROW - 8, {}, "rows of a width in its table"),
    "softcap": (NARROW, {"softcap": 30.0}, "a loss that it computes, got softcap"),
    "predictions": (NARROW, {"outputs": ("predictions",)}, "a loss that it computes, got predictions"),
    "wide": (WIDE + 8, {}, "rows of a width in its table"),
    "in backward": (NARROW, {"gradient": "in_backward"}, "gradient 'in_forward', got 'in_backward'"),
    "out of place": (NARROW, {"gradient": "out_of_place"}, "gradient 'in_forward', got 'out_of_place'"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_one_launch_cannot_do_is_refused_and_left_alone(name):
    columns, options, message = REFUSED[name]
    logits, labels = made("peaked", 4, columns)
    before, version = logits.clone(), logits._version
    options = {"impl": "one_pass", "gradient": "in_forward"} | options
    with pytest.raises(ValueError, match=f"^impl: 'one_pass' needs {message}.*; 'auto' chooses what can run"):
        vocab_parallel_cross_entropy(logits, labels, **options)
    assert torch.equal(logits, before) and logits._version == version


OFF_A_BOUNDARY = {
    "stride": lambda wide: wide[:, :NARROW],
    "beginning": lambda wide: wide.flatten()[1 : 1 + 5 * NARROW].view(5, NARROW),
    "beginning of rows": lambda wide: wide[:, 4 : 4 + NARROW],
}


@pytest.mark.parametrize("name", OFF_A_BOUNDARY)
def test_rows_off_a_boundary(name):
    view = OFF_A_BOUNDARY[name](torch.randn(6, NARROW + 12, device="cuda").bfloat16())
    labels = torch.arange(len(view), device="cuda")
    check(view, labels)
