"""install() without a model: every class of language models, whatever list of transformers it stands on, or on none."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

transformers = pytest.importorskip("transformers")

from tests.support.frameworks.transformers_steps import FUSED, calls_of, own_step  # noqa: E402
from vocab_parallel_ce.integrations.transformers import install, patch, report, uninstall  # noqa: E402
from vocab_parallel_ce.integrations.transformers.audit_models import differs, step  # noqa: E402
from vocab_parallel_ce.integrations.transformers.heads import NOT_USED  # noqa: E402
from vocab_parallel_ce.integrations.transformers.patch import NO_HEAD, WHEN_BUILT, WITHOUT_LABELS  # noqa: E402
from vocab_parallel_ce.integrations.transformers.targets import causal_lm_names, is_language_model  # noqa: E402
from vocab_parallel_ce.integrations.transformers.tiny import tiny_config, tiny_inputs, tiny_model  # noqa: E402

pytestmark = pytest.mark.reference
Llama = transformers.LlamaForCausalLM
# Class -> what makes its logits; None: nothing, it is fused. The bias of a Bart is no part of its head.
SAMPLE = {
    "BartForConditionalGeneration": "add made the logits",
    "BertForMaskedLM": None,
    "EncoderDecoderModel": None,
    "GPT2DoubleHeadsModel": None,
    "Llama4ForConditionalGeneration": None,
    "LlavaForConditionalGeneration": None,
    "Mistral3ForConditionalGeneration": None,
    "MobileBertForMaskedLM": NOT_USED,  # it multiplies by its head's weight without calling the head
    "Qwen2VLForConditionalGeneration": None,
    "Qwen2_5_VLForConditionalGeneration": None,
    "T5ForConditionalGeneration": None,
    "WhisperForConditionalGeneration": None,
}


def built(cls):
    """A tiny model; that of an encoder and a decoder has two configurations."""
    if cls is not transformers.EncoderDecoderModel:
        return tiny_model(cls)
    config = tiny_config(transformers.BertConfig)
    two = transformers.EncoderDecoderConfig.from_encoder_decoder_configs(config, config)  # two copies
    two.pad_token_id, two.decoder_start_token_id = config.pad_token_id, 0
    torch.manual_seed(0)
    return cls(two).train()


def inputs_of(model):
    inputs = tiny_inputs(model)
    if model.main_input_name == "input_features":  # speech
        frames = torch.randn(2, model.config.num_mel_bins, 2 * model.config.max_source_positions)
        return {"input_features": frames, "labels": inputs["labels"]}
    return inputs


@pytest.mark.parametrize("name", SAMPLE)
def test_classes_outside_of_the_causal_mapping(name, caplog):
    cls, reason = getattr(transformers, name), SAMPLE[name]
    assert name not in causal_lm_names() and is_language_model(cls)
    model = built(cls)
    inputs = inputs_of(model)
    expected = own_step(model, inputs)
    made = install()
    assert f"{cls.__module__}.{name}.forward" in made.rebound and WHEN_BUILT in made.rebound
    for each in (model, built(cls)):
        assert differs(step(each, inputs), expected) is None
        assert calls_of(each) == (FUSED if reason is None else {reason: 1})
    said = [record.getMessage() for record in caplog.records if record.name == "vocab_parallel_ce"]
    assert len(said) == (0 if reason is None else 2) and all(name in line and reason in line for line in said)
    uninstall()
    assert not hasattr(cls.forward, "vocab_parallel_ce") and not report().installed


# Classes of a user


class Whole(Llama):
    """Has a forward of its own, and a loss that needs no shift."""

    def forward(self, input_ids=None, labels=None, **kwargs):
        logits = self.lm_head(self.model(input_ids)[0])
        loss = None if labels is None else F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return transformers.modeling_outputs.CausalLMOutput(loss=loss, logits=logits)


class Around(Llama):
    """Takes its loss of the logits that its base class returns without labels."""

    def forward(self, input_ids=None, labels=None, **kwargs):
        outputs = super().forward(input_ids, **kwargs)
        loss = None if labels is None else F.cross_entropy(outputs.logits.flatten(0, 1), labels.flatten())
        return transformers.modeling_outputs.CausalLMOutput(loss=loss, logits=outputs.logits)


class Passes(Llama):
    """Has no parameter of that name."""

    def forward(self, *args, **kwargs):
        return super().forward(*args, **kwargs)


class Weighs(Llama):
    """Has a loss that cannot be fused."""

    def forward(self, input_ids=None, labels=None, **kwargs):
        outputs = super().forward(input_ids, **kwargs)
        weight = torch.ones(outputs.logits.shape[-1])
        loss = F.cross_entropy(outputs.logits.flatten(0, 1), labels.flatten(), weight=weight)
        return transformers.modeling_outputs.CausalLMOutput(loss=loss, logits=outputs.logits)


class Raises(Whole):
    """Has a method for a head that this class does not have, as some of transformers' do."""

    def get_output_embeddings(self):
        return self.nothing


