"""FP8 blocks: slices of them against whole tensors, and the way back against vLLM's quantiser."""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from mcore_rl.common.errors import UsageError
from mcore_rl.config import RLConfig, TrainerOptions
from mcore_rl.hybrid_engine.hf_export import export
from mcore_rl.job.preflight import check_export_dtype
from mcore_rl.megatron import float8
from mcore_rl.megatron.hf_checkpoint import (
    HFCheckpoint,
    fingerprint,
    load_into_megatron,
    open_checkpoint,
    read_tensor,
)
from mcore_rl.model.boxes import full_box
from mcore_rl.model.config_json import read_model_shape
from mcore_rl.model.float8_blocks import blocks_of
from tests.float8_checkpoint import in_blocks, make_float8, weight_dequant
from tests.shards import Shards

# Neither multiples of 128, but for one side of one of them.
SHAPES = [(300, 200), (128, 130), (5, 700), (257, 1)]
BITS = torch.uint8


def random_blocks(shape: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(shape[0])
    return in_blocks(torch.randn(shape, generator=generator), generator)


def bits_equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a.view(BITS), b.view(BITS))


@pytest.mark.parametrize("shape", SHAPES)
def test_any_slice_is_that_of_the_whole_tensor(shape: tuple[int, int]) -> None:
    weight, scales = random_blocks(shape)
    whole = weight_dequant(weight, scales)
    draw = random.Random(3)
    for _ in range(200):
        box = tuple(sorted(draw.sample(range(size + 1), 2)) for size in shape)
        box = tuple((start, stop) for start, stop in box)
        at = tuple(slice(start, stop) for start, stop in box)
        factors = scales[tuple(slice(start, stop) for start, stop in blocks_of(box))]
        assert bits_equal(float8.dequantise(weight[at], factors, box), whole[at].contiguous())


