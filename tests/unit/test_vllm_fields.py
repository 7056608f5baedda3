"""Fields of config.json that vLLM reads and mcore_rl does not map."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mcore_rl.common.errors import UsageError
from mcore_rl.model.config_fields import Fields
from mcore_rl.model.config_json import ModelShape, model_shape
from mcore_rl.model.families import FAMILIES
from mcore_rl.model.vllm_fields import OF_ALL_MODELS, OF_CLASS
from tests.model_shapes import CONFIGS
from tests.vllm_reads import read_by_class, read_of_all_models

# Read by vLLM without effect on the model's computation: reason -> fields.
_REASONS = {
    "methods of the configuration, and fields that vLLM makes by itself": """
        get get_nemotron_h_config_for_layer get_text_config items to_dict update model method
        max_model_len quantization_config_dict_json quantization_config_file name_or_path
    """,
    "dtypes, lengths and files, which engines here are told": """
        architectures dtype model_max_length quantization_config
    """,
    "of pooling models, and engines here generate": """
        classifier_from_token is_decoder is_matryoshka matryoshka_dimensions num_labels pooling
        use_pad_token use_sep_token
    """,
    "of drafters with a config.json of their own": """
        block_size candidate_block_size candidate_topk_blocks canvas_length dflash_config
        draft_vocab_size dspark_block_size dspark_draft_topk dspark_noise_token_id
        dspark_target_layer_ids eagle_aux_hidden_state_layer_ids eagle_config
        index_share_for_mtp_iteration mask_token_id mtp_config mtp_layer_types mtp_num_experts
        mtp_num_experts_per_tok mtp_num_hidden_layers n_predict num_lookahead_tokens num_mtp_modules
        pard_token ptd_token_id sample_from_anchor target_layer_count target_layer_ids
    """,
    "of the classes of transformers that vLLM runs: training, and the choice of attention": """
        _attn_implementation attention_dropout initializer_range pad_token_id residual_dropout
    """,
    "read beside another field, which decides": """
        kv_lora_rank max_window_layers num_layers qk_nope_head_dim qk_rope_head_dim topk_group
        v_head_dim
    """,
}
HARMLESS = frozenset(" ".join(_REASONS.values()).split())

PUBLISHED = {path.stem: json.loads(path.read_text()) for path in sorted(CONFIGS.glob("*.json"))}
# vLLM reads them without latent attention only, and in GLM's class for that of DeepSeek-V2.
_NOT_BY_LATENT_ATTENTION = {"head_dim", "num_key_value_heads", "use_qk_norm"}

# vLLM has one file for Qwen3.5 with images and without, of experts and dense.
_OF_IMAGES = set(
    """
    image_size image_token_id layer_norm_eps num_channels patch_size projection_dim projection_size
    spatial_merge_size video_token_id vision_end_token_id vision_start_token_id vision_use_head
    """.split()
)
_OF_THE_OTHER_QWEN3_5 = {
    "qwen3_5_moe_text": {"intermediate_size"},
    "qwen3_5_text": set(
        """
        decoder_sparse_step mlp_only_layers moe_intermediate_size norm_topk_prob num_experts
        num_experts_per_tok shared_expert_intermediate_size
        """.split()
    ),
}


def mapped(model_type: str, monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Fields of a family's published files that are read."""
    found: set[str] = set()

    def keep(self: Fields, *arguments: Any) -> None:
        init(self, *arguments)
        self.read = found

    init = Fields.__init__
    with monkeypatch.context() as patched:
        patched.setattr(Fields, "__init__", keep)
        for values in PUBLISHED.values():
            if values["model_type"] == model_type:
                model_shape(values, Path("config.json"), for_planning=True)
    assert found, f"no published config.json of {model_type}"
    return found


