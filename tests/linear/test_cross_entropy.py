"""The loss of a projection without its logits: values and gradients are those of the whole computation."""

from itertools import product

import pytest
import torch

from tests.support import linear
from tests.support.budget import K
from tests.support.inputs import DTYPES, IGNORE_INDEX, grad_output_layouts
from tests.support.layouts import label_layouts, logits_layouts
from tests.support.linear import (
    BY_WAY,
    COLUMNS,
    TWO_WAYS,
    WAYS,
    WIDTH,
    Results,
    assert_right,
    check,
    grad_output_of,
    run,
)
from tests.support.logits import REDUCTIONS
from tests.support.pairs import covering
from vocab_parallel_ce import linear_cross_entropy

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize("chunk", ["auto", 4])
def test_grad_outputs_of_every_layout(impl_device, chunk):
    """One value for all tokens, a stride of 0 or a transposed view must not be read as dense memory."""
    inputs = linear.projection("peaked", 6).shaped(2, 3)
    for _, grad_output in grad_output_layouts((2, 3)):
        kept = grad_output.clone()
        result = check(impl_device, inputs, grad_output, reduction="none", chunk_tokens=chunk)
        assert result.outputs[0].shape == (2, 3) and torch.equal(grad_output, kept)


@pytest.mark.parametrize("leading", [(4,), (2, 3), (2, 1, 3), (2, 1, 1, 2), (1, 1), (1,)])
def test_shapes_and_dtypes(impl_device, leading):
    rows = torch.Size(leading).numel()
    for dtype, reduction in zip(DTYPES, REDUCTIONS, strict=True):
        inputs = linear.projection("peaked", rows, dtype=dtype, bias=True).shaped(*leading)
        (loss,), *gradients = run(impl_device, inputs, reduction=reduction)
        assert loss.shape == (leading if reduction == "none" else ()) and loss.dtype == torch.float32
        for gradient, tensor in zip(gradients, (inputs.hidden, inputs.weight, inputs.bias), strict=True):
            assert gradient.shape == tensor.shape and gradient.dtype == dtype


@BY_WAY
def test_no_tokens(impl_device, way):
    inputs = linear.Projection(torch.zeros(0, 3, WIDTH), torch.randn(COLUMNS, WIDTH), torch.zeros(0, 3).long())
    (loss,), hidden, weight, _ = run(impl_device, inputs, **way)
    assert loss.shape == ((0, 3) if way["reduction"] == "none" else ()) and loss.sum().item() == 0
    assert hidden.shape == (0, 3, WIDTH) and torch.equal(weight, torch.zeros(COLUMNS, WIDTH))


CHUNKED = covering(chunk=(1, 2, 5, 7, 100), way=tuple(WAYS), dtype=DTYPES, bias=(False, True))


@pytest.mark.parametrize("case", CHUNKED, ids=lambda case: f"{case['chunk']}-{case['way']}")
def test_chunks_of_any_size(impl_device, case):
    way = WAYS[case["way"]]
    inputs = linear.projection("peaked", 7, dtype=case["dtype"], bias=case["bias"])
    chunked = check(impl_device, inputs, grad_output_of(way, 7), chunk_tokens=case["chunk"], **way)
    whole = run(impl_device, inputs, grad_output_of(way, 7), chunk_tokens=7, **way)
    truth = linear.linear_fp64(inputs, grad_output_of(way, 7), **way)
    linear.assert_results(chunked, truth, whole)


@BY_WAY
def test_1024_chunks_lose_no_more_of_the_weights_gradient_than_one(impl_device, way):
    """Accumulated in bf16 from chunk to chunk it would lose most of its digits."""
    if impl_device == ("triton", "cpu"):
        pytest.skip("thousands of interpreted launches")
    inputs = linear.many_tokens(1024, 16, torch.bfloat16)
    grad_output = grad_output_of(way, 1024)
    truth = linear.linear_fp64(inputs, grad_output, **way).weight
    one, many = (
        run(impl_device, inputs, grad_output, chunk_tokens=chunk, **way).weight.double() for chunk in (1024, 1)
    )
    assert (many - truth).norm() <= K * (one - truth).norm()
    assert (many - truth).abs().max() <= K * (one - truth).abs().max()


