"""Options: types of divisors, and values that change nothing. Random calls check the numbers."""

import torch

from tests.support.cases.inputs import batch
from tests.support.cases.logits import COLUMNS, METRICS, REDUCTIONS, broad_rows, check, run
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
