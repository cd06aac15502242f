"""Every option of the loss, alone and with every other: loss, gradient and metrics are the oracle's."""

from __future__ import annotations

import itertools

import pytest
import torch

from tests.support.budget import assert_within_budget
from tests.support.inputs import (
    DTYPES,
    IGNORE_INDEX,
    KINDS,
    batch,
    padded_shard,
    upstream_gradients,
    with_a_broad_row,
)
from tests.support.oracle import (
    cross_entropy_fp64,
    cross_entropy_same_dtype,
    metrics_fp64,
    metrics_same_dtype,
)
from vocab_parallel_ce import VocabShard, vocab_parallel_cross_entropy

# Few rows: the interpreter takes tens of milliseconds for each.
COLUMNS, ROWS = 21, 4
REDUCTIONS = ("mean", "sum", "none")
GRADIENTS = ("in_forward", "in_backward", "out_of_place")
NAN, INF = float("nan"), float("inf")

OPTIONS = {
    "torch": {"label_smoothing": 0.1},
    "megatron": {"label_smoothing": 0.1, "smoothing_formula": "megatron"},
    "z_loss": {"z_loss": 0.02},
    "softcap": {"softcap": 10.0},
    "logit_scale": {"logit_scale": 0.4},
}


def _covering(**factors):
    """Cases in which every pair of values of two factors occurs, by greedy choice."""
    names = list(factors)

    def pairs(case):
        return set(itertools.combinations(case.items(), 2))

    missing = set()
    for first, second in itertools.combinations(names, 2):
        missing |= {((first, a), (second, b)) for a in factors[first] for b in factors[second]}
    cases = []
    while missing:
        # A pair that is missing first, then whatever covers most of the rest.
        case = dict(min(missing, key=repr))
        for name in names:
            if name not in case:
                trials = [{**case, name: value} for value in factors[name]]
                ordered = [{key: trial[key] for key in names if key in trial} for trial in trials]
                case = trials[max(range(len(trials)), key=lambda i: len(pairs(ordered[i]) & missing))]
        case = {name: case[name] for name in names}
        missing -= pairs(case)
        cases.append(case)
    return cases


def _call(impl_device, logits, labels, grad_output=None, **options):
    """``(loss, gradient, metrics)`` of a copy of ``logits``."""
    impl, device = impl_device
    leaf = logits.clone().to(device).requires_grad_()
    result = vocab_parallel_cross_entropy(leaf, labels.to(device), impl=impl, **options)
    loss, metrics = result if options.get("return_metrics") else (result, None)
    loss.backward(torch.ones_like(loss) if grad_output is None else grad_output.to(device))
    return loss.detach().cpu(), leaf.grad.cpu(), metrics


def _check(impl_device, logits, labels, grad_output=None, *, gradient="auto", **options):
    loss, grad, _ = _call(impl_device, logits, labels, grad_output, gradient=gradient, **options)
    oracle = cross_entropy_fp64(logits, labels, grad_output=grad_output, **options)
    peer = cross_entropy_same_dtype(logits, labels, grad_output=grad_output, **options)
    assert_within_budget(loss, oracle.loss, peer.loss)
    assert_within_budget(grad, oracle.grad, peer.grad)
    return loss, grad


def _rows(kind, rows=ROWS, dtype=torch.float32):
    return with_a_broad_row(batch(kind, rows=rows - 1, vocab_size=COLUMNS, dtype=dtype))


def _random(rows=ROWS):
    grad_output = dict(upstream_gradients((rows,)))["random"]
    grad_output[-1] = 1.5  # the broad row's is not near 0
    return grad_output


HARD = _covering(
    option=tuple(OPTIONS), kind=tuple(KINDS), dtype=DTYPES, reduction=REDUCTIONS, gradient=GRADIENTS
)


@pytest.mark.parametrize("case", HARD, ids=lambda case: f"{case['option']}-{case['kind']}")
def test_each_option_on_hard_rows_of_every_dtype(impl_device, case):
    """Every pair of an option, a kind of row, a dtype, a reduction and a way of writing the gradient."""
    rows = 9 if case["kind"] == "mixture" else ROWS
    made = _rows(case["kind"], rows, case["dtype"])
    grad_output = _random(rows) if case["reduction"] == "none" else torch.tensor(0.75)
    ways = {"reduction": case["reduction"], "gradient": case["gradient"]}
    _check(impl_device, *made, grad_output, **ways, **OPTIONS[case["option"]])


