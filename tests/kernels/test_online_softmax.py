"""Row statistics of the kernel against ``spec`` in fp64."""

import pytest
import torch

from tests.support.budget import assert_within_budget
from tests.support.inputs import DTYPES, KINDS, batch
from tests.support.layouts import logits_layouts
from vocab_parallel_ce import spec

ROWS, COLUMNS = 10, 587


def kernel_stats(logits, labels, device, *, start=0, n_stats=4, ignore_index=-100):
    from vocab_parallel_ce.kernels.online_softmax import online_softmax

    n_rows = labels.numel()
    stats = torch.full((n_rows, n_stats), float("nan"), device=device)
    valid_rows = torch.full((1,), -1, dtype=torch.int32, device=device)
    online_softmax(logits, labels, stats, valid_rows, start=start, ignore_index=ignore_index)
    return stats, int(valid_rows)


def assert_stats(stats, logits, labels, start=0):
    """Each statistic within the budget; rows that are ignored hold the identity."""
    rows = logits.cpu().reshape(-1, logits.shape[-1])
    labels = labels.cpu().reshape(-1)
    live = labels != -100
    truth = spec.local_stats(rows.double(), labels, start)
    peer = spec.local_stats(rows.float(), labels, start)
    for column, (expected, same_dtype) in enumerate(zip(truth, peer, strict=True)):
        assert_within_budget(stats[:, column].cpu()[live], expected[live], same_dtype[live])
    identity = torch.tensor([float("-inf"), 0.0, float("-inf"), 0.0])
    assert torch.equal(stats.cpu()[~live], identity.expand(int((~live).sum()), 4))


def test_worked_example(kernel_device):
    logits = torch.tensor([[1.0, 3.0, 2.0]], device=kernel_device)
    stats, valid_rows = kernel_stats(logits, torch.tensor([1], device=kernel_device), kernel_device)
    torch.testing.assert_close(stats.cpu(), torch.tensor([[3, 1.5032147, 3, 6]]), rtol=0, atol=1e-6)
    assert valid_rows == 1


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_statistics_of_hard_rows(kernel_device, kind, dtype):
    if kind == "times_1000" and dtype == torch.float16:
        pytest.skip("a thousand times the logits is past fp16's range")
    logits, labels = (t.to(kernel_device) for t in batch(kind, rows=ROWS, vocab_size=COLUMNS, dtype=dtype))
    stats, valid_rows = kernel_stats(logits, labels, kernel_device)
    assert_stats(stats, logits, labels)
    assert valid_rows == int((labels != -100).sum())


@pytest.mark.parametrize("columns", (1, 2, 7, 8, 9, 15, 16, 17, 255, 256, 257, 4099))
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
def test_every_width(kernel_device, columns, dtype):
    """Rows with no whole vector, with none but edges, with a head and a tail, and of several tiles."""
    logits, labels = batch("peaked", rows=5, vocab_size=columns, dtype=dtype)
    logits, labels = logits.to(kernel_device), labels.to(kernel_device)
    stats, _ = kernel_stats(logits, labels, kernel_device)
    assert_stats(stats, logits, labels)


def test_a_label_belongs_to_one_shard(kernel_device):
    logits, _ = batch("peaked", rows=6, vocab_size=64)
    labels = torch.tensor([63, 64, 127, 128, 0, 100], device=kernel_device)
    logits = logits.to(kernel_device)
    stats, _ = kernel_stats(logits, labels, kernel_device, start=64)
    owned = stats[:, 2].cpu().isfinite()
    assert owned.tolist() == [False, True, True, False, False, True]
    assert stats[1, 2] == logits[1, 0] and stats[2, 2] == logits[2, 63]


@pytest.mark.parametrize("columns", (64, 67))
def test_every_layout_gives_the_statistics_of_the_copy(kernel_device, columns):
    for layout in logits_layouts(columns, device=kernel_device):
        if layout.name in ("every other column", "column-major"):
            continue
        rows = layout.view.shape[:-1].numel()
        labels = (torch.arange(rows) * 31 % columns).to(kernel_device)
        stats, _ = kernel_stats(layout.view, labels, kernel_device)
        copied, _ = kernel_stats(layout.view.contiguous(), labels, kernel_device)
        assert torch.equal(stats[:, (0, 2)], copied[:, (0, 2)]), layout.name
        assert_stats(stats, layout.view, labels)


def test_statistics_that_nobody_asked_for_are_not_written(kernel_device):
    logits, labels = (t.to(kernel_device) for t in batch("peaked", rows=4, vocab_size=50))
    three, _ = kernel_stats(logits, labels, kernel_device, n_stats=3)
    four, _ = kernel_stats(logits, labels, kernel_device, n_stats=4)
    assert torch.equal(three, four[:, :3])


def test_count_of_rows_beyond_one_pass_of_the_counting_program(kernel_device):
    """The program of row 0 counts all labels, in passes as wide as it is."""
    from vocab_parallel_ce.kernels.online_softmax import LABELS_AT_ONCE

    rows = LABELS_AT_ONCE + 1
    labels = torch.arange(rows) % 3
    logits = torch.zeros(rows, 3)
    _, valid_rows = kernel_stats(
        logits.to(kernel_device), labels.to(kernel_device), kernel_device, ignore_index=2
    )
    assert valid_rows == int((labels != 2).sum())


def test_nan_and_infinity_reach_the_sum(kernel_device):
    logits = torch.randn(4, 40)
    logits[0, 17], logits[1, 3], logits[2] = float("nan"), float("inf"), float("nan")
    labels = torch.tensor([1, 1, 1, 1], device=kernel_device)
    stats, _ = kernel_stats(logits.to(kernel_device), labels, kernel_device)
    assert stats[:, 1].isnan().tolist() == [True, True, True, False]
