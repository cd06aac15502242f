"""Heads of transformers' models, and their lazy logits: fused, or right and with their logits.

Each step is compared with the same model's before install(): loss, every gradient, and bit-equal logits.
"""

import logging
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrize
from transformers import Gemma2ForCausalLM, GPT2LMHeadModel, LlamaForCausalLM

from tests.support.frameworks.transformers_steps import FUSED, calls_of, own_step, same_step
from vocab_parallel_ce.integrations.transformers import heads, install, patch, uninstall
from vocab_parallel_ce.integrations.transformers.audit_models import audit, differs, step
from vocab_parallel_ce.integrations.transformers.tiny import tiny_inputs, tiny_model

peft = pytest.importorskip("peft")

pytestmark = pytest.mark.reference


# Heads


@pytest.mark.parametrize("own", [{}, {"valid_tokens": None}, {"valid_tokens": 100}], ids=str)
def test_labels_that_count_are_counted_in_training_alone(llama, monkeypatch, own):
    """A GPU computes ignored tokens too, unless it is told how many count."""
    told, fused = [], heads.linear_cross_entropy
    monkeypatch.setattr(
        heads, "linear_cross_entropy", lambda *of, **k: told.append(k["options"].valid_tokens) or fused(*of, **k)
    )
    expected = own_step(llama, tiny_inputs(llama))
    install(llama, **own)
    assert differs(step(llama, tiny_inputs(llama)), expected) is None and calls_of(llama) == FUSED
    with torch.no_grad():
        llama(**tiny_inputs(llama))
    assert told == [own.get("valid_tokens", "count"), own.get("valid_tokens")]


def test_a_chunk_of_many_columns_is_bound_by_bytes(llama, monkeypatch):
    """Without the memory of LARGE_BYTES, it has as many tokens as have logits of an fp32 gradient's bytes."""
    told, fused = [], heads.linear_cross_entropy
    monkeypatch.setattr(
        heads, "linear_cross_entropy", lambda *of, **k: told.append(k["options"].chunk_size) or fused(*of, **k)
    )
    for name in ("LARGE_BYTES", "SMALL_BYTES"):
        monkeypatch.setattr(f"vocab_parallel_ce.head.chunks.{name}", 0)
    ids = torch.arange(256).view(2, 128) % llama.config.vocab_size
    expected = own_step(llama, {"input_ids": ids, "labels": ids})
    install(llama)
    assert differs(step(llama, {"input_ids": ids, "labels": ids}), expected) is None and calls_of(llama) == FUSED
    assert told == [llama.config.hidden_size]


class QuantisedLinear(nn.Linear):
    """Stands for a head that stores its weight in other units."""

    def forward(self, hidden):
        return F.linear(hidden, self.weight * 0.5)


