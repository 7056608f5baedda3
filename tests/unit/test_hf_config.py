"""Published config.json files, read into shapes and Megatron's flags, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, PretrainedConfig

from mcore_rl.common.errors import UsageError
from mcore_rl.data.tokenizer import register_families
from mcore_rl.hybrid_engine.vllm.startup import EngineConfig, engine_arguments, with_fields
from mcore_rl.model.architecture_flags import megatron_flags, settings_without_flag
from mcore_rl.model.config_json import ModelShape, model_shape, read_config_json, read_model_shape
from mcore_rl.model.families import FAMILIES, left_to_defaults
from scripts.make_tiny_deepseek import hf_config
from tests import model_shapes
from tests.model_shapes import CONFIGS, made_values, model_class

# As published, except for names of classes and files, token ids, dropout and dtype.
PUBLISHED = {path.stem: path.read_text() for path in sorted(CONFIGS.glob("*.json"))}
IN_MXFP4 = ("gpt-oss-120b", "gpt-oss-20b")
QUANTISED = (
    "deepseek-v3",
    "deepseek-v3.2",
    "kimi-k2-instruct-0905",
    "minimax-m2",
    *IN_MXFP4,
)  # else in FP8 blocks


def trainable(name: str) -> str:
    """A published config.json as it is once the weights are dequantised."""
    values = json.loads(PUBLISHED[name])
    assert ("quantization_config" in values) == (name in QUANTISED)
    values.pop("quantization_config", None)
    return json.dumps(values)


TRAINABLE = {name: trainable(name) for name in PUBLISHED}
DEEPSEEK_V3, DEEPSEEK_V2_LITE = TRAINABLE["deepseek-v3"], TRAINABLE["deepseek-v2-lite"]
HY3, MISTRAL = TRAINABLE["hy3-preview"], TRAINABLE["mistral-small-24b-2501"]
SEED_OSS = TRAINABLE["seed-oss-36b"]
DEEPSEEK_V2, KIMI_K2 = TRAINABLE["deepseek-v2"], TRAINABLE["kimi-k2-instruct-0905"]
QWEN3_30B_A3B, QWEN3_600M = TRAINABLE["qwen3-30b-a3b"], TRAINABLE["qwen3-0.6b"]
QWEN2_MOE, OLMOE = TRAINABLE["qwen1.5-moe-a2.7b"], TRAINABLE["olmoe-1b-7b-0924"]
MINIMAX_M2 = TRAINABLE["minimax-m2"]
QWEN2_7B, LLAMA_1B = TRAINABLE["qwen2.5-7b"], TRAINABLE["llama-3.2-1b"]
GPT_OSS = TRAINABLE["gpt-oss-20b"]
MIXTRAL, GLM4_LITE = TRAINABLE["mixtral-8x7b"], TRAINABLE["glm-4.7-flash"]
GLM4, GLM4_AIR = TRAINABLE["glm-4.5"], TRAINABLE["glm-4.5-air"]
YARN = json.loads(DEEPSEEK_V3)["rope_scaling"]
YARN_ALONE = {"rope_type": "yarn", "factor": 2.0}
YARN_OF_QWEN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
LLAMA3 = json.loads(LLAMA_1B)["rope_scaling"]
FLOAT8 = json.loads(PUBLISHED["deepseek-v3"])["quantization_config"]


def read(folder: Path, text: str, **fields: Any) -> ModelShape:
    """The shape of `text` with `fields` replaced; one of value ... is left out."""
    values = {**json.loads(text), **fields}
    values = {name: value for name, value in values.items() if value is not ...}
    (folder / "config.json").write_text(json.dumps(values))
    return read_model_shape(folder)


def flags(shape: ModelShape) -> dict[str, str | None]:
    """Megatron's flags and their values; a switch has none."""
    tokens = megatron_flags(shape)
    found: dict[str, str | None] = {}
    for token, following in zip(tokens, [*tokens[1:], "--"], strict=True):
        if token.startswith("--"):
            assert token not in found
            found[token] = None if following.startswith("--") else following
    return found


def frequency(dense: int, sparse: int) -> str:
    return "([" + ",".join("0" * dense + "1" * sparse) + "])"


FLAGS_OF_DEEPSEEK_V3 = (
    "num-layers 61, hidden-size 7168, ffn-hidden-size 18432, num-attention-heads 128, "
    "max-position-embeddings 163840, normalization RMSNorm, norm-epsilon 1e-06, "
    "position-embedding-type rope, rotary-base 10000, vocab-size 129280, swiglu, "
    "disable-bias-linear, qk-layernorm, untie-embeddings-and-output-weights, "
    "multi-latent-attention, q-lora-rank 1536, kv-lora-rank 512, qk-head-dim 128, "
    "qk-pos-emb-head-dim 64, v-head-dim 128, rope-type yarn, rotary-scaling-factor 40, "
    "mscale 1.0, mscale-all-dim 1.0, num-experts 256, moe-router-topk 8, "
    "moe-ffn-hidden-size 2048, moe-shared-expert-intermediate-size 2048, "
    "moe-router-score-function sigmoid, moe-router-enable-expert-bias, "
    "moe-router-topk-scaling-factor 2.5, moe-router-num-groups 8, moe-router-group-topk 4"
)


