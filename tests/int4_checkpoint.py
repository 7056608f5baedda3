"""A checkpoint with experts in INT4 groups, as Kimi-K2.5 is published, and its bfloat16 reference.

Values are packed and dequantised by `compressed_tensors`, whose format it is.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import dequantize
from safetensors.torch import load_file

from tests.float8_checkpoint import write_both

WEIGHTS: dict[str, Any] = {
    "actorder": None,
    "block_structure": None,
    "dynamic": False,
    "group_size": 32,
    "num_bits": 4,
    "observer": "minmax",
    "observer_kwargs": {},
    "strategy": "group",
    "symmetric": True,
    "type": "int",
}
QUANTIZATION: dict[str, Any] = {
    "config_groups": {
        "group_0": {
            "input_activations": None,
            "output_activations": None,
            "targets": ["Linear"],
            "weights": WEIGHTS,
        }
    },
    "format": "pack-quantized",
    "ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*"],
    "kv_cache_scheme": None,
    "quant_method": "compressed-tensors",
    "quantization_status": "compressed",
}


def packed(name: str, shape: tuple[int, int], generator: torch.Generator) -> dict[str, Any]:
    """The stored parts of a random weight of standard deviation 0.02, and `reference`."""
    values = torch.randint(-8, 8, shape, generator=generator, dtype=torch.int8)
    size = (shape[0], shape[1] // 32)
    scales = (0.003 + 0.003 * torch.rand(size, generator=generator)).bfloat16()
    arguments = QuantizationArgs(**{k: v for k, v in WEIGHTS.items() if k != "block_structure"})
    return {
        f"{name}_packed": pack_to_int32(values, 4),
        f"{name}_scale": scales,
        f"{name}_shape": torch.tensor(shape, dtype=torch.int32),
        "reference": dequantize(values, scales, args=arguments),
    }


def make_int4(source: Path, folder: Path) -> tuple[Path, Path]:
    """(INT4 groups, their bfloat16 reference) of a multimodal checkpoint; of the first, packed
    values and scales are in different files."""
    generator = torch.Generator().manual_seed(9)
    first: dict[str, torch.Tensor] = {}
    second: dict[str, torch.Tensor] = {}
    reference: dict[str, torch.Tensor] = {}
    for saved, value in load_file(source / "model.safetensors").items():
        # transformers 5.19 writes the text model's layers as blocks; they are published as layers.
        name = saved.replace("language_model.model.blocks.", "language_model.model.layers.")
        if ".experts." not in name:
            first[name] = reference[name] = value
            continue
        parts = packed(name, (value.shape[0], value.shape[1]), generator)
        reference[name] = parts.pop("reference")
        for part, stored in parts.items():
            (second if part.endswith("_scale") else first)[part] = stored
    text = json.loads((source / "config.json").read_text())["text_config"]
    published = {"model_type": "kimi_k2", "quantization_config": QUANTIZATION}
    return write_both(
        source, folder, "int4", (first, second), reference, {"text_config": text | published}
    )
