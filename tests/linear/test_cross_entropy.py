"""The loss of a projection without its logits: values and gradients are those of the whole computation."""

from __future__ import annotations

from itertools import product

import pytest
import torch
import torch.nn.functional as F

from tests.support.budget import K, assert_within_budget
from tests.support.inputs import DTYPES, IGNORE_INDEX, upstream_gradients
from tests.support.layouts import label_layouts, logits_layouts
from tests.support.linear import (
    LINEAR_KINDS,
    Projection,
    Results,
    assert_results,
    check,
    cube,
    linear_fp64,
    linear_same_dtype,
    many_tokens,
    projection,
    random_upstream,
    run,
)
from tests.logits.test_options import DIVISORS, SMOOTHING, _covering
from vocab_parallel_ce import linear_cross_entropy

# Few rows: the interpreter takes tens of milliseconds for each.
ROWS, COLUMNS, WIDTH = 5, 21, 8
REDUCTIONS = ("mean", "sum", "none")
WAYS = {
    "mean": {"reduction": "mean", "gradient": "in_forward"},
    "mean, in_backward": {"reduction": "mean", "gradient": "in_backward"},
    "sum": {"reduction": "sum", "gradient": "in_forward"},
    "sum, in_backward": {"reduction": "sum", "gradient": "in_backward"},
    "none": {"reduction": "none"},
}
NAN, INF = float("nan"), float("inf")


def _made(kind="some_ignored", rows=ROWS, **settings):
    return projection(kind, rows=rows, vocab_size=COLUMNS, width=WIDTH, **settings)


def _upstream(way, rows=ROWS):
    return random_upstream(rows) if way["reduction"] == "none" else torch.tensor(0.75)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("dtype", (torch.float64, *DTYPES))
def test_the_oracle_is_pytorchs_linear_and_cross_entropy(dtype, reduction):
    inputs = _made(dtype=dtype if dtype != torch.float64 else torch.float32, bias=True).to(dtype)
    grad_output = _upstream({"reduction": reduction})
    leaves = [x.clone().requires_grad_() for x in (inputs.hidden, inputs.weight, inputs.bias)]
    logits = F.linear(*leaves)
    logits = logits if dtype == torch.float64 else logits.float()
    expected = F.cross_entropy(logits, inputs.labels, reduction=reduction)
    expected.backward(grad_output.to(expected))
    compute = linear_fp64 if dtype == torch.float64 else linear_same_dtype
    (loss,), *gradients = compute(inputs, grad_output, reduction=reduction)
    torch.testing.assert_close(loss, expected.detach())
    for gradient, leaf in zip(gradients, leaves, strict=True):
        torch.testing.assert_close(gradient, leaf.grad)


HARD = _covering(kind=LINEAR_KINDS, dtype=DTYPES, way=tuple(WAYS), bias=(False, True), chunk=("auto", 2))


@pytest.mark.parametrize("case", HARD, ids=lambda case: f"{case['kind']}-{case['way']}")
def test_hard_rows_of_every_dtype(impl_device, case):
    """Every pair of a kind of row, a dtype, a way of computing the gradient, and a number of chunks."""
    way = WAYS[case["way"]]
    inputs = _made(case["kind"], dtype=case["dtype"], bias=case["bias"])
    check(impl_device, inputs, _upstream(way), chunk_tokens=case["chunk"], **way)


@pytest.mark.parametrize("chunk", ["auto", 4])
def test_upstream_gradients_of_every_layout(impl_device, chunk):
    """One value for all tokens, a stride of 0 or a transposed view must not be read as dense memory."""
    inputs = _made("peaked", 6).shaped(2, 3)
    for _, grad_output in upstream_gradients((2, 3)):
        kept = grad_output.clone()
        result = check(impl_device, inputs, grad_output, reduction="none", chunk_tokens=chunk)
        assert result.outputs[0].shape == (2, 3) and torch.equal(grad_output, kept)


