"""LoRA's targets, refusals, merged values and planned sizes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from mcore_rl.common.byte_sizes import shown_bytes
from mcore_rl.common.errors import UsageError
from mcore_rl.config import RLConfig
from mcore_rl.hybrid_engine.peft_export import adapter_config, check_adapter
from mcore_rl.hybrid_engine.plan.placement import Placement
from mcore_rl.job.lora import check_lora, check_lora_folders, note_on_adapters
from mcore_rl.megatron.lora import plus_product
from mcore_rl.model.config_json import ModelShape, model_shape
from mcore_rl.model.layout import RolloutLayout, TrainLayout
from mcore_rl.model.lora import VLLM_RANKS, Lora, LoraOptions, peft_names, resolve_lora, vllm_rank
from mcore_rl.planner.models import (
    TrainedModel,
    merged_bytes,
    optimizer_parameters,
    stage_parameters,
)
from mcore_rl.planner.phases import TRAIN
from mcore_rl.planner.plan import plan_case
from mcore_rl.tools.plan.command_line import read_command_line
from scripts.make_tiny_deepseek import hf_config
from tests.rank_pool import ROOT
from tests.unit.test_planner import model_of
from tests.vllm_reads import vllm_folder

PRESETS = ROOT / "scripts" / "presets"
ATTENTION = {"q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"}
MLP = {"gate_proj", "up_proj", "down_proj"}


def shape_of(arch: str) -> ModelShape:
    return model_shape(hf_config(arch), Path("config.json"))


def lora_of(arch: str, targets: str | None = None, rank: int = 8) -> Lora:
    found = resolve_lora(LoraOptions(rank=rank, targets=targets), shape_of(arch))
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("arch", "expected"),
    [
        ("deepseek_v3", ATTENTION | MLP),
        ("deepseek_v2", ATTENTION - {"q_a_proj", "q_b_proj"} | {"q_proj"} | MLP),
        ("qwen3", {"q_proj", "k_proj", "v_proj", "o_proj"} | MLP),
        ("mixtral", {"q_proj", "k_proj", "v_proj", "o_proj", "w1", "w2", "w3"}),
        ("qwen3_next", {"q_proj", "k_proj", "v_proj", "o_proj"} | MLP),  # not the delta nets
    ],
)
def test_default_targets_are_the_linear_layers(arch: str, expected: set[str]) -> None:
    lora = lora_of(arch)
    assert set(lora.targets) == {layer.rsplit(".", 1)[-1] for layer in lora.modules} == expected
    assert not any(".gate." in layer or "linear_attn" in layer for layer in lora.modules)


def test_alpha_is_twice_the_rank_unless_given() -> None:
    assert lora_of("qwen3").scale == 2.0
    lora = resolve_lora(LoraOptions(rank=8, alpha=4.0), shape_of("qwen3"))
    assert lora is not None and lora.scale == 0.5


def test_whole_alpha_is_exported_as_a_whole_number() -> None:
    lora = resolve_lora(RLConfig.of(lora_rank=8, lora_alpha=16).lora, shape_of("qwen3"))
    assert lora is not None
    assert adapter_config(lora, Path("base"))["lora_alpha"] == 16
    assert adapter_config(replace(lora, alpha=6.5), Path("base"))["lora_alpha"] == 6.5


@pytest.mark.parametrize(
    ("target", "in_names", "not_in_names"),
    [
        ("experts.up_proj", ".experts.", "shared_experts"),
        ("shared_experts.up_proj", "shared_experts", ".experts."),
        ("mlp.up_proj", "layers.0.mlp.up_proj", "experts"),
    ],
)
def test_target_with_its_parent_chooses_among_equal_names(
    target: str, in_names: str, not_in_names: str
) -> None:
    layers = lora_of("deepseek_v3", target).modules
    assert layers and all(in_names in layer for layer in layers)
    assert not any(not_in_names in layer for layer in layers)


@pytest.mark.parametrize("target", ["c_attn", "gate", "layers.0.self_attn.o_proj", "", "proj"])
def test_target_of_no_layer_is_refused_with_the_possible_ones(target: str) -> None:
    with pytest.raises(UsageError, match="--rl-lora-targets .*; choose from .*kv_b_proj") as raised:
        lora_of("deepseek_v3", f"o_proj,{target}")
    assert f"'{target}'" in str(raised.value)


@pytest.mark.parametrize(
    ("values", "flag"),
    [
        ({"use_megatron_fsdp": True}, "--use-megatron-fsdp"),
        ({"fp8": "hybrid"}, "--fp8 hybrid"),
        ({"mtp_num_layers": 1}, "--mtp-num-layers 1"),
        ({"pretrained_checkpoint": "there"}, "--pretrained-checkpoint there"),
        ({"ckpt_format": "torch"}, "--ckpt-format torch"),
        ({"cuda_graph_impl": "local"}, "--cuda-graph-impl local"),
        ({"mla_down_proj_fusion": True, "tensor_model_parallel_size": 2}, "--mla-down-proj-fusion"),
        (
            {
                "num_experts": 8,
                "moe_router_enable_expert_bias": True,
                "moe_router_bias_update_rate": 0.1,
            },
            "--moe-router-bias-update-rate 0.1",
        ),
        ({"gradient_accumulation_fusion": True}, "--no-gradient-accumulation-fusion"),
    ],
)
def test_flags_that_lora_excludes_are_named(values: dict[str, Any], flag: str) -> None:
    shape = shape_of("deepseek_v3")
    with pytest.raises(UsageError, match=f"{flag}.*--rl-lora-rank|--rl-lora-rank.*{flag}"):
        check_lora(RLConfig.of(lora_rank=8), shape, values)
    assert check_lora(RLConfig(), shape, values) is None


@pytest.mark.parametrize(
    ("arch", "options", "flag"),
    [
        ("deepseek_v3", {}, "--rl-lora-rollout adapters .*experts"),
        ("qwen3_moe", {"lora_targets": "q_proj"}, "--rl-lora-rollout adapters .*experts"),
        ("qwen3_5_text", {}, "--rl-lora-rollout adapters .*recurrent"),
        ("qwen3", {"lora_rank": 513}, "--rl-lora-rollout adapters .*513.* up to rank 512"),
        ("qwen3", {"rollout_servers": "http://a:8000"}, "--rl-lora-rollout .*--rl-rollout-servers"),
        ("qwen3", {"algorithm": "sft"}, "--rl-lora-rollout adapters .* without engines"),
        ("qwen3", {"rollout_dtype": "fp8"}, "--rl-rollout-dtype fp8"),
        ("qwen3", {"speculate": "ngram:2"}, "--rl-speculate ngram:2"),
        ("qwen3", {"reshard_delta": True}, "--rl-reshard-delta"),
    ],
)
def test_what_engines_do_not_serve_with_adapters_is_refused(
    arch: str, options: dict[str, Any], flag: str
) -> None:
    options = {"lora_rank": 8, **options}
    with pytest.raises(UsageError, match=f"{flag}.*; .*give --rl-lora-rollout merged"):
        check_lora(RLConfig.of(**options, lora_rollout="adapters"), shape_of(arch), {})
    assert check_lora(RLConfig.of(**options), shape_of(arch), {}) is not None


def test_adapters_are_served_by_the_smallest_rank_of_vllm_that_holds_them() -> None:
    found = {rank: vllm_rank(rank) for rank in (1, 2, 8, 9, 200, 512, 513)}
    assert found == {1: 1, 2: 8, 8: 8, 9: 16, 200: 256, 512: 512, 513: None}
    of_vllm = (vllm_folder() / "config" / "lora.py").read_text()
    assert f"MaxLoRARanks = Literal[{', '.join(map(str, VLLM_RANKS))}]" in of_vllm


def test_note_names_the_bytes_of_a_sync_of_adapters() -> None:
    model = model_of("qwen3-0.6b", TrainLayout(2, tp_size=2))
    placement = Placement(model.shape, model.train, model.layers, RolloutLayout(2, 2, False))
    lora = resolve_lora(LoraOptions(rank=8), model.shape)
    assert lora is not None
    halves = {True: (1, 0.5), False: (0.5, 1)}  # of rows and columns: TP2 divides one of the two
    elements = sum(
        8 * (rows * halves[by_columns][0] + columns * halves[by_columns][1])
        for layer, (rows, columns) in lora.modules.items()
        for by_columns in [layer.endswith(("o_proj", "down_proj"))]
    )
    config = RLConfig.of(lora_rank=8, lora_rollout="adapters")
    (note,) = note_on_adapters(config, lora, placement)
    assert f"at most {shown_bytes(2 * elements)} of adapters" in note and "host memory" in note
    assert list(note_on_adapters(RLConfig.of(lora_rank=8), lora, placement)) == []


def with_lora(model: TrainedModel, lora: Lora) -> TrainedModel:
    training = replace(model.training, lora_rank=lora.rank, lora_targets=lora.targets)
    return replace(model, training=training)


def adapter_folder(folder: Path, lora: Lora, **changed: Any) -> Path:
    tensors = {}
    for layer, a, b in peft_names(lora):
        rows, columns = lora.modules[layer]
        tensors[a], tensors[b] = torch.zeros(lora.rank, columns), torch.zeros(rows, lora.rank)
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"r": lora.rank, "lora_alpha": lora.alpha, **changed}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def test_adapter_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    lora = lora_of("qwen3")
    check_adapter(adapter_folder(tmp_path / "right", lora), lora)
    for name, of, changed, text in (
        ("rank", lora_of("qwen3", rank=4), {}, "r 4, which --rl-lora-rank 8 contradicts"),
        ("alpha", lora, {"lora_alpha": 3}, "lora_alpha 3, which --rl-lora-alpha 16"),
        ("dora", lora, {"use_dora": True}, "use_dora"),
        ("targets", lora_of("qwen3", "q_proj"), {}, "--rl-lora-targets"),
    ):
        with pytest.raises(UsageError, match=text):
            check_adapter(adapter_folder(tmp_path / name, of, **changed), lora)
    with pytest.raises(UsageError, match="adapter_config.json and adapter_model.safetensors"):
        check_adapter(tmp_path, lora)


def test_folders_of_adapters_are_checked(tmp_path: Path) -> None:
    lora, right = lora_of("qwen3"), tmp_path / "right"
    adapter_folder(right, lora)
    full = RLConfig.of(lora_rank=8, lora_export=str(right))
    with pytest.raises(UsageError, match="--rl-lora-export .* would be replaced"):
        check_lora_folders(full, lora, {})
    check_lora_folders(full, lora, {"load": "checkpoints"})  # killed after its export
    begun = RLConfig.of(lora_rank=8, lora_adapter=str(right))
    check_lora_folders(begun, lora, {})
    with pytest.raises(UsageError, match="--rl-lora-adapter .*--load checkpoints"):
        check_lora_folders(begun, lora, {"load": "checkpoints"})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_slice_of_a_merged_weight_equals_the_whole(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(96, 160, generator=generator).to(dtype)
    b = torch.randn(96, 8, generator=generator).to(dtype)
    a = torch.randn(8, 160, generator=generator).to(dtype)
    whole = plus_product(weight, b, a, 2.0)
    assert torch.equal(whole, (weight.double() + 2.0 * b.double() @ a.double()).to(dtype))
    for rows, columns in ((slice(3, 4), slice(0, 160)), (slice(10, 77), slice(31, 96))):
        part = plus_product(weight[rows, columns], b[rows], a[:, columns], 2.0)
        assert torch.equal(part, whole[rows, columns])


def test_weight_without_an_effect_keeps_its_bits() -> None:
    weight = torch.tensor([[-0.0, 0.0, 1.5]], dtype=torch.bfloat16)
    found = plus_product(weight, torch.zeros(1, 2), torch.randn(2, 3), 2.0)
    assert torch.equal(found.view(torch.int16), weight.view(torch.int16))


@pytest.mark.parametrize("name", ["deepseek-v3", "qwen3-0.6b", "mixtral-8x7b"])
def test_planned_adapters_are_those_of_the_model(name: str) -> None:
    whole = model_of(name, TrainLayout(1))
    lora = resolve_lora(LoraOptions(rank=16), whole.shape)
    assert lora is not None
    (parameters,) = stage_parameters(with_lora(whole, lora))
    (base,) = stage_parameters(whole)
    assert parameters.trained == lora.num_parameters
    assert parameters.total == base.total + lora.num_parameters
    assert optimizer_parameters(with_lora(whole, lora)) == [lora.num_parameters]
    assert merged_bytes(whole, with_gradients=True) == 0
    assert 0 < merged_bytes(with_lora(whole, lora), with_gradients=True)


def test_planned_adapters_of_ranks_add_up_to_those_of_the_stages() -> None:
    layout = TrainLayout(64, tp_size=8, pp_size=4, ep_size=16)
    whole = model_of("deepseek-v3", layout)
    lora = resolve_lora(LoraOptions(rank=16, targets="o_proj,experts.down_proj"), whole.shape)
    assert lora is not None
    stages = stage_parameters(with_lora(whole, lora))
    hidden, heads, width, rank = 7168, 128 * 128, 2048, 16
    attention = rank * (hidden + heads // 8)  # all of B and a share of A's columns
    experts = 256 // 16 * rank * (hidden + width)
    for stage, chunks in enumerate(whole.layers):
        layers = [layer for chunk in chunks for layer in chunk]
        routed = sum(layer >= 3 for layer in layers)
        assert stages[stage].trained == len(layers) * attention + routed * experts


def test_figures_of_671b_on_the_page_are_planned() -> None:
    page = (ROOT / "docs" / "using" / "lora.md").read_text()
    job = f"--hf-config {PRESETS}/v3.json --world-size 256 --rl-config {PRESETS}/v3.yaml".split()
    for title, more in (("all weights", []), ("LoRA of rank 16", ["--rl-lora-rank", "16"])):
        memory = plan_case(read_command_line([*job, *more]).case).memory
        train = next(phase for phase in memory.phases if phase.name == TRAIN)
        parts = [train.parts[p] for p in ("weights", "gradients", "optimizer", "activations")]
        sizes = [*parts, train.total_bytes, memory.host_total_bytes]
        row = " | ".join(f"{size / 1e9:.2f}" for size in sizes)
        assert f"| {title} | {row} |" in page
