"""A LightningModule whose steps end in a loss trains and validates as with PyTorch's own loss."""

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from tests.support.frameworks.training import (
    RATE,
    ROWS,
    Model,
    Step,
    assert_same_steps,
    batches,
    double,
    fp64_steps,
    gradients_of,
    weights_of,
)

lightning = pytest.importorskip("lightning")

pytestmark = pytest.mark.reference

STEPS, MICRO = 2, 2


class Module(lightning.LightningModule):
    """Notes each optimizer step, and the losses of validation."""

    def __init__(self, model):
        super().__init__()
        self.model, self.losses, self.steps, self.validated = model, [], [], []

    def training_step(self, batch, index):
        loss = self.model(*batch)
        self.losses.append(loss.detach())
        return loss

    def validation_step(self, batch, index):
        assert torch.is_inference_mode_enabled()
        self.validated.append(self.model(*batch))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=RATE)

    def on_before_optimizer_step(self, optimizer):
        self.steps.append(Step(torch.stack(self.losses).mean(), gradients_of(self.model), {}))
        self.losses.clear()

    def on_train_batch_end(self, outputs, batch, index):
        if not self.losses:
            self.steps[-1] = self.steps[-1]._replace(weights=weights_of(self.model))


def fitted(loss, precision, folder):
    module, given = Module(Model(loss)), batches(STEPS * MICRO)
    loader = DataLoader(TensorDataset(*(torch.cat(each) for each in zip(*given, strict=True))), ROWS)
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = lightning.Trainer(
        accelerator="cpu",
        precision=precision,
        max_epochs=1,
        accumulate_grad_batches=MICRO,
        num_sanity_val_steps=0,
        enable_model_summary=False,
        default_root_dir=folder,
        **quiet,
    )
    trainer.fit(module, loader)
    trainer.validate(module, loader, verbose=False)
    return module


@pytest.mark.filterwarnings("ignore:.*does not have many workers")
@pytest.mark.parametrize("precision", ("32-true", "bf16-mixed"))
@pytest.mark.parametrize("loss", ("logits", "linear"))
def test_a_module_trains_and_validates(loss, precision, tmp_path):
    found, peer = (fitted(each, precision, tmp_path) for each in (loss, "torch"))
    given = batches(STEPS * MICRO)
    truth = fp64_steps([given[first : first + MICRO] for first in range(0, len(given), MICRO)])
    assert len(found.steps) == STEPS
    dtype = torch.float32 if precision == "32-true" else torch.bfloat16
    assert_same_steps(found.steps, truth, peer.steps, dtype)
    trained = Model("torch").double()
    trained.load_state_dict(truth[-1].weights)
    validated = Step(torch.stack([trained(*batch).detach() for batch in double(given)]).mean(), {}, {})
    each = [Step(torch.stack(module.validated).mean(), {}, {}) for module in (found, peer)]
    assert_same_steps([each[0]], [validated], [each[1]], dtype)
