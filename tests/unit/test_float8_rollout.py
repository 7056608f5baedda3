"""Which weights engines hold in FP8 blocks, what they take, and which jobs may ask for it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mcore_rl.common.errors import UsageError
from mcore_rl.common.platform import Platform
from mcore_rl.hybrid_engine.plan.placement import Placement, choose_rank_map
from mcore_rl.job.engines import check_float8_device
from mcore_rl.job.facts import Source
from mcore_rl.job.resolver import resolve
from mcore_rl.model.config_json import ModelShape, model_shape
from mcore_rl.model.float8_blocks import float8_weights
from mcore_rl.model.layout import RolloutLayout, TrainLayout, pipeline_layers
from mcore_rl.model.tensors import checkpoint_tensors
from tests.model_shapes import CONFIGS, DEEPSEEK_V3, published_shape

V2_LITE = published_shape("deepseek-v2-lite")
QWEN3_MOE = published_shape("qwen3-30b-a3b")


def in_blocks(shape: ModelShape, tp_size: int = 1, ep: bool = False, **given: Any) -> set[str]:
    """The kinds of weights of the last layer that are in FP8 blocks."""
    quantised = float8_weights(shape, RolloutLayout(8, tp_size, ep), **given)
    prefix = f"model.layers.{shape.num_layers - 1}."
    kinds = {name.removeprefix(prefix) for name in quantised.weights if name.startswith(prefix)}
    experts = {name for name in kinds if ".experts." in name}
    return (kinds - experts) | ({"experts"} if experts else set())


MLP = {f"mlp.shared_experts.{name}_proj.weight" for name in ("gate", "up", "down")}
MLA = {"q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"}
MLA = {f"self_attn.{name}.weight" for name in MLA}
GQA = {f"self_attn.{name}_proj.weight" for name in "qkvo"}


def test_linear_layers_are_quantised_as_deepseek_v3_is_published() -> None:
    quantised = float8_weights(DEEPSEEK_V3, RolloutLayout(8, 8, True))
    assert in_blocks(DEEPSEEK_V3, 8, True) == {*MLA, *MLP, "experts"}
    assert len(quantised.weights) == 61 * 5 + 3 * 3 + 58 * 3 * 257
    kept = {name for name, _ in checkpoint_tensors(DEEPSEEK_V3)} - quantised.weights
    endings = ("norm.weight", "gate.weight", "e_score_correction_bias", "lm_head.weight")
    assert all(name.endswith((*endings, "embed_tokens.weight")) for name in kept)
    assert "model.layers.60.mlp.gate" in quantised.kept_modules
    assert "model.layers.61.self_attn.o_proj" in quantised.kept_modules, "of its MTP layer"


@pytest.mark.parametrize(
    ("shape", "tp_size", "ep", "expected"),
    [
        (QWEN3_MOE, 1, False, {*GQA, "experts"}),
        (QWEN3_MOE, 2, False, {*GQA, "experts"}),
        (QWEN3_MOE, 4, False, {*GQA}),  # 192 rows of an expert on a rank
        (QWEN3_MOE, 4, True, {*GQA, "experts"}),
        (V2_LITE, 1, False, {*MLA, *MLP, "experts"} - {"self_attn.q_a_proj.weight",
                             "self_attn.q_b_proj.weight"} | {"self_attn.q_proj.weight"}),
    ],
)  # fmt: skip
def test_layers_whose_shards_cut_blocks_are_kept(
    shape: ModelShape, tp_size: int, ep: bool, expected: set[str]
) -> None:
    assert in_blocks(shape, tp_size, ep) == expected


def test_merged_layers_are_kept_as_a_whole() -> None:
    """10,944 rows of gate_proj are 85.5 blocks, so up_proj would begin within one."""
    first = float8_weights(V2_LITE, RolloutLayout(1, 1, False))
    assert not any(".layers.0.mlp.gate_proj" in name for name in first.weights)
    assert {"model.layers.0.mlp.gate_proj", "model.layers.0.mlp.up_proj"} < {*first.kept_modules}
    assert "model.layers.1.mlp.shared_experts.up_proj.weight" in first.weights


@pytest.mark.parametrize(
    ("fields", "tp_size", "ep", "kept"),
    [
        ({"q_lora_rank": 1600}, 1, False, {"q_a_proj", "kv_a_proj_with_mqa", "q_b_proj"}),
        ({"kv_lora_rank": 576}, 1, False, {"kv_b_proj"}),
        ({"v_head_dim": 96, "num_attention_heads": 2}, 1, False, {"o_proj"}),
        ({"v_head_dim": 96, "num_attention_heads": 8}, 1, False, set()),
        ({"v_head_dim": 96, "num_attention_heads": 8}, 4, True, {"o_proj", "kv_b_proj"}),
        ({"moe_intermediate_size": 64}, 1, False, {"experts", "gate_proj", "up_proj", "down_proj"}),
        ({"moe_intermediate_size": 256}, 4, True, {"gate_proj", "up_proj", "down_proj"}),
        ({"moe_intermediate_size": 256}, 2, False, set()),
        (
            {"hidden_size": 7200}, 1, False,
            {"q_a_proj", "kv_a_proj_with_mqa", "gate_proj", "up_proj", "experts"},
        ),
    ],
)  # fmt: skip
def test_layers_with_a_part_of_a_group_of_inputs_are_kept(
    fields: dict[str, int], tp_size: int, ep: bool, kept: set[str]
) -> None:
    """vLLM asserts it of each input on a rank, in its first forward pass."""
    values = json.loads((CONFIGS / "deepseek-v3.json").read_text()) | fields
    shape = model_shape(values, Path("config.json"), for_planning=True)
    everything = {name.split(".")[-2] for name in MLA | MLP} | {"experts"}
    found = {name.removesuffix(".weight").split(".")[-1] for name in in_blocks(shape, tp_size, ep)}
    assert everything - found == kept


def test_weights_that_were_not_published_in_blocks_are_kept() -> None:
    everything = float8_weights(DEEPSEEK_V3, RolloutLayout(8, 8, True)).weights
    published = frozenset(name for name in everything if "kv_b_proj" not in name)
    assert in_blocks(DEEPSEEK_V3, 8, True, published=published) == {
        *(MLA - {"self_attn.kv_b_proj.weight"}),
        *MLP,
        "experts",
    }


def test_plan_counts_blocks_with_their_scales() -> None:
    train = TrainLayout(256, tp_size=8, pp_size=8, ep_size=32)
    layers = pipeline_layers(61, 8, last=5)
    rollout = RolloutLayout(256, 8, True, 4, all2all_backend="flashinfer_nvlink_two_sided")
    in_bf16 = Placement(DEEPSEEK_V3, train, layers, rollout)
    in_float8 = Placement(DEEPSEEK_V3, train, layers, replace(rollout, float8=True))
    rank_map = choose_rank_map(in_float8, ranks_per_node=8)
    assert rank_map == tuple(range(256))
    assert np.array_equal(in_float8.received_bytes(rank_map), in_float8.lower_bound_bytes)
    quantised = float8_weights(DEEPSEEK_V3, rollout).weights
    sizes = {n: s.num_bytes // max(1, s.num_experts) for n, s in checkpoint_tensors(DEEPSEEK_V3)}
    saved = sum(sizes[name] for name in quantised) / 2  # all of an engine's 32 slots
    found = (in_bf16.resident_bytes - in_float8.resident_bytes)[:32].sum()
    replicated = sum(sizes[n] for n in quantised if n.endswith(("q_a_proj.weight", "mqa.weight")))
    dense = sum(sizes[n] for n in quantised if ".experts." not in n) - replicated
    whole = saved + 31 * replicated / 2 + 3 * dense / 2  # on every rank, in every TP group
    assert found == pytest.approx(whole * (1 - 4 / 128**2), rel=1e-4)


@pytest.fixture
def tokens(checkpoint_factory: Callable[..., Path], tmp_path: Path) -> list[str]:
    """A job's command line, of a model with layers that can be held in FP8 blocks."""
    return [
        *("--rl-hf-checkpoint", str(checkpoint_factory()), "--rl-prompts", "prompts.jsonl"),
        *("--rl-reward", "length", "--rl-run-dir", str(tmp_path)),
        *("--rl-max-prompt-tokens", "8", "--rl-max-response-tokens", "8"),
        *("--rl-num-prompts-per-step", "4", "--rl-num-samples-per-prompt", "4"),
        *("--rl-rollout-dtype", "fp8"),
    ]


