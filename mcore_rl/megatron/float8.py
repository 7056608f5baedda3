"""Values of FP8 blocks, the format that `model.float8_blocks` describes.

The values of a weight are float32(weight) x scale, rounded to bfloat16, as in DeepSeek's
`weight_dequant`. A box of a weight needs the scales of the blocks that it touches, even in part.

Quantisation follows vLLM and DeepGEMM (`per_block_cast_to_fp8`): scale = largest |value| of a
block / 448. This does not reproduce the published scale, because a block's largest value need not
have been 448. An export therefore keeps the published bytes of each block whose values are
unchanged, and quantises the others.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import torch

from mcore_rl.common.errors import UsageError
from mcore_rl.model.boxes import Box, full_box
from mcore_rl.model.float8_blocks import BLOCK, FLOAT8, Float8Weights, grid, scale_name
from mcore_rl.model.tensors import TensorInfo

_CAST_ELEMENTS = 16 << 20  # cast at once, in float32
_LARGEST = 448.0
_LEAST_AMAX = 1e-4  # of a block, as in vLLM: a block of zeros needs a scale, too
_SCALE_DTYPES = ("float32", "bfloat16")


def split_scales(
    headers: Mapping[str, TensorInfo], folder: Path, flag: str
) -> tuple[dict[str, TensorInfo], dict[str, TensorInfo]]:
    """Split the tensors of a folder with FP8 blocks into weights and the scales by weight.

    The float8 weights have dtype bfloat16 in the result. Raises UsageError for scales that are
    missing, have another shape or dtype, or belong to no weight.
    """

    def refuse(what: str, remedy: str = "copy the checkpoint again") -> UsageError:
        return UsageError(what, flag=f"{flag} {folder}", remedy=remedy)

    scales: dict[str, TensorInfo] = {}
    for name, info in headers.items():
        if info.dtype != FLOAT8:
            continue
        stored = headers.get(scale_name(name))
        if stored is None:
            raise refuse(f"lacks {scale_name(name)}, the scales of {name}, which is in float8")
        if len(info.shape) != 2 or stored.shape != grid(info.shape):
            raise refuse(
                f"has {scale_name(name)} of shape {list(stored.shape)}, but {name} of shape "
                f"{list(info.shape)} has {list(grid(info.shape))} blocks of {BLOCK} x {BLOCK}",
                f"give a checkpoint whose weight_block_size is [{BLOCK}, {BLOCK}]",
            )
        if stored.dtype not in _SCALE_DTYPES:
            raise refuse(
                f"has {scale_name(name)} of dtype {stored.dtype}, and scales are "
                f"{' or '.join(_SCALE_DTYPES)}",
                "give the checkpoint as DeepSeek publishes it, or in bfloat16",
            )
        scales[name] = stored
    if not scales:
        raise refuse(
            "has no weight in float8, but its config.json says so (quantization_config)",
            "drop that field if the weights have been dequantised",
        )
    of_scales = {scale_name(name) for name in scales}
    lost = sorted(name for name in headers if name.endswith("_scale_inv") and name not in of_scales)
    if lost:
        raise refuse(f"has {lost[0]}, and {lost[0].removesuffix('_scale_inv')} is not in float8")
    weights = {
        name: replace(info, dtype="bfloat16", itemsize=2) if name in scales else info
        for name, info in headers.items()
        if name not in of_scales
    }
    return weights, scales


def dequantise(weight: torch.Tensor, scales: torch.Tensor, box: Box) -> torch.Tensor:
    """Return the bfloat16 values of `box`; `weight` is that box, `scales` is `blocks_of(box)`."""
    rows, columns = (list(_spans(start, stop)) for start, stop in box)
    widths = torch.tensor([stop - start for start, stop in columns])
    by_column = scales.float().repeat_interleave(widths, dim=1)
    values = torch.empty(weight.shape, dtype=torch.bfloat16)
    for row, (start, stop) in enumerate(rows):  # avoids a float32 copy of the full box
        values[start:stop] = weight[start:stop].float() * by_column[row]
    return values


def _spans(start: int, stop: int) -> Iterator[tuple[int, int]]:
    """Split a range at block boundaries; the parts count from its start."""
    cuts = [start, *range((start // BLOCK + 1) * BLOCK, stop, BLOCK), stop]
    for first, last in zip(cuts, cuts[1:], strict=False):
        yield first - start, last - start


def scales_from(largest: torch.Tensor, *, powers_of_two: bool) -> torch.Tensor:
    """Return the float32 scales of blocks whose largest |value| is `largest`, of any shape.

    `powers_of_two` rounds them up to powers of two (scale_fmt ue8m0).
    """
    scales = largest.float().clamp(_LEAST_AMAX) / _LARGEST
    return torch.exp2(torch.ceil(torch.log2(scales))) if powers_of_two else scales


def largest_by_block(values: torch.Tensor, box: Box) -> torch.Tensor:
    """Return the largest |value| of each block of `blocks_of(box)`, of the part in `box`.

    `values` `[r, c]` are those of `box`; the result is float32.
    """
    (first_row, last_row), (first, last) = box
    around = (first % BLOCK, -last % BLOCK, first_row % BLOCK, -last_row % BLOCK)
    padded = torch.nn.functional.pad(values.abs(), around)
    blocks: torch.Tensor = padded.unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK))
    return blocks.amax(dim=(1, 3)).float()


def cast_rows(
    values: torch.Tensor, scales: torch.Tensor, box: Box, rows: torch.Tensor
) -> torch.Tensor:
    """Return `rows` of `box` in float8, given the `scales` of `blocks_of(box)`.

    `values` `[n, c]` are those of the rows, whose numbers `[n]` count in the full weight.
    """
    (first_row, _), (first, last) = box
    columns = torch.arange(first, last, device=values.device) // BLOCK - first // BLOCK
    by_column = (1.0 / scales)[:, columns]
    rows = rows // BLOCK - first_row // BLOCK
    result = torch.empty(values.shape, dtype=torch.float8_e4m3fn, device=values.device)
    step = max(1, _CAST_ELEMENTS // max(1, values.shape[1]))
    for start in range(0, len(values), step):
        part = slice(start, start + step)
        result[part] = (values[part].float() * by_column[rows[part]]).to(result.dtype)
    return result


def quantise_whole(
    values: torch.Tensor, *, powers_of_two: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a full weight `[r, c]` in float8, and its scales."""
    box = full_box(tuple(values.shape))
    scales = scales_from(largest_by_block(values, box), powers_of_two=powers_of_two)
    rows = torch.arange(len(values), device=values.device)
    return cast_rows(values, scales, box, rows), scales


