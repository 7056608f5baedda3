"""A HybridModel that is stored as a GPTModel is loaded as one.

Symptom: a checkpoint cannot be loaded into the HybridModel of mcore_rl ("Loading a GPT checkpoint
into a hybrid model requires --hybrid-layer-pattern"). With --ckpt-format fsdp_dtensor the names in
a checkpoint of a HybridModel are not those of a GPTModel.

Cause: Megatron takes every HybridModel for one that stores its layers one by one. It converts the
names of a GPTModel's checkpoint by --hybrid-layer-pattern, but not for latent attention, MTP layers
or layers of which only some have experts, and never the other way. fsdp_dtensor takes the names of
the modules.

Why safe: it concerns only models whose decoder has `is_stored_as_gpt`, as mcore_rl builds them
(`mcore_rl/megatron/hybrid_model.py`). Their sharded state has the names of a GPTModel already. For
fsdp_dtensor each name is replaced by the GPTModel's, one to one, on its way to the planner that
writes or reads. Both halves of a layer keep what follows the layer's number, which differs.

Upstream: converts from GPTModel to HybridModel alone (docs/user-guide/hybrid-model-migration.md).

Drop when: Megatron loads and stores both classes by the same names.

Versions: megatron-core 0.19 to 0.20; earlier ones have no HybridModel. mcore_rl applies it when it
builds one, because it imports `megatron.training`.
"""

from __future__ import annotations

import re
from typing import Any

from mcore_rl.patches.registry import Patch, require_parameters

_LAYER = re.compile(r"\bdecoder\.layers\.(\d+)\.")
_NORM = re.compile(r"\bdecoder\.final_norm\.")


def apply() -> None:
    """Leave such models out of Megatron's conversion, and name what fsdp_dtensor stores."""
    from megatron.training import checkpointing

    name_all = checkpointing.preprocess_fsdp_dtensor_state_dict
    require_parameters(name_all, "args raw_state_dict model")

    def name_as_gpt(args: Any, raw_state_dict: Any, model: Any) -> Any:
        state = name_all(args, raw_state_dict, model)
        if _is_stored_as_gpt(model):
            for part in {"model", "optimizer"} & state.keys():
                state[part] = _renamed(state[part])
        return state

    checkpointing.preprocess_fsdp_dtensor_state_dict = name_as_gpt
    if (convert := getattr(checkpointing, "_maybe_setup_gpt_to_hybrid_load", None)) is None:
        return
    require_parameters(convert, "args ckpt_args model")

    def convert_others(args: Any, ckpt_args: Any, model: Any) -> Any:
        if all(_is_stored_as_gpt(chunk) for chunk in model):
            return None, False
        return convert(args, ckpt_args, model)

    checkpointing._maybe_setup_gpt_to_hybrid_load = convert_others


def _is_stored_as_gpt(model: Any) -> bool:
    while (inner := getattr(model, "module", None)) is not None:
        model = inner
    return hasattr(getattr(model, "decoder", None), "is_stored_as_gpt")


def _renamed(state: Any) -> Any:
    """Replace the keys that name a parameter, at any depth."""
    if not isinstance(state, dict):
        return state
    return {
        _as_in_gpt(key) if isinstance(key, str) else key: _renamed(value)
        for key, value in state.items()
    }


def _as_in_gpt(name: str) -> str:
    name = _LAYER.sub(lambda match: f"decoder.layers.{int(match[1]) // 2}.", name)
    return _NORM.sub("decoder.final_layernorm.", name)


PATCH = Patch(
    "megatron.hybrid_checkpoints",
    "a HybridModel that is stored as a GPTModel is loaded as one",
    apply,
)
