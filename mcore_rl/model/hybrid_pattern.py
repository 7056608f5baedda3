"""Transformer layers in Megatron's HybridModel, which counts attention and MLP separately.

A pattern has one symbol per layer: `*` attention, `+` latent attention, `-` MLP, `E` experts. `|`
separates the parts of pipeline stages, `/` precedes each MTP layer. Two DeepSeek-V3 layers on two
stages, with one MTP layer: `+-|+E/+E`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from mcore_rl.model.config_json import ModelShape
from mcore_rl.model.layout import PipelineLayers

ATTENTION, LATENT_ATTENTION, DENSE, EXPERTS = "*+-E"
_SECOND_HALVES = (DENSE, EXPERTS)  # any other symbol begins a transformer layer


def hybrid_pattern(
    shape: ModelShape, layers: PipelineLayers, attention: str, num_mtp_layers: int = 0
) -> str:
    """Return the pattern of a transformer whose stages and chunks have `layers`."""
    pairs = [attention + (EXPERTS if is_moe else DENSE) for is_moe in shape.is_moe_layer]
    parts = [
        "".join(pairs[layer] for layer in stage[chunk])
        for chunk in range(len(layers[0]))  # of all stages, then the next chunk of all
        for stage in layers
    ]
    return "|".join(parts) + f"/{pairs[-1]}" * num_mtp_layers


def is_transformer(pattern: str) -> bool:
    """Return whether a pattern is of whole transformer layers, with or without MTP layers."""
    return re.fullmatch(r"([*+][-E])+(/[*+][-E])*", pattern.replace("|", "")) is not None


def transformer_layers(pattern: str) -> list[int]:
    """Return the number, from 0, of the transformer layer at each position, without MTP layers."""
    number, found = -1, []
    for symbol in pattern.partition("/")[0].replace("|", ""):
        number += symbol not in _SECOND_HALVES
        found.append(number)
    return found


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
