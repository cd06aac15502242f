"""Every class of transformers' causal language models that can be built: the same step with the fused loss.

About a quarter of the classes by default; ``VPCE_ALL_CLASSES=1`` runs all of them.
"""

import ast
import json
import os
import re
from pathlib import Path

import pytest
import torch

transformers = pytest.importorskip("transformers")

from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES  # noqa: E402

from tests.docs.markdown import ROOT  # noqa: E402
from vocab_parallel_ce.integrations.transformers import install, uninstall  # noqa: E402
from vocab_parallel_ce.integrations.transformers.audit_models import differs, step  # noqa: E402
from vocab_parallel_ce.integrations.transformers.heads import calls  # noqa: E402
from vocab_parallel_ce.integrations.transformers.rewrite import Declined, rewrite_source  # noqa: E402
from vocab_parallel_ce.integrations.transformers.tiny import class_names, load_class, tiny_inputs, tiny_model  # noqa: E402

pytestmark = pytest.mark.reference
# They have several heads, or transpose their logits.
FALL_BACK = {"MusicgenForCausalLM", "MusicgenMelodyForCausalLM", "ProphetNetForCausalLM"}
# Without this project: they need timm, or take no labels.
NOT_BUILT = {"Gemma3nForConditionalGeneration", "Gemma4AssistantForCausalLM", "Gemma4UnifiedAssistantForCausalLM"}
# What the rewriting declines, by the audit of this version that is committed.
AUDIT = ROOT / f"scripts/results/transformers_audit_{transformers.__version__}.json"
OTHERS = json.loads(AUDIT.read_text())["rewrite"]["others"] if AUDIT.exists() else {}
DECLINED = [name for name, reason in OTHERS.items() if reason.startswith("declined")]
# Scales, softcaps, biases, inline losses, sliced vocabularies, auxiliary losses, composite heads.
ALWAYS = """
    ArceeForCausalLM BertLMHeadModel BlenderbotForCausalLM CohereForCausalLM FalconH1ForCausalLM Gemma2ForCausalLM
    GPT2LMHeadModel GPTJForCausalLM GitForCausalLM GraniteForCausalLM LlamaForCausalLM MixtralForCausalLM
    MptForCausalLM NanoChatForCausalLM OPTForCausalLM Qwen3ForCausalLM ReformerModelWithLMHead RwkvForCausalLM
    XLMWithLMHeadModel MusicgenForCausalLM MusicgenMelodyForCausalLM ProphetNetForCausalLM
"""
NAMES = class_names()
if os.environ.get("VPCE_ALL_CLASSES") != "1":
    NAMES = [name for number, name in enumerate(NAMES) if number % 6 == 0 or name in ALWAYS.split()]


def built(name):
    """A tiny model and its inputs; None if transformers alone cannot run it."""
    try:
        model = tiny_model(load_class(name))
        inputs = tiny_inputs(model)
        step(model, inputs)
    except Exception:
        if name in NOT_BUILT:
            return None
        raise
    assert name not in NOT_BUILT
    return model, inputs


def outcomes(model, variants):
    """The outcome of each variant of the inputs; of one that the model refuses, the kind of its error."""
    found = {}
    for name, inputs in variants.items():
        try:
            found[name] = step(model, inputs)
        except (TypeError, AttributeError) as error:
            found[name] = type(error)
    return found


def variants_of(inputs):
    valid = int((inputs["labels"][:, 1:] != -100).sum())
    return {
        "mean": inputs,
        "int": inputs | {"num_items_in_batch": valid + 3},
        "tensor": inputs | {"num_items_in_batch": torch.tensor(valid + 3)},
        "shifted": inputs | {"shift_labels": inputs["labels"].roll(1, 1)},
    }


@pytest.mark.parametrize("name", NAMES)
def test_a_step_is_the_same(name):
    pair = built(name)
    if pair is None:
        return
    model, inputs = pair
    variants = variants_of(inputs)
    expected = outcomes(model, variants)
    without = {key: value for key, value in inputs.items() if key != "labels"}
    with torch.no_grad():
        of_inference = model(**without).logits
    install(model)
    try:
        found = outcomes(model, variants)
        with torch.no_grad():
            assert torch.equal(model(**without).logits, of_inference)
            losses = [model(**inputs).loss for _ in range(2)]
    finally:
        uninstall(model)
    rewritten = _rewritten(model, inputs)
    assert not AUDIT.exists() or (rewritten is None) == (name in DECLINED)
    assert rewritten is None or differs(rewritten, found["mean"]) is None
    for variant, outcome in expected.items():
        if isinstance(outcome, type):
            assert found[variant] is outcome
        else:
            assert differs(found[variant], outcome) is None, variant
    assert torch.equal(losses[0], losses[1])
    assert ("fused" in calls[model]) == (name not in FALL_BACK), calls[model]
    if name not in FALL_BACK:
        assert set(calls[model]) <= {"fused", "logits made after the call"}, calls[model]


def _rewritten(model, inputs):
    """The outcome of a step of the rewritten forward, or None if the rewriting declines."""
    try:
        install(model, mechanism="rewrite")
    except ValueError:
        return None
    fused = calls[model]["fused"]
    try:
        outcome = step(model, inputs)
    finally:
        uninstall(model)
    assert calls[model]["fused"] == fused + 1
    return outcome


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


@pytest.mark.skipif(not AUDIT.exists(), reason="no audit of this version of transformers")
def test_which_forwards_are_rewritten():
    """Those of the committed audit. If a newer release declines more, look at the reasons, then audit it."""
    verdicts = {name: rewrite_source(source) for name, source in forward_sources().items()}
    declined = {name: found.reason.split(":")[0] for name, found in verdicts.items() if isinstance(found, Declined)}
    declined = {name: reason for name, reason in declined.items() if reason != "no labels"}  # of none that has no loss
    assert declined == {name: OTHERS[name].split(": ")[1] for name in DECLINED}
