"""Models of transformers that several ranks share: cut by tensor parallelism, or wrapped by FSDP or DDP."""

import copy
import os
import re
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import Gemma2Config, Gemma2ForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.distributed import DistributedConfig

from tests.support.collectives import assert_refused, error_of, messages_of
from tests.support.ranks import device_of, in_ranks
from vocab_parallel_ce.integrations.transformers import install, shard_lm_head, uninstall
from vocab_parallel_ce.integrations.transformers.audit import audit
from vocab_parallel_ce.integrations.transformers.heads import refusal

in_two_ranks = in_ranks((2,), (), (2,))
VOCABULARY, WIDTH, TOKENS = 1999, 16, (2, 32)  # the logits are the largest tensor of a step by far
LOGITS = VOCABULARY * TOKENS[0] * TOKENS[1]
HALF = (VOCABULARY + 1) // 2
PADDING = 5
STEPS, RATE = 10, 0.1
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


def tokens(device, part=slice(None)):
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, VOCABULARY, TOKENS, generator=generator)
    ids[0, :2] = torch.tensor([PADDING, HALF + PADDING])  # the same row of both ranks' halves
    labels = ids.clone()
    labels[0, :5] = -100
    return {"input_ids": ids[part].to(device), "labels": labels[part].to(device)}


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
            if isinstance(tensor, torch.Tensor) and tensor.device.type != "meta":
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


def train(model, inputs, steps=STEPS):
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9, foreach=False)
    losses, gradients, largest = [], {}, Largest()
    for step in range(steps):
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


def _tensor_parallel(rank, group, impl, path, name, options, fused):
    device = device_of(rank, group)
    model = small_model(name, **options).to(device)
    inputs = tokens(device)
    reference = copy.deepcopy(model)
    with torch.no_grad():
        logits = reference(**inputs).logits
    expected = train(reference, inputs)
    model = cut_model(rank, device, model, path)
    head = model.lm_head
    assert head.weight.placements == (Shard(0),)
    assert (model.get_input_embeddings().weight is head.weight) == options["tied"]
    if fused is None:
        return expected, train(model, inputs, 1), None
    install(model, impl=impl, **fused)
    outputs = model(**inputs)
    assert_same(outputs.logits.detach(), logits)
    found = train(model, inputs)
    with torch.no_grad():
        looked_at = model(**inputs).logits.detach()
        counts = audit(model)
        uninstall(model)
        assert torch.equal(looked_at, model(**inputs).logits)
    return expected, found, counts


CASES = [
    ("plan", "llama", False, {}),
    ("plan", "llama", True, {"chunk_tokens": 16}),
    ("plan", "gemma2", True, {}),
    ("head", "llama", False, {"chunk_tokens": 16}),
    ("head", "llama", True, {}),
    ("head", "gemma2", False, {}),
]


@pytest.mark.parametrize(("how", "name", "tied", "fused"), CASES)
@in_two_ranks
def test_a_cut_head_trains_as_a_whole_one_without_its_logits(rank_pool, impl, tmp_path, how, name, tied, fused):
    options = {"tied": tied, "pad_token_id": PADDING}
    path = None if how == "head" else tmp_path
    if path is not None:
        small_model(name, **options).save_pretrained(path)
    for expected, found, counts in rank_pool.run(_tensor_parallel, impl, path, name, options, fused):
        assert_same_training(found, expected)
        # The first and the last call's logits were looked at.
        assert counts == {"fused": STEPS + 2, "logits made after the call": 2}
        # The embedding's gradient has VOCABULARY * WIDTH elements before it is cut.
        chunk = fused.get("chunk_tokens", TOKENS[0] * TOKENS[1])
        assert found.largest <= max(HALF * chunk, VOCABULARY * WIDTH) < LOGITS


@pytest.mark.parametrize("how", ["plan", "head"])
@in_two_ranks
def test_a_cut_head_gathers_its_logits_otherwise(rank_pool, impl, tmp_path, how):
    """The measure of the largest tensor sees them."""
    options = {"tied": False}
    small_model("llama").save_pretrained(tmp_path)
    path = tmp_path if how == "plan" else None
    for expected, found, _ in rank_pool.run(_tensor_parallel, impl, path, "llama", options, None):
        assert_same_gradients(found.gradients, expected.gradients)
        assert found.largest >= LOGITS


WRAPS = ("root", "reshard", "own", "own, reshard", "list", "ddp", "ddp, unused", "tied", "outer")


class Outer(nn.Module):
    """A module of the user's own that FSDP wraps, such as PEFT's."""

    def __init__(self, model):
        super().__init__()
        self.module = model

    def forward(self, **inputs):
        return self.module(**inputs)


