"""Options of rewards."""

from __future__ import annotations

from dataclasses import dataclass

from mcore_rl.common.parameters import Parameters, degree, param


@dataclass(frozen=True, slots=True)
class RewardOptions(Parameters):
    """The flags of rewards: functions, servers and a reward model."""

    reward: str | None = param(
        None,
        "none, exact_match, arithmetic, gsm8k, python_sandbox, http, pooling, model, environment, "
        "package.module:function, ./file.py:function or one of --rl-import; separate several by "
        "commas; default: exact_match, or environment with --rl-environment",
    )
    reward_weights: str | None = param(
        None,
        "one weight per reward, separated by commas; default: 1 each (write a negative first "
        "weight with =: --rl-reward-weights=-1,1)",
    )
    reward_workers: int | None = param(
        None,
        "reward processes per engine; default: the spare cores of the machine, shared by its ranks "
        "(1 to 16, fewer if memory is short)",
        above=0,
    )
    reward_timeout_seconds: float = param(
        10.0, "time limit for the reward of a sample, in seconds", above=0
    )
    reward_memory_gib: float = param(
        4.0,
        "memory limit of a reward process, in GiB; a sample that exceeds it has no reward; 0 "
        "disables the limit",
        least=0,
        advice="0 disables the limit",
    )
    reward_env: str | None = param(
        None, "environment variables passed to reward processes besides PATH etc., comma-separated"
    )
    sandbox_accept: str | None = param(
        None, "protections that python_sandbox may lack, comma-separated (docs/using/security.md)"
    )
    reward_url: str | None = param(None, "endpoint of reward http (docs/using/rewards.md)")
    reward_http_batch: int = param(16, "samples per request of reward http", least=1)
    reward_http_concurrency: int = param(
        8, "concurrent requests of reward http per scoring rank", least=1
    )
    reward_http_retries: int = param(
        3, "retries of reward http after timeouts, 429 and 5xx", least=0
    )
    reward_http_header_env: str | None = param(
        None, "environment variable with a header for reward http, 'Name: value'"
    )
    reward_pooling_url: str | None = param(
        None, "vLLM server with a reward model, for reward pooling"
    )
    reward_pooling_header_env: str | None = param(
        None, "environment variable with a header for that server"
    )
    reward_model: str | None = param(
        None, "Hugging Face folder with a score head, for reward model; Megatron runs it"
    )
    reward_tp_size: int | None = degree("TP", "reward model")
    reward_pp_size: int | None = degree("PP", "reward model")
    reward_ep_size: int | None = degree("EP", "reward model")
    reward_ranks: str | None = param(None, "ranks that only run the reward model, for example 6-7")
