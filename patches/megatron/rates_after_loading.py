"""A checkpoint can be resumed with another learning rate.

Symptom: `--load` with another `--lr` or `--min-lr` ends in a KeyError of
`DistributedOptimizer.load_state_dict` (from 0.19 on). Other settings of the optimizer, such as
`--adam-beta2`, keep the checkpoint's values, silently.

Cause: a parameter group has `max_lr` and `min_lr`, from which the scheduler computes its rate.
Megatron finds a stored group by all its settings, these two included, and takes all of them from
the checkpoint. `--override-opt_param-scheduler` changes the scheduler alone, which comes later.

Why safe: a stored group counts as the same if all other identifying settings are equal. With that
flag (which mcore_rl derives) the settings of the command line count afterwards, and with
`--use-checkpoint-opt_param-scheduler` the checkpoint's; the moments and the step are loaded as
before. Without a change all values are equal, so that nothing changes.

Upstream: no issue known.

Drop when: a checkpoint loads with another `--lr`, and `--override-opt_param-scheduler` sets it.

Versions: megatron-core 0.18 to 0.20.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mcore_rl.patches.registry import Patch, require_parameters

RATES = ("max_lr", "min_lr")
# What a checkpoint has beyond settings, and what the scheduler sets in each step.
_STATE = frozenset({"params", "step", "lr", "weight_decay"})


def apply() -> None:
    """Find stored groups whatever their rates, and let the command line's settings count."""
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
    from megatron.core.optimizer.optimizer import param_group_identifier_keys

    load_state_dict = DistributedOptimizer.load_state_dict
    require_parameters(load_state_dict, "self state_dict")

    def load_with_settings(self: Any, state_dict: Any) -> None:
        from megatron.training.global_vars import get_args

        groups = self.optimizer.param_groups
        given = [{k: v for k, v in group.items() if k not in _STATE} for group in groups]
        if not self.ddp_config.use_megatron_fsdp:  # which goes by the names of parameters
            stored = state_dict["optimizer"]["param_groups"]
            for group in groups:
                group.update(stored_rates(group, stored, param_group_identifier_keys))
        load_state_dict(self, state_dict)
        if get_args().override_opt_param_scheduler:
            for group, settings in zip(self.optimizer.param_groups, given, strict=True):
                group.update(settings)

    DistributedOptimizer.load_state_dict = load_with_settings


def stored_rates(
    group: Mapping[str, Any], stored: Sequence[Mapping[str, Any]], identifiers: Sequence[str]
) -> dict[str, Any]:
    """Return the rates of the stored group that equals `group` in all other settings. Empty if no
    group does, or if several do and their rates differ."""
    candidates = [
        {rate: other.get(rate) for rate in RATES}
        for other in stored
        if is_same_kind(group, other, identifiers)
    ]
    return (
        candidates[0] if candidates and all(rates == candidates[0] for rates in candidates) else {}
    )


def is_same_kind(
    group: Mapping[str, Any], other: Mapping[str, Any], identifiers: Sequence[str]
) -> bool:
    """Return whether two groups have the same settings in `identifiers`, apart from rates.
    A group whose rates are not the run's, such as that of --decoupled-lr, is of another kind."""
    keys = [key for key in identifiers if key not in RATES]
    return all(group.get(key) == other.get(key) for key in keys) and group.get(
        "default_config", True
    ) == other.get("default_config", True)


PATCH = Patch(
    "megatron.rates_after_loading",
    "a checkpoint can be resumed with another learning rate",
    apply,
)
