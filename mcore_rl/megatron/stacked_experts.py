"""Stacked experts: one tensor per layer, read and written expert by expert.

To callers an expert has its own tensors, named by its family's table: a gate (w1), an up-projection
(w3) and a down-projection (w2), each a weight `[out, in]` and a bias. In a folder they are parts of
these tensors, whose names follow `mlp.experts.`:

    gate_up_proj       [e, 2 x out, in]   and gate_up_proj_bias [e, 2 x out]
    down_proj          [e, out, in]       and down_proj_bias [e, out]

In gpt-oss, weights are transposed, and the rows of the gate alternate with those of the
up-projection; in Qwen3.5 and Qwen3-VL they come first. Qwen3-VL is published with transposed
weights and saved by transformers without: here as there, weights that do not have the shape above
are transposed. MXFP4 weights (`quantization_config` of `mxfp4`, gpt-oss) are parts of these:

    gate_up_proj_blocks [e, 2 x out, in / 32, 16] uint8 and _scales [e, 2 x out, in / 32] uint8
    down_proj_blocks    [e, out, in / 32, 16] uint8     and _scales [e, out, in / 32] uint8

Each byte holds two four-bit numbers, the lower four bits first, and 32 numbers in a row share a
power of two (OCP Microscaling Formats, version 1.0). The conversion to bfloat16 is exact. A box of
an expert's tensor reads only what it needs of one expert; a box of a gate also reads the
interleaved up-projections.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from mcore_rl.common.errors import UsageError
from mcore_rl.model.boxes import Box
from mcore_rl.model.config_json import ModelShape
from mcore_rl.model.families import family_of
from mcore_rl.model.family import bias_of
from mcore_rl.model.tensors import TensorInfo

BLOCKS, SCALES = "_blocks", "_scales"
_BLOCK = 32  # numbers that share a scale
# Not those of MTP layers, which are carried as they are.
_STACKED = re.compile(r"(?!mtp\.)(.*\.experts\.)(gate_up_proj|down_proj)(_bias|_blocks|_scales)?")
# The non-negative four-bit numbers; scales are powers of two, from 2 ** -127.
_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_SCALE_BIAS = 127

# (tensor of the folder, box) -> the stored values.
Stored = Callable[[str, Box], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Part:
    """The location of an expert's tensor in its layer's tensor.

    Example: `Part("model.layers.0.mlp.experts.gate_up_proj", 3, rows=64, first=1, every=2)`: an
    up-projection whose rows alternate with the gate's.
    """

    stored: str  # name of the layer's tensor in bfloat16
    expert: int
    rows: int
    first: int = 0  # its first row in the layer's tensor
    every: int = 1  # step between its rows
    is_transposed: bool = False
    is_bias: bool = False
    is_mxfp4: bool = False

    @property
    def file_name(self) -> str:
        """The tensor's name in the folder; for MXFP4, the name of its blocks."""
        return self.stored + BLOCKS if self.is_mxfp4 else self.stored

    def read(self, box: Box, stored: Stored) -> tuple[torch.Tensor, int]:
        """Return the values of `box` of the expert's tensor, and the bytes read for them."""
        offset, before = self.first // self.every * self.every, self.first % self.every
        rows = (offset + box[0][0] * self.every, offset + box[0][1] * self.every)
        mine = slice(before, None, self.every)
        one = (self.expert, self.expert + 1)
        if self.is_bias:
            data = stored(self.stored, (one, rows))
            return data[0, mine].clone(), data.nbytes
        if not self.is_mxfp4:
            at = (box[1], rows) if self.is_transposed else (rows, box[1])
            data = stored(self.stored, (one, *at))
            whole = data[0].t() if self.is_transposed else data[0]
            return whole[mine].contiguous(), data.nbytes
        first, last = box[1]
        columns = (first // _BLOCK, -(-last // _BLOCK))
        blocks = stored(self.stored + BLOCKS, (one, rows, columns, (0, _BLOCK // 2)))
        scales = stored(self.stored + SCALES, (one, rows, columns))
        values = dequantise(blocks[0, mine], scales[0, mine])
        skipped = columns[0] * _BLOCK
        cut = values[:, first - skipped : last - skipped].contiguous()
        return cut, blocks.nbytes + scales.nbytes

    def write(self, whole: torch.Tensor, values: torch.Tensor) -> None:
        """Copy the expert's full tensor into its layer's, which has the bfloat16 shape."""
        one = whole[self.expert]
        as_rows = one.t() if self.is_transposed else one
        as_rows[self.first : self.first + self.rows * self.every : self.every].copy_(values)


def dequantise(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Convert `[r, c, 16]` bytes and `[r, c]` exponents to `[r, c * 32]` bfloat16."""
    table = torch.tensor([*_VALUES, *(-value for value in _VALUES)], dtype=torch.bfloat16)
    numbers = torch.stack((blocks & 0xF, blocks >> 4), dim=-1).flatten(-2)
    exponents = scales.int() - _SCALE_BIAS
    return torch.ldexp(table[numbers.int()], exponents[..., None]).flatten(-2)


@dataclass(frozen=True, slots=True)
class Stack:
    """The stacked experts of a folder."""

    parts: Mapping[str, Part]  # an expert's tensor -> its location
    stored: Mapping[str, TensorInfo]  # the folder's tensors

    @property
    def as_bfloat16(self) -> dict[str, TensorInfo]:
        """The layers' tensors in an export."""
        tensors = {}
        for name, info in self.stored.items():
            if name.endswith(SCALES):
                continue
            if name.endswith(BLOCKS):
                experts, rows, blocks, _ = info.shape
                shape = (experts, blocks * _BLOCK, rows)
                tensors[name.removesuffix(BLOCKS)] = TensorInfo(shape, "bfloat16", 2)
            else:
                tensors[name] = info
        return tensors


def split_experts(
    infos: Mapping[str, TensorInfo], shape: ModelShape, folder: Path, flag: str
) -> tuple[dict[str, TensorInfo], Stack]:
    """Split a folder's stacked tensors by expert; return all tensors and the stack.

    Raises UsageError for a stacked one of another rank or dtype, or MXFP4 without its other half.
    """
    stored = {name: info for name, info in infos.items() if _STACKED.fullmatch(name)}
    _require_whole(stored, folder, flag)
    tensors = {name: info for name, info in infos.items() if name not in stored}
    stack = Stack({}, stored)
    parts: dict[str, Part] = {}
    for name, info in stack.as_bfloat16.items():
        is_mxfp4 = name + BLOCKS in stored
        for tensor, part, size in _parts_of(name, info, shape, is_mxfp4=is_mxfp4):
            parts[tensor] = part
            tensors[tensor] = replace(info, shape=size)
    return tensors, replace(stack, parts=parts)


def _require_whole(stored: Mapping[str, TensorInfo], folder: Path, flag: str) -> None:
    for name, info in stored.items():
        match = _STACKED.fullmatch(name)
        assert match is not None
        kind = match[3] or ""
        rank = {"": 3, "_bias": 2, BLOCKS: 4, SCALES: 3}[kind]
        is_bytes = kind in (BLOCKS, SCALES)
        partner = stored.get(match[1] + match[2] + (SCALES if kind == BLOCKS else BLOCKS))
        problem = ""
        if len(info.shape) != rank or (kind == BLOCKS and info.shape[3] != _BLOCK // 2):
            problem = (
                f"has {name} of shape {list(info.shape)}, which is not that of stacked experts"
            )
        elif is_bytes != (info.dtype == "uint8"):
            problem = f"has {name} of dtype {info.dtype}"
        elif is_bytes and (partner is None or partner.shape[:3] != info.shape[:3]):
            other = "scales" if kind == BLOCKS else "blocks"
            problem = f"has {name} without {other} of the same experts, rows and blocks of 32"
        elif kind == "" and partner is not None:
            problem = f"has both {name} and {name}{BLOCKS}"
        if problem:
            raise UsageError(
                problem, flag=f"{flag} {folder}", remedy="copy the checkpoint as it was published"
            )


def _parts_of(
    name: str, info: TensorInfo, shape: ModelShape, *, is_mxfp4: bool
) -> Iterable[tuple[str, Part, tuple[int, ...]]]:
    """Yield name, location and shape of each expert's tensors in a layer's bfloat16 tensor."""
    match = _STACKED.fullmatch(name)
    assert match is not None
    family = family_of(shape.architecture)
    names, alternates = family.names, family.stacked_experts == "alternating"
    is_bias, is_down = bool(match[3]), match[2] == "down_proj"
    width = shape.experts.hidden_size if shape.experts and is_down else shape.hidden_size
    is_transposed = not is_bias and (alternates or info.shape[-1] != width)
    weights = [names.down] if is_down else [names.gate, names.up]
    of_one = info.shape[:0:-1] if is_transposed else info.shape[1:]
    size = (of_one[0] // len(weights), *of_one[1:])
    every, step = (len(weights), 1) if alternates else (1, size[0])
    kind = (every, is_transposed, is_bias, is_mxfp4)
    for expert in range(info.shape[0]):
        for number, weight in enumerate(weights):
            tensor = f"{match[1]}{expert}.{bias_of(weight) if is_bias else weight}"
            yield tensor, Part(name, expert, size[0], number * step, *kind), size
