"""The large presets as the jobs of tests/cuda take them: their models, tensors and flags."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mcore_rl.model.config_json import ModelShape
from mcore_rl.model.tensors import TensorInfo, checkpoint_tensors
from tests.model_shapes import published_shape

ROOT = Path(__file__).resolve().parents[2]


def preset_flags(name: str) -> list[str]:
    return ["--rl-config", str(ROOT / "scripts" / "presets" / f"{name}.yaml")]


def trainable_shape(config: str) -> ModelShape:
    """The shape in tests/data/configs/<config>.json, with bfloat16 weights."""
    return dataclasses.replace(published_shape(config), quantization=None)


def shape_of(case: Mapping[str, Any]) -> ModelShape:
    """The shape of a case of test_megatron_models, perhaps its first layers only, in bfloat16."""
    shape = published_shape(case["config"])
    num_layers = case.get("num_layers", shape.num_layers)
    return dataclasses.replace(
        shape,
        num_layers=num_layers,
        is_moe_layer=shape.is_moe_layer[:num_layers],
        blocks=shape.blocks[:num_layers],
        is_linear_layer=shape.is_linear_layer[:num_layers],
        indexer=shape.indexer
        and dataclasses.replace(shape.indexer, in_layer=shape.indexer.in_layer[:num_layers]),
        value_head=case.get("value_head", False),
        tied_embeddings=shape.tied_embeddings and not case.get("value_head", False),
        quantization=None,
    )


def tensor_infos(shape: ModelShape) -> dict[str, TensorInfo]:
    """Every tensor of the checkpoint, as its headers would tell."""
    return {
        name: TensorInfo(spec.shape, spec.dtype, 4 if spec.dtype == "float32" else 2)
        for name, spec in checkpoint_tensors(shape)
    }
