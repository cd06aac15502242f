"""Where the gradient is written and when; what survives; what a repeated backward does."""

import pytest
import torch

from tests.support.inputs import batch
from tests.support.layouts import logits_layouts
from tests.support.logits import EVERY, GRADIENTS, REDUCTIONS, Case, Results, assert_right
from tests.support.oracle import cross_entropy_fp64
from tests.support.random_wrappers import VIEWS
from vocab_parallel_ce import vocab_parallel_cross_entropy


@pytest.mark.quick(9)
@pytest.mark.interpreted(4)
@pytest.mark.parametrize("label_smoothing", (0.0, 0.1))
@pytest.mark.parametrize("gradient", (*GRADIENTS, "auto"))
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_gradient_of_every_way(impl_device, gradient, reduction, label_smoothing):
    """A scale or a token taken for all shows in random grad_outputs. Metrics after the loss read logits."""
    case = Case(impl_device)
    options = {"reduction": reduction, "label_smoothing": label_smoothing}
    loss = case.loss(gradient=gradient, **options)
    if gradient != "in_forward":
        assert case.logits_are_untouched() and case.logits._version == 0
    labels, grad_output = case.labels.clone(), case.grad_output(loss)
    kept = grad_output.clone()
    (grad,) = torch.autograd.grad(loss, case.logits, grad_output)
    case.assert_right(loss, grad, grad_output, **options)
    is_seen = gradient in ("out_of_place", "auto")  # the case holds its logits
    assert (grad.data_ptr() == case.logits.data_ptr()) != is_seen
    assert case.logits_are_untouched() == is_seen
    assert torch.equal(case.labels, labels) and case.labels._version == 0
    assert torch.equal(grad_output, kept) and grad_output._version == 0


# Of [2, 4, V]; "" is the tensor itself.
ROW_VIEWS = ("", "flat", "later rows", "second chunk", "transpose", "every other")


def _labels_of(logits):
    return torch.arange(logits.shape[:-1].numel(), device=logits.device).view(logits.shape[:-1])


@pytest.mark.parametrize("view", ROW_VIEWS)
@pytest.mark.parametrize("reduction", ("mean", "none"))
def test_a_leaf_and_a_view_of_one_keep_their_values(impl_device, view, reduction):
    """Overwritten, ``p.grad`` was ``p`` itself, and SGD made of it (1 - lr) times the gradient."""
    impl, device = impl_device
    values = batch("peaked", rows=8, vocab_size=30).logits.view(2, 4, 30)
    p = values.to(device).clone().requires_grad_()
    logits = VIEWS[view](p)
    labels = _labels_of(logits)
    loss = vocab_parallel_cross_entropy(logits, labels, impl=impl, reduction=reduction)
    loss.backward(torch.ones_like(loss))
    results = Results((loss,), VIEWS[view](p.grad))
    assert_right(results, VIEWS[view](values), labels.cpu(), reduction=reduction)
    assert torch.equal(p.detach().cpu(), values) and p.grad.data_ptr() != p.data_ptr()
    torch.optim.SGD([p], lr=0.5).step()
    torch.testing.assert_close(p.detach().cpu(), values - 0.5 * p.grad.cpu())


@pytest.mark.parametrize("view", ROW_VIEWS)
@pytest.mark.parametrize("gradient", ("auto", "in_backward", "out_of_place"))
@pytest.mark.parametrize("reduction", ("mean", "none"))
def test_logits_that_are_a_view_in_the_graph(impl_device, gradient, view, reduction):
    """A raised version makes autograd rebuild a view's node: hooks on the old one are lost, or crash."""
    impl, device = impl_device
    values = batch("peaked", rows=8, vocab_size=30).logits.view(2, 4, 30)
    source = values.to(device).requires_grad_()
    logits = VIEWS[view]((source * 1).view(2, 4, 30))
    labels = _labels_of(logits)
    logits.retain_grad()
    before_loss, after_loss = [], []
    logits.register_hook(before_loss.append)
    loss = vocab_parallel_cross_entropy(logits, labels, impl=impl, reduction=reduction, gradient=gradient)
    logits.register_hook(after_loss.append)
    loss.backward(torch.ones_like(loss))
    assert len(before_loss) == len(after_loss) == 1
    for grad in (logits.grad, VIEWS[view](source.grad)):
        assert_right(Results((loss,), grad), VIEWS[view](values.detach()), labels.cpu(), reduction=reduction)


