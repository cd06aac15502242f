"""Class weights: the loss and gradient are those of PyTorch's cross_entropy with its ``weight``."""

import itertools

import pytest
import torch
import torch.nn.functional as F

from tests.support.budget import assert_within_budget
from tests.support.gpu import assert_graph_replays, assert_host_never_waits
from tests.support.inputs import IGNORE_INDEX
from tests.support.logits import COLUMNS, GRADIENTS, REDUCTIONS, Case, broad_rows, random_grad_output, run
from tests.support.oracle import cross_entropy_fp64, cross_entropy_same_dtype
from tests.support.weights import weights
from vocab_parallel_ce import VocabParallelCrossEntropy, linear_cross_entropy, vocab_parallel_cross_entropy
from vocab_parallel_ce.selection import ONE_PASS_SHARED_MEMORY, Gpu, Workload, select
from vocab_parallel_ce.spec import PLAIN

NAN, INF = float("nan"), float("inf")


@pytest.mark.quick(4)
@pytest.mark.interpreted(4)
@pytest.mark.parametrize(
    ("reduction", "smoothing", "ignore_index"), [*itertools.product(REDUCTIONS, (0.0, 0.1, 1.0), (-100, 5))]
)
def test_pytorchs_own_loss_and_gradient(impl_device, reduction, smoothing, ignore_index):
    logits, labels = broad_rows("mixture", 9)
    logits.masked_fill_(logits.isinf(), -20.0)
    labels[labels == IGNORE_INDEX] = ignore_index
    grad_output = random_grad_output(9) if reduction == "none" else torch.tensor(0.75)
    options = {"reduction": reduction, "label_smoothing": smoothing, "ignore_index": ignore_index}
    given = weights()
    (loss,), grad = run(impl_device, logits, labels, grad_output, class_weight=given.to(impl_device[1]), **options)

    def pytorchs(dtype):
        leaf = logits.to(dtype, copy=True).requires_grad_()
        value = F.cross_entropy(leaf, labels, given.to(dtype), **options)
        value.backward(grad_output.to(dtype))
        return value, leaf.grad

    truth, peer = pytorchs(torch.float64), pytorchs(torch.float32)
    assert_within_budget(loss, truth[0], peer[0])
    assert_within_budget(grad, truth[1], peer[1])


@pytest.mark.interpreted(2)
@pytest.mark.parametrize("smoothing", [0.0, 1e-9])
@pytest.mark.parametrize("gradient", GRADIENTS)
def test_confident_labels_keep_their_digits(impl_device, gradient, smoothing):
    """``p_y - 1``, which is all of the gradient, is below the last digit of p_y."""
    logits, labels = torch.zeros(2, COLUMNS), torch.tensor([4, 4])
    logits[:, 4] = torch.tensor([25.0, 14.0])
    options = {"label_smoothing": smoothing, "reduction": "sum", "class_weight": weights() + 0.5}
    truth = cross_entropy_fp64(logits, labels, **options).grad
    options["class_weight"] = options["class_weight"].to(impl_device[1])
    _, grad = run(impl_device, logits, labels, gradient=gradient, **options)
    torch.testing.assert_close(grad[:, 4].double(), truth[:, 4], rtol=2e-6, atol=0)


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


WRONG = [
    ([1.0] * COLUMNS, TypeError, "expected a torch.Tensor, got list"),
    (torch.ones(COLUMNS, dtype=torch.int64), TypeError, "dtype must be floating point, dense, got torch.int64"),
    (torch.ones(COLUMNS).to_sparse(), TypeError, "dtype must be floating point, dense, got torch.float32"),
    (torch.ones(COLUMNS, requires_grad=True), TypeError, "expected a constant, got a tensor that requires"),
    (torch.ones(COLUMNS + 1), ValueError, r"expected shape \(21,\), got \(22,\)"),
    (torch.ones(COLUMNS, 1), ValueError, r"expected shape .*, got \(21, 1\)"),
    (torch.ones(()), ValueError, r"expected shape .*, got \(\)"),
    (torch.ones(COLUMNS, device="meta"), ValueError, "device must be that of the logits, cpu, got meta"),
]


@pytest.mark.reference
@pytest.mark.parametrize(("wrong", "error", "message"), WRONG)
def test_refused_before_anything_changes(wrong, error, message):
    logits, labels = broad_rows("peaked", 3)
    before = logits.clone()
    with pytest.raises(error, match=f"^class_weight: {message}"):
        vocab_parallel_cross_entropy(logits, labels, class_weight=wrong, gradient="in_forward")
    assert torch.equal(logits, before)
    if error is TypeError:
        with pytest.raises(error, match=f"^class_weight: {message}"):
            VocabParallelCrossEntropy(class_weight=wrong)


@pytest.mark.reference
def test_one_pass_does_not_take_it():
    options = PLAIN._replace(class_weight=True)
    workload = Workload(1, "in_forward", options.beyond_z_loss, whole_vectors=True, fits=True)
    gpu = Gpu(is_nvidia=True, shared_memory=ONE_PASS_SHARED_MEMORY, has_gluon=True)
    assert select("cuda", "auto", triton="compiler", workload=workload, gpu=gpu).name == "triton"
    with pytest.raises(ValueError, match="no option but ignore_index and z_loss, got class_weight"):
        select("cuda", "one_pass", triton="compiler", workload=workload, gpu=gpu)


def test_weights_written_before_backward_are_noticed(impl_device):
    """With smoothing backward reads them again."""
    case, weight = Case(impl_device), weights(75).to(impl_device[1])
    loss = case.loss(class_weight=weight, label_smoothing=0.1)
    weight += 1
    with pytest.raises(RuntimeError, match="overwritten before backward"):
        loss.backward()


@pytest.mark.reference
def test_metrics_have_no_weighted_z_loss():
    options = {"class_weight": weights(), "return_metrics": True, "z_loss": 0.1}
    with pytest.raises(ValueError, match="^return_metrics: expected no z_loss with class_weight"):
        vocab_parallel_cross_entropy(*broad_rows("peaked", 3), **options)


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
