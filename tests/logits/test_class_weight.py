"""Class weights: the loss and gradient are those of PyTorch's cross_entropy with its ``weight``."""

import pytest
import torch

from tests.support.cases.flat import linear_cross_entropy
from tests.support.cases.inputs import IGNORE_INDEX
from tests.support.cases.logits import COLUMNS, GRADIENTS, Leaves, broad_rows, run
from tests.support.cases.weights import weights
from tests.support.host.gpu import assert_graph_replays, assert_host_never_waits
from tests.support.truth.budget import assert_within_budget
from tests.support.truth.oracle import cross_entropy_fp64, cross_entropy_same_dtype
from vocab_parallel_ce import VocabParallelCrossEntropy, vocab_parallel_cross_entropy

NAN, INF = float("nan"), float("inf")


EDGES = {  # row -> what it holds
    "weight 0": 0,
    "weight 0 at an excluded label": 1,
    "weight 0 in a row of NaN": 2,
    "weight 0 in a row of infinity": 3,
    "weight 0 in a row of nothing": 4,
    "outside": 5,
    "beyond": 6,
    "negative": 7,
    "ignored": 8,
}


@pytest.mark.interpreted(2)
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # of the interpreter, about infinity - infinity
@pytest.mark.parametrize("z_loss", [0.0, 0.02])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.usefixtures("unread_labels")
def test_edges(impl_device, smoothing, z_loss):
    """Rows of weight 0, of a label outside, ignored ones; a column of weight 0 may be excluded under smoothing."""
    zero, negative = COLUMNS // 3, COLUMNS // 4
    logits = torch.randn(10, COLUMNS, generator=torch.Generator().manual_seed(0))
    labels = torch.tensor([zero] * 5 + [-1, COLUMNS, negative, IGNORE_INDEX, 1])
    logits[[1, 9], zero] = -INF
    logits[2, 3], logits[3, 3], logits[4], logits[8] = NAN, INF, -INF, NAN
    options = {"label_smoothing": smoothing, "z_loss": z_loss, "reduction": "none", "class_weight": weights()}
    truth, peer = (f(logits, labels, **options) for f in (cross_entropy_fp64, cross_entropy_same_dtype))
    options["class_weight"] = weights().to(impl_device[1])
    for gradient in GRADIENTS:
        (loss,), grad = run(impl_device, logits, labels, torch.ones(10), gradient=gradient, **options)
        assert loss.isnan().tolist() == [False, False, True, True, True, True, True, False, False, False]
        assert loss[8] == 0 and not grad[8].any()
        if not smoothing:
            assert loss[:2].tolist() == [0, 0] and not grad[:2].any()
        assert_within_budget(loss, truth.loss, peer.loss)
        assert_within_budget(grad, truth.grad, peer.grad)


@pytest.mark.parametrize("gradient", GRADIENTS)
@pytest.mark.usefixtures("unread_labels")
def test_weights_that_sum_to_0_give_a_mean_of_0_unless_a_label_is_outside(impl_device, gradient):
    """PyTorch's is NaN. A label outside has no weight, and must not vanish with the others."""
    logits, labels = broad_rows("peaked", 3)
    weight = torch.zeros(COLUMNS, device=impl_device[1])
    for smoothing in (0.0, 0.1):
        options = {"class_weight": weight, "gradient": gradient, "label_smoothing": smoothing}
        (loss,), grad = run(impl_device, logits, labels, **options)
        assert loss.item() == 0 and not grad.any()
        (loss,), grad = run(impl_device, logits, torch.tensor([1, COLUMNS, 2]), **options)
        assert loss.isnan() and grad[1].isnan().all()
    weight[1] = INF  # NaN, as PyTorch's
    (loss,), grad = run(impl_device, logits, torch.tensor([1, 0, 2]), class_weight=weight, gradient=gradient)
    assert loss.isnan() and grad[0].isnan().all()


@pytest.mark.reference
def test_the_module_has_it_as_a_buffer():
    logits, labels = broad_rows("peaked", 3)
    weight = weights()
    module = VocabParallelCrossEntropy(class_weight=weight, label_smoothing=0.1)
    assert module.state_dict().keys() == {"class_weight"} and not list(module.parameters())
    expected = vocab_parallel_cross_entropy(logits, labels, class_weight=weight, label_smoothing=0.1)
    assert torch.equal(module(logits, labels), expected)
    module.load_state_dict({"class_weight": weight * 0 + 1})
    assert torch.equal(module(logits, labels), vocab_parallel_cross_entropy(logits, labels, label_smoothing=0.1))


def test_weights_written_before_backward_are_noticed(impl_device):
    """With smoothing backward reads them again."""
    case, weight = Leaves(impl_device), weights(75).to(impl_device[1])
    loss = case.loss(class_weight=weight, label_smoothing=0.1)
    weight += 1
    with pytest.raises(RuntimeError, match="overwritten before backward"):
        loss.backward()


def _step(logits, labels, weight):
    """Both losses: a mean with smoothing, whose divisor is computed on the device."""
    leaf, head = logits.detach().requires_grad_(), torch.eye(COLUMNS, device=logits.device)
    options = {"class_weight": weight, "label_smoothing": 0.1}
    losses = vocab_parallel_cross_entropy(leaf, labels, **options), linear_cross_entropy(leaf, head, labels, **options)
    return *(loss.detach() for loss in losses), *torch.autograd.grad(sum(losses), leaf)


@pytest.mark.cuda
def test_the_host_never_waits_and_a_graph_replays_new_weights():
    batches = [(*broad_rows("some_ignored", seed=seed), weights(seed=seed)) for seed in range(3)]
    batches = [[tensor.cuda() for tensor in each] for each in batches]
    assert_host_never_waits(lambda: _step(*batches[0]))
    assert_graph_replays(_step, [tensor.clone() for tensor in batches[0]], batches)