def test_in_forward_is_refused_for_a_view_in_the_graph(impl_device):
    case = Case(impl_device)
    logits = case.logits[:-1]
    with pytest.raises(ValueError, match="^gradient: 'in_forward' .* use 'in_backward'"):
        case.loss(logits, gradient="in_forward")
    assert case.logits_are_untouched() and logits._version == 0


@pytest.mark.reference
def test_memory_that_no_graph_knows_is_not_overwritten():
    """A Function that returns a view of its own memory, as ``DTensor.to_local`` does: a DTensor's values."""

    class Local(torch.autograd.Function):
        @staticmethod
        def forward(ctx, anchor, local):
            return local.view_as(local)

        @staticmethod
        def backward(ctx, grad):
            return grad.sum(), None

    local = torch.randn(3, 8)
    kept = local.clone()
    logits = Local.apply(torch.ones((), requires_grad=True), local)
    vocab_parallel_cross_entropy(logits, torch.tensor([1, 2, 3])).backward()
    assert torch.equal(local, kept)


@pytest.mark.parametrize("gradient", GRADIENTS)
@pytest.mark.parametrize("context", ("no_grad", "inference_mode", "requires_grad=False"))
def test_without_a_gradient_logits_are_never_touched(impl_device, gradient, context):
    case = Case(impl_device)
    if context == "requires_grad=False":
        case.logits = case.logits.detach()
        loss = case.loss(gradient=gradient)
    else:
        with getattr(torch, context)():
            loss = case.loss(gradient=gradient)
    assert case.logits._version == 0 and case.logits_are_untouched()
    assert not loss.requires_grad
    torch.testing.assert_close(loss.cpu().double(), cross_entropy_fp64(*case.made).loss, rtol=1e-6, atol=0)


def test_two_losses_over_the_same_logits(impl_device):
    case = Case(impl_device)
    total = case.loss(gradient="in_backward") + case.loss(gradient="in_backward")
    with pytest.raises(RuntimeError, match="gradient='out_of_place'.*modified by an inplace operation"):
        total.backward()

    for gradient in ("auto", "out_of_place"):
        case = Case(impl_device)
        first = case.loss(gradient=gradient)
        (grad,) = torch.autograd.grad(first + 2 * case.loss(gradient=gradient), case.logits)
        case.assert_right(first, grad, torch.tensor(3.0))


@pytest.mark.parametrize("gradient", GRADIENTS)
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_second_and_double_backward(impl_device, gradient, reduction):
    """In place a second backward names the remedy: others scale their saved buffer twice, silently.

    A gradient that pretends to be a constant would be silently wrong when it is differentiated again.
    """
    case = Case(impl_device)
    loss = case.loss(gradient=gradient, reduction=reduction)
    grad_output = case.grad_output(loss)
    (first,) = torch.autograd.grad(loss, case.logits, grad_output, retain_graph=True)
    after_first = case.logits.detach().clone()
    if gradient == "out_of_place":
        (second,) = torch.autograd.grad(loss, case.logits, grad_output)
        assert torch.equal(first, second) and first.data_ptr() != second.data_ptr()
        loss = case.loss(gradient=gradient, reduction=reduction)
        loss.backward(grad_output, retain_graph=True)
        loss.backward(grad_output)
        torch.testing.assert_close(case.source.grad, 2 * first, rtol=0, atol=0)
    else:
        with pytest.raises(RuntimeError, match="out_of_place"):
            torch.autograd.grad(loss, case.logits, grad_output)
    assert torch.equal(case.logits, after_first)

    case = Case(impl_device)
    loss = case.loss(gradient=gradient, reduction=reduction)
    with pytest.raises(RuntimeError, match="cannot be differentiated again"):
        torch.autograd.grad(loss, case.logits, torch.ones_like(loss), create_graph=True)