class ScaledWeight(torch.Tensor):
    """Stands for a weight of a quantisation library: a product sees other values than it holds."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is F.linear:
            with torch._C.DisableTorchFunctionSubclass():
                return func(args[0], args[1] * 0.5, *args[2:])
        return super().__torch_function__(func, types, args, kwargs or {})


class Doubled(nn.Module):
    def forward(self, weight):
        return 2.0 * weight


def tie(model):
    model.lm_head.weight = model.get_input_embeddings().weight


def untie(model):
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())


def quantise_weight(model):
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().as_subclass(ScaledWeight))


def patch_head_forward(model):
    model.lm_head.forward = lambda hidden: F.linear(hidden, model.lm_head.weight) * 0.5


def reentrant(model):
    model.train().gradient_checkpointing_enable({"use_reentrant": True})
    model.enable_input_require_grads()


def hook_of_all_modules(model):
    hook = nn.modules.module.register_module_forward_hook
    return hook(lambda module, args, output: output / 2 if module is model.lm_head else None)


def other_linear(model):
    """Another forward of every nn.Linear."""
    native = nn.Linear.forward
    nn.Linear.forward = lambda self, hidden: native(self, hidden) * 0.9
    return SimpleNamespace(remove=lambda: setattr(nn.Linear, "forward", native))


Llama, Gemma, GPT = LlamaForCausalLM, Gemma2ForCausalLM, GPT2LMHeadModel
# A model, how it is changed, and why it is not fused then; None: it is. What is returned undoes it.
CHANGES = {
    **{
        f"{change.__name__} {cls.__name__}": (cls, change, None)
        for cls in (Llama, Gemma, GPT)
        for change in (tie, untie)
    },
    "another head": (Llama, lambda m: m.set_output_embeddings(nn.Linear(64, 99, bias=True)), None),
    "resized": (Llama, lambda m: m.resize_token_embeddings(120), None),
    "frozen": (Llama, lambda m: m.lm_head.weight.requires_grad_(False), None),
    "checkpointing": (Llama, lambda m: m.train().gradient_checkpointing_enable({"use_reentrant": False}), None),
    "reentrant checkpointing": (Llama, reentrant, None),
    "no nn.Linear": (Llama, lambda m: setattr(m, "lm_head", QuantisedLinear(64, 99, bias=False)), "not an nn.Linear"),
    "scaled weight": (Llama, quantise_weight, "ScaledWeight"),
    "parametrised": (
        Llama,
        lambda m: parametrize.register_parametrization(m.lm_head, "weight", Doubled()) and None,
        "ParametrizedLinear",
    ),
    "hook": (Llama, lambda m: m.lm_head.register_forward_hook(lambda head, args, logits: 0.5 * logits), "has hooks"),
    "pre-hook": (Llama, lambda m: m.lm_head.register_forward_pre_hook(lambda head, args: (args[0] / 2,)), "has hooks"),
    "backward hook": (
        Llama,
        lambda m: m.lm_head.register_full_backward_hook(lambda head, grads, _: (grads[0] * 2,)),
        "backward hooks",
    ),
    "patched": (Llama, patch_head_forward, "replaced the head's forward"),
    "compiled": (Llama, lambda m: m.lm_head.compile(backend="eager"), "compiled"),
    "hook of all modules": (Llama, hook_of_all_modules, "hooks of all modules"),
    "another nn.Linear": (Llama, other_linear, "forward"),
}


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_changed_model_is_fused_or_keeps_its_logits_and_says_why_once(name, when, caplog):
    caplog.set_level(logging.WARNING, logger="vocab_parallel_ce")
    cls, change, reason = CHANGES[name]
    model = tiny_model(cls)
    if when == "after":
        install(model)
    torch.manual_seed(0)
    undo = change(model)
    try:
        if when == "before":
            install(model)
        inputs = tiny_inputs(model)
        actual = [own_step(model, inputs) for _ in range(3)]
        ((why, count),) = calls_of(model).items()
        uninstall()
        expected = step(model, inputs)
    finally:
        if hasattr(undo, "remove"):
            undo.remove()
    assert count == 3 and (why == "fused" if reason is None else reason in why)
    assert [differs(each, expected) for each in actual] == [None] * 3
    said = [record.getMessage() for record in caplog.records if record.name == "vocab_parallel_ce"]
    assert len(said) == (reason is not None) and all(why in line and cls.__name__ in line for line in said)


# PEFT and accelerate

LAYERS = {"target_modules": ["q_proj", "v_proj"]}
PEFTS = {
    "layers": (LAYERS, None),
    "head": ({"target_modules": ["q_proj", "lm_head"]}, "not an nn.Linear"),
    "saved": (LAYERS | {"modules_to_save": ["lm_head"]}, "not an nn.Linear"),
}


@pytest.mark.parametrize("case", PEFTS)
@pytest.mark.parametrize("when", ["before", "after"])
def test_peft(llama, case, when):
    options, reason = PEFTS[case]
    config = peft.LoraConfig(r=4, init_lora_weights=False, task_type="CAUSAL_LM", **options)
    if when == "before":
        install(llama)
    torch.manual_seed(0)
    model = peft.get_peft_model(llama, config)
    inputs = tiny_inputs(llama)
    if when == "before":
        found = own_step(model, inputs)
        calls = calls_of(model)
        uninstall(model)
        assert differs(found, step(model, inputs)) is None
    else:
        calls = same_step(model)
    assert calls == FUSED if reason is None else reason in str(calls)
    trained = {name for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert trained == {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert any("lora_A" in name for name in trained)
    assert any("lm_head" in name for name in trained) == (case != "layers")


WRAPPERS = {
    "peft": lambda model: peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", **LAYERS)),
    "compiled": lambda model: torch.compile(model, backend="eager"),
    "wrapped": lambda model: nn.DataParallel(model),
}


@pytest.mark.parametrize("wrappers", [["peft"], ["compiled"], ["wrapped", "peft"], ["compiled", "wrapped", "peft"]])
def test_the_model_inside_its_wrappers_is_installed(llama, wrappers):
    model = llama
    for name in reversed(wrappers):
        model = WRAPPERS[name](model)
    assert install(model).installed and audit(model) == {}
    assert hasattr(llama.forward, "vocab_parallel_ce") and uninstall(llama) == {"LlamaForCausalLM": "restored"}


# The logits


def test_logits_of_a_functional_call_are_those_of_its_weights(llama):
    inputs = tiny_inputs(llama)
    values = {name: 0.5 * value.detach() for name, value in llama.named_parameters()}
    expected = torch.func.functional_call(llama, values, (), inputs)
    install(llama)
    outputs = torch.func.functional_call(llama, values, (), inputs)
    torch.testing.assert_close(outputs.loss, expected.loss, rtol=1e-5, atol=0.0)
    assert torch.equal(outputs.logits, expected.logits)


def test_a_transform_of_functorch_runs_the_models_own_loss(llama):
    inputs = tiny_inputs(llama)
    values = {name: value.detach() for name, value in llama.named_parameters()}

    def gradient():
        return torch.func.grad(lambda values: torch.func.functional_call(llama, values, (), inputs).loss)(values)

    expected = gradient()
    install(llama)
    for name, value in gradient().items():
        assert torch.equal(value, expected[name])


OPTIONS = [
    {"valid_tokens": 100},
    {"gradient": "in_backward"},
    {"gradient": "in_forward"},
    {"chunk_size": 4},
    {"impl": "reference"},
    {"own_tokens": True, "max_tokens": 64},  # of a head that FSDP has not cut
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("looks", ["hook", "logits"])
def test_an_option_of_the_head_on_the_fallback_path(llama, options, looks):
    """A head with a hook, or logits that are looked at before the loss: no number changes, and no logits."""
    inputs, kept = tiny_inputs(llama), []

    def keep(head, args, logits):
        kept.append(logits.detach())

    def loss_function(logits, labels, vocab_size, **kwargs):
        keep(None, None, logits)
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())

    if looks == "hook":
        llama.lm_head.register_forward_hook(keep)
    else:
        llama.loss_function = loss_function
    expected, before = own_step(llama, inputs), kept[0].clone()
    install(llama, **options)
    assert differs(step(llama, inputs), expected) is None
    assert torch.equal(kept[1], before) and "fused" not in calls_of(llama)
    assert {name for each in OPTIONS for name in each} == set(patch.OPTIONS)
