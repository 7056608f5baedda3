"""Megatron's flags and settings for the architecture of a model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mcore_rl.model.config_json import LatentAttention, ModelShape
from mcore_rl.model.delta_net import DeltaNet
from mcore_rl.model.experts import Experts
from mcore_rl.model.mamba import Mamba
from mcore_rl.model.rope import YARN_WITHOUT_FLAG
from mcore_rl.model.sparse_attention import sparse_attention_flags

CLAMPED_AT = 7.0  # both halves of gpt-oss's SwiGLU; the only value that vLLM supports


def settings_without_flag(shape: ModelShape) -> dict[str, Any]:
    """Return the settings of Megatron's TransformerConfig that `shape` needs and no flag sets.

    Set them on Megatron's parsed arguments, from which it fills its configuration by name.
    """
    if shape.latent is None or shape.rope["rope_type"] != "yarn":
        return {}
    return {name: shape.rope.get(name, value) for name, value in YARN_WITHOUT_FLAG.items()}


def megatron_flags(shape: ModelShape) -> list[str]:
    """Return the architecture of `shape` as Megatron command-line tokens."""
    yarn = shape.rope["rope_type"] == "yarn" and not shape.latent
    rotates = shape.rope["rope_type"] != "none"
    # True: a flag without a value. None and False: the flag is left out.
    flags: dict[str, Any] = {
        "--num-layers": shape.num_layers,
        "--hidden-size": shape.hidden_size,
        "--ffn-hidden-size": shape.ffn_hidden_size,
        "--num-attention-heads": shape.num_heads,
        "--max-position-embeddings": shape.max_positions,
        "--normalization": "RMSNorm",
        "--norm-epsilon": shape.norm_epsilon,
        "--position-embedding-type": "yarn" if yarn else "rope" if rotates else "none",
        "--rotary-base": int(shape.rope["rope_theta"]) if rotates else None,
        "--rotary-percent": shape.rope.get("partial_rotary_factor"),
        "--vocab-size": shape.vocab_size,
        "--swiglu": not shape.clamps_glu and not shape.squared_relu,
        "--squared-relu": shape.squared_relu,
        "--quick-geglu": shape.clamps_glu,
        "--glu-linear-offset": 1.0 if shape.clamps_glu else None,
        "--activation-func-clamp-value": CLAMPED_AT if shape.clamps_glu else None,
        "--disable-bias-linear": not shape.linear_biases,
        "--qk-layernorm": shape.qk_norm,
        "--add-qkv-bias": shape.qkv_bias,
        "--attention-output-gate": shape.output_gate,
        "--apply-layernorm-1p": shape.zero_centered_norms,
        "--untie-embeddings-and-output-weights": not shape.tied_embeddings,
    }
    if shape.latent:
        flags |= _latent_attention_flags(shape.latent, shape.rope)
        if shape.hidden_size % shape.num_heads:  # Megatron asserts this, though MLA ignores it
            flags["--kv-channels"] = shape.head_dim
    else:
        flags["--kv-channels"] = shape.head_dim
        if shape.num_kv_heads != shape.num_heads:
            flags |= {"--group-query-attention": True, "--num-query-groups": shape.num_kv_heads}
    if shape.indexer:
        flags |= sparse_attention_flags(shape.indexer)
    if shape.attention_sinks:
        flags["--softmax-type"] = "learnable"
    if shape.delta_net:
        flags |= _delta_net_flags(shape.delta_net, shape.is_linear_layer)
    if shape.mamba:
        flags |= _mamba_flags(shape.mamba)
    if shape.sliding_window:
        flags["--window-size"] = f"{shape.sliding_window - 1},0"  # positions before and after
        flags["--window-attn-skip-freq"] = 2
    if shape.rope["rope_type"] == "llama3":
        flags |= {"--use-rope-scaling": True, "--rope-scaling-factor": shape.rope["factor"]}
    if yarn:
        flags |= _yarn_flags(shape.rope)
    if shape.experts:
        flags |= _expert_flags(shape.experts, shape.is_moe_layer)
    return [
        token
        for flag, value in flags.items()
        if value is not None and value is not False
        for token in ([flag] if value is True else [flag, str(value)])
    ]


def _yarn_flags(rope: Mapping[str, Any]) -> dict[str, Any]:
    """Return the YaRN settings of grouped attention."""
    rounds = rope.get("truncate", True)
    return {
        "--rotary-scaling-factor": rope["factor"],
        "--yarn-original-max-position-embeddings": rope["original_max_position_embeddings"],
        "--yarn-beta-fast": rope["beta_fast"],
        "--yarn-beta-slow": rope["beta_slow"],
        f"--{'' if rounds else 'no-'}yarn-correction-range-round-to-int": True,
    }


def _per_layer(values: tuple[bool, ...]) -> str:
    """Return Megatron's notation for a value of 0 or 1 for every layer."""
    return "([" + ",".join(str(int(x)) for x in values) + "])"