def wrap(model, how, device, mp_policy=None):
    """Share a model among the ranks of the world."""
    if how.startswith("ddp"):
        return DistributedDataParallel(model, find_unused_parameters=how == "ddp, unused")
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


def _data_parallel(rank, group, impl, how, dtype):
    device = device_of(rank, group)
    model = small_model("llama", how == "tied").to(device)
    batches = halves(device)
    reference = copy.deepcopy(model)
    losses = [accumulate(reference, part, 0.5) for part in batches][rank]
    expected = gradients_of(reference)
    policy = MixedPrecisionPolicy(param_dtype=dtype) if dtype is not None else None
    if dtype is not None:
        other = wrap(copy.deepcopy(model), how, device, policy)
        accumulate(other, batches[rank])
        native = gradients_of(other)
    else:
        native = expected
    wrapped = wrap(model, how, device, policy)
    install(wrapped, impl=impl)
    found = accumulate(wrapped, batches[rank])
    counts = audit(wrapped)
    gradients = gradients_of(wrapped)
    looks = looks_at_logits(wrapped, reference, batches[rank][0])
    uninstall(wrapped)
    return (losses, found), (expected, gradients, native), counts, looks


def looks_at_logits(model, reference, batch):
    """Return the real logits, and those looked at in several places, or the error."""
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, foreach=False)  # of the shards
    with torch.no_grad():
        expected = reference(**batch).logits
        evaluated = model(**batch)
    looks = {"real": expected, "evaluated": evaluated.logits.detach()}

    def look(name, outputs):
        looks[name] = error_of(lambda: looks.update({name: outputs.logits.detach()})) or looks[name]

    look("after forward", model(**batch))
    outputs = model(**batch)
    outputs.loss.backward()
    look("after backward", outputs)
    outputs = model(**batch)
    outputs.loss.backward()
    optimizer.step()
    model(**batch)
    look("after a step", outputs)
    return looks


@pytest.mark.parametrize("how", WRAPS)
@in_two_ranks
def test_a_model_that_fsdp_or_ddp_wraps_trains_as_a_whole_one_without_its_logits(rank_pool, impl, how):
    freed, changed = "RuntimeError: logits: .* freed", "RuntimeError: logits: .* changed"
    errors = {"after a step": changed}
    if how in ("root", "reshard", "tied", "outer", "list"):
        errors["after backward"] = freed
    if how in ("reshard", "list"):
        errors |= {"after forward": freed, "after a step": freed}
    for (losses, own), (expected, found, _), counts, looks in rank_pool.run(_data_parallel, impl, how, None):
        assert counts == {"fused": 2}, how
        assert own == pytest.approx(losses, rel=1e-5)
        assert_same_gradients(found, {name.removeprefix("module."): g for name, g in expected.items()})
        real = looks.pop("real")
        for name, look in looks.items():
            if name in errors:
                assert re.match(errors[name], look), (name, look)
            else:
                assert_same(look, real, name)


@pytest.mark.reference
def test_heads_of_other_frameworks_fall_back_by_name():
    with_ds_id, flattened, hooked = (nn.Linear(4, 8) for _ in range(3))
    with_ds_id.weight.ds_id = 0
    del flattened.weight
    flattened.weight = torch.ones(8, 4)  # as FSDP1 does in forward
    hooked.register_forward_hook(lambda *_: None)
    reasons = ("DeepSpeed ZeRO-3", "the head's weight is not its parameter: FSDP1", "the head has hooks")
    for head, expected in zip((with_ds_id, flattened, hooked), reasons, strict=True):
        reason, group = refusal(head)
        assert reason is not None and reason.startswith(expected) and group is None
    assert refusal(nn.Linear(4, 8)) == (None, None)


def _by_tensor_parallelism_and_fsdp(rank, group, impl, path):
    device = device_of(rank, group)
    os.environ["LOCAL_RANK"] = str(rank)
    with patch("torch._C._get_accelerator", lambda: torch.device(device.type)):
        config = DistributedConfig(tp_size=2, tp_plan="auto", fsdp_size=2)
        model = LlamaForCausalLM.from_pretrained(path, distributed_config=config)
    batches = halves(device)
    reference = small_model("llama").to(device)
    part = rank // 2
    losses = [accumulate(reference, batch, 0.5) for batch in batches][part]
    install(model, impl=impl)
    found = accumulate(model, batches[part])
    gradients, counts, looks = gradients_of(model), audit(model), looks_at_logits(model, reference, batches[part][0])
    return (losses, found), (gradients_of(reference), gradients), counts, looks


