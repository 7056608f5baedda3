"""Supported model families: one short table each, with the properties that distinguish it.

`config_json` reads a config.json by its family's table, and `weight_map` and `tensors` take tensor
names from it. Nothing else refers to a family by name. To add one, see docs/using/families.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from mcore_rl.model.family import Family, Router, TensorNames
from mcore_rl.model.quantization import QUANTIZATION

TEXT_CONFIG = "text_config"  # the field of a multimodal config.json

_V3_ROUTER = Router("n_routed_experts", score_function="sigmoid", methods=("noaux_tc",))

_DEEPSEEK_V3 = Family(
    model_type="deepseek_v3",
    class_name="DeepseekV3ForCausalLM",
    models="DeepSeek-V3, R1, Moonlight",
    spelt_out=(
        *("q_lora_rank", "n_shared_experts", "first_k_dense_replace", "n_group"),
        *("norm_topk_prob", "routed_scaling_factor"),
    ),
    latent_attention=True,
    qk_norm=True,
    router=_V3_ROUTER,
    rope_types=("default", "yarn"),
    has_drafter=True,
)

_DEEPSEEK_V32 = replace(
    _DEEPSEEK_V3,
    model_type="deepseek_v32",
    class_name="DeepseekV32ForCausalLM",
    models="DeepSeek-V3.2, V3.2-Exp",
    fixed={"indexer_rope_interleave": False},
    sparse_attention=True,
    router=replace(_V3_ROUTER, layer_types="mlp_layer_types"),
    has_drafter=False,
)

_DELTA_NET_SIZES = (
    *("linear_conv_kernel_dim", "linear_key_head_dim", "linear_value_head_dim"),
    *("linear_num_key_heads", "linear_num_value_heads"),
)
_QWEN3_NEXT_ROUTER = Router("num_experts", gated_shared_size="shared_expert_intermediate_size")
_ROPE_OF_IMAGES = ("mrope_section", "mrope_interleaved")
_QWEN3_5 = Family(  # the text model of Qwen3.5
    model_type="qwen3_5_text",
    class_name="Qwen3_5ForCausalLM",
    models="Qwen3.5 0.8B to 27B, text",
    spelt_out=("num_key_value_heads", "head_dim", *_DELTA_NET_SIZES),
    fixed={"attn_output_gate": True},
    qk_norm=True,
    delta_net="by_part",
    output_gate=True,
    zero_centered_norms=True,
    partial_rotary_factor=0.25,
    rope_of_images=_ROPE_OF_IMAGES,
)

_GLM4_MOE = Family(  # Air has no head norms
    model_type="glm4_moe",
    class_name="Glm4MoeForCausalLM",
    models="GLM-4.5 to 4.7, Air",
    spelt_out=(
        *("num_key_value_heads", "head_dim", "attention_bias", "use_qk_norm", "n_group"),
        *("n_shared_experts", "first_k_dense_replace", "norm_topk_prob"),
        "routed_scaling_factor",
    ),
    qk_norm="use_qk_norm",
    qkv_bias="attention_bias",
    router=_V3_ROUTER,
    partial_rotary_factor=0.5,
)
_QWEN3_MOE_ROUTER = Router("num_experts", also_called="num_local_experts")
_QWEN3_MOE = Family(
    model_type="qwen3_moe",
    class_name="Qwen3MoeForCausalLM",
    models="Qwen3-30B-A3B, 235B-A22B",
    spelt_out=("num_key_value_heads",),
    qk_norm=True,
    router=_QWEN3_MOE_ROUTER,
    rope_types=("default", "yarn"),
)
_QWEN3 = Family(
    model_type="qwen3",
    class_name="Qwen3ForCausalLM",
    models="Qwen3 0.6B to 32B",
    spelt_out=("num_key_value_heads", "head_dim"),
    qk_norm=True,
    rope_types=("default", "yarn"),
)

_PUBLISHED = (
    _DEEPSEEK_V3,
    Family(
        model_type="deepseek_v2",
        class_name="DeepseekV2ForCausalLM",
        models="DeepSeek-V2, V2.5, V2-Lite",
        spelt_out=("q_lora_rank", "n_shared_experts"),
        latent_attention=True,
        qk_norm=True,
        router=Router("n_routed_experts", methods=("greedy", "group_limited_greedy")),
        rope_types=("default", "yarn"),
    ),
    replace(_DEEPSEEK_V3, model_type="kimi_k2", models="Kimi-K2", has_drafter=False),
    _DEEPSEEK_V32,
    replace(
        _DEEPSEEK_V32,
        model_type="glm_moe_dsa",
        class_name="GlmMoeDsaForCausalLM",
        models="GLM-5, 5.1, 5.2",
        fixed={"indexer_rope_interleave": True},
        rope_types=("default",),
    ),
    _GLM4_MOE,
    replace(  # its class in transformers has no norms of heads, and no field for their size
        _GLM4_MOE,
        model_type="glm4v_moe_text",
        models="GLM-4.5V, text",
        spelt_out=tuple(
            name for name in _GLM4_MOE.spelt_out if name not in ("head_dim", "use_qk_norm")
        ),
        fixed={"use_qk_norm": False},
        qk_norm=False,
        rope_of_images=_ROPE_OF_IMAGES,
    ),
    _QWEN3_MOE,
    replace(
        _QWEN3_MOE,
        model_type="qwen3_vl_moe_text",
        models="Qwen3-VL-30B-A3B, 235B-A22B, text",
        fixed={"norm_topk_prob": True},
        stacked_experts="in_halves",
        router=replace(_QWEN3_MOE_ROUTER, always_normalizes=True),
        rope_types=("default",),
        default_rope_theta=None,
        rope_of_images=_ROPE_OF_IMAGES,
    ),
    Family(  # only the experts are GLM-4.5's
        model_type="glm4_moe_lite",
        class_name="Glm4MoeLiteForCausalLM",
        models="GLM-4.7-Flash",
        spelt_out=(
            *("q_lora_rank", "n_group", "n_shared_experts", "norm_topk_prob"),
            "routed_scaling_factor",
        ),
        latent_attention=True,
        qk_norm=True,
        router=replace(_V3_ROUTER, layer_types="mlp_layer_types"),
    ),
    Family(
        model_type="minimax_m2",
        class_name="MiniMaxM2ForCausalLM",
        models="MiniMax-M2, M2.1, M2.5",
        spelt_out=("num_key_value_heads", "head_dim"),
        fixed={"scoring_func": "sigmoid", "use_routing_bias": True},
        qk_norm=True,
        norms_whole_projection=True,
        router=Router(
            "num_local_experts",
            expert_size="intermediate_size",
            score_function="sigmoid",
            always_normalizes=True,
        ),
        names=TensorNames(
            block="block_sparse_moe.",
            gate="w1.weight",
            up="w3.weight",
            down="w2.weight",
            bias="e_score_correction_bias",
        ),
        default_rope_theta=None,
        partial_rotary_factor=None,
    ),
    Family(
        model_type="qwen2_moe",
        class_name="Qwen2MoeForCausalLM",
        models="Qwen1.5-MoE, Qwen2-57B-A14B",
        spelt_out=("num_key_value_heads",),
        fixed={"qkv_bias": True},  # in vLLM
        qkv_bias=True,
        router=Router("num_experts", gated_shared_size="shared_expert_intermediate_size"),
        names=TensorNames(shared="shared_expert."),
    ),
    Family(  # Qwen3-Next-80B-A3B
        model_type="qwen3_next",
        class_name="Qwen3NextForCausalLM",
        models="Qwen3-Next-80B-A3B",
        spelt_out=("num_key_value_heads", "head_dim", "norm_topk_prob", *_DELTA_NET_SIZES),
        fixed={"attn_output_gate": True},
        qk_norm=True,
        delta_net="by_key_head",
        output_gate=True,
        zero_centered_norms=True,
        router=_QWEN3_NEXT_ROUTER,
        names=TensorNames(shared="shared_expert."),
        partial_rotary_factor=0.25,
    ),
    _QWEN3_5,
    replace(
        _QWEN3_5,
        model_type="qwen3_5_moe_text",
        class_name="Qwen3_5MoeForCausalLM",
        models="Qwen3.5-35B-A3B to 397B-A17B, text",
        fixed={"attn_output_gate": True, "norm_topk_prob": True},
        dense_size="moe_intermediate_size",  # there are no dense layers
        stacked_experts="in_halves",
        router=replace(_QWEN3_NEXT_ROUTER, always_normalizes=True),
        names=TensorNames(shared="shared_expert."),
    ),
    Family(
        model_type="olmoe",
        class_name="OlmoeForCausalLM",
        models="OLMoE-1B-7B",
        also_refused=("clip_qkv",),
        fixed={"rms_norm_eps": 1e-5, "norm_topk_prob": False},
        qk_norm=True,
        norms_whole_projection=True,
        router=Router("num_experts", expert_size="intermediate_size"),
    ),
    Family(
        model_type="hy_v3",
        class_name="HYV3ForCausalLM",
        models="Hy3",
        spelt_out=("num_key_value_heads", "head_dim", "num_shared_experts"),
        fixed={"qk_norm": True, "route_norm": True},  # in transformers
        qk_norm=True,
        router=Router(
            "num_experts",
            shared_experts="num_shared_experts",
            scaling_factor="router_scaling_factor",
            score_function="sigmoid",
            always_normalizes=True,
            methods=("noaux_tc",),
            layer_types="mlp_layer_types",
        ),
        names=TensorNames(shared="shared_mlp.", bias="expert_bias", scorer="router.gate."),
        default_rope_theta=None,
        vllm_names={"expert_hidden_dim": "moe_intermediate_size"},
    ),
    Family(
        model_type="dots1",
        class_name="Dots1ForCausalLM",
        models="dots.llm1",
        spelt_out=(
            *("num_key_value_heads", "n_shared_experts", "first_k_dense_replace"),
            *("norm_topk_prob", "routed_scaling_factor", "sliding_window"),
        ),
        also_refused=("sliding_window",),
        qk_norm=True,
        router=replace(_V3_ROUTER, also_called="num_local_experts"),
        default_rope_theta=None,
    ),
    Family(
        model_type="gpt_oss",
        class_name="GptOssForCausalLM",
        models="gpt-oss 20B, 120B",
        spelt_out=("num_key_value_heads", "head_dim", "sliding_window"),
        # Fixed in vLLM; the first also in transformers' class.
        fixed={
            "attention_bias": True,
            "rms_norm_eps": 1e-5,
            "swiglu_alpha": 1.702,
            "swiglu_limit": 7.0,
            "tie_word_embeddings": False,
        },
        qkv_bias=True,
        linear_biases=True,
        attention_sinks=True,
        alternates_windows=True,
        clamps_glu=True,
        stacked_experts="alternating",
        router=Router("num_local_experts", expert_size="intermediate_size", always_normalizes=True),
        names=TensorNames(gate="w1.weight", up="w3.weight", down="w2.weight", scorer="router."),
        rope_types=("yarn",),
        default_rope_theta=None,
    ),
    Family(  # Nemotron-H has feed-forward layers, Nemotron-3 experts
        model_type="nemotron_h",
        class_name="NemotronHForCausalLM",
        models="Nemotron-H, Nemotron-Nano-v2, Nemotron-3-Nano",
        spelt_out=("num_key_value_heads", "head_dim"),
        also_refused=("moe_latent_size", "use_bias", "mamba_proj_bias"),
        fixed={
            "mamba_hidden_act": "silu",
            "mlp_hidden_act": "relu2",
            "n_shared_experts": 1,  # transformers ignores the field
            "norm_topk_prob": True,
            "tie_word_embeddings": False,
            "use_conv_bias": True,
        },
        one_block_a_layer=True,
        squared_relu=True,
        norm_epsilon="layer_norm_epsilon",
        router=replace(
            _V3_ROUTER,
            always_normalizes=True,
            shared_size="moe_shared_expert_intermediate_size",
        ),
        names=TensorNames(
            layers="backbone.layers.",
            embedding="backbone.embeddings.weight",
            final_norm="backbone.norm_f.weight",
            input_norm="norm.weight",
            mlp_norm="norm.weight",
            attention="mixer.",
            dense="mixer.",
            block="mixer.",
        ),
        rope_types=(),
    ),
    Family(
        model_type="mixtral",
        class_name="MixtralForCausalLM",
        models="Mixtral 8x7B, 8x22B",
        spelt_out=("num_key_value_heads",),
        also_refused=("sliding_window",),  # Mixtral has no use_sliding_window
        router=Router("num_local_experts", expert_size="intermediate_size", always_normalizes=True),
        names=TensorNames(
            block="block_sparse_moe.", gate="w1.weight", up="w3.weight", down="w2.weight"
        ),
        default_rope_theta=None,
    ),
    _QWEN3,
    replace(
        _QWEN3,
        model_type="qwen3_vl_text",
        models="Qwen3-VL 2B to 32B, text",
        rope_types=("default",),
        default_rope_theta=None,
        rope_of_images=_ROPE_OF_IMAGES,
    ),
    Family(
        model_type="qwen2",
        class_name="Qwen2ForCausalLM",
        models="Qwen2, Qwen2.5",
        spelt_out=("num_key_value_heads",),
        qkv_bias=True,
        rope_types=("default", "yarn"),
    ),
    Family(
        model_type="mistral",
        class_name="MistralForCausalLM",
        models="Mistral 7B from 0.3 on, Mistral-Small 3 to 3.2",
        spelt_out=("num_key_value_heads", "sliding_window"),
        also_refused=("sliding_window",),  # Mistral has no use_sliding_window
        default_rope_theta=None,
    ),
    Family(
        model_type="seed_oss",
        class_name="SeedOssForCausalLM",
        models="Seed-OSS-36B",
        spelt_out=("num_key_value_heads", "head_dim", "attention_bias"),
        also_refused=("attention_out_bias",),
        qkv_bias="attention_bias",
        default_rope_theta=None,
    ),
    Family(
        model_type="llama",
        class_name="LlamaForCausalLM",
        models="Llama 2, 3, 3.1 to 3.3",
        rope_types=("default", "llama3"),
    ),
)

FAMILIES = {family.model_type: family for family in _PUBLISHED}


def family(table: Family) -> Family:
    """Register a user's family by its `model_type`; raise ValueError if that one exists.

    docs/using/families.md describes the table. Run the tests of the built-in families on it, too: a
    wrong table gives a wrong model.
    """
    if table.model_type in FAMILIES:
        raise ValueError(f"there is a family {table.model_type!r} already")
    FAMILIES[table.model_type] = table
    return table


def family_of(architecture: str) -> Family:
    """Return the family of a `ModelShape.architecture`, always a key of `FAMILIES`."""
    return FAMILIES[architecture]


def text_values(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the config.json of a multimodal model's text model, or `values` of a text model.

    Where both levels have `tie_word_embeddings`, transformers reads the outer one.
    """
    text = values.get(TEXT_CONFIG)
    if not isinstance(text, dict) or str(values.get("model_type")) in FAMILIES:
        return values
    outer = ("tie_word_embeddings", QUANTIZATION)
    return text | {name: values[name] for name in outer if values.get(name) is not None}


