"""The kernels of losses with labels, called as the autograd function calls them, against ``spec`` in fp64.

Numbers of every option, width and layout are those of random calls.
"""

import pytest
import torch

from tests.core.test_spec import ALL, by_spec
from tests.kernels import rows as of_rows
from tests.kernels.rows import EVERY_STATISTIC, INF, NAN
from tests.support.cases.inputs import batch
from tests.support.truth.budget import assert_within_budget
from vocab_parallel_ce.shard import VocabShard
from vocab_parallel_ce.spec import PLAIN, LossOptions

LOWEST = torch.finfo(torch.float32).min


def test_worked_examples(kernel_device):
    """Of the three kernels' docstrings."""

    def assert_close(actual, expected):
        torch.testing.assert_close(actual.cpu(), torch.tensor(expected), rtol=0, atol=1e-6)

    logits, labels = torch.tensor([[1.0, 3.0, 2.0]], device=kernel_device), torch.tensor([1], device=kernel_device)
    stats = of_rows.stats_by_kernel(logits, labels, EVERY_STATISTIC)
    assert_close(stats, [[3, 0.5032147, 3, -3, 3, -0.6385501, 1, 1.1536512]])
    grad = of_rows.gradient_by_kernel(logits, stats[None, :, :3].contiguous(), labels)
    assert_close(grad, [[0.0900306, -0.3347590, 0.2447285]])
    of_ranks = torch.tensor([[[3, 0.5032147, 3]], [[2, 1, -INF]]], device=kernel_device)
    assert_close(of_rows.outputs_by_kernel(of_ranks, labels - 1, 4, PLAIN).loss, [0.6265234])


def padded_pieces(logits, shards):
    """Each shard's columns of ``logits [N, V]``, with padding that would show in any result."""
    pieces = []
    hostile = torch.tensor([NAN, INF, 30000.0, -INF])
    for shard in shards:
        padding = hostile.repeat(shard.n_columns)[: shard.n_columns - shard.n_valid].to(logits.dtype)
        own = logits[:, shard.start : shard.start + shard.n_valid]
        pieces.append(torch.cat([own, padding.expand(len(own), -1)], dim=1))
    return pieces


def assert_ranks_agree_with_the_whole(logits, labels, shards, options, device):
    """Statistics, outputs and gradients by the kernels, from every rank's columns."""
    from vocab_parallel_ce import kernels

    grads = of_rows.grads_of(len(labels), options, device)
    pieces = [piece.to(device) for piece in padded_pieces(logits, shards)]
    on_device = labels.to(device)
    stats = of_rows.stats_of_ranks(kernels, pieces, on_device, shards, options)
    outputs = of_rows.outputs_by_kernel(stats, on_device, logits.shape[1], options)
    of_rows.assert_outputs(outputs, logits, labels, options)
    gradient = torch.full_like(logits, NAN)
    for x, shard in zip(pieces, shards, strict=True):
        grad = of_rows.gradient_by_kernel(x, stats, on_device, options, shard, **grads)
        padding = grad[:, shard.n_valid :].cpu()
        assert torch.equal(padding, torch.zeros_like(padding))
        gradient[:, shard.start : shard.start + shard.n_valid] = grad[:, : shard.n_valid].cpu()
    of_rows.assert_gradient(gradient, logits, labels, options, **grads)


@pytest.mark.parametrize("options", (LossOptions(smoothing=0.1), LossOptions(softcap=20.0)), ids=("sum", "cap"))
def test_shards_of_any_order_and_width(kernel_device, options):
    """The last columns first, one of a single column, one of padding alone."""
    shards = [VocabShard(41, 60, 60), VocabShard(0, 40, 60), VocabShard(40, 41, 60), VocabShard(640, 656, 60)]
    logits, labels = batch("peaked", rows=4, vocab_size=60)
    labels[:3] = torch.tensor([40, 41, 59])
    assert_ranks_agree_with_the_whole(logits, labels, shards, options, kernel_device)


