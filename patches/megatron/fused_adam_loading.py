"""Transformer Engine's Adam takes a state that it loads, without a copy of it.

Symptom: during a resume, the moments of the distributed optimizer are on the device twice, 8 bytes
more per parameter of a rank's share. A run whose optimizer fits may end out of memory there.

Cause: loading a checkpoint requests the optimizer's state for its shapes, and hands it back to
`FusedAdam.load_state_dict`, twice. That casts every tensor to float32, allocates another one in the
moment's dtype, and copies, while the state dict still holds the first.

Why safe: only tensors that need no conversion are taken as they are: float32 moments on their
parameter's device. PyTorch's own `Optimizer.load_state_dict` does the same with them. All others,
such as bf16 moments and main parameters of the precision-aware optimizer, are loaded as before.

Upstream: NVIDIA/Megatron-LM pull requests 7288 (for the precision-aware optimizer) and
NVIDIA/TransformerEngine 3507, both open; NVIDIA-NeMo/Megatron-Bridge 4936 does it there.

Drop when: `FusedAdam.load_state_dict` keeps float32 tensors.

Versions: transformer-engine 2.20.2, by its source.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from typing import Any

import torch

from mcore_rl.patches.registry import Patch, require_parameters


def needed() -> bool:
    """Return whether Megatron's Adam is Transformer Engine's."""
    from megatron.core import optimizer

    return str(optimizer.Adam.__module__).startswith("transformer_engine.")


def apply() -> None:
    """Replace the loading of states that need no conversion."""
    from megatron.core.optimizer import Adam

    load = Adam.load_state_dict
    require_parameters(load, "self state_dict")

    def load_without_copies(self: Any, state_dict: Mapping[str, Any]) -> None:
        groups = (group["params"] for group in self.param_groups)
        saved = (group["params"] for group in state_dict["param_groups"])
        parameters = dict(zip(chain.from_iterable(saved), chain.from_iterable(groups), strict=True))
        states = {parameters[k]: state for k, state in state_dict["state"].items()}
        if not all(_needs_no_conversion(self, *each) for each in states.items()):
            load(self, state_dict)
            return
        torch.optim.Optimizer.load_state_dict(self, {**state_dict, "state": {}})
        self.state.update({parameter: dict(state) for parameter, state in states.items()})

    Adam.load_state_dict = load_without_copies


def _needs_no_conversion(adam: Any, parameter: Any, state: Mapping[str, Any]) -> bool:
    return all(
        type(tensor) is torch.Tensor
        and tensor.dtype == adam.name_to_dtype_map.get(name) == torch.float32
        and tensor.device == parameter.device
        for name, tensor in state.items()
    )


PATCH = Patch(
    "megatron.fused_adam_loading",
    "a resume does not hold the moments of Transformer Engine's Adam twice",
    apply,
    needed,
)
