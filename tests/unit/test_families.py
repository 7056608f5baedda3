"""Every family: its published models have their published size, and under both of Megatron's spec
families the parameters of all ranks together are the checkpoint, nothing more and nothing less."""

from __future__ import annotations

import math
from collections import defaultdict
from pathlib import Path

import pytest

from mcore_rl.model.boxes import full_box, uncovered
from mcore_rl.model.config_json import ModelShape, model_shape, read_model_shape
from mcore_rl.model.families import FAMILIES
from mcore_rl.model.tensors import checkpoint_tensors, embedding_specs, head_specs, layer_specs
from mcore_rl.model.weight_map import ShardCoordinates, map_parameter
from scripts.make_tiny_deepseek import ARCHS, hf_config
from tests.megatron_parameters import SPECS, stage_parameters
from tests.model_shapes import CONFIGS
from tests.plans import covers_once

# Published counts of parameters, without MTP layers. What is published of GLM counts these, too,
# and of MiniMax-M2 the scales of its float8: there, and of Hy3, they are those of transformers'
# class.
SIZES = {
    "deepseek-v2": 235_741_434_880,
    "deepseek-v2-lite": 15_706_484_224,
    "deepseek-v3": 671_026_404_352 + 58 * 256,  # and the routers' biases
    "deepseek-v3.2": 671_877_929_216 + 58 * 256,
    "dots.llm1": 142_774_381_696,
    "glm-4.5": 352_797_814_784 + 89 * 160,
    "glm-4.5-air": 106_852_245_504 + 45 * 128,
    "glm-4.5v": 106_852_245_504 + 45 * 128,  # GLM-4.5-Air's
    "glm-4.7-flash": 29_943_390_976 + 46 * 64,
    "glm-5": 743_911_199_232 + 75 * 256,
    "glm-5.2": 743_377_000_704 + 75 * 256,
    "gpt-oss-120b": 116_829_156_672,
    "gpt-oss-20b": 20_914_757_184,
    "hy3-preview": 295_033_528_320 + 79 * 192,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.2-1b": 1_235_814_400,
    "minimax-m2": 228_689_748_992 + 62 * 256,
    "mistral-small-24b-2501": 23_572_403_200,
    "mixtral-8x7b": 46_702_792_704,
    # Numbers of the class of transformers, and the biases of its routers.
    "nemotron-3-nano-30b-a3b": 31_577_937_344 + 23 * 128,
    "nemotron-h-8b": 8_100_852_736,
    "olmoe-1b-7b-0924": 6_919_161_856,
    "qwen1.5-moe-a2.7b": 14_315_784_192,
    "qwen2.5-7b": 7_615_616_512,
    "qwen3-0.6b": 596_049_920,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-next-80b-a3b": 79_674_391_296,
    "qwen3-vl-30b-a3b": 30_532_122_624,  # Qwen3-30B-A3B's
    "qwen3-vl-8b": 8_190_735_360,  # Qwen3-8B's
    # Text models: numbers of transformers' classes.
    "qwen3.5-35b-a3b": 34_660_610_688,
    "qwen3.5-397b-a17b": 396_346_350_336,
    "qwen3.5-9b": 8_953_803_264,
    "seed-oss-36b": 36_151_104_512,
}


def tiny(arch: str, tied: bool = False) -> ModelShape:
    return model_shape(hf_config(arch, tie_word_embeddings=tied), Path("config.json"))


@pytest.mark.parametrize("name", SIZES)
def test_published_model_has_its_published_size(name: str) -> None:
    shape = read_model_shape(CONFIGS / f"{name}.json", for_planning=True)
    specs = [*embedding_specs(shape), *head_specs(shape)]
    for kind in shape.layer_kinds:
        specs += layer_specs(shape, kind)
    assert sum(math.prod(s.shape) * max(1, s.num_experts) for s in specs) == SIZES[name]


