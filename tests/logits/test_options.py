"""What options have beside the numbers of ``tests/conformance``: padding, divisors, and values that change nothing."""

import pytest
import torch

from tests.support.cases.inputs import IGNORE_INDEX, batch
from tests.support.cases.logits import COLUMNS, EVERY, GRADIENTS, METRICS, REDUCTIONS, broad_rows, check, run
from tests.support.truth.budget import assert_within_budget
from tests.support.truth.oracle import cross_entropy_fp64, cross_entropy_same_dtype
from vocab_parallel_ce import VocabShard

NAN, INF = float("nan"), float("inf")


def test_options_given_at_their_off_values_change_no_bit(impl_device):
    off = {
        "label_smoothing": 0,
        "z_loss": 0,
        "softcap": None,
        "logit_scale": 1,
        "num_items": None,
        "outputs": (),
        "vocab_size": VocabShard(0, COLUMNS, COLUMNS),
    }
    made = batch("some_ignored", rows=2, vocab_size=COLUMNS, dtype=torch.bfloat16)
    for reduction in REDUCTIONS:
        omitted = run(impl_device, *made, reduction=reduction)
        for given in (off, {"vocab_size": COLUMNS}):
            results = run(impl_device, *made, reduction=reduction, **given)
            assert torch.equal(results.loss, omitted.loss) and torch.equal(results.grad, omitted.grad)


PADDED = [(1, 9, {}), (33, 48, EVERY), (20, 21, {}), (21, 22, EVERY), (128, 136, {}), (257, 384, {}), (129, 300, EVERY)]


@pytest.mark.quick
@pytest.mark.interpreted(3)
@pytest.mark.parametrize(("vocab_size", "columns", "options"), PADDED)
@pytest.mark.usefixtures("unread_labels")
def test_the_gradient_of_padded_columns_is_zero_in_every_row(impl_device, vocab_size, columns, options):
    """Rows that hold NaN, whose label is outside, or that are ignored have no finite factor to be 0 by."""
    logits, labels = broad_rows("shard_edges", 5, vocab_size)
    ordinary = [0, 4]
    oracle, peer = (
        compute(logits[ordinary], labels[ordinary], reduction="none", **options)
        for compute in (cross_entropy_fp64, cross_entropy_same_dtype)
    )
    labels[1], labels[2] = vocab_size, IGNORE_INDEX
    logits[2], logits[3, 0] = NAN, NAN
    grad_output = torch.tensor([1.0, 1.0, INF, INF, 1.0])
    for gradient, fill in zip(GRADIENTS, (NAN, INF, 1e30), strict=True):
        given = {"padding": columns - vocab_size, "fill": fill, "reduction": "none", **options}
        (loss,), grad = run(impl_device, logits, labels, grad_output, gradient=gradient, **given)
        assert not grad[:, vocab_size:].any() and not grad[2].any()
        assert loss.isnan().tolist() == [False, True, False, True, False]
        assert_within_budget(loss[ordinary], oracle.loss, peer.loss)
        assert_within_budget(grad[ordinary, :vocab_size], oracle.grad, peer.grad)


def test_num_items_of_every_type(impl_device):
    """The loss is fp32 and a scalar, whatever the divisor is."""
    device, made = impl_device[1], broad_rows("some_ignored", 3)
    options = {"reduction": "sum", "z_loss": 0.02, "outputs": METRICS}
    expected = check(impl_device, *made, num_items=6, **options)
    for num_items in (
        6.0,
        torch.tensor(6),
        torch.tensor([6], dtype=torch.int32, device=device),
        torch.tensor(6.0, device=device, dtype=torch.float64),
        torch.tensor([6.0], device=device, dtype=torch.bfloat16),
    ):
        results = run(impl_device, *made, num_items=num_items, **options)
        assert results.loss.shape == () and results.loss.dtype == torch.float32
        torch.testing.assert_close(results, expected, rtol=0, atol=0)
    infinite = run(impl_device, *made, num_items=torch.tensor(INF, device=device), **options)
    assert infinite.loss.item() == 0 and not infinite.grad.any()


@pytest.mark.interpreted(3)
@pytest.mark.parametrize("gradient", GRADIENTS)
@pytest.mark.usefixtures("unread_labels")
def test_no_items_give_no_loss_and_no_gradient_whatever_the_rows_hold(impl_device, gradient):
    """An empty step divides by 0; 0 times the infinite loss of a masked label is NaN."""
    options = {"reduction": "sum", "z_loss": 0.02, "outputs": METRICS, "gradient": gradient}
    for num_items in (0, torch.tensor(0), torch.tensor(0.0), torch.tensor([0], dtype=torch.int32)):
        logits, labels = batch("all_ignored" if isinstance(num_items, int) else "peaked", rows=4, vocab_size=COLUMNS)
        logits[0, 4], labels[1] = NAN, COLUMNS
        logits[2, labels[2].clamp(min=0)] = -INF
        results = run(impl_device, logits, labels, num_items=num_items, **options)
        assert results.loss.item() == 0 and not results.grad.any()
