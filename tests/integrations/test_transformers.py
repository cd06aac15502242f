"""install() for transformers' models: what it replaces and restores, and every way to call a model.

Each step is compared with the same model's before install(): loss, every gradient, and bit-equal logits.
"""

import copy
import gc
import inspect
import io
import weakref
from types import MethodType

import pytest
import torch
from torch import nn
from transformers import (
    Gemma2ForCausalLM,
    GPT2LMHeadModel,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    LlamaModel,
    PreTrainedModel,
)

from tests.support.frameworks.transformers_steps import FUSED, calls_of, own_step, same_step
from tests.support.host.fresh import fresh_python
from vocab_parallel_ce.integrations.transformers import install, report, uninstall
from vocab_parallel_ce.integrations.transformers.audit_models import audit, differs, step
from vocab_parallel_ce.integrations.transformers.patch import COMPILED
from vocab_parallel_ce.integrations.transformers.targets import imported_classes
from vocab_parallel_ce.integrations.transformers.tiny import tiny_inputs, tiny_model

pytestmark = pytest.mark.reference


LLAMA = "transformers.models.llama.modeling_llama.LlamaForCausalLM"


def is_installed(owner):
    return hasattr(owner.forward, "vocab_parallel_ce")


# What is replaced, and restored


def test_install_and_uninstall_of_one_model_leave_its_class_and_others_alone(llama):
    forward, other = LlamaForCausalLM.forward, tiny_model(LlamaForCausalLM)
    signature = inspect.signature(llama.forward)
    assert install(llama) == install(llama) and install(llama).rebound == (f"{LLAMA} (one model).forward",)
    assert is_installed(llama) and not is_installed(other) and LlamaForCausalLM.forward is forward
    assert inspect.signature(llama.forward) == signature  # what Trainer reads
    step(llama, tiny_inputs(llama))
    step(other, tiny_inputs(other))
    assert audit(llama)["fused"] == 1 and audit(other) == {}
    assert uninstall(llama) == {"LlamaForCausalLM": "restored"}
    assert "forward" not in vars(llama) and not is_installed(llama) and uninstall() == {}


def test_install_of_a_class_is_undone_to_the_same_function(llama):
    class Mine(LlamaForCausalLM):
        pass

    forward = LlamaForCausalLM.forward
    assert install(LlamaForCausalLM) == install(LlamaForCausalLM) == install(Mine)
    assert report().rebound == (f"{LLAMA}.forward",)
    assert is_installed(llama) and not is_installed(Gemma2ForCausalLM)
    assert uninstall(LlamaForCausalLM) == {"LlamaForCausalLM": "restored"}
    assert LlamaForCausalLM.forward is forward and "forward" not in vars(Mine)


def test_install_of_everything_is_undone_to_the_same_functions():
    forwards = {cls: cls.forward for cls in imported_classes() if "forward" in vars(cls)}
    build = PreTrainedModel.__init__
    made = install()
    assert len(made.rebound) == len(forwards) + 1 >= 4 and list(made.left) == ["calls without labels"]
    assert install() == made and all(is_installed(cls) for cls in forwards)
    assert all(verdict == "restored" for verdict in uninstall().values())
    assert {cls: cls.forward for cls in forwards} == forwards and PreTrainedModel.__init__ is build
    assert not report().installed and not report().left
    install(imported_later=False)
    assert PreTrainedModel.__init__ is build


def test_a_class_that_was_uninstalled_stays_so_while_the_others_are_installed():
    install()
    uninstall(LlamaForCausalLM)
    assert not is_installed(tiny_model(LlamaForCausalLM)) and is_installed(Gemma2ForCausalLM)


NO_MODEL = "target: expected a model of transformers, its class, or None, got"
REFUSED = [
    (LlamaForCausalLM, {"reduction": "sum"}, TypeError, "reduction"),
    (LlamaForCausalLM, {"mechanism": "eager"}, ValueError, "mechanism: expected one of lazy, rewrite, got 'eager'"),
    (LlamaForCausalLM, {"impl": "foo"}, ValueError, "impl"),
    (LlamaForCausalLM, {"chunk_size": -1}, ValueError, "chunk_size"),
    (LlamaForCausalLM, {"gradient": "x"}, ValueError, "gradient"),
    *((target, {}, TypeError, NO_MODEL) for target in (nn.Linear(2, 2), nn.Linear, 3)),
    (LlamaModel, {}, ValueError, "LlamaModel: its forward takes no labels, or its models"),
    (LlamaForSequenceClassification, {}, ValueError, "LlamaForSequenceClassification: its forward takes no labels, or"),
]


@pytest.mark.parametrize(("target", "options", "error", "message"), REFUSED)
def test_what_install_refuses(target, options, error, message):
    with pytest.raises(error, match=f"^{message}"):
        install(target, **options)
    assert not report().installed


def loss_of_something_else(self, input_ids=None, labels=None, **kwargs):
    return "something else"


