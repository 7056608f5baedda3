"""Experts of a layer in one tensor, as gpt-oss is published: read and written expert by expert.

To everybody else an expert has tensors of its own, by the names of its family's table: a gate (w1),
an up-projection (w3) and a down-projection (w2), each a weight `[out, in]` and a bias. In a folder,
after `mlp.experts.`, they are parts of

    gate_up_proj       [e, in, 2 x out]   and gate_up_proj_bias [e, 2 x out]: gate and up in turn
    down_proj          [e, in, out]       and down_proj_bias [e, out]

or, where the weights are MXFP4 (`quantization_config` of `mxfp4`), in place of the weights, of

    gate_up_proj_blocks [e, 2 x out, in / 32, 16] uint8 and _scales [e, 2 x out, in / 32] uint8
    down_proj_blocks    [e, out, in / 32, 16] uint8     and _scales [e, out, in / 32] uint8

of which each byte is two numbers of four bits, the lower four first, and each 32 in a row share a
power of two (OCP Microscaling Formats, version 1.0). They are read as the bfloat16 they stand for,
which is exact. A box of an expert's tensor reads what it needs of one expert, and of gates the
up-projections between them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from mcore_rl.common.errors import UsageError
from mcore_rl.hybrid_engine.plan.moves import TensorInfo
from mcore_rl.model.boxes import Box
from mcore_rl.model.families import TensorNames, bias_of

BLOCKS, SCALES = "_blocks", "_scales"
_BLOCK = 32  # numbers that share a scale
_STACKED = re.compile(r"(.*\.experts\.)(gate_up_proj|down_proj)(_bias|_blocks|_scales)?")
# Of the 16 numbers of four bits; scales are powers of two, from 2 ** -127.
_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_SCALE_BIAS = 127

# What a file holds of one of its tensors: `stored(name)[box]`.
Stored = Callable[[str, Box], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Part:
    """Where an expert's tensor lies in the one of its layer."""

    stored: str  # as it is called in bfloat16
    expert: int
    first: int = 0  # of the rows that are this part's; 1 for up-projections
    every: int = 1  # so many rows
    is_bias: bool = False
    is_mxfp4: bool = False

    @property
    def file_name(self) -> str:
        """What the folder has of it; of two tensors the larger one."""
        return self.stored + BLOCKS if self.is_mxfp4 else self.stored

    def read(self, box: Box, stored: Stored) -> tuple[torch.Tensor, int]:
        """The values of `box` of the expert's tensor, and the bytes read for them."""
        start, stop = box[0]
        rows = (start * self.every, stop * self.every)
        mine = slice(self.first, None, self.every)
        one = (self.expert, self.expert + 1)
        if self.is_bias:
            data = stored(self.stored, (one, rows))
            return data[0, mine].clone(), data.nbytes
        if not self.is_mxfp4:
            data = stored(self.stored, (one, box[1], rows))
            return data[0, :, mine].t().contiguous(), data.nbytes
        first, last = box[1]
        columns = (first // _BLOCK, -(-last // _BLOCK))
        blocks = stored(self.stored + BLOCKS, (one, rows, columns, (0, _BLOCK // 2)))
        scales = stored(self.stored + SCALES, (one, rows, columns))
        values = dequantise(blocks[0, mine], scales[0, mine])
        skipped = columns[0] * _BLOCK
        cut = values[:, first - skipped : last - skipped].contiguous()
        return cut, blocks.nbytes + scales.nbytes

    def write(self, whole: torch.Tensor, values: torch.Tensor) -> None:
        """Put the expert's whole tensor into its layer's, of the shape in bfloat16."""
        mine = slice(self.first, None, self.every)
        whole[self.expert][..., mine].copy_(values if self.is_bias else values.t())


def dequantise(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """`[r, c * 32]` bfloat16 of `[r, c, 16]` bytes and `[r, c]` exponents."""
    table = torch.tensor([*_VALUES, *(-value for value in _VALUES)], dtype=torch.bfloat16)
    numbers = torch.stack((blocks & 0xF, blocks >> 4), dim=-1).flatten(-2)
    exponents = scales.int() - _SCALE_BIAS
    return torch.ldexp(table[numbers.int()], exponents[..., None]).flatten(-2)


@dataclass(frozen=True, slots=True)
class Stack:
    """What a folder has of stacked experts."""

    parts: Mapping[str, Part]  # an expert's tensor -> where it is
    stored: Mapping[str, TensorInfo]  # the tensors of the folder, as they lie there

    @property
    def as_bfloat16(self) -> dict[str, TensorInfo]:
        """The tensors of layers that an export has."""
        found = {}
        for name, info in self.stored.items():
            if name.endswith(SCALES):
                continue
            if name.endswith(BLOCKS):
                experts, rows, blocks, _ = info.shape
                shape = (experts, blocks * _BLOCK, rows)
                found[name.removesuffix(BLOCKS)] = TensorInfo(shape, "bfloat16", 2)
            else:
                found[name] = info
        return found


def split_experts(
    found: Mapping[str, TensorInfo], names: TensorNames, folder: Path, flag: str
) -> tuple[dict[str, TensorInfo], Stack]:
    """All tensors of a folder, those of layers' experts as each expert's own; and where these are.

    Raises UsageError for one of another rank or dtype, or of MXFP4 without the other half.
    """
    stored = {name: info for name, info in found.items() if _STACKED.fullmatch(name)}
    _require_whole(stored, folder, flag)
    tensors = {name: info for name, info in found.items() if name not in stored}
    stack = Stack({}, stored)
    parts: dict[str, Part] = {}
    for name, info in stack.as_bfloat16.items():
        is_mxfp4 = name + BLOCKS in stored
        for tensor, part, shape in _parts_of(name, info, names, is_mxfp4=is_mxfp4):
            parts[tensor] = part
            tensors[tensor] = replace(info, shape=shape)
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
    name: str, info: TensorInfo, names: TensorNames, *, is_mxfp4: bool
) -> Iterable[tuple[str, Part, tuple[int, ...]]]:
    """Each expert's tensors in a layer's one, of the shape in bfloat16."""
    match = _STACKED.fullmatch(name)
    assert match is not None
    is_bias = bool(match[3])
    in_turn = [names.gate, names.up] if match[2] == "gate_up_proj" else [names.down]
    rows, every = info.shape[-1] // len(in_turn), len(in_turn)
    shape = (rows,) if is_bias else (rows, info.shape[1])
    for expert in range(info.shape[0]):
        for first, weight in enumerate(in_turn):
            tensor = f"{match[1]}{expert}.{bias_of(weight) if is_bias else weight}"
            yield tensor, Part(name, expert, first, every, is_bias, is_mxfp4), shape