@pytest.mark.parametrize("way", [name for name in WAYS if name != "none"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_power_of_two_upstream_scales_gradients_exactly(impl_device, dtype, way):
    inputs = _made(dtype=dtype, bias=True)
    whole = run(impl_device, inputs, torch.tensor(1.0), **WAYS[way])
    eighth = run(impl_device, inputs, torch.tensor(0.125), **WAYS[way])
    for gradient, expected in zip(eighth[1:], whole[1:], strict=True):
        assert torch.equal(gradient, expected / 8)


@pytest.mark.parametrize("leading", [(4,), (2, 3), (2, 1, 3), (2, 1, 1, 2), (1, 1), (1,)])
def test_shapes_and_dtypes(impl_device, leading):
    """Reduced losses are scalars, others have the shape of the labels; all are fp32."""
    rows = torch.Size(leading).numel()
    for dtype, reduction in zip(DTYPES, REDUCTIONS, strict=True):
        inputs = _made("peaked", rows, dtype=dtype, bias=True).shaped(*leading)
        (loss,), *gradients = run(impl_device, inputs, reduction=reduction)
        assert loss.shape == (leading if reduction == "none" else ()) and loss.dtype == torch.float32
        for gradient, tensor in zip(gradients, (inputs.hidden, inputs.weight, inputs.bias), strict=True):
            assert gradient.shape == tensor.shape and gradient.dtype == dtype


@pytest.mark.parametrize("way", WAYS)
def test_no_tokens(impl_device, way):
    inputs = Projection(torch.zeros(0, 3, WIDTH), torch.randn(COLUMNS, WIDTH), torch.zeros(0, 3).long())
    (loss,), hidden, weight, _ = run(impl_device, inputs, **WAYS[way])
    assert loss.shape == ((0, 3) if way == "none" else ()) and loss.sum().item() == 0
    assert hidden.shape == (0, 3, WIDTH) and torch.equal(weight, torch.zeros(COLUMNS, WIDTH))


CHUNKED = _covering(chunk=(1, 2, 3, 5, 7, 100), way=tuple(WAYS), dtype=DTYPES, bias=(False, True))


@pytest.mark.parametrize("case", CHUNKED, ids=lambda case: f"{case['chunk']}-{case['way']}")
def test_chunks_of_any_size(impl_device, case):
    """Of one token, of numbers that do not divide the tokens, of more than there are."""
    way = WAYS[case["way"]]
    inputs = _made("peaked", 7, dtype=case["dtype"], bias=case["bias"])
    chunked = check(impl_device, inputs, _upstream(way, 7), chunk_tokens=case["chunk"], **way)
    whole = run(impl_device, inputs, _upstream(way, 7), chunk_tokens=7, **way)
    truth = linear_fp64(inputs, _upstream(way, 7), **way)
    assert_results(chunked, truth, whole)


@pytest.mark.parametrize("way", WAYS)
def test_1024_chunks_lose_no_more_of_the_weights_gradient_than_one(impl_device, way):
    """Accumulated in bf16 from chunk to chunk it would lose most of its digits."""
    if impl_device == ("triton", "cpu"):
        pytest.skip("thousands of interpreted launches")
    inputs, way = many_tokens(1024, 16, WIDTH, torch.bfloat16), WAYS[way]
    grad_output = _upstream(way, 1024)
    truth = linear_fp64(inputs, grad_output, **way).weight
    one, many = (
        run(impl_device, inputs, grad_output, chunk_tokens=chunk, **way).weight.double()
        for chunk in (1024, 1)
    )
    assert (many - truth).norm() <= K * (one - truth).norm()
    assert (many - truth).abs().max() <= K * (one - truth).abs().max()


EXACT = _covering(
    dtype=DTYPES, way=tuple(WAYS), ones=((5,), (5, 4, 3)), bias=(False, True), chunk=("auto", 3)
)


@pytest.mark.parametrize("case", EXACT, ids=lambda case: f"{case['way']}-{len(case['ones'])}")
def test_what_every_dtype_can_hold_is_computed_without_any_error(impl_device, case):
    """Hidden states of 0 and 1, and probabilities that are 0 or powers of two: see :func:`cube`."""
    inputs, way = cube(case["dtype"], case["ones"], case["bias"]), WAYS[case["way"]]
    grad_output = (
        torch.tensor([0.0, 1.0, 2.0, -1.0]).repeat(4) if case["way"] == "none" else torch.tensor(0.5)
    )
    options = {"chunk_tokens": case["chunk"], **way}
    result = check(impl_device, inputs, grad_output, **options)
    truth = linear_fp64(inputs, grad_output, **options)
    for gradient, expected in zip(result[1:], truth[1:], strict=True):
        assert gradient is expected is None or torch.equal(gradient, expected.to(gradient.dtype))
    if case["ones"] == (5,):
        # One column has all of the probability: the loss is a difference of two integers.
        assert torch.equal(result.outputs[0], truth.outputs[0].float())


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("gap", [4.6, 6.9])
def test_the_gradient_of_a_confident_label_keeps_its_digits(impl_device, gap, way):
    """At p = 0.999 the label's gradient is -0.001: p rounded to bf16 first would lose all of it."""
    way = WAYS[way]
    for dtype in (torch.bfloat16, torch.float16):
        inputs = _made("confident", dtype=dtype, exact=True, broad=False, gaps=(gap,))
        result = run(impl_device, inputs, _upstream(way), **way)
        truth, peer = (compute(inputs, _upstream(way), **way) for compute in (linear_fp64, linear_same_dtype))
        for gradients in zip((result.hidden, result.weight), truth[1:], peer[1:], strict=False):
            assert_within_budget(*gradients)


PAIRS = _covering(
    smoothing=tuple(SMOOTHING),
    divisor=tuple(DIVISORS),
    z_loss=(0.0, 0.02),
    softcap=(None, 10.0),
    logit_scale=(1.0, 0.4),
    padding=(0, 5),
    return_metrics=(False, True),
    kind=("peaked", "some_ignored", "shard_edges", "confident"),
    gradient=("auto", "in_forward", "in_backward"),
    dtype=DTYPES,
    bias=(False, True),
    chunk_tokens=("auto", 1, 3),
    valid_tokens=(None, 0, 2),
)


@pytest.mark.parametrize("case", PAIRS, ids=map(str, range(len(PAIRS))))
def test_every_pair_of_options_on_together(impl_device, case):
    """``valid_tokens`` here is by how many more there could be."""
    inputs = _made(case["kind"], dtype=case["dtype"], bias=case["bias"], exact=case["return_metrics"])
    ignored = inputs.labels == IGNORE_INDEX
    inputs.hidden[ignored] = NAN
    options = {name: case[name] for name in ("z_loss", "softcap", "logit_scale", "return_metrics", "padding")}
    options |= {
        "chunk_tokens": case["chunk_tokens"],
        **SMOOTHING[case["smoothing"]],
        **DIVISORS[case["divisor"]],
    }
    if case["valid_tokens"] is not None:
        options["valid_tokens"] = int((~ignored).sum()) + case["valid_tokens"]
    if case["divisor"] != "none":
        options["gradient"] = case["gradient"]
    result = check(impl_device, inputs, _upstream(options), **options)
    assert not result.hidden[ignored].any()


def test_options_given_at_their_off_values_change_no_bit(impl_device):
    off = {
        "label_smoothing": 0,
        "smoothing_formula": "megatron",
        "z_loss": 0,
        "softcap": None,
        "logit_scale": 1,
        "num_items": None,
        "return_metrics": False,
        "vocab_size": COLUMNS,
        "sequence_parallel": False,
        "reduce_hidden_grad": True,
        "main_grad": None,
        "valid_tokens": None,
        "chunk_tokens": "auto",
        "memory_budget": None,
    }
    inputs = _made(dtype=torch.bfloat16)
    for reduction in REDUCTIONS:
        omitted, given = (run(impl_device, inputs, reduction=reduction, **options) for options in ({}, off))
        assert torch.equal(given.outputs[0], omitted.outputs[0])
        assert torch.equal(given.hidden, omitted.hidden) and torch.equal(given.weight, omitted.weight)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("bad", [NAN, INF])
def test_what_ignored_tokens_hold_is_seen_by_nobody(impl_device, bad, way):
    """0 times NaN in the matmul of the weight's gradient would be NaN, as would the grad_output's."""
    way = WAYS[way]
    for size in ({}, {"chunk_tokens": 2}, {"valid_tokens": 3}, {"valid_tokens": 5, "chunk_tokens": 2}):
        inputs = _made("peaked", bias=True)
        inputs.hidden[0], inputs.hidden[2, 3] = bad, bad
        inputs.labels[[0, 2]] = IGNORE_INDEX
        grad_output = _upstream(way)
        if grad_output.dim():
            grad_output[2] = bad
        result = check(impl_device, inputs, grad_output, **size, **way)
        assert not result.hidden[[0, 2]].any() and result.weight.isfinite().all()


@pytest.mark.parametrize("ignore_index", [-1, 7, COLUMNS + 5])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_any_ignore_index(impl_device, reduction, ignore_index):
    inputs = _made("peaked")
    inputs.labels[::3] = ignore_index
    check(impl_device, inputs, reduction=reduction, ignore_index=ignore_index)


@pytest.mark.parametrize("way", WAYS)
def test_all_ignored_is_0_and_still_attached(impl_device, way):
    """A constant would leave the other ranks of a sharded model waiting for gradients."""
    for options in ({}, {"valid_tokens": 0}, {"chunk_tokens": 2, "label_smoothing": 0.1}):
        (loss,), *gradients = run(
            impl_device, _made("all_ignored", broad=False, bias=True), **options, **WAYS[way]
        )
        for tensor in (loss, *gradients):
            assert torch.equal(tensor, torch.zeros_like(tensor))


def test_a_divisor_of_0_items_gives_no_loss_and_no_gradient(impl_device):
    inputs = _made("peaked")
    inputs.labels[1] = COLUMNS
    for num_items, gradient in product((0, torch.tensor(0)), ("in_forward", "in_backward")):
        (loss,), hidden, weight, _ = run(
            impl_device, inputs, reduction="sum", num_items=num_items, gradient=gradient
        )
        assert loss.item() == 0 and not hidden.any() and not weight.any()


@pytest.mark.parametrize("way", WAYS)
def test_a_label_outside_the_vocabulary_is_nan(impl_device, way):
    inputs = _made("peaked")
    inputs.labels[1], inputs.labels[3] = -1, COLUMNS
    (loss,), hidden, _, _ = check(impl_device, inputs, chunk_tokens=2, **WAYS[way])
    assert loss.isnan().any() and hidden.isnan().any(dim=1).tolist() == [False, True, False, True, False]
    with pytest.raises(ValueError, match=r"^labels: .* 2 outside.*\(1,\): -1$"):
        run(impl_device, inputs, check_labels=True, **WAYS[way])


@pytest.mark.parametrize("way", WAYS)
def test_columns_that_a_bias_excludes(impl_device, way):
    inputs = _made("peaked", bias=True)
    excluded = [column for column in (0, 4, 9, COLUMNS - 1) if column not in inputs.labels]
    inputs.bias[excluded] = -INF
    result = check(impl_device, inputs, _upstream(WAYS[way]), **WAYS[way])
    assert excluded and not result.weight[excluded].any() and not result.bias[excluded].any()


@pytest.mark.parametrize("way", WAYS)
def test_valid_tokens_drops_the_ignored_and_changes_nothing_else(impl_device, way):
    way = WAYS[way]
    inputs = _made("some_ignored", 7, bias=True)
    count = int((inputs.labels != IGNORE_INDEX).sum())
    assert 1 < count < 7
    for valid_tokens, chunk in ((count, "auto"), (count + 1, 2), (7, 3), (1000, 1)):
        options = {"valid_tokens": valid_tokens, "chunk_tokens": chunk, **way}
        result = check(impl_device, inputs, _upstream(way, 7), **options)
        assert not result.hidden[inputs.labels == IGNORE_INDEX].any()
    for valid_tokens in (count - 1, 1, 0):
        (loss,), *_ = run(impl_device, inputs, valid_tokens=valid_tokens, **way)
        assert loss.isnan().any(), "more labels than were promised"


@pytest.mark.parametrize("way", ["sum", "none"])
def test_hidden_states_of_every_layout(impl_device, way):
    """Transposed, shifted, expanded and size-1 views against the contiguous copy of the same values."""
    impl, device = impl_device
    way = WAYS[way]
    weight = torch.randn(COLUMNS, WIDTH, generator=torch.Generator().manual_seed(1))
    for layout in logits_layouts(WIDTH, device=device):
        values = layout.view.detach().cpu().contiguous()
        # The least likely column: a gradient near 1, next to which one rounding of p is small.
        inputs = Projection(values, weight, (values @ weight.T).argmin(dim=-1))
        grad_output = torch.tensor(0.5)
        if way["reduction"] == "none":
            grad_output = torch.rand(inputs.labels.shape, generator=torch.Generator().manual_seed(2)) + 0.5
        leaves = layout.view.detach().requires_grad_(), weight.to(device).requires_grad_()
        options = {**way, "label_smoothing": 0.1}
        loss = linear_cross_entropy(*leaves, inputs.labels.to(device), impl=impl, **options)
        gradients = torch.autograd.grad(loss, leaves, grad_output.to(device))
        expected = (compute(inputs, grad_output, **options) for compute in (linear_fp64, linear_same_dtype))
        assert_results(Results((loss,), *gradients, None), *expected)
        assert layout.outside_is_untouched() and torch.equal(layout.view.cpu(), values), layout.name


def test_weights_of_every_layout(impl_device):
    """Rows of a wider tensor, every other row, and column-major, as a weight that is stored transposed."""
    impl, device = impl_device
    inputs = _made("some_ignored", dtype=torch.bfloat16)
    wide, tall, turned = inputs.weight.new_full((3, 2 * COLUMNS, WIDTH + 3), NAN).to(device)
    views = [wide[:COLUMNS, 3:], tall[::2, :WIDTH], turned.view(-1)[: COLUMNS * WIDTH].view(WIDTH, -1).t()]
    for view, way in product(views, WAYS.values()):
        view.copy_(inputs.weight)
        hidden, weight = inputs.hidden.to(device).requires_grad_(), view.detach().requires_grad_()
        loss = linear_cross_entropy(hidden, weight, inputs.labels.to(device), impl=impl, **way)
        gradients = torch.autograd.grad(loss, (hidden, weight), torch.ones_like(loss))
        expected = (compute(inputs, **way) for compute in (linear_fp64, linear_same_dtype))
        assert_results(Results((loss,), *gradients, None), *expected)
        assert torch.equal(view.cpu(), inputs.weight)


@pytest.mark.parametrize("shape", [(2, 3), (1, 4), (4, 1)])
@pytest.mark.parametrize("way", ["mean", "none"])
def test_labels_of_every_layout_and_width(impl_device, way, shape):
    impl, device = impl_device
    inputs = _made("some_ignored", torch.Size(shape).numel()).shaped(*shape)
    results = []
    for name, view in label_layouts(inputs.labels.to(device)):
        before, version = view.clone(), view._version
        leaves = [x.to(device).requires_grad_() for x in (inputs.hidden.clone(), inputs.weight.clone())]
        loss = linear_cross_entropy(*leaves, view, impl=impl, **WAYS[way])
        results.append((loss, *torch.autograd.grad(loss.sum(), leaves)))
        assert torch.equal(view, before) and view._version == version, name
    for result in results:
        assert all(map(torch.equal, result, results[0]))


def test_more_tokens_than_the_hidden_size(impl_device):
    """And columns that fill no whole vector."""
    for dtype in DTYPES:
        inputs = many_tokens(32, 131, 16, dtype)
        check(impl_device, inputs, softcap=8.0, logit_scale=1.5, chunk_tokens=5, reduction="sum")
