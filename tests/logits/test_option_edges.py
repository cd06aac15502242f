"""Logits and options at the end of fp32's range: each gave a wrong number once."""

from functools import partial

import pytest
import torch

from tests.support.cases.logits import check, run
from vocab_parallel_ce import token_log_probs, vocab_parallel_cross_entropy

INF, NAN = float("inf"), float("nan")
HUGE = 3e38
# Products and quotients that leave fp32's range at some logit, and the same caps where none does.
CAPS = {
    "above 1": {"softcap": 30.0, "logit_scale": 2.0},
    "below 1": {"softcap": 30.0, "logit_scale": 0.5},
    "alone": {"softcap": 30.0},
    "tiny cap": {"softcap": 1e-30, "logit_scale": 4.0},
    "tiny cap, huge scale": {"softcap": 1e-30, "logit_scale": 1e30},
    "huge cap": {"softcap": 3e38, "logit_scale": 2.0},
    "huge cap, tiny scale": {"softcap": 1e9, "logit_scale": 1e-36},
    "huge cap, huge scale": {"softcap": 3e38, "logit_scale": 1e30},
}
BY_CAP = pytest.mark.parametrize("options", CAPS.values(), ids=CAPS)


def _huge_rows():
    """Seven columns: equals of both signs, one beyond all others, masked columns, zeros, and usual logits."""
    logits = torch.randn(8, 7, generator=torch.Generator().manual_seed(0)) * 3
    logits[0], logits[1] = HUGE, -HUGE
    logits[2, 5], logits[3, :3], logits[4, 1:3] = HUGE, -HUGE, -INF
    logits[4, 4], logits[5], logits[6, ::2] = HUGE, 0.0, 0.0
    return logits, torch.tensor([1, 6, 5, 4, 4, 0, 3, 2])


@BY_CAP
@pytest.mark.interpreted(4)
@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
def test_a_cap_bounds_huge_logits_whatever_scales_them(impl_device, options, label_smoothing):
    """A product beyond fp32 was taken for an infinite logit; an infinite ratio made NaN of a logit of 0."""
    logits, labels = _huge_rows()
    if label_smoothing:
        logits[4, 1:3] = 1.0  # smoothing over a masked column is infinite
    if options["softcap"] > 1e30:
        # What differs by z near fp32's largest has a loss beyond it: keep the rows of equals and of small z.
        logits = logits[[0, 1, 5, 7]] * min(1, 1e4 / options["logit_scale"])
        labels = labels[[0, 1, 5, 7]]
    check(impl_device, logits, labels, reduction="none", label_smoothing=label_smoothing, **options)


@BY_CAP
@pytest.mark.interpreted(4)
@pytest.mark.parametrize("temperature", [0.5, 3.0])
def test_log_probs_and_entropies_of_huge_logits(impl_device, options, temperature):
    """A temperature divides the scale and the cap alike."""
    logits, labels = _huge_rows()
    if options["softcap"] > 1e30:
        logits, labels, temperature = logits[[0, 1, 5]], labels[[0, 1, 5]], max(temperature, 1.0)
    grad_outputs = torch.randn(2, len(labels), generator=torch.Generator().manual_seed(1))
    given = {"outputs": ("entropy",), "temperature": temperature, "function": token_log_probs}
    check(impl_device, logits, labels, *grad_outputs, **given, **options)


@pytest.mark.parametrize("bad", [INF, NAN])
@pytest.mark.parametrize("logit_scale", [0.5, 2.0])
def test_a_cap_bounds_no_infinite_logit(impl_device, logit_scale, bad):
    """Beside a huge one; -inf stays excluded."""
    logits = torch.randn(3, 7)
    logits[:, 1], logits[:, 2], logits[1, 4] = HUGE, -INF, bad
    given = {"softcap": 30.0, "logit_scale": logit_scale, "reduction": "none"}
    (loss,), grad = run(impl_device, logits, torch.tensor([0, 0, 2]), **given)
    assert loss.isfinite().tolist() == [True, False, False] and loss[1].isnan() and loss[2] == INF
    assert grad[1].isnan().all() and grad[[0, 2]].isfinite().all() and not grad[[0, 2], 2].any()


def test_smoothing_over_excluded_and_lowest_columns_is_inf(impl_device):
    """-inf first and the lowest number after it: moving a sum of -inf by an infinite distance is NaN."""
    logits = torch.full((1, 5000), -INF)
    logits[:, 2500:4900] = torch.finfo(torch.float32).min
    assert run(impl_device, logits, torch.tensor([4000]), label_smoothing=0.1).loss.item() == INF


def test_constants_in_the_logits_memory_or_of_inference_mode(impl_device):
    """Backward writes the gradient over the former; autograd saves none of the latter."""
    leaf, labels = torch.rand(4, 40, device=impl_device[1]).requires_grad_(), torch.arange(4, device=impl_device[1])
    with torch.inference_mode():
        outside = leaf.detach()[3].clone()
    loss = partial(vocab_parallel_cross_entropy, label_smoothing=0.1, reduction="sum")
    of_logits = (loss, "class_weight", 40), (loss, "num_items", 1), (token_log_probs, "temperature", 4)
    for call, name, size in of_logits:
        found = []
        for values in (None, outside, outside + 0):
            logits = leaf * 1
            constant = {name: (logits.detach()[3] if values is None else values)[:size]}
            losses = call(logits, labels, gradient="in_backward", impl=impl_device[0], **constant)
            found.append(torch.autograd.grad(losses.sum(), leaf)[0])
        assert torch.equal(found[0], found[2]) and torch.equal(found[1], found[2]), name
