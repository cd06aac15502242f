"""Accelerate and Lightning around a model that ends in a loss, or whose logits it gets: as PyTorch's loss trains.

In them, in transformers and in Megatron-Core nobody else holds the logits in backward: their gradient is over them.
"""

import pytest
import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from tests.support.frameworks import training
from tests.support.frameworks.training import RATE, Model, Step, gradients_of, weights_of
from vocab_parallel_ce import next_labels, vocab_parallel_cross_entropy

STEPS, MICRO = 2, 2
GIVEN = training.batches(STEPS * MICRO)
overwritten = []  # of each backward: whether the gradient was written over the logits


def watched(logits, labels, *args, **keywords):
    """Return the loss over logits, and note where its backward writes their gradient."""
    address = logits.data_ptr()
    if logits.requires_grad:
        logits.register_hook(lambda grad: overwritten.append(grad.data_ptr() == address))
    return vocab_parallel_cross_entropy(logits, labels, *args, **keywords)


@pytest.fixture(autouse=True)
def _nothing_overwritten_yet():
    overwritten.clear()


def loader():
    return DataLoader(TensorDataset(*(torch.cat(each) for each in zip(*GIVEN, strict=True))), training.ROWS)


class Logits(Model):
    """Returns its logits, which Accelerate turns into fp32."""

    def __init__(self):
        super().__init__("torch")

    def forward(self, tokens):
        return self.head(self.hidden(tokens))


OVER_RETURNED = dict.fromkeys(("returned", "returned and kept"), watched) | {"torch, returned": cross_entropy}


def made(name):
    """A model that ends in a loss, or one that returns its logits, and a call that returns the loss and the logits."""
    over, model = OVER_RETURNED.get(name), Model(name) if name not in OVER_RETURNED else Logits()

    def loss_of(model, tokens, labels):
        if over is None:
            return model(tokens, labels), None
        logits = model(tokens)
        return over(logits, labels), logits if name == "returned and kept" else None

    return model, loss_of


def accelerated(name, precision, folder):
    """As Accelerate's documentation does it."""
    accelerate = pytest.importorskip("accelerate")
    accelerate.state.AcceleratorState._reset_state(True)  # it keeps the settings of the first Accelerator of a process
    arguments = {
        "mixed_precision": "no" if precision == torch.float32 else "bf16",
        "gradient_accumulation_steps": MICRO,
    }
    accelerator, (model, loss_of) = accelerate.Accelerator(cpu=True, **arguments), made(name)
    wrapped, optimizer, batches = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=RATE), loader())
    steps, losses = [], []
    for tokens, labels in batches:
        with accelerator.accumulate(wrapped):
            loss, _ = loss_of(wrapped, tokens, labels)
            assert loss.dtype == torch.float32
            losses.append(loss.detach())
            accelerator.backward(loss)
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
            self.model, self.loss_of = made(name)

        def training_step(self, batch, index):
            loss, logits = self.loss_of(self.model, *batch)
            losses.append(loss.detach())
            return loss if logits is None else {"loss": loss, "logits": logits}

        def validation_step(self, batch, index):
            assert torch.is_inference_mode_enabled()
            validated.append(self.loss_of(self.model, *batch)[0])

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
TRAINED += [(fitted, name) for name in ("logits", "linear", "returned", "returned and kept")]


@pytest.mark.reference
@pytest.mark.filterwarnings("ignore:.*does not have many workers")
@pytest.mark.parametrize("precision", (torch.float32, torch.bfloat16), ids=str)
@pytest.mark.parametrize(("trained", "name"), TRAINED)
def test_a_model_trains_and_validates(trained, name, precision, tmp_path):
    actual, validated = trained(name, precision, tmp_path)
    assert overwritten == ([name == "returned"] * STEPS * MICRO if "returned" in name else [])
    peer, peer_validated = trained("torch, returned" if "returned" in name else "torch", precision, tmp_path)
    truth = training.fp64_steps([GIVEN[first : first + MICRO] for first in range(0, len(GIVEN), MICRO)])
    assert len(actual) == STEPS
    training.assert_same_steps(actual, truth, peer, precision)
    if validated is not None:
        model = Model("torch").double()
        model.load_state_dict(truth[-1].weights)
        losses = [model(*batch).detach() for batch in training.double(GIVEN)]
        true = Step(torch.stack(losses).mean(), {}, {})
        training.assert_same_steps([validated], [true], [peer_validated], precision)


def tiny():
    transformers = pytest.importorskip("transformers")
    from vocab_parallel_ce.integrations.transformers.tiny import tiny_inputs, tiny_model

    model = tiny_model(transformers.LlamaForCausalLM).train()
    return model, tiny_inputs(model)


def of_outputs(outputs, labels, num_items_in_batch=None):
    return watched(outputs.logits, next_labels(labels))


def transformers_outputs(folder, keep=False):
    model, inputs = tiny()
    outputs = model(inputs["input_ids"])
    loss = of_outputs(outputs, inputs["labels"])
    if not keep:
        del outputs
    loss.backward()


def transformers_loss_function(folder):
    model, inputs = tiny()
    model.loss_function = lambda logits, labels, vocab_size, **kwargs: watched(logits, next_labels(labels))
    model(**inputs).loss.backward()


def transformers_trainer(folder, **options):
    from transformers import Trainer, TrainingArguments

    from vocab_parallel_ce.integrations.transformers import install

    model, inputs = tiny()
    install(model)
    rows = [{name: value[i] for name, value in inputs.items()} for i in range(2)]
    quiet = {"report_to": "none", "disable_tqdm": True, "use_cpu": True, "save_strategy": "no", "max_steps": 1}
    arguments = TrainingArguments(str(folder), **quiet, **options)
    Trainer(model, arguments, train_dataset=rows, compute_loss_func=of_outputs).train()


def megatron(folder, keep=False):
    pytest.importorskip("megatron.core")
    from tests.support.frameworks import megatron_stubs as stubs
    from vocab_parallel_ce.integrations import megatron

    kept = []
    with pytest.MonkeyPatch.context() as patch, stubs.megatron_ranks(0, dist.group.WORLD, 1), megatron.installed():
        patch.setattr(megatron.losses, "cross_entropy", watched)
        model = stubs.small_model("gpt", torch.device("cpu"))
        if keep:
            model.output_layer.register_forward_hook(lambda module, args, output: kept.append(output[0]))
        stubs.step(model, stubs.batch(torch.device("cpu")))


PATHS = {
    "transformers, outputs": (transformers_outputs, {}),
    "transformers, outputs, kept": (transformers_outputs, {"keep": True}),
    "transformers, loss_function": (transformers_loss_function, {}),
    "transformers, Trainer": (transformers_trainer, {}),
    "transformers, Trainer in bf16": (transformers_trainer, {"bf16": True}),
    "megatron": (megatron, {}),
    "megatron, kept": (megatron, {"keep": True}),
}


@pytest.fixture
def _one_rank(tmp_path):
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.gloo
@pytest.mark.usefixtures("_one_rank")
@pytest.mark.parametrize("path", PATHS)
def test_the_gradient_is_written_over_logits_that_nobody_else_has(path, tmp_path):
    run, options = PATHS[path]
    run(tmp_path, **options)
    assert overwritten == [not options.get("keep", False)]
