"""Experts stacked in one tensor, in bfloat16 and in MXFP4, read by expert and by box."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from mcore_rl.common.errors import UsageError
from mcore_rl.megatron.hf_checkpoint import (
    HFCheckpoint,
    check_complete,
    open_checkpoint,
    read_boxes,
    read_tensor,
)
from mcore_rl.megatron.stacked_experts import dequantise
from mcore_rl.model.config_json import ModelShape, model_shape
from mcore_rl.tools.doctor.job import check_folder
from scripts.make_tiny_deepseek import hf_config
from tests.mxfp4_checkpoint import QUANTIZATION, random_mxfp4

EXPERTS, HIDDEN, WIDTH = 2, 96, 64
PREFIX = "model.layers.0.mlp.experts."
Tensors = dict[str, torch.Tensor]


def shape_of(*, mxfp4: bool) -> ModelShape:
    values = hf_config("gpt_oss") | ({"quantization_config": QUANTIZATION} if mxfp4 else {})
    return model_shape(values, Path("config.json"))


def opened(folder: Path, tensors: Tensors, *, mxfp4: bool) -> HFCheckpoint:
    save_file({name: t.contiguous() for name, t in tensors.items()}, folder / "model.safetensors")
    return open_checkpoint(folder, shape_of(mxfp4=mxfp4))


def in_bfloat16(generator: torch.Generator) -> tuple[Tensors, Tensors]:
    """The stored tensors, and the weights `[experts, out, in]` that they represent."""
    gate_up = torch.randn(EXPERTS, 2 * WIDTH, HIDDEN, generator=generator).bfloat16()
    down = torch.randn(EXPERTS, HIDDEN, WIDTH, generator=generator).bfloat16()
    stored = {"gate_up_proj": gate_up.mT, "down_proj": down.mT}
    return stored, {"gate_up_proj": gate_up, "down_proj": down}


def in_mxfp4(generator: torch.Generator) -> tuple[Tensors, Tensors]:
    stored, meant = {}, {}
    for name, rows, columns in (("gate_up_proj", 2 * WIDTH, HIDDEN), ("down_proj", HIDDEN, WIDTH)):
        blocks, scales, values = random_mxfp4(EXPERTS, rows, columns, generator=generator)
        stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        meant[name] = values.bfloat16()
    return stored, meant


def boxes(rows: int, columns: int) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """Most of them begin and end within a block of 32."""
    return list(
        itertools.product(
            [(0, rows), (rows // 2, rows), (5, 6)], [(0, columns), (7, 50), (32, 64), (40, 41)]
        )
    )


@pytest.mark.parametrize("make", [in_bfloat16, in_mxfp4])
def test_every_box_of_every_expert_matches_the_whole_tensor(make, tmp_path):
    generator = torch.Generator().manual_seed(1)
    stored, meant = make(generator)
    biases = {
        "gate_up_proj_bias": torch.randn(EXPERTS, 2 * WIDTH, generator=generator).bfloat16(),
        "down_proj_bias": torch.randn(EXPERTS, HIDDEN, generator=generator).bfloat16(),
    }
    tensors = {PREFIX + name: t for name, t in (stored | biases).items()}
    checkpoint = opened(tmp_path, tensors, mxfp4=make is in_mxfp4)
    assert checkpoint.stored_bytes == sum(t.nbytes for t in tensors.values())
    expected: Tensors = {}
    for expert in range(EXPERTS):
        gate_up, gate_up_bias = meant["gate_up_proj"][expert], biases["gate_up_proj_bias"][expert]
        for name, first in (("w1", 0), ("w3", 1)):
            expected[f"{PREFIX}{expert}.{name}.weight"] = gate_up[first::2]
            expected[f"{PREFIX}{expert}.{name}.bias"] = gate_up_bias[first::2]
        expected[f"{PREFIX}{expert}.w2.weight"] = meant["down_proj"][expert]
        expected[f"{PREFIX}{expert}.w2.bias"] = biases["down_proj_bias"][expert]
    assert checkpoint.tensors.keys() == expected.keys()
    (check,) = check_folder(checkpoint, shape_of(mxfp4=make is in_mxfp4))
    assert (" of MXFP4, read as bfloat16," in check.found) == (make is in_mxfp4)
    check_complete(checkpoint, set(expected))
    for name, whole in expected.items():
        info = checkpoint.tensors[name]
        assert (info.shape, info.dtype) == (tuple(whole.shape), "bfloat16")
        assert torch.equal(read_tensor(checkpoint, name), whole)
        of = boxes(*whole.shape) if whole.dim() == 2 else [((3, 9),)]
        for box, found in zip(of, read_boxes(checkpoint, name, of), strict=True):
            part = whole[tuple(slice(start, stop) for start, stop in box)]
            assert torch.equal(found, part), (name, box)


@pytest.mark.parametrize("is_transposed", [True, False])
@pytest.mark.parametrize("model_type", ["qwen3_vl_moe_text", "qwen3_5_moe_text"])
def test_gates_before_up_projections_are_read_and_written(model_type, is_transposed, tmp_path):
    """The reader tells both forms of both models by their shapes, as transformers does."""
    generator = torch.Generator().manual_seed(3)
    _, meant = in_bfloat16(generator)
    stored = {PREFIX + name: t.mT.contiguous() if is_transposed else t for name, t in meant.items()}
    save_file(stored, tmp_path / "model.safetensors")
    changes = {"hidden_size": HIDDEN, "moe_intermediate_size": WIDTH}
    shape = model_shape(hf_config(model_type) | changes, Path("config.json"))
    checkpoint = open_checkpoint(tmp_path, shape)
    written = {name: torch.zeros_like(t) for name, t in stored.items()}
    for expert in range(EXPERTS):
        gate, up = meant["gate_up_proj"][expert].chunk(2)
        down = meant["down_proj"][expert]
        for name, whole in {"gate_proj": gate, "up_proj": up, "down_proj": down}.items():
            tensor = f"{PREFIX}{expert}.{name}.weight"
            assert checkpoint.tensors[tensor].shape == whole.shape
            assert torch.equal(read_tensor(checkpoint, tensor), whole)
            of = boxes(*whole.shape)
            for box, found in zip(of, read_boxes(checkpoint, tensor, of), strict=True):
                assert torch.equal(found, whole[tuple(slice(*ends) for ends in box)])
            part = checkpoint.stack.parts[tensor]
            part.write(written[part.stored], whole)
    assert all(torch.equal(written[name], t) for name, t in stored.items())


def test_dequantised_numbers_match_transformers():
    """For all scales of bfloat16 numbers, and all 256 bytes."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    blocks = torch.arange(256).byte().view(1, 1, 16, 16).repeat(1, 240, 1, 1)
    scales = torch.arange(5, 245).byte().view(1, 240, 1).repeat(1, 1, 16)
    theirs = convert_moe_packed_tensors(blocks, scales)[0].t()
    assert torch.equal(dequantise(blocks[0], scales[0]), theirs)
    assert theirs.unique().numel() > 900


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"gate_up_proj_scales": None}, "gate_up_proj_blocks without scales of the same experts"),
        ({"down_proj_blocks": None}, "down_proj_scales without blocks of the same experts"),
        (
            {"gate_up_proj_scales": torch.zeros(EXPERTS, 2 * WIDTH, 1, dtype=torch.uint8)},
            "gate_up_proj_blocks without scales of the same experts, rows and blocks of 32",
        ),
        (
            {"down_proj_blocks": torch.zeros(EXPERTS, HIDDEN, 4, 8, dtype=torch.uint8)},
            r"down_proj_blocks of shape \[2, 96, 4, 8\]",
        ),
        ({"down_proj_bias": torch.zeros(EXPERTS, 4, dtype=torch.uint8)}, "_bias of dtype uint8"),
        ({"down_proj": torch.zeros(EXPERTS, WIDTH, HIDDEN)}, "both .*down_proj and .*_blocks"),
    ],
)
def test_invalid_stack_of_experts_is_refused(changes, message, tmp_path):
    stored, _ = in_mxfp4(torch.Generator().manual_seed(2))
    tensors = {PREFIX + name: t for name, t in (stored | changes).items() if t is not None}
    with pytest.raises(UsageError, match=rf"--rl-hf-checkpoint {tmp_path} has .*{message}.*; copy"):
        opened(tmp_path, tensors, mxfp4=True)
