"""Small models of transformers, cut or whole: their steps of training, and how large the tensors of a step are."""

import os
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
import transformers
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import Gemma2Config, Gemma2ForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.distributed import DistributedConfig

from vocab_parallel_ce.integrations.lazy_logits import LazyLogits
from vocab_parallel_ce.integrations.transformers import shard_lm_head

UP_TO_5_17 = transformers.__version__.startswith(("5.16.", "5.17."))
VOCABULARY = 2000 if UP_TO_5_17 else 1999  # transformers 5.17 and before cut only heads that divide
WIDTH, TOKENS = 16, (2, 32)  # the logits are the largest tensor of a step by far
LOGITS = VOCABULARY * TOKENS[0] * TOKENS[1]
HALF = (VOCABULARY + 1) // 2
PADDING = 5
STEPS, RATE = 5, 0.1
DDP = {
    "ddp": {},
    "ddp, static": {"static_graph": True},
    "ddp, unused": {"find_unused_parameters": True},
    "ddp, views": {"gradient_as_bucket_view": True},
}
MODELS = {"llama": (LlamaForCausalLM, LlamaConfig), "gemma2": (Gemma2ForCausalLM, Gemma2Config)}


def small_model(name, tied=False, **options) -> Any:
    cls, config_cls = MODELS[name]
    torch.manual_seed(0)
    if name == "gemma2":
        options["final_logit_softcapping"] = 3.0  # far below the logits
    config = config_cls(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        initializer_range=0.3,
        tie_word_embeddings=tied,
        attn_implementation="eager",
        use_cache=False,
        **options,
    )
    return cls(config)


def tokens(device):
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, VOCABULARY, TOKENS, generator=generator)
    ids[0, :2] = torch.tensor([PADDING, HALF + PADDING])  # the same row of both ranks' halves
    labels = ids.clone()
    labels[0, :5] = -100
    return {"input_ids": ids.to(device), "labels": labels.to(device)}


class Outer(nn.Module):
    """A module of the user's own that FSDP wraps, such as PEFT's."""

    def __init__(self, model):
        super().__init__()
        self.module = model

    def forward(self, **inputs):
        return self.module(**inputs)


def wrap(model, how, device, mp_policy=None):
    """Share a model among the ranks of the world."""
    if how in DDP:
        return DistributedDataParallel(model, **DDP[how])
    options = {"mesh": init_device_mesh(device.type, (2,)), "mp_policy": mp_policy or MixedPrecisionPolicy()}
    if "reshard" in how:
        options["reshard_after_forward"] = True
    for layer in model.model.layers:
        fully_shard(layer, **options)
    if how.startswith("own"):
        fully_shard(model.lm_head, **options)
    if how == "list":
        fully_shard([model.model.norm, model.lm_head], **options)
    return fully_shard(Outer(model) if how == "outer" else model, **options)


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


class Largest(TorchDispatchMode):
    """Notes how many elements the largest tensor has that an operation makes in this rank."""

    numel = 0

    @classmethod
    def _should_skip_dynamo(cls):
        return False  # True would import torch._dynamo, which takes seconds

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            if isinstance(tensor, torch.Tensor) and not isinstance(tensor, LazyLogits) and tensor.device.type != "meta":
                local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
                self.numel = max(self.numel, local.numel())
        return made


class Training(NamedTuple):
    """What some steps of training gave."""

    losses: list
    gradients: dict  # of the first step
    largest: int  # elements of the largest tensor of the first step


def gradients_of(model):
    return {name.removeprefix("module."): whole(p.grad).clone() for name, p in model.named_parameters()}


def train(model, inputs):
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9, foreach=False)
    losses, gradients, largest = [], {}, Largest()
    for step in range(STEPS):
        with largest:
            loss = model(**inputs).loss
            loss.backward()
        if step == 0:
            gradients, numel = gradients_of(model), largest.numel
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return Training(losses, gradients, numel)


def assert_same(found, expected, what=""):
    error = (found.double() - expected.double()).abs().max().item()
    assert error <= 1e-5 * expected.abs().max().item(), (what, error)


def assert_same_training(found, expected):
    assert found.losses == pytest.approx(expected.losses, rel=1e-5)
    assert_same_gradients(found.gradients, expected.gradients)


def assert_same_gradients(found, expected):
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert_same(found[name], gradient, name)


def cut_model(rank, device, model, path):
    """Cut a model by transformers' plan of it, read from a path, or only its head."""
    if path is None:
        return shard_lm_head(model, init_device_mesh(device.type, (2,)))
    os.environ["LOCAL_RANK"] = str(rank)
    with patch("torch._C._get_accelerator", lambda: torch.device(device.type)):
        config = DistributedConfig(tp_size=2, tp_plan="auto")
        return type(model).from_pretrained(path, distributed_config=config)


def halves(device):
    """Two steps' tokens of each of two ranks."""
    inputs = tokens(device)
    return [[{k: v[i : i + 1, 16 * j : 16 * j + 16] for k, v in inputs.items()} for j in range(2)] for i in range(2)]


def accumulate(model, batches, scale=1.0):
    losses = []
    for batch in batches:
        loss = model(**batch).loss
        (loss * scale).backward()
        losses.append(loss.item())
    return losses