def left_to_defaults(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that vLLM needs and a parsed config.json omits or gives for another class.

    transformers has no field for a property that all models of a family share, and does not write
    it. Without them vLLM, with one class for all DeepSeek models, would take DeepSeek-V2's router
    for V3's or fail on missing groups, and would load MiniMax-M2 without the router's bias. With
    the `architectures` of an embedding model or a classifier it would build a pooling model.
    """
    family = FAMILIES.get(values.get("model_type", ""))
    if family is None:
        return {}
    is_named = values.get("architectures") == [family.class_name]
    changed = {} if is_named else {"architectures": [family.class_name]}
    added = {of_vllm: values.get(saved) for of_vllm, saved in family.vllm_names.items()}
    if family.router is not None:
        added |= _left_by_router(family, family.router, values)
    return changed | {name: value for name, value in added.items() if values.get(name) is None}


def _left_by_router(family: Family, router: Router, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return vLLM's fields of a family with experts."""
    added = dict(family.fixed)
    if family.class_name.startswith("Deepseek") or family.sparse_attention:
        added |= {
            "topk_method": router.methods[0],
            "scoring_func": router.score_function,
            "n_group": 1,
            "topk_group": 1,
        }
    if router.layer_types and (types := values.get(router.layer_types)):
        added["first_k_dense_replace"] = types.count("dense")
    if "shared" in (types := values.get("indexer_types") or ()):
        added["index_topk_pattern"] = "".join(kind[0].upper() for kind in types)
    rope = values.get("rope_parameters") or {}
    if family.partial_rotary_factor is None and "partial_rotary_factor" in rope:
        added["rotary_dim"] = int(values["head_dim"] * rope["partial_rotary_factor"])
    return added
