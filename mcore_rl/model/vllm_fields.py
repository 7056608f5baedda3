"""Fields of config.json that vLLM reads and mcore_rl does not map; a set field is refused.

vLLM would apply such a field, and Megatron would not. The tables list the configuration attributes
that appear in vLLM's sources; tests/unit/test_vllm_fields.py repeats the search and names the
fields that another version reads in addition.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

# Read by vLLM's own code around the models, for every model.
OF_ALL_MODELS = frozenset(
    """
    _dsv4_vl_inner attention_chunk_size attention_head_dim attn_config attn_logit_softcapping
    attn_type_list backbone_hidden_size block_configs chunk_size compress_ratios compression_config
    dual_chunk_attention_config embedding_size encoder encoder_config engram_layer_ids hc_count
    hc_mult hidden_size_per_head index_head_dim index_kpool index_n_heads index_topk
    indexer_n_heads is_causal is_heterogeneous is_mm_prefix_lm language_config layer_types
    layers_block_type llm_config mamba_chunk_size
    mamba_ssm_cache_dtype mamba_ssm_dtype max_source_positions mm_prefix_clamp_sliding_window
    mm_prefix_span_leading_pad_modulus multi_query new_decoder_architecture num_kv_shared_layers
    original_max_position_embeddings per_layer_config ple_layer_ids position_embedding_type
    rswa_window sliding_window text_config thinker_config transf_decoder use_bidirectional_attention
    vision_config vision_max_n_token vision_n_layers
    """.split()
)
_OF_DEEPSEEK = (
    "index_skip_topk_offset index_topk_freq index_topk_pattern indexer_rope_interleave "
    "llama_4_scaling moe_router_dtype"
)
_OF_LLAMA = "bias logit_scale qkv_bias"
# Read by a model's class: class name -> fields.
OF_CLASS: Mapping[str, frozenset[str]] = {
    name: frozenset(fields.split())
    for name, fields in {
        "DeepseekV2ForCausalLM": _OF_DEEPSEEK,
        "DeepseekV3ForCausalLM": _OF_DEEPSEEK,
        "DeepseekV32ForCausalLM": _OF_DEEPSEEK,
        "Glm4MoeLiteForCausalLM": _OF_DEEPSEEK,
        "GlmMoeDsaForCausalLM": _OF_DEEPSEEK,
        "LlamaForCausalLM": _OF_LLAMA,
        "MistralForCausalLM": (
            f"{_OF_LLAMA} ada_rms_norm_t_cond ada_rms_norm_t_cond_dim llama_4_scaling"
        ),
        "Qwen2ForCausalLM": "qk_norm",
        "Qwen3ForCausalLM": "qk_norm",
        "Qwen3MoeForCausalLM": "shared_expert_intermediate_size",
        "Qwen3NextForCausalLM": "layer_scale qkv_bias",
        "Qwen3_5ForCausalLM": "layer_scale qk_norm qkv_bias",
        "Qwen3_5MoeForCausalLM": "layer_scale qk_norm qkv_bias",
    }.items()
}
# Values that equal vLLM's default, in addition to null, false, 0 and empty values of any field.
_AS_WITHOUT: Mapping[str, tuple[Any, ...]] = {
    "is_causal": (True,),
    "logit_scale": (1,),
    "moe_router_dtype": ("float32",),  # mcore_rl's routers use it
    "position_embedding_type": ("absolute", "rope"),
}


def unmapped_field(
    values: Mapping[str, Any], class_name: str, mapped: Collection[str]
) -> str | None:
    """Return a field that changes what vLLM's class computes and is not in `mapped`, or None."""
    read = OF_ALL_MODELS | OF_CLASS.get(class_name, frozenset())
    return next(
        (name for name in values if name in read - {*mapped} and _changes(name, values)), None
    )


def _changes(name: str, values: Mapping[str, Any]) -> bool:
    value = values[name]
    if not value and not (name == "is_causal" and value is False):
        return False
    if name == "layer_types":
        return bool(value != ["full_attention"] * len(value))
    if name == "sliding_window" and str(values.get("model_type")).startswith("qwen"):
        return False  # transformers drops it without use_sliding_window, which mcore_rl reads
    return value not in _AS_WITHOUT.get(name, ())
