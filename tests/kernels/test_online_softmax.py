"""Row statistics of the kernel against ``spec`` in fp64."""

import importlib

import pytest
import torch

from tests.kernels import rows as of_rows
from tests.support.inputs import batch
from vocab_parallel_ce.shard import VocabShard
from vocab_parallel_ce.spec import IDENTITY, PLAIN, LossOptions, RowStats


def test_worked_example(kernel_device):
    logits = torch.tensor([[1.0, 3.0, 2.0]], device=kernel_device)
    labels = torch.tensor([1], device=kernel_device)
    stats, valid_rows = of_rows.stats_by_kernel(logits, labels, of_rows.EVERY_STATISTIC)
    expected = torch.tensor([[3, 0.5032147, 3, -3, 3, -0.6385501, 1, 1.1536512]])
    torch.testing.assert_close(stats.cpu(), expected, rtol=0, atol=1e-6)
    assert valid_rows == 1


@pytest.mark.parametrize("n_valid", (0, 1, 7, 8, 9, 299, 300))
@pytest.mark.parametrize("dtype, columns", ((torch.float32, 300), (torch.bfloat16, 304)), ids=str)
def test_padding_is_not_looked_at(kernel_device, n_valid, dtype, columns):
    """Whole vectors and parts of one, and shards that are nothing else."""
    shard = VocabShard(900, 900 + columns, 900 + n_valid)
    logits, labels = batch("peaked", rows=4, vocab_size=columns, dtype=dtype)
    logits[:, n_valid:] = torch.tensor([[of_rows.NAN], [of_rows.INF], [30000.0], [-of_rows.INF]]).to(dtype)
    labels = (labels % max(n_valid, 1) + 900).to(kernel_device)
    labels[3] = 3
    stats, _ = of_rows.stats_by_kernel(logits.to(kernel_device), labels, of_rows.EVERY_STATISTIC, shard)
    of_rows.assert_stats(stats, logits, labels, of_rows.EVERY_STATISTIC, shard)
    if n_valid == 0:
        n = len(of_rows.EVERY_STATISTIC.statistics)
        known = [IDENTITY[RowStats._fields.index(name)] for name in of_rows.EVERY_STATISTIC.statistics]
        assert torch.equal(stats.cpu(), torch.tensor(known).expand(4, n))


@pytest.mark.parametrize("options", (of_rows.EVERY_STATISTIC, of_rows.ALL), ids=("statistics", "all"))
def test_nan_and_infinity_reach_the_sums(kernel_device, options):
    """Also through a cap, which would bound infinity, and from the label alone, whose NaN a GPU's maxima drop."""
    logits = torch.randn(6, 40)
    logits[0, 17], logits[1, 3], logits[2], logits[3] = of_rows.NAN, of_rows.INF, of_rows.NAN, -of_rows.INF
    logits[5, 1] = of_rows.NAN
    labels = torch.ones(6, dtype=torch.int64, device=kernel_device)
    stats = of_rows.stats_by_kernel(logits.to(kernel_device), labels, options)[0].cpu()
    assert stats[:, 1].isnan().tolist() == [True, True, True, False, False, True]
    assert stats[:, 5].isnan().tolist() == [True, True, True, False, False, True]
    assert stats[3].tolist() == [-of_rows.INF, 0, -of_rows.INF, -of_rows.INF, 40, 0, of_rows.INF, 0]


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
def test_columns_masked_with_the_lowest_number_leave_no_trace(kernel_device, dtype):
    """A lane's first vectors of finfo.min sum to -inf, and -inf * 0 is NaN."""
    logits, labels = batch("peaked", rows=4, vocab_size=2400, dtype=dtype)
    excluded, lowest = logits.clone(), logits.clone()
    labels[:] = 2200
    excluded[:, :2100], lowest[:, :2100] = -of_rows.INF, torch.finfo(dtype).min
    options = LossOptions(entropy=True, predictions=True)
    expected, _ = of_rows.stats_by_kernel(excluded.to(kernel_device), labels.to(kernel_device), options)
    actual, _ = of_rows.stats_by_kernel(lowest.to(kernel_device), labels.to(kernel_device), options)
    assert torch.equal(actual, expected)


