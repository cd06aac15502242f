"""Options beside their numbers: values that change nothing, types of divisors, class weights, temperatures."""

import pytest
import torch

from tests.support.cases.logits import (
    COLUMNS,
    Leaves,
    broad_rows,
)
from tests.support.cases.weights import weights
from tests.support.host.gpu import assert_graph_replays, assert_host_never_waits
from vocab_parallel_ce import (
    VocabParallelCrossEntropy,
    linear_cross_entropy,
    linear_token_log_probs,
    token_log_probs,
    vocab_parallel_cross_entropy,
)


@pytest.mark.reference
def test_a_module_has_class_weights_as_a_buffer():
    logits, labels = broad_rows("peaked", 3)
    weight = weights()
    module = VocabParallelCrossEntropy(class_weight=weight, label_smoothing=0.1)
    assert module.state_dict().keys() == {"class_weight"} and not list(module.parameters())
    expected = vocab_parallel_cross_entropy(logits, labels, class_weight=weight, label_smoothing=0.1)
    assert torch.equal(module(logits, labels), expected)
    module.load_state_dict({"class_weight": weight * 0 + 1})
    assert torch.equal(module(logits, labels), vocab_parallel_cross_entropy(logits, labels, label_smoothing=0.1))


def test_class_weights_written_before_backward_are_noticed(impl_device):
    """With smoothing backward reads them again."""
    case, weight = Leaves(impl_device), weights(75).to(impl_device[1])
    loss = case.loss(class_weight=weight, label_smoothing=0.1)
    weight += 1
    with pytest.raises(RuntimeError, match="overwritten before backward"):
        loss.backward()


def _weighted_step(logits, labels, weight):
    """Both losses: a mean with smoothing, whose divisor is computed on the device."""
    leaf, head = logits.detach().requires_grad_(), torch.eye(COLUMNS, device=logits.device)
    options = {"class_weight": weight, "label_smoothing": 0.1}
    losses = vocab_parallel_cross_entropy(leaf, labels, **options), linear_cross_entropy(leaf, head, labels, **options)
    return *(loss.detach() for loss in losses), *torch.autograd.grad(sum(losses), leaf)


@pytest.mark.cuda
def test_the_host_never_waits_and_a_graph_replays_new_weights():
    batches = [(*broad_rows("some_ignored", seed=seed), weights(seed=seed)) for seed in range(3)]
    batches = [[tensor.cuda() for tensor in each] for each in batches]
    assert_host_never_waits(lambda: _weighted_step(*batches[0]))
    assert_graph_replays(_weighted_step, [tensor.clone() for tensor in batches[0]], batches)


@pytest.mark.reference
def test_a_temperature_written_before_backward_is_noticed():
    (logits, labels), t = broad_rows("peaked", 6), torch.linspace(0.4, 1.9, 6)
    head = torch.randn(4, logits.shape[1])
    for loss in (
        token_log_probs(logits.requires_grad_() * 1, labels, temperature=t),
        linear_token_log_probs(logits, head, labels % 4, temperature=t),
    ):
        t += 1
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.sum().backward()


@pytest.mark.cuda
def test_the_host_never_waits_for_a_temperature():
    logits, labels = (tensor.cuda() for tensor in broad_rows("peaked"))
    leaf, t = logits.requires_grad_(), torch.linspace(0.4, 1.9, len(labels)).cuda()

    def step():
        token_log_probs(leaf * 1, labels, outputs=("entropy",), temperature=t).entropy.sum().backward()

    assert_host_never_waits(step)
