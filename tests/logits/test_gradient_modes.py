"""Where the gradient is written and when; what survives; what a repeated backward does. Of every loss."""

import itertools
from functools import partial

import pytest
import torch

import vocab_parallel_ce as vp
from tests.support.cases.inputs import batch
from tests.support.cases.layouts import logits_layouts
from tests.support.cases.logits import GRADIENTS, REDUCTIONS, Leaves, Results, assert_right, flat_outputs
from tests.support.cases.pairs import covering
from vocab_parallel_ce import vocab_parallel_cross_entropy


def teacher_of(z):
    return torch.linspace(-3, 3, z.shape[-1], device=z.device).expand(z.shape).contiguous()


def known_tokens(z, y, **options):
    log_probs, ids = teacher_of(z).log_softmax(-1).topk(3)
    return vp.distillation_loss(z, vp.TopKTeacher(ids, log_probs), labels=y, **options)


def with_entropy(z, y, reduction, **options):
    found = vp.token_log_probs(z, y, outputs=("entropy",), **options)
    return found.log_probs + found.entropy


LOSSES = {
    "labels": vocab_parallel_cross_entropy,
    "log-probs": with_entropy,
    "divergence": lambda z, y, **options: vp.distillation_loss(z, teacher_of(z), labels=y, **options),
    "known tokens": known_tokens,
}


def allowed(case):
    """Log-probabilities are never reduced, nor written in forward, nor is what is computed from them."""
    if case.get("gradient") == "in_forward" and case.get("name") in ("log-probs", "known tokens"):
        return False
    return not (case.get("name") == "log-probs" and case.get("reduction", "none") != "none")


WAYS = covering(allowed, name=tuple(LOSSES), gradient=(*GRADIENTS, "auto"), reduction=REDUCTIONS)
each_way = pytest.mark.parametrize("way", WAYS, ids=lambda way: "-".join(way.values()))


def started(impl_device, way, **changes):
    """Logits that the case holds, and the loss over them."""
    case, options = Leaves(impl_device), way | changes
    return case, LOSSES[options.pop("name")](case.logits, case.labels, impl=case.impl, **options)


@pytest.mark.quick(9)
@pytest.mark.interpreted(8)
@each_way
def test_where_the_gradient_is_written(impl_device, way):
    """A scale or a token taken for all shows in random grad_outputs."""
    case, loss = started(impl_device, way)
    if way["gradient"] != "in_forward":
        assert case.logits_are_untouched() and case.logits._version == 0
    labels, grad_output = case.labels.clone(), case.grad_output(loss)
    kept = grad_output.clone()
    (grad,) = torch.autograd.grad(loss, case.logits, grad_output)
    is_seen = way["gradient"] in ("out_of_place", "auto")  # the case holds its logits
    assert (grad.data_ptr() == case.logits.data_ptr()) != is_seen
    assert case.logits_are_untouched() == is_seen
    assert torch.equal(case.labels, labels) and case.labels._version == 0
    assert torch.equal(grad_output, kept) and grad_output._version == 0
    if way["name"] == "labels":
        case.assert_right(loss, grad, grad_output, reduction=way["reduction"])
    other, same_loss = started(impl_device, way, gradient="out_of_place")
    torch.testing.assert_close(loss, same_loss, rtol=0, atol=0)
    (expected,) = torch.autograd.grad(same_loss, other.logits, grad_output)
    torch.testing.assert_close(grad, expected, rtol=1e-6, atol=1e-7)


@pytest.mark.interpreted(8)
@each_way
def test_second_and_double_backward(impl_device, way):
    """In place a second backward names the remedy: others scale their saved buffer twice, silently.

    A gradient that pretends to be a constant would be silently wrong when it is differentiated again.
    """
    case, loss = started(impl_device, way)
    grad_output = case.grad_output(loss)
    (first,) = torch.autograd.grad(loss, case.logits, grad_output, retain_graph=True)
    after_first = case.logits.detach().clone()
    if way["gradient"] in ("auto", "out_of_place"):
        (second,) = torch.autograd.grad(loss, case.logits, grad_output, retain_graph=True)
        assert torch.equal(first, second) and first.data_ptr() != second.data_ptr()
        loss.backward(grad_output, retain_graph=True)
        loss.backward(grad_output)
        torch.testing.assert_close(case.source.grad, 2 * first, rtol=0, atol=0)
    else:
        with pytest.raises(RuntimeError, match="out_of_place"):
            torch.autograd.grad(loss, case.logits, grad_output)
    assert torch.equal(case.logits, after_first)
    case, loss = started(impl_device, way)
    with pytest.raises(RuntimeError, match="cannot be differentiated again"):
        torch.autograd.grad(loss, case.logits, torch.ones_like(loss), create_graph=True)


PER_TOKEN = vp.token_log_probs, partial(vocab_parallel_cross_entropy, reduction="none")


