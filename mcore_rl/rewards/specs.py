"""The values of the `--rl-reward*` flags, parsed and checked before anything is built.

This module is pure, and parsing opens no file: only `check_rewards` looks for functions, files and
environment variables.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from mcore_rl.common.addresses import checked_url
from mcore_rl.common.errors import UsageError
from mcore_rl.common.user_code import without_variants
from mcore_rl.isolation.levels import parse_accepted
from mcore_rl.isolation.spawn import is_variable_name, parse_environment_names
from mcore_rl.rewards.functions import NO_FUNCTIONS
from mcore_rl.rewards.options import RewardOptions

_HTTP_HEADER_FLAG = "--rl-reward-http-header-env"
_POOLING_HEADER_FLAG = "--rl-reward-pooling-header-env"


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

    The outcomes of REWARD_MODEL and ENVIRONMENT come from elsewhere.
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

    def weight(self, name: str) -> float:
        """Return the weight of a reward; 0 if it is not used."""
        return dict(zip(self.names, self.weights, strict=True)).get(name, 0.0)

    @property
    def functions(self) -> tuple[str, ...]:
        """The names of functions, which worker processes call."""
        return tuple(name for name in self.names if name not in NO_FUNCTIONS)


def parse_rewards(rewards: str, options: RewardOptions, imports: Sequence[str] = ()) -> RewardSpec:
    """Return the `RewardSpec` of `rewards`, comma-separated names; `imports` are the files of
    --rl-import. UsageError: the flags are invalid or contradict."""
    names = tuple(map(without_variants, rewards.split(",")))
    _check_names(names, rewards)
    spec = RewardSpec(
        names=names,
        weights=_parse_weights(options.reward_weights, names, rewards),
        num_workers=options.reward_workers,
        timeout_seconds=options.reward_timeout_seconds,
        imports=tuple(imports),
        servers=tuple(_servers(names, options)),
        memory_gib=options.reward_memory_gib,
        environment_names=parse_environment_names(options.reward_env, "--rl-reward-env"),
        sandbox_accept=parse_accepted(options.sandbox_accept, "--rl-sandbox-accept"),
    )
    if spec.environment_names and not spec.functions:
        raise UsageError(
            f"has no effect, because --rl-reward {rewards} names no function",
            flag="--rl-reward-env",
            remedy="leave it out, or name a function too",
        )
    return spec


def _servers(names: tuple[str, ...], options: RewardOptions) -> Iterator[ServerSpec]:
    http_header, pooling_header = options.reward_http_header_env, options.reward_pooling_header_env
    attempts = {
        "concurrency": options.reward_http_concurrency,
        "retries": options.reward_http_retries,
    }
    flag, url = "--rl-reward-url", options.reward_url
    if _wants_server("http", names, flag, url, http_header, _HTTP_HEADER_FLAG):
        assert url is not None
        address = checked_url(url, flag).geturl()
        batch = options.reward_http_batch
        yield ServerSpec("http", address, http_header, _HTTP_HEADER_FLAG, batch, **attempts)
    flag, url = "--rl-reward-pooling-url", options.reward_pooling_url
    if _wants_server("pooling", names, flag, url, pooling_header, _POOLING_HEADER_FLAG):
        assert url is not None
        parts = checked_url(url, flag)
        if not parts.path.rstrip("/").endswith("/pooling"):
            parts = parts._replace(path=parts.path.rstrip("/") + "/pooling")
        # One text per request: vLLM forms batches itself, and refuses a complete request if one of
        # its texts is longer than the reward model takes.
        yield ServerSpec(
            "pooling", parts.geturl(), pooling_header, _POOLING_HEADER_FLAG, 1, **attempts
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


def _wants_server(
    name: str,
    names: tuple[str, ...],
    flag: str,
    url: str | None,
    header_env: str | None,
    header_flag: str,
) -> bool:
    """Return whether the reward `name` is used; UsageError if its flags contradict."""
    if name not in names:
        for given, given_flag in ((url, flag), (header_env, header_flag)):
            if given is not None:
                # The value may be a secret, mistaken for a variable's name.
                raise UsageError(
                    f"has no effect, because --rl-reward {','.join(names)} does not name {name}",
                    flag=given_flag,
                    remedy=f"add {name} to it or leave out {given_flag}",
                )
        return False
    if url is None:
        raise UsageError(
            f"names {name}, but {flag} is missing",
            flag=f"--rl-reward {','.join(names)}",
            remedy="give the address of the server",
        )
    if header_env is not None and not is_variable_name(header_env):
        raise UsageError(
            "must be the name of an environment variable, made of letters, digits and _",
            flag=header_flag,
            remedy="put the header into a variable and give its name",
        )
    return True
