"""Accelerate and Lightning around a model that ends in a loss, or whose logits it gets: as PyTorch's loss trains."""

import pytest
import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from tests.support.frameworks import training
from tests.support.frameworks.training import RATE, Model, Step, gradients_of, weights_of
from vocab_parallel_ce import vocab_parallel_cross_entropy

pytestmark = pytest.mark.reference

STEPS, MICRO = 2, 2
GIVEN = training.batches(STEPS * MICRO)


def loader():
    return DataLoader(TensorDataset(*(torch.cat(each) for each in zip(*GIVEN, strict=True))), training.ROWS)


class Logits(Model):
    """Returns its logits, which Accelerate turns into fp32."""

    def __init__(self):
        super().__init__("torch")

    def forward(self, tokens):
        return self.head(self.hidden(tokens))


OVER_RETURNED = {"returned": vocab_parallel_cross_entropy, "torch, returned": cross_entropy}


def accelerated(name, precision, folder):
    """As Accelerate's documentation does it; of a model that returns logits, a loss over them."""
    accelerate = pytest.importorskip("accelerate")
    accelerate.state.AcceleratorState._reset_state(True)  # it keeps the settings of the first Accelerator of a process
    arguments = {
        "mixed_precision": "no" if precision == torch.float32 else "bf16",
        "gradient_accumulation_steps": MICRO,
    }
    accelerator, over = accelerate.Accelerator(cpu=True, **arguments), OVER_RETURNED.get(name)
    model = Model(name) if over is None else Logits()
    wrapped, optimizer, batches = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=RATE), loader())
    steps, losses = [], []
    for tokens, labels in batches:
        with accelerator.accumulate(wrapped):
            output = wrapped(tokens, labels) if over is None else wrapped(tokens)
            assert output.dtype == torch.float32
            losses.append(output if over is None else over(output, labels))
            accelerator.backward(losses[-1])
            gradients = gradients_of(model)
            optimizer.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            steps.append(Step(torch.stack(losses).mean().detach(), gradients, weights_of(model)))
            losses = []
    return steps, None


def fitted(name, precision, folder):
    lightning = pytest.importorskip("lightning")
    steps, losses, validated = [], [], []

    class Module(lightning.LightningModule):
        """Notes each optimizer step, and the losses of validation."""

        def __init__(self):
            super().__init__()
            self.model = Model(name)

        def training_step(self, batch, index):
            loss = self.model(*batch)
            losses.append(loss.detach())
            return loss

        def validation_step(self, batch, index):
            assert torch.is_inference_mode_enabled()
            validated.append(self.model(*batch))

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=RATE)

        def on_before_optimizer_step(self, optimizer):
            steps.append(Step(torch.stack(losses).mean(), gradients_of(self.model), {}))
            losses.clear()

        def on_train_batch_end(self, outputs, batch, index):
            if not losses:
                steps[-1] = steps[-1]._replace(weights=weights_of(self.model))

    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "num_sanity_val_steps": 0}
    quiet |= {"enable_model_summary": False, "default_root_dir": folder, "accelerator": "cpu"}
    arguments = {
        "precision": "32-true" if precision == torch.float32 else "bf16-mixed",
        "accumulate_grad_batches": MICRO,
    }
    module, trainer = Module(), lightning.Trainer(max_epochs=1, **arguments, **quiet)
    trainer.fit(module, loader())
    trainer.validate(module, loader(), verbose=False)
    return steps, Step(torch.stack(validated).mean(), {}, {})


TRAINED = [(accelerated, "logits"), (accelerated, "linear"), (accelerated, "returned")]
TRAINED += [(fitted, "logits"), (fitted, "linear")]


@pytest.mark.filterwarnings("ignore:.*does not have many workers")
@pytest.mark.parametrize("precision", (torch.float32, torch.bfloat16), ids=str)
@pytest.mark.parametrize(("trained", "name"), TRAINED)
def test_a_model_trains_and_validates(trained, name, precision, tmp_path):
    actual, validated = trained(name, precision, tmp_path)
    peer, peer_validated = trained("torch, returned" if name == "returned" else "torch", precision, tmp_path)
    truth = training.fp64_steps([GIVEN[first : first + MICRO] for first in range(0, len(GIVEN), MICRO)])
    assert len(actual) == STEPS
    training.assert_same_steps(actual, truth, peer, precision)
    if validated is not None:
        model = Model("torch").double()
        model.load_state_dict(truth[-1].weights)
        losses = [model(*batch).detach() for batch in training.double(GIVEN)]
        true = Step(torch.stack(losses).mean(), {}, {})
        training.assert_same_steps([validated], [true], [peer_validated], precision)
