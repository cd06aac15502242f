"""All launchers over the shards of several ranks, uneven and padded, against the whole vocabulary."""

import pytest
import torch

from tests.kernels import rows as of_rows
from tests.kernels.test_loss import assert_outputs
from tests.support.inputs import KINDS, batch
from vocab_parallel_ce.shard import VocabShard
from vocab_parallel_ce.spec import PLAIN, LossOptions

# (columns of the vocabulary, ranks, columns of a rank or None for torch.chunk's)
CUTS = ((103, 3, None), (103, 4, 26), (103, 3, 48), (96, 4, 32), (90, 5, 32), (5, 4, 4))


def padded_pieces(logits, shards):
    """Each shard's columns of ``logits [N, V]``, with padding that would show in any result."""
    pieces = []
    hostile = torch.tensor([of_rows.NAN, of_rows.INF, 30000.0, -of_rows.INF])
    for shard in shards:
        padding = hostile.repeat(shard.n_columns)[: shard.n_columns - shard.n_valid].to(logits.dtype)
        own = logits[:, shard.start : shard.start + shard.n_valid]
        pieces.append(torch.cat([own, padding.expand(len(own), -1)], dim=1))
    return pieces


def assert_ranks_agree_with_the_whole(logits, labels, shards, options, device):
    from vocab_parallel_ce import kernels

    grads = of_rows.grads_of(len(labels), options, device)
    pieces = [piece.to(device) for piece in padded_pieces(logits, shards)]
    on_device = labels.to(device)
    stats = of_rows.stats_of_ranks(kernels, pieces, on_device, shards, options)
    outputs = of_rows.outputs_by_kernel(stats, on_device, logits.shape[1], options)
    assert_outputs(outputs, logits, labels, options)
    gradient = torch.full_like(logits, of_rows.NAN)
    for x, shard in zip(pieces, shards, strict=True):
        loss, grad = of_rows.gradient_by_kernel(x, stats, on_device, options, shard, **grads)
        torch.testing.assert_close(loss, outputs.loss, rtol=1e-6, atol=1e-6, equal_nan=True)
        padding = grad[:, shard.n_valid :].cpu()
        assert torch.equal(padding, torch.zeros_like(padding))
        gradient[:, shard.start : shard.start + shard.n_valid] = grad[:, : shard.n_valid].cpu()
    of_rows.assert_gradient(gradient, logits, labels, options, **grads)


@pytest.mark.parametrize("kind", KINDS)
def test_hard_rows_of_two_ranks(kernel_device, kind):
    """With a cap of the size of the logits: there is no gradient beyond."""
    options = of_rows.ALL._replace(z_loss=1e-6, softcap=2e4) if kind == "times_1000" else of_rows.ALL
    logits, labels = batch(kind, rows=5, vocab_size=300, shards=2)
    shards = [VocabShard.even(150, rank, 2) for rank in range(2)]
    assert_ranks_agree_with_the_whole(logits, labels, shards, options, kernel_device)


@pytest.mark.parametrize("vocab_size, n_ranks, width", CUTS)
@pytest.mark.parametrize(
    "dtype, options", ((torch.float32, PLAIN), (torch.bfloat16, of_rows.ALL)), ids=("fp32-plain", "bf16-all")
)
def test_any_cut_gives_the_whole(kernel_device, vocab_size, n_ranks, width, dtype, options):
    shards = [VocabShard.of_rank(vocab_size, rank, n_ranks, width) for rank in range(n_ranks)]
    logits, labels = batch("some_ignored", rows=3, vocab_size=vocab_size, dtype=dtype)
    labels[1:] = torch.tensor([0, vocab_size - 1])
    assert_ranks_agree_with_the_whole(logits, labels, shards, options, kernel_device)


@pytest.mark.parametrize("options", (LossOptions(smoothing=0.1), LossOptions(softcap=20.0)), ids=("sum", "cap"))
def test_shards_of_any_order_and_width(kernel_device, options):
    """The last columns first, one of a single column, one of padding alone."""
    shards = [VocabShard(41, 60, 60), VocabShard(0, 40, 60), VocabShard(40, 41, 60), VocabShard(640, 656, 60)]
    logits, labels = batch("peaked", rows=4, vocab_size=60)
    labels[:3] = torch.tensor([40, 41, 59])
    assert_ranks_agree_with_the_whole(logits, labels, shards, options, kernel_device)


def test_rows_of_nan_are_0_in_the_padding(kernel_device):
    shard = VocabShard(0, 50, 37)
    logits = torch.full((3, 50), of_rows.NAN, device=kernel_device)
    labels = torch.tensor([1, 37, -100], device=kernel_device)
    stats, _ = of_rows.stats_by_kernel(logits, labels, of_rows.ALL, shard)
    grads = dict.fromkeys(of_rows.grads_of(3, of_rows.ALL, "cpu"), torch.full((3,), of_rows.INF, device=kernel_device))
    _, grad = of_rows.gradient_by_kernel(logits, stats[None], labels, of_rows.ALL, shard, **grads)
    assert torch.equal(grad[:, 37:].cpu(), torch.zeros(3, 13))
    assert grad[:2, :37].isnan().all() and not grad[2].any()
