"""Which tensors have adapters of LoRA, and the sizes of these on a rank.

An adapter has A `[r, i]` and B `[o, r]`. A rank has its part of the factor that follows the cut of
the weight, and all of the other one.
"""

from __future__ import annotations

from mcore_rl.model.config_json import ModelShape
from mcore_rl.model.lora import has_weight, matches
from mcore_rl.model.tensors import Cut, TensorSpec
from mcore_rl.planner.settings import TrainSettings


def has_adapter(shape: ModelShape, training: TrainSettings, spec: TensorSpec) -> bool:
    """Return whether a tensor of a layer has an adapter."""
    layer = spec.name.removesuffix(".weight")
    return has_weight(shape, spec) and any(matches(layer, t) for t in training.lora_targets)


def adapter_size(spec: TensorSpec, rank: int, tp_size: int) -> int:
    """Return the elements of one adapter on a rank; `tp_size` ranks divide the weight."""
    rows, columns = spec.shape
    if spec.cut is Cut.COLUMNS:
        columns //= tp_size
    elif spec.cut is not Cut.REPLICATED:
        rows //= tp_size
    return rank * (rows + columns)