EXACT = covering(dtype=DTYPES, way=tuple(WAYS), ones=((5,), (5, 4, 3)), bias=(False, True), chunk=("auto", 3))


@pytest.mark.parametrize("case", EXACT, ids=lambda case: f"{case['way']}-{len(case['ones'])}")
def test_what_every_dtype_can_hold_is_computed_without_any_error(impl_device, case):
    """Hidden states of 0 and 1, and probabilities that are 0 or powers of two: see :func:`cube`."""
    inputs, way = linear.cube(case["dtype"], case["ones"], case["bias"]), WAYS[case["way"]]
    grad_output = torch.tensor([0.0, 1.0, 2.0, -1.0]).repeat(4) if case["way"] == "none" else torch.tensor(0.5)
    options = {"chunk_tokens": case["chunk"], **way}
    result = check(impl_device, inputs, grad_output, **options)
    truth = linear.linear_fp64(inputs, grad_output, **options)
    for gradient, expected in zip(result[1:], truth[1:], strict=True):
        assert gradient is expected is None or torch.equal(gradient, expected.to(gradient.dtype))
    if case["ones"] == (5,):
        # One column has all of the probability: the loss is a difference of two integers.
        assert torch.equal(result.outputs[0], truth.outputs[0].float())


@TWO_WAYS
def test_the_gradient_of_a_confident_label_keeps_its_digits(impl_device, way):
    """At p = 0.999 the label's gradient is -0.001: p rounded to bf16 first would lose all of it."""
    for dtype in (torch.bfloat16, torch.float16):
        inputs = linear.projection("confident", dtype=dtype, exact=True, broad=False, gaps=(6.9,))
        _, *gradients = run(impl_device, inputs, grad_output_of(way), **way)
        assert_right(Results((), *gradients), inputs, grad_output_of(way), **way)


@BY_WAY
@pytest.mark.parametrize("bad", [NAN, INF])
def test_what_ignored_tokens_hold_is_seen_by_nobody(impl_device, bad, way):
    """0 times NaN in the matmul of the weight's gradient would be NaN, as would the grad_output's."""
    for size in ({}, {"chunk_tokens": 2}, {"valid_tokens": 3}, {"valid_tokens": 5, "chunk_tokens": 2}):
        inputs = linear.projection("peaked", bias=True)
        inputs.hidden[0], inputs.hidden[2, 3] = bad, bad
        inputs.labels[[0, 2]] = IGNORE_INDEX
        grad_output = grad_output_of(way)
        if grad_output.dim():
            grad_output[2] = bad
        result = check(impl_device, inputs, grad_output, **size, **way)
        assert not result.hidden[[0, 2]].any() and result.weight.isfinite().all()


def test_a_divisor_of_0_items_gives_no_loss_and_no_gradient(impl_device):
    inputs = linear.projection("peaked")
    inputs.labels[1] = COLUMNS
    for num_items, gradient in product((0, torch.tensor(0)), ("in_forward", "in_backward")):
        (loss,), hidden, weight, _ = run(impl_device, inputs, reduction="sum", num_items=num_items, gradient=gradient)
        assert loss.item() == 0 and not hidden.any() and not weight.any()


@BY_WAY
def test_a_label_outside_the_vocabulary_is_nan(impl_device, way):
    inputs = linear.projection("peaked")
    inputs.labels[1], inputs.labels[3] = -1, COLUMNS
    (loss,), hidden, _, _ = check(impl_device, inputs, chunk_tokens=2, **way)
    assert loss.isnan().any() and hidden.isnan().any(dim=1).tolist() == [False, True, False, True, False]
    with pytest.raises(ValueError, match=r"^labels: .* 2 outside.*\(1,\): -1$"):
        run(impl_device, inputs, check_labels=True, **way)


