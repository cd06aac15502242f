"""What a loss returns beside itself: predictions, token accuracy, lse and z-loss, from the same read."""

import pytest
import torch

from tests.support.cases.inputs import IGNORE_INDEX, batch
from tests.support.cases.logits import COLUMNS, METRICS
from vocab_parallel_ce import Outputs, vocab_parallel_cross_entropy

NAN, INF = float("nan"), float("inf")
NAMES = ("lse", *METRICS)


def _metrics(impl_device, logits, labels, **options):
    impl, device = impl_device
    found = vocab_parallel_cross_entropy(logits.to(device), labels.to(device), impl=impl, outputs=NAMES, **options)
    assert isinstance(found, Outputs) and found.loss.dtype == torch.float32
    return Outputs(**{name: getattr(found, name).cpu() for name in NAMES})


@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_first_of_equal_logits_is_predicted(impl_device, dtype, offset):
    """Over threads, over steps of one thread, and over the columns before and after whole vectors."""
    columns, firsts = 531, (0, 2, 7, 8, 127, 128, 300, 513, 524, 530)
    storage = torch.empty(offset + len(firsts) * columns, dtype=dtype)
    logits = storage[offset:].view(len(firsts), columns)
    logits.copy_(torch.randn(len(firsts), columns) - 9)
    generator = torch.Generator().manual_seed(0)
    for row, first in enumerate(firsts):
        later = torch.randint(first, columns, (40,), generator=generator)
        logits[row, first] = logits[row, later] = -1.5
    moved = storage.to(impl_device[1])[offset:].view(len(firsts), columns)
    metrics = _metrics(impl_device, moved, torch.tensor(firsts))
    assert metrics.predictions.tolist() == list(firsts)


def test_rows_of_one_value_and_signed_zeros(impl_device):
    """-0 and 0 are equal, and so are all columns of a constant row: the first is predicted."""
    logits = torch.full((4, COLUMNS), -3.0)
    logits[0] = 2.5
    logits[1, 7], logits[1, 9] = -0.0, 0.0
    logits[2] = -INF
    logits[2, 20] = -1000.0
    logits[3, 0], logits[3, 20] = 0.0, -0.0
    metrics = _metrics(impl_device, logits, torch.zeros(4, dtype=torch.int64))
    assert metrics.predictions.tolist() == [0, 7, 20, 0]


def test_rows_without_a_prediction(impl_device):
    logits, _ = batch("peaked", rows=6, vocab_size=COLUMNS)
    labels = logits.argmax(dim=1)
    labels[1] = IGNORE_INDEX
    logits[2, 5], labels[2] = NAN, 5
    logits[3, 5], labels[3] = INF, 5
    logits[4] = -INF
    expected = logits.argmax(dim=1)
    expected[1:5] = -1
    metrics = _metrics(impl_device, logits, labels)
    assert torch.equal(metrics.predictions, expected)
    assert metrics.lse[1] == 0 and metrics.lse[2].isnan() and metrics.lse[4] == -INF


def test_rows_keep_their_metrics_in_a_sum_over_no_items(impl_device):
    logits, labels = batch("some_ignored", rows=6, vocab_size=COLUMNS)
    over_none, plain = (_metrics(impl_device, logits, labels, reduction="sum", **n) for n in ({"num_items": 0}, {}))
    assert all(torch.equal(getattr(over_none, name), getattr(plain, name)) for name in NAMES)
    assert (over_none.lse != 0).any()
