"""TransformerEngine's names: its signatures, the same loss, its gradient where that library writes it, refusals."""

import inspect
import warnings

import pytest
import torch

import vocab_parallel_ce as vp
from tests.support.cases.inputs import batch
from tests.support.cases.logits import COLUMNS, Leaves
from vocab_parallel_ce.integrations import transformer_engine
from vocab_parallel_ce.selection import select

# The signature names no implementation: "auto" takes the reference on a CPU and triton on a GPU.
DEVICES = {"cpu": pytest.mark.reference, "cuda": pytest.mark.cuda}
on_each_device = pytest.mark.parametrize(
    "impl_device", [pytest.param(("auto", device), id=device, marks=mark) for device, mark in DEVICES.items()]
)
REDUCTION = {True: "mean", False: "none"}


OF_2_20_2 = (
    "inp target label_smoothing=0.0 reduce_loss=False dist_process_group=None ignore_idx=-100 is_cg_capturable=False "
    "*overwrite_input=False *_input=None"
)
OF_2_17 = {  # and from 2.7 on
    "cross_entropy_forward": "_input target label_smoothing reduce_loss dist_process_group ignore_idx",
    "cross_entropy_backward": "_input grad_output is_cg_capturable=False",
}


def described(function):
    """The names and defaults of the parameters, and a star for those that are given by name alone."""
    parameters = inspect.signature(function).parameters.values()
    stars = {inspect.Parameter.POSITIONAL_OR_KEYWORD: "", inspect.Parameter.KEYWORD_ONLY: "*"}
    return " ".join(stars[p.kind] + p.name + ("" if p.default is p.empty else f"={p.default!r}") for p in parameters)


@pytest.mark.quick
@pytest.mark.reference
def test_signatures_are_transformer_engines():
    assert described(vp.parallel_cross_entropy) == OF_2_20_2
    assert {name: described(getattr(vp, name)) for name in OF_2_17} == OF_2_17


@pytest.mark.reference
def test_the_recorded_signature_is_that_of_the_installed_library():
    engine = pytest.importorskip("transformer_engine.pytorch.cross_entropy", reason="needs TransformerEngine")
    theirs = described(engine.parallel_cross_entropy)
    assert theirs == OF_2_20_2 or theirs == OF_2_20_2.replace("*overwrite_input=False ", "")  # before 2.20


@pytest.mark.quick
@on_each_device
@pytest.mark.parametrize("overwrite_input", (None, True, False))
@pytest.mark.parametrize("reduce_loss", (True, False))
def test_where_the_gradient_is_written(impl_device, reduce_loss, overwrite_input):
    """Forward leaves the input as it is; a mean's gradient was there, and the accuracy read from it was 0."""
    case = Leaves(impl_device, columns=COLUMNS)
    options = {"reduce_loss": reduce_loss} | ({} if overwrite_input is None else {"overwrite_input": overwrite_input})
    loss = vp.parallel_cross_entropy(case.logits, case.labels, 0.1, **options)
    assert loss.shape == ((1,) if reduce_loss else case.labels.shape)
    assert case.logits_are_untouched()
    grad_output = case.grad_output(loss)
    (grad,) = torch.autograd.grad(loss, case.logits, grad_output)
    assert (grad.data_ptr() == case.logits.data_ptr()) == bool(overwrite_input)  # the case holds its logits
    assert case.logits_are_untouched() != bool(overwrite_input)
    if reduce_loss:
        loss, grad_output = loss[0], grad_output.reshape(())
    case.assert_right(loss, grad, grad_output, reduction=REDUCTION[reduce_loss], label_smoothing=0.1)


@pytest.mark.reference
def test_by_default_nothing_is_overwritten_that_nobody_else_sees_either():
    """That library allocates a tensor for the gradient, whoever holds the input."""
    made, labels = batch("peaked", rows=3, vocab_size=COLUMNS)
    logits = made.requires_grad_() * 1
    address, gradients = logits.data_ptr(), []
    logits.register_hook(lambda grad: gradients.append(grad.data_ptr()))
    loss = vp.parallel_cross_entropy(logits, labels)
    del logits
    loss.sum().backward()
    assert gradients and gradients != [address]


