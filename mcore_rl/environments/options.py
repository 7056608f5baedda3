"""Options of environments."""

from __future__ import annotations

from dataclasses import dataclass

from mcore_rl.common.parameters import Parameters, param


@dataclass(frozen=True, slots=True)
class EnvironmentOptions(Parameters):
    """The flags of environments and their turns."""

    environment: str | None = param(
        None,
        "environment that answers the model between turns: calculator, python_sandbox, "
        "package.module:Class, ./file.py:Class or one of --rl-import (docs/using/environments.md)",
    )
    environment_timeout: float = param(
        30.0,
        "time limit of each environment call, in seconds; a sample that exceeds it fails",
        above=0,
    )
    environment_memory_gib: float = param(
        4.0,
        "memory limit of an environment process, in GiB; a sample that exceeds it fails; 0 "
        "disables the limit",
        least=0,
        advice="0 disables the limit",
    )
    environment_env: str | None = param(
        None,
        "environment variables passed to environment processes besides PATH etc., comma-separated",
    )
    max_environments: int = param(
        256, "concurrent environment processes per TP group of an engine", least=1
    )
    max_turns: int = param(8, "maximum number of model turns per sample", least=1)
    max_turn_tokens: int | None = param(
        None,
        "maximum number of tokens per turn; default: what is left of --rl-max-response-tokens, "
        "which turns and observations share",
        least=1,
    )
