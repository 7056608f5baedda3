"""Options of environments."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mcore_rl.common.errors import UsageError
from mcore_rl.common.parameters import Parameters, param
from mcore_rl.data.sources import NO_ENVIRONMENT, SourceSpec
from mcore_rl.environments.interface import FLAG, EnvironmentSpec
from mcore_rl.environments.tool_formats import AUTO, NONE
from mcore_rl.isolation.levels import parse_accepted
from mcore_rl.isolation.variables import parse_environment_names


@dataclass(frozen=True, slots=True)
class EnvironmentOptions(Parameters):
    """The flags of environments and their turns."""

    _needs = "environment"

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

    tool_parser: str = param(
        AUTO,
        "how calls of tools are read: auto: as the chat template writes them; none: in mcore_rl's "
        "own JSON format; or vLLM's name of a parser (--tool-call-parser)",
    )
    reasoning_parser: str = param(
        AUTO,
        "how reasoning is told from the answer: auto: as the chat template writes it; none; or "
        "vLLM's name of a parser",
    )

    def check(self, max_response_tokens: int) -> None:
        """Check that the flags of turns fit each other and the response."""
        if self.tool_parser == NONE and self.reasoning_parser != AUTO:
            raise UsageError(
                f"has no effect with --rl-tool-parser {NONE}",
                flag=f"--rl-reasoning-parser {self.reasoning_parser}",
                remedy="drop one of the two",
            )
        elif self.max_turn_tokens is not None and self.max_turn_tokens > max_response_tokens:
            raise UsageError(
                f"is more than --rl-max-response-tokens {max_response_tokens}, which all turns of "
                "a sample share",
                flag=f"--rl-max-turn-tokens {self.max_turn_tokens}",
                remedy="lower it, drop it or raise the other",
            )

    def spec(
        self,
        imports: Sequence[str],
        sandbox_accept: str | None,
        sources: Sequence[SourceSpec] = (),
        *,
        needs_state: bool = False,
    ) -> EnvironmentSpec | None:
        """Return the environment, if any; `imports` are the files of --rl-import, `sandbox_accept`
        is --rl-sandbox-accept, `sources` may have environments of their own. `needs_state`:
        conversations continue in later steps."""
        own = {each.key: each.environment for each in sources if each.environment is not None}
        if self.environment is None:
            if own:
                raise UsageError(
                    f"is missing, and sources of prompts have environments: {', '.join(own)}",
                    flag=FLAG,
                    remedy="give the environment of the other sources, and those without one "
                    f"'environment: {NO_ENVIRONMENT}'",
                )
            return None
        return EnvironmentSpec(
            name=self.environment,
            timeout_seconds=self.environment_timeout,
            memory_gib=self.environment_memory_gib,
            imports=tuple(imports),
            environment_names=parse_environment_names(self.environment_env, "--rl-environment-env"),
            sandbox_accept=parse_accepted(sandbox_accept, "--rl-sandbox-accept"),
            max_open=self.max_environments,
            max_turns=self.max_turns,
            max_turn_tokens=self.max_turn_tokens,
            of_sources=own,
            needs_state=needs_state,
            tool_parser=self.tool_parser,
            reasoning_parser=self.reasoning_parser,
        )
