"""fp64 logits: plain PyTorch, fp64 from the statistics to the gradient. Random calls have every loss in fp64."""

import pytest
import torch
from torch import Tensor

import vocab_parallel_ce as vp
from tests.support.cases.inputs import batch
from tests.support.cases.logits import METRICS, flat_outputs
from tests.support.truth import oracle
from tests.support.truth.budget import assert_fp64_equal

MADE = batch("some_ignored", rows=5, vocab_size=22)
LOGITS, LABELS = MADE.logits.double() * 1.1, MADE.labels  # not what fp32 can hold


def test_transformer_engines_pair_of_steps(impl_device):
    _, device = impl_device
    factor = torch.tensor(1 / 7, dtype=torch.float64)
    loss, grad = vp.cross_entropy_forward(LOGITS.to(device, copy=True), LABELS.to(device), 0.0, True, None, -100)
    grad = vp.cross_entropy_backward(grad, factor.to(device))
    truth = oracle.cross_entropy_fp64(LOGITS, LABELS, grad_output=factor, reduction="mean")
    assert_fp64_equal(loss.cpu(), truth.loss, 200.0)
    assert_fp64_equal(grad.cpu(), truth.grad, 20.0)


@pytest.mark.reference
def test_a_compiled_call_has_the_same_bits():
    def step(x: Tensor) -> tuple[Tensor, ...]:
        return flat_outputs(vp.vocab_parallel_cross_entropy(x * 1, LABELS, outputs=("lse", *METRICS), z_loss=0.1))

    results = []
    for call in (step, torch.compile(step, fullgraph=True, backend="aot_eager")):
        leaf = LOGITS.clone().requires_grad_()
        outputs = call(leaf)
        outputs[0].backward()
        results.append([*(output.detach() for output in outputs), leaf.grad])
    for eager, compiled in zip(*results, strict=True):
        assert eager.dtype == compiled.dtype and torch.equal(eager, compiled)
