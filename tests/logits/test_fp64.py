"""fp64 logits: plain PyTorch, fp64 from the statistics to the gradient. Random calls have them on ranks."""

import pytest
import torch
from torch import Tensor

from tests.support import oracle
from tests.support.budget import assert_fp64_equal
from tests.support.inputs import batch
from tests.support.logits import flat_outputs
from vocab_parallel_ce import (
    cross_entropy_backward,
    cross_entropy_forward,
    vocab_parallel_cross_entropy,
)

COLUMNS, ROWS = 22, 5
MADE = batch("some_ignored", rows=ROWS, vocab_size=COLUMNS)
LOGITS, LABELS = MADE.logits.double() * 1.1, MADE.labels  # not what fp32 can hold
DIVISORS = {"mean": {"reduction": "mean"}, "sum": {"num_items": 1 / 3}, "none": {"reduction": "none"}}


def assert_exact(loss: Tensor, grad: Tensor, grad_output: Tensor, options: dict) -> None:
    given = {name: value for name, value in options.items() if name not in ("gradient", "impl")}
    if "num_items" in given:
        given["reduction"] = "sum"
    truth = oracle.cross_entropy_fp64(LOGITS, LABELS, grad_output=grad_output, **given)
    assert_fp64_equal(loss, truth.loss, 200.0)
    assert_fp64_equal(grad, truth.grad, 20.0)


def test_transformer_engines_pair_of_steps(impl_device):
    _, device = impl_device
    factor = torch.tensor(1 / 7, dtype=torch.float64)
    loss, grad = cross_entropy_forward(LOGITS.to(device, copy=True), LABELS.to(device), 0.0, True, None, -100)
    grad = cross_entropy_backward(grad, factor.to(device))
    assert_exact(loss.cpu(), grad.cpu(), factor, {"reduction": "mean"})


@pytest.mark.reference
def test_kernels_are_refused():
    for impl in ("triton", "one_pass"):
        with pytest.raises(ValueError, match=f"impl, of fp64 logits.*'auto', 'reference', got '{impl}'"):
            vocab_parallel_cross_entropy(LOGITS, LABELS, impl=impl)


@pytest.mark.reference
def test_a_compiled_call_has_the_same_bits():
    def step(x: Tensor) -> tuple[Tensor, ...]:
        return flat_outputs(vocab_parallel_cross_entropy(x * 1, LABELS, return_metrics=True, z_loss=0.1))

    results = []
    for call in (step, torch.compile(step, fullgraph=True, backend="aot_eager")):
        leaf = LOGITS.clone().requires_grad_()
        outputs = call(leaf)
        outputs[0].backward()
        results.append([*(output.detach() for output in outputs), leaf.grad])
    for eager, compiled in zip(*results, strict=True):
        assert eager.dtype == compiled.dtype and torch.equal(eager, compiled)
