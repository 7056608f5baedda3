"""Published config.json files, read into shapes and into Megatron's flags; and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, PretrainedConfig

from mcore_rl.common.errors import UsageError
from mcore_rl.data.tokenizer import model_class, register_families
from mcore_rl.hybrid_engine.vllm.startup import EngineConfig, _with_fields, engine_arguments
from mcore_rl.model.config_json import (
    ModelShape,
    megatron_flags,
    model_shape,
    read_config_json,
    read_model_shape,
    settings_without_flag,
)
from mcore_rl.model.families import FAMILIES, MISSING, left_to_defaults
from tests import model_shapes
from tests.model_shapes import CONFIGS, made_values

# As published, but for names of classes and files, token ids, dropout and dtype.
PUBLISHED = {path.stem: path.read_text() for path in sorted(CONFIGS.glob("*.json"))}
IN_MXFP4 = ("gpt-oss-120b", "gpt-oss-20b")
QUANTISED = ("deepseek-v3", "kimi-k2-instruct-0905", "minimax-m2", *IN_MXFP4)  # else in FP8 blocks


def trainable(name: str) -> str:
    """A published config.json as it is once the weights are dequantised."""
    values = json.loads(PUBLISHED[name])
    assert ("quantization_config" in values) == (name in QUANTISED)
    values.pop("quantization_config", None)
    return json.dumps(values)


TRAINABLE = {name: trainable(name) for name in PUBLISHED}
DEEPSEEK_V3, DEEPSEEK_V2_LITE = TRAINABLE["deepseek-v3"], TRAINABLE["deepseek-v2-lite"]
DEEPSEEK_V2, KIMI_K2 = TRAINABLE["deepseek-v2"], TRAINABLE["kimi-k2-instruct-0905"]
QWEN3_30B_A3B, QWEN3_600M = TRAINABLE["qwen3-30b-a3b"], TRAINABLE["qwen3-0.6b"]
QWEN2_MOE, OLMOE = TRAINABLE["qwen1.5-moe-a2.7b"], TRAINABLE["olmoe-1b-7b-0924"]
MINIMAX_M2 = TRAINABLE["minimax-m2"]
QWEN2_7B, LLAMA_1B = TRAINABLE["qwen2.5-7b"], TRAINABLE["llama-3.2-1b"]
GPT_OSS = TRAINABLE["gpt-oss-20b"]
MIXTRAL, GLM4, GLM4_AIR = (TRAINABLE[n] for n in ("mixtral-8x7b", "glm-4.5", "glm-4.5-air"))
YARN = json.loads(DEEPSEEK_V3)["rope_scaling"]
YARN_ALONE = {"rope_type": "yarn", "factor": 2.0}
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
    for position, token in enumerate(tokens):
        if token.startswith("--"):
            following = tokens[position + 1 : position + 2]
            is_value = bool(following) and not following[0].startswith("--")
            assert token not in found
            found[token] = following[0] if is_value else None
    return found


def test_deepseek_v3_is_read(tmp_path: Path) -> None:
    assert read(tmp_path, DEEPSEEK_V3) == model_shapes.DEEPSEEK_V3


@pytest.mark.parametrize("name", TRAINABLE)
def test_config_that_transformers_has_saved_is_the_published_one(name: str, tmp_path: Path) -> None:
    """Read and saved; and made by the class, whose defaults are not all those of config.json."""
    published = read(tmp_path, TRAINABLE[name])
    register_families()
    AutoConfig.from_pretrained(tmp_path).save_pretrained(tmp_path / "read")
    config_class = model_class(published.architecture).config_class
    made = config_class(**made_values(json.loads(TRAINABLE[name])))
    made.save_pretrained(tmp_path / "made")
    AutoConfig.from_pretrained(tmp_path / "made").save_pretrained(tmp_path / "again")
    for folder in ("read", "made", "again"):
        saved = read_model_shape(tmp_path / folder)
        # Kimi-K2 is none of transformers' own names.
        assert replace(saved, architecture=published.architecture) == published
        assert folder == "read" or saved.architecture == made.model_type


OTHER_ARCHITECTURES = [
    *(..., None, [], "Qwen3ForCausalLM"),
    *(["Qwen3Model"], ["Qwen3ForSequenceClassification"], ["LlamaForCausalLM"]),
]


@pytest.mark.parametrize("named", OTHER_ARCHITECTURES)
def test_engines_generate_whatever_architecture_is_named(tmp_path: Path, named: Any) -> None:
    read(tmp_path, QWEN3_600M, architectures=named)
    arguments = engine_arguments(EngineConfig(tmp_path))
    assert arguments["hf_overrides"] == {"architectures": ["Qwen3ForCausalLM"]}
    assert arguments["runner"] == "generate"
    drafter = PretrainedConfig(architectures=["DeepSeekMTPModel"])
    drafter.model_type = "deepseek_mtp"
    assert _with_fields(arguments["hf_overrides"], drafter).architectures == ["DeepSeekMTPModel"]


def test_what_transformers_leaves_to_defaults_is_said_to_vllm(tmp_path: Path) -> None:
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


def test_flags_of_deepseek_v3(tmp_path: Path) -> None:
    assert flags(read(tmp_path, DEEPSEEK_V3)) == {
        "--num-layers": "61",
        "--hidden-size": "7168",
        "--ffn-hidden-size": "18432",
        "--num-attention-heads": "128",
        "--max-position-embeddings": "163840",
        "--normalization": "RMSNorm",
        "--norm-epsilon": "1e-06",
        "--position-embedding-type": "rope",
        "--rotary-base": "10000",
        "--vocab-size": "129280",
        "--swiglu": None,
        "--disable-bias-linear": None,
        "--qk-layernorm": None,
        "--untie-embeddings-and-output-weights": None,
        "--multi-latent-attention": None,
        "--q-lora-rank": "1536",
        "--kv-lora-rank": "512",
        "--qk-head-dim": "128",
        "--qk-pos-emb-head-dim": "64",
        "--v-head-dim": "128",
        "--rope-type": "yarn",
        "--rotary-scaling-factor": "40",
        "--mscale": "1.0",
        "--mscale-all-dim": "1.0",
        "--num-experts": "256",
        "--moe-router-topk": "8",
        "--moe-ffn-hidden-size": "2048",
        "--moe-layer-freq": "([" + ",".join("0" * 3 + "1" * 58) + "])",
        "--moe-shared-expert-intermediate-size": "2048",
        "--moe-router-score-function": "sigmoid",
        "--moe-router-enable-expert-bias": None,
        "--moe-router-topk-scaling-factor": "2.5",
        "--moe-router-num-groups": "8",
        "--moe-router-group-topk": "4",
    }


def test_flags_of_deepseek_v2_lite(tmp_path: Path) -> None:
    found = flags(read(tmp_path, DEEPSEEK_V2_LITE))
    assert "--q-lora-rank" not in found  # queries are projected directly
    assert found["--moe-shared-expert-intermediate-size"] == "2816"  # two of 1408
    assert found["--moe-router-score-function"] == "softmax"
    # The weights are those of the softmax over all experts, and nobody scales or corrects them.
    assert "--moe-router-pre-softmax" in found
    assert "--moe-router-enable-expert-bias" not in found
    assert "--moe-router-topk-scaling-factor" not in found
    assert "--moe-router-num-groups" not in found
    assert (found["--mscale"], found["--mscale-all-dim"]) == ("0.707", "0.707")


def test_flags_of_qwen3_moe(tmp_path: Path) -> None:
    found = flags(read(tmp_path, QWEN3_30B_A3B))
    assert found["--kv-channels"] == "128"  # not 2048 / 32
    assert (found["--group-query-attention"], found["--num-query-groups"]) == (None, "4")
    assert found["--rotary-base"] == "1000000"
    assert found["--moe-layer-freq"] == "([" + ",".join("1" * 48) + "])"
    assert (found["--num-experts"], found["--moe-router-topk"]) == ("128", "8")
    assert "--moe-router-pre-softmax" not in found  # norm_topk_prob: softmax over the chosen
    assert "--moe-shared-expert-intermediate-size" not in found
    assert "--multi-latent-attention" not in found and "--rope-type" not in found


def test_flags_of_qwen3(tmp_path: Path) -> None:
    found = flags(read(tmp_path, QWEN3_600M))
    assert "--untie-embeddings-and-output-weights" not in found
    assert "--qk-layernorm" in found
    assert found["--num-query-groups"] == "8"
    assert not [flag for flag in found if "moe" in flag or "expert" in flag]


def test_flags_of_deepseek_v2(tmp_path: Path) -> None:
    found = flags(read(tmp_path, DEEPSEEK_V2))
    assert (found["--moe-router-num-groups"], found["--moe-router-group-topk"]) == ("8", "3")
    assert found["--moe-router-topk-scaling-factor"] == "16.0"
    assert "--moe-router-pre-softmax" in found
    assert found["--q-lora-rank"] == "1536"


def test_flags_of_kimi_k2_and_what_they_leave_out(tmp_path: Path) -> None:
    shape = read(tmp_path, KIMI_K2)
    found = flags(shape)
    assert (found["--num-experts"], found["--rotary-base"]) == ("384", "50000")
    assert found["--rotary-scaling-factor"] == "64.0"
    assert "--moe-router-num-groups" not in found
    assert settings_without_flag(shape) == {
        "beta_fast": 1.0, "beta_slow": 1.0, "original_max_position_embeddings": 4096
    }  # fmt: skip
    assert settings_without_flag(read(tmp_path, DEEPSEEK_V3))["beta_fast"] == 32
    assert settings_without_flag(read(tmp_path, LLAMA_1B)) == {}


def test_flags_of_moonlight(tmp_path: Path) -> None:
    found = flags(read(tmp_path, TRAINABLE["moonlight-16b-a3b"]))
    assert (found["--rope-type"], found["--moe-router-score-function"]) == ("rope", "sigmoid")
    assert found["--moe-shared-expert-intermediate-size"] == "2816"
    assert "--q-lora-rank" not in found and "--rotary-scaling-factor" not in found


def test_flags_of_mixtral(tmp_path: Path) -> None:
    found = flags(read(tmp_path, MIXTRAL))
    assert (found["--num-experts"], found["--moe-router-topk"]) == ("8", "2")
    assert found["--moe-ffn-hidden-size"] == found["--ffn-hidden-size"] == "14336"
    assert found["--moe-layer-freq"] == "([" + ",".join("1" * 32) + "])"
    assert "--moe-router-pre-softmax" not in found  # softmax over the chosen
    assert "--qk-layernorm" not in found and "--add-qkv-bias" not in found
    assert (found["--kv-channels"], found["--rotary-base"]) == ("128", "1000000")


def test_flags_of_glm4(tmp_path: Path) -> None:
    found = flags(read(tmp_path, GLM4))
    assert found["--rotary-percent"] == "0.5"
    assert "--qk-layernorm" in found and "--add-qkv-bias" in found
    assert found["--moe-layer-freq"] == "([" + ",".join("0" * 3 + "1" * 89) + "])"
    assert found["--moe-router-score-function"] == "sigmoid"
    assert "--moe-router-enable-expert-bias" in found and "--disable-bias-linear" in found
    assert (found["--kv-channels"], found["--num-query-groups"]) == ("128", "8")
    assert "--qk-layernorm" not in flags(read(tmp_path, GLM4_AIR))
    saved = {"rope_theta": 1e6, "partial_rotary_factor": 0.25}
    other = read(tmp_path, GLM4, partial_rotary_factor=..., rope_parameters=saved)
    assert flags(other)["--rotary-percent"] == "0.25"


def test_flags_of_glm4_moe_lite(tmp_path: Path) -> None:
    text = TRAINABLE["glm-4.7-flash"]
    shape = read(tmp_path, text)
    found = flags(shape)
    assert (found["--q-lora-rank"], found["--v-head-dim"]) == ("768", "256")
    assert found["--kv-channels"] == "102"  # 2048 // 20: no whole number otherwise
    assert (found["--rope-type"], found["--rotary-base"]) == ("rope", "1000000")
    assert "--moe-router-enable-expert-bias" in found and "--rotary-percent" not in found
    types = ["dense", *["sparse"] * 46]
    assert read(tmp_path, text, first_k_dense_replace=..., mlp_layer_types=types) == shape


def test_flags_of_norms_over_all_heads(tmp_path: Path) -> None:
    olmoe, shape = read(tmp_path, OLMOE), read(tmp_path, MINIMAX_M2)
    assert olmoe.norms_whole_projection and shape.norms_whole_projection
    found = flags(olmoe)
    assert "--qk-layernorm" in found and "--moe-router-pre-softmax" in found
    assert found["--moe-ffn-hidden-size"] == "1024" and found["--kv-channels"] == "128"
    found = flags(shape)
    assert (found["--rotary-percent"], found["--rotary-base"]) == ("0.5", "5000000")
    assert found["--moe-router-score-function"] == "sigmoid"
    assert "--moe-router-enable-expert-bias" in found
    assert found["--num-experts"] == "256" and "--moe-router-topk-scaling-factor" not in found
    assert "--rotary-percent" not in flags(read(tmp_path, MINIMAX_M2, rotary_dim=128))


def test_flags_of_qwen2_moe(tmp_path: Path) -> None:
    found = flags(read(tmp_path, QWEN2_MOE))
    assert "--moe-shared-expert-gate" in found and "--add-qkv-bias" in found
    assert found["--moe-shared-expert-intermediate-size"] == "5632"
    assert "--moe-router-pre-softmax" in found and "--num-query-groups" not in found
    some_dense = read(tmp_path, QWEN2_MOE, mlp_only_layers=[1], num_hidden_layers=3)
    assert some_dense.is_moe_layer == (True, False, True)


def test_flags_of_qwen2(tmp_path: Path) -> None:
    found = flags(read(tmp_path, QWEN2_7B))
    assert "--add-qkv-bias" in found and "--disable-bias-linear" in found
    assert "--qk-layernorm" not in found
    assert (found["--kv-channels"], found["--num-query-groups"]) == ("128", "4")


def test_flags_of_llama(tmp_path: Path) -> None:
    found = flags(read(tmp_path, LLAMA_1B))
    assert "--use-rope-scaling" in found and found["--rope-scaling-factor"] == "32.0"
    assert found["--kv-channels"] == "64"
    assert "--untie-embeddings-and-output-weights" not in found
    assert "--add-qkv-bias" not in found and "--qk-layernorm" not in found
    plain = flags(read(tmp_path, LLAMA_1B, rope_scaling=None))
    assert "--use-rope-scaling" not in plain and "--rope-scaling-factor" not in plain


def test_weights_of_unnormalised_router_are_softmax_over_all(tmp_path: Path) -> None:
    shape = read(tmp_path, QWEN3_30B_A3B, norm_topk_prob=False)
    assert "--moe-router-pre-softmax" in flags(shape)


def test_as_many_key_value_heads_as_queries_need_no_groups(tmp_path: Path) -> None:
    found = flags(read(tmp_path, QWEN3_600M, num_key_value_heads=16))
    assert "--group-query-attention" not in found and "--num-query-groups" not in found


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"num_hidden_layers": 5, "decoder_sparse_step": 2}, "01010"),
        ({"num_hidden_layers": 5, "mlp_only_layers": [0, 3]}, "01101"),
        ({"num_hidden_layers": 6, "decoder_sparse_step": 3, "mlp_only_layers": [5]}, "001000"),
    ],
)
def test_layers_with_experts_of_qwen3_moe(fields: dict, expected: str, tmp_path: Path) -> None:
    shape = read(tmp_path, QWEN3_30B_A3B, **fields)
    assert "".join(str(int(is_moe)) for is_moe in shape.is_moe_layer) == expected


def test_layers_with_experts_of_deepseek(tmp_path: Path) -> None:
    fields = {"num_hidden_layers": 7, "first_k_dense_replace": 3, "moe_layer_freq": 2}
    shape = read(tmp_path, DEEPSEEK_V3, **fields)
    assert shape.is_moe_layer == (False, False, False, False, True, False, True)


def test_rope_of_both_generations_of_transformers_is_the_same(tmp_path: Path) -> None:
    old = read(tmp_path, DEEPSEEK_V3)
    scaling = {name: value for name, value in YARN.items() if name != "type"}
    parameters = {"rope_type": "yarn", "rope_theta": 10000.0, **scaling}
    new = read(tmp_path, DEEPSEEK_V3, rope_scaling=..., rope_theta=..., rope_parameters=parameters)
    assert new == old


@pytest.mark.parametrize("published", TRAINABLE)
def test_missing_field_is_named(published: str, tmp_path: Path) -> None:
    """Each field about the model either has a meaning where it is left out or is asked for."""
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
        "glm4_moe": {"partial_rotary_factor", "topk_group"},
        "glm4_moe_lite": {"num_key_value_heads", "partial_rotary_factor", "topk_group"},
        "qwen3_moe": {"head_dim", "norm_topk_prob"},
        "qwen2_moe": {"norm_topk_prob"},
        "gpt_oss": {
            "attention_dropout", "experts_per_token", "initial_context_length", "layer_types",
            "swiglu_limit",
        },
        "olmoe": {"clip_qkv", "norm_topk_prob", "num_key_value_heads"},
        "minimax_m2": {"num_mtp_modules", "qk_norm_type", "use_qk_norm", "use_routing_bias"},
        "llama": {"head_dim", "num_key_value_heads"},
    }.get(json.loads(text)["model_type"], set())  # fmt: skip
    if '"greedy"' in text:
        may_be_left_out |= {"n_group", "topk_group"}
    if "kimi" in published or "moonlight" in published:
        may_be_left_out |= {"topk_group"}  # of one group
    if '"mixtral"' in text or '"minimax_m2"' in text:
        may_be_left_out -= {"rope_theta"}  # transformers has another default
    if '"glm4_moe"' in text:
        may_be_left_out -= {"attention_bias"}  # it means those of queries, keys and values
    if '"gpt_oss"' in text:
        may_be_left_out -= {"rope_scaling", "rope_theta", "sliding_window"}
    for name in json.loads(text):
        if (published, name) == ("deepseek-v2", "topk_method"):
            continue  # whatever it is, groups contradict the default; see REFUSED
        if name in may_be_left_out:
            read(tmp_path, text, **{name: ...})
        else:
            with pytest.raises(UsageError, match=f"config.json has no field '{name}', .*; use"):
                read(tmp_path, text, **{name: ...})


def test_family_that_a_host_lacks_a_part_of_is_refused_with_that_part(tmp_path: Path) -> None:
    parts = {
        "qwen3_5_moe": "gated delta net: Megatron .*flash-linear-attention",
        "qwen3_5_moe_text": "gated delta net: Megatron",
        "qwen3_next": "gated delta net: Megatron",
        "deepseek_v32": r"sparse attention \(DSA\): Megatron .*vLLM's CPU build",
        "glm_moe_dsa": r"sparse attention \(DSA\)",
    }
    assert parts.keys() == MISSING.keys() and not MISSING.keys() & FAMILIES.keys()
    for model_type, part in parts.items():
        says = f"config.json has model_type '{model_type}', which needs {part}.*; supported are "
        with pytest.raises(UsageError, match=says):
            read(tmp_path, "{}", model_type=model_type)


REFUSED = {
    "architecture": (QWEN3_600M, {"model_type": "gpt2"}, "model_type 'gpt2'; supported are deep"),
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
        r"quantised weights \(quantization_config of compressed-tensors\).*or dequantise",
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
        TRAINABLE["glm-4.7-flash"],
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
    "yarn_without_latent": (QWEN3_600M, {"rope_scaling": YARN}, "outside latent attention"),
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
    "count_as_truth": (DEEPSEEK_V3, {"n_group": True}, "n_group True, which must be an integer"),
}


@pytest.mark.parametrize(("text", "fields", "says"), REFUSED.values(), ids=REFUSED)
def test_config_is_refused_in_one_sentence(
    text: str, fields: dict, says: str, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=says) as caught:
        read(tmp_path, text, **fields)
    sentence = str(caught.value)
    assert sentence.startswith(f"--rl-hf-checkpoint: {tmp_path}/config.json ")
    assert "; " in sentence and "\n" not in sentence


ODD = (None, True, "x", "false", -1, 1.5, float("nan"), float("inf"), 10**400, [], [[1]], {"a": 1})


@pytest.mark.parametrize("text", TRAINABLE.values(), ids=TRAINABLE)
def test_any_field_of_another_type_is_read_or_refused(text: str, tmp_path: Path) -> None:
    base = json.loads(text)
    more = ("layer_types", "mlp_only_layers", "partial_rotary_factor", "quantization_config")
    for name in (*base, *more, "rope_scaling", "rope_theta", "tie_word_embeddings"):
        for value in ODD:
            try:
                megatron_flags(model_shape({**base, name: value}, tmp_path / "config.json"))
            except UsageError as error:
                assert len(str(error)) < 1000


def test_a_switch_is_true_or_false(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="tie_word_embeddings 'false', which must be true or"):
        read(tmp_path, QWEN3_600M, tie_word_embeddings="false")


def test_config_that_is_nested_too_deep_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("[" * 100_000)
    with pytest.raises(UsageError, match="config.json cannot be read as JSON .*nested deeper"):
        read_model_shape(tmp_path)


def test_shape_of_fp8_blocks_is_that_of_what_they_stand_for(tmp_path: Path) -> None:
    for name in PUBLISHED:
        file = CONFIGS / f"{name}.json"
        found = read_model_shape(file)
        assert found == read_model_shape(file, for_planning=True) == read(tmp_path, TRAINABLE[name])
        method = "mxfp4" if name in IN_MXFP4 else "fp8"
        assert found.quantization == (method if name in QUANTISED else None)
    later = FLOAT8 | {"scale_fmt": "ue8m0", "modules_to_not_convert": ["lm_head"]}
    assert read(tmp_path, DEEPSEEK_V3, quantization_config=later).quantization == "fp8"


def test_shape_of_other_quantised_weights_is_for_planning_only(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    values = json.loads(KIMI_K2) | {"quantization_config": {"quant_method": "awq"}}
    file.write_text(json.dumps(values))
    assert read_model_shape(file, flag="--hf-config", for_planning=True).quantization == "awq"
    with pytest.raises(UsageError, match=f"^--hf-config: {file} asks for quantised weights"):
        read_model_shape(file, flag="--hf-config")


def test_flag_of_another_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=f"^--rl-reward-checkpoint {tmp_path} has no config.json"):
        read_model_shape(tmp_path, flag="--rl-reward-checkpoint")