def test_a_forward_that_something_else_replaced_before_is_refused_by_name(llama, monkeypatch, caplog):
    llama.forward = MethodType(loss_of_something_else, llama)
    with pytest.raises(ValueError, match="LlamaForCausalLM: something else has replaced its forward: install.. before"):
        install(llama)
    monkeypatch.setattr(Gemma2ForCausalLM, "forward", loss_of_something_else)
    with pytest.raises(ValueError, match="Gemma2ForCausalLM: something else has replaced its forward"):
        install(Gemma2ForCausalLM)
    caplog.clear()
    made = install()
    ((path, reason),) = [each for each in made.left.items() if "Gemma2ForCausalLM" in each[0]]
    assert "something else" in reason and f"{LLAMA}.forward" in made.rebound and f"{path}.forward" not in made.rebound
    install()
    messages = [record.getMessage() for record in caplog.records]
    assert "LlamaForCausalLM (one model): its forward, by tests.integrations" in "".join(messages)
    (said,) = [message for message in messages if "one model" not in message]
    assert said == f"vocab_parallel_ce: Gemma2ForCausalLM: its forward is left alone: {reason}"
    assert audit(Gemma2ForCausalLM) == {reason: 1}
    uninstall()
    assert audit(Gemma2ForCausalLM) == {} == report().left
    assert Gemma2ForCausalLM.forward is loss_of_something_else and llama.forward() == "something else"


def test_a_dropped_model_with_a_forward_of_its_own_is_not_named():
    gc.disable()
    try:
        model = tiny_model(LlamaForCausalLM)
        model.forward = MethodType(loss_of_something_else, model)
        assert "LlamaForCausalLM (one model)" in str(install().left)
        uninstall()
        del model  # a cycle: its forward holds it
        assert list(install().left) == ["calls without labels"]
    finally:
        gc.enable()


def test_a_forward_that_something_else_replaces_later_is_left_alone(llama):
    native = Gemma2ForCausalLM.forward
    install(llama)
    install(Gemma2ForCausalLM)
    llama.forward = MethodType(loss_of_something_else, llama)
    Gemma2ForCausalLM.forward = loss_of_something_else
    try:
        left = "left alone: something else has replaced it since"
        assert uninstall(llama) == {"LlamaForCausalLM": left}
        assert uninstall() == {"Gemma2ForCausalLM": left}
        assert Gemma2ForCausalLM.forward is loss_of_something_else and llama.forward() == "something else"
    finally:
        Gemma2ForCausalLM.forward = native


def test_an_installed_model_is_freed(llama):
    def build():
        model = tiny_model(LlamaForCausalLM)
        install(model)
        step(model, tiny_inputs(model))
        return weakref.ref(model)

    model = build()
    gc.collect()
    assert model() is None and uninstall() == {}


def test_a_copy_of_an_installed_model_is_installed_and_does_not_refer_to_the_old_one(llama):
    inputs = tiny_inputs(llama)
    install(llama)
    other = copy.deepcopy(llama)
    with torch.no_grad():
        other.lm_head.weight *= 0.5
    found = own_step(other, inputs)
    assert audit(other)["fused"] == 1 and audit(llama) == {} and llama.lm_head.weight.grad is None
    assert uninstall(other) == {"LlamaForCausalLM": "restored"} and not is_installed(other) and is_installed(llama)
    assert differs(found, step(other, inputs)) is None


