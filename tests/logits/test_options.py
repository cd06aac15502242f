"""Options beside their numbers: values that change nothing, types of divisors, class weights, temperatures."""

import pytest
import torch

from tests.support.cases import linear
from tests.support.cases import logits as of_logits
from tests.support.cases.inputs import batch
from tests.support.cases.linear import linear_every_output, projection
from tests.support.cases.logits import (
    COLUMNS,
    METRICS,
    REDUCTIONS,
    Leaves,
    broad_rows,
    check,
    every_output,
    run,
)
from tests.support.cases.weights import weights
from tests.support.host.gpu import assert_graph_replays, assert_host_never_waits
from vocab_parallel_ce import (
    VocabParallelCrossEntropy,
    VocabShard,
    linear_cross_entropy,
    linear_token_log_probs,
    token_log_probs,
    vocab_parallel_cross_entropy,
)

INF = float("inf")


def test_options_given_at_their_off_values_change_no_bit(impl_device):
    off = {
        "label_smoothing": 0,
        "z_loss": 0,
        "softcap": None,
        "logit_scale": 1,
        "num_items": None,
        "outputs": (),
        "vocab_size": VocabShard(0, COLUMNS, COLUMNS),
    }
    made = batch("some_ignored", rows=2, vocab_size=COLUMNS, dtype=torch.bfloat16)
    for reduction in REDUCTIONS:
        omitted = run(impl_device, *made, reduction=reduction)
        for given in (off, {"vocab_size": COLUMNS}):
            results = run(impl_device, *made, reduction=reduction, **given)
            assert torch.equal(results.loss, omitted.loss) and torch.equal(results.grad, omitted.grad)


def test_num_items_of_every_type(impl_device):
    """The loss is fp32 and a scalar, whatever the divisor is."""
    device, made = impl_device[1], broad_rows("some_ignored", 3)
    options = {"reduction": "sum", "z_loss": 0.02, "outputs": METRICS}
    expected = check(impl_device, *made, num_items=6, **options)
    for num_items in (
        6.0,
        torch.tensor(6),
        torch.tensor([6], dtype=torch.int32, device=device),
        torch.tensor(6.0, device=device, dtype=torch.float64),
        torch.tensor([6.0], device=device, dtype=torch.bfloat16),
    ):
        results = run(impl_device, *made, num_items=num_items, **options)
        assert results.loss.shape == () and results.loss.dtype == torch.float32
        torch.testing.assert_close(results, expected, rtol=0, atol=0)
    infinite = run(impl_device, *made, num_items=torch.tensor(INF, device=device), **options)
    assert infinite.loss.item() == 0 and not infinite.grad.any()


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


@pytest.mark.parametrize("module", [of_logits, linear], ids=["logits", "linear"])
def test_a_temperature_of_one_element_is_the_number_bit_for_bit(impl_device, module):
    inputs, function = (projection(),), linear_every_output
    if module is of_logits:
        inputs, function = broad_rows("peaked"), every_output
    number = torch.tensor(0.7)
    of_number, *others = (
        module.run(impl_device, *inputs, function=function, temperature=t, logit_scale=0.5)
        for t in (float(number), number.to(impl_device[1]), number.view(1, 1).to(impl_device[1]))
    )
    for other in others:
        torch.testing.assert_close(other, of_number, rtol=0, atol=0)


@pytest.mark.reference
def test_leading_dimensions_and_a_changed_temperature():
    logits, labels = broad_rows("peaked", 6)
    strided = (t := torch.linspace(0.4, 1.9, 6)).view(3, 2).t()
    shaped = token_log_probs(logits.view(2, 3, -1), labels.view(2, 3), temperature=strided)
    assert torch.equal(shaped.flatten(), token_log_probs(logits, labels, temperature=strided.flatten()))
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
