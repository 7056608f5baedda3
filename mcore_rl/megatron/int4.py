"""Values of INT4 groups, the format in which Kimi-K2-Thinking, K2.5 and K2.6 are published.

It is `pack-quantized` of compressed-tensors. A weight `[r, c]` is stored as `<weight>_packed`,
int32 `[r, c / 8]`, with the first of eight columns in the lowest four bits, each as its value + 8;
`<weight>_scale` `[r, c / 32]` with a scale for each group of 32 columns; and `<weight>_shape`. The
values are int4 x scale, rounded to bfloat16, as in `compressed_tensors`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import torch

from mcore_rl.common.errors import UsageError
from mcore_rl.model.boxes import Box
from mcore_rl.model.quantization import INT4_GROUP
from mcore_rl.model.tensors import TensorInfo

_BITS, _COLUMNS_IN_WORD = 4, 8
_PACKED, _SCALE, _SHAPE = "_packed", "_scale", "_shape"
_SCALE_DTYPES = ("bfloat16", "float32")


def stored_parts(weight: str) -> tuple[str, str]:
    """Return the names of a weight's packed values and scales."""
    return weight + _PACKED, weight + _SCALE


def names_of_weights(names: Mapping[str, str]) -> dict[str, str]:
    """Return what `names` says of packed values as names of their weights."""
    return {
        name.removesuffix(_PACKED): stored.removesuffix(_PACKED)
        for name, stored in names.items()
        if name.endswith(_PACKED)
    }


def split_packed(
    infos: Mapping[str, TensorInfo], folder: Path, flag: str
) -> tuple[dict[str, TensorInfo], dict[str, TensorInfo]]:
    """Split the tensors of a folder with INT4 groups into weights and the scales by weight.

    The packed weights have dtype bfloat16 in the result. Raises UsageError for scales that are
    missing or have another shape or dtype, and for integers that are not packed weights.
    """

    def refuse(what: str) -> UsageError:
        remedy = "copy the checkpoint as it was published, or give it in bfloat16"
        return UsageError(what, flag=f"{flag} {folder}", remedy=remedy)

    weights: dict[str, TensorInfo] = {}
    scales: dict[str, TensorInfo] = {}
    for name, info in infos.items():
        weight = name.removesuffix(_PACKED)
        if weight == name:
            continue
        stored = infos.get(weight + _SCALE)
        if stored is None:
            raise refuse(f"lacks {weight}{_SCALE}, the scales of {name}")
        rows, words = info.shape if len(info.shape) == 2 else (0, 0)
        columns = words * _COLUMNS_IN_WORD
        if info.dtype != "int32" or stored.shape != (rows, columns // INT4_GROUP):
            raise refuse(
                f"has {weight}{_SCALE} of shape {list(stored.shape)} and {name} of dtype "
                f"{info.dtype} and shape {list(info.shape)}, which are not groups of {INT4_GROUP}"
            )
        if stored.dtype not in _SCALE_DTYPES:
            raise refuse(f"has {weight}{_SCALE} of dtype {stored.dtype}")
        scales[weight] = stored
        weights[weight] = replace(info, shape=(rows, columns), dtype="bfloat16", itemsize=2)
    if not scales:
        raise refuse("has no packed weight, but its config.json says so (quantization_config)")
    parts = {weight + part for weight in scales for part in (_PACKED, _SCALE, _SHAPE)}
    for name, info in infos.items():
        if name in parts:
            continue
        if name in weights:
            raise refuse(f"has both {name} and {name}{_PACKED}")
        if info.dtype.startswith("int"):
            raise refuse(f"has {name} of dtype {info.dtype}, which is not a packed weight")
        weights[name] = info
    return weights, scales


def dequantise(
    packed: Callable[[Box], torch.Tensor], scales: Callable[[Box], torch.Tensor], box: Box
) -> tuple[torch.Tensor, int]:
    """Return the bfloat16 values of `box` and the bytes read, by functions from a box to values."""
    # Imported late: it takes a second, and few checkpoints need it.
    from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32

    rows, (start, stop) = box
    first, last = start // INT4_GROUP, -(-stop // INT4_GROUP)
    words = INT4_GROUP // _COLUMNS_IN_WORD
    data, own = packed((rows, (first * words, last * words))), scales((rows, (first, last)))
    whole = torch.Size((data.shape[0], (last - first) * INT4_GROUP))
    by_group = unpack_from_int32(data, _BITS, whole).float().unflatten(1, (-1, INT4_GROUP))
    values = (by_group * own.float()[:, :, None]).bfloat16().flatten(1)
    kept = values[:, start - first * INT4_GROUP : stop - first * INT4_GROUP]
    return kept.contiguous(), data.nbytes + own.nbytes
