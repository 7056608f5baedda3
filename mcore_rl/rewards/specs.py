"""The values of the `--rl-reward*` flags, parsed and checked before anything is built.

This module is pure, and parsing opens no file: only `check_rewards` looks for functions, files and
environment variables.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from mcore_rl.common.addresses import checked_url
from mcore_rl.common.errors import UsageError
from mcore_rl.common.user_code import without_variants
from mcore_rl.data.sources import EVAL_PROMPTS, NO_ENVIRONMENT, PROMPTS, SourceSpec
from mcore_rl.isolation.levels import parse_accepted
from mcore_rl.isolation.variables import is_variable_name, parse_environment_names
from mcore_rl.rewards.functions import ENVIRONMENT, NO_FUNCTIONS
from mcore_rl.rewards.options import RewardOptions

# By the name of the reward: the flags of its address and of its header.
_SERVER_FLAGS = {
    "http": ("--rl-reward-url", "--rl-reward-http-header-env"),
    "pooling": ("--rl-reward-pooling-url", "--rl-reward-pooling-header-env"),
}


@dataclass(frozen=True, slots=True)
class ServerSpec:
    """A reward server. Only `url` is ever requested."""

    name: str  # of the reward
    url: str
    header_env: str | None  # environment variable that holds "Header: value"
    header_flag: str  # the flag that named it, for messages
    batch_samples: int  # samples per request
    concurrency: int  # requests in flight, per scoring rank
    retries: int  # further attempts after the first


@dataclass(frozen=True, slots=True)
class RewardSpec:
    """The rewards of a run; `names` and `weights` are aligned, and names are unique.

    The outcomes of REWARD_MODEL and ENVIRONMENT come from elsewhere. Prompts of a source with
    rewards of its own get these alone, by `of_sources`.
    """

    names: tuple[str, ...]
    weights: tuple[float, ...]
    num_workers: int | None  # None: as many as the machine has spare cores for
    timeout_seconds: float
    imports: tuple[str, ...] = ()  # files to run before names are resolved
    servers: tuple[ServerSpec, ...] = ()  # of the names in SERVED_REWARDS
    memory_gib: float = 0.0  # of each worker process; 0: unlimited
    environment_names: tuple[str, ...] = ()  # variables that workers get besides the usual ones
    sandbox_accept: tuple[str, ...] = ()  # protections that python_sandbox may lack
    # `SourceSpec.key` -> reward -> weight; empty: all prompts get all rewards
    of_sources: Mapping[str, Mapping[str, float]] = field(default_factory=dict)

    def weights_of(self, source: str) -> Mapping[str, float]:
        """Return the rewards of a source's prompts with their weights, by `SourceSpec.key`."""
        return self.of_sources.get(source) or dict(zip(self.names, self.weights, strict=True))

    def of_source(self, source: str) -> RewardSpec:
        """Return the rewards of a source's prompts alone, by `SourceSpec.key`."""
        weights = self.weights_of(source)
        return dataclasses.replace(
            self,
            names=tuple(weights),
            weights=tuple(weights.values()),
            servers=tuple(server for server in self.servers if server.name in weights),
            of_sources={},
        )

    def weight(self, name: str) -> float:
        """Return the weight of a reward; 0 if it is not used."""
        return dict(zip(self.names, self.weights, strict=True)).get(name, 0.0)

    @property
    def functions(self) -> tuple[str, ...]:
        """The names of functions, which worker processes call."""
        return tuple(name for name in self.names if name not in NO_FUNCTIONS)


def parse_rewards(
    rewards: str,
    options: RewardOptions,
    imports: Sequence[str] = (),
    sources: Sequence[SourceSpec] = (),
) -> RewardSpec:
    """Return the `RewardSpec` of `rewards`, comma-separated names, and of sources that have rewards
    of their own; `imports` are the files of --rl-import. UsageError: the flags are invalid or
    contradict."""
    of_run = _parse(rewards, options.reward_weights)
    of_sources = _of_sources(sources, of_run)
    names = names_of(rewards, sources)
    spec = RewardSpec(
        names=names,
        weights=tuple(of_run.get(name, 0.0 if of_sources else 1.0) for name in names),
        num_workers=options.reward_workers,
        timeout_seconds=options.reward_timeout_seconds,
        imports=tuple(imports),
        servers=tuple(_servers(names, options)),
        memory_gib=options.reward_memory_gib,
        environment_names=parse_environment_names(options.reward_env, "--rl-reward-env"),
        sandbox_accept=parse_accepted(options.sandbox_accept, "--rl-sandbox-accept"),
        of_sources=of_sources,
    )
    if spec.environment_names and not spec.functions:
        raise UsageError(
            f"has no effect, because --rl-reward {rewards} names no function",
            flag="--rl-reward-env",
            remedy="leave it out, or name a function too",
        )
    return spec


def names_of(rewards: str, sources: Sequence[SourceSpec] = ()) -> tuple[str, ...]:
    """Return the names of all rewards of a run: those of `rewards`, unless every source has its
    own, then those of sources."""
    own = [source.reward for source in sources if source.reward is not None]
    lists = own if own and len(own) == len(sources) else [rewards, *own]
    return tuple(
        dict.fromkeys(without_variants(name) for each in lists for name in each.split(","))
    )


