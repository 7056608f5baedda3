"""gpt-oss as it is published, its experts in MXFP4, and the bfloat16 one that it stands for.

The reference of whole tensors is written out here: of a byte the lower four bits first; of four
bits the sign, two of exponent, one of mantissa; times two to the scale - 127.
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file

from tests.float8_checkpoint import write_both

QUANTIZATION = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}


def number(bits: int) -> float:
    """The E2M1 number of four bits."""
    exponent, mantissa = bits >> 1 & 3, bits & 1
    size = 0.5 * mantissa if exponent == 0 else (1 + 0.5 * mantissa) * 2.0 ** (exponent - 1)
    return -size if bits & 8 else size


def random_mxfp4(
    *shape: int, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Blocks and scales of `shape` (the last in 32s), and the float64 they stand for."""
    *rows, columns = shape
    blocks = torch.randint(0, 256, (*rows, columns // 32, 16), generator=generator).byte()
    scales = torch.randint(119, 124, (*rows, columns // 32), generator=generator).byte()
    table = torch.tensor([number(bits) for bits in range(16)], dtype=torch.float64)
    values = torch.empty(*rows, columns // 32, 32, dtype=torch.float64)
    values[..., 0::2], values[..., 1::2] = table[(blocks % 16).int()], table[(blocks // 16).int()]
    values *= 2.0 ** (scales.double() - 127)[..., None]
    return blocks, scales, values.flatten(-2)


def make_mxfp4(source: Path, folder: Path) -> tuple[Path, Path]:
    """(MXFP4, what it stands for) of a bfloat16 checkpoint; of the first, blocks and scales are in
    different files."""
    generator = torch.Generator().manual_seed(8)
    first: dict[str, torch.Tensor] = {}
    second: dict[str, torch.Tensor] = {}
    reference: dict[str, torch.Tensor] = {}
    for name, value in load_file(source / "model.safetensors").items():
        if not name.endswith(("gate_up_proj", "down_proj")):
            first[name] = reference[name] = value
            continue
        experts, inputs, outputs = value.shape
        blocks, scales, values = random_mxfp4(experts, outputs, inputs, generator=generator)
        first[f"{name}_blocks"], second[f"{name}_scales"] = blocks, scales
        reference[name] = values.transpose(1, 2).bfloat16().contiguous()
        assert torch.equal(reference[name].double(), values.transpose(1, 2))  # it is exact
    config = {"quantization_config": QUANTIZATION}
    return write_both(source, folder, "mxfp4", (first, second), reference, config)
