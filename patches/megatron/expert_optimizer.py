"""A checkpoint of an MoE model can be loaded under another expert parallelism, and by every stage.

Symptom: `--load` under another EP fails with KeyError 'optimizer' (from EP2 to EP1) or "Expected 2
entries in state dict" (from EP1 to EP2), with and without `--dist-ckpt-optim-fully-reshardable`. If
the first pipeline stage has only dense layers, `--load` fails in `_synchronize_steps` ("steps:
[0.0, 2.0]"), even in the same layout.

Cause: with EP above 1 experts have their own optimizer in addition to the dense one; with EP1 they
share one. Tensors of the fully reshardable format are named after parameters and are found; the
rest (parameter groups, kind of sharding) is stored by optimizer number, as on the first rank. If
that rank's stage has no experts, their optimizer's step there is 0.

Why safe: if the number of stored optimizers matches and their steps agree, Megatron's own function
gets its usual arguments. Otherwise each optimizer gets the groups stored for parameters like its
own (matched by Megatron's keys, except rates and whether they are experts), and all get the latest
step: all optimizers of a model step together.

Upstream: no issue known.

Drop when: a checkpoint of EP2 can be loaded with EP1, and the other way round.

Versions: megatron-core 0.18 to 0.20.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mcore_rl.patches.megatron.rates_after_loading import is_same_kind
from mcore_rl.patches.registry import Patch, require_parameters

_EXPERT = "is_expert_parallel"


def apply() -> None:
    """Sort the stored states of several optimizers before Megatron passes them on."""
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
    from megatron.core.optimizer.optimizer import ChainedOptimizer, param_group_identifier_keys

    load_state_dict = ChainedOptimizer.load_state_dict
    require_parameters(load_state_dict, "self state_dict")

    def load_sorted(self: Any, state_dict: Any) -> None:
        optimizers = self.chained_optimizers
        sorts = all(isinstance(optimizer, DistributedOptimizer) for optimizer in optimizers)
        if sorts and isinstance(state_dict, dict):
            kept = [
                [{k: v for k, v in group.items() if k != "params"} for group in groups]
                for groups in (o.optimizer.param_groups for o in optimizers)
            ]
            state_dict = sorted_by_optimizer(state_dict, kept, param_group_identifier_keys)
        load_state_dict(self, state_dict)

    ChainedOptimizer.load_state_dict = load_sorted


def sorted_by_optimizer(
    state_dict: Mapping[Any, Any],
    groups_of: Sequence[Sequence[Mapping[str, Any]]],
    identifiers: Sequence[str],
) -> dict[Any, Any]:
    """Return `ChainedOptimizer.load_state_dict`'s argument: one state, or several by number.

    `groups_of` are the parameter groups of each loading optimizer, `identifiers` the keys that
    distinguish them. The state dict of one optimizer has the keys "optimizer" and "param_state";
    for several they are below a number. The stored and the returned form may differ.
    """
    numbers = [key for key in state_dict if isinstance(key, int)]
    stored = [state_dict[number] for number in sorted(numbers)]
    stored = [part for part in (*stored, state_dict) if "optimizer" in part]
    if not stored:
        return dict(state_dict)
    groups = [group for part in stored for group in part["optimizer"]["param_groups"]]
    steps = {group["step"] for group in groups if group.get("step") is not None}
    if len(stored) == len(groups_of) and len(steps) <= 1:
        return dict(state_dict)

    def like(group: Mapping[str, Any]) -> dict[str, Any]:
        keys = [key for key in identifiers if key != _EXPERT]
        alike = [other for other in groups if is_same_kind(group, other, keys)]
        # Prefer groups of the same kind.
        alike.sort(key=lambda other: other.get(_EXPERT) != group.get(_EXPERT))
        settings = {**(alike[0] if alike else group), _EXPERT: group.get(_EXPERT)}
        return settings | ({"step": max(steps)} if steps else {})

    common = {
        key: value
        for key, value in stored[0].items()
        if not isinstance(key, int) and key not in ("optimizer", "param_state")
    }
    states = {}
    for number, own_groups in enumerate(groups_of):
        place = state_dict.get(number, {}) if len(groups_of) > 1 else state_dict
        states[number] = {
            **common,
            **({"param_state": place["param_state"]} if "param_state" in place else {}),
            "optimizer": {
                **stored[0]["optimizer"],
                "param_groups": [like(group) for group in own_groups],
            },
        }
    return states if len(groups_of) > 1 else states[0]


PATCH = Patch(
    "megatron.expert_optimizer",
    "a checkpoint of an MoE model can be loaded under another expert parallelism",
    apply,
)
