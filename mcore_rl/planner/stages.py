"""How layers are given to pipeline stages where nobody has said it.

This module is pure: it imports neither Megatron nor vLLM nor torch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from mcore_rl.model.layout import PipelineLayers, pipeline_layers


@dataclass(frozen=True, slots=True)
class Stages:
    """Layers of every stage, and the flags for it beside --pipeline-model-parallel-size."""

    layers: PipelineLayers
    flags: str  # with a space before each


def stages_for(num_layers: int, pp_size: int) -> Stages | None:
    """As even as Megatron can cut it: equal stages, or a last one with fewer layers.

    Where the last one would be left without, the first one gives way too. None where neither does.
    """
    if pp_size > num_layers:
        return None
    if num_layers % pp_size == 0:
        return Stages(pipeline_layers(num_layers, pp_size), "")
    middle = math.ceil(num_layers / pp_size)
    last = num_layers - middle * (pp_size - 1)
    if last >= 1:
        layers = pipeline_layers(num_layers, pp_size, last=last)
        return Stages(layers, f" --decoder-last-pipeline-num-layers {last}")
    ends = num_layers - middle * (pp_size - 2)
    if pp_size > 2 and ends >= 2:
        first, last = ends - ends // 2, ends // 2
        layers = pipeline_layers(num_layers, pp_size, first=first, last=last)
        return Stages(
            layers,
            f" --decoder-first-pipeline-num-layers {first} "
            f"--decoder-last-pipeline-num-layers {last}",
        )
    return None
