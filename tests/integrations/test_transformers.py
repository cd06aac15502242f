"""install() for transformers' models: what it replaces and restores, which heads are fused, and the lazy logits.

Each step is compared with the same model's before install(): loss, every gradient, and bit-equal logits.
"""

import copy
import gc
import inspect
import io
import logging
import pickle
import weakref
from types import MethodType

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import nn
from transformers import Gemma2ForCausalLM, GPT2LMHeadModel, LlamaForCausalLM, PreTrainedModel

from tests.support.fresh import fresh_python
from vocab_parallel_ce.integrations.transformers import install, uninstall
from vocab_parallel_ce.integrations.transformers.audit import audit, differs, step
from vocab_parallel_ce.integrations.transformers.heads import NOT_USED
from vocab_parallel_ce.integrations.transformers.patch import imported_classes
from vocab_parallel_ce.integrations.transformers.tiny import tiny_inputs, tiny_model

pytestmark = pytest.mark.reference


@pytest.fixture(autouse=True)
def _nothing_stays_installed():
    yield
    uninstall()


@pytest.fixture
def llama():
    return tiny_model(LlamaForCausalLM)


def is_installed(owner):
    return hasattr(owner.forward, "vocab_parallel_ce")


def same_step(model, target=None, inputs=None, **options):
    """Assert that install() changes no number of a step, and return what became of the call."""
    inputs = inputs or tiny_inputs(model)
    expected = detached(step(model, inputs))
    install(model if target is None else target, **options)
    found = step(model, inputs)
    assert differs(found, expected) is None
    calls = audit(model)
    calls.pop("logits made after the call", None)
    return calls


def detached(outcome):
    """Return the outcome with gradients that the next step does not overwrite."""
    gradients = {n: None if grad is None else grad.clone() for n, grad in outcome.gradients.items()}
    return outcome._replace(gradients=gradients)


# What is replaced, and restored


def test_install_and_uninstall_of_one_model_leave_its_class_and_others_alone(llama):
    forward, other = LlamaForCausalLM.forward, tiny_model(LlamaForCausalLM)
    signature = inspect.signature(llama.forward)
    assert install(llama) == install(llama) == {"LlamaForCausalLM": "installed"}
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
    assert install(LlamaForCausalLM) == install(LlamaForCausalLM) == {"LlamaForCausalLM": "installed"}
    assert install(Mine) == {"Mine": "installed"}
    assert is_installed(llama) and not is_installed(Gemma2ForCausalLM)
    assert uninstall(LlamaForCausalLM) == {"LlamaForCausalLM": "restored"}
    assert LlamaForCausalLM.forward is forward and "forward" not in vars(Mine)


def test_install_of_everything_is_undone_to_the_same_functions():
    forwards = {cls: cls.forward for cls in imported_classes()}
    build = PreTrainedModel.__init__
    verdicts = install()
    assert len(verdicts) == len(forwards) >= 3 and set(verdicts.values()) == {"installed"}
    assert install() == verdicts and all(is_installed(cls) for cls in forwards)
    assert all(verdict == "restored" for verdict in uninstall().values())
    assert {cls: cls.forward for cls in forwards} == forwards and PreTrainedModel.__init__ is build
    install(imported_later=False)
    assert PreTrainedModel.__init__ is build


def test_a_class_that_was_uninstalled_stays_so_while_the_others_are_installed():
    install()
    uninstall(LlamaForCausalLM)
    assert not is_installed(tiny_model(LlamaForCausalLM)) and is_installed(Gemma2ForCausalLM)


def test_other_options_are_refused_until_uninstall(llama):
    install(llama, chunk_tokens=4)
    with pytest.raises(ValueError, match=r"LlamaForCausalLM: has mechanism and options .*chunk_tokens.* uninstall\(\)"):
        install(llama, chunk_tokens=8)
    uninstall(llama)
    assert install(llama, chunk_tokens=8) == {"LlamaForCausalLM": "installed"}
    with pytest.raises(TypeError, match="reduction"):
        install(llama, reduction="sum")
    with pytest.raises(ValueError, match="mechanism: expected one of lazy, rewrite, got 'eager'"):
        install(llama, mechanism="eager")
    for target in (nn.Linear(2, 2), nn.Linear, 3):
        with pytest.raises(TypeError, match="target: expected a model of transformers, its class, or None, got"):
            install(target)


def loss_of_something_else(self, input_ids=None, labels=None, **kwargs):
    return "something else"


def test_a_forward_that_something_else_replaced_before_is_refused_by_name(llama, monkeypatch):
    llama.forward = MethodType(loss_of_something_else, llama)
    with pytest.raises(ValueError, match="LlamaForCausalLM: something else has replaced its forward: install.. before"):
        install(llama)
    monkeypatch.setattr(Gemma2ForCausalLM, "forward", loss_of_something_else)
    with pytest.raises(ValueError, match="Gemma2ForCausalLM: something else has replaced its forward"):
        install(Gemma2ForCausalLM)
    verdicts = install()
    assert "something else" in verdicts["Gemma2ForCausalLM"] and verdicts["LlamaForCausalLM"] == "installed"
    assert Gemma2ForCausalLM.forward is loss_of_something_else and llama.forward() == "something else"


def test_a_forward_that_something_else_replaces_later_is_left_alone(llama, monkeypatch):
    install(llama)
    install(Gemma2ForCausalLM)
    llama.forward = MethodType(loss_of_something_else, llama)
    monkeypatch.setattr(Gemma2ForCausalLM, "forward", loss_of_something_else)
    left = "left alone: something else has replaced it since"
    assert uninstall(llama) == {"LlamaForCausalLM": left}
    assert uninstall() == {"Gemma2ForCausalLM": left}
    assert Gemma2ForCausalLM.forward is loss_of_something_else and llama.forward() == "something else"


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
    found = detached(step(other, inputs))
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
    assert same_step(loaded) == {"fused": 1}
    uninstall(loaded)
    assert not is_installed(loaded)


# Classes that are imported later, and the variable

LATER = """
import sys
import vocab_parallel_ce.integrations.transformers as integration
assert "transformers" not in sys.modules, "the integration imports transformers"
from transformers import PreTrainedModel
build = PreTrainedModel.__init__
assert not hasattr(build, "vocab_parallel_ce"), "importing patches"
assert integration.install() == {} and "transformers.models.llama" not in sys.modules
from vocab_parallel_ce.integrations.transformers.audit import audit
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
