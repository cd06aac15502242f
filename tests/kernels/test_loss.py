"""The loss kernel against ``spec`` in fp64, over statistics of several ranks."""

import pytest
import torch

from tests.support.budget import assert_within_budget
from tests.support.inputs import KINDS, batch, shard_of
from vocab_parallel_ce import spec


def loss_of(stats, labels, vocab_size, *, label_smoothing=0.0, valid_rows=None):
    from vocab_parallel_ce.kernels.loss import cross_entropy_loss

    loss = torch.full((labels.numel(),), float("nan"), device=stats.device)
    options = {"vocab_size": vocab_size, "ignore_index": -100, "label_smoothing": label_smoothing}
    cross_entropy_loss(stats, labels, valid_rows, loss, **options)
    return loss


def stats_of(logits, labels, ranks, dtype):
    width = logits.shape[1] // ranks
    shards = [
        spec.local_stats(shard_of(logits, rank, ranks).to(dtype), labels, rank * width)
        for rank in range(ranks)
    ]
    return [torch.stack(shard, dim=-1) for shard in shards]


def test_worked_example(kernel_device):
    stats = torch.tensor([[[3, 1.5032147, 3]], [[2, 1, float("-inf")]]], device=kernel_device)
    loss = loss_of(stats, torch.tensor([0], device=kernel_device), 4)
    torch.testing.assert_close(loss.cpu(), torch.tensor([0.6265234]), rtol=0, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("label_smoothing", (0.0, 0.1))
@pytest.mark.parametrize("ranks", (1, 2, 3, 5))
def test_merged_loss(kernel_device, kind, label_smoothing, ranks):
    logits, labels = batch(kind, rows=11, vocab_size=90, shards=ranks)
    stats = torch.stack(stats_of(logits, labels, ranks, torch.float32))
    n_stats = 4 if label_smoothing else 3
    loss = loss_of(
        stats[..., :n_stats].contiguous().to(kernel_device),
        labels.to(kernel_device),
        90,
        label_smoothing=label_smoothing,
    )
    x, options = logits.double(), {"label_smoothing": label_smoothing}
    truth = spec.loss(spec.local_stats(x, labels, 0), labels, 90, **options)
    peer = spec.loss(spec.local_stats(logits, labels, 0), labels, 90, **options)
    assert_within_budget(loss, truth, peer)


def test_more_rows_than_a_program_finishes(kernel_device):
    logits, labels = batch("peaked", rows=300, vocab_size=20)
    stats = torch.stack(stats_of(logits, labels, 2, torch.float32)).to(kernel_device)
    loss = loss_of(stats, labels.to(kernel_device), 20, label_smoothing=0.1)
    options = {"label_smoothing": 0.1}
    truth = spec.loss(spec.local_stats(logits.double(), labels, 0), labels, 20, **options)
    peer = spec.loss(spec.local_stats(logits, labels, 0), labels, 20, **options)
    assert_within_budget(loss, truth, peer)


def test_no_row_that_counts_gives_0(kernel_device):
    stats = torch.tensor([[[float("-inf"), 0, float("-inf")]] * 3], device=kernel_device)
    labels = torch.full((3,), -100, device=kernel_device)
    valid_rows = torch.zeros(1, dtype=torch.int32, device=kernel_device)
    assert loss_of(stats, labels, 10, valid_rows=valid_rows).tolist() == [0, 0, 0]
