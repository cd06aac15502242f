"""What only a GPU shows of transformers' models: kernels inside them, and peak memory."""

import pytest
import torch

pytest.importorskip("transformers")

from tests.support.host.gpu import extra_peak_bytes
from vocab_parallel_ce.integrations.transformers import audit, install, uninstall
from vocab_parallel_ce.integrations.transformers.audit_models import differs, step
from vocab_parallel_ce.integrations.transformers.tiny import load_class, tiny_inputs, tiny_model

pytestmark = pytest.mark.cuda
CLASSES = ["LlamaForCausalLM", "Gemma2ForCausalLM", "MixtralForCausalLM", "Qwen3ForCausalLM", "CohereForCausalLM"]


def on_gpu(name):
    model = tiny_model(load_class(name)).cuda()
    return model, {key: value.cuda() for key, value in tiny_inputs(model).items()}


@pytest.mark.parametrize("name", CLASSES)
def test_a_step_with_the_kernels_is_the_same(name):
    model, inputs = on_gpu(name)
    variants = [inputs, inputs | {"num_items_in_batch": torch.tensor(7, device="cuda")}]
    expected = [step(model, each) for each in variants]
    install(model)
    try:
        found = [step(model, each) for each in variants]
    finally:
        uninstall(model)
    assert audit(model)["fused"] == 2
    for own, other in zip(found, expected, strict=True):
        assert differs(own, other) is None


@pytest.mark.no_poison
def test_the_logits_never_exist():
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    n_columns, n_tokens = 50000, 8192
    with torch.device("cuda"):
        model = LlamaForCausalLM(LlamaConfig(vocab_size=n_columns, **sizes)).bfloat16()
        ids = torch.randint(0, n_columns, (4, n_tokens // 4))

    def train():
        model.zero_grad(set_to_none=True)
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()

    native = extra_peak_bytes(train)
    install(model)
    try:
        train()
        fused = extra_peak_bytes(train)
    finally:
        uninstall(model)
    logits = 2 * n_columns * n_tokens
    assert fused < 0.6 * logits < 2 * logits < native, (fused, native, logits)
