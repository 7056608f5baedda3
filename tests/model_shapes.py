"""Shapes and configurations of models that several tests share: published ones, and small ones."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import transformers

from mcore_rl.model.config_json import LatentAttention, ModelShape, model_shape, read_model_shape
from mcore_rl.model.experts import Experts
from mcore_rl.model.families import FAMILIES
from mcore_rl.planner.settings import GB, Machine
from scripts.make_tiny_deepseek import hf_config

CONFIGS = Path(__file__).parent / "data" / "configs"
# Written out, so that reading config.json can be compared with it.
# Nodes of 8 GPUs of 80 GB, as far as traffic goes.
MACHINE = Machine(
    ranks_per_node=8,
    gpu_bytes=80 * GB,
    reserved_bytes=0,
    host_bytes=0,
    own_node_rate=400e9,
    other_nodes_rate=50e9,
)
DEEPSEEK_V3_EXPERTS = Experts(
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
)
DEEPSEEK_V3 = ModelShape(
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
    experts=DEEPSEEK_V3_EXPERTS,
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


@functools.cache
def published_shape(name: str) -> ModelShape:
    """The shape in tests/data/configs/<name>.json, quantised or not."""
    return read_model_shape(CONFIGS / f"{name}.json", for_planning=True)


def small_shape(
    *,
    num_layers: int = 4,
    num_experts: int = 16,
    latent: bool = False,
    tied: bool = False,
    vocab_size: int = 500,
    num_kv_heads: int = 16,
) -> ModelShape:
    """A model whose sizes divide by 16, else as DeepSeek-V3."""
    experts = replace(
        DEEPSEEK_V3_EXPERTS,
        num_experts=num_experts,
        topk=2,
        hidden_size=32,
        shared_hidden_size=64,
        scaling_factor=1.0,
        num_groups=None,
        topk_groups=None,
    )
    return replace(
        DEEPSEEK_V3,
        architecture="deepseek_v3" if latent else "qwen3_moe",
        num_layers=num_layers,
        hidden_size=64,
        ffn_hidden_size=128,
        vocab_size=vocab_size,
        num_heads=16,
        num_kv_heads=num_kv_heads,
        head_dim=4,
        latent=LatentAttention(24, 16, 8, 4, 8) if latent else None,
        experts=experts if num_experts else None,
        is_moe_layer=tuple(bool(num_experts) and i > 0 for i in range(num_layers)),
        tied_embeddings=tied,
        rope={"rope_type": "default", "rope_theta": 1e4},
        max_positions=64,
        num_mtp_layers=0,
    )


def made_values(config_json: Mapping[str, Any]) -> dict[str, Any]:
    """Of a parsed config.json what someone gives who makes the configuration by transformers'
    class, which has fewer fields."""
    values = dict(config_json)
    family = FAMILIES[values.pop("model_type")]
    config_class = model_class(family.model_type).config_class
    if config_class.model_type != family.model_type and values.get("rope_scaling"):
        # It is the class of a model of text alone.
        of_text = values["rope_scaling"].items()
        values["rope_scaling"] = {n: v for n, v in of_text if n not in family.rope_of_images}
    if config_class.model_type == "deepseek_v2" and values["n_group"] == 1:
        del values["n_group"], values["topk_group"]  # no groups are its defaults
    fields = {*config_class.__dataclass_fields__, *config_class.attribute_map.values()}
    # Which are understood all the same.
    fields |= {"rope_scaling", "rope_theta", "head_dim", "rotary_dim", "hybrid_override_pattern"}
    return {name: value for name, value in values.items() if name in fields}


def has_experts(arch: str) -> bool:
    """Whether an --arch of make_tiny_deepseek has experts."""
    return tiny_shape(arch).experts is not None


def tiny_shape(arch: str) -> ModelShape:
    """The shape of an --arch of make_tiny_deepseek."""
    return model_shape(hf_config(arch), CONFIGS)


def has_engine_on_cpu(arch: str) -> bool:
    """Whether vLLM runs an --arch without a GPU."""
    return tiny_shape(arch).needs_gpu is None


def has_one_block_a_layer(arch: str) -> bool:
    """Whether an --arch has layers of one block, which only a HybridModel has."""
    return bool(tiny_shape(arch).blocks)


def model_class(model_type: str) -> Any:
    """Return transformers' class of a family."""
    return getattr(transformers, FAMILIES[model_type].class_name)