def test_every_family_has_a_tiny_and_a_published_model() -> None:
    published = {read_model_shape(f, for_planning=True).architecture for f in CONFIGS.iterdir()}
    assert published == {tiny(arch).architecture for arch in ARCHS} == set(FAMILIES)


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("arch", ARCHS)
def test_parameters_of_all_ranks_are_the_checkpoint(arch: str, spec: str) -> None:
    """Distinct boxes tile every tensor of the table; locally only padding is left over."""
    shape = tiny(arch, tied=arch in ("qwen3", "llama"))
    tp_size, (ep_size, etp_size) = 2, (2, 2) if shape.experts else (1, 1)
    found: dict[str, set] = defaultdict(set)
    for rank in range(tp_size * ep_size * etp_size):
        tp_rank, etp_rank, ep_rank = rank % tp_size, rank // tp_size % etp_size, rank // 4
        layers = tuple(range(shape.num_layers))
        numbered = SPECS[spec].numbered(layers)
        at = ShardCoordinates(tp_rank, tp_size, ep_rank, ep_size, etp_rank, etp_size, numbered)
        parameters = stage_parameters(
            shape, SPECS[spec], tp_size=tp_size, ep_size=ep_size, etp_size=etp_size, layers=layers
        )
        for name, size in parameters.items():
            pieces = map_parameter(name, size, shape, at)
            for piece in pieces:
                found[piece.tensor].add(piece.checkpoint_box)
            left = uncovered(full_box(size), [piece.local_box for piece in pieces])
            assert not left or "word_embeddings" in name or "output_layer" in name
    expected = {name: tensor.shape for name, tensor in checkpoint_tensors(shape)}
    assert found.keys() == expected.keys()
    for tensor, size in expected.items():
        assert covers_once(full_box(size), list(found[tensor])), tensor


STRANGERS = {
    "mlp.experts.linear_fc1.weight": "deepseek_v3",  # --moe-single-grouped-weight
    "mlp.shared_experts.gate_weight": "deepseek_v3",
    "mlp.shared_experts.linear_fc1.weight": "qwen3_moe",
    "mlp.router.expert_bias": "mixtral",
    "mlp.experts.local_experts.0.linear_fc1.weight": "llama",
    "self_attention.linear_qkv.bias": "llama",
    "self_attention.linear_q_down_proj.weight": "moonlight",
    "self_attention.linear_q_proj.weight": "deepseek_v3",
    "self_attention.linear_qkv.weight": "kimi_k2",
    "self_attention.q_layernorm.weight": "qwen2",
    "mlp.linear_fc1.bias": "qwen2",
    "self_attention.linear_proj.bias": "qwen2",
    "self_attention.core_attention.softmax_offset": "qwen3_moe",
    "mlp.router.bias": "mixtral",
    "mlp.experts.local_experts.0.linear_fc2.bias": "mixtral",
}


@pytest.mark.parametrize(
    ("name", "arch", "width", "needed"),
    [
        ("q", "olmoe", 32, 128),  # as Megatron's own spec has it, of each head
        ("k", "minimax_m2", 32, 64),
        ("q", "qwen3_moe", 128, 32),
    ],
)
def test_norm_with_another_number_of_heads_is_refused(
    name: str, arch: str, width: int, needed: int
) -> None:
    at = ShardCoordinates(0, 1, 0, 1, 0, 1, layers=(0,))
    parameter = f"decoder.layers.0.self_attention.{name}_layernorm.weight"
    with pytest.raises(RuntimeError, match=rf"has shape \[{width}\] and .* \[{needed}\]"):
        map_parameter(parameter, (width,), tiny(arch), at)


@pytest.mark.parametrize(("name", "arch"), STRANGERS.items())
def test_parameter_that_the_family_lacks_is_named(name: str, arch: str) -> None:
    at = ShardCoordinates(0, 1, 0, 1, 0, 1, layers=(0, 1))
    with pytest.raises(RuntimeError, match=rf"'decoder.layers.1.{name}' \[4, 4\] has no counterp"):
        map_parameter(f"decoder.layers.1.{name}", (4, 4), tiny(arch), at)