TIS = ["--rl-mismatch-correction", "token_tis"]


@pytest.mark.parametrize(
    ("more", "has_cuda", "capability", "sentence"),
    [
        ([], True, (9, 0), r"--rl-rollout-dtype fp8 .*accuracy.*; add --rl-mismatch-correction"),
        (TIS, False, (9, 0), r"--rl-rollout-dtype fp8 needs a GPU.*; drop it"),
        (TIS, True, (8, 0), r"fp8 needs a GPU of compute capability 9.0.* 8.0; drop it"),
        ([*TIS, "--rl-precision", "fp16"], True, (9, 0), "with --rl-precision fp16 needs bf16"),
    ],
)
def test_jobs_that_cannot_roll_out_in_float8_are_refused(
    tokens: list[str], more: list[str], has_cuda: bool, capability: tuple, sentence: str
) -> None:
    with pytest.raises(UsageError, match=sentence):
        accepted([*tokens, *more], has_cuda=has_cuda, capability=capability)


def test_families_that_were_not_tried_in_float8_are_refused(
    tokens: list[str], checkpoint_factory: Callable[..., Path]
) -> None:
    more = ["--rl-hf-checkpoint", str(checkpoint_factory("nemotron_h")), *TIS]
    says = "--rl-rollout-dtype fp8 is not supported for nemotron_h, .*; drop it"
    with pytest.raises(UsageError, match=says):
        accepted([*tokens, *more])


@pytest.mark.parametrize("more", [TIS, ["--rl-accept-rollout-mismatch"]])
def test_job_has_the_weights_for_vllm(tokens: list[str], more: list[str]) -> None:
    found = accepted([*tokens, *more]).float8
    assert found is not None
    assert "model.layers.0.mlp.down_proj.weight" in found.weights
    config = json.loads(json.dumps(found.quantization_config()))
    assert (config["quant_method"], config["weight_block_size"]) == ("fp8", [128, 128])
    assert "model.layers.1.mlp.gate" in config["modules_to_not_convert"]


def test_acceptance_without_float8_is_refused(tokens: list[str]) -> None:
    with pytest.raises(UsageError, match=r"--rl-accept-rollout-mismatch has no effect"):
        accepted([*tokens[:-2], "--rl-accept-rollout-mismatch"])


def accepted(tokens: list[str], *, has_cuda: bool = True, capability: tuple = (9, 0)) -> Any:
    platform = Platform(cuda=has_cuda)
    return resolve(Source(tokens=tokens, platform=platform, device_capability=lambda: capability))


@pytest.mark.parametrize("capability", [(9, 0), (10, 0)])
def test_devices_with_kernels_are_accepted(capability: tuple[int, int]) -> None:
    check_float8_device(capability)