def test_flags_of_deepseek_v3_are_complete(tmp_path: Path) -> None:
    shape = read(tmp_path, DEEPSEEK_V3)
    assert shape == model_shapes.DEEPSEEK_V3
    expected = {"--moe-layer-freq": frequency(3, 58), **as_flags(FLAGS_OF_DEEPSEEK_V3)}
    assert flags(shape) == expected


def as_flags(text: str) -> dict[str, str | None]:
    """`"a 1, b"` as `{"--a": "1", "--b": None}`."""
    pairs = (entry.partition(" ") for entry in text.split(", "))
    return {f"--{name}": value or None for name, _, value in pairs}


# Flags of published models; "!" precedes a flag that they do not have.
FLAGS = {
    # Queries are projected directly; experts are weighted by the softmax over all of them.
    "deepseek-v2-lite": "moe-shared-expert-intermediate-size 2816, moe-router-pre-softmax, "
    "moe-router-score-function softmax, mscale 0.707, mscale-all-dim 0.707, !q-lora-rank, "
    "!moe-router-enable-expert-bias, !moe-router-topk-scaling-factor, !moe-router-num-groups",
    # A head has 128, not 2048 / 32; norm_topk_prob is the softmax over the chosen experts.
    "qwen3-30b-a3b": "kv-channels 128, group-query-attention, num-query-groups 4, "
    "rotary-base 1000000, num-experts 128, moe-router-topk 8, !moe-router-pre-softmax, "
    "!moe-shared-expert-intermediate-size, !multi-latent-attention, !rope-type",
    "qwen3-0.6b": "qk-layernorm, num-query-groups 8, !untie-embeddings-and-output-weights",
    "deepseek-v2": "moe-router-num-groups 8, moe-router-group-topk 3, q-lora-rank 1536, "
    "moe-router-topk-scaling-factor 16.0, moe-router-pre-softmax",
    "kimi-k2-instruct-0905": "num-experts 384, rotary-base 50000, rotary-scaling-factor 64.0, "
    "!moe-router-num-groups",
    "moonlight-16b-a3b": "rope-type rope, moe-router-score-function sigmoid, "
    "moe-shared-expert-intermediate-size 2816, !q-lora-rank, !rotary-scaling-factor",
    "mixtral-8x7b": "num-experts 8, moe-router-topk 2, moe-ffn-hidden-size 14336, "
    "ffn-hidden-size 14336, kv-channels 128, rotary-base 1000000, !moe-router-pre-softmax, "
    "!qk-layernorm, !add-qkv-bias",
    "glm-4.5": "rotary-percent 0.5, qk-layernorm, add-qkv-bias, moe-router-score-function sigmoid, "
    "moe-router-enable-expert-bias, disable-bias-linear, kv-channels 128, num-query-groups 8",
    "glm-4.5-air": "!qk-layernorm",
    # kv-channels: 2048 // 20, rounded down
    "glm-4.7-flash": "q-lora-rank 768, v-head-dim 256, kv-channels 102, rope-type rope, "
    "rotary-base 1000000, moe-router-enable-expert-bias, !rotary-percent",
    "olmoe-1b-7b-0924": "qk-layernorm, moe-router-pre-softmax, moe-ffn-hidden-size 1024, "
    "kv-channels 128",
    "minimax-m2": "rotary-percent 0.5, rotary-base 5000000, moe-router-score-function sigmoid, "
    "moe-router-enable-expert-bias, num-experts 256, !moe-router-topk-scaling-factor",
    "qwen1.5-moe-a2.7b": "moe-shared-expert-gate, add-qkv-bias, moe-router-pre-softmax, "
    "moe-shared-expert-intermediate-size 5632, !num-query-groups",
    "qwen2.5-7b": "add-qkv-bias, disable-bias-linear, kv-channels 128, num-query-groups 4, "
    "!qk-layernorm",
    "llama-3.2-1b": "use-rope-scaling, rope-scaling-factor 32.0, kv-channels 64, "
    "!untie-embeddings-and-output-weights, !add-qkv-bias, !qk-layernorm",
}
GLM4_ROPE = {"rope_theta": 1e6, "partial_rotary_factor": 0.25}
CHANGED_FLAGS = [
    ("qwen3-30b-a3b", {"norm_topk_prob": False}, "moe-router-pre-softmax"),
    ("qwen3-0.6b", {"num_key_value_heads": 16}, "!group-query-attention, !num-query-groups"),
    (
        "glm-4.5",
        {"partial_rotary_factor": ..., "rope_parameters": GLM4_ROPE},
        "rotary-percent 0.25",
    ),
    ("minimax-m2", {"rotary_dim": 128}, "!rotary-percent"),
    ("llama-3.2-1b", {"rope_scaling": None}, "!use-rope-scaling, !rope-scaling-factor"),
]
DENSE_LAYERS = {"qwen3-30b-a3b": (0, 48), "mixtral-8x7b": (0, 32), "glm-4.5": (3, 89)}