@pytest.mark.parametrize("columns", (7, 96, 2080))
@pytest.mark.parametrize("dtype, options", ((torch.bfloat16, PLAIN), (torch.float16, ALL)), ids=("plain", "all"))
def test_a_16_bit_gradient_of_fp32_logits(kernel_device, columns, dtype, options):
    """Rows of 96 columns are whole lines of fp32 and not of 16 bits."""
    logits, labels = batch("peaked", rows=3, vocab_size=columns)
    there, on_device = logits.to(kernel_device), labels.to(kernel_device)
    grads = of_rows.grads_of(3, options, kernel_device)
    storage = torch.full((logits.numel() + 64,), NAN, dtype=dtype, device=kernel_device)
    into = storage[: logits.numel()].view_as(logits)
    stats = of_rows.stats_by_kernel(there, on_device, options)
    grad = of_rows.gradient_by_kernel(there, stats[None], on_device, options, into=into, **grads)
    assert torch.equal(there.cpu(), logits) and storage[logits.numel() :].isnan().all()
    of_rows.assert_gradient(grad.cpu(), logits, labels, options, **grads)


def test_small_grad_output_is_rounded_once(kernel_device):
    """A gradient stored in bf16 and scaled afterwards is rounded twice."""
    logits, labels = (t.to(kernel_device) for t in batch("peaked", rows=12, vocab_size=300, dtype=torch.bfloat16))
    grad_output = torch.full((12,), 1.2345e-6, device=kernel_device)
    stats = of_rows.stats_by_kernel(logits, labels)
    given = {"grad_output": grad_output, "into": torch.empty_like(logits)}
    grad = of_rows.gradient_by_kernel(logits, stats[None], labels, **given)
    truth = of_rows.gradient_by_spec(logits.cpu(), labels.cpu(), PLAIN, torch.float64, grad_output=grad_output)
    # 2**-8 is half a unit in the last digit of bf16: two roundings to nearest reach 1.5 of it.
    live = truth.abs() > 1e-30
    relative = ((grad.cpu().double() - truth) / truth).abs()[live]
    assert float(relative.max()) <= 2**-8 + 1e-5


def finish(logits, labels, options, n_ranks, device):
    """The outputs by the kernel, of statistics of ranks by plain PyTorch."""
    shards = [VocabShard.for_rank(logits.shape[1], rank, n_ranks) for rank in range(n_ranks)]
    stats = of_rows.stats_of_ranks(None, logits.chunk(n_ranks, dim=1), labels, shards, options)
    return of_rows.outputs_by_kernel(stats.to(device), labels.to(device), logits.shape[1], options)


@pytest.mark.parametrize("rows", (3, 2500))
def test_each_program_of_the_outputs_counts_all_labels(kernel_device, rows):
    """Of 2500 rows there are 20, and each counts 1024 labels at a time."""
    from vocab_parallel_ce import kernels

    logits, labels = batch("peaked", rows=rows, vocab_size=9)
    labels[1::3] = -100
    stats = of_rows.stats_of_ranks(None, [logits], labels, [VocabShard(0, 9, 9)], PLAIN).to(kernel_device)
    count = torch.full((1,), -1, dtype=torch.int32, device=kernel_device)
    labels, outputs = labels.to(kernel_device), of_rows.empty_outputs(labels.to(kernel_device), PLAIN)
    fill = kernels.outputs.outputs(kernels.label_rows.label_loss(VocabShard(0, 9, 9), PLAIN))
    fill((stats,), of_rows.Labels(labels), None, outputs, None, count)
    losses = torch.nn.functional.cross_entropy(logits.double(), labels.cpu(), reduction="none")
    assert int(count) == int((labels != -100).sum())
    torch.testing.assert_close(outputs.loss.cpu().double(), losses / int(count), rtol=1e-5, atol=1e-9)


def test_more_rows_than_a_program_finishes(kernel_device):
    logits, labels = batch("peaked", rows=300, vocab_size=20)
    of_rows.assert_outputs(finish(logits, labels, ALL, 2, kernel_device), logits, labels, ALL)


