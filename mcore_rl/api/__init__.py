"""Public API for users' files: one name for each kind of extension of a run.

    from mcore_rl.api import Parameters, PolicyLossInputs, TokenLosses, param, policy_loss

A file that `--rl-import` names runs before the flags are parsed. Flags select what its decorators
register, and the parameters it declares become flags:

| to add | by | chosen with |
| --- | --- | --- |
| a reward | `@reward("name")` | `--rl-reward` |
| a policy loss | `@policy_loss("name", Own())` | `--rl-policy-loss` |
| an advantage estimator | `@advantage("name", Own())` | `--rl-advantage` |
| a filter of groups | `@group_filter("name", Own(), reasons=[...])` | `--rl-group-filter` |
| a way to sample a prompt's responses | `@sampler("name", Own())` | `--rl-sampler` |
| an algorithm of such parts | `recipe("name", Recipe(...))` | `--rl-algorithm` |
| generated prompts | `@prompts("name")` | `--rl-prompts`, `--rl-eval-prompts` |
| a metric | `@metric("name")` | always recorded, as `user/name` |
| an environment with several turns | `class Own(Environment, name="name")` | `--rl-environment` |
| a model family | `family(Family(...))` | `model_type` in config.json |

These names and their signatures are the contract: they only change with the major version, and a
test checks them. Importing this module imports neither torch nor Megatron nor vLLM. Names are
imported on first use, so a file of rewards does not load what only losses need.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mcore_rl.algorithms.aggregation import Segments, masked
    from mcore_rl.algorithms.estimators import Discount
    from mcore_rl.algorithms.interfaces import (
        AdvantageInputs,
        AdvantageOutputs,
        PolicyLossInputs,
        SelectionInputs,
        TokenLosses,
    )
    from mcore_rl.algorithms.policy_losses import Clip, DualClip, bounded_ratio
    from mcore_rl.algorithms.recipes import Recipe, recipe
    from mcore_rl.algorithms.registry import Drop, group_filter, policy_loss, sampler
    from mcore_rl.algorithms.registry import advantage_estimator as advantage
    from mcore_rl.algorithms.samplers import Generate, Generated, Sampled, SamplerInputs
    from mcore_rl.batching.types import Prompt, Rollout, ScoredRollout
    from mcore_rl.common.errors import UsageError
    from mcore_rl.common.parameters import Parameters, param
    from mcore_rl.data.user_prompts import prompts
    from mcore_rl.environments.interface import (
        Environment,
        EnvironmentPrompt,
        Response,
        StepResult,
    )
    from mcore_rl.environments.tools import ToolEnvironment
    from mcore_rl.model.families import family
    from mcore_rl.model.family import Family, Router, TensorNames
    from mcore_rl.observe.user_metrics import metric
    from mcore_rl.rewards.functions import reward

__all__ = [
    "AdvantageInputs",
    "AdvantageOutputs",
    "Clip",
    "Discount",
    "Drop",
    "DualClip",
    "Environment",
    "EnvironmentPrompt",
    "Family",
    "Generate",
    "Generated",
    "Parameters",
    "PolicyLossInputs",
    "Prompt",
    "Recipe",
    "Response",
    "Rollout",
    "Router",
    "Sampled",
    "SamplerInputs",
    "ScoredRollout",
    "Segments",
    "SelectionInputs",
    "StepResult",
    "TensorNames",
    "TokenLosses",
    "ToolEnvironment",
    "UsageError",
    "advantage",
    "bounded_ratio",
    "family",
    "group_filter",
    "masked",
    "metric",
    "param",
    "policy_loss",
    "prompts",
    "recipe",
    "reward",
    "sampler",
]

_MODULES = {
    "mcore_rl.algorithms.estimators": ("Discount",),
    "mcore_rl.algorithms.interfaces": (
        *("AdvantageInputs", "AdvantageOutputs", "PolicyLossInputs", "SelectionInputs"),
        "TokenLosses",
    ),
    "mcore_rl.algorithms.policy_losses": ("Clip", "DualClip", "bounded_ratio"),
    "mcore_rl.algorithms.recipes": ("Recipe", "recipe"),
    "mcore_rl.algorithms.registry": (
        *("Drop", "advantage", "group_filter", "policy_loss", "sampler"),
    ),
    "mcore_rl.algorithms.samplers": ("Generate", "Generated", "Sampled", "SamplerInputs"),
    "mcore_rl.algorithms.aggregation": ("Segments", "masked"),
    "mcore_rl.batching.types": ("Prompt", "Rollout", "ScoredRollout"),
    "mcore_rl.common.errors": ("UsageError",),
    "mcore_rl.common.parameters": ("Parameters", "param"),
    "mcore_rl.data.user_prompts": ("prompts",),
    "mcore_rl.environments.interface": (
        *("Environment", "EnvironmentPrompt", "Response", "StepResult"),
    ),
    "mcore_rl.environments.tools": ("ToolEnvironment",),
    "mcore_rl.model.families": ("family",),
    "mcore_rl.model.family": ("Family", "Router", "TensorNames"),
    "mcore_rl.observe.user_metrics": ("metric",),
    "mcore_rl.rewards.functions": ("reward",),
}
_CALLED = {"advantage": "advantage_estimator"}  # name here -> name in its module


def __getattr__(name: str) -> Any:
    for module, names in _MODULES.items():
        if name in names:
            value = getattr(importlib.import_module(module), _CALLED.get(name, name))
            globals()[name] = value  # looked up once
            return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
