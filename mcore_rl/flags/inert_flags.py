"""Flags of the architecture that a given model does not need.

Launch scripts give some flags for groups of models, such as `--kv-channels` for latent attention.
config.json has no such part, but does not contradict it. Other flags say again what
`megatron_flags` says, such as `--hybrid-layer-pattern`. Both follow Megatron 0.19.2.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mcore_rl.flags.megatron_flags import ARCHITECTURE
from mcore_rl.model.config_json import ModelShape
from mcore_rl.model.hybrid_pattern import halves

# Read by latent attention alone (MLATransformerConfig).
_OF_LATENT = frozenset(
    "kv_lora_rank q_lora_rank qk_head_dim qk_pos_emb_head_dim v_head_dim rope_type mscale "
    "mscale_all_dim".split()
)
# Read if --position-embedding-type is yarn; for latent attention Megatron has no flag for them.
_OF_YARN = frozenset(
    "yarn_beta_fast yarn_beta_slow yarn_original_max_position_embeddings "
    "yarn_correction_range_round_to_int".split()
)
_OF_EXPERTS = frozenset(name for name in ARCHITECTURE if name.startswith("moe_"))
# Megatron's own layers of a model with Mamba-2; the first module is its name until 0.18.
HYBRID_SPECS = (
    ["megatron.core.models.mamba.mamba_layer_specs", "mamba_stack_spec"],
    ["megatron.core.models.hybrid.hybrid_layer_specs", "hybrid_stack_spec"],
)
_PATTERNS = ("hybrid_layer_pattern", "hybrid_override_pattern")


def restated(shape: ModelShape, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values, by destination, that flags of `given` must have because they say again
    what other flags of `shape` say. Megatron gets those instead."""
    pattern = "".join(symbols := halves(shape))
    of_mtp = f"/{symbols[-1]}" * (given.get("mtp_num_layers") or 0)
    wanted: dict[str, Any] = {"encoder_num_layers": shape.num_layers}
    for dest in _PATTERNS:
        has_mtp = of_mtp and str(given.get(dest)).endswith(of_mtp)
        wanted[dest] = pattern + of_mtp if has_mtp else pattern
    if shape.blocks and given.get("spec") in HYBRID_SPECS:
        wanted["spec"] = given["spec"]
    return {dest: value for dest, value in wanted.items() if dest in given}


def unread_by(shape: ModelShape, given: Mapping[str, Any]) -> frozenset[str]:
    """Return the flags of `given`, by destination, on whose values this model does not depend."""
    return frozenset(
        dest for dest in given if dest in ARCHITECTURE and _is_unread(dest, shape, given)
    )


def _is_unread(dest: str, shape: ModelShape, given: Mapping[str, Any]) -> bool:
    value = given[dest]
    if dest in _OF_EXPERTS:
        return _is_unread_by_router(dest, value, shape)
    if dest == "ffn_hidden_size":  # of dense layers
        return not any(kind.has_dense for kind in shape.layer_kinds)
    if dest == "window_attn_skip_freq":
        return shape.sliding_window is None and given.get("window_size") is None
    if dest == "rope_scaling_factor":
        return shape.rope["rope_type"] != "llama3" and not given.get("use_rope_scaling")
    if dest == "no_rope_freq":  # a list of zeros: rotation in every layer
        return not (any(value) if isinstance(value, list) else value)
    if dest == "rotary_seq_len_interpolation_factor":
        return bool(value == 1)
    if dest in ("rotary_base", "rotary_percent") and shape.rope["rope_type"] == "none":
        return True
    has_yarn = shape.rope["rope_type"] == "yarn"
    if dest in _OF_YARN:
        return bool(shape.latent) or not has_yarn
    if shape.latent:
        return _is_unread_by_latent_attention(dest, shape, given)
    if dest in ("num_query_groups", "group_query_attention"):  # one group per head
        every_head = given.get("num_query_groups") == shape.num_heads
        return shape.num_kv_heads == shape.num_heads and every_head
    return dest in _OF_LATENT or (dest == "rotary_scaling_factor" and not has_yarn)


def _is_unread_by_latent_attention(dest: str, shape: ModelShape, given: Mapping[str, Any]) -> bool:
    if dest in ("kv_channels", "add_qkv_bias"):
        return True
    if dest in ("num_query_groups", "group_query_attention"):
        return bool(given.get("num_query_groups") == shape.num_heads)
    if shape.rope["rope_type"] == "yarn":
        return False
    # A factor of 1 leaves positions and the scale of the scores unchanged, for any mscale.
    is_one = given.get("rotary_scaling_factor") == 1
    return dest == "mscale" or (dest in ("rotary_scaling_factor", "mscale_all_dim") and is_one)


def _is_unread_by_router(dest: str, value: Any, shape: ModelShape) -> bool:
    experts = shape.experts
    if experts is None:
        return True
    if dest == "moe_router_pre_softmax":
        return experts.score_function != "softmax"
    if dest in ("moe_router_num_groups", "moe_router_group_topk"):
        return experts.num_groups is None and value == 1
    if dest == "moe_router_topk_scaling_factor":
        return experts.scaling_factor == 1 and value == 1
    if dest == "moe_shared_expert_intermediate_size":
        return not experts.shared_hidden_size and value == 0
    return False
