"""The kernel that finishes rows against ``spec`` in fp64, over statistics of several ranks."""

import pytest
import torch

from tests.core.test_spec import by_spec
from tests.kernels.rows import ALL, INF, NAN, OPTIONS, assert_is_largest, outputs_by_kernel, stats_of_ranks
from tests.support.budget import assert_within_budget
from tests.support.inputs import KINDS, batch
from vocab_parallel_ce.shard import VocabShard
from vocab_parallel_ce.spec import PLAIN, LossOptions

VOCAB = 60


def assert_outputs(outputs, logits, labels, options):
    """Each output that was asked for, against the whole vocabulary."""
    truth, peer = (by_spec(logits.to(dtype), labels, options) for dtype in (torch.float64, torch.float32))
    assert_within_budget(outputs.loss.cpu(), truth.loss, peer.loss)
    assert_within_budget(outputs.lse.cpu(), truth.lse, peer.lse)
    if options.entropy:
        # Its terms are rounded next to 1, beside which the entropy may be nothing.
        assert_within_budget(outputs.entropy.cpu() + 1, truth.entropy + 1, peer.entropy + 1)
    if options.sum_sq_probs:
        # So are these.
        assert_within_budget(*(made.sum_sq_probs.cpu() + 1 for made in (outputs, truth, peer)))
    if options.mean_logit:
        # The largest logit is rounded, beside which the mean may be nothing.
        assert_within_budget(*((made.lse - made.mean_logit).cpu() for made in (outputs, truth, peer)))
    if options.predictions:
        predicted = outputs.predictions.cpu()
        live = labels != options.ignore_index
        assert torch.equal(predicted[~live], torch.full_like(predicted[~live], -1))
        if options.softcap is None:
            assert torch.equal(predicted, truth.predictions)
        else:
            assert_is_largest(predicted[live], logits[live], options)


def finish(logits, labels, options, ranks, device):
    shards = [VocabShard.of_rank(logits.shape[1], rank, ranks) for rank in range(ranks)]
    stats = stats_of_ranks(None, logits.chunk(ranks, dim=1), labels, shards, options)
    return outputs_by_kernel(stats.to(device), labels.to(device), logits.shape[1], options)


def test_worked_example(kernel_device):
    stats = torch.tensor([[[3, 0.5032147, 3]], [[2, 1, -INF]]], device=kernel_device)
    outputs = outputs_by_kernel(stats, torch.tensor([0], device=kernel_device), 4, PLAIN)
    torch.testing.assert_close(outputs.loss.cpu(), torch.tensor([0.6265234]), rtol=0, atol=1e-6)


@pytest.mark.parametrize("ranks", (1, 2, 3, 5))
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_outputs_of_hard_rows(kernel_device, ranks, options):
    for kind in KINDS:
        logits, labels = batch(kind, rows=11, vocab_size=VOCAB, shards=ranks)
        assert_outputs(finish(logits, labels, options, ranks, kernel_device), logits, labels, options)


def test_more_rows_than_a_program_finishes(kernel_device):
    logits, labels = batch("peaked", rows=300, vocab_size=20)
    assert_outputs(finish(logits, labels, ALL, 2, kernel_device), logits, labels, ALL)


@pytest.mark.parametrize("ranks", (1, 2, 5))
@pytest.mark.parametrize("options", (LossOptions(entropy=True, predictions=True), ALL), ids=("", "all"))
def test_rows_that_are_not_finite(kernel_device, ranks, options):
    """NaN, +inf, all -inf, the same three ignored, labels outside, and a row that is well."""
    logits, _ = batch("peaked", rows=9, vocab_size=VOCAB)
    for rows, bad in (((0, 3), NAN), ((1, 4), INF)):
        logits[list(rows), VOCAB // 2] = bad
    logits[[2, 5]] = -INF
    labels = torch.tensor([1, 1, 1, -100, -100, -100, -1, VOCAB, 1])
    outputs = finish(logits, labels, options, ranks, kernel_device)
    for value in (outputs.loss, outputs.entropy):
        assert value.isnan().tolist() == [True] * 3 + [False] * 3 + [True] * 2 + [False]
        assert value[3:6].tolist() == [0, 0, 0] and value[8] > 0
    expected = by_spec(logits.double(), labels, options)
    assert torch.equal(outputs.predictions.cpu(), expected.predictions)
    assert outputs.predictions.tolist()[:6] == [-1] * 6
    assert_within_budget(outputs.lse.cpu(), expected.lse, expected.lse.float())


def test_predictions_are_exact_up_to_the_largest_vocabulary(kernel_device):
    """Ids travel as fp32, which has every integer up to 2**24."""
    last = 2**24 - 1
    stats = torch.tensor([[[2.0, 1.0, -INF, last - 1]], [[3.0, 1.0, 3.0, last]]], device=kernel_device)
    labels = torch.tensor([last], device=kernel_device)
    outputs = outputs_by_kernel(stats, labels, 2**24, LossOptions(predictions=True))
    assert outputs.predictions.tolist() == [last]


def test_a_rank_of_the_lowest_numbers_leaves_no_trace_in_the_entropy(kernel_device):
    """Its shifted_sum is -inf, and -inf * 0 is NaN."""
    logits, labels = batch("peaked", rows=4, vocab_size=VOCAB)
    labels %= 30
    lowest, excluded = logits.clone(), logits.clone()
    lowest[:, 30:], excluded[:, 30:] = torch.finfo(torch.float32).min, -INF
    options = LossOptions(entropy=True)
    actual = finish(lowest, labels, options, 2, kernel_device)
    assert torch.equal(actual.entropy, finish(excluded, labels, options, 2, kernel_device).entropy)