@pytest.mark.parametrize(
    ("name", "fields", "expected"),
    [*((name, {}, expected) for name, expected in FLAGS.items()), *CHANGED_FLAGS],
)
def test_flags_follow_config(
    name: str, fields: dict[str, Any], expected: str, tmp_path: Path
) -> None:
    found = flags(read(tmp_path, TRAINABLE[name], **fields))
    for flag, value in as_flags(expected).items():
        if flag.startswith("--!"):
            assert flag.replace("!", "") not in found
        else:
            assert found.get(flag, "missing") == value, flag
    if name in DENSE_LAYERS:
        assert found["--moe-layer-freq"] == frequency(*DENSE_LAYERS[name])


def test_dense_model_has_no_flag_about_experts(tmp_path: Path) -> None:
    found = flags(read(tmp_path, QWEN3_600M))
    assert not [flag for flag in found if "moe" in flag or "expert" in flag]


def test_settings_without_flag_are_those_of_yarn(tmp_path: Path) -> None:
    assert settings_without_flag(read(tmp_path, KIMI_K2)) == {
        "beta_fast": 1.0, "beta_slow": 1.0, "original_max_position_embeddings": 4096
    }  # fmt: skip
    assert settings_without_flag(read(tmp_path, DEEPSEEK_V3))["beta_fast"] == 32
    assert settings_without_flag(read(tmp_path, LLAMA_1B)) == {}


def test_norms_over_all_heads_are_recognised(tmp_path: Path) -> None:
    for text in (OLMOE, MINIMAX_M2):
        assert read(tmp_path, text).norms_whole_projection


@pytest.mark.parametrize(
    ("text", "fields", "expected"),
    [
        (QWEN3_30B_A3B, {"num_hidden_layers": 5, "decoder_sparse_step": 2}, "01010"),
        (QWEN3_30B_A3B, {"num_hidden_layers": 5, "mlp_only_layers": [0, 3]}, "01101"),
        (
            QWEN3_30B_A3B,
            {"num_hidden_layers": 6, "decoder_sparse_step": 3, "mlp_only_layers": [5]},
            "001000",
        ),
        (QWEN2_MOE, {"num_hidden_layers": 3, "mlp_only_layers": [1]}, "101"),
        (
            DEEPSEEK_V3,
            {"num_hidden_layers": 7, "first_k_dense_replace": 3, "moe_layer_freq": 2},
            "0000101",
        ),
    ],
    ids=["step", "dense_layers", "both", "qwen2_moe", "deepseek"],
)
def test_layers_with_experts_follow_config(
    text: str, fields: dict[str, Any], expected: str, tmp_path: Path
) -> None:
    shape = read(tmp_path, text, **fields)
    assert "".join(str(int(is_moe)) for is_moe in shape.is_moe_layer) == expected


def test_dense_layers_may_be_named_by_type(tmp_path: Path) -> None:
    types = ["dense", *["sparse"] * 46]
    named = read(tmp_path, GLM4_LITE, first_k_dense_replace=..., mlp_layer_types=types)
    assert named == read(tmp_path, GLM4_LITE)


@pytest.mark.parametrize("name", TRAINABLE)
def test_config_saved_by_transformers_equals_published(name: str, tmp_path: Path) -> None:
    """The class, too, may write it: its defaults are not all those of config.json."""
    published = read(tmp_path, TRAINABLE[name])
    register_families()
    AutoConfig.from_pretrained(tmp_path).save_pretrained(tmp_path / "read")
    config_class = model_class(published.architecture).config_class
    made = config_class(**made_values(json.loads(TRAINABLE[name])))
    made.save_pretrained(tmp_path / "made")
    AutoConfig.from_pretrained(tmp_path / "made").save_pretrained(tmp_path / "again")
    for folder in ("read", "made", "again"):
        saved = read_model_shape(tmp_path / folder)
        # transformers itself does not know the name of Kimi-K2's architecture.
        assert replace(saved, architecture=published.architecture) == published
        assert folder == "read" or saved.architecture == made.model_type


OTHER_ARCHITECTURES = [
    *(..., None, [], "Qwen3ForCausalLM"),
    *(["Qwen3Model"], ["Qwen3ForSequenceClassification"], ["LlamaForCausalLM"]),
]


@pytest.mark.parametrize("named", OTHER_ARCHITECTURES)
def test_engines_generate_with_any_named_architecture(tmp_path: Path, named: Any) -> None:
    read(tmp_path, QWEN3_600M, architectures=named)
    arguments = engine_arguments(EngineConfig(tmp_path))
    assert arguments["hf_overrides"] == {"architectures": ["Qwen3ForCausalLM"]}
    assert arguments["runner"] == "generate"
    drafter = PretrainedConfig(architectures=["DeepSeekMTPModel"])
    drafter.model_type = "deepseek_mtp"
    assert with_fields(arguments["hf_overrides"], drafter).architectures == ["DeepSeekMTPModel"]


