"""Labels with p_y near 1 in fp32: the gradient is 1 - p_y, the loss about that, both to their last digits."""

import math

import pytest
import torch

from tests.support.truth.confident import EPS, ROWS, Rows, assert_as_exact_as_fp32, confident_rows, truth_of
from vocab_parallel_ce import HeadOptions, linear_cross_entropy, token_log_probs, vocab_parallel_cross_entropy
from vocab_parallel_ce.losses.labels import LABELS, Labels
from vocab_parallel_ce.shard import VocabShard
from vocab_parallel_ce.spec import PLAIN, GradOutputs, TokenOutputs


def rows_for(impl_device):
    """Enough for a root mean square, if the interpreter can do them."""
    return ROWS if impl_device == ("triton", "cpu") else 16 * ROWS


def by_the_loss(impl_device, logits, labels, **options):
    impl, device = impl_device
    leaf = logits.to(device, copy=True).requires_grad_()
    loss = vocab_parallel_cross_entropy(leaf * 1.0, labels.to(device), impl=impl, **options)
    (grad,) = torch.autograd.grad(loss.sum(), leaf)
    return Rows(loss.detach().cpu(), grad.cpu())


def by_ranks(impl_device, logits, labels, n_ranks):
    """From the statistics of each rank's columns, merged as every rank merges them."""
    impl, device = impl_device
    if impl == "reference":
        kernels = None
    else:
        from vocab_parallel_ce import kernels
    labels = labels.to(device)
    shards = [VocabShard.for_rank(logits.shape[1], rank, n_ranks) for rank in range(n_ranks)]
    pieces = [(logits[:, shard.start : shard.stop].contiguous().to(device), shard) for shard in shards]
    stats = torch.full((n_ranks, len(labels), len(PLAIN.statistics)), math.nan, device=device)
    for rank, (x, shard) in enumerate(pieces):
        LABELS.launchers(PLAIN, shard, kernels).statistics(x, Labels(labels), (stats,), rank)
    losses, grads = [], []
    for x, shard in pieces:
        losses.append(torch.full((len(labels),), math.nan, device=device))
        grads.append(torch.full_like(x, math.nan))
        launchers = LABELS.launchers(PLAIN, shard, kernels)
        launchers.outputs((stats,), Labels(labels), None, TokenOutputs(losses[-1]))
        launchers.gradient(x, Labels(labels), (stats,), None, GradOutputs(), grads[-1])
    assert all(torch.equal(loss.nan_to_num(-1.0), losses[0].nan_to_num(-1.0)) for loss in losses)
    return Rows(losses[0].cpu(), torch.cat(grads, dim=1).cpu())


@pytest.mark.parametrize("n_ranks", [2, 3, 4])
@pytest.mark.interpreted(1)
def test_merged_ranks(impl_device, n_ranks):
    logits, labels = confident_rows(99, rows_for(impl_device))
    assert_as_exact_as_fp32(by_ranks(impl_device, logits, labels, n_ranks), logits, labels)


@pytest.mark.parametrize("vocab_size", [10, 1024])
@pytest.mark.parametrize("options", [{}, {"class_weight": 1.5}], ids=["", "class_weight"])
def test_loss_and_gradient(impl_device, vocab_size, options):
    """A weight scales both."""
    logits, labels = confident_rows(vocab_size, rows_for(impl_device))
    weight = {name: torch.full((vocab_size,), value, device=impl_device[1]) for name, value in options.items()}
    actual = by_the_loss(impl_device, logits, labels, reduction="none", **weight)
    scale = options.get("class_weight", 1.0)
    assert_as_exact_as_fp32(Rows(actual.loss / scale, actual.grad / scale), logits, labels)


def test_the_linear_loss(impl_device):
    """Of an identity: the logits are the head's elements, and so are its gradients."""
    impl, device = impl_device
    logits, labels = confident_rows(50, rows=32)
    head = logits.t().contiguous().to(device).requires_grad_()
    hidden = torch.eye(32, device=device)
    loss = linear_cross_entropy(hidden, head, labels.to(device), reduction="sum", options=HeadOptions(impl=impl))
    loss.backward()
    truth = truth_of(logits, labels)
    assert_as_exact_as_fp32(Rows(truth.loss, head.grad.t().cpu()), logits, labels)
    assert abs(loss.item() / float(truth.loss.sum()) - 1) <= 4 * EPS


def test_log_probs_and_entropy(impl_device):
    """The entropy of a confident row is as small as its loss."""
    impl, device = impl_device
    logits, labels = confident_rows(200)
    found = token_log_probs(logits.to(device), labels.to(device), outputs=("entropy",), impl=impl)
    x = logits.double()
    truth = truth_of(logits, labels)
    log_p = x.log_softmax(dim=1).scatter(1, labels.unsqueeze(1), -truth.loss.unsqueeze(1))
    true_entropy = -(log_p.exp() * log_p).sum(dim=1)
    assert float((-found.log_probs.double().cpu() / truth.loss - 1).abs().max()) <= 32 * EPS
    assert float((found.entropy.double().cpu() / true_entropy - 1).abs().max()) <= 32 * EPS


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("n_ranks", [1, 3])
def test_a_bad_logit_of_the_label_itself_is_seen(impl_device, n_ranks, bad):
    """It is in no sum of other columns, and a maximum may pass over NaN."""
    logits, labels = confident_rows(33, rows=6)
    labels[:3] = torch.tensor([0, 17, 32])
    logits[torch.arange(3), labels[:3]] = bad
    loss, grad = by_ranks(impl_device, logits, labels, n_ranks)
    assert loss.isnan().tolist() == [True] * 3 + [False] * 3
    assert grad[:3].isnan().all() and grad[3:].isfinite().all()
