"""``shift=True``: token t predicts the label at t + 1, in the losses over logits and over hidden states."""

import pytest
import torch

import vocab_parallel_ce as vp
from tests.support import linear, logits
from tests.support.inputs import IGNORE_INDEX
from tests.support.linear import record_matmuls
from tests.support.logits import METRICS
from vocab_parallel_ce.integrations import dtensor

SHAPES = {(1, 6): (1, 5), (2, 3): (2, 2), (1, 3, 2): (1, 3, 1)}  # of labels, and of unreduced losses
OPTIONS = (
    {"outputs": METRICS, "z_loss": 0.02},
    {"reduction": "none", "outputs": METRICS},
    {"reduction": "sum", "num_items": 3},
)


@pytest.mark.quick(2)
@pytest.mark.interpreted(4)
@pytest.mark.parametrize("shape, options", [*zip(SHAPES, OPTIONS, strict=True)], ids=("mean", "none", "items"))
@pytest.mark.parametrize("is_head", (False, True), ids=("logits", "head"))
def test_results_are_those_of_labels_one_ahead(impl_device, is_head, shape, options):
    is_reduced = options.get("reduction") != "none"
    grad_output = torch.tensor(0.75) if is_reduced else torch.arange(1.0, 5).view(2, 2)
    given = linear.projection("some_ignored", 6, exact=True).shaped(*shape)
    kept = (..., slice(0, -1), slice(None))
    if is_head:
        n_valid = int((given.labels[..., 1:] != IGNORE_INDEX).sum())
        options = {**options, "chunk_size": 4, "valid_tokens": n_valid}
        found = linear.run(impl_device, given, grad_output, shift=True, **options)
        assert not found.hidden[..., -1, :].any()
        ahead = given._replace(hidden=given.hidden[kept], labels=given.labels[..., 1:])
        linear.assert_right(found._replace(hidden=found.hidden[kept]), ahead, grad_output, **options)
    else:
        found = logits.run(impl_device, values := given.logits(), given.labels, grad_output, shift=True, **options)
        logits.assert_right(found, values, given.labels, grad_output, shift=True, **options)
    loss_and_z_loss = found.outputs[::3]
    predictions = found.outputs[1:2]
    for output in (*predictions, *(() if is_reduced else loss_and_z_loss)):
        assert output.shape == SHAPES[shape]


def test_an_expected_grad_output_is_of_the_losses(impl_device):
    impl, device = impl_device
    inputs = linear.projection("peaked", 6).shaped(2, 3)
    mask = torch.tensor([[0.0, 1.0], [2.0, -1.0]])
    options = {"reduction": "none", "gradient": "in_forward"}
    with record_matmuls() as matmuls:
        given = {"expected_grad_output": mask.to(device), "shift": True, **options}
        found = linear.run(impl_device, inputs, 0.3 * mask, **given)
    assert len(matmuls) == 3
    ahead = inputs._replace(hidden=inputs.hidden[:, :-1], labels=inputs.labels[:, 1:])
    linear.assert_right(found._replace(hidden=found.hidden[:, :-1]), ahead, 0.3 * mask, **options)
    with pytest.raises(ValueError, match=r"expected_grad_output: expected shape \(2, 2\).*got \(2, 3\)"):
        linear.run(impl_device, inputs, mask, **given | {"expected_grad_output": torch.ones(2, 3, device=device)})


def test_modules_have_it(impl_device):
    impl, device = impl_device
    inputs = linear.projection("peaked", 6).shaped(2, 3)
    hidden, weight, labels = (t.to(device) for t in inputs[:3])
    head = torch.nn.Embedding.from_pretrained(weight)
    expected = vp.vocab_parallel_cross_entropy(hidden[:, :-1] @ weight.t(), labels[:, 1:], impl=impl)
    for loss in (
        vp.VocabParallelCrossEntropy(shift=True, impl=impl)(hidden @ weight.t(), labels),
        vp.LinearCrossEntropy(head, shift=True, impl=impl)(hidden, labels),
    ):
        torch.testing.assert_close(loss, expected)


@pytest.mark.reference
def test_labels_are_checked_where_the_caller_has_them():
    """The first is not looked at. An ignore_index may be beyond what int32 labels can hold."""
    inputs = linear.projection("peaked", 6).shaped(2, 3)
    labels, given = inputs.labels.int(), (inputs.hidden, inputs.weight)
    labels[0, 0] = 10**6
    values = inputs.logits()
    options = {"shift": True, "check_labels": True, "ignore_index": 2**40}
    for function, tensors in ((vp.vocab_parallel_cross_entropy, (values,)), (vp.linear_cross_entropy, given)):
        assert function(*tensors, labels, **options).isfinite()
        labels[1, 2] = 99
        with pytest.raises(ValueError, match=r"1 outside, the first at position \(1, 2\): 99$"):
            function(*tensors, labels, **options)
        labels[1, 2] = 0
    with vp.verify_calls():
        vp.vocab_parallel_cross_entropy(values, labels, **options)
        vp.linear_cross_entropy(*given, labels, **options)
        labels[0, 1] = 99
        with pytest.raises(ValueError, match=r"position \(0, 1\): 99$"):
            vp.vocab_parallel_cross_entropy(values, labels, **options)


@pytest.mark.reference
def test_what_has_no_next_token_is_refused():
    weight = torch.randn(9, 4)
    for shape, error, message in (
        ((3, 1), ValueError, "^shift: expected labels whose last dimension has at least 2 tokens"),
        ((3, 0), ValueError, "^shift: expected labels whose last dimension has at least 2 tokens"),
        ((6,), ValueError, r"^shift: expected labels of at least two dimensions.*\(6,\).*\[1, T\]$"),
        ((2, 3), TypeError, "^labels: dtype must be"),
    ):
        hidden = torch.randn(*shape, 4)
        labels = torch.zeros(shape, dtype=torch.int16 if error is TypeError else torch.int64)
        for call in (
            lambda h=hidden, y=labels: vp.vocab_parallel_cross_entropy(h @ weight.t(), y, shift=True),
            lambda h=hidden, y=labels: vp.linear_cross_entropy(h, weight, y, shift=True),
        ):
            with pytest.raises(error, match=message):
                call()
    with pytest.raises(ValueError, match=r"got shape \(\)"):
        vp.vocab_parallel_cross_entropy(torch.randn(2, 3), torch.tensor(1), shift=True)
    with vp.verify_calls(), pytest.raises(ValueError, match="^shift: expected labels of at least two dimensions"):
        vp.vocab_parallel_cross_entropy(torch.randn(6, 9), torch.zeros(6).long(), shift=True)
    with pytest.raises(TypeError, match="shift: expected one of logits, labels, num_items"):
        dtensor.cross_entropy(torch.randn(2, 3), torch.zeros(2).long(), shift=True)
