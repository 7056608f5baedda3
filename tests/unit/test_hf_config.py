"""Published config.json files, read into shapes and into Megatron's flags; and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mcore_rl.errors import UsageError
from mcore_rl.hf_config import (
    Experts,
    LatentAttention,
    ModelShape,
    megatron_flags,
    read_model_shape,
)

# As published, but for names of classes and files, token ids, dropout and dtype; DeepSeek-V3's says
# of its weights that they are in float8, which stands apart here.
DEEPSEEK_V3 = """{
  "model_type": "deepseek_v3", "attention_bias": false, "first_k_dense_replace": 3,
  "hidden_act": "silu", "hidden_size": 7168, "intermediate_size": 18432, "kv_lora_rank": 512,
  "max_position_embeddings": 163840, "moe_intermediate_size": 2048, "moe_layer_freq": 1,
  "n_group": 8, "n_routed_experts": 256, "n_shared_experts": 1, "norm_topk_prob": true,
  "num_attention_heads": 128, "num_experts_per_tok": 8, "num_hidden_layers": 61,
  "num_key_value_heads": 128, "num_nextn_predict_layers": 1, "q_lora_rank": 1536,
  "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-06,
  "rope_scaling": {"beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0,
    "mscale_all_dim": 1.0, "original_max_position_embeddings": 4096, "type": "yarn"},
  "rope_theta": 10000, "routed_scaling_factor": 2.5, "scoring_func": "sigmoid",
  "tie_word_embeddings": false, "topk_group": 4, "topk_method": "noaux_tc", "v_head_dim": 128,
  "vocab_size": 129280}"""
FLOAT8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
DEEPSEEK_V2_LITE = """{
  "model_type": "deepseek_v2", "attention_bias": false, "first_k_dense_replace": 1,
  "hidden_act": "silu", "hidden_size": 2048, "intermediate_size": 10944, "kv_lora_rank": 512,
  "max_position_embeddings": 163840, "moe_intermediate_size": 1408, "moe_layer_freq": 1,
  "n_group": 1, "n_routed_experts": 64, "n_shared_experts": 2, "norm_topk_prob": false,
  "num_attention_heads": 16, "num_experts_per_tok": 6, "num_hidden_layers": 27,
  "num_key_value_heads": 16, "q_lora_rank": null, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
  "rms_norm_eps": 1e-06, "rope_scaling": {"beta_fast": 32, "beta_slow": 1, "factor": 40,
    "mscale": 0.707, "mscale_all_dim": 0.707, "original_max_position_embeddings": 4096,
    "type": "yarn"},
  "rope_theta": 10000, "routed_scaling_factor": 1.0, "scoring_func": "softmax",
  "tie_word_embeddings": false, "topk_group": 1, "topk_method": "greedy", "v_head_dim": 128,
  "vocab_size": 102400}"""
QWEN3_30B_A3B = """{
  "model_type": "qwen3_moe", "attention_bias": false, "decoder_sparse_step": 1, "head_dim": 128,
  "hidden_act": "silu", "hidden_size": 2048, "intermediate_size": 6144,
  "max_position_embeddings": 40960, "max_window_layers": 48, "mlp_only_layers": [],
  "moe_intermediate_size": 768, "norm_topk_prob": true, "num_attention_heads": 32,
  "num_experts": 128, "num_experts_per_tok": 8, "num_hidden_layers": 48, "num_key_value_heads": 4,
  "rms_norm_eps": 1e-06, "rope_scaling": null, "rope_theta": 1000000.0, "sliding_window": null,
  "tie_word_embeddings": false, "use_sliding_window": false, "vocab_size": 151936}"""
QWEN3_600M = """{
  "model_type": "qwen3", "attention_bias": false, "head_dim": 128, "hidden_act": "silu",
  "hidden_size": 1024, "intermediate_size": 3072, "max_position_embeddings": 40960,
  "max_window_layers": 28, "num_attention_heads": 16, "num_hidden_layers": 28,
  "num_key_value_heads": 8, "rms_norm_eps": 1e-06, "rope_scaling": null, "rope_theta": 1000000,
  "sliding_window": null, "tie_word_embeddings": true, "use_sliding_window": false,
  "vocab_size": 151936}"""
PUBLISHED = {
    "deepseek_v3": DEEPSEEK_V3,
    "deepseek_v2": DEEPSEEK_V2_LITE,
    "qwen3_moe": QWEN3_30B_A3B,
    "qwen3": QWEN3_600M,
}
YARN = json.loads(DEEPSEEK_V3)["rope_scaling"]


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
    assert read(tmp_path, DEEPSEEK_V3) == ModelShape(
        architecture="deepseek_v3",
        num_layers=61,
        hidden_size=7168,
        ffn_hidden_size=18432,
        vocab_size=129280,
        num_heads=128,
        num_kv_heads=128,
        head_dim=56,  # 7168 / 128; means nothing in latent attention
        latent=LatentAttention(
            q_lora_rank=1536,
            kv_lora_rank=512,
            qk_nope_head_dim=128,
            qk_rope_head_dim=64,
            v_head_dim=128,
        ),
        experts=Experts(
            num_experts=256,
            topk=8,
            hidden_size=2048,
            shared_hidden_size=2048,
            score_function="sigmoid",
            has_bias=True,
            normalize_topk=True,
            scaling_factor=2.5,
            num_groups=8,
            topk_groups=4,
        ),
        is_moe_layer=(False,) * 3 + (True,) * 58,
        qk_norm=True,
        qkv_bias=False,
        tied_embeddings=False,
        norm_epsilon=1e-6,
        rope={
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "beta_fast": 32,
            "beta_slow": 1,
            "factor": 40,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 4096,
        },
        max_positions=163840,
        num_mtp_layers=1,
    )


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


@pytest.mark.parametrize("text", PUBLISHED.values(), ids=PUBLISHED)
def test_missing_field_is_named(text: str, tmp_path: Path) -> None:
    """Each field about the model either has a meaning where it is left out or is asked for."""
    may_be_left_out = {
        "attention_bias", "decoder_sparse_step", "hidden_act", "max_window_layers",
        "mlp_only_layers", "moe_layer_freq", "num_nextn_predict_layers", "rope_scaling",
        "rope_theta", "sliding_window", "tie_word_embeddings", "use_sliding_window",
    }  # fmt: skip
    if '"deepseek_v2"' in text:
        may_be_left_out |= {
            "first_k_dense_replace", "n_group", "norm_topk_prob", "num_key_value_heads",
            "routed_scaling_factor", "scoring_func", "topk_group", "topk_method",
        }  # fmt: skip
    elif '"deepseek_v3"' in text:
        may_be_left_out |= {"num_key_value_heads"}  # latent attention has none
    elif '"qwen3_moe"' in text:
        may_be_left_out |= {"head_dim", "norm_topk_prob"}
    for name in json.loads(text):
        if name in may_be_left_out:
            read(tmp_path, text, **{name: ...})
        else:
            with pytest.raises(UsageError, match=f"config.json has no field '{name}', .*; use"):
                read(tmp_path, text, **{name: ...})


REFUSED = {
    "architecture": (QWEN3_600M, {"model_type": "llama"}, "model_type 'llama'; supported are"),
    "float8": (DEEPSEEK_V3, {"quantization_config": FLOAT8}, "quantised weights.*dequantise"),
    "activation": (QWEN3_600M, {"hidden_act": "gelu"}, "the activation 'gelu'"),
    "bias": (QWEN3_600M, {"attention_bias": True}, "biases"),
    "window": (QWEN3_600M, {"use_sliding_window": True}, "sliding-window attention"),
    "rope_order": (DEEPSEEK_V3, {"rope_interleave": False}, "not interleaved"),
    "rope_type": (QWEN3_600M, {"rope_scaling": {"rope_type": "linear"}}, "of type 'linear'"),
    "rope_text": (QWEN3_600M, {"rope_scaling": "yarn"}, "rope scaling 'yarn'"),
    "rope_theta": (QWEN3_600M, {"rope_theta": 10000.5}, "rope_theta 10000.5"),
    "yarn_without_latent": (QWEN3_600M, {"rope_scaling": YARN}, "outside latent attention"),
    "yarn_factor": (DEEPSEEK_V3, {"rope_scaling": {"type": "yarn"}}, "without a factor"),
    "yarn_beta": (
        DEEPSEEK_V3,
        {"rope_scaling": {**YARN, "beta_fast": 16}},
        r"yarn with beta_fast 16 \(Megatron has 32\)",
    ),
    "yarn_length": (
        DEEPSEEK_V3,
        {"rope_scaling": {**YARN, "original_max_position_embeddings": 8192}},
        "original_max_position_embeddings 8192",
    ),
    # Megatron ranks a group by its topk // topk_group best experts, V3 by two and V2 by one.
    "groups_of_v3": (DEEPSEEK_V3, {"topk_group": 2}, "topk_group 2 .*its best 4 experts"),
    "groups_of_v2": (
        DEEPSEEK_V2_LITE,  # those of the large DeepSeek-V2
        {"n_group": 8, "topk_group": 3, "topk_method": "group_limited_greedy"},
        "num_experts_per_tok 6 and topk_group 3 .*its best 2 experts",
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


def test_group_limited_routing_of_v2_with_one_expert_a_group_is_read(tmp_path: Path) -> None:
    shape = read(
        tmp_path,
        DEEPSEEK_V2_LITE,
        n_group=8,
        topk_group=6,
        topk_method="group_limited_greedy",
    )
    found = flags(shape)
    assert (found["--moe-router-num-groups"], found["--moe-router-group-topk"]) == ("8", "6")


def test_flag_of_another_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=f"^--rl-reward-checkpoint {tmp_path} has no config.json"):
        read_model_shape(tmp_path, flag="--rl-reward-checkpoint")