SMOOTHING = {"none": {}, "torch": OPTIONS["torch"], "megatron": OPTIONS["megatron"]}
DIVISORS = {
    "mean": {"reduction": "mean"},
    "none": {"reduction": "none"},
    "sum": {"reduction": "sum"},
    "sum / int": {"reduction": "sum", "num_items": 7},
    "sum / int64": {"reduction": "sum", "num_items": torch.tensor(7)},
    "sum / fp32": {"reduction": "sum", "num_items": torch.tensor(6.5)},
}
PAIRS = _covering(
    smoothing=tuple(SMOOTHING),
    divisor=tuple(DIVISORS),
    z_loss=(0.0, 0.02),
    softcap=(None, 10.0),
    logit_scale=(1.0, 0.4),
    padding=(0, 5),
    return_metrics=(False, True),
    kind=("peaked", "some_ignored", "shard_edges", "confident"),
    gradient=GRADIENTS,
    dtype=DTYPES,
)


@pytest.mark.parametrize("case", PAIRS, ids=map(str, range(len(PAIRS))))
def test_every_pair_of_options_on_together(impl_device, case):
    impl, device = impl_device
    logits, labels = _rows(case["kind"], dtype=case["dtype"])
    # Ties, of which the first counts, and rows whose contents nobody may see.
    logits[1::2, COLUMNS - 2] = logits[1::2].amax(dim=1)
    logits[labels == IGNORE_INDEX] = NAN
    numbers = {name: case[name] for name in ("z_loss", "softcap", "logit_scale")}
    options = {**numbers, **SMOOTHING[case["smoothing"]], **DIVISORS[case["divisor"]]}
    grad_output = _random() if case["divisor"] == "none" else torch.tensor(0.75)
    loss, grad, metrics = _call(
        impl_device,
        padded_shard(logits, 0, COLUMNS + case["padding"]),
        labels,
        grad_output,
        vocab_size=COLUMNS,
        gradient=case["gradient"],
        return_metrics=case["return_metrics"],
        **options,
    )
    oracle = cross_entropy_fp64(logits, labels, grad_output=grad_output, **options)
    peer = cross_entropy_same_dtype(logits, labels, grad_output=grad_output, **options)
    assert_within_budget(loss, oracle.loss, peer.loss)
    assert_within_budget(grad[:, :COLUMNS], oracle.grad, peer.grad)
    assert not grad[:, COLUMNS:].any()
    if case["return_metrics"]:
        _check_metrics(metrics, logits, labels, **options)


def _check_metrics(metrics, logits, labels, **options):
    oracle = metrics_fp64(logits, labels, **options)
    peer = metrics_same_dtype(logits, labels, **options)
    assert not any(value.requires_grad for value in metrics)
    assert metrics.predictions.dtype == torch.int64
    assert torch.equal(metrics.predictions.cpu(), oracle.predictions)
    for name in ("token_accuracy", "lse", "z_loss"):
        assert_within_budget(getattr(metrics, name), getattr(oracle, name), getattr(peer, name))


def test_the_covering_array_has_every_pair():
    factors = {"a": (0, 1, 2, 3), "b": (None, "x"), "c": (0.5, 1.5, 2.5), "d": (False, True)}
    cases = _covering(**factors)
    for first, second in itertools.combinations(factors, 2):
        for pair in itertools.product(factors[first], factors[second]):
            assert any((case[first], case[second]) == pair for case in cases), (first, second, pair)
    assert len(cases) < 20 and all(list(case) == list(factors) for case in cases)


def test_options_given_at_their_off_values_change_no_bit(impl_device):
    off = {
        "label_smoothing": 0,
        "smoothing_formula": "megatron",
        "z_loss": 0,
        "softcap": None,
        "logit_scale": 1,
        "num_items": None,
        "return_metrics": False,
        "shard": VocabShard(0, COLUMNS, COLUMNS),
    }
    made = batch("some_ignored", rows=2, vocab_size=COLUMNS, dtype=torch.bfloat16)
    for reduction in REDUCTIONS:
        omitted = _call(impl_device, *made, reduction=reduction)
        for given in (off, {"vocab_size": COLUMNS}):
            loss, grad, _ = _call(impl_device, *made, reduction=reduction, **given)
            assert torch.equal(loss, omitted[0]) and torch.equal(grad, omitted[1])