@pytest.mark.parametrize("first, second", ((0, 1), (1, 0)))
def test_a_second_backward_through_another_output(impl_device, first, second):
    for gradient, function in itertools.product(("in_backward", "out_of_place"), PER_TOKEN):
        case = Leaves(impl_device)
        options = {"outputs": ("entropy",), "impl": case.impl, "gradient": gradient}
        outputs = flat_outputs(function(case.logits, case.labels, **options))
        torch.autograd.grad(outputs[first].sum(), case.logits, retain_graph=True)
        after_first = case.logits.detach().clone()
        if gradient == "in_backward":
            with pytest.raises(RuntimeError, match="out_of_place"):
                torch.autograd.grad(outputs[second].sum(), case.logits)
        else:
            torch.autograd.grad(outputs[second].sum(), case.logits)
        assert torch.equal(case.logits, after_first)


@pytest.mark.interpreted(4)
@each_way
def test_without_a_gradient_logits_are_never_touched(impl_device, way):
    case, expected = started(impl_device, way, gradient="out_of_place")
    options = dict(way)
    call = partial(LOSSES[options.pop("name")], impl=case.impl, **options)
    with torch.no_grad():
        loss = call(case.logits, case.labels)
    with torch.inference_mode():
        assert torch.equal(call(case.logits, case.labels), expected)
    assert torch.equal(call(case.logits.detach(), case.labels), expected)
    assert case.logits._version == 0 and case.logits_are_untouched()
    assert not loss.requires_grad and torch.equal(loss, expected)


VIEWS = {  # of [2, 4, V]
    "the tensor": lambda x: x,
    "flat": lambda x: x.view(-1, x.shape[-1]),
    "later rows": lambda x: x[1:],
    "second chunk": lambda x: x.chunk(2)[1],
    "transpose": lambda x: x.transpose(0, 1),
    "every other": lambda x: x[::2],
}


def _labels_of(logits):
    return torch.arange(logits.shape[:-1].numel(), device=logits.device).view(logits.shape[:-1])


@pytest.mark.parametrize("view", VIEWS)
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


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("reduction, gradient", (("mean", "auto"), ("none", "in_backward"), ("mean", "out_of_place")))
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
    case = Leaves(impl_device)
    logits = case.logits[:-1]
    with pytest.raises(ValueError, match="^gradient: 'in_forward' .* use 'in_backward'"):
        case.loss(logits, gradient="in_forward")
    assert case.logits_are_untouched() and logits._version == 0


def test_auto_leaves_fp16_to_backward(impl_device):
    """p / n underflows in fp16 before a loss scale multiplies it: most of the gradient was 0."""
    case = Leaves(impl_device, dtype=torch.float16, rows=64, columns=4000)
    scale = torch.tensor(65536.0)
    loss = case.loss()
    assert case.logits_are_untouched()
    (grad,) = torch.autograd.grad(loss, case.logits, scale.to(loss.device))
    case.assert_right(loss, grad, scale)
    zeros = (grad == 0)[case.labels != -100].float().mean()
    assert float(zeros) < 0.02


@pytest.mark.interpreted(1)
@pytest.mark.parametrize("columns, gradient", ((21, "in_backward"), (24, "in_forward"), (24, "out_of_place")))
def test_every_layout(impl_device, gradient, columns):
    """Transposed, shifted, expanded and size-1 views against the contiguous copy of the same values."""
    impl, device = impl_device
    for layout in logits_layouts(columns, device=device):
        values = layout.view.detach().clone(memory_format=torch.contiguous_format)
        # The least likely column: a gradient near 1, next to which one rounding of p is small.
        labels = values.argmin(dim=-1)
        logits = layout.view.detach().requires_grad_()
        options = {"reduction": "none", "label_smoothing": 0.1}
        with torch.no_grad():
            plain = vocab_parallel_cross_entropy(logits, labels, impl=impl, gradient=gradient, **options)
        assert torch.equal(layout.view, values), layout.name
        loss = vocab_parallel_cross_entropy(logits, labels, impl=impl, gradient=gradient, **options)
        torch.testing.assert_close(plain, loss.detach(), msg=layout.name)
        grad_output = torch.rand(labels.shape, generator=torch.Generator().manual_seed(4)) + 0.5
        (grad,) = torch.autograd.grad(loss, logits, grad_output.to(device))
        assert_right(Results((loss,), grad), values.cpu(), labels.cpu(), grad_output, **options)
        assert layout.outside_is_untouched(), layout.name
        copied = layout.name in ("every other column", "column-major") or layout.shares_elements
        overwritten = grad.data_ptr() == logits.data_ptr()
        assert overwritten == (gradient != "out_of_place" and not copied), layout.name
        assert torch.equal(layout.view, values) != overwritten, layout.name


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
    case = Leaves(impl_device)
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
