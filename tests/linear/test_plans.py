"""The plan of a head is that of one kind of call: what was checked for another kind is checked again."""

import pytest
import torch

from tests.support.cases.flat import linear_cross_entropy
from vocab_parallel_ce.head import plan

pytestmark = pytest.mark.reference

ROWS, WIDTH, COLUMNS = 6, 4, 8
CHANGES = {
    "no_grad": {"grad": False},
    "autocast": {"autocast": torch.bfloat16},
    "a frozen weight": {"weight_requires_grad": False},
    "nothing needs a gradient": {"hidden_requires_grad": False, "weight_requires_grad": False},
    "fp16": {"dtype": torch.float16},
    "a weight of another dtype": {"weight_dtype": torch.bfloat16},
    "a weight of another width": {"width": WIDTH + 1},
    "more labels": {"n_labels": ROWS + 1},
    "labels that are no ids": {"labels_dtype": torch.float32},
    "main_grad": {"main_grad": torch.zeros(COLUMNS, WIDTH)},
    "a main_grad of another shape": {"main_grad": torch.zeros(COLUMNS, WIDTH + 1)},
    "a flag that is equal to a number": {"options": {"chunk_size": True}},
    "a number that is equal to a flag": {"options": {"reduce_hidden_grad": 1}},
    "sequence parallelism of no group": {"options": {"sequence_parallel": True}},
    "expected_grad_output of a mean": {"options": {"expected_grad_output": torch.ones(ROWS)}},
}


def outcome(
    *,
    dtype=torch.float32,
    weight_dtype=None,
    labels_dtype=torch.int64,
    width=WIDTH,
    n_labels=ROWS,
    hidden_requires_grad=True,
    weight_requires_grad=True,
    grad=True,
    autocast=None,
    main_grad=None,
    options=None,
):
    """The loss and the gradients of a call, or its error."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(ROWS, WIDTH, generator=generator).to(dtype).requires_grad_(hidden_requires_grad)
    weight = torch.randn(COLUMNS, width, generator=generator).to(weight_dtype or dtype)
    weight.requires_grad_(weight_requires_grad)
    labels = (torch.arange(n_labels) % COLUMNS).to(labels_dtype)
    main_grad = None if main_grad is None else main_grad.clone()
    try:
        with torch.set_grad_enabled(grad), torch.autocast("cpu", dtype=autocast, enabled=autocast is not None):
            loss = linear_cross_entropy(
                hidden, weight, labels, impl="reference", main_grad=main_grad, **{"chunk_size": 1, **(options or {})}
            )
        if loss.requires_grad:
            loss.backward()
    except (TypeError, ValueError) as error:
        return [f"{type(error).__name__}: {error}"]
    return [loss.detach(), hidden.grad, weight.grad, main_grad]


def n_planned():
    return len([kind for kind in plan._kinds.by_key.values() if kind.made is not None])


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_call_of_another_kind_is_planned_anew(change):
    plan._kinds.forget()
    expected = outcome(**change)
    plan._kinds.forget()
    before = outcome()
    assert isinstance(before[0], torch.Tensor)
    for _ in range(2):
        for value, right in zip(outcome(**change), expected, strict=True):
            assert torch.equal(value, right) if isinstance(right, torch.Tensor) else value == right
    assert n_planned() == (1 if isinstance(expected[0], str) else 2)


def test_a_call_of_the_same_kind_has_the_same_plan():
    plan._kinds.forget()
    for _ in range(3):
        outcome()
    assert n_planned() == 1
