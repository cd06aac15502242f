"""``shift=True``: token t predicts the label at t + 1, in the losses over logits and over hidden states."""

import pytest
import torch

import vocab_parallel_ce as vp
from tests.support import linear, logits
from tests.support.inputs import DTYPES, IGNORE_INDEX
from tests.support.linear import record_matmuls
from tests.support.pairs import covering
from vocab_parallel_ce.integrations import dtensor

SHAPES = {(1, 6): (1, 5), (2, 3): (2, 2), (1, 3, 2): (1, 3, 1)}  # of labels, and of unreduced losses
DIVISORS = {"mean": {}, "none": {"reduction": "none"}, "items": {"reduction": "sum", "num_items": 3}}
PAIRS = covering(
    head=(False, True),
    shape=tuple(SHAPES),
    divisor=tuple(DIVISORS),
    dtype=DTYPES,
    return_metrics=(False, True),
    gradient=("auto", "in_backward"),
    int32=(False, True),
    z_loss=(0.0, 0.02),
)


def grad_output_of(divisor, shape):
    return torch.arange(1.0, 1 + shape.numel()).view(shape) if divisor == "none" else torch.tensor(0.75)


@pytest.mark.quick(2)
@pytest.mark.interpreted(4)
@pytest.mark.parametrize("case", PAIRS, ids=map(str, range(len(PAIRS))))
def test_results_are_those_of_labels_one_ahead(impl_device, case):
    shape, dtype = case["shape"], case["dtype"]
    options = {name: case[name] for name in ("return_metrics", "gradient", "z_loss")} | DIVISORS[case["divisor"]]
    grad_output = grad_output_of(case["divisor"], torch.Size(SHAPES[shape]))
    inputs = linear.projection("some_ignored", 6, dtype=dtype, exact=True)
    kept = (..., slice(0, -1), slice(None))
    if case["head"]:
        given = inputs.shaped(*shape)
        options |= {"chunk_tokens": 4, "valid_tokens": int((given.labels[..., 1:] != IGNORE_INDEX).sum())}
        labels = given.labels.int() if case["int32"] else given.labels
        found = linear.run(impl_device, given._replace(labels=labels), grad_output, shift=True, **options)
        assert not found.hidden[..., -1, :].any()
        ahead = given._replace(hidden=given.hidden[kept], labels=given.labels[..., 1:])
        linear.assert_right(found._replace(hidden=found.hidden[kept]), ahead, grad_output, **options)
    else:
        given, labels = inputs.logits().view(*shape, -1), inputs.labels.view(shape)
        labels = labels.int() if case["int32"] else labels
        found = logits.run(impl_device, given, labels, grad_output, shift=True, **options)
        assert not found.grad[..., -1, :].any()
        results = found._replace(grad=found.grad[kept])
        logits.assert_right(results, given[kept], labels[..., 1:], grad_output, **options)
    per_token = found.outputs[1::2] if case["return_metrics"] else found.outputs[:0]  # predictions, lse
    for output in (*found.outputs[: case["divisor"] == "none"], *per_token):
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
    vp.verify_group(values, labels, None, shift=True)
    vp.verify_group(inputs.hidden, labels, None, weight=inputs.weight, shift=True)
    labels[0, 1] = 99
    with pytest.raises(ValueError, match=r"position \(0, 1\): 99$"):
        vp.verify_group(values, labels, None, shift=True)


@pytest.mark.reference
def test_what_has_no_next_token_is_refused():
    weight = torch.randn(9, 4)
    for shape in ((3, 1), (3, 0)):
        hidden, labels = torch.randn(*shape, 4), torch.zeros(shape, dtype=torch.int64)
        for call in (
            lambda h=hidden, y=labels: vp.vocab_parallel_cross_entropy(h @ weight.t(), y, shift=True),
            lambda h=hidden, y=labels: vp.linear_cross_entropy(h, weight, y, shift=True),
        ):
            with pytest.raises(ValueError, match=r"^shift: expected labels whose last dimension has at least 2 tokens"):
                call()
    with pytest.raises(ValueError, match=r"got shape \(\)"):
        vp.vocab_parallel_cross_entropy(torch.randn(2, 3), torch.tensor(1), shift=True)
    flat, hidden = torch.zeros(6).long(), torch.randn(6, 4)
    for call in (
        lambda: vp.vocab_parallel_cross_entropy(hidden @ weight.t(), flat, shift=True),
        lambda: vp.linear_cross_entropy(hidden, weight, flat, shift=True),
        lambda: vp.verify_group(hidden @ weight.t(), flat, None, shift=True),
    ):
        with pytest.raises(ValueError, match=r"^shift: expected labels of at least two dimensions.*\(6,\).*\[1, T\]$"):
            call()
    with pytest.raises(TypeError, match="shift: expected one of logits, labels, num_items"):
        dtensor.cross_entropy(torch.randn(2, 3), torch.zeros(2).long(), shift=True)
    with pytest.raises(TypeError, match="labels: dtype must be"):
        vp.vocab_parallel_cross_entropy(torch.randn(1, 2, 3), torch.zeros(1, 2), shift=True)