@BY_WAY
def test_valid_tokens_drops_the_ignored_and_changes_nothing_else(impl_device, way):
    inputs = linear.projection("some_ignored", 7, bias=True)
    count = int((inputs.labels != IGNORE_INDEX).sum())
    assert 1 < count < 7
    for valid_tokens, chunk in ((count, "auto"), (count + 1, 2), (7, 3), (1000, 1)):
        options = {"valid_tokens": valid_tokens, "chunk_tokens": chunk, **way}
        result = check(impl_device, inputs, grad_output_of(way, 7), **options)
        assert not result.hidden[inputs.labels == IGNORE_INDEX].any()


@pytest.mark.interpreted(1)
@pytest.mark.parametrize("way", [WAYS["sum"], WAYS["none"]], ids=str)
def test_hidden_states_of_every_layout(impl_device, way):
    """Transposed, shifted, expanded and size-1 views against the contiguous copy of the same values."""
    impl, device = impl_device
    weight = torch.randn(COLUMNS, WIDTH, generator=torch.Generator().manual_seed(1))
    layouts = logits_layouts(WIDTH, device=device)
    # Kernels see the dense logits alone: interpreted, a few layouts are enough.
    for layout in layouts[::5] if impl_device == ("triton", "cpu") else layouts:
        values = layout.view.detach().cpu().contiguous()
        # The least likely column: a gradient near 1, next to which one rounding of p is small.
        inputs = linear.Projection(values, weight, (values @ weight.T).argmin(dim=-1))
        grad_output = torch.tensor(0.5)
        if way["reduction"] == "none":
            grad_output = torch.rand(inputs.labels.shape, generator=torch.Generator().manual_seed(2)) + 0.5
        leaves = layout.view.detach().requires_grad_(), weight.to(device).requires_grad_()
        options = {**way, "label_smoothing": 0.1}
        loss = linear_cross_entropy(*leaves, inputs.labels.to(device), impl=impl, **options)
        gradients = torch.autograd.grad(loss, leaves, grad_output.to(device))
        assert_right(Results((loss,), *gradients, None), inputs, grad_output, **options)
        assert layout.outside_is_untouched() and torch.equal(layout.view.cpu(), values), layout.name


def test_weights_of_every_layout(impl_device):
    """Rows of a wider tensor, every other row, and column-major, as a weight that is stored transposed."""
    impl, device = impl_device
    inputs = linear.projection("some_ignored", dtype=torch.bfloat16)
    wide, tall, turned = inputs.weight.new_full((3, 2 * COLUMNS, WIDTH + 3), NAN).to(device)
    views = [wide[:COLUMNS, 3:], tall[::2, :WIDTH], turned.view(-1)[: COLUMNS * WIDTH].view(WIDTH, -1).t()]
    for view, way in product(views, WAYS.values()):
        view.copy_(inputs.weight)
        hidden, weight = inputs.hidden.to(device).requires_grad_(), view.detach().requires_grad_()
        loss = linear_cross_entropy(hidden, weight, inputs.labels.to(device), impl=impl, **way)
        gradients = torch.autograd.grad(loss, (hidden, weight), torch.ones_like(loss))
        assert_right(Results((loss,), *gradients, None), inputs, **way)
        assert torch.equal(view.cpu(), inputs.weight)


@pytest.mark.parametrize("shape", [(2, 3), (1, 4), (4, 1)])
@TWO_WAYS
def test_labels_of_every_layout_and_width(impl_device, way, shape):
    impl, device = impl_device
    inputs = linear.projection("some_ignored", torch.Size(shape).numel()).shaped(*shape)
    results = []
    for name, view in label_layouts(inputs.labels.to(device)):
        before, version = view.clone(), view._version
        leaves = [x.to(device).requires_grad_() for x in (inputs.hidden.clone(), inputs.weight.clone())]
        loss = linear_cross_entropy(*leaves, view, impl=impl, **way)
        results.append((loss, *torch.autograd.grad(loss.sum(), leaves)))
        assert torch.equal(view, before) and view._version == version, name
    for result in results:
        assert all(map(torch.equal, result, results[0]))