def test_a_saved_model_is_native_and_can_be_installed(llama):
    install(llama)
    file = io.BytesIO()
    torch.save(llama, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert not is_installed(loaded)
    assert same_step(loaded) == FUSED
    uninstall(loaded)
    assert not is_installed(loaded)


# Classes that are imported later, and the variable

LATER = """
import sys
import vocab_parallel_ce.integrations.transformers as integration
assert "transformers" not in sys.modules, "the integration imports transformers"
from vocab_parallel_ce.integrations.transformers.patch import WHEN_BUILT
from transformers import PreTrainedModel
build = PreTrainedModel.__init__
assert not hasattr(build, "vocab_parallel_ce"), "importing patches"
assert integration.install().rebound == (WHEN_BUILT,) and "transformers.models.llama" not in sys.modules
from vocab_parallel_ce.integrations.transformers.audit_models import audit
from vocab_parallel_ce.integrations.transformers.tiny import tiny_model, tiny_inputs
from transformers import LlamaForCausalLM, Qwen3ForCausalLM
class Mine(Qwen3ForCausalLM):
    pass
forward = LlamaForCausalLM.forward
assert not hasattr(forward, "vocab_parallel_ce")
for cls in (LlamaForCausalLM, Mine):
    model = tiny_model(cls)
    model(**tiny_inputs(model)).loss.backward()
    assert audit(model) == {"fused": 1}, (cls, audit(model))
integration.uninstall()
assert LlamaForCausalLM.forward is forward and PreTrainedModel.__init__ is build
print("passed")
"""
VARIABLE = """
import sys
import vocab_parallel_ce
import vocab_parallel_ce.integrations
assert "transformers" not in sys.modules, "the package reads the variable without being asked"
import vocab_parallel_ce.integrations.transformers
from transformers import LlamaForCausalLM, LlamaConfig
sizes = dict(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2, vocab_size=16)
LlamaForCausalLM(LlamaConfig(**sizes))
print(hasattr(LlamaForCausalLM.forward, "vocab_parallel_ce"))
"""


def test_classes_imported_later_are_installed_when_their_first_model_is_built():
    result = fresh_python("-c", LATER)
    assert result.stdout == "passed\n", result.stderr


def test_the_variable_installs_when_the_integration_is_imported():
    result = fresh_python("-c", VARIABLE, VOCAB_PARALLEL_CE_TRANSFORMERS="1")
    assert result.stdout == "True\n", result.stderr


# Ways to call a model


def test_logits_to_keep(llama):
    labels = tiny_inputs(llama)["labels"]
    assert same_step(llama, logits_to_keep=5, labels=labels[:, -5:]) == FUSED
    uninstall()
    assert same_step(llama, logits_to_keep=torch.tensor([1, 3, 8]), labels=labels[:, [1, 3, 8]])["fused"] == 2


@pytest.mark.parametrize("mechanism", ["lazy", "rewrite"])
@pytest.mark.parametrize("n", [None, 3, 0, torch.tensor(0), torch.tensor(0.0), torch.tensor([0])], ids=repr)
def test_a_batch_of_no_items_has_loss_0(llama, mechanism, n):
    """A Trainer passes the number of labels of all micro-batches; 0 / 0 would be NaN."""
    given = {} if n is None else {"num_items_in_batch": n}
    inputs = tiny_inputs(llama) | {"labels": torch.full((2, 12), -100)} | given
    assert n == 3 or step(llama, inputs).loss.isnan().all()
    install(llama, mechanism=mechanism)
    found = step(llama, inputs)
    assert (found.loss == 0.0).all() and not any(grad.any() for grad in found.gradients.values())
    assert audit(llama)["fused"] == 1


@pytest.mark.parametrize("mechanism", ["lazy", "rewrite"])
def test_tuples_and_positional_labels(llama, mechanism):
    inputs = tiny_inputs(llama)
    order = [name for name in inspect.signature(llama.forward).parameters if name != "kwargs"]
    arguments = [inputs.get(name) for name in order[: order.index("labels") + 1]]
    expected = llama(*arguments, return_dict=False)
    install(llama, mechanism=mechanism)
    found = llama(*arguments, return_dict=False)
    assert type(found) is tuple and len(found) == len(expected) and audit(llama) == FUSED
    torch.testing.assert_close(found[0], expected[0], rtol=1e-5, atol=0.0)
    assert torch.equal(found[1], expected[1])


@pytest.mark.parametrize("cls", [LlamaForCausalLM, Gemma2ForCausalLM, GPT2LMHeadModel])
def test_inference_is_equal_bit_for_bit(cls):
    model = tiny_model(cls).eval()
    inputs = tiny_inputs(model)
    prompt = {"input_ids": inputs["input_ids"][:1, :5], "max_new_tokens": 6, "pad_token_id": 0}
    unlabelled = {name: value for name, value in inputs.items() if name != "labels"}

    def outcomes():
        torch.manual_seed(0)
        with torch.no_grad():
            labelled = model(**inputs)
            yield labelled.logits + 0
            yield model(**unlabelled).logits
        yield model.generate(**prompt, do_sample=False)
        yield model.generate(**prompt, do_sample=True, use_cache=True)
        scores = model.generate(**prompt, num_beams=2, output_scores=True, return_dict_in_generate=True)
        yield scores.sequences_scores
        loss.append(labelled.loss)

    loss = []
    expected = list(outcomes())
    install(model)
    assert all(map(torch.equal, outcomes(), expected))
    torch.testing.assert_close(loss[1], loss[0], rtol=1e-5, atol=0.0)
    assert audit(model) == FUSED | {"logits made after the call": 1}  # the others had no labels


def test_two_backwards_need_a_gradient_that_is_computed_in_backward(llama):
    """Readers of the logits have two of them with that option."""
    install(llama)
    loss = llama(**tiny_inputs(llama)).loss
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="gradient='in_backward'"):
        loss.backward()


@pytest.mark.parametrize("compiled", ["model", "layers"])
def test_torch_compile(llama, compiled):
    inputs = tiny_inputs(llama)
    expected = own_step(llama, inputs)
    install(llama)
    if compiled == "model":
        found = step(torch.compile(llama, backend="eager", fullgraph=True), inputs)
        found = found._replace(gradients={n: p.grad for n, p in llama.named_parameters()}, logits=expected.logits)
        assert calls_of(llama) == {COMPILED: 1}  # its own loss, in the compiled program
    else:
        llama.model.compile(backend="eager")
        found = step(llama, inputs)
        found = found._replace(logits=expected.logits)
        assert calls_of(llama) == FUSED
    assert differs(found, expected) is None
