"""Models whose layers have one block each, Mamba-2 among them: config.json, patterns, refusals."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mcore_rl.common.errors import UsageError
from mcore_rl.job.engines import check_layers
from mcore_rl.job.layout import check_layout
from mcore_rl.megatron.adapter import packed_samples
from mcore_rl.megatron.model_class import choose_model_class
from mcore_rl.model.config_json import model_shape
from mcore_rl.model.hybrid_pattern import halves, has_mamba, hybrid_pattern, numbered_layers
from mcore_rl.model.layout import pipeline_layers
from mcore_rl.planner.engine import kv_bytes_per_token, state_bytes
from tests.model_shapes import CONFIGS, published_shape

DENSE, NANO = "nemotron-h-8b", "nemotron-3-nano-30b-a3b"


@pytest.mark.parametrize(
    ("name", "fields", "says"),
    [
        (DENSE, {"hybrid_override_pattern": "M-X*"}, "hybrid_override_pattern 'M-X.* symbols M"),
        (DENSE, {"hybrid_override_pattern": "*-*-"}, "no Mamba-2 layer"),
        (DENSE, {"num_hidden_layers": 50}, "num_hidden_layers 50 and a pattern of 52"),
        (DENSE, {"layers_block_type": ["mamba", "conv"]}, "layers_block_type .* a list of"),
        (DENSE, {"layers_block_type": ["mamba", "mlp"]}, "other layers by hybrid_override_pattern"),
        (DENSE, {"conv_kernel": 3}, r"conv_kernel 3 \(Megatron has 4\)"),
        (DENSE, {"layer_norm_epsilon": 1e-6}, r"layer_norm_epsilon 1e-06 \(Megatron has 1e-05\)"),
        (DENSE, {"attention_head_dim": 64}, r"attention_head_dim 64 \(Megatron has 128\)"),
        (DENSE, {"mamba_num_heads": 129}, "mamba_num_heads 129, which must be a multiple of"),
        (DENSE, {"use_conv_bias": False}, "use_conv_bias False"),
        (DENSE, {"mlp_hidden_act": "silu"}, "mlp_hidden_act silu"),
        (NANO, {"moe_latent_size": 1024}, "moe_latent_size 1024"),
        (NANO, {"norm_topk_prob": False}, "norm_topk_prob False"),
        (NANO, {"n_shared_experts": 2}, "n_shared_experts 2"),
    ],
)
def test_what_megatron_or_vllm_lacks_is_refused(
    name: str, fields: dict[str, Any], says: str
) -> None:
    values = json.loads((CONFIGS / f"{name}.json").read_text()) | fields
    with pytest.raises(UsageError, match=says):
        model_shape(values, Path("config.json"))


def test_layers_of_the_pattern_are_the_models_layers() -> None:
    shape = published_shape(DENSE)
    pattern = hybrid_pattern(halves(shape), pipeline_layers(52, 2))
    assert pattern.replace("|", "") == shape.blocks and pattern.index("|") == 26
    layers = [SimpleNamespace(layer_number=number) for number in (27, 28, 29)]
    second = SimpleNamespace(hybrid_layer_pattern=pattern, decoder=SimpleNamespace(layers=layers))
    assert [number for number, _ in numbered_layers(second)] == [26, 27, 28]
    assert has_mamba(second) and not has_mamba(SimpleNamespace(hybrid_layer_pattern="*-|*E"))


def test_class_without_such_layers_is_refused() -> None:
    assert choose_model_class("auto", {}, has_mamba=True).name == "hybrid"
    assert choose_model_class("gpt", {"mamba_num_heads": 8}).name == "gpt"  # a fork's default
    with pytest.raises(UsageError, match="--rl-model-class gpt has no Mamba-2 .*; give auto or"):
        choose_model_class("gpt", {}, has_mamba=True)
    says = "--rl-model-class hybrid is not possible with --spec a b, .*; drop --spec a b"
    with pytest.raises(UsageError, match=says):
        choose_model_class("auto", {"spec": ["a", "b"]}, has_mamba=True)


def test_degrees_that_split_a_group_or_a_head_are_refused() -> None:
    shape = published_shape(DENSE)
    assert shape.mamba is not None
    few = replace(shape, mamba=replace(shape.mamba, num_groups=2))
    with pytest.raises(UsageError, match="--tensor-.* 4 .*n_groups 2; choose"):
        check_layout(few, {"tensor_model_parallel_size": 4}, 4)
    degrees = {"tensor_model_parallel_size": 4, "context_parallel_size": 64}
    says = "--context-parallel-size 64 x --tensor-.* 4 .*mamba_num_heads 128; choose"
    with pytest.raises(UsageError, match=says):
        check_layout(shape, degrees, 256)


def test_engines_of_experts_without_a_gate_need_a_gpu() -> None:
    says = "experts without a gate vLLM runs on GPUs only; use .*--rl-verify-megatron-only"
    with pytest.raises(UsageError, match=says):
        check_layers(published_shape(NANO), cuda=False)
    check_layers(published_shape(NANO), cuda=True)
    check_layers(published_shape(DENSE), cuda=False)


def test_kernels_are_told_where_samples_begin() -> None:
    """Without the numbers of samples the state of mamba-ssm's kernels crosses their borders."""
    bounds = torch.tensor([0, 2, 5, 6], dtype=torch.int32)
    assert packed_samples(bounds, 3).seq_idx is None
    found = packed_samples(bounds, 3, None, 6)
    assert found.seq_idx.tolist() == [[0, 0, 1, 1, 1, 2]]


def test_mamba_layers_cache_a_state_per_sequence_and_nothing_per_token() -> None:
    shape = published_shape(DENSE)  # 4 layers of 52 have attention, 24 Mamba-2
    assert kv_bytes_per_token(shape, 2) == 2 * 4 * 128 * 2 * 4
    state, inputs = 128 * 64 * 128 * 4, 3 * (128 * 64 + 2 * 8 * 128) * 2
    assert state_bytes(shape, 2) == 24 * (state + inputs) // 2
