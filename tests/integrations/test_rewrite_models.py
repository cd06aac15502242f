"""The forwards of transformers: which are rewritten, and what they compute."""

import ast
import re
from pathlib import Path
from types import MethodType

import pytest
import torch
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tests.integrations.test_rewrite import Lazy, rewritten, stand_in_loss
from vocab_parallel_ce.integrations.transformers.rewrite import Declined, rewrite_source

pytestmark = pytest.mark.reference

SIZES = {"vocab_size": 99, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 0}
MODELS = {
    "LlamaForCausalLM": SIZES | HEADS,
    "Gemma2ForCausalLM": SIZES | HEADS | {"final_logit_softcapping": 2.0},
    "CohereForCausalLM": SIZES | HEADS | {"logit_scale": 0.3},
    "MixtralForCausalLM": SIZES | HEADS | {"num_local_experts": 4, "output_router_logits": True},
    "GPT2LMHeadModel": {"vocab_size": 99, "n_positions": 16, "n_embd": 16, "n_layer": 2, "n_head": 2},
}
DECLINED = {
    "aligned labels": "Bart BigBirdPegasus Blenderbot BlenderbotSmall CpmAnt MBart Marian Mvp PLBart Pegasus TrOCR "
    "Whisper XLNet",
    "aliased labels": "Git",
    "composite": "ProphetNet XLM",
    "no labels": "Gemma4Assistant Gemma4UnifiedAssistant",
    "read or changed logits": "Bamba Inkling Inkling2",
    "self.training": "xLSTM",
    "several heads": "Musicgen MusicgenMelody",
}


def tiny_model(name: str) -> torch.nn.Module:
    """A model whose logits are large enough that a lost softcap or scale changes its loss."""
    torch.manual_seed(0)
    kind = getattr(transformers, name)
    model = kind(kind.config_class(**MODELS[name]))
    with torch.no_grad():
        model.lm_head.weight.mul_(100)
    return model.eval()


def loss_and_gradients(model: torch.nn.Module, forward, **inputs: object):
    model.zero_grad()
    output = MethodType(forward, model)(**inputs)
    output.loss.backward()
    return output, [parameter.grad for parameter in model.parameters()]


@pytest.mark.parametrize("name", MODELS)
def test_a_real_forward_gives_the_same_loss_gradients_and_logits(name: str) -> None:
    model = tiny_model(name)
    old, new = type(model).forward, rewritten(type(model).forward).forward
    ids = torch.randint(1, 99, (2, 8))
    inputs = {"input_ids": ids, "labels": ids.masked_fill(ids % 5 == 0, -100), "num_items_in_batch": torch.tensor(7)}
    expected, gradients = loss_and_gradients(model, old, **inputs)
    got, got_gradients = loss_and_gradients(model, new, **inputs)
    assert torch.equal(got.loss, expected.loss) and isinstance(got, type(expected))
    assert all(map(torch.equal, got_gradients, gradients))
    assert isinstance(got.logits, Lazy) and torch.equal(got.logits.make(), expected.logits)
    as_tuple = MethodType(new, model)(**inputs, return_dict=False)
    assert torch.equal(as_tuple[0], expected.loss) and any(isinstance(item, Lazy) for item in as_tuple)
    assert torch.equal(MethodType(new, model)(ids).logits, model(ids).logits)


@pytest.mark.parametrize(("name", "lost"), [("Gemma2ForCausalLM", "softcap"), ("CohereForCausalLM", "scale")])
def test_a_lost_softcap_or_scale_of_a_real_forward_is_noticed(name: str, lost: str) -> None:
    def without(*args, **arguments):
        return stand_in_loss(*args, **{**arguments, lost: None})

    model, ids = tiny_model(name), torch.randint(1, 99, (2, 8))
    got, _ = loss_and_gradients(model, rewritten(type(model).forward, without).forward, input_ids=ids, labels=ids)
    assert abs(got.loss - model(ids, labels=ids).loss) > 0.1


def forward_of(class_source: str) -> str:
    body = ast.parse(class_source).body[0].body
    forward = next(item for item in body if isinstance(item, ast.FunctionDef) and item.name == "forward")
    first = min(node.lineno for node in (forward, *forward.decorator_list))
    return "\n".join(class_source.split("\n")[first - 1 : forward.end_lineno]) + "\n"


def forward_sources() -> dict[str, str]:
    """Return the source of each class's forward, read from the files: an import of all of them takes 20 seconds."""
    names = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
    wanted = {name for value in names for name in ([value] if isinstance(value, str) else value)}
    sources = {}
    for path in (Path(transformers.__file__).parent / "models").glob("*/modeling_*.py"):
        text = path.read_text(encoding="utf-8")
        for block in re.split(r"^(?=class )", text, flags=re.M):
            name = block[6:].partition("(")[0]
            if name in wanted:
                # What follows the class at no indentation, such as __all__, is not parsed.
                sources[name] = forward_of(re.split(r"\n(?=[\w@])", block)[0])
    assert set(sources) == wanted
    return sources


def verdicts() -> dict[str, str]:
    """Return class -> "rewritten", or the reason for declining it."""
    found = {name: rewrite_source(source) for name, source in sorted(forward_sources().items())}
    return {name: v.reason if isinstance(v, Declined) else "rewritten" for name, v in found.items()}


def test_which_forwards_are_rewritten() -> None:
    declined = {name: reason for name, reason in verdicts().items() if reason != "rewritten"}
    expected = {name: reason for reason, names in DECLINED.items() for name in names.split()}
    family = "ForCausalLM|(With)?LMHeadModel"
    found = {re.sub(family, "", name): reason.split(":")[0] for name, reason in declined.items()}
    # An older release has fewer classes. If a newer one declines more, look at the reasons, then extend the list.
    assert found.items() <= expected.items(), found.items() - expected.items()
