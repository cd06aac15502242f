"""Tiny, randomly initialised models of transformers' causal-LM classes, and inputs for them.

A config is shrunk by the names of its attributes: `SMALL` says what an attribute becomes, whichever model it belongs
to. `OVERRIDES` holds what a single model type needs beyond that.

Logits are large: their standard deviation is about 5 to 12. Scales, softcaps and biases of the head are non-trivial.
A loss that forgets one of them is then visibly wrong.
"""

from __future__ import annotations

import inspect
from copy import deepcopy
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from vocab_parallel_ce.integrations.transformers.targets import causal_lm_names

VOCABULARY = 99
LAYERS = 2
BATCH, LENGTH = 2, 12

# Standard deviation of the head's weights: 1, and more where hidden states are small.
HEAD_STD = {"Qwen4ExpForCausalLM": 3.0}

# Small value -> names of the attributes that take it, in every config where they hold a positive integer.
_SIZES: tuple[tuple[int, str], ...] = (
    (VOCABULARY, "vocab_size vocab_size_per_layer_input decoder_vocab_size n_words audio_vocab_size"),
    (
        LAYERS,
        "num_hidden_layers n_layer n_layers num_layers decoder_layers encoder_layers num_decoder_layers"
        " num_encoder_layers num_blocks depth max_window_layers attention_layers conf_num_hidden_layers"
        " num_layers_per_stack",
    ),
    (
        64,
        "hidden_size d_model n_embd embedding_size emb_dim lru_width word_embed_proj_dim hidden_size_global"
        " input_embedding_size output_embedding_size backbone_hidden_size router_hidden_size"
        " max_position_embeddings n_positions n_ctx max_seq_len max_source_positions max_target_positions"
        " encoder_hash_byte_group_vocab pronunciation_vocab_size shape_vocab_size image_size ngram_vocab_size_base",
    ),
    (
        96,
        "intermediate_size moe_intermediate_size ffn_dim decoder_ffn_dim encoder_ffn_dim dim_ff dff d_ff d_inner"
        " shared_expert_intermediate_size shared_experts_intermediate_size moe_shared_expert_intermediate_size"
        " shared_intermediate_size ffn_hidden_size expert_ffn_hidden_size feed_forward_size dense_intermediate_size"
        " intermediate_size_mlp mlp_dim",
    ),
    (
        16,
        "head_dim swa_head_dim kv_channels dim_head v_head_dim qk_nope_head_dim attention_head_size d_kv d_head"
        " linear_key_head_dim linear_value_head_dim linear_head_dim index_head_dim kv_lora_rank q_lora_rank o_lora_rank"
        " laurel_rank hidden_size_per_layer_input state_size mamba_d_state ssm_state_size",
    ),
    (
        8,
        "qk_rope_head_dim rotary_dim sliding_window sliding_window_size window_size attention_window_size index_topk"
        " chunk_size mamba_chunk_size",
    ),
    (
        4,
        "num_attention_heads n_head n_heads num_heads decoder_attention_heads encoder_attention_heads attention_heads"
        " num_decoder_attention_heads num_encoder_attention_heads swa_num_attention_heads linear_num_heads"
        " index_n_heads num_experts n_routed_experts num_local_experts moe_num_experts zero_expert_num",
    ),
    (3, "pad_token_id"),
    (
        2,
        "num_key_value_heads num_kv_heads swa_num_key_value_heads linear_num_key_heads linear_num_value_heads"
        " num_experts_per_tok num_experts_per_token moe_topk moe_k moe_top_k n_group num_expert_group"
        " eos_token_id sep_token_id forced_eos_token_id",
    ),
    (
        1,
        "topk_group n_shared_experts num_shared_experts moe_num_shared_experts first_k_dense_replace num_dense_layers"
        " bos_token_id decoder_start_token_id",
    ),
    (0, "num_kv_shared_layers"),
)
SIZES: dict[str, int] = {name: size for size, names in _SIZES for name in names.split()}