def test_whole_numbers_are_numbers(impl_device):
    made = _rows("peaked", 2)
    whole = _call(impl_device, *made, softcap=30, z_loss=1, logit_scale=2, label_smoothing=1)
    real = _call(impl_device, *made, softcap=30.0, z_loss=1.0, logit_scale=2.0, label_smoothing=1.0)
    assert torch.equal(whole[0], real[0]) and torch.equal(whole[1], real[1])
    _check(impl_device, *made, softcap=30, z_loss=1, logit_scale=2, label_smoothing=1)


@pytest.mark.parametrize("softcap", [0.5, 30.0, 1e4])
def test_softcap_from_saturated_to_almost_linear(impl_device, softcap):
    """At 0.5 most columns are at the cap, with a slope near 0; at 1e4 the cap is hardly felt."""
    for kind in ("peaked", "far_negative", "excluded_columns"):
        made = _rows(kind)
        _check(impl_device, *made, _random(), softcap=softcap, logit_scale=1.5, reduction="none")


def test_an_infinite_logit_stays_infinite_under_softcap(impl_device):
    """An excluded column would come back as -softcap, +inf as a large but ordinary logit."""
    logits, labels = batch("excluded_columns", rows=3, vocab_size=COLUMNS)
    logits[2] = 1.0
    logits[2, 3] = INF
    for extra in ({}, {"z_loss": 0.1, "logit_scale": 0.4}, {"label_smoothing": 0.1}):
        loss, grad = _check(impl_device, logits, labels, reduction="none", softcap=1.0, **extra)
        assert loss.isnan().tolist() == [False, False, True]
        assert bool((logits == -INF).any()) and not grad[logits == -INF].any()


@pytest.mark.parametrize("gradient", GRADIENTS)
@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_ignored_rows_stay_zero_under_every_option(impl_device, reduction, gradient):
    """NaN in them, and an infinite grad_output, meet factors of their own in each option."""
    logits, labels = batch("peaked", rows=4, vocab_size=COLUMNS)
    logits[2], labels[2] = NAN, IGNORE_INDEX
    grad_output = torch.tensor([1.0, 2.0, INF, -0.5]) if reduction == "none" else torch.tensor(INF)
    options = {"softcap": 10.0, "logit_scale": 0.4, "z_loss": 0.02, "label_smoothing": 0.1}
    loss, grad, metrics = _call(
        impl_device,
        padded_shard(logits, 0, COLUMNS + 4),
        labels,
        grad_output,
        reduction=reduction,
        gradient=gradient,
        vocab_size=COLUMNS,
        return_metrics=True,
        **options,
    )
    assert not grad[2].any() and not grad[:, COLUMNS:].any()
    assert loss.isfinite().all() and metrics.lse[2] == 0 and metrics.predictions[2] == -1


EVERY = {"softcap": 5.0, "logit_scale": 0.4, "label_smoothing": 0.1, "z_loss": 0.02}
PADDED = [
    (1, 9, {}),
    (16, 24, EVERY),
    (20, 21, {}),
    (21, 22, EVERY),
    (33, 48, EVERY),
    (128, 136, {}),
    (129, 300, EVERY),
    (257, 384, {}),
]


@pytest.mark.parametrize(("vocab_size", "columns", "options"), PADDED)
def test_the_gradient_of_padded_columns_is_zero_in_every_row(impl_device, vocab_size, columns, options):
    """Rows that hold NaN, whose label is outside, or that are ignored have no finite factor to be 0 by."""
    logits, labels = with_a_broad_row(batch("shard_edges", rows=4, vocab_size=vocab_size))
    ordinary = [0, 4]
    oracle, peer = (
        compute(logits[ordinary], labels[ordinary], reduction="none", **options)
        for compute in (cross_entropy_fp64, cross_entropy_same_dtype)
    )
    labels[1], labels[2] = vocab_size, IGNORE_INDEX
    logits[2], logits[3, 0] = NAN, NAN
    for gradient, fill in zip(GRADIENTS, (NAN, INF, 1e30), strict=True):
        loss, grad, _ = _call(
            impl_device,
            padded_shard(logits, 0, columns, fill),
            labels,
            torch.tensor([1.0, 1.0, INF, INF, 1.0]),
            reduction="none",
            gradient=gradient,
            vocab_size=vocab_size,
            **options,
        )
        assert not grad[:, vocab_size:].any() and not grad[2].any()
        assert loss.isnan().tolist() == [False, True, False, True, False]
        assert_within_budget(loss[ordinary], oracle.loss, peer.loss)
        assert_within_budget(grad[ordinary, :vocab_size], oracle.grad, peer.grad)