@pytest.mark.parametrize("powers_of_two", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_changed_blocks_are_quantised_as_by_vllm_and_others_stay(
    shape: tuple[int, int], powers_of_two: bool
) -> None:
    from vllm.utils.deep_gemm import per_block_cast_to_fp8

    weight, scales = random_blocks(shape)
    values = weight_dequant(weight, scales)
    kept = float8.quantise(values, weight, scales, powers_of_two=powers_of_two)
    assert bits_equal(kept[0], weight) and bits_equal(kept[1], scales)

    expected, factors = per_block_cast_to_fp8(values, [128, 128], powers_of_two)
    assert not bits_equal(factors, scales)  # so that nobody keeps them by quantising anew
    changed = values + 0.01
    expected, factors = per_block_cast_to_fp8(changed, [128, 128], powers_of_two)
    found = float8.quantise(changed, weight, scales, powers_of_two=powers_of_two)
    assert bits_equal(found[0], expected) and bits_equal(found[1], factors)

    # Of one element its block alone is quantised anew.
    one = values.clone()
    one[-1, -1] += 0.5
    expected, factors = per_block_cast_to_fp8(one, [128, 128], powers_of_two)
    found = float8.quantise(one, weight, scales, powers_of_two=powers_of_two)
    row, column = ((size - 1) // 128 for size in shape)
    mine = torch.zeros(scales.shape, dtype=torch.bool)
    mine[row, column] = True
    assert torch.equal(found[1], torch.where(mine, factors, scales))
    within = mine.repeat_interleave(128, 0)[: shape[0]].repeat_interleave(128, 1)[:, : shape[1]]
    merged = torch.where(within, expected.view(BITS), weight.view(BITS))
    assert torch.equal(found[0].view(BITS), merged)


# A folder ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folders(
    checkpoint_factory: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Path]:
    """In FP8 blocks, and what these stand for."""
    return make_float8(
        checkpoint_factory("deepseek_v3", num_mtp_layers=1), tmp_path_factory.mktemp("float8")
    )


def opened(folder: Path) -> HFCheckpoint:
    return open_checkpoint(folder, read_model_shape(folder))


def test_fp8_folder_reads_as_its_dequantised_model(folders: tuple[Path, Path]) -> None:
    blocks, standing_for = map(opened, folders)
    assert blocks.tensors == standing_for.tensors
    assert blocks.mtp.keys() == standing_for.mtp.keys() and len(blocks.mtp) > 20
    assert len(blocks.float8) > 10 and not standing_for.float8
    assert read_model_shape(folders[0]) == read_model_shape(folders[1])
    assert blocks.stored_bytes < 0.6 * standing_for.stored_bytes
    everything = standing_for.everything.values()
    assert standing_for.stored_bytes == sum(info.num_bytes for info in everything)
    for name in blocks.tensors:
        assert bits_equal(read_tensor(blocks, name), read_tensor(standing_for, name)), name


def test_a_rank_reads_its_slices_and_their_scales_alone(folders: tuple[Path, Path]) -> None:
    blocks = opened(folders[0])
    name = "model.layers.1.self_attn.kv_b_proj.weight"  # [1024, 512]
    assert blocks.tensors[name].shape == (1024, 512)
    box = ((100, 400), (120, 130))
    shards: Any = Shards({name: [box]})
    assert load_into_megatron(blocks, shards) == 300 * 10 + 4 * 2 * 4
    whole = load_file(folders[1] / "model.safetensors")[name]
    assert bits_equal(shards.values[name, box], whole[100:400, 120:130].contiguous())


def test_a_fingerprint_is_of_scales_too(alone: None, folders: tuple[Path, Path]) -> None:
    blocks = opened(folders[0])
    expected = fingerprint(blocks)
    assert fingerprint(dataclasses.replace(blocks, float8={})) != expected
    assert fingerprint(opened(folders[1])) != expected


@pytest.mark.parametrize("as_float8", [True, False])
def test_export_keeps_fp8_or_dequantises(
    alone: None, folders: tuple[Path, Path], tmp_path: Path, as_float8: bool
) -> None:
    blocks = opened(folders[0])
    shards: Any = Shards({name: [full_box(i.shape)] for name, i in blocks.tensors.items()})
    load_into_megatron(blocks, shards)
    touched = "model.layers.0.mlp.up_proj.weight"
    (key,) = (key for key in shards.values if key[0] == touched)
    shards.values[key] = shards.values[key] * 1.5
    target = tmp_path / "exported"
    export(shards, blocks, target, as_float8=as_float8, max_file_bytes=1 << 17)

    found = {n: t for file in target.glob("*.safetensors") for n, t in load_file(file).items()}
    index = json.loads((target / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == found.keys()
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in found.values())
    source = {n: t for f in folders[0].glob("*.safetensors") for n, t in load_file(f).items()}
    expected = source if as_float8 else load_file(folders[1] / "model.safetensors")
    assert found.keys() == expected.keys()  # those of the MTP layer, which nothing trains, too
    others = {n for n in found if not bits_equal(found[n], expected[n])}
    assert others == ({touched, f"{touched}_scale_inv"} if as_float8 else {touched})
    assert ("quantization_config" in json.loads((target / "config.json").read_text())) == as_float8
    again = opened(target)
    assert again.tensors == blocks.tensors and again.mtp == blocks.mtp
    assert again.float8.keys() == (blocks.float8.keys() if as_float8 else set())


# Bad input; what config.json may say is in test_hf_config.py -------------------------------------

SCALE = "model.layers.0.mlp.up_proj.weight_scale_inv"
SPOILT: dict[str, tuple[Any, str]] = {
    "missing": (None, f"lacks {SCALE}, the scales of {SCALE[:-10]}, .*; copy the"),
    "block_size": (
        torch.ones(2, 1),
        rf"has {SCALE} of shape \[2, 1\], but .* of shape \[128, 64\] has \[1, 1\] blocks of 128 x "
        r"128; give a checkpoint whose weight_block_size is \[128, 128\]",
    ),
    "dtype": (torch.ones(1, 1, dtype=torch.float16), f"has {SCALE} of dtype float16, .*; give"),
}


@pytest.mark.parametrize("case", SPOILT)
def test_scales_that_do_not_fit_are_refused_by_their_headers(
    folders: tuple[Path, Path], tmp_path: Path, case: str
) -> None:
    scale, sentence = SPOILT[case]
    content = {n: t for f in folders[0].glob("*.safetensors") for n, t in load_file(f).items()}
    del content[SCALE]
    save_file(content | ({} if scale is None else {SCALE: scale}), tmp_path / "model.safetensors")
    shape = read_model_shape(folders[0])
    with pytest.raises(UsageError, match=f"^--rl-critic-init {tmp_path} {sentence}"):
        open_checkpoint(tmp_path, shape, flag="--rl-critic-init")


def test_scales_and_blocks_come_together(folders: tuple[Path, Path], tmp_path: Path) -> None:
    shape = read_model_shape(folders[0])
    with pytest.raises(UsageError, match="has no weight in float8, .*; drop that field"):
        open_checkpoint(folders[1], shape)
    content = {n: t for f in folders[0].glob("*.safetensors") for n, t in load_file(f).items()}
    content[SCALE[:-10]] = content[SCALE[:-10]].bfloat16()
    save_file(content, tmp_path / "model.safetensors")
    with pytest.raises(UsageError, match=f"has {SCALE}, and {SCALE[:-10]} is not in float8"):
        open_checkpoint(tmp_path, shape)


def test_fp8_is_exported_only_of_a_checkpoint_in_fp8(folders: tuple[Path, Path]) -> None:
    blocks, standing_for = map(opened, folders)
    config = RLConfig.of(export_hf="there", export_dtype="fp8")
    check_export_dtype(config.trainer, blocks)
    with pytest.raises(UsageError, match=f"^--rl-export-dtype fp8 writes .* {folders[1]} has none"):
        check_export_dtype(config.trainer, standing_for)
    check_export_dtype(TrainerOptions(export_hf="there"), standing_for)


def test_server_with_quantised_weights_is_refused_with_a_remedy() -> None:
    from vllm.model_executor.layers.quantization.fp8 import Fp8Config

    from mcore_rl.hybrid_engine.remote.engine import MegatronWeightTransferEngine

    quantised: Any = SimpleNamespace(
        quant_config=Fp8Config(True, weight_block_size=[128, 128]),
        parallel_config=None,
        model_config=None,
    )
    model = torch.nn.Linear(2, 2)
    engine = MegatronWeightTransferEngine(quantised, quantised, torch.device("cpu"), model)
    with pytest.raises(RuntimeError, match="weights in fp8, .*--hf-overrides '{\"quantization_con"):
        engine.init_transfer_engine(None)  # type: ignore[arg-type]
