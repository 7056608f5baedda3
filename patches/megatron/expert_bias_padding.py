"""Padding does not count in the load that updates the expert biases.

Symptom: with a padding mask the first training forward pass of a model with expert biases raises
"The size of tensor a must match the size of tensor b"; if there are as many positions as experts,
nothing is raised, and the wrong choices are excluded.

Cause: `TopKRouter._apply_expert_bias` combines choices of shape `[n, e]` with a mask of shape
`[n]`, whose dimension torch aligns with the experts.

Why safe: the mask gets a dimension of size 1 before the same function uses it; without a mask
nothing changes.

Upstream: NVIDIA/Megatron-LM issue 6111, repaired by pull request 6114.

Drop when: the oldest supported version has that repair.

Versions: megatron-core 0.18 to 0.20, those whose routers take a mask and lack the repair.

Shape legend: n positions of a rank's router; e experts.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch

from mcore_rl.patches.registry import Patch, parameters_of, require_parameters

_FAULT = "routing_map & (~padding_mask)\n"


def needed() -> bool:
    """Return whether this Megatron's routers take a mask and combine it without reshaping."""
    from megatron.core.transformer.moe.router import TopKRouter

    count = TopKRouter._apply_expert_bias
    return "padding_mask" in parameters_of(count) and _FAULT in inspect.getsource(count)


def apply() -> None:
    """Broadcast the mask over experts."""
    from megatron.core.transformer.moe.router import TopKRouter

    count = TopKRouter._apply_expert_bias
    require_parameters(count, "self routing_map padding_mask")

    def count_without_padding(
        self: Any, routing_map: torch.Tensor, padding_mask: torch.Tensor | None = None
    ) -> None:
        count(self, routing_map, None if padding_mask is None else padding_mask.unsqueeze(-1))

    TopKRouter._apply_expert_bias = count_without_padding


PATCH = Patch("megatron.expert_bias_padding", "padding counts in no expert's load", apply, needed)
