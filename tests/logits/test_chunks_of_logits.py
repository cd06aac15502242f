"""Losses over disjoint parts of one tensor of logits, each with a share of one backward."""

import pytest
import torch

import vocab_parallel_ce as vp
from tests.support.budget import assert_within_budget
from tests.support.inputs import batch
from tests.support.oracle import cross_entropy_fp64, cross_entropy_same_dtype

COLUMNS, SHAPE = 21, (8, 4)  # of the labels
FUNCTIONS = {
    "loss": lambda z, y, **options: vp.vocab_parallel_cross_entropy(z, y, reduction="sum", **options),
    "log-probs": lambda z, y, **options: -vp.token_log_probs(z, y, **options).sum(),
}


@pytest.mark.interpreted(4)
@pytest.mark.parametrize("retained", (False, True))
@pytest.mark.parametrize("gradient", ("auto", "out_of_place"))
@pytest.mark.parametrize("dim", (0, -2))
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_gradient_is_that_of_the_whole(impl_device, name, dtype, dim, gradient, retained):
    """The whole may still have a reader, or not. By default the first backward wrote over all parts, and raised."""
    impl, device = impl_device
    values, labels = batch("some_ignored", rows=SHAPE[0] * SHAPE[1], vocab_size=COLUMNS, dtype=dtype)
    leaf = values.to(device).requires_grad_()
    logits, ids = (leaf * 1).view(*SHAPE, COLUMNS), labels.to(device).view(SHAPE)
    parts = logits.chunk(4, dim)
    kept = logits.detach() if retained else None
    del logits
    of_ids = ids.chunk(4, 0 if dim == 0 else -1)
    loss = sum(FUNCTIONS[name](z, y, gradient=gradient, impl=impl) for z, y in zip(parts, of_ids, strict=True))
    loss.backward()
    truth, peer = (f(values, labels, reduction="sum") for f in (cross_entropy_fp64, cross_entropy_same_dtype))
    assert_within_budget(loss, truth.loss, peer.loss)
    assert_within_budget(leaf.grad, truth.grad, peer.grad)
    if kept is not None:
        assert torch.equal(kept.view(-1, COLUMNS), values.to(device)), "logits that are still read were written"