def test_engines_compute_logits_in_float32_if_asked(tmp_path: Path) -> None:
    read(tmp_path, QWEN3_600M)
    arguments = engine_arguments(EngineConfig(tmp_path, head_in_float32=True, num_top_tokens=128))
    assert arguments["max_logprobs"] == 128
    assert arguments["hf_overrides"]["head_dtype"] == "float32"


def test_defaults_of_transformers_are_passed_to_vllm(tmp_path: Path) -> None:
    router_of_v3 = {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}
    for name, left in {
        "deepseek-v3": router_of_v3,
        "moonlight-16b-a3b": router_of_v3,
        "deepseek-v2": {"scoring_func": "softmax"},
        "deepseek-v2-lite": {"scoring_func": "softmax", "n_group": 1, "topk_group": 1},
        "qwen3-30b-a3b": {},
        "olmoe-1b-7b-0924": {},
        "glm-4.5": {},
        "minimax-m2": {"scoring_func": "sigmoid", "use_routing_bias": True},
        "hy3-preview": {
            "expert_hidden_dim": 1536,
            "first_k_dense_replace": 1,
            "qk_norm": True,
            "route_norm": True,
        },
        "llama-3.2-1b": {},
    }.items():
        values = json.loads(TRAINABLE[name])
        named = {"architectures": [FAMILIES[values["model_type"]].class_name]}
        assert left_to_defaults(values | named) == {}
        model_class(values["model_type"]).config_class(**made_values(values)).save_pretrained(
            tmp_path / name
        )
        assert left_to_defaults(read_config_json(tmp_path / name)) == left | named
    flash = {"model_type": "glm4_moe_lite", "mlp_layer_types": ["dense", "dense", "sparse"]}
    assert left_to_defaults(flash)["first_k_dense_replace"] == 2
    half = {"head_dim": 128, "rope_parameters": {"partial_rotary_factor": 0.5}}
    assert left_to_defaults({"model_type": "minimax_m2", **half})["rotary_dim"] == 64


def test_rope_reads_same_in_both_formats_of_transformers(tmp_path: Path) -> None:
    old = read(tmp_path, DEEPSEEK_V3)
    scaling = {name: value for name, value in YARN.items() if name != "type"}
    parameters = {"rope_type": "yarn", "rope_theta": 10000.0, **scaling}
    new = read(tmp_path, DEEPSEEK_V3, rope_scaling=..., rope_theta=..., rope_parameters=parameters)
    assert new == old


CONTRADICT_ANY_DEFAULT = (  # other fields do; refused with another sentence
    ("deepseek-v2", "topk_method"),
    ("glm-5.2", "index_skip_topk_offset"),
)