class Inside(transformers.PreTrainedModel, transformers.GenerationMixin):
    """Has no head, and a model inside that has one."""

    config_class, _supports_sdpa = transformers.LlamaConfig, True

    def __init__(self, config):
        super().__init__(config)
        self.inner = Llama(config)
        self.post_init()

    def forward(self, input_ids=None, labels=None, shifts=True):
        if shifts:
            return self.inner(input_ids, labels=labels)
        outputs = self.inner(input_ids)
        outputs.loss = F.cross_entropy(outputs.logits.flatten(0, 1), labels.flatten())
        return outputs


@pytest.mark.parametrize("built", ["before", "after"])
@pytest.mark.parametrize(
    "cls,options,event",
    [
        (Whole, {}, "fused"),
        (Around, {}, "fused"),
        (Passes, {}, "fused"),
        (Weighs, {}, "cross_entropy made the logits"),
        (Raises, {}, NO_HEAD),
        (Inside, {}, "fused"),
        (Inside, {"shifts": False}, NO_HEAD),
    ],
)
def test_classes_of_a_user(llama, cls, options, event, built, caplog):
    """A forward of its own is fused, or named with what made its logits: never as a call without labels."""
    inputs = {name: value for name, value in tiny_inputs(llama).items() if name != "attention_mask"} | options

    def made():
        model = cls(llama.config).train()
        (model.inner if cls is Inside else model).load_state_dict(llama.state_dict())
        return model

    model = made()
    expected = own_step(model, inputs)
    install()
    model = model if built == "before" else made()
    assert differs(step(model, inputs), expected) is None
    assert calls_of(model) == {event: 1}
    said = [record.getMessage() for record in caplog.records if record.name == "vocab_parallel_ce"]
    assert len(said) == (event != "fused") and all(cls.__name__ in line and event in line for line in said)


# Reasons


def quantise(model):
    head = model.language_model.lm_head
    model.language_model.lm_head = type("Quantised", (nn.Linear,), {})(head.in_features, head.out_features, bias=False)


@pytest.mark.parametrize(
    "mechanism,change,reason",
    [("lazy", quantise, "Quantised, not an nn.Linear"), ("rewrite", None, "cannot be rewritten: ")],
)
def test_a_model_inside_of_one_with_labels_is_not_told_that_there_were_none(mechanism, change, reason, caplog):
    model = tiny_model(transformers.Llama4ForConditionalGeneration).train()
    if change is not None:
        change(model)
    inputs = tiny_inputs(model)
    expected = own_step(model, inputs)
    left = install(mechanism=mechanism).left
    for _ in range(2):
        assert differs(step(model, inputs), expected) is None
    ((event, number),) = calls_of(model).items()
    assert reason in event and number == 2
    (said,) = [record.getMessage() for record in caplog.records if record.name == "vocab_parallel_ce"]
    assert event in said and "Llama4ForConditionalGeneration" in said and WITHOUT_LABELS not in said
    assert mechanism == "lazy" or left[f"{type(model).__module__}.{type(model).__name__}"] == event
    assert report().calls[event] >= 2


@pytest.mark.parametrize("imported", [True, False])
@pytest.mark.parametrize("change", [{"mechanism": "rewrite"}, {"chunk_size": 64}], ids=str)
def test_other_options_for_what_is_installed_are_refused(change, imported, monkeypatch):
    """Also if no class is imported yet: the first model of each is built later."""
    if not imported:
        monkeypatch.setattr(patch, "imported_classes", list)
    before = install()
    assert install() == before
    with pytest.raises(ValueError, match="has mechanism and options .* already: uninstall\\(\\) them first"):
        install(**change)
    assert report() == before