@pytest.mark.parametrize("n_ranks", (1, 5))
def test_rows_that_are_not_finite(kernel_device, n_ranks):
    """NaN, +inf, all -inf, the same three ignored, labels outside, and a row that is well."""
    logits, _ = batch("peaked", rows=9, vocab_size=60)
    for rows, bad in (((0, 3), NAN), ((1, 4), INF)):
        logits[list(rows), 30] = bad
    logits[[2, 5]] = -INF
    labels = torch.tensor([1, 1, 1, -100, -100, -100, -1, 60, 1])
    outputs = finish(logits, labels, ALL, n_ranks, kernel_device)
    for value in (outputs.loss, outputs.entropy):
        assert value.isnan().tolist() == [True] * 3 + [False] * 3 + [True] * 2 + [False]
        assert value[3:6].tolist() == [0, 0, 0] and value[8] > 0
    expected = by_spec(logits.double(), labels, ALL)
    assert torch.equal(outputs.predictions.cpu(), expected.predictions)
    assert_within_budget(outputs.lse.cpu(), expected.lse, expected.lse.float())


def test_predictions_are_exact_up_to_the_largest_vocabulary_and_the_first_of_equals(kernel_device):
    """Ids travel as fp32, which has every integer up to 2**24."""
    last = 2**24 - 1
    of_ranks = [[2.0, 1.0, -INF, last - 1], [3.0, 1.0, -INF, 5]], [[3.0, 1.0, 3.0, last], [3.0, 1.0, 3.0, 9]]
    stats, labels = torch.tensor(of_ranks, device=kernel_device), torch.tensor([last, 9], device=kernel_device)
    outputs = of_rows.outputs_by_kernel(stats, labels, 2**24, LossOptions(predictions=True))
    assert outputs.predictions.tolist() == [last, 5]


@pytest.mark.parametrize("by_ranks", (False, True))
def test_columns_masked_with_the_lowest_number_leave_no_trace(kernel_device, by_ranks):
    """Those of a lane's first vectors, or of a rank, sum to -inf, and -inf * 0 is NaN."""
    logits, labels = batch("peaked", rows=4, vocab_size=2400)
    excluded, lowest = logits.clone(), logits.clone()
    labels[:] = 2200
    excluded[:, :2100], lowest[:, :2100] = -INF, LOWEST
    options = LossOptions(entropy=True, predictions=True)
    if by_ranks:
        made = [finish(x, labels, options, 2, kernel_device).entropy for x in (lowest, excluded)]
    else:
        there = labels.to(kernel_device)
        made = [of_rows.stats_by_kernel(x.to(kernel_device), there, options) for x in (lowest, excluded)]
    assert torch.equal(*made)


def assert_same_bits(outputs, expected):
    """But a compiler may fuse what two kernels have in common in two ways."""
    for actual, want in zip(outputs, expected, strict=True):
        assert (actual is None) == (want is None)
        if actual is None:
            continue
        if actual.is_cuda and actual.is_floating_point():
            torch.testing.assert_close(actual, want, rtol=1e-6, atol=1e-6, equal_nan=True)
        else:
            assert torch.equal(actual.isnan(), want.isnan())
            assert torch.equal(actual.nan_to_num(7), want.nan_to_num(7))


def test_the_private_launch_and_tritons_own_give_equal_results(kernel_device, monkeypatch):
    from vocab_parallel_ce.kernels import rows

    logits = torch.randn(4, 64, generator=torch.Generator().manual_seed(0)).to(kernel_device)
    labels = torch.tensor([0, 5, -100, 63], device=kernel_device)
    expected = [of_rows.stats_by_kernel(logits, labels, ALL) for _ in range(2)]
    monkeypatch.setattr("triton.__version__", "9.9.0")
    monkeypatch.setattr(rows, "_launch", rows._launch.__wrapped__)
    for want in expected:
        assert torch.equal(of_rows.stats_by_kernel(logits, labels, ALL), want)