@pytest.mark.parametrize("published", TRAINABLE)
def test_missing_field_without_default_is_refused(published: str, tmp_path: Path) -> None:
    """A field about the model has a default or is required."""
    text = TRAINABLE[published]
    may_be_left_out = {
        "attention_bias", "decoder_sparse_step", "hidden_act", "max_window_layers", "mlp_bias",
        "mlp_only_layers", "moe_layer_freq", "num_nextn_predict_layers", "output_router_logits",
        "pretraining_tp", "rope_scaling", "rope_theta", "router_aux_loss_coef", "sliding_window",
        "tie_word_embeddings", "use_sliding_window", "topk_method", "scoring_func",
    }  # fmt: skip
    may_be_left_out |= {
        "deepseek_v2": {
            "first_k_dense_replace", "norm_topk_prob", "num_key_value_heads",
            "routed_scaling_factor",
        },
        "deepseek_v3": {"num_key_value_heads"},  # latent attention has none
        "kimi_k2": {"num_key_value_heads"},
        "deepseek_v32": {"num_key_value_heads"},
        "glm_moe_dsa": {
            "head_dim", "index_share_for_mtp_iteration", "index_topk_freq", "index_topk_pattern",
            "indexer_rope_interleave", "indexer_types", "mlp_layer_types", "moe_router_dtype",
            "num_key_value_heads", "qk_head_dim", "rope_interleave", "rope_parameters",
            "topk_group",
        },
        "glm4_moe": {"partial_rotary_factor", "topk_group"},
        "glm4v_moe_text": {"head_dim", "partial_rotary_factor", "topk_group", "use_qk_norm"},
        "dots1": {"attention_dropout", "n_group", "topk_group"},
        "glm4_moe_lite": {"num_key_value_heads", "partial_rotary_factor", "topk_group"},
        **dict.fromkeys(("qwen3_moe", "qwen3_vl_moe_text"), {"head_dim", "norm_topk_prob"}),
        "qwen2_moe": {"norm_topk_prob"},
        "gpt_oss": {
            "attention_dropout", "experts_per_token", "initial_context_length", "layer_types",
            "swiglu_limit",
        },
        "olmoe": {"clip_qkv", "norm_topk_prob", "num_key_value_heads"},
        "minimax_m2": {"num_mtp_modules", "qk_norm_type", "use_qk_norm", "use_routing_bias"},
        "llama": {"head_dim", "num_key_value_heads"},
        **dict.fromkeys(
            ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"),
            {
                "attn_output_gate", "full_attention_interval", "mamba_ssm_dtype",
                "mtp_num_hidden_layers", "partial_rotary_factor", "rope_parameters",
            },
        ),
        "hy_v3": {
            "enable_attention_fp32_softmax", "enable_lm_head_fp32", "enable_moe_fp32_combine",
            "expert_hidden_dim", "moe_router_enable_expert_bias", "moe_router_use_sigmoid",
            "qk_norm", "route_norm", "router_scaling_factor",
        },
        "mistral": {"attention_dropout", "head_dim"},
        "nemotron_h": {
            "chunk_size", "expand", "mamba_hidden_act", "mamba_proj_bias", "mamba_ssm_cache_dtype",
            "mlp_hidden_act", "n_group", "norm_topk_prob", "n_shared_experts", "num_hidden_layers",
            "residual_in_fp32", "routed_scaling_factor", "time_step_floor", "time_step_limit",
            "time_step_max", "time_step_min", "topk_group", "use_bias", "use_conv_bias",
        },
        "seed_oss": {"attention_dropout", "attention_out_bias", "residual_dropout"},
    }.get(json.loads(text)["model_type"], set())  # fmt: skip
    if '"greedy"' in text:
        may_be_left_out |= {"n_group", "topk_group"}
    if "kimi" in published or "moonlight" in published:
        may_be_left_out |= {"topk_group"}  # of one group
    if '"seed_oss"' in text:
        may_be_left_out -= {"attention_bias"}  # it means those of queries, keys and values
    if json.loads(text)["model_type"] in ("mistral", "dots1"):
        may_be_left_out -= {"sliding_window"}  # without it transformers has one of 4096
    if json.loads(text)["model_type"] in (
        *("mixtral", "minimax_m2", "mistral", "seed_oss", "dots1"),
        *("qwen3_vl_text", "qwen3_vl_moe_text"),
    ):
        may_be_left_out -= {"rope_theta"}  # transformers has another default
    if '"glm4' in text and "flash" not in published:
        may_be_left_out -= {"attention_bias"}  # it means those of queries, keys and values
    if '"gpt_oss"' in text:
        may_be_left_out -= {"rope_scaling", "rope_theta", "sliding_window"}
    for name in json.loads(text):
        if (published, name) in CONTRADICT_ANY_DEFAULT:
            continue
        if name in may_be_left_out:
            read(tmp_path, text, **{name: ...})
        else:
            # transformers 5 has rope_theta in it.
            missing = name.replace("rope_parameters", "rope_theta")
            with pytest.raises(UsageError, match=f"config.json has no field '{missing}', .*; use"):
                read(tmp_path, text, **{name: ...})


def nested(text: Mapping[str, Any], **outer: Any) -> dict[str, Any]:
    """A multimodal config.json."""
    return {"model_type": "anything", "vision_config": {}, "text_config": text, **outer}


@pytest.mark.parametrize("published", TRAINABLE)
def test_multimodal_model_has_the_shape_of_its_text_model(published: str) -> None:
    text = json.loads(TRAINABLE[published])
    method = {"quantization_config": text.pop("quantization_config", None)}
    path = Path("config.json")
    shape = model_shape(nested(text, **method), path)
    assert shape.is_multimodal and shape == model_shape(text | method, path)
    assert not model_shape(text | method, path).is_multimodal


TIED = {
    # outer, text -> what transformers does
    (True, False): True,
    (False, True): False,
    (None, True): True,
    (None, None): False,
}


@pytest.mark.parametrize(("outer", "text"), TIED)
def test_outer_tie_of_embeddings_counts(outer: bool | None, text: bool | None) -> None:
    values = {**hf_config("qwen3_vl_text"), "tie_word_embeddings": text}
    shape = model_shape(nested(values, tie_word_embeddings=outer), Path("config.json"))
    assert shape.tied_embeddings == TIED[outer, text]


UNSUPPORTED_TEXTS = {
    "gemma3_text": r" \(Gemma3ForCausalLM: Megatron has no norms after",
    "ministral3": r" \(Ministral3ForCausalLM: .*llama_4_scaling",
    "glm4v_text": r" \(GLM4VForCausalLM: it is multimodal",
    "unheard_of": "; supported are",
    "llama4_text": r" \(Llama4ForCausalLM: ",
}


@pytest.mark.parametrize("model_type", UNSUPPORTED_TEXTS)
def test_text_model_of_an_unsupported_family_is_named(model_type: str) -> None:
    values = nested({"model_type": model_type}, architectures=["XForConditionalGeneration"])
    says = f"text_config.model_type '{model_type}', which is not supported"
    with pytest.raises(UsageError, match=says + UNSUPPORTED_TEXTS[model_type]):
        model_shape(values, Path("config.json"))