@pytest.mark.quick
@on_each_device
@pytest.mark.parametrize("reduce_loss", (True, False))
def test_a_flattened_target_is_that_of_the_rows(impl_device, reduce_loss):
    """A target of as many ids in another shape would give rows the labels of others."""
    case = Leaves(impl_device, columns=COLUMNS)
    rows = len(case.labels.flatten())
    logits, labels = case.values.reshape(rows // 2, 2, COLUMNS), case.labels.reshape(rows // 2, 2)
    expected = vp.parallel_cross_entropy(logits, labels, 0.1, reduce_loss)
    assert torch.equal(vp.parallel_cross_entropy(logits, labels.flatten(), 0.1, reduce_loss), expected)
    of_pair = [
        vp.cross_entropy_forward(logits.clone(), target, 0.1, reduce_loss, None, -100)
        for target in (labels, labels.flatten())
    ]
    assert all(map(torch.equal, *of_pair)) and of_pair[1][0].shape == (() if reduce_loss else labels.shape)
    for call in (vp.parallel_cross_entropy, vp.cross_entropy_forward):
        with pytest.raises(ValueError, match="^labels: shape must be that of logits without the last dimension"):
            call(logits, labels.t(), 0.1, reduce_loss, None, -100)


@pytest.mark.reference
@pytest.mark.parametrize(
    "step",
    [
        lambda logits, labels: vp.cross_entropy_forward(logits, labels, 0.0, True, None, -100, False),
        lambda logits, labels: vp.cross_entropy_forward(logits, labels, 0.0, True, None, -100, overwrite_input=True),
        lambda logits, labels: vp.cross_entropy_forward(logits, labels, 0.0, True, None),
        lambda logits, labels: vp.cross_entropy_backward(*[logits] * 4, labels, 0.0, True, 0, 1, -100),
        lambda logits, labels: vp.cross_entropy_backward(grad_input=logits, grad_output=torch.ones(())),
    ],
)
def test_the_pair_says_that_a_call_is_in_another_versions_form(step):
    logits = LOGITS.clone()
    expected = (
        r"_(forward|backward): expected \(_input, .*\), as in TransformerEngine 2.7 to 2.17, got another version's"
    )
    with pytest.raises(TypeError, match=f"^cross_entropy{expected} call: .*; the pair of 2.20.2 saves statistics, "):
        step(logits, LABELS)
    assert torch.equal(logits, LOGITS) and logits._version == 0


@pytest.mark.quick
@on_each_device
@pytest.mark.parametrize("reduce_loss", (True, False))
@pytest.mark.parametrize("requires_grad", (True, False))
def test_the_two_step_pair(impl_device, reduce_loss, requires_grad):
    case = Leaves(impl_device, columns=COLUMNS)
    logits = case.values.clone().requires_grad_(requires_grad)
    loss, grad = vp.cross_entropy_forward(logits, case.labels, 0.1, reduce_loss, None, -100)
    assert grad is logits and loss.shape == (() if reduce_loss else case.labels.shape)
    grad_output = case.grad_output(loss)
    assert vp.cross_entropy_backward(grad, grad_output, is_cg_capturable=True) is logits
    case.assert_right(loss, logits, grad_output, reduction=REDUCTION[reduce_loss], label_smoothing=0.1)


@pytest.mark.interpreter
def test_the_second_step_with_kernels(monkeypatch):
    """On a CPU it chooses plain PyTorch, so it is told here to take what it takes on a GPU."""
    monkeypatch.setattr(transformer_engine, "select", lambda device, impl: select(device, "triton"))
    case = Leaves(("auto", "cpu"), columns=COLUMNS)
    logits = case.values.clone()
    loss, grad = vp.cross_entropy_forward(logits, case.labels, 0.0, True, None, -100)
    vp.cross_entropy_backward(grad, torch.tensor(-2.5))
    case.assert_right(loss, logits, torch.tensor(-2.5))


@on_each_device
def test_the_two_step_pair_on_inference_tensors_and_on_a_view(impl_device):
    """Inference tensors have no version counter to raise."""
    case = Leaves(impl_device, columns=COLUMNS)
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
        actual = vp.parallel_cross_entropy(None, labels, _input=logits)
    assert caught[0].filename == __file__
    import torch._dynamo  # where the compiler is there, verified calls are kept out of it

    with pytest.warns(FutureWarning, match="_input is deprecated") as caught, vp.verify_calls():
        vp.parallel_cross_entropy(None, target=labels, _input=logits)
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(actual, vp.parallel_cross_entropy(inp=logits, target=labels))
    with pytest.raises(TypeError, match="^_input: .* both"):
        vp.parallel_cross_entropy(logits.clone(), labels, _input=logits)


LOGITS, LABELS = torch.randn(2, 3, COLUMNS), torch.zeros(2, 3, dtype=torch.int64)