def test_auto_leaves_fp16_to_backward(impl_device):
    """p / n underflows in fp16 before a loss scale multiplies it: most of the gradient was 0."""
    case = Case(impl_device, dtype=torch.float16, rows=64, columns=4000)
    scale = torch.tensor(65536.0)
    loss = case.loss()
    assert case.logits_are_untouched()
    (grad,) = torch.autograd.grad(loss, case.logits, scale.to(loss.device))
    case.assert_right(loss, grad, scale)
    zeros = (grad == 0)[case.labels != -100].float().mean()
    assert float(zeros) < 0.02


@pytest.mark.interpreted(1)
@pytest.mark.parametrize("gradient", ("in_backward", "in_forward", "out_of_place"))
@pytest.mark.parametrize("columns", (21, 24))
def test_every_layout(impl_device, gradient, columns):
    """Transposed, shifted, expanded and size-1 views against the contiguous copy of the same values."""
    impl, device = impl_device
    for layout in logits_layouts(columns, device=device):
        values = layout.view.detach().clone(memory_format=torch.contiguous_format)
        # The least likely column: a gradient near 1, next to which one rounding of p is small.
        labels = values.argmin(dim=-1)
        logits = layout.view.detach().requires_grad_()
        options = {"reduction": "none", "label_smoothing": 0.1}
        loss = vocab_parallel_cross_entropy(logits, labels, impl=impl, gradient=gradient, **options)
        grad_output = torch.rand(labels.shape, generator=torch.Generator().manual_seed(4)) + 0.5
        (grad,) = torch.autograd.grad(loss, logits, grad_output.to(device))
        assert_right(Results((loss,), grad), values.cpu(), labels.cpu(), grad_output, **options)
        assert layout.outside_is_untouched(), layout.name
        copied = layout.name in ("every other column", "column-major") or layout.shares_elements
        overwritten = grad.data_ptr() == logits.data_ptr()
        assert overwritten == (gradient != "out_of_place" and not copied), layout.name
        assert torch.equal(layout.view, values) != overwritten, layout.name


def test_compiled_caller(impl_device):
    """Options are Python floats, which compiled kernels take for fp64; the graph breaks before them."""
    case = Case(impl_device)

    def step(source, labels):
        loss, metrics = case.loss(source * 2, labels, return_metrics=True, **EVERY)
        return loss * 3 + metrics.token_accuracy

    backend = "inductor" if case.source.is_cuda else "aot_eager"
    loss = torch.compile(step, backend=backend)(case.source, case.labels)
    (grad,) = torch.autograd.grad(loss, case.source)
    eager = step(case.source, case.labels)
    assert torch.equal(loss, eager)
    assert torch.equal(grad, torch.autograd.grad(eager, case.source)[0])


class Drop(torch.autograd.Function):
    """Passes a gradient on at its first backward, and none afterwards."""

    @staticmethod
    def forward(ctx, x, n_backwards):
        ctx.n_backwards = n_backwards
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        ctx.n_backwards.append(1)
        return (grad if len(ctx.n_backwards) == 1 else None), None


def test_a_backward_that_needs_nothing_of_the_loss_looks_at_nothing(impl_device):
    case = Case(impl_device)
    n_backwards = []
    loss = Drop.apply(case.loss(), n_backwards)
    loss.backward(case.grad_output(loss), retain_graph=True)
    before = case.source.grad.clone()
    loss.backward(case.grad_output(loss))
    assert len(n_backwards) == 2 and torch.equal(case.source.grad, before)


@pytest.mark.interpreted(2)
@pytest.mark.parametrize("gradient", ("in_forward", "in_backward"))
def test_a_saved_value_that_a_gradient_has_replaced_is_refused(impl_device, gradient):
    """A kernel writes without a trace that autograd sees. The exponential's own backward needs its result."""
    made = batch("peaked", rows=3, vocab_size=16)
    logits = made.logits.to(impl_device[1]).requires_grad_().exp()
    total, labels = logits.sum(), made.labels.to(impl_device[1])
    loss = vocab_parallel_cross_entropy(logits, labels, gradient=gradient, impl=impl_device[0])
    with pytest.raises(RuntimeError, match="inplace operation"):
        (total if gradient == "in_forward" else loss).backward()
