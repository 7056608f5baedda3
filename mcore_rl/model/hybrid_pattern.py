"""Layers in Megatron's HybridModel, which counts attention and MLP of a transformer separately.

A pattern has one symbol per layer: `*` attention, `+` latent attention, `D` sparse attention, `G`
gated delta net, `M` Mamba-2, `-` MLP, `E` experts. `|` separates the parts of pipeline stages, `/`
precedes each MTP layer. Two DeepSeek-V3 layers on two stages, with one MTP layer: `+-|+E/+E`. A
layer of a model with Mamba-2 has one symbol, as `hybrid_override_pattern` has.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

from mcore_rl.model.config_json import ModelShape
from mcore_rl.model.layout import PipelineLayers
from mcore_rl.model.mamba import ATTENTION, DENSE, EXPERTS, MAMBA

LATENT_ATTENTION, SPARSE_ATTENTION, DELTA_NET = "+DG"
_SECOND_HALVES = (DENSE, EXPERTS)  # any other symbol begins a transformer layer


def halves(shape: ModelShape) -> list[str]:
    """Return the two symbols of each transformer layer, such as `+E`, or the one of a block."""
    if shape.blocks:
        return list(shape.blocks)
    default = SPARSE_ATTENTION if shape.indexer else LATENT_ATTENTION if shape.latent else ATTENTION
    is_linear_layer = shape.is_linear_layer or (False,) * shape.num_layers
    return [
        (DELTA_NET if is_linear else default) + (EXPERTS if is_moe else DENSE)
        for is_linear, is_moe in zip(is_linear_layer, shape.is_moe_layer, strict=True)
    ]


def hybrid_pattern(pairs: Sequence[str], layers: PipelineLayers, num_mtp_layers: int = 0) -> str:
    """Return the pattern of a transformer with these `halves`, whose stages and chunks have
    `layers`."""
    parts = [
        "".join(pairs[layer] for layer in stage[chunk])
        for chunk in range(len(layers[0]))  # of all stages, then the next chunk of all
        for stage in layers
    ]
    return "|".join(parts) + f"/{pairs[-1]}" * num_mtp_layers


def is_transformer(pattern: str) -> bool:
    """Return whether a pattern is of whole transformer layers, with or without MTP layers."""
    return re.fullmatch(r"([*+DG][-E])+(/[*+DG][-E])*", pattern.replace("|", "")) is not None


def transformer_layers(pattern: str) -> list[int]:
    """Return the number, from 0, of the model's layer at each position, without MTP layers."""
    number, layers = -1, []
    second = () if MAMBA in pattern else _SECOND_HALVES
    for symbol in pattern.partition("/")[0].replace("|", ""):
        number += symbol not in second
        layers.append(number)
    return layers


def has_mamba(chunk: Any) -> bool:
    """Return whether a model, of which `chunk` is a part, has Mamba-2 layers."""
    return MAMBA in (getattr(chunk, "hybrid_layer_pattern", None) or "")


def numbered_layers(chunk: Any) -> Iterator[tuple[int, Any]]:
    """Yield the decoder layers of a model chunk, each with its transformer layer's number from 0.

    The two halves of a transformer layer in a HybridModel have the same number."""
    pattern = getattr(chunk, "hybrid_layer_pattern", None)
    by_position = None if pattern is None else transformer_layers(pattern)
    for layer in chunk.decoder.layers:
        number = layer.layer_number - 1
        if by_position is not None and not hasattr(layer, "has_transformer_number"):
            number = by_position[number]  # a fork's
        yield number, layer