@pytest.mark.parametrize("columns", (1, 8, 17, 257, 4099))
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
def test_the_argmax_is_the_first_of_equals(kernel_device, columns, dtype):
    """In a lane, between lanes, between tiles, and between a row's edges and what is between them."""
    equal = [(0,), (columns - 1,), (0, columns - 1), (columns // 2, columns - 1), tuple(range(columns))]
    logits = batch("peaked", rows=len(equal), vocab_size=columns, dtype=dtype).logits
    for row, maxima in enumerate(equal):
        logits[row, list(maxima)] = 40.0
    # One element off a boundary, the row has a head too.
    shifted = torch.zeros(1 + logits.numel(), dtype=dtype)[1:].view_as(logits).copy_(logits)
    labels = torch.zeros(len(equal), dtype=torch.int64, device=kernel_device)
    shard = VocabShard(1000, 1000 + columns, 5000 + columns)
    for x in (logits, shifted):
        stats, _ = of_rows.stats_by_kernel(x.to(kernel_device), labels, LossOptions(predictions=True), shard)
        assert stats[:, 3].tolist() == [1000 + maxima[0] for maxima in equal]


def stats_and_outputs(logits, labels, options, divisor=None, shard=None):
    """``[N, K]`` statistics and every output of ``options``, by one launch."""
    outputs = of_rows.empty_outputs(labels, options)
    stats, _ = of_rows.stats_by_kernel(logits, labels, options, shard, outputs, divisor)
    return stats, outputs


def assert_outputs_of(outputs, expected):
    """Bit for bit; but a compiler may fuse what two kernels have in common in two ways."""
    for actual, want in zip(outputs, expected, strict=True):
        assert (actual is None) == (want is None)
        if actual is None:
            continue
        if actual.is_cuda and actual.is_floating_point():
            torch.testing.assert_close(actual, want, rtol=1e-6, atol=1e-6, equal_nan=True)
        else:
            bits = torch.int32 if actual.is_floating_point() else torch.int64
            is_nan = actual.isnan()
            assert torch.equal(is_nan, want.isnan())
            assert torch.equal(actual.view(bits)[~is_nan], want.view(bits)[~is_nan])


def rows_of_every_kind(columns, dtype):
    """Hard rows, ignored ones, labels outside, and rows that are not finite, ignored and not."""
    logits, labels = batch("mixture", rows=17, vocab_size=columns, dtype=dtype)
    logits[[8, 11], columns // 2], logits[[9, 12], 0], logits[[10, 13]] = of_rows.NAN, of_rows.INF, -of_rows.INF
    labels[[2, 11, 12, 13, 16]] = -100
    labels[14], labels[15] = -1, columns
    return logits, labels


@pytest.mark.parametrize(
    "options, divisor",
    [
        *((options, None) for options in of_rows.OPTIONS.values()),
        (of_rows.ALL, 3),
        (of_rows.ALL, 0),
        (of_rows.ALL, 2.5),
    ],
)
def test_the_only_ranks_outputs_are_those_of_its_statistics(kernel_device, options, divisor):
    """Also in rows with edges, and whatever divides the loss."""
    if divisor is not None:
        divisor = torch.tensor([divisor], device=kernel_device)
    shapes = ((1187, torch.float32), (512, torch.bfloat16))
    for columns, dtype in shapes if options is PLAIN else shapes[:1]:
        logits, labels = (t.to(kernel_device) for t in rows_of_every_kind(columns, dtype))
        stats, outputs = stats_and_outputs(logits, labels, options, divisor)
        plain_stats, _ = of_rows.stats_by_kernel(logits, labels, options)
        assert torch.equal(stats.nan_to_num(), plain_stats.nan_to_num())
        assert_outputs_of(outputs, of_rows.outputs_by_kernel(stats[None], labels, columns, options, divisor))
        assert not outputs.loss[labels == -100].any()


def test_outputs_of_a_padded_vocabulary(kernel_device):
    """The mean over the columns is that of those that count, and a label in the padding is outside."""
    logits, labels = rows_of_every_kind(304, torch.bfloat16)
    logits[:, 299:] = of_rows.NAN
    labels[labels >= 299] %= 299
    labels[5] = 299
    logits, labels = logits.to(kernel_device), labels.to(kernel_device)
    stats, outputs = stats_and_outputs(logits, labels, of_rows.ALL, shard=VocabShard(0, 304, 299))
    assert_outputs_of(outputs, of_rows.outputs_by_kernel(stats[None], labels, 299, of_rows.ALL))
    assert outputs.loss[5].isnan() and outputs.loss[0].isfinite()


def test_the_private_launch_and_tritons_own_give_equal_results(kernel_device, monkeypatch):
    online_softmax = importlib.import_module("vocab_parallel_ce.kernels.online_softmax")
    logits = torch.randn(4, 64, generator=torch.Generator().manual_seed(0)).to(kernel_device)
    labels = torch.tensor([0, 5, -100, 63], device=kernel_device)
    expected = [of_rows.stats_by_kernel(logits, labels, of_rows.ALL)[0] for _ in range(2)]
    monkeypatch.setattr("triton.__version__", "9.9.0")
    monkeypatch.setattr(online_softmax, "_launch", online_softmax._launch.__wrapped__)
    for want in expected:
        assert torch.equal(of_rows.stats_by_kernel(logits, labels, of_rows.ALL)[0], want)