# Attributes that are set wherever a config has them, even as None: scales and softcaps of the logits, strong layers,
# auxiliary losses that count, and no caches.
ALWAYS: dict[str, Any] = {
    "final_logit_softcapping": 8.0,
    "logits_soft_cap": 8.0,
    "output_logit_soft_cap": 8.0,
    "logit_scale": 0.7,
    "logits_scaling": 1.3,
    "logits_mup_width_multiplier": 1.2,
    "lm_head_multiplier": 1.4,
    "initializer_range": 0.1,
    "init_std": 0.1,
    "router_aux_loss_coef": 0.1,
    "aux_loss_coef": 0.1,
    "moe_loss_weight": 0.1,
    "output_router_logits": True,
    "lm_head_bias": True,
    "is_decoder": True,
    "use_cache": False,
}


def _rope(*sections: int) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": 1e4, "mrope_section": list(sections)}


# Config's class -> what it needs beyond the names above.
OVERRIDES: dict[str, dict[str, Any]] = {
    "CohereCompassTextConfig": {"rope_parameters": {"full_attention": _rope(3, 3, 2)}},
    "DbrxAttentionConfig": {"rope_theta": 1e4, "kv_n_heads": 2, "clip_qkv": 8.0},
    "DeepseekV2Config": {"num_experts_per_tok": 2},
    "DogeConfig": {"output_router_logits": False},
    "Dots1Config": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "Dots3NoteTextConfig": {
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 4,
        "swa_head_dim": 24,
        "swa_qk_nope_head_dim": 16,
        "swa_v_head_dim": 16,
        "swa_q_lora_rank": 16,
        "swa_kv_lora_rank": 16,
    },
    "FlintConfig": {"mlp_only_layers": [0]},
    "Gemma3nTextConfig": {"intermediate_size": 96},
    "GPTNeoConfig": {"attention_types": [[["global", "local"], 1]]},
    "Inkling2TextConfig": {"unpadded_vocab_size": 97},
    "InklingTextConfig": {"unpadded_vocab_size": 97},
    "Lfm2MoeConfig": {"layer_types": ["conv", "full_attention"]},
    "Mamba2Config": {"head_dim": 32, "n_groups": 2},
    "MiniCPM3Config": {"dim_model_base": 50},
    "NemotronConfig": {"num_key_value_heads": 2},
    "Qwen2VLTextConfig": {"rope_parameters": _rope(2, 3, 3)},
    "Qwen2_5_VLTextConfig": {"rope_parameters": _rope(2, 3, 3)},
    "Qwen4ExpTextConfig": {
        "indexer_n_heads": 4,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 8,
        "indexer_compress_ratio": 2,
    },
    "ReformerConfig": {
        "axial_pos_shape": (3, 4),
        "axial_pos_embds_dim": (16, 48),
        "attn_layers": ["local", "lsh"],
        "num_hidden_layers": 2,
    },
    "T5Config": {"decoder_start_token_id": 0},
    "XmodConfig": {"default_language": "en_XX"},
    "Zamba2Config": {"layers_block_type": ["linear_attention", "hybrid"]},
    "ZambaConfig": {"layers_block_type": ["hybrid", "hybrid"]},
    "ZayaConfig": {"num_experts_per_tok": 1},
}


def class_names() -> list[str]:
    """Return the distinct class names of transformers' causal-LM auto mapping, sorted."""
    return sorted(causal_lm_names())


def load_class(name: str) -> type[PreTrainedModel]:
    """Import the class `name`. Raises what transformers raises if it cannot: ImportError, AttributeError."""
    return getattr(transformers, name)


def _small(name: str, value: Any) -> Any:
    """Return the tiny value of a config's attribute, or None to leave it to the config."""
    if isinstance(value, PreTrainedConfig):
        return tiny_config(type(value))
    if name in ALWAYS:
        return ALWAYS[name]
    if isinstance(value, bool):
        return None
    if isinstance(value, (int, float)) and ("drop" in name or "jitter" in name):
        return type(value)(0)
    if name.endswith("token_id") and isinstance(value, (int, list)):
        return SIZES.get(name, 4)
    if name in SIZES and (name == "head_dim" or isinstance(value, int) and value > 0):
        return SIZES[name]
    if name.endswith(("layer_types", "block_type")) and isinstance(value, list) and len(value) > LAYERS:
        # One layer of the first kind and one of the last, such as sliding and full attention.
        kinds = list(dict.fromkeys(value))
        return [kinds[0], kinds[-1]]
    return None