def test_what_padded_columns_hold_changes_no_bit(impl_device):
    logits, labels = batch("peaked", rows=3, vocab_size=COLUMNS)
    results = [
        _call(impl_device, padded_shard(logits, 0, 30, fill), labels, vocab_size=COLUMNS, **EVERY)[:2]
        for fill in (0.0, NAN, INF, -INF, 1e30)
    ]
    for result in results:
        torch.testing.assert_close(result, results[0], rtol=0, atol=0)


def test_one_column_more_than_whole_vectors_under_softcap(impl_device):
    """Lanes beyond the last column that come back as -softcap leak mass: e^-1 each at softcap 1."""
    for columns in (32001, 32008):
        logits, labels = batch("peaked", rows=2, vocab_size=32001)
        loss, grad, _ = _call(
            impl_device, padded_shard(logits * 1e-3, 0, columns), labels, softcap=1.0, vocab_size=32001
        )
        oracle = cross_entropy_fp64(logits * 1e-3, labels, softcap=1.0)
        peer = cross_entropy_same_dtype(logits * 1e-3, labels, softcap=1.0)
        assert_within_budget(loss, oracle.loss, peer.loss)
        assert_within_budget(grad[:, :32001], oracle.grad, peer.grad)


def test_num_items_of_every_type(impl_device):
    device = impl_device[1]
    made = _rows("some_ignored", 3)
    grad_output = torch.tensor(0.75)
    forms = [
        torch.tensor(6),
        torch.tensor(6, device=device),
        torch.tensor([6], dtype=torch.int32, device=device),
        torch.tensor(6.0, device=device),
        torch.tensor(6.0, device=device, requires_grad=True),
        torch.tensor(6.0, device=device, dtype=torch.float64),
        torch.tensor(6.0, device=device, dtype=torch.bfloat16),
    ]
    for gradient in GRADIENTS:
        options = {"reduction": "sum", "z_loss": 0.02, "gradient": gradient}
        expected, expected_grad = _check(impl_device, *made, grad_output, num_items=6, **options)
        for num_items in forms[GRADIENTS.index(gradient) :: 3]:
            before, version = num_items.detach().clone(), num_items._version
            loss, grad, _ = _call(impl_device, *made, grad_output, num_items=num_items, **options)
            assert loss.shape == () and torch.equal(loss, expected) and torch.equal(grad, expected_grad)
            assert torch.equal(num_items, before) and num_items._version == version


@pytest.mark.parametrize("gradient", GRADIENTS)
def test_no_items_give_no_loss_and_no_gradient(impl_device, gradient):
    """An empty step divides by 0, or weighs by 0 what its rows hold: NaN would spread to every parameter."""
    options = {"reduction": "sum", "z_loss": 0.02, "return_metrics": True, "gradient": gradient}
    for num_items in (0, torch.tensor(0), torch.tensor(0.0), torch.tensor([0], dtype=torch.int32)):
        kind = "all_ignored" if isinstance(num_items, int) else "peaked"
        logits, labels = batch(kind, rows=3, vocab_size=COLUMNS)
        logits[0, 4], labels[1] = NAN, COLUMNS
        loss, grad, metrics = _call(impl_device, logits, labels, num_items=num_items, **options)
        assert loss.item() == 0 and not grad.any() and metrics.z_loss.item() == 0


@pytest.mark.parametrize("as_tensor", [False, True])
def test_accumulated_micro_batches_are_the_mean_of_the_whole_batch(impl_device, as_tensor):
    """Means of micro-batches, averaged, weigh a token by how many are ignored beside it."""
    logits, labels = _rows("some_ignored", 12)
    labels[:3] = IGNORE_INDEX
    count = (labels != IGNORE_INDEX).sum()
    num_items = count.to(impl_device[1]) if as_tensor else int(count)
    options = {"label_smoothing": 0.1, "z_loss": 0.02}
    losses, gradients = [], []
    for rows in (slice(0, 2), slice(2, 5), slice(5, 12)):
        loss, grad, _ = _call(
            impl_device, logits[rows], labels[rows], reduction="sum", num_items=num_items, **options
        )
        losses.append(loss)
        gradients.append(grad)
    oracle = cross_entropy_fp64(logits, labels, **options)
    peer = cross_entropy_same_dtype(logits, labels, **options)
    assert_within_budget(torch.stack(losses).sum(), oracle.loss, peer.loss)
    assert_within_budget(torch.cat(gradients), oracle.grad, peer.grad)