@in_ranks((4,), (), (4,))
def test_transformers_tensor_parallelism_and_fsdp(rank_pool, impl, tmp_path):
    """Its plan puts norm and head into an FSDP group of their own."""
    small_model("llama").save_pretrained(tmp_path)
    results = rank_pool.run(_by_tensor_parallelism_and_fsdp, impl, tmp_path)
    for (losses, own), (expected, found), counts, looks in results:
        assert_same(looks["evaluated"], looks["real"])
        assert_same(looks["after forward"], looks["real"])
        assert re.match("RuntimeError: logits: .* freed", looks["after backward"])
        assert re.match("RuntimeError: logits: .* changed", looks["after a step"])
        assert own == pytest.approx(losses, rel=1e-5)
        assert_same_gradients(found, expected)
        assert counts == {"fused": 2}


def _in_bf16(rank, group, impl, how):
    losses, gradients, counts, _ = _data_parallel(rank, group, impl, how, torch.bfloat16)
    return losses, gradients, counts


@pytest.mark.parametrize("how", ["root", "own", "list"])
@in_two_ranks
def test_fsdp_with_mixed_precision_is_as_exact_as_without_the_fused_loss(rank_pool, impl, how):
    for (losses, own), (truth, found, native), counts in rank_pool.run(_in_bf16, impl, how):
        assert counts == {"fused": 2}
        assert own == pytest.approx(losses, rel=2e-3)
        for name, gradient in truth.items():
            error, usual = ((other - gradient).norm() for other in (found[name], native[name]))
            assert 0 < error <= 1.1 * usual, (name, error / usual)


def _tied_elsewhere(model):
    model.other = nn.Linear(WIDTH, VOCABULARY, bias=False)
    model.other.weight = model.lm_head.weight


def _hooked(model):
    model.lm_head.register_forward_hook(lambda *_: None)


def _parametrised(model):
    nn.utils.parametrizations.weight_norm(model.lm_head)


def _deepspeed(model):
    model.lm_head.weight.ds_id = 0


def _replaced(model):
    model.lm_head = nn.Sequential(model.lm_head)


def _with_lora(model):
    from peft import LoraConfig, get_peft_model

    get_peft_model(model, LoraConfig(r=2, target_modules=["lm_head"]))


def _with_max_norm(model):
    model.get_input_embeddings().max_norm = 1.0


def _refusals(rank, group, impl):
    device = device_of(rank, group)
    mesh = init_device_mesh(device.type, (2,))
    square = init_device_mesh(device.type, (1, 2), mesh_dim_names=("dp", "rows"))
    cut = shard_lm_head(small_model("llama").to(device), mesh)
    wrapped = fully_shard(small_model("llama").to(device), mesh=mesh)
    changes = {
        "tied elsewhere": _tied_elsewhere,
        "hooks": _hooked,
        "parametrised": _parametrised,
        "deepspeed": _deepspeed,
        "replaced": _replaced,
        "lora": _with_lora,
        "max_norm": _with_max_norm,
        "elsewhere": lambda model: model.to("meta"),
    }
    attempts = {
        "no mesh": lambda: shard_lm_head(small_model("llama"), group),
        "two dimensions": lambda: shard_lm_head(small_model("llama"), square),
        "no model": lambda: shard_lm_head(nn.Linear(2, 2), mesh),
        "cut already": lambda: shard_lm_head(cut, mesh),
        "fsdp": lambda: shard_lm_head(wrapped, mesh),
    }
    models = {}
    for name, change in changes.items():
        models[name] = small_model("llama", tied=name == "max_norm").to(device)
        change(models[name])
        attempts[name] = lambda model=models[name]: shard_lm_head(model, mesh)
    refused = messages_of(attempts)
    for model in models.values():
        assert not any(isinstance(parameter, DTensor) for parameter in model.parameters())
    return refused


@in_two_ranks
def test_heads_that_cannot_be_cut_are_refused(rank_pool, impl):
    exactly = "TypeError: head: expected exactly an nn.Linear, got "
    expected = {
        "no mesh": "TypeError: mesh: expected a DeviceMesh, got ProcessGroup",
        "two dimensions": r"ValueError: mesh: .*\"tp\", got 2 named \('dp', 'rows'\)",
        "no model": "TypeError: model: expected a model of transformers, got Linear",
        "cut already": "ValueError: head: .*hooks",
        "fsdp": "ValueError: head: expected plain parameters, got a DTensor",
        "tied elsewhere": r"ValueError: head: .*got other \(Linear\)",
        "hooks": "ValueError: head: has hooks",
        "parametrised": f"{exactly}ParametrizedLinear",
        "deepspeed": "ValueError: head: FSDP or DeepSpeed has its weight",
        "replaced": f"{exactly}Sequential",
        "lora": f"{exactly}Linear",
        "max_norm": "ValueError: embedding: expected no max_norm",
        "elsewhere": "ValueError: head: expected a weight on .*, got meta",
    }
    assert_refused(rank_pool.run(_refusals, impl), expected)