def _delta_net_flags(delta_net: DeltaNet, is_linear_layer: tuple[bool, ...]) -> dict[str, Any]:
    return {
        "--experimental-attention-variant": "gated_delta_net",
        "--linear-attention-freq": _per_layer(is_linear_layer),
        "--linear-conv-kernel-dim": delta_net.conv_width,
        "--linear-key-head-dim": delta_net.key_head_dim,
        "--linear-value-head-dim": delta_net.value_head_dim,
        "--linear-num-key-heads": delta_net.num_key_heads,
        "--linear-num-value-heads": delta_net.num_value_heads,
    }


def _mamba_flags(mamba: Mamba) -> dict[str, Any]:
    return {
        "--mamba-num-heads": mamba.num_heads,
        "--mamba-head-dim": mamba.head_dim,
        "--mamba-num-groups": mamba.num_groups,
        "--mamba-state-dim": mamba.state_size,
    }


def _latent_attention_flags(latent: LatentAttention, rope: Mapping[str, Any]) -> dict[str, Any]:
    flags = {
        "--multi-latent-attention": True,
        "--q-lora-rank": latent.q_lora_rank,
        "--kv-lora-rank": latent.kv_lora_rank,
        "--qk-head-dim": latent.qk_nope_head_dim,
        "--qk-pos-emb-head-dim": latent.qk_rope_head_dim,
        "--v-head-dim": latent.v_head_dim,
    }
    if rope["rope_type"] != "yarn":
        return flags | {"--rope-type": "rope"}
    return flags | {
        "--rope-type": "yarn",
        "--rotary-scaling-factor": rope["factor"],
        "--mscale": rope.get("mscale", 1.0),
        "--mscale-all-dim": rope.get("mscale_all_dim", 0.0),
    }


def _expert_flags(experts: Experts, is_moe_layer: tuple[bool, ...]) -> dict[str, Any]:
    # Without normalisation, DeepSeek-V2 and Qwen3 weigh by the softmax over all experts. With it,
    # the result equals the softmax over the chosen experts, which is Megatron's default order.
    pre_softmax = experts.score_function == "softmax" and not experts.normalize_topk
    return {
        "--num-experts": experts.num_experts,
        "--moe-router-topk": experts.topk,
        "--moe-ffn-hidden-size": experts.hidden_size,
        "--moe-layer-freq": _per_layer(is_moe_layer),
        "--moe-shared-expert-intermediate-size": experts.shared_hidden_size,
        "--moe-shared-expert-gate": experts.has_shared_gate,
        "--moe-router-score-function": experts.score_function,
        "--moe-router-pre-softmax": pre_softmax,
        "--moe-router-enable-expert-bias": experts.has_bias,
        "--moe-router-topk-scaling-factor": (
            None if experts.scaling_factor == 1.0 else experts.scaling_factor
        ),
        "--moe-router-num-groups": experts.num_groups,
        "--moe-router-group-topk": experts.topk_groups,
    }
