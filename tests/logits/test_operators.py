"""The custom operators that compiled calls use."""

import pytest
import torch
from torch.library import opcheck

from tests.logits.test_compile import VOCABULARY, inputs
from vocab_parallel_ce import operators
from vocab_parallel_ce.options import HeadSettings, Settings, loss_options

OPTIONS = {
    "mean": {},
    "entropy": {"entropy": True, "reduction": "none"},
    "outputs": {"lse": True, "sum_sq_probs": True, "mean_logit": True, "reduction": "none"},
    "metrics": {"return_metrics": True, "z_loss": 0.1, "label_smoothing": 0.1},
    "sum": {"reduction": "sum", "check_labels": True},
    "class weights": {"label_smoothing": 0.1},
}


@pytest.mark.reference
@pytest.mark.parametrize("name", OPTIONS)
def test_the_operators_are_what_they_declare(name):
    """Schema, fake kernel, autograd and dynamic shapes, as PyTorch checks them."""
    x, ops = inputs(n=6), torch.ops.vocab_parallel_ce
    settings = Settings(gradient="out_of_place", **OPTIONS[name])
    logits = (x.hidden @ x.weight.t()).detach().requires_grad_()
    divisor = torch.tensor([7.0]) if settings.reduction == "sum" else None
    weights = torch.rand(VOCABULARY) if name == "class weights" else None
    temperature = torch.rand(6) + 0.5 if name == "outputs" else None
    values = operators._values(settings)
    opcheck(ops.cross_entropy, (logits, x.labels, divisor, weights, temperature, None, *values))
    found = ops.cross_entropy(logits, x.labels, divisor, weights, temperature, None, *values)
    loss, *_, stats, count = (out.detach() for out in found)
    is_asked = loss_options(settings, None).differentiable[1:-1]
    grads = torch.rand(loss.shape), *(torch.rand(6) if asked else None for asked in is_asked)
    divisor = count if settings.reduction == "mean" else divisor
    opcheck(
        ops.cross_entropy_gradient,
        (stats, *grads, logits.detach(), x.labels, divisor, weights, temperature, None, *values),
    )
    for gradient in ("in_backward",) if settings.reduction == "none" else ("in_forward", "in_backward"):
        values = [*operators._values(settings._replace(gradient=gradient)), *operators._values(HeadSettings())]
        num_items = divisor if settings.reduction == "sum" else None
        given, head = (*x.leaves(), None, x.labels, num_items, weights, temperature), (None, None)
        opcheck(ops.linear_cross_entropy, (*given, *head, [True, True, False], *values))
        stats = ops.linear_cross_entropy(*given, *head, [True, True, False], *values)[7].detach()
    given = tuple(None if t is None else t.detach() for t in given)
    opcheck(ops.linear_cross_entropy_gradient, (stats, *grads, *given, *head, [True, False, False], *values))