@pytest.mark.slow
@pytest.mark.parametrize("model_type", FAMILIES)
def test_every_field_that_vllm_reads_is_mapped_or_in_a_table(model_type, monkeypatch):
    """Fails with the new fields of another version of vLLM."""
    family = FAMILIES[model_type]
    known = HARMLESS | OF_ALL_MODELS | OF_CLASS.get(family.class_name, frozenset())
    known |= mapped(model_type, monkeypatch)
    if family.latent_attention:
        known |= _NOT_BY_LATENT_ATTENTION
    if model_type in _OF_THE_OTHER_QWEN3_5:
        known |= _OF_IMAGES | _OF_THE_OTHER_QWEN3_5[model_type]
    assert read_by_class(family.class_name) | read_of_all_models() <= known


@pytest.mark.slow
def test_tables_list_only_fields_that_vllm_reads():
    classes = {family.class_name for family in FAMILIES.values()}
    read = read_of_all_models()
    assert read >= OF_ALL_MODELS
    for name, fields in OF_CLASS.items():
        assert name in classes
        assert read_by_class(name) >= fields, name
    assert HARMLESS & OF_ALL_MODELS == set()


def shape_of(name: str, **fields: Any) -> ModelShape:
    return model_shape({**PUBLISHED[name], **fields}, Path("config.json"), for_planning=True)


@pytest.mark.parametrize(
    ("name", "field", "value"),
    [
        ("qwen2.5-7b", "dual_chunk_attention_config", {"chunk_size": 1024}),
        ("qwen2.5-7b", "qk_norm", True),
        ("qwen2.5-7b", "is_causal", False),
        ("qwen2.5-7b", "layer_types", ["full_attention", "sliding_attention"] * 14),
        ("qwen3-30b-a3b", "dual_chunk_attention_config", {"chunk_size": 1024}),
        ("qwen3-30b-a3b", "shared_expert_intermediate_size", 768),
        ("qwen3-0.6b", "text_config", {"hidden_size": 1024}),
        ("mistral-small-24b-2501", "llama_4_scaling", {"beta": 0.1}),
        ("mistral-small-24b-2501", "ada_rms_norm_t_cond", True),
        ("llama-3.2-1b", "sliding_window", 4096),
        ("llama-3.2-1b", "logit_scale", 0.25),
        ("llama-3.2-1b", "qkv_bias", True),
        ("llama-3.2-1b", "attn_logit_softcapping", 30.0),
        ("deepseek-v3", "index_topk", 2048),
        ("deepseek-v3", "moe_router_dtype", "bfloat16"),
        ("deepseek-v2-lite", "llama_4_scaling", {"beta": 0.1}),
        ("glm-4.7-flash", "index_topk_freq", 4),
        ("deepseek-v3.2", "llama_4_scaling", {"beta": 0.1}),
        ("glm-5", "index_kpool", 4),
        ("mixtral-8x7b", "attention_chunk_size", 8192),
    ],
)
def test_field_that_only_vllm_supports_is_refused(name, field, value):
    with pytest.raises(UsageError, match=rf"asks for {field} .*not supported") as refusal:
        shape_of(name, **{field: value})
    assert refusal.value.remedy


@pytest.mark.parametrize("name", PUBLISHED)
def test_values_without_an_effect_are_accepted(name):
    expected = shape_of(name)
    plain = {"layer_types": ["full_attention"] * PUBLISHED[name]["num_hidden_layers"]}
    if expected.sliding_window or expected.delta_net or expected.indexer or expected.blocks:
        plain = {}
    assert expected == shape_of(
        name,
        **plain,
        is_causal=True,
        dual_chunk_attention_config=None,
        attn_logit_softcapping=None,
        text_config={},
        use_bidirectional_attention=False,
        logit_scale=1.0,
        moe_router_dtype="float32",
        num_labels=2,
        is_decoder=True,
        chunk_size_feed_forward=64,
        architectures=["AnyForCausalLM"],
        auto_map={"AutoConfig": "configuration.Config"},
        aux_loss_alpha=0.001,
        seq_aux=True,
        ep_size=1,
        num_mtp_modules=3,
        mtp_transformer_layers=1,
    )
