"""Losses against a distribution per token: every option, in rows of every kind of both tensors."""

import pytest
import torch

from tests.conformance.widths import (
    HARD,
    PLACE,
    beside,
    columns_of,
    each,
    made_of,
    placed,
    rows_of,
)
from tests.support.cases.inputs import DTYPES, NEG_INF
from tests.support.cases.logits import REDUCTIONS, Results
from tests.support.cases.pairs import covering
from tests.support.cases.soft import (
    Pair,
    assert_right,
    divergences,
    grad_output_of,
)
from vocab_parallel_ce import distillation_loss
from vocab_parallel_ce.losses.divergences import DIVERGENCES

OTHER = {"other_dtype": DTYPES, "other_layout": PLACE["layout"]}
WAYS = {"reduction": REDUCTIONS, "gradient": ("in_forward", "in_backward", "out_of_place")}


def check(impl_device, case, function, pair, options, other=None, **given):
    """One call over placed logits, and ``other``; ``given`` replaces options of the oracle."""
    (impl, device), shape = impl_device, rows_of(case)
    leaf, x = placed(pair.logits, case, device)
    options = {name: case[name] for name in WAYS} | options
    of_call = {**options, **given, "impl": impl, "vocab_size": columns_of(case)[0]}
    if pair.labels is not None:
        of_call["labels"] = pair.labels.view(shape)
    of_call = {name: value.to(device) if torch.is_tensor(value) else value for name, value in of_call.items()}
    loss = function(x, other, **of_call)
    loss.backward(grad_output_of(options, len(pair.logits)).view_as(loss).to(device))
    assert_right(Results((loss.view(-1) if loss.shape == shape else loss,), leaf.grad), pair, **options)


DISTILLATION = covering(
    **PLACE,
    **OTHER,
    other_padding=(False, True),
    # Without labels, with them, and an excluded one; each kernel has code for both.
    loss=tuple((divergence, hard) for divergence in (*DIVERGENCES, "js 0.2") for hard in (None, 0.0, 0.3)),
    kind=HARD,
    is_excluded=(False, True),
    temperature=(1.0, 2.5),
    **WAYS,
)


@pytest.mark.quick(6)
@each(DISTILLATION)
def test_distillation(impl_device, case):
    logits, labels = made_of(case)
    noise = torch.randn(logits.shape, generator=torch.Generator().manual_seed(5))
    teacher = (noise * 3 + logits.float() * 0.3).to(case["other_dtype"])
    (divergence, _, beta), hard = case["loss"][0].partition(" "), case["loss"][1]
    if case["is_excluded"]:  # the hard loss is infinite, the gradient is not
        logits[1, 0] = teacher[1, 0] = NEG_INF
    options = {"divergence": divergence, "temperature": case["temperature"]} | ({"hard_weight": hard} if hard else {})
    options |= {"beta": 0.2} if beta else {}
    pair = Pair(logits, teacher, divergences, None if hard is None else labels)
    check(impl_device, case, distillation_loss, pair, options, beside(teacher, case, impl_device[1]))
