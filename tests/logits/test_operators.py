"""The custom operators that compiled calls use."""

import dataclasses
import enum

import numpy as np
import pytest
import torch
from torch.library import opcheck

from tests.logits.test_compile import VOCABULARY, inputs
from tests.support.cases.logits import METRICS
from vocab_parallel_ce.compile import Traced, constants_of
from vocab_parallel_ce.losses.base import LOSSES
from vocab_parallel_ce.losses.labels import LABELS
from vocab_parallel_ce.options import HeadOptions, Settings
from vocab_parallel_ce.shard import VocabShard
from vocab_parallel_ce.spec import GradOutputs

N = 6
OPTIONS = {
    "mean": {},
    "entropy": {"outputs": ("entropy",), "reduction": "none"},
    "outputs": {"outputs": ("lse", "sum_sq_probs", "mean_logit"), "reduction": "none"},
    "metrics": {"outputs": METRICS, "z_loss": 0.1, "label_smoothing": 0.1},
    "sum": {"reduction": "sum", "check_labels": True},
    "class weights": {"label_smoothing": 0.1},
    "divergence": {"divergence": "js", "beta": 0.3, "hard_weight": 0.2},
    "divergence, none": {"divergence": "reverse", "reduction": "none"},
}


def targets_for(name, labels):
    """The loss, its targets over logits, and those of a head."""
    generator = torch.Generator().manual_seed(3)
    rows = torch.randn(N, VOCABULARY, generator=generator)
    if name.startswith("divergence"):
        head = torch.randn(N, 5, generator=generator), torch.randn(VOCABULARY, 5, generator=generator), None
        return "divergences", [rows, labels], [*head, labels]
    weights = torch.rand(VOCABULARY) if name == "class weights" else None
    temperature = torch.rand(N) + 0.5 if name == "outputs" else None
    threshold = torch.full((N,), -9.0) if name == "entropy" else None
    targets = [labels, weights, temperature, threshold]
    return "labels", targets, targets


def constants_for(loss, settings, **others):
    return Traced([], None, None, LOSSES[loss], None, settings, **others).constants()


@pytest.mark.reference
@pytest.mark.parametrize("name", OPTIONS)
def test_the_operators_are_what_they_declare(name):
    """Schema, fake kernel, autograd and dynamic shapes, as PyTorch checks them."""
    x, ops = inputs(n=N), torch.ops.vocab_parallel_ce
    loss, targets, of_head = targets_for(name, x.labels)
    settings = Settings(gradient="out_of_place", **OPTIONS[name])
    logits = (x.hidden @ x.weight.t()).detach().requires_grad_()
    divisor = torch.tensor([7.0]) if settings.reduction == "sum" else None
    constants = constants_for(loss, settings)
    opcheck(ops.loss_of_logits, ([logits], targets, divisor, *constants))
    if name == "divergence":  # tokens of two dimensions
        deep = [each.unsqueeze(1) for each in (logits.detach(), *targets)]
        opcheck(ops.loss_of_logits, ([deep[0].requires_grad_()], deep[1:], divisor, *constants))
    outputs = {"loss": None, **LOSSES[loss].outputs(LOSSES[loss].options(settings, None, class_weight=False))}
    n, found = len(outputs), [t.detach() for t in ops.loss_of_logits([logits], targets, divisor, *constants)]
    outputs |= {name: torch.rand(each.shape) for name, each in zip(outputs, found, strict=False)}
    grads = [outputs.get(name) for name in GradOutputs._fields]
    stats = found[n : -1 if settings.reduction == "mean" else None]
    of_mean = found[-1] if settings.reduction == "mean" else divisor
    opcheck(ops.loss_of_logits_gradient, (stats, grads, [logits.detach()], targets, of_mean, *constants))
    if of_head is None:
        return
    for gradient in ("in_backward",) if settings.reduction == "none" else ("in_forward", "in_backward"):
        settings = settings._replace(gradient=gradient, head=HeadOptions(chunk_size=4))
        constants = constants_for(loss, settings, wanted=(True, True, False))
        opcheck(ops.loss_of_head, (x.leaves(), of_head, divisor, *constants))
    stats = [t.detach() for t in ops.loss_of_head(x.leaves(), of_head, divisor, *constants)[n:]]
    given = [[t.detach() for t in x.leaves()], of_head, divisor]
    constants = constants_for(loss, settings, wanted=(True, False, False))
    opcheck(ops.loss_of_head_gradient, (stats, grads, *given, *constants))


@pytest.mark.reference
def test_constants_keep_their_values_and_types():
    numbers = {"label_smoothing": 1, "z_loss": -0.0, "softcap": 1e-300, "logit_scale": np.float32(0.1)}
    shard, name = VocabShard(0, np.int64(48), 47), enum.Enum("Names", {"SUM": "sum"}, type=str).SUM
    head = HeadOptions(valid_tokens=np.int64(3), logits_dtype=torch.float32, gradient="in_backward", check_labels=True)
    settings = Settings(ignore_index=-(2**40), outputs=["lse"], reduction=name, vocab_size=shard, head=head, **numbers)
    text, chunk_size = constants_for("labels", settings, autocast=torch.bfloat16)
    found = constants_of(text)
    expected = settings._replace(outputs=("lse",), reduction="sum", vocab_size=VocabShard(0, 48, 47))
    expected = expected._replace(logit_scale=float(np.float32(0.1)), head=dataclasses.replace(head, valid_tokens=3))
    assert repr(found) == repr((LABELS, None, expected, torch.bfloat16, (True,))) and chunk_size is None
    for size, tokens in ((5, 5), ("1KB", None)):
        text, chunk_size = constants_for("labels", settings._replace(head=HeadOptions(chunk_size=size)))
        assert (chunk_size, constants_of(text)[2].head.chunk_size) == (tokens, size if tokens is None else "auto")
