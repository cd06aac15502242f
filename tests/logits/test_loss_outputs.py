"""What a loss returns beside itself that has a gradient: against the oracle in each mode."""

import pytest
import torch

from tests.support.cases.inputs import IGNORE_INDEX
from tests.support.cases.logits import EVERY, broad_rows, random_grad_output
from tests.support.truth import oracle
from tests.support.truth.budget import assert_within_budget
from vocab_parallel_ce import vocab_parallel_cross_entropy
from vocab_parallel_ce.options import DIFFERENTIABLE

ROWS, SIZE = 4, (2, 2)


def of_truth(found):
    return found.loss, *(getattr(found, name) for name in DIFFERENTIABLE)


@pytest.mark.quick(2)
@pytest.mark.interpreted(4)
@pytest.mark.parametrize("gradient", ("auto", "in_backward", "out_of_place"))
@pytest.mark.parametrize("reduction, options", (("mean", {}), ("none", EVERY), ("sum", {"num_items": 7})))
def test_values_and_the_gradient_of_all_together(impl_device, gradient, reduction, options):
    """Each output has a ``grad_output`` of its own, and one token is ignored."""
    impl, device = impl_device
    logits, labels = (made.view(*SIZE, *made.shape[1:]) for made in broad_rows("peaked", ROWS))
    labels[0, -1] = IGNORE_INDEX
    options = {"reduction": reduction, **options}
    leaf = logits.to(device, copy=True).requires_grad_()
    given = {"gradient": gradient, "impl": impl, "outputs": (*DIFFERENTIABLE, "predictions")}
    found = vocab_parallel_cross_entropy(leaf * 1, labels.to(device), **given, **options)
    differentiable = found.loss, *(getattr(found, name) for name in DIFFERENTIABLE)
    assert [output.shape for output in differentiable[1:]] == [labels.shape] * len(DIFFERENTIABLE)
    grads = [random_grad_output(labels.numel(), seed=i).view(labels.shape) for i in range(len(differentiable))]
    if reduction != "none":
        grads[0] = torch.tensor(0.75)
    torch.autograd.backward(differentiable, [grad.to(device) for grad in grads])
    *truth, grad = oracle.with_gradient(of_truth, logits.double(), labels, *grads, **options)
    *peer, peer_grad = oracle.with_gradient(of_truth, logits, labels, *grads, **options)
    for triple in zip((*differentiable, leaf.grad), (*truth, grad), (*peer, peer_grad), strict=True):
        assert_within_budget(*triple)


@pytest.mark.parametrize("nothing", [{"num_items": 0}, {"class_weight": torch.zeros(40)}], ids=["items", "weights"])
def test_a_divisor_of_0_takes_the_gradient_of_the_loss_alone(impl_device, nothing):
    impl, device = impl_device
    x, labels = torch.randn(4, 40, generator=torch.Generator().manual_seed(0)), torch.tensor([3, 0, -100, 39])
    given = {name: value.to(device) if torch.is_tensor(value) else value for name, value in nothing.items()}
    leaf = x.clone().to(device).requires_grad_()
    found = vocab_parallel_cross_entropy(leaf * 1, labels.to(device), outputs=("entropy",), impl=impl, **given)
    (found.entropy.sum() + found.loss * float("inf")).backward()
    exact = x.double().requires_grad_()
    log_p = exact.log_softmax(-1)
    (-(log_p.exp() * log_p).sum(-1) * (labels >= 0)).sum().backward()
    torch.testing.assert_close(leaf.grad.cpu().double(), exact.grad, rtol=1e-5, atol=1e-7)
    assert exact.grad[0].any()
