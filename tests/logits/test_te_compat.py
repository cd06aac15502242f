"""TransformerEngine's names: the same loss, its gradient where TransformerEngine writes it, refusals."""

import math
import warnings

import pytest
import torch

import vocab_parallel_ce as vp
from tests.support.inputs import batch
from tests.support.logits import COLUMNS, Case

# The signature names no implementation: "auto" takes the reference on a CPU and triton on a GPU.
DEVICES = {"cpu": pytest.mark.reference, "cuda": pytest.mark.cuda}
on_each_device = pytest.mark.parametrize(
    "impl_device", [pytest.param(("auto", device), id=device, marks=mark) for device, mark in DEVICES.items()]
)
REDUCTION = {True: "mean", False: "none"}


@pytest.mark.quick
@on_each_device
@pytest.mark.parametrize("overwrite_input", (None, True, False))
@pytest.mark.parametrize("reduce_loss", (True, False))
def test_where_the_gradient_is_written(impl_device, reduce_loss, overwrite_input):
    case = Case(impl_device, columns=COLUMNS)
    options = {"reduce_loss": reduce_loss, "overwrite_input": overwrite_input}
    loss = vp.parallel_cross_entropy(case.logits, case.labels, 0.1, **options)
    assert case.logits_are_untouched() != (overwrite_input is None and reduce_loss)
    grad_output = case.grad_output(loss)
    (grad,) = torch.autograd.grad(loss, case.logits, grad_output)
    in_place = reduce_loss if overwrite_input is None else overwrite_input  # the case holds its logits
    assert (grad.data_ptr() == case.logits.data_ptr()) == in_place
    case.assert_right(loss, grad, grad_output, reduction=REDUCTION[reduce_loss], label_smoothing=0.1)


@pytest.mark.quick
@on_each_device
@pytest.mark.parametrize("reduce_loss", (True, False))
@pytest.mark.parametrize("requires_grad", (True, False))
def test_the_two_step_pair(impl_device, reduce_loss, requires_grad):
    case = Case(impl_device, columns=COLUMNS)
    logits = case.values.clone().requires_grad_(requires_grad)
    loss, grad = vp.cross_entropy_forward(logits, case.labels, 0.1, reduce_loss, None, -100)
    assert grad is logits and loss.shape == (() if reduce_loss else case.labels.shape)
    grad_output = case.grad_output(loss)
    assert vp.cross_entropy_backward(grad, grad_output, is_cg_capturable=True) is logits
    case.assert_right(loss, logits, grad_output, reduction=REDUCTION[reduce_loss], label_smoothing=0.1)


@on_each_device
def test_the_two_step_pair_on_inference_tensors_and_on_a_view(impl_device):
    """Inference tensors have no version counter to raise."""
    case = Case(impl_device, columns=COLUMNS)
    with torch.inference_mode():
        logits = case.values.clone()
        loss, grad = vp.cross_entropy_forward(logits, case.labels, 0.0, True, None, -100)
        vp.cross_entropy_backward(grad, torch.ones_like(loss))
    case.assert_right(loss.clone(), grad.clone(), torch.tensor(1.0))
    loss, grad = vp.cross_entropy_forward(case.logits[:-1], case.labels[:-1], 0.0, True, None, -100)
    assert grad.data_ptr() == case.logits.data_ptr() and not case.logits_are_untouched()


@pytest.mark.reference
def test_the_deprecated_alias_warns_and_works():
    logits, labels = batch("peaked", rows=3, vocab_size=COLUMNS)
    with pytest.warns(FutureWarning, match="_input is deprecated") as caught:
        actual = vp.parallel_cross_entropy(_input=logits, target=labels)
    assert caught[0].filename == __file__
    import torch._dynamo  # where the compiler is there, verified calls are kept out of it

    with pytest.warns(FutureWarning, match="_input is deprecated") as caught, vp.verify_calls():
        vp.parallel_cross_entropy(_input=logits, target=labels)
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(actual, vp.parallel_cross_entropy(inp=logits, target=labels))
    with pytest.raises(TypeError, match="^_input: .* both"):
        vp.parallel_cross_entropy(logits, labels, _input=logits)


LOGITS, LABELS = torch.randn(2, 3, COLUMNS), torch.zeros(2, 3, dtype=torch.int64)


@pytest.mark.reference
@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"overwrite_input": "yes"}, TypeError, "overwrite_input: .*'yes'"),
        ({"reduce_loss": "mean"}, TypeError, "reduce_loss: .*str"),
        ({"label_smoothing": 2.0}, ValueError, r"label_smoothing: .*2\.0"),
        ({"dist_process_group": 4}, TypeError, "group: .*int"),
        ({"target": None}, TypeError, "labels: .*NoneType"),
        ({"target": torch.rand(2, 3, COLUMNS)}, TypeError, "target: dtype must be int64 or int32, got torch.float32"),
        ({"inp": None}, TypeError, "logits: .*NoneType"),
    ],
)
def test_the_signature_refuses_too(options, error, message):
    with pytest.raises(error, match=f"^{message}"):
        vp.parallel_cross_entropy(**{"inp": LOGITS, "target": LABELS, **options})


@pytest.mark.reference
@pytest.mark.parametrize(
    ("grad_output", "error", "message"),
    [
        (1.0, TypeError, "grad_output: .*Tensor.*float"),
        (torch.ones(6, dtype=torch.int64), TypeError, "grad_output: dtype .*int64"),
        (torch.ones(5), ValueError, r"grad_output: .*\(2, 3\).*\(5,\)"),
        (torch.ones(2, 3, COLUMNS), ValueError, r"grad_output: .*\(2, 3, 21\)"),
        (torch.ones(2, 3, device="meta"), ValueError, "grad_output: device .*cpu.*meta"),
    ],
)
def test_the_second_step_refuses_what_it_cannot_scale_by(grad_output, error, message):
    _, gradient = vp.cross_entropy_forward(LOGITS.clone(), LABELS, 0.0, False, None, -100)
    before, version = gradient.clone(), gradient._version
    with pytest.raises(error, match=f"^{message}"):
        vp.cross_entropy_backward(gradient, grad_output)
    assert torch.equal(gradient, before) and gradient._version == version


@pytest.mark.reference
def test_a_mean_of_fp16_keeps_gradients_that_only_a_loss_scale_makes_large_enough():
    """Written in forward, exp(-16) / 4 would be 0 in fp16."""
    leaf = torch.zeros(4, 16, dtype=torch.float16)
    leaf[:, 0] = 16
    leaf.requires_grad_()
    loss = vp.parallel_cross_entropy(leaf * 1, torch.zeros(4, dtype=torch.int64), reduce_loss=True)
    (loss * 2.0**16).backward()
    torch.testing.assert_close(leaf.grad[:, 1:], torch.full((4, 15), 2.0**14 * math.exp(-16)).half())
