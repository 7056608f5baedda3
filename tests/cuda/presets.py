"""The large presets as the jobs of tests/cuda take them: their models, tensors and flags."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from mcore_rl.model.config_json import ModelShape
from mcore_rl.model.tensors import TensorInfo, checkpoint_tensors
from tests.model_shapes import published_shape

ROOT = Path(__file__).resolve().parents[2]


def preset_flags(name: str) -> list[str]:
    return ["--rl-config", str(ROOT / "scripts" / "presets" / f"{name}.yaml")]


def trainable_shape(config: str) -> ModelShape:
    """Of tests/data/configs/<config>.json once its weights are bfloat16."""
    return dataclasses.replace(published_shape(config), quantization=None)


def tensor_infos(shape: ModelShape) -> dict[str, TensorInfo]:
    """Every tensor of the checkpoint, as its headers would tell."""
    return {
        name: TensorInfo(spec.shape, spec.dtype, 4 if spec.dtype == "float32" else 2)
        for name, spec in checkpoint_tensors(shape)
    }
