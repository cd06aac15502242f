"""Accelerate around a model that ends in a loss, or whose logits the loss gets: as PyTorch's own loss trains."""

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from tests.support.frameworks import training
from vocab_parallel_ce import vocab_parallel_cross_entropy

accelerate = pytest.importorskip("accelerate")

pytestmark = pytest.mark.reference

STEPS, MICRO = 2, 2


@pytest.fixture(autouse=True)
def _own_state():
    """Accelerate keeps the settings of the first Accelerator of a process."""
    accelerate.state.AcceleratorState._reset_state(True)
    yield
    accelerate.state.AcceleratorState._reset_state(True)


class Logits(training.Model):
    """Returns its logits: Accelerate turns them into fp32."""

    def __init__(self):
        super().__init__("torch")

    def forward(self, tokens):
        return self.head(self.hidden(tokens))


def trained(model, mixed_precision, loss=None):
    """Train as Accelerate's documentation does; ``loss`` takes the logits of a model that returns them."""
    given = training.batches(STEPS * MICRO)
    data = TensorDataset(*(torch.cat(each) for each in zip(*given, strict=True)))
    accelerator = accelerate.Accelerator(cpu=True, mixed_precision=mixed_precision, gradient_accumulation_steps=MICRO)
    wrapped, optimizer, loader = accelerator.prepare(
        model, torch.optim.SGD(model.parameters(), lr=training.RATE), DataLoader(data, training.ROWS)
    )
    steps, losses = [], []
    for tokens, labels in loader:
        with accelerator.accumulate(wrapped):
            output = wrapped(tokens, labels) if loss is None else wrapped(tokens)
            assert output.dtype == torch.float32
            losses.append(output if loss is None else loss(output, labels))
            accelerator.backward(losses[-1])
            gradients = training.gradients_of(model)
            optimizer.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            steps.append(training.Step(torch.stack(losses).mean().detach(), gradients, training.weights_of(model)))
            losses = []
    return steps


def check(found, peer, mixed_precision):
    given = training.batches(STEPS * MICRO)
    truth = training.fp64_steps([given[first : first + MICRO] for first in range(0, len(given), MICRO)])
    training.assert_same_steps(found, truth, peer, torch.bfloat16 if mixed_precision == "bf16" else torch.float32)


@pytest.mark.parametrize("mixed_precision", ("no", "bf16"))
@pytest.mark.parametrize("loss", ("logits", "linear"))
def test_a_model_that_ends_in_the_loss(loss, mixed_precision):
    found = trained(training.Model(loss), mixed_precision)
    check(found, trained(training.Model("torch"), mixed_precision), mixed_precision)


@pytest.mark.parametrize("mixed_precision", ("no", "bf16"))
def test_a_loss_over_the_logits_that_a_model_returns(mixed_precision):
    found = trained(Logits(), mixed_precision, vocab_parallel_cross_entropy)
    check(found, trained(Logits(), mixed_precision, torch.nn.functional.cross_entropy), mixed_precision)
