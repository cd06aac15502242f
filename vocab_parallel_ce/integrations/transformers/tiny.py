"""Tiny, randomly initialised models of transformers' causal-LM classes, and inputs for them.

A config is shrunk by the names of its attributes: `SMALL` says what an attribute becomes, whichever model it belongs
to. `OVERRIDES` holds what a single model type needs beyond that.

Logits are large, with a standard deviation of about 8, and scales, softcaps and biases of the head are non-trivial.
A loss that forgets one of them is then visibly wrong.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

VOCABULARY = 99
LAYERS = 2
BATCH, LENGTH = 2, 12
HEAD_STD = 1.0

# Attribute's name -> value, for each config that has an integer of this name.
SMALL: dict[str, Any] = {}


def _same(value: Any, names: str) -> None:
    SMALL.update(dict.fromkeys(names.split(), value))


_same(VOCABULARY, "vocab_size vocab_size_per_layer_input decoder_vocab_size")
_same(64, "hidden_size d_model n_embd embedding_size lru_width word_embed_proj_dim hidden_size_global linear_head_dim")
_same(
    96,
    "intermediate_size moe_intermediate_size ffn_dim decoder_ffn_dim encoder_ffn_dim shared_expert_intermediate_size"
    " ffn_hidden_size expert_ffn_hidden_size n_inner dim_ff dff feed_forward_size dense_intermediate_size d_ff"
    " intermediate_size_mlp moe_shared_expert_intermediate_size shared_experts_intermediate_size d_inner",
)
_same(
    LAYERS,
    "num_hidden_layers n_layer n_layers num_layers decoder_layers encoder_layers num_decoder_layers"
    " num_encoder_layers num_blocks depth max_window_layers",
)
_same(
    4,
    "num_attention_heads n_head n_heads num_heads decoder_attention_heads encoder_attention_heads attention_heads"
    " num_decoder_attention_heads num_encoder_attention_heads swa_num_attention_heads index_n_heads linear_num_heads",
)
_same(2, "num_key_value_heads num_kv_heads swa_num_key_value_heads linear_num_key_heads linear_num_value_heads")
_same(16, "head_dim swa_head_dim kv_channels dim_head v_head_dim qk_nope_head_dim linear_key_head_dim d_kv d_head")
_same(16, "linear_value_head_dim index_head_dim kv_lora_rank q_lora_rank attention_head_size laurel_rank o_lora_rank")
_same(8, "qk_rope_head_dim rotary_dim sliding_window sliding_window_size window_size attention_window_size")
_same(4, "num_experts n_routed_experts num_local_experts moe_num_experts")
_same(2, "num_experts_per_tok num_experts_per_token moe_topk moe_k moe_top_k")
_same(2, "n_group num_expert_group")
_same(1, "topk_group n_shared_experts num_shared_experts moe_num_shared_experts first_k_dense_replace")
_same(64, "max_position_embeddings n_positions n_ctx max_seq_len")
_same(3, "pad_token_id")
_same(1, "bos_token_id decoder_start_token_id")
_same(2, "eos_token_id sep_token_id forced_eos_token_id")

# Scales and caps of the logits.
FLOATS: dict[str, float] = {
    "final_logit_softcapping": 5.0,
    "logits_soft_cap": 5.0,
    "output_logit_soft_cap": 5.0,
    "logit_scale": 0.7,
    "logits_scaling": 1.3,
    "lm_head_multiplier": 1.4,
}

# Booleans.
BOOLS: dict[str, bool] = {"use_cache": False, "output_router_logits": True, "is_decoder": True}

OVERRIDES: dict[str, dict[str, Any]] = {}


def class_names() -> list[str]:
    """Return the distinct class names of transformers' causal-LM auto mapping, sorted."""
    names: set[str] = set()
    for value in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values():
        names.update([value] if isinstance(value, str) else value)
    return sorted(names)


def load_class(name: str) -> type[PreTrainedModel]:
    """Import the class `name`. Raises ImportError or AttributeError if transformers cannot import it."""
    return getattr(transformers, name)


def _shrunk_value(name: str, value: Any, default: Any) -> Any:
    """Return the tiny value of a config's attribute, or None to leave it to the config."""
    if isinstance(value, PreTrainedConfig):
        return tiny_config(type(value))
    if isinstance(value, bool):
        return BOOLS.get(name)
    if "dropout" in name or name.endswith(("pdrop", "layerdrop", "jitter_noise")):
        return 0.0 if isinstance(value, (int, float)) else None
    if name in FLOATS:
        return FLOATS[name]
    if name.endswith("token_id") and isinstance(value, (int, list)):
        return SMALL.get(name, 4)
    if isinstance(value, int):
        return SMALL.get(name)
    if isinstance(value, (list, tuple)) and default is not None and "layer" in name:
        return type(value)(value[:LAYERS])
    return None


def tiny_config(config_class: type[PreTrainedConfig]) -> PreTrainedConfig:
    """Return a tiny config of `config_class`."""
    overrides = OVERRIDES.get(config_class.model_type, {})
    config = config_class(**overrides)
    kwargs = {}
    for name, value in vars(config).items():
        default = getattr(config_class, name, None)
        small = _shrunk_value(name, value, default)
        if small is not None:
            kwargs[name] = small
    return config_class(**(kwargs | overrides))


def tiny_model(cls: type[PreTrainedModel], seed: int = 0) -> PreTrainedModel:
    """Return a tiny fp32 CPU model of class `cls`, the same one for the same seed. Dropout and caches are off.

    Leaves torch's global random state as it was. Raises what the config or the model raises, ImportError among it.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = cls(tiny_config(cls.config_class)).float()
        head = model.get_output_embeddings()
        with torch.no_grad():
            if isinstance(head, nn.Linear):
                head.weight.normal_(0.0, HEAD_STD)
                if head.bias is not None:
                    head.bias.normal_()
    return model


def tiny_inputs(model: PreTrainedModel, seed: int = 0) -> dict[str, Tensor]:
    """Return inputs of the model's forward: int64 [2, 12] ids, labels with some -100, and a mask of right padding."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(5, VOCABULARY, (BATCH, LENGTH), generator=generator)
    labels = ids.clone()
    labels[0, :3] = labels[1, -3:] = -100
    inputs = {"input_ids": ids, "labels": labels}
    if "attention_mask" in inspect.signature(model.forward).parameters:
        inputs["attention_mask"] = torch.ones_like(ids)
        inputs["attention_mask"][1, -2:] = 0
    return inputs