def int4_groups(**weights: Any) -> dict[str, Any]:
    """The quantization_config of Kimi-K2.5, with changed fields of its weights."""
    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32} | weights
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "format": None}},
    }


def test_int4_groups_of_a_text_model_are_read() -> None:
    text = hf_config("kimi_k2") | {"quantization_config": int4_groups()}
    shape = model_shape(nested(text), Path("config.json"))
    assert (shape.quantization, shape.is_multimodal) == ("compressed-tensors", True)
    assert replace(shape, is_multimodal=False) == model_shape(
        hf_config("kimi_k2"), Path("config.json")
    )


@pytest.mark.parametrize(
    ("changed", "field"),
    [
        (int4_groups(group_size=128), "group_size 128"),
        (int4_groups(num_bits=8), "num_bits 8"),
        (int4_groups(symmetric=False), "symmetric False"),
        (int4_groups(actorder="group"), "actorder group"),
        (int4_groups() | {"format": "nvfp4-pack-quantized"}, "format nvfp4-pack-quantized"),
        (int4_groups() | {"kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme"),
        (int4_groups() | {"sparsity_config": {"format": "dense"}}, "sparsity_config"),
        (int4_groups() | {"config_groups": {"a": {}, "b": {}}}, "num_bits None"),
    ],
)
def test_other_compressed_tensors_are_refused(changed: dict[str, Any], field: str) -> None:
    text = hf_config("kimi_k2") | {"quantization_config": changed}
    says = rf"quantised weights \(.* of compressed-tensors with {field}.*\).*; give"
    with pytest.raises(UsageError, match=says):
        model_shape(text, Path("config.json"))


def test_missing_field_of_a_text_model_is_named() -> None:
    text = {name: v for name, v in hf_config("qwen3_vl_text").items() if name != "hidden_size"}
    with pytest.raises(UsageError, match=r"no field 'text_config.hidden_size'"):
        model_shape(nested(text), Path("config.json"))
    with pytest.raises(UsageError, match=r"no field 'text_config.model_type'"):
        model_shape(nested({}), Path("config.json"))


UNSUPPORTED = {
    ("kimi_linear", None): "KimiLinearForCausalLM: Megatron has no Kimi delta attention",
    ("gemma3_text", "Gemma3ForCausalLM"): "Gemma3ForCausalLM: Megatron has no norms after",
    ("bamba", "BambaForCausalLM"): "BambaForCausalLM: vLLM has removed its class",
    ("mistral3", "Mistral3ForConditionalGeneration"): "Mistral3F.*: it is multi.*no text_config",
    ("bert", "BertModel"): "BertModel: it is a pooling model",
}


@pytest.mark.parametrize(("model_type", "architecture"), UNSUPPORTED)
def test_unsupported_family_is_refused_with_missing_part(
    model_type: str, architecture: str | None, tmp_path: Path
) -> None:
    named = {"architectures": [architecture]} if architecture else {}
    part = UNSUPPORTED[model_type, architecture]
    says = rf"has model_type '{model_type}', which is not supported \({part}.*\); supported are "
    with pytest.raises(UsageError, match=says):
        read(tmp_path, "{}", model_type=model_type, **named)


REFUSED = {
    "architecture": (QWEN3_600M, {"model_type": "gpt2"}, "model_type 'gpt2', which is not supp"),
    "per_tensor": (
        DEEPSEEK_V3,
        {"quantization_config": {"quant_method": "fp8", "activation_scheme": "dynamic"}},
        "quantised weights .*of fp8 with weight_block_size None.*give.*blocks.*or dequantise",
    ),
    "block_size": (
        DEEPSEEK_V3,
        {"quantization_config": FLOAT8 | {"weight_block_size": [64, 128]}},
        r"of fp8 with weight_block_size \[64, 128\].*weight_block_size \[128, 128\]",
    ),
    "static": (
        DEEPSEEK_V3,
        {"quantization_config": FLOAT8 | {"activation_scheme": "static"}},
        "of fp8 with activation_scheme static",
    ),
    "e5m2": (DEEPSEEK_V3, {"quantization_config": FLOAT8 | {"fmt": "e5m2"}}, "with fmt e5m2"),
    "int4": (
        KIMI_K2,
        {"quantization_config": {"quant_method": "compressed-tensors", "format": "pack-quantized"}},
        r"quantised weights \(quantization_config of compressed-tensors with num_bits None\).*",
    ),
    "unnamed": (KIMI_K2, {"quantization_config": {"bits": 4}}, "quantised weights.*unnamed method"),
    "no_object": (KIMI_K2, {"quantization_config": "fp8"}, "quantised weights.*unnamed method"),
    **{
        method: (QWEN3_30B_A3B, {"quantization_config": {"quant_method": method}}, f"of {method}")
        for method in ("gptq", "awq", "mxfp4")
    },
    "activation": (QWEN3_600M, {"hidden_act": "gelu"}, "the activation 'gelu'"),
    "bias": (QWEN3_600M, {"attention_bias": True}, "biases"),
    "bias_of_llama": (LLAMA_1B, {"mlp_bias": True}, "biases"),
    "experts_of_hy3": (
        HY3,
        {"expert_hidden_dim": 1024},
        r"expert_hidden_dim 1024 beside moe_intermediate_size 1536 \(vLLM reads the first\)",
    ),
    "window_of_mistral": (MISTRAL, {"sliding_window": 4096}, "sliding_window 4096 with model_type"),
    "output_bias_of_seed_oss": (SEED_OSS, {"attention_out_bias": True}, "attention_out_bias True"),
    "window_of_mixtral": (MIXTRAL, {"sliding_window": 4096}, "sliding_window 4096 with model_type"),
    "window_of_qwen2": (QWEN2_7B, {"use_sliding_window": True}, "sliding-window attention"),
    "window": (QWEN3_600M, {"use_sliding_window": True}, "sliding-window attention"),
    "rope_order": (DEEPSEEK_V3, {"rope_interleave": False}, "not interleaved"),
    "rope_type": (QWEN3_600M, {"rope_scaling": {"rope_type": "linear"}}, "of type 'linear'"),
    "rope_text": (QWEN3_600M, {"rope_scaling": "yarn"}, "rope scaling 'yarn'"),
    "rope_part": (
        LLAMA_1B,
        {"rope_scaling": None, "rope_parameters": {"partial_rotary_factor": 0.5}},
        "partial_rotary_factor 0.5 with model_type 'llama'",
    ),
    "rope_part_outside": (
        QWEN3_600M,
        {"partial_rotary_factor": 0.25},
        "partial_rotary_factor 0.25 with model_type 'qwen3'",
    ),
    "no_bias_of_qwen2": (
        QWEN2_MOE,
        {"qkv_bias": False},
        r"qkv_bias False with model_type 'qwen2_moe' \(vLLM has True\)",
    ),
    "epsilon_of_olmoe": (OLMOE, {"rms_norm_eps": 1e-6}, r"1e-06 with .* \(vLLM has 1e-05\)"),
    "clipping": (OLMOE, {"clip_qkv": 8.0}, "clip_qkv 8.0 with model_type 'olmoe'"),
    "limit_of_gpt_oss": (GPT_OSS, {"swiglu_limit": 5.0}, r"swiglu_limit 5.0 .* \(vLLM has 7.0\)"),
    "no_bias_of_gpt_oss": (GPT_OSS, {"attention_bias": False}, "attention_bias False .*has True"),
    "windows_of_gpt_oss": (
        GPT_OSS,
        {"layer_types": ["full_attention"] * 24},
        r"layer_types that do not begin with sliding_attention and alternate \(vLLM's do\)",
    ),
    "rope_of_gpt_oss": (GPT_OSS, {"rope_scaling": {"rope_type": "default"}}, "type 'default' with"),
    "no_rope_of_gpt_oss": (GPT_OSS, {"rope_scaling": YARN_ALONE}, "without b"),
    "attention_of_gpt_oss": (
        GPT_OSS,
        {"rope_scaling": {**json.loads(GPT_OSS)["rope_scaling"], "attention_factor": 1.0}},
        "yarn rope scaling with attention_factor 1.0",
    ),
    "fp8_of_gpt_oss": (GPT_OSS, {"quantization_config": FLOAT8}, "of fp8.*mxfp4.*or in bfloat16"),
    "no_bias_of_router": (MINIMAX_M2, {"use_routing_bias": False}, "vLLM has True"),
    "dense_layers_between": (
        GLM4_LITE,
        {"mlp_layer_types": ["dense", "sparse", "dense"], "num_hidden_layers": 3},
        "mlp_layer_types other than 1 dense layers and then 2 sparse ones",
    ),
    "bias_of_mlp": (GLM4_AIR, {"mlp_bias": True}, "biases"),
    "yarn_attention": (
        DEEPSEEK_V3,
        {"rope_scaling": {**YARN, "attention_factor": 1.2}},
        "yarn rope scaling with attention_factor 1.2",
    ),
    "rope_theta": (QWEN3_600M, {"rope_theta": 10000.5}, "rope_theta 10000.5"),
    "yarn_of_llama": (LLAMA_1B, {"rope_scaling": YARN}, "of type 'yarn' with model_type 'llama'"),
    "yarn_of_qwen3": (QWEN3_600M, {"rope_scaling": YARN_ALONE}, "without original_max_position_e"),
    "attention_of_qwen3": (
        QWEN3_600M,
        {"rope_scaling": {**YARN_OF_QWEN, "attention_factor": 1.0}},
        "yarn rope scaling with attention_factor 1.0",
    ),
    "yarn_factor": (DEEPSEEK_V3, {"rope_scaling": {"type": "yarn"}}, "without a factor"),
    "llama3_factor": (LLAMA_1B, {"rope_scaling": {"rope_type": "llama3"}}, "without a factor"),
    "llama3_frequencies": (
        LLAMA_1B,
        {"rope_scaling": {**LLAMA3, "low_freq_factor": 2.0}},
        r"low_freq_factor 2.0 \(Megatron has 1.0\)",
    ),
    "llama3_length": (
        LLAMA_1B,
        {"rope_scaling": {**LLAMA3, "original_max_position_embeddings": 4096}},
        "original_max_position_embeddings 4096",
    ),
    "llama3_elsewhere": (QWEN2_7B, {"rope_scaling": LLAMA3}, "'llama3' with model_type 'qwen2'"),
    # Megatron ranks a group by its topk // topk_group best experts, V3 by two.
    "groups_of_v3": (DEEPSEEK_V3, {"topk_group": 2}, "topk_group 2 .*its best 4 experts"),
    "groups_of_v2": (DEEPSEEK_V2, {"topk_method": ...}, "n_group 8 with topk_method 'greedy'"),
    "two_counts_of_experts": (
        QWEN3_30B_A3B,
        {"num_local_experts": 64},
        "both num_experts 128 and num_local_experts 64.*take out the one",
    ),
    "groups_without_method": (DEEPSEEK_V2_LITE, {"n_group": 8}, "n_group 8 with topk_method"),
    "method": (DEEPSEEK_V3, {"topk_method": "greedy"}, "topk_method 'greedy' with model_type"),
    "scoring_of_v3": (DEEPSEEK_V3, {"scoring_func": "softmax"}, "scoring_func 'softmax'"),
    "scoring_of_v2": (DEEPSEEK_V2_LITE, {"scoring_func": "sigmoid"}, "scoring_func 'sigmoid'"),
    "normalising_of_v3": (DEEPSEEK_V3, {"norm_topk_prob": False}, "norm_topk_prob false"),
    "normalising_of_v2": (DEEPSEEK_V2_LITE, {"norm_topk_prob": True}, "norm_topk_prob true"),
    "count_as_text": (QWEN3_600M, {"hidden_size": "1024"}, "hidden_size '1024', which must be"),
    "count_of_zero": (QWEN3_600M, {"num_attention_heads": 0}, "num_attention_heads 0, which must"),
    "switch_as_text": (
        QWEN3_600M,
        {"tie_word_embeddings": "false"},
        "tie_word_embeddings 'false', which must be true or",
    ),
    "count_as_truth": (DEEPSEEK_V3, {"n_group": True}, "n_group True, which must be an integer"),
}


@pytest.mark.parametrize(("text", "fields", "says"), REFUSED.values(), ids=REFUSED)
def test_unsupported_config_is_refused(text: str, fields: dict, says: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=says) as caught:
        read(tmp_path, text, **fields)
    sentence = str(caught.value)
    assert sentence.startswith(f"--rl-hf-checkpoint: {tmp_path}/config.json ")
    assert "; " in sentence and "\n" not in sentence


ODD = (None, True, "x", "false", -1, 1.5, float("nan"), float("inf"), 10**400, [], [[1]], {"a": 1})


@pytest.mark.parametrize("text", TRAINABLE.values(), ids=TRAINABLE)
def test_field_of_other_type_is_read_or_refused(text: str, tmp_path: Path) -> None:
    base = json.loads(text)
    more = ("layer_types", "mlp_only_layers", "partial_rotary_factor", "quantization_config")
    for name in (*base, *more, "rope_scaling", "rope_theta", "tie_word_embeddings"):
        for value in ODD:
            try:
                megatron_flags(model_shape({**base, name: value}, tmp_path / "config.json"))
            except UsageError as error:
                assert len(str(error)) < 1000


def test_config_nested_too_deep_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("[" * 100_000)
    with pytest.raises(UsageError, match="config.json cannot be read as JSON .*nested deeper"):
        read_model_shape(tmp_path)


def test_shape_of_quantised_config_equals_dequantised(tmp_path: Path) -> None:
    for name in PUBLISHED:
        file = CONFIGS / f"{name}.json"
        found = read_model_shape(file)
        assert found == read_model_shape(file, for_planning=True) == read(tmp_path, TRAINABLE[name])
        method = "mxfp4" if name in IN_MXFP4 else "fp8"
        assert found.quantization == (method if name in QUANTISED else None)
    later = FLOAT8 | {"scale_fmt": "ue8m0", "modules_to_not_convert": ["lm_head"]}
    assert read(tmp_path, DEEPSEEK_V3, quantization_config=later).quantization == "fp8"


def test_other_quantised_config_is_read_for_planning_only(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    values = json.loads(KIMI_K2) | {"quantization_config": {"quant_method": "awq"}}
    file.write_text(json.dumps(values))
    assert read_model_shape(file, flag="--hf-config", for_planning=True).quantization == "awq"
    with pytest.raises(UsageError, match=f"^--hf-config: {file} asks for quantised weights"):
        read_model_shape(file, flag="--hf-config")


def test_missing_config_names_flag_of_folder(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=f"^--rl-reward-checkpoint {tmp_path} has no config.json"):
        read_model_shape(tmp_path, flag="--rl-reward-checkpoint")
