"""The kernels of losses with labels on their own. Their numbers are those of random calls of public functions."""

import pytest
import torch

from tests.support.cases.inputs import NAN, NEG_INF, batch
from tests.support.cases.logits import EVERY, random_grad_output
from tests.support.truth.budget import assert_within_budget
from tests.support.truth.oracle import cross_entropy_fp64, cross_entropy_same_dtype
from vocab_parallel_ce.losses.labels import Labels
from vocab_parallel_ce.shard import VocabShard
from vocab_parallel_ce.spec import PLAIN, GradOutputs, LossOptions, TokenOutputs

EVERY_STATISTIC = LossOptions(smoothing=0.1, entropy=True, predictions=True, sum_sq_probs=True)
ALL = LossOptions(-100, EVERY["label_smoothing"], EVERY["z_loss"], EVERY["logit_scale"], EVERY["softcap"])


def whole(logits):
    """The shard of one rank."""
    return VocabShard(0, logits.shape[-1], logits.shape[-1])


def label_loss(options=PLAIN, shard=None):
    from vocab_parallel_ce import kernels

    return kernels.label_rows.label_loss(options=options, shard=shard)


def stats_of(logits, labels, options=PLAIN):
    """``[1, N, K]`` statistics."""
    from vocab_parallel_ce import kernels

    stats = torch.full((1, len(labels), len(options.statistics)), NAN, device=logits.device)
    kernels.rows.statistics_launcher(label_loss(options, whole(logits)))(logits, Labels(labels), (stats,), 0)
    return stats


def gradient_of(logits, stats, labels, options=PLAIN, into=None, grad_output=None):
    """The gradient from ``stats [R, N, K]``, over the logits, or in ``into``."""
    from vocab_parallel_ce import kernels

    grad, fill = logits if into is None else into, kernels.outputs.gradient_launcher(label_loss(options, whole(logits)))
    fill(logits, Labels(labels), (stats,), None, GradOutputs(grad_output), grad)
    return grad


def outputs_of(stats, labels, vocab_size, options=PLAIN, count=None):
    """The loss, and predictions if ``options`` has them."""
    from vocab_parallel_ce import kernels

    ids = torch.full_like(labels, -7, dtype=torch.int64) if options.predictions else None
    outputs = TokenOutputs(torch.full((len(labels),), NAN, device=labels.device), predictions=ids)
    fill = kernels.outputs.outputs_launcher(label_loss(options, VocabShard(0, vocab_size, vocab_size)))
    fill((stats,), Labels(labels), None, outputs, None, count)
    return outputs


def test_worked_examples(kernel_device):
    """Of the three kernels' docstrings."""

    def assert_close(actual, expected):
        torch.testing.assert_close(actual.cpu(), torch.tensor(expected), rtol=0, atol=1e-6)

    logits, labels = torch.tensor([[1.0, 3.0, 2.0]], device=kernel_device), torch.tensor([1], device=kernel_device)
    stats = stats_of(logits, labels, EVERY_STATISTIC)
    assert_close(stats[0], [[3, 0.5032147, 3, -3, 3, -0.6385501, 1, 1.1536512]])
    grad = gradient_of(logits, stats[..., :3].contiguous(), labels)
    assert_close(grad, [[0.0900306, -0.3347590, 0.2447285]])
    of_ranks = torch.tensor([[[3, 0.5032147, 3]], [[2, 1, NEG_INF]]], device=kernel_device)
    assert_close(outputs_of(of_ranks, labels - 1, 4).loss, [0.6265234])


@pytest.mark.parametrize("columns", (7, 96, 2080))
@pytest.mark.parametrize("dtype, options", ((torch.bfloat16, PLAIN), (torch.float16, ALL)), ids=("plain", "all"))
def test_a_16_bit_gradient_of_fp32_logits(kernel_device, columns, dtype, options):
    """Rows of 96 columns are whole lines of fp32 and not of 16 bits."""
    logits, labels = batch("peaked", rows=3, vocab_size=columns)
    there, on_device, grad_output = logits.to(kernel_device), labels.to(kernel_device), random_grad_output(3)
    storage = torch.full((logits.numel() + 64,), NAN, dtype=dtype, device=kernel_device)
    given = {"into": storage[: logits.numel()].view_as(logits), "grad_output": grad_output.to(kernel_device)}
    grad = gradient_of(there, stats_of(there, on_device, options), on_device, options, **given)
    assert torch.equal(there.cpu(), logits) and storage[logits.numel() :].isnan().all()
    known = {"grad_output": grad_output, "reduction": "none", **(EVERY if options is ALL else {})}
    truth, peer = (f(logits, labels, **known).grad for f in (cross_entropy_fp64, cross_entropy_same_dtype))
    assert_within_budget(grad, truth, peer)


@pytest.mark.parametrize("rows", (3, 2500))
def test_each_program_of_the_outputs_counts_all_labels(kernel_device, rows):
    """Of 2500 rows there are 20, and each counts 1024 labels at a time."""
    logits, labels = batch("peaked", rows=rows, vocab_size=9)
    labels[1::3] = -100
    at, row_max = labels.clamp(min=0).unsqueeze(-1), logits.amax(-1)
    others = (logits.scatter(-1, at, NEG_INF) - row_max.unsqueeze(-1)).exp().sum(-1)
    label = logits.gather(-1, at).squeeze(-1)
    stats = torch.stack([row_max, others, label], -1).unsqueeze(0).to(kernel_device)
    count = torch.full((1,), -1, dtype=torch.int32, device=kernel_device)
    outputs = outputs_of(stats, labels.to(kernel_device), 9, count=count)
    losses = torch.nn.functional.cross_entropy(logits.double(), labels, reduction="none")
    assert int(count) == int((labels != -100).sum())
    torch.testing.assert_close(outputs.loss.cpu().double(), losses / int(count), rtol=1e-5, atol=1e-9)


def test_predictions_are_exact_up_to_the_largest_vocabulary_and_the_first_of_equals(kernel_device):
    """Ids travel as fp32, which has every integer up to 2**24."""
    last = 2**24 - 1
    of_ranks = [[2.0, 1.0, NEG_INF, last - 1], [3.0, 1.0, NEG_INF, 5]], [[3.0, 1.0, 3.0, last], [3.0, 1.0, 3.0, 9]]
    stats, labels = torch.tensor(of_ranks, device=kernel_device), torch.tensor([last, 9], device=kernel_device)
    outputs = outputs_of(stats, labels, 2**24, LossOptions(predictions=True))
    assert outputs.predictions.tolist() == [last, 5]
