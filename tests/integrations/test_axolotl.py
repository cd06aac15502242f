"""axolotl's own training with the plugin and without: a model and a LoRA model, options, refusals, what is logged."""

import functools
import logging
import os

import pytest
import torch

pytest.importorskip("axolotl")
os.environ.update({"AXOLOTL_DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1"})  # axolotl asks the network otherwise

import yaml
from axolotl.cli.config import load_cfg
from axolotl.common.datasets import TrainDatasetMeta
from axolotl.integrations.base import PluginManager
from axolotl.train import train
from axolotl.utils import distributed
from datasets import Dataset
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from vocab_parallel_ce.integrations import transformers

pytestmark = pytest.mark.reference
VOCABULARY, STEPS, MICRO = 43, 3, 2
PLUGIN = "vocab_parallel_ce.integrations.axolotl.CrossEntropyPlugin"
CUT = "axolotl.integrations.cut_cross_entropy.CutCrossEntropyPlugin"
LIGER = "axolotl.integrations.liger.LigerPlugin"
OPTIONS = {"chunk_size": 4, "valid_tokens": None}
KERNELS = dict.fromkeys(("lora_mlp_kernel", "lora_qkv_kernel", "lora_o_kernel", "lora_embedding_kernel"), False)
LORA = {"adapter": "lora", "lora_r": 4, "lora_alpha": 8, "lora_target_linear": True, **KERNELS}  # which need a GPU
LOGGER = logging.getLogger("axolotl.vocab_parallel_ce")


@pytest.fixture(scope="module")
def base_model(tmp_path_factory):
    """A model and its tokenizer on disk."""
    path = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1}
    LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, **sizes, **ids)).save_pretrained(path)
    words = {word: i for i, word in enumerate(["<pad>", "<eos>", *(f"word{i}" for i in range(VOCABULARY - 2))])}
    special = {"pad_token": "<pad>", "bos_token": "<eos>", "eos_token": "<eos>", "unk_token": "<pad>"}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(path)
    return str(path)


@pytest.fixture
def configured(base_model, tmp_path, monkeypatch):
    """What axolotl makes of a YAML file with these lines too."""
    monkeypatch.setattr(distributed, "distributed_state", None)  # that of another test is reset

    def load(**lines):
        PluginManager.get_instance().plugins.clear()  # which axolotl keeps in a process
        given = {"base_model": base_model, "datasets": [{"path": "none", "type": "completion"}], "sequence_len": 32}
        given |= {"max_steps": STEPS, "micro_batch_size": 2, "gradient_accumulation_steps": MICRO, "logging_steps": 1}
        given |= {"optimizer": "sgd", "learning_rate": 0.5, "lr_scheduler": "constant", "output_dir": str(tmp_path)}
        given |= {"bf16": False, "save_strategy": "no", "attn_implementation": "sdpa", "seed": 1}
        (tmp_path / "axolotl.yml").write_text(yaml.safe_dump(given | lines))
        return load_cfg(str(tmp_path / "axolotl.yml"))

    yield load
    PluginManager.get_instance().plugins.clear()


def trained(cfg):
    """Losses and norms of gradients ``[STEPS, 2]``, and the model after steps of SGD."""
    rows = [[1 + (7 * i + 3 * j) % (VOCABULARY - 1) for j in range(5 + i % 9)] for i in range(24)]
    labels = [[-100, *row[1:]] for row in rows]
    masks = [[1] * len(row) for row in rows]
    data = Dataset.from_dict({"input_ids": rows, "labels": labels, "attention_mask": masks})
    torch.manual_seed(0)  # LoRA's weights
    model, _, trainer = train(cfg=cfg, dataset_meta=TrainDatasetMeta(data, None, STEPS))
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    return torch.tensor([[entry[name] for name in ("loss", "grad_norm")] for entry in logs]), model


@pytest.mark.parametrize("adapter", [{}, LORA], ids=["model", "LoRA"])
def test_training_has_axolotls_numbers(adapter, configured, caplog):
    own, own_model = trained(configured(**adapter))
    assert not transformers.report().installed
    LOGGER.addHandler(caplog.handler)
    cfg = configured(**adapter, plugins=[PLUGIN], vocab_parallel_ce=OPTIONS)
    curve, model = trained(cfg)
    LOGGER.removeHandler(caplog.handler)
    assert transformers.report().calls == {"fused": STEPS * MICRO}
    assert LlamaForCausalLM.forward.vocab_parallel_ce == ("lazy", OPTIONS)
    assert own.shape == (STEPS, 2) and own.min() > 0.1
    torch.testing.assert_close(curve, own, rtol=1e-5, atol=0)
    weights, own_weights = (dict(each.named_parameters()) for each in (model, own_model))
    torch.testing.assert_close(weights, own_weights, rtol=1e-5, atol=1e-6)
    said = "\n".join(record.getMessage() for record in caplog.records)
    assert "transformers: installed" in said and "modeling_llama.LlamaForCausalLM.forward" in said
    PluginManager.get_instance().post_train_unload(cfg)
    assert not transformers.report().installed


@pytest.mark.parametrize(
    ("lines", "error", "message"),
    [
        ({"vocab_parallel_ce": {"chunk": 4}}, TypeError, "chunk: expected an option of install"),
        ({"vocab_parallel_ce": {"mechanism": "fast"}}, ValueError, "mechanism: expected one of lazy, rewrite"),
        ({"vocab_parallel_ce": {"chunk_size": 0}}, ValueError, "chunk_size"),
        ({"vocab_parallel_ce": False}, ValueError, "vocab_parallel_ce"),
        ({"plugins": [PLUGIN, CUT]}, ValueError, "cut_cross_entropy: expected one cross-entropy"),
        ({"plugins": [LIGER, PLUGIN], "liger_cross_entropy": True}, ValueError, "liger_cross_entropy: expected one"),
        (
            {"plugins": [PLUGIN, LIGER], "liger_fused_linear_cross_entropy": True},
            ValueError,
            "liger_fused_linear_cross_entropy: expected one",
        ),
        ({"chunked_cross_entropy": True}, ValueError, "chunked_cross_entropy: expected one"),
        ({"flash_attn_cross_entropy": True}, ValueError, "flash_attn_cross_entropy: expected one"),
    ],
)
def test_what_is_refused_before_data_and_model_are_made(lines, error, message, configured):
    with pytest.raises(error, match=message):
        configured(**({"plugins": [PLUGIN]} | lines))
    assert not transformers.report().installed


def test_other_plugins_whose_cross_entropy_is_off(configured):
    lines = functools.partial(configured, plugins=[CUT, LIGER, PLUGIN], liger_rms_norm=True)
    assert lines(cut_cross_entropy=False).vocab_parallel_ce is None