def _parse(rewards: str, weights: str | None) -> dict[str, float]:
    names = tuple(map(without_variants, rewards.split(",")))
    _check_names(names, rewards)
    return dict(zip(names, _parse_weights(weights, names, rewards), strict=True))


def _of_sources(
    sources: Sequence[SourceSpec], of_run: Mapping[str, float]
) -> dict[str, Mapping[str, float]]:
    """Return `RewardSpec.of_sources`."""
    if all(each.reward is None and each.environment is None for each in sources):
        return {}
    by_source: dict[str, Mapping[str, float]] = {}
    for source in sources:
        flag = EVAL_PROMPTS if source.is_eval else PROMPTS
        by_source[source.key] = of_run
        try:
            if source.reward is not None:
                by_source[source.key] = _parse(source.reward, source.reward_weights)
        except UsageError as error:
            fault = f": source '{source.name}': {error.fault}"
            raise UsageError(fault, flag=flag, remedy=error.remedy) from error
        of_turns = by_source[source.key].get(ENVIRONMENT, 0.0), of_run.get(ENVIRONMENT, 0.0)
        if of_turns[0] != of_turns[1] and source.environment != NO_ENVIRONMENT:
            raise UsageError(
                f": source '{source.name}' weighs the reward {ENVIRONMENT} by {of_turns[0]:g}, and "
                f"--rl-reward by {of_turns[1]:g}",
                flag=flag,
                remedy="give that reward the same weight in both",
            )
        if source.environment == NO_ENVIRONMENT and ENVIRONMENT in by_source[source.key]:
            raise UsageError(
                f": source '{source.name}' has no environment, and {ENVIRONMENT} is one of its "
                "rewards",
                flag=flag,
                remedy="give it rewards of its own",
            )
    return by_source


def _servers(names: tuple[str, ...], options: RewardOptions) -> Iterator[ServerSpec]:
    values = {
        "http": (options.reward_url, options.reward_http_header_env),
        "pooling": (options.reward_pooling_url, options.reward_pooling_header_env),
    }
    for name, (url, header_env) in values.items():
        url_flag, header_flag = _SERVER_FLAGS[name]
        if name not in names:
            _check_unused(name, names, {url_flag: url, header_flag: header_env})
            continue
        if url is None:
            raise UsageError(
                f"names {name}, but {url_flag} is missing",
                flag=f"--rl-reward {','.join(names)}",
                remedy="give the address of the server",
            )
        if header_env is not None and not is_variable_name(header_env):
            raise UsageError(
                "must be the name of an environment variable, made of letters, digits and _",
                flag=header_flag,
                remedy="put the header into a variable and give its name",
            )
        parts, batch_samples = checked_url(url, url_flag), options.reward_http_batch
        if name == "pooling":
            # One text per request: vLLM forms batches itself, and refuses a complete request if one
            # of its texts is longer than the reward model takes.
            batch_samples = 1
            if not parts.path.rstrip("/").endswith("/pooling"):
                parts = parts._replace(path=parts.path.rstrip("/") + "/pooling")
        yield ServerSpec(
            name,
            parts.geturl(),
            header_env,
            header_flag,
            batch_samples,
            concurrency=options.reward_http_concurrency,
            retries=options.reward_http_retries,
        )


def _check_unused(name: str, names: tuple[str, ...], values: Mapping[str, str | None]) -> None:
    """Raise UsageError for a flag of the server `name`, which is not used."""
    for flag, value in values.items():
        if value is not None:  # it may be a secret, mistaken for a variable's name
            raise UsageError(
                f"has no effect, because --rl-reward {','.join(names)} does not name {name}",
                flag=flag,
                remedy=f"add {name} to it or leave out {flag}",
            )


def _check_names(names: tuple[str, ...], rewards: str) -> None:
    if "" in names:
        raise UsageError(
            f"'{rewards}' has an empty name",
            flag="--rl-reward",
            remedy="give names with one comma between two",
        )
    for name in names:
        if names.count(name) > 1:
            raise UsageError(
                f"has {name} twice",
                flag=f"--rl-reward {rewards}",
                remedy="name it once and give it the sum of the weights",
            )


def _parse_weights(weights: str | None, names: tuple[str, ...], rewards: str) -> tuple[float, ...]:
    if weights is None:
        return (1.0,) * len(names)
    flag = f"--rl-reward-weights {weights}"
    values = []
    for text in weights.split(","):
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not math.isfinite(value):
            raise UsageError(
                f"has '{text.strip()}', which is not a finite number",
                flag=flag,
                remedy="give numbers with commas between them",
            )
        values.append(value)
    if len(values) != len(names):
        raise UsageError(
            f"has {len(values)} weight(s), but --rl-reward {rewards} names {len(names)}",
            flag=flag,
            remedy="give one weight for each reward, in the same order",
        )
    if not any(values):
        raise UsageError(
            "makes every reward 0", flag=flag, remedy="give at least one weight other than 0"
        )
    return tuple(values)