def tiny_config(config_class: type[PreTrainedConfig]) -> PreTrainedConfig:
    """Return a tiny config of `config_class`, made by shrinking its default one."""
    overrides = deepcopy(OVERRIDES.get(config_class.__name__, {}))
    full = vars(config_class())
    small = {name: _small(name, value) for name, value in full.items()}
    if "qk_rope_head_dim" in full:
        # Latent attention: the rotary embedding reads `head_dim`, and each query has a key of its own.
        small |= {"head_dim": small["qk_rope_head_dim"], "num_key_value_heads": small["num_attention_heads"]}
    small = {name: value for name, value in small.items() if value is not None}
    return config_class(**(small | overrides))


def tiny_model(cls: type[PreTrainedModel], seed: int = 0) -> PreTrainedModel:
    """Return a tiny fp32 CPU model of class `cls`, the same one for the same seed. Dropout and caches are off.

    The model has 2 layers, and its auxiliary loss is on if the class has one. It is in training mode; evaluation mode
    gives the same numbers. Torch's global random state stays as it was. Raises ValueError if the class takes no labels,
    and whatever the config or the model raises, such as ImportError for a missing package.
    """
    if "labels" not in inspect.signature(cls.forward).parameters:
        raise ValueError(f"{cls.__name__}: forward takes no labels, so that it has no loss")
    config_class: Any = cls.config_class
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = cls(tiny_config(config_class)).float()
        with torch.no_grad():
            _enlarge_logits(model, HEAD_STD.get(cls.__name__, 1.0))
    if not any("router_logits" in (getattr(module, "_can_record_outputs", None) or {}) for module in model.modules()):
        # Some classes of transformers 5.17 record no routers' logits, and then fail at the auxiliary loss.
        model.config.output_router_logits = False
    return model


def _enlarge_logits(model: PreTrainedModel, std: float) -> None:
    """Overwrite the head's weights and biases, parameters that are zeros, and the signs of half of the norms' weights.

    Without these signs, a model with tied embeddings predicts each input token with a logit far above all others.
    """
    for parameter in model.parameters():
        if not parameter.any():
            parameter.normal_(0.0, 0.1)
    heads: Any = model.get_output_embeddings()
    head: Any
    for head in heads if isinstance(heads, nn.ModuleList) else [heads]:
        head.weight.normal_(0.0, std)
        if head.bias is not None:
            head.bias.normal_(0.0, 2.0)
    for module in model.modules():
        weight = getattr(module, "weight", None)
        if "Norm" in type(module).__name__ and isinstance(weight, Tensor) and weight.dim() == 1:
            # Most norms multiply by w or by 1 + w, and begin with a factor of 1: it becomes -1.
            weight -= 2.0 * torch.randint_like(weight, 2)


def tiny_inputs(model: PreTrainedModel, seed: int = 0) -> dict[str, Tensor]:
    """Return inputs of the model's forward: int64 ids and labels [2, 12], and a mask if it takes one.

    Labels differ from the ids, and six of them are -100. The mask hides the last two tokens of the second sequence.
    GIT also gets `pixel_values`. MusicGen has ids [2 * codebooks, 12] and labels [2, 12, codebooks].
    """
    generator = torch.Generator().manual_seed(seed)

    def tokens(*shape: int) -> Tensor:
        return torch.randint(5, VOCABULARY - 3, shape, generator=generator)

    inputs = {"input_ids": tokens(BATCH, LENGTH), "labels": tokens(BATCH, LENGTH)}
    if "attention_mask" in inspect.signature(model.forward).parameters:
        inputs["attention_mask"] = torch.ones(BATCH, LENGTH, dtype=torch.int64)
        inputs["attention_mask"][1, -2:] = 0
    if model.config.model_type == "git":
        size = model.config.vision_config.image_size
        inputs["pixel_values"] = torch.randn(BATCH, 3, size, size, generator=generator)
    if "musicgen" in model.config.model_type:
        codebooks = model.config.num_codebooks
        inputs |= {"input_ids": tokens(BATCH * codebooks, LENGTH), "labels": tokens(BATCH, LENGTH, codebooks)}
    inputs["labels"][0, :3] = inputs["labels"][1, -3:] = -100
    return inputs
