"""Default assignment of layers to pipeline stages.

This module is pure: it imports neither Megatron nor vLLM nor torch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from mcore_rl.model.layout import PipelineLayers, pipeline_layers


@dataclass(frozen=True, slots=True)
class Stages:
    """Layers of every stage, and their flags in addition to --pipeline-model-parallel-size."""

    layers: PipelineLayers
    flags: str  # with a space before each


def stages_for(num_layers: int, pp_size: int) -> Stages | None:
    """Return the most even stages that Megatron can build: equal, or the last one has fewer layers.

    If the last stage would be empty, the first one gets fewer layers, too. None if neither works.
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
