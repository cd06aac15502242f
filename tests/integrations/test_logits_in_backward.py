"""Who still has the logits when backward runs, in each framework: nobody but autograd, or it is known who."""

import sys
import weakref

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from tests.support.frameworks import training
from vocab_parallel_ce import next_labels, vocab_parallel_cross_entropy

transformers = pytest.importorskip("transformers")

from vocab_parallel_ce.integrations.transformers import install  # noqa: E402
from vocab_parallel_ce.integrations.transformers.tiny import tiny_inputs, tiny_model  # noqa: E402

pytestmark = pytest.mark.gloo
seen = []


def counts(tensor):
    """Count the references to a tensor, its implementation and its storage, with those that this call makes."""
    storage = torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)
    return sys.getrefcount(tensor), tensor._use_count(), storage


def watched(logits, labels, *args, **keywords):
    """Return the loss, and note the counts of the logits when its backward begins."""
    loss = vocab_parallel_cross_entropy(logits, labels, *args, **keywords)
    reference = weakref.ref(logits)
    loss.register_hook(lambda grad: seen.append(counts(reference())))
    return loss


def tiny():
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


def transformers_trainer(folder, fuse=False, **options):
    model, inputs = tiny()
    if fuse:
        install(model)
    rows = [{name: value[i] for name, value in inputs.items()} for i in range(2)]
    quiet = {"report_to": "none", "disable_tqdm": True, "use_cpu": True, "save_strategy": "no", "max_steps": 1}
    arguments = transformers.TrainingArguments(str(folder), **quiet, **options)
    transformers.Trainer(model, arguments, train_dataset=rows, compute_loss_func=of_outputs).train()


class WithLogits(training.Model):
    def __init__(self):
        super().__init__("torch")

    def forward(self, tokens):
        return self.head(self.hidden(tokens))


def accelerate(folder, precision):
    accelerate = pytest.importorskip("accelerate")
    accelerate.state.AcceleratorState._reset_state(True)
    accelerator = accelerate.Accelerator(cpu=True, mixed_precision=precision)
    ((tokens, labels),) = training.batches(1)
    accelerator.backward(watched(accelerator.prepare(WithLogits())(tokens), labels))


def lightning(folder, keep=False, precision="32-true"):
    lightning = pytest.importorskip("lightning")

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = WithLogits()

        def training_step(self, batch, index):
            logits = self.model(batch[0])
            loss = watched(logits, batch[1])
            return {"loss": loss, "logits": logits} if keep else loss

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = lightning.Trainer(accelerator="cpu", max_steps=1, precision=precision, **quiet)
    trainer.fit(Module(), DataLoader(TensorDataset(*training.batches(1)[0]), training.ROWS))


def data_parallel(folder, **options):
    ((tokens, labels),) = training.batches(1)
    model = DistributedDataParallel(WithLogits(), **options)
    watched(model(tokens), labels).backward()


def fully_sharded(folder):
    from torch.distributed.fsdp import fully_shard

    ((tokens, labels),) = training.batches(1)
    model = fully_shard(WithLogits(), mesh=dist.init_device_mesh("cpu", (1,)))
    watched(model(tokens), labels).backward()


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


ALONE = {
    "transformers, outputs": transformers_outputs,
    "transformers, loss_function": transformers_loss_function,
    "transformers, Trainer": transformers_trainer,
    "transformers, Trainer after install()": lambda folder: transformers_trainer(folder, fuse=True),
    "transformers, Trainer in bf16": lambda folder: transformers_trainer(folder, bf16=True),
    "accelerate": lambda folder: accelerate(folder, "no"),
    "accelerate in bf16": lambda folder: accelerate(folder, "bf16"),
    "lightning": lightning,
    "lightning in bf16": lambda folder: lightning(folder, precision="bf16-mixed"),
    "DistributedDataParallel": data_parallel,
    "DistributedDataParallel, unused parameters": lambda folder: data_parallel(folder, find_unused_parameters=True),
    "fully_shard": fully_sharded,
    "megatron": megatron,
}
KEPT = {
    "transformers, outputs": lambda folder: transformers_outputs(folder, keep=True),
    "lightning": lambda folder: lightning(folder, keep=True),
    "megatron": lambda folder: megatron(folder, keep=True),
}


@pytest.fixture
def _one_rank(tmp_path):
    seen.clear()
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def counts_alone():
    """The counts of logits that nobody else has."""
    weight = torch.ones(4, 7, requires_grad=True)
    watched(weight * 1.0, torch.zeros(4, dtype=torch.int64)).backward()
    return seen.pop()


@pytest.mark.usefixtures("_one_rank")
@pytest.mark.parametrize("path", ALONE)
def test_nobody_but_autograd_has_the_logits(path, tmp_path):
    ALONE[path](tmp_path)
    assert seen and {*seen} == {counts_alone()}


@pytest.mark.usefixtures("_one_rank")
@pytest.mark.parametrize("path", KEPT)
def test_a_logit_that_is_kept_is_counted(path, tmp_path):
    KEPT[path](tmp_path)
    found, alone = seen.pop(), counts_alone()
    assert found > alone and not seen
