"""Tiny multimodal folders: transformers' own classes around the text model of another folder."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedModel

from scripts.make_tiny_deepseek import ROUTER_BIAS_STD, randomize

_TOWER = {"hidden_size": 32, "intermediate_size": 32}
_OF_QWEN = {**_TOWER, "depth": 1, "num_heads": 2}
_OF_LAYERS = {**_TOWER, "num_hidden_layers": 1, "num_attention_heads": 2}
# model_type -> `vision_config`; also `out_hidden_size` for the first ones.
TOWERS: dict[str, dict[str, Any]] = {
    "qwen3_5": _OF_QWEN,
    "qwen3_5_moe": _OF_QWEN,
    "qwen3_vl": {**_OF_QWEN, "deepstack_visual_indexes": [0]},
    "qwen3_vl_moe": {**_OF_QWEN, "deepstack_visual_indexes": [0]},
    "glm4v_moe": _OF_QWEN,
    "kimi_k25": {**_OF_LAYERS, "pos_emb_height": 4, "pos_emb_width": 4, "pos_emb_time": 1},
    "mistral3": {**_OF_LAYERS, "model_type": "pixtral", "head_dim": 16, "image_size": 28},
    "internvl": {**_OF_LAYERS, "image_size": [28, 28]},
    "llava": {**_OF_LAYERS, "model_type": "clip_vision_model", "image_size": 28, "patch_size": 14},
}
# Whose experts are published in another form than transformers saves.
PUBLISHED_STACKED = ("qwen3_5_moe", "qwen3_vl_moe")
# As published, for rotated parts of 16, 8 and 4 pairs; that of text models has no sections.
_SECTIONS: dict[str, dict[str, Any]] = {
    **dict.fromkeys(
        ("qwen3_vl", "qwen3_vl_moe"), {"mrope_section": [6, 5, 5], "mrope_interleaved": True}
    ),
    "glm4v_moe": {"mrope_section": [2, 3, 3]},
    **dict.fromkeys(
        ("qwen3_5", "qwen3_5_moe"), {"mrope_section": [2, 1, 1], "mrope_interleaved": True}
    ),
}


def multimodal_config(model_type: str, text: Mapping[str, Any], **outer: Any) -> dict[str, Any]:
    """The config.json of a model of `model_type` with this text model, as it is published."""
    text = {name: value for name, value in text.items() if name != "architectures"}
    if model_type in _SECTIONS:
        text["rope_scaling"] = {"rope_type": "default", **_SECTIONS[model_type]}
    vision = dict(TOWERS[model_type])
    if "depth" in vision:
        vision["out_hidden_size"] = text["hidden_size"]
    return {"text_config": text, "vision_config": vision, **outer}


def make_multimodal(
    text_folder: Path, model_type: str, folder: Path, *, seed: int = 7, **outer: Any
) -> Path:
    """A random model with text tokens and text sizes of `text_folder`, saved by transformers.

    `outer` are further fields of its config.json."""
    shutil.copytree(text_folder, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    text = json.loads((text_folder / "config.json").read_text())
    values = multimodal_config(model_type, text, **outer)
    model = AutoModelForImageTextToText.from_config(AutoConfig.for_model(model_type, **values))
    randomize(model.float(), seed)
    model = model.to(torch.bfloat16)
    generator = torch.Generator().manual_seed(seed + 1)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            owner = model.get_submodule(name.rpartition(".")[0])
            noise = torch.randn(buffer.shape, generator=generator) * ROUTER_BIAS_STD
            owner.e_score_correction_bias = noise
    model.save_pretrained(folder)
    if model_type in PUBLISHED_STACKED:
        weights = folder / "model.safetensors"
        save_file(stacked_as_published(load_file(weights)), weights, metadata={"format": "pt"})
    (folder / "preprocessor_config.json").write_text('{"image_mean": [0.5, 0.5, 0.5]}\n')
    return folder


def stacked_as_published(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Experts of a layer in one tensor: those of one tensor each `[e, out, in]`, the rows of gates
    before those of up-projections; those that transformers has stacked so transposed."""
    found: dict[str, torch.Tensor] = {}
    experts: dict[str, dict[str, list[torch.Tensor]]] = {}
    for name in sorted(tensors, key=lambda name: [int(n) for n in re.findall(r"\d+", name)]):
        if match := re.fullmatch(r"(.*\.experts\.)\d+\.(\w+)\.weight", name):
            kinds = experts.setdefault(match[1], {})
            kinds.setdefault(match[2], []).append(tensors[name])
        elif name.endswith((".experts.gate_up_proj", ".experts.down_proj")):
            found[name] = tensors[name].mT.contiguous()
        else:
            found[name] = tensors[name]
    for prefix, of_kind in experts.items():
        gate, up, down = (torch.stack(of_kind[f"{kind}_proj"]) for kind in ("gate", "up", "down"))
        found |= {f"{prefix}gate_up_proj": torch.cat([gate, up], 1), f"{prefix}down_proj": down}
    return found


def load_multimodal(folder: Path, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """The folder in transformers, which must find every tensor and no other."""
    found: Any = AutoModelForImageTextToText.from_pretrained(
        folder, dtype=dtype, output_loading_info=True
    )
    model, info = found
    assert not any(info[kind] for kind in ("missing_keys", "mismatched_keys", "unexpected_keys"))
    return model
