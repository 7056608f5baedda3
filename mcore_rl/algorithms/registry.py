"""Registry of advantage estimators, policy losses, group filters and samplers by name, including a
user's own.

To add one, write a function with a decorator in a file that `--rl-import` names:

    from mcore_rl.api import Parameters, PolicyLossInputs, TokenLosses, param, policy_loss

    @dataclass(frozen=True)
    class Width(Parameters):
        my_width: float = param(0.2, "how far ratios are pulled back", above=0)

    @policy_loss("mine", Width())
    def mine(inputs: PolicyLossInputs, config: Width) -> TokenLosses: ...

The object after the name fully defines the parameters (see `mcore_rl.common.parameters`): the flag
`--rl-my-width`, its check and its default come from it. This module imports torch only when an
estimator or loss is registered or looked up: reward processes read the user's file, too, and a file
with rewards or filters only should load quickly.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from mcore_rl.common.errors import UsageError
from mcore_rl.common.near_names import did_you_mean
from mcore_rl.common.parameters import Parameters, parameters_of
from mcore_rl.common.user_code import shortened

if TYPE_CHECKING:
    import torch

    from mcore_rl.algorithms.interfaces import (
        AdvantageInputs,
        AdvantageOutputs,
        PolicyLossInputs,
        SelectionInputs,
        TokenLosses,
    )
    from mcore_rl.algorithms.samplers import RegisteredSampler, SamplerInputs, Steps

P = TypeVar("P", bound=Parameters)  # parameters of a function
T = TypeVar("T")
_NOTHING_TO_SET = Parameters()
_MOST_REASONS = 16  # each is a metric
Group = Sequence[Any]  # the `batching.types.ScoredRollout` of a prompt


@dataclass(frozen=True, slots=True)
class RegisteredEstimator:
    """Estimator and its requirements on the run."""

    name: str
    function: Callable[[AdvantageInputs, Any], AdvantageOutputs]
    parameters: Parameters = _NOTHING_TO_SET  # its parameters, at their defaults
    needs_critic: bool = False  # reads `values`
    needs_greedy_baseline: bool = False  # reads `baselines`
    compares_group: bool = False  # one sample per prompt would always get advantage 0
    needs_reward_parts: bool = False  # reads `reward_parts` instead of `scores`


@dataclass(frozen=True, slots=True)
class RegisteredPolicyLoss:
    """Policy loss and its parameters."""

    name: str
    function: Callable[[PolicyLossInputs, Any], TokenLosses]
    parameters: Parameters = _NOTHING_TO_SET  # its parameters, at their defaults
    # Selects tokens before a step's updates, which the function gets as `selected`; collective.
    select: Callable[[SelectionInputs, Any], torch.Tensor] | None = None


@dataclass(frozen=True, slots=True)
class Drop:
    """Decision of a group filter: the step does not learn from the group.

    Example: `Drop("none_correct", refill=True)`.
    """

    reason: str  # one of the filter's reasons
    refill: bool = False  # sample another prompt's group in its place, within --rl-max-refills


@dataclass(frozen=True, slots=True)
class RegisteredFilter:
    """Filter of groups, its reasons and its parameters."""

    name: str
    function: Callable[[Group, Any], Drop | None]
    reasons: tuple[str, ...]
    parameters: Parameters = _NOTHING_TO_SET  # its parameters, at their defaults

    def decision(self, group: Group, parameters: Parameters) -> Drop | None:
        """Return the function's decision on the samples of a prompt; None keeps them. Raises
        UsageError if the function raises, or returns anything else."""
        row = group[0].rollout.prompt.index
        refusal = functools.partial(UsageError, flag=f"--rl-group-filter {self.name}")
        try:
            returned = self.function(group, parameters)
        except Exception as error:  # the user sees whatever their function raises
            at = traceback.extract_tb(error.__traceback__)[-1]
            raise refusal(
                f"raised {type(error).__name__}: {shortened(str(error))}, in line {at.lineno} of "
                f"{at.filename}, for the samples of row {row}",
                remedy="correct the function",
            ) from error
        if returned is None or (isinstance(returned, Drop) and returned.reason in self.reasons):
            return returned
        raise refusal(
            f"returned {shortened(repr(returned))}, for the samples of row {row}",
            remedy=f"return None, or Drop with one of its reasons: {', '.join(self.reasons)}",
        )


_BUILT_IN = (
    "mcore_rl.algorithms.estimators",
    "mcore_rl.algorithms.policy_losses",
    "mcore_rl.algorithms.covariance",
    "mcore_rl.algorithms.supervised",
)
ESTIMATORS: dict[str, RegisteredEstimator] = {}
POLICY_LOSSES: dict[str, RegisteredPolicyLoss] = {}
GROUP_FILTERS: dict[str, RegisteredFilter] = {}
SAMPLERS: dict[str, RegisteredSampler] = {}


def advantage_estimator(
    name: str,
    parameters: P = _NOTHING_TO_SET,  # type: ignore[assignment]
    *,
    needs_critic: bool = False,
    needs_greedy_baseline: bool = False,
    compares_group: bool = False,
    needs_reward_parts: bool = False,
) -> Callable[[Callable[[AdvantageInputs, P], AdvantageOutputs]], Any]:
    """Register the decorated `function(inputs, parameters) -> AdvantageOutputs` under `name`.

    `parameters` holds the defaults; the function gets the user's values. The other arguments are
    its requirements, see `RegisteredEstimator`. Raises ValueError if the name is taken.
    """

    def register(function: Callable[[AdvantageInputs, P], AdvantageOutputs]) -> Any:
        _check_declaration(name, "advantage estimators", ESTIMATORS, function, parameters)
        ESTIMATORS[name] = RegisteredEstimator(
            name,
            function,
            parameters,
            needs_critic,
            needs_greedy_baseline,
            compares_group,
            needs_reward_parts,
        )
        return function

    return register


def policy_loss(
    name: str,
    parameters: P = _NOTHING_TO_SET,  # type: ignore[assignment]
    *,
    select: Callable[[SelectionInputs, P], torch.Tensor] | None = None,
) -> Callable[[Callable[[PolicyLossInputs, P], TokenLosses]], Any]:
    """Register the decorated `function(inputs, parameters) -> TokenLosses` under `name`.

    `parameters`: see `advantage_estimator`; `select`: see `RegisteredPolicyLoss`. Raises
    ValueError if the name is taken.
    """

    def register(function: Callable[[PolicyLossInputs, P], TokenLosses]) -> Any:
        _check_declaration(name, "policy losses", POLICY_LOSSES, function, parameters)
        POLICY_LOSSES[name] = RegisteredPolicyLoss(name, function, parameters, select)
        return function

    return register


def group_filter(
    name: str,
    parameters: P = _NOTHING_TO_SET,  # type: ignore[assignment]
    *,
    reasons: Sequence[str],
) -> Callable[[Callable[[Group, P], Drop | None]], Any]:
    """Register the decorated `function(group, parameters) -> Drop | None` for --rl-group-filter.

    `group` are the samples of a prompt with all their rewards, in their order, at least one of them
    valid. `Drop` leaves them out of the step, None keeps them. `reasons` are all that `Drop` may
    name: a step has the metric `rollout/filtered/REASON`, a number of groups, for each.
    `parameters`: see `advantage_estimator`.

    The function is called on one rank of the engine that sampled the group, between two steps of
    the engine: it must be quick, must not communicate, and must decide in the same way if it is
    asked again, as a resumed run does. What it raises ends the run.

    Raises ValueError if the name is taken, or for reasons that are not distinct identifiers, at
    most 16.
    """
    if (
        isinstance(reasons, str)
        or not 0 < len({*reasons}) == len(reasons) <= _MOST_REASONS
        or not all(each.isidentifier() for each in reasons)
    ):
        raise ValueError(
            f"reasons of group filter {name!r} are {reasons!r}; give a list of 1 to "
            f"{_MOST_REASONS} different names, of letters, digits and _"
        )

    def register(function: Callable[[Group, P], Drop | None]) -> Any:
        _check_declaration(name, "group filters", GROUP_FILTERS, function, parameters)
        GROUP_FILTERS[name] = RegisteredFilter(name, function, tuple(reasons), parameters)
        return function

    return register


def sampler(
    name: str,
    parameters: P = _NOTHING_TO_SET,  # type: ignore[assignment]
) -> Callable[[Callable[[SamplerInputs, P], Steps]], Any]:
    """Register the decorated `function(inputs, parameters)` for --rl-sampler.

    The function is a generator, see `mcore_rl.algorithms.samplers`: it yields lists of `Generate`,
    gets a `Generated` for each, and returns `inputs.num_samples` `Sampled`. `parameters`: see
    `advantage_estimator`.

    It is called on one rank of the engine that samples the group, between two steps of the engine:
    it must be quick, must not communicate, and must draw random numbers, if any, from the prompt
    alone to be repeatable. If the run is stopped before it returns, it begins again. What it raises
    ends the run.

    Raises ValueError if the name is taken.
    """

    def register(function: Callable[[SamplerInputs, P], Steps]) -> Any:
        from mcore_rl.algorithms.samplers import RegisteredSampler

        _check_declaration(name, "samplers", SAMPLERS, function, parameters)
        SAMPLERS[name] = RegisteredSampler(name, function, parameters)
        return function

    return register


def _check_declaration(
    name: str,
    kind: str,
    known: Mapping[str, object],
    function: Callable[..., object],
    parameters: object,
) -> None:
    """Raise ValueError for a taken name, TypeError for mistakes that dataclasses do not detect."""
    # Check a user's function against the built-in names even if none has been looked up so far.
    has_built_in = known is ESTIMATORS or known is POLICY_LOSSES
    if function.__module__ not in _BUILT_IN and has_built_in:
        _load_built_in()
    if name in known:
        raise ValueError(f"two {kind} are called {name!r}; rename one")
    if not isinstance(parameters, Parameters):
        raise TypeError(f"parameters of {name!r} are {parameters!r}, not an object of Parameters")
    declared = type(parameters)
    if any(isinstance(value, dataclasses.Field) for value in vars(declared).values()):
        raise TypeError(
            f"{declared.__name__}, parameters of {name!r}, lacks @dataclass(frozen=True)"
        )
    parameters_of(declared)


def find_advantage_estimator(name: str) -> RegisteredEstimator:
    """Return the estimator; raise UsageError, with the nearest name, if it does not exist."""
    _load_built_in()
    if name not in ESTIMATORS:
        raise unknown_name("--rl-advantage", name, "advantage estimator", ESTIMATORS)
    return ESTIMATORS[name]


def find_policy_loss(name: str) -> RegisteredPolicyLoss:
    """Return the policy loss; raise UsageError, with the nearest name, if it does not exist."""
    _load_built_in()
    if name not in POLICY_LOSSES:
        raise unknown_name("--rl-policy-loss", name, "policy loss", POLICY_LOSSES)
    return POLICY_LOSSES[name]


def find_group_filter(name: str) -> RegisteredFilter:
    """Return the filter; raise UsageError, with the nearest name, if it does not exist."""
    return _of_user("--rl-group-filter", name, "group filter", GROUP_FILTERS)


def find_sampler(name: str) -> RegisteredSampler:
    """Return the sampler; raise UsageError, with the nearest name, if it does not exist."""
    return _of_user("--rl-sampler", name, "sampler", SAMPLERS)


def _of_user(flag: str, name: str, kind: str, known: Mapping[str, T]) -> T:
    """Return what a user's file has registered. Raises UsageError."""
    if name in known:
        return known[name]
    if known:
        raise unknown_name(flag, name, kind, known)
    raise UsageError(
        f"is not known, because no file registers a {kind}",
        flag=f"{flag} {name}",
        remedy="give --rl-import with the file that registers it",
    )


def owners_by_kind() -> dict[str, dict[str, Parameters]]:
    """Return, by flag, the parameters of what is registered so far."""
    _load_built_in()
    return {
        "--rl-advantage": {name: each.parameters for name, each in ESTIMATORS.items()},
        "--rl-policy-loss": {name: each.parameters for name, each in POLICY_LOSSES.items()},
        "--rl-group-filter": {name: each.parameters for name, each in GROUP_FILTERS.items()},
        "--rl-sampler": {name: each.parameters for name, each in SAMPLERS.items()},
    }


def unknown_name(flag: str, name: str, kind: str, known: Iterable[str]) -> UsageError:
    """Return the error for an unknown name, with the nearest known name."""
    names = sorted(known)
    return UsageError(
        f"is not a known {kind}{did_you_mean(name, names)}",
        flag=f"{flag} {name}",
        remedy=f"choose one of {', '.join(names)}",
    )


def _load_built_in() -> None:
    for module in _BUILT_IN:
        importlib.import_module(module)
