"""The custom operators that compiled calls use."""

import importlib

import pytest
import torch
from torch.library import opcheck

from tests.logits.test_compile import VOCABULARY, inputs
from tests.support.cases.logits import METRICS
from vocab_parallel_ce import operators
from vocab_parallel_ce.losses.base import LOSSES
from vocab_parallel_ce.losses.labels import LABELS, LabelLoss
from vocab_parallel_ce.options import HeadSettings, Settings

importlib.import_module("vocab_parallel_ce.head.operators")  # defines those of heads
N = 6
OPTIONS = {
    "mean": {},
    "entropy": {"outputs": ("entropy",), "reduction": "none"},
    "outputs": {"outputs": ("lse", "sum_sq_probs", "mean_logit"), "reduction": "none"},
    "metrics": {"outputs": METRICS, "z_loss": 0.1, "label_smoothing": 0.1},
    "sum": {"reduction": "sum", "check_labels": True},
    "class weights": {"label_smoothing": 0.1},
    "targets": {"label_smoothing": 0.1},
    "divergence": {"divergence": "js", "beta": 0.3, "hard_weight": 0.2},
    "divergence, none": {"divergence": "reverse", "reduction": "none"},
}


def targets_for(name, labels):
    """The loss, its targets over logits, and those of a head."""
    generator = torch.Generator().manual_seed(3)
    rows = torch.randn(N, VOCABULARY, generator=generator)
    if name == "targets":
        return "soft_labels", (rows.softmax(-1), torch.rand(VOCABULARY), None, None), None
    if name.startswith("divergence"):
        head = torch.randn(N, 5, generator=generator), torch.randn(VOCABULARY, 5, generator=generator), None
        return "divergences", (rows, labels, None, None), (*head, labels)
    weights = torch.rand(VOCABULARY) if name == "class weights" else None
    temperature = torch.rand(N) + 0.5 if name == "outputs" else None
    threshold = torch.full((N,), -9.0) if name == "entropy" else None
    targets = labels, weights, temperature, threshold
    return "labels", targets, targets


@pytest.mark.reference
@pytest.mark.parametrize("name", OPTIONS)
def test_the_operators_are_what_they_declare(name):
    """Schema, fake kernel, autograd and dynamic shapes, as PyTorch checks them."""
    x, ops = inputs(n=N), torch.ops.vocab_parallel_ce
    loss, targets, of_head = targets_for(name, x.labels)
    settings = Settings(gradient="out_of_place", **OPTIONS[name])
    logits = (x.hidden @ x.weight.t()).detach().requires_grad_()
    divisor = torch.tensor([7.0]) if settings.reduction == "sum" else None
    own = loss, None, *operators.values_of(settings)
    opcheck(ops.loss_of_logits, (logits, *targets, divisor, *own))
    value, *others, first, second, count = (t.detach() for t in ops.loss_of_logits(logits, *targets, divisor, *own))
    asked = operators.outputs_asked(LOSSES[loss], settings)
    names = operators.GradOutputs._fields[1:]
    grads = torch.rand(value.shape), *(torch.rand(N) if asked.get(output) else None for output in names)
    divisor = count if settings.reduction == "mean" else divisor
    opcheck(ops.loss_of_logits_gradient, (first, second, *grads, logits.detach(), *targets, divisor, *own))
    if of_head is None:
        return
    for gradient in ("in_backward",) if settings.reduction == "none" else ("in_forward", "in_backward"):
        values = [*operators.values_of(settings._replace(gradient=gradient)), *operators.values_of(HeadSettings())]
        num_items = divisor if settings.reduction == "sum" else None
        given, head = (*x.leaves(), None, *of_head, num_items), (loss, None, None, [True, True, False])
        opcheck(ops.loss_of_head, (*given, *head, *values))
        stats = [t.detach() for t in ops.loss_of_head(*given, *head, *values)[7:9]]
    given = tuple(None if t is None else t.detach() for t in given)
    opcheck(ops.loss_of_head_gradient, (*stats, *grads, *given, *head[:-1], [True, False, False], *values))


@pytest.mark.reference
def test_two_losses_of_one_name_are_refused():
    """Operators know a loss by its file's name: the later one would replace the other in compiled code."""
    kind = type("Other", (LabelLoss,), {"__module__": "another.labels"})
    with pytest.raises(ValueError, match="Other: expected a file of its own name, got labels"):
        kind()
    assert LOSSES["labels"] is LABELS
