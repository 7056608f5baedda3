"""A checkpoint in FP8 blocks, as DeepSeek-V3 is published, and the bfloat16 one that it stands for.

Both are made of any other checkpoint. The reference is DeepSeek's `weight_dequant` of whole
tensors: float32(weight) x scale of its block, rounded to bfloat16.
"""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

QUANTIZATION = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "quant_method": "fp8",
    "weight_block_size": [128, 128],
}


def spread(scales: torch.Tensor, shape: tuple[int, int]) -> torch.Tensor:
    """A scale for each element."""
    rows = scales.float().repeat_interleave(128, 0)[: shape[0]]
    return rows.repeat_interleave(128, 1)[:, : shape[1]]


def weight_dequant(weight: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    return (weight.float() * spread(scales, tuple(weight.shape))).bfloat16()


def in_blocks(
    values: torch.Tensor, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """FP8 blocks near `values`, in which the largest value is mostly not 448: who quantises what
    they stand for finds other scales."""
    grid = [math.ceil(size / 128) for size in values.shape]
    scales = values.abs().max().float() / 448 * (1 + torch.rand(grid, generator=generator))
    return (values / spread(scales, tuple(values.shape))).to(torch.float8_e4m3fn), scales


def make_float8(source: Path, folder: Path, **config: Any) -> tuple[Path, Path]:
    """(FP8 blocks, what they stand for): the linear layers of `source` in blocks, in two files of
    which the second has the scales of the first; embedding, head, norms and routers as they are."""
    generator = torch.Generator().manual_seed(7)
    tensors = load_file(source / "model.safetensors")
    weights: dict[str, torch.Tensor] = {}
    scales: dict[str, torch.Tensor] = {}
    reference: dict[str, torch.Tensor] = {}
    for name, value in tensors.items():
        weights[name] = reference[name] = value
        if name.endswith("_proj.weight") or name.endswith("kv_a_proj_with_mqa.weight"):
            weights[name], scales[f"{name}_scale_inv"] = in_blocks(value, generator)
            reference[name] = weight_dequant(weights[name], scales[f"{name}_scale_inv"])
    quantized = {"quantization_config": QUANTIZATION} | config
    return write_both(source, folder, "float8", (weights, scales), reference, quantized)


def write_both(
    source: Path,
    folder: Path,
    name: str,
    files: tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]],
    reference: dict[str, torch.Tensor],
    config: dict[str, Any],
) -> tuple[Path, Path]:
    """Copies of `source`: `folder / name` with two files of weights and `config` added to its
    config.json, and `folder / "bfloat16"` with `reference`."""
    quantized, standing_for = folder / name, folder / "bfloat16"
    for target in (quantized, standing_for):
        shutil.copytree(source, target, ignore=shutil.ignore_patterns("*.safetensors*"))
    save_file(reference, standing_for / "model.safetensors", metadata={"format": "pt"})
    weight_map: dict[str, str] = {}
    for number, content in enumerate(files, start=1):
        file = f"model-0000{number}-of-00002.safetensors"
        save_file(content, quantized / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(content, file)
    (quantized / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    values = json.loads((source / "config.json").read_text())
    (quantized / "config.json").write_text(json.dumps(values | config, indent=2))
    return quantized, standing_for
