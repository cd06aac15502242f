"""Transforms that would have to see through the loss: refused, alike in every implementation."""

import pytest
import torch
from torch import func
from torch.autograd import forward_ad

import vocab_parallel_ce as vp
from tests.support.pairs import covering

ROWS, WIDTH, COLUMNS = 4, 5, 12


def _tensors(device):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(ROWS, COLUMNS, generator=generator).to(device)
    hidden = torch.randn(ROWS, WIDTH, generator=generator).to(device)
    weight = torch.randn(COLUMNS, WIDTH, generator=generator).to(device)
    return x, hidden, weight, torch.arange(ROWS, device=device)


# Of the logits or the hidden states alone, unreduced and reduced.
FUNCTIONS = {
    "mean": lambda x, w, y, **impl: vp.vocab_parallel_cross_entropy(x, y, **impl),
    "none": lambda x, w, y, **impl: vp.vocab_parallel_cross_entropy(x, y, reduction="none", **impl).sum(),
    "log-probs": lambda x, w, y, **impl: vp.token_log_probs(x, y, **impl).sum(),
    "targets": lambda x, w, y, **impl: vp.soft_cross_entropy(x, w.t()[:1].expand(x.shape).softmax(-1), **impl),
    "divergence": lambda x, w, y, **impl: vp.distillation_loss(x, w.t()[:1].expand(x.shape), **impl),
    "known tokens": lambda x, w, y, **impl: vp.distillation_loss(
        x, teacher_ids=y.view(-1, 1), teacher_log_probs=w[:ROWS, :1].clamp(max=-0.1), **impl
    ),
    "linear": vp.linear_cross_entropy,
    "linear log-probs": lambda h, w, y, **impl: vp.linear_token_log_probs(h, w, y, **impl).sum(),
}


def forward_mode(f, x):
    with forward_ad.dual_level():
        return f(forward_ad.make_dual(x, torch.ones_like(x)))


TRANSFORMS = {
    "grad": lambda f, x: func.grad(f)(x),
    "vjp": lambda f, x: func.vjp(f, x),
    "jvp": lambda f, x: func.jvp(f, (x,), (torch.ones_like(x),)),
    "vmap": lambda f, x: func.vmap(f)(x.expand(2, *x.shape)),
    "jacrev": lambda f, x: func.jacrev(f)(x),
    "hessian": lambda f, x: func.hessian(f)(x),
    "forward mode": forward_mode,
}
CASES = covering(transform=tuple(TRANSFORMS), function=tuple(FUNCTIONS), requires_grad=(False, True))


@pytest.mark.quick(4)
@pytest.mark.interpreted(4)
@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case.values())))
def test_a_transform_is_refused(impl_device, case):
    """Forward mode gave no tangent in one implementation and the right one in another; vmap likewise."""
    impl, device = impl_device
    transform, function, requires_grad = case.values()
    x, hidden, weight, labels = _tensors(device)
    given = (hidden if function.startswith("linear") else x).requires_grad_(requires_grad)
    kept = given.detach().clone()
    with pytest.raises(TypeError, match="^cross-entropy: expected .* torch.nn.functional.cross_entropy"):
        TRANSFORMS[transform](lambda t: FUNCTIONS[function](t, weight, labels, impl=impl), given)
    assert torch.equal(given, kept)


@pytest.mark.parametrize("name", ("weight", "bias"))
def test_a_tangent_of_the_head_is_refused(impl_device, name):
    impl, device = impl_device
    _, hidden, weight, labels = _tensors(device)
    head = {"weight": weight, "bias": torch.zeros(COLUMNS, device=device)}
    with forward_ad.dual_level():
        vp.linear_cross_entropy(hidden, **head, labels=labels, impl=impl)
        head[name] = forward_ad.make_dual(head[name], torch.ones_like(head[name]))
        with pytest.raises(TypeError, match="without a tangent"):
            vp.linear_cross_entropy(hidden, **head, labels=labels, impl=impl)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_batched_grad_outputs_are_refused(impl_device, function):
    """``is_grads_batched`` runs backward inside vmap."""
    impl, device = impl_device
    x, hidden, weight, labels = _tensors(device)
    given = (hidden if function.startswith("linear") else x).requires_grad_()
    loss = FUNCTIONS[function](given, weight, labels, impl=impl)
    grad_output = torch.ones(3, device=device)
    with pytest.raises(RuntimeError, match="is_grads_batched"):
        torch.autograd.grad(loss, given, grad_output, is_grads_batched=True)
