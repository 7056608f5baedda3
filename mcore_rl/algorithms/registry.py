"""Advantage estimators and policy losses by name, a user's own included.

A new one is one function and a decorator in a file that `--rl-import` names:

    from mcore_rl.algorithms.registry import policy_loss
    from mcore_rl.algorithms.loss_types import PolicyLossConfig, PolicyLossInputs, TokenLosses

    @policy_loss("mine")
    def mine(inputs: PolicyLossInputs, config: PolicyLossConfig) -> TokenLosses: ...

A reward is registered the same way, with `mcore_rl.rewards.functions.reward`. This module imports
torch only once an estimator or loss is registered or looked up: reward processes read the user's
file too, and one that holds rewards alone stays light.
"""

from __future__ import annotations

import difflib
import hashlib
import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mcore_rl.common.errors import UsageError

if TYPE_CHECKING:
    from mcore_rl.algorithms.advantage_types import (
        AdvantageConfig,
        AdvantageInputs,
        AdvantageOutputs,
    )
    from mcore_rl.algorithms.loss_types import PolicyLossConfig, PolicyLossInputs, TokenLosses

    EstimatorFunction = Callable[[AdvantageInputs, AdvantageConfig], AdvantageOutputs]
    PolicyLossFunction = Callable[[PolicyLossInputs, PolicyLossConfig], TokenLosses]


@dataclass(frozen=True, slots=True)
class RegisteredEstimator:
    """An estimator and what it needs of the run."""

    name: str
    function: EstimatorFunction
    needs_critic: bool = False  # reads `values`
    needs_greedy_baseline: bool = False  # reads `baselines`
    compares_group: bool = False  # one sample per prompt would always get advantage 0
    reads: frozenset[str] | None = None  # flags that it reads, of those below; None: any


@dataclass(frozen=True, slots=True)
class RegisteredPolicyLoss:
    """A policy loss, and the flags that mean something to it."""

    name: str
    function: PolicyLossFunction
    reads: frozenset[str] | None = None  # see RegisteredEstimator.reads


# Flags that only some parts read. `algorithm_checks` refuses one that its part does not.
ESTIMATOR_FLAGS = frozenset({"gamma", "gae_lambda", "whiten_advantages"})
POLICY_LOSS_FLAGS = frozenset(
    {
        "clip_eps_lower",
        "clip_eps_upper",
        "dual_clip",
        "sapo_temperature_positive",
        "sapo_temperature_negative",
    }
)

_BUILT_IN = (
    "mcore_rl.algorithms.estimators",
    "mcore_rl.algorithms.gae",
    "mcore_rl.algorithms.policy_losses",
    "mcore_rl.algorithms.sequence_losses",
)
_ESTIMATORS: dict[str, RegisteredEstimator] = {}
_POLICY_LOSSES: dict[str, RegisteredPolicyLoss] = {}
_IMPORTED: dict[Path, str] = {}  # file -> module name


def advantage_estimator(
    name: str,
    *,
    needs_critic: bool = False,
    needs_greedy_baseline: bool = False,
    compares_group: bool = False,
    reads: Iterable[str] | None = None,
) -> Callable[[EstimatorFunction], EstimatorFunction]:
    """Decorator that makes `function(inputs, config) -> AdvantageOutputs` known by `name`.

    What the function needs of the run is said here, see `RegisteredEstimator`. ValueError: the name
    is taken.
    """

    def register(function: EstimatorFunction) -> EstimatorFunction:
        _refuse_second(name, "advantage estimators", _ESTIMATORS, function)
        _ESTIMATORS[name] = RegisteredEstimator(
            name, function, needs_critic, needs_greedy_baseline, compares_group, _frozen(reads)
        )
        return function

    return register


def policy_loss(
    name: str, *, reads: Iterable[str] | None = None
) -> Callable[[PolicyLossFunction], PolicyLossFunction]:
    """Decorator that makes `function(inputs, config) -> TokenLosses` known by `name`.

    ValueError: the name is taken.
    """

    def register(function: PolicyLossFunction) -> PolicyLossFunction:
        _refuse_second(name, "policy losses", _POLICY_LOSSES, function)
        _POLICY_LOSSES[name] = RegisteredPolicyLoss(name, function, _frozen(reads))
        return function

    return register


def find_advantage_estimator(name: str) -> RegisteredEstimator:
    """UsageError, with the nearest name, if there is none of that name."""
    _load_built_in()
    if name not in _ESTIMATORS:
        raise unknown_name("--rl-advantage", name, "advantage estimator", _ESTIMATORS)
    return _ESTIMATORS[name]


def find_policy_loss(name: str) -> RegisteredPolicyLoss:
    """UsageError, with the nearest name, if there is none of that name."""
    _load_built_in()
    if name not in _POLICY_LOSSES:
        raise unknown_name("--rl-policy-loss", name, "policy loss", _POLICY_LOSSES)
    return _POLICY_LOSSES[name]


def unknown_name(flag: str, name: str, kind: str, known: Iterable[str]) -> UsageError:
    """The error for a name that nothing has, with the nearest of those that exist."""
    names = sorted(known)
    nearest = difflib.get_close_matches(name, names, n=1)
    hint = f" (did you mean {nearest[0]}?)" if nearest else ""
    return UsageError(f"{flag} {name} is no {kind}{hint}: choose one of {', '.join(names)}.")


def import_user_file(path: str) -> None:
    """Runs the Python file at `path`, whose decorators register what it holds (`--rl-import`).

    A file that was imported before, by whatever spelling of its path, is not run again. Its folder
    is not put on `sys.path`.

    UsageError: the file is missing, is no .py file, or raises, which registering a name that is
    taken does as well.
    """
    file = Path(path).resolve()
    if file in _IMPORTED:
        return
    if file.suffix != ".py":
        raise UsageError(
            f"--rl-import {path} is not a .py file: name the Python file that holds your functions."
        )
    if not file.is_file():
        raise UsageError(
            f"--rl-import {path} does not exist, seen from the working directory {Path.cwd()}: "
            "correct the path."
        )
    # Two files called rewards.py are two modules.
    digest = hashlib.sha256(str(file).encode()).hexdigest()[:8]
    module_name = f"mcore_rl_import_{file.stem}_{digest}"
    try:
        _run(file, module_name)
    except (Exception, SystemExit) as error:  # whatever the user's file raises is theirs to see
        raise UsageError(
            f"--rl-import {path} cannot be used, because running it raised "
            f"{type(error).__name__}: {error}; make `python {path}` work."
        ) from error
    _IMPORTED[file] = module_name


def _run(file: Path, module_name: str) -> None:
    spec = importlib.util.spec_from_file_location(module_name, file)
    assert spec is not None and spec.loader is not None, f"no loader for {file}"
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module  # dataclasses and pickle look a class's module up there
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[module_name]
        raise


def _load_built_in() -> None:
    for module in _BUILT_IN:
        importlib.import_module(module)


def _refuse_second(
    name: str, kind: str, known: Mapping[str, object], function: Callable[..., object]
) -> None:
    # A user's function meets the built-in names even if nothing has looked one up so far.
    if function.__module__ not in _BUILT_IN:
        _load_built_in()
    if name in known:
        raise ValueError(f"two {kind} are called {name!r}; rename one")


def _frozen(reads: Iterable[str] | None) -> frozenset[str] | None:
    return None if reads is None else frozenset(reads)
