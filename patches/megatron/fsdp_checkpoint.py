"""Megatron-FSDP can save and load a checkpoint with PyTorch's AdamW, and in float32.

Symptom: with `--ckpt-format fsdp_dtensor` saving and loading hang if a rank holds no row of some
gated layer (a small expert may lie on one rank). In float32 both fail with "has no attribute
`module`".

Cause: saving splits each gated layer's moments with a collective call, over the keys of the
optimizer's state. A rank without rows has no gradient there, and AdamW creates no state for a
parameter without gradient, while Transformer Engine's Adam creates an empty one. Ranks then call
the collective for different layers. Also, the lookup of layers by name assumes the wrapper that
half precision adds.

Why safe: the added states are empty and get the step that all parameters share. The state gets the
order of the parameters, which is the same on all ranks. Without the wrapper, one "module." is
removed from names that cannot be found with it.

Upstream: Megatron-LM issue 4910 and pull request 6573 concern ranks with different states, for
other optimizers; nothing is merged.

Drop when: `sharded_param_state_fsdp_dtensor` gives all ranks the same keys, and
`handle_swiglu_in_state_dict` finds the parameters of a float32 model.

Versions: megatron-core 0.18 to 0.20.
"""

from __future__ import annotations

import sys
from typing import Any

from mcore_rl.patches.megatron.torch_adam_state import ADAMS, add_missing_states
from mcore_rl.patches.registry import Patch, require_parameters


def apply() -> None:
    """Complete the optimizer's state, and look up the names that the model has."""
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
    from megatron.core.transformer import fsdp_dtensor_checkpoint

    pack = DistributedOptimizer.sharded_param_state_fsdp_dtensor
    require_parameters(pack, "self is_loading")
    init = DistributedOptimizer._init_optimizer_states_with_dummy_values
    require_parameters(init, "self")
    split = fsdp_dtensor_checkpoint.handle_swiglu_in_state_dict
    require_parameters(split, "model model_state_dict optimizer_state_dict")

    def init_all(self: Any) -> None:
        init(self)
        _complete(self.optimizer)

    def pack_all(self: Any, is_loading: Any = False) -> Any:
        _complete(self.optimizer)
        packed = pack(self, is_loading)
        state = packed["state"]
        order = [name for name in packed["param_to_group_meta"] if name in state]
        packed["state"] = {name: state[name] for name in order}
        return packed

    def split_of_any(model: Any, model_state_dict: Any, optimizer_state_dict: Any) -> Any:
        if hasattr(model.module, "module"):
            return split(model, model_state_dict, optimizer_state_dict)
        find = model.get_parameter
        model.get_parameter = lambda name: find(name.replace("module.module.", "module.", 1))
        try:
            return split(model, model_state_dict, optimizer_state_dict)
        finally:
            del model.get_parameter

    DistributedOptimizer._init_optimizer_states_with_dummy_values = init_all
    DistributedOptimizer.sharded_param_state_fsdp_dtensor = pack_all
    # Megatron's training may have imported the function by name already.
    importer = sys.modules.get("megatron.training.checkpointing")
    for module in filter(None, (fsdp_dtensor_checkpoint, importer)):
        module.handle_swiglu_in_state_dict = split_of_any


def _complete(optimizer: Any) -> None:
    """Give AdamW a state for parameters that this rank has no part of."""
    if isinstance(optimizer, ADAMS) and optimizer.state:
        step = max(float(state["step"]) for state in optimizer.state.values())
        add_missing_states(optimizer, step)


PATCH = Patch(
    "megatron.fsdp_checkpoint", "Megatron-FSDP can save with PyTorch's AdamW, and in float32", apply
)