def quantised_weights(
    weights: Iterable[tuple[str, torch.Tensor]], quantised: Float8Weights
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield full tensors by name, with `quantised` ones in float8, followed by their scales."""
    for name, values in weights:
        if name in quantised.weights:
            weight, scales = quantise_whole(values, powers_of_two=quantised.powers_of_two)
            yield name, weight
            yield scale_name(name), scales
        else:
            yield name, values


def quantise(
    values: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor,
    *,
    powers_of_two: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise a full bfloat16 weight to FP8 blocks, and return it and its scales.

    `weight` and `scales` are the published ones: a block whose values are unchanged, bit for bit,
    keeps both. Scales have the dtype of `scales`; `powers_of_two` rounds them up (scale_fmt
    ue8m0).
    """
    new_weight, new_scales = weight.clone(), scales.clone()
    num_columns = values.shape[1]
    for row, start in enumerate(range(0, len(values), BLOCK)):
        rows = slice(start, min(start + BLOCK, len(values)))
        box = ((start, rows.stop), (0, num_columns))
        published = dequantise(weight[rows], scales[row : row + 1], box)
        differs = published.view(torch.int16) != values[rows].contiguous().view(torch.int16)
        changed = _by_column_blocks(differs).any(dim=(0, 2))
        if not changed.any():
            continue
        blocks = _by_column_blocks(values[rows].float())
        new = scales_from(blocks.abs().amax(dim=(0, 2)), powers_of_two=powers_of_two)
        new = new.to(scales.dtype)
        quantised = (blocks * (1.0 / new.float())[:, None]).to(weight.dtype)
        merged = torch.where(
            changed[:, None],
            quantised.view(torch.uint8),
            _by_column_blocks(weight[rows].view(torch.uint8)),
        )
        new_weight[rows] = merged.flatten(1)[:, :num_columns].view(weight.dtype)
        new_scales[row] = torch.where(changed, new, scales[row])
    return new_weight, new_scales


def _by_column_blocks(rows: torch.Tensor) -> torch.Tensor:
    """Reshape `[r, c]` to `[r, blocks, 128]`, with the last block zero-padded."""
    missing = -rows.shape[1] % BLOCK
    padded = torch.nn.functional.pad(rows, (0, missing))
    blocks: torch.Tensor = padded.unflatten(1, (-1, BLOCK))
    return blocks
