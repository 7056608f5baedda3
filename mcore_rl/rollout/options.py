"""Options of rollouts and evaluations."""

from __future__ import annotations

from dataclasses import dataclass

from mcore_rl.common.addresses import checked_url
from mcore_rl.common.errors import UsageError
from mcore_rl.common.parameters import Parameters, param

_OVERSAMPLE_PARTIAL = 1.5
_CONTINUE_ANYWAY = "their responses continue across updates anyway, if they may be stale"
# vLLM samples at these temperatures as given (vllm/sampling_params.py).
LEAST_TEMPERATURE, MOST_TEMPERATURE = 0.01, 2.0


def check_temperature(flag: str, value: float, greedy: str = "") -> None:
    """Refuse a temperature at which vLLM does not sample."""
    if not LEAST_TEMPERATURE <= value <= MOST_TEMPERATURE:
        raise UsageError(
            f"is not in [{LEAST_TEMPERATURE}, {MOST_TEMPERATURE:g}]: vLLM raises lower values to "
            f"{LEAST_TEMPERATURE} and refuses higher ones",
            flag=f"{flag} {value}",
            remedy=f"choose for example 1{greedy}",
        )


@dataclass(frozen=True, slots=True)
class RolloutOptions(Parameters):
    """Options of sampling, and of the groups that a step takes."""

    temperature: float = param(
        1.0, "sampling temperature; log-probs are those of the tempered policy", above=0
    )
    top_p: float | None = param(
        None,
        "sample from the most likely tokens with this probability mass",
        above=0,
        most=1,
        advice="give 1 to sample all tokens",
    )
    top_k: int | None = param(
        None, "sample from this many most likely tokens; 0: from all", least=0
    )
    max_response_tokens: int = param(
        512, "maximum number of generated tokens per response", above=0
    )
    stop: tuple[str, ...] = param((), "text that ends a response; can be repeated")
    rollout_ranks: str | None = param(
        None,
        "ranks that only run vLLM engines, while the other ranks train, for example 4-7",
    )
    rollout_servers: str | None = param(
        None,
        "addresses of `vllm serve` processes that sample, while all ranks train, for example "
        "http://a:8000,http://b:8000",
        excludes={"rollout_ranks": "samples come from the one or from the other"},
    )
    rollout_servers_header_env: str | None = param(
        None,
        "environment variable with a header for --rl-rollout-servers, for example "
        "'Authorization: Bearer TOKEN'",
        needs=("rollout_servers",),
    )
    rollout_controllers: int = param(
        1,
        "processes that send requests to --rl-rollout-servers and compute rewards; started by the "
        "first rank of each machine in turn",
        above=0,
        needs=("rollout_servers",),
    )
    rollout_server_wait_minutes: float = param(
        30.0,
        "how long a run waits for --rl-rollout-servers without receiving one token; it then saves "
        "and stops",
        least=0,
        needs=("rollout_servers",),
    )
    deterministic: bool = param(
        False,
        "assign prompts to engines in a fixed order instead of by free capacity, so that two runs "
        "compute the same batches",
    )
    oversample: float | None = param(
        None,
        "groups sampled per group that a step trains on; a step takes those that finish first; "
        "default: 1, or 1.5 with --rl-partial-rollouts",
        least=1,
        advice="1 disables oversampling",
    )
    partial_rollouts: bool = param(
        False,
        "end a step's generation once its groups are complete; unfinished responses continue in "
        "later steps",
        excludes=dict.fromkeys(("rollout_servers", "rollout_ranks"), _CONTINUE_ANYWAY),
    )
    max_staleness: int = param(
        1,
        "with --rl-partial-rollouts, --rl-rollout-ranks or --rl-rollout-servers, maximum number of "
        "weight versions between a sample's oldest token and the step that trains on it; 0 "
        "finishes every response in the step that started it",
        least=0,
        advice="0 finishes every response in the step that started it",
        needs=("partial_rollouts", "rollout_ranks", "rollout_servers"),
    )
    stale_rollouts: str = param(
        "finish",
        "groups that would exceed --rl-max-staleness: finish them in this step, or drop them",
        choices=("finish", "drop"),
    )
    kv_after_update: str = param(
        "recompute",
        "KV cache of responses that continue after an update: recompute it with the new weights, "
        "or keep it (on GPUs only with --rl-rollout-ranks)",
        choices=("recompute", "keep"),
        excludes={"rollout_servers": "servers recompute keys and values"},
    )

    def __post_init__(self) -> None:
        Parameters.__post_init__(self)
        check_temperature("--rl-temperature", self.temperature)

    @property
    def keeps_unfinished(self) -> bool:
        """Whether responses may continue in a later step, of engines on the actor's ranks."""
        return self.partial_rollouts and self.max_staleness > 0

    @property
    def servers(self) -> tuple[str, ...]:
        """The addresses in `rollout_servers`."""
        urls = (self.rollout_servers or "").split(",")
        return tuple(url.strip().rstrip("/") for url in urls if url.strip())

    @property
    def num_controllers(self) -> int:
        """`rollout_controllers` if there are servers, else 0."""
        return self.rollout_controllers if self.servers else 0

    @property
    def separate(self) -> str | None:
        """The flag and value that give engines ranks or machines of their own; None without."""
        if self.rollout_servers is not None:
            return f"--rl-rollout-servers {self.rollout_servers}"
        return None if self.rollout_ranks is None else f"--rl-rollout-ranks {self.rollout_ranks}"

    @property
    def samples_ahead(self) -> bool:
        """Whether engines sample later steps while the actor trains: servers, and ranks of their
        own if responses may be stale."""
        return bool(self.servers) or (self.rollout_ranks is not None and self.staleness_limit > 0)

    @property
    def keeps_kv(self) -> bool:
        """Whether keys and values are kept after an update."""
        return (self.keeps_unfinished or self.samples_ahead) and self.kv_after_update == "keep"

    @property
    def staleness_limit(self) -> int:
        """`max_staleness`; 0 if no response continues in a later step."""
        continues = self.partial_rollouts or self.separate is not None
        return self.max_staleness if continues else 0

    @property
    def groups_at_a_time(self) -> float:
        """`oversample` or its default."""
        if self.oversample is not None:
            return self.oversample
        return _OVERSAMPLE_PARTIAL if self.keeps_unfinished else 1.0

    def check_unfinished(self) -> None:
        """Check the flags of responses that may continue in a later step."""
        if self.stale_rollouts != "finish":
            self._check_continues(f"--rl-stale-rollouts {self.stale_rollouts}")
        self._check_servers()
        if self.separate is not None:
            self._check_separate(self.separate)
        flag = f"--rl-oversample {self.groups_at_a_time:g}"
        if self.keeps_unfinished and self.groups_at_a_time == 1.0:
            raise UsageError(
                "leaves --rl-partial-rollouts nothing to stop: a step takes all groups that it "
                "starts",
                flag=flag,
                remedy="choose for example 1.5",
            )
        most = 1 + self.staleness_limit
        if self.keeps_unfinished and self.groups_at_a_time > most:
            raise UsageError(
                "may leave more groups unfinished than the steps take in which "
                f"--rl-max-staleness {self.staleness_limit} lets them end",
                flag=flag,
                remedy=f"choose {most} or less",
            )

    def _check_servers(self) -> None:
        """Check the list of servers."""
        if self.rollout_servers is None:
            return
        flag = f"--rl-rollout-servers {self.rollout_servers}"
        for url in self.servers:
            checked_url(url, "--rl-rollout-servers")
        if not self.servers or len(set(self.servers)) < len(self.servers):
            raise UsageError(
                "must name at least one server, and each once", flag=flag, remedy="correct the list"
            )

    def _check_separate(self, separate: str) -> None:
        """Check the flags of engines on ranks or machines of their own."""
        if not self.samples_ahead:
            return
        ahead = f"--rl-max-staleness {self.staleness_limit}"
        remedy = "drop it" if self.servers else "drop it, or give --rl-max-staleness 0"
        if self.groups_at_a_time > 1.0:
            raise UsageError(
                f"drops groups that finish late, and with {separate} and {ahead} no group has to "
                "be dropped",
                flag=f"--rl-oversample {self.groups_at_a_time:g}",
                remedy=remedy,
            )
        if self.deterministic:
            raise UsageError(
                f"cannot be combined with {separate} and {ahead}: which tokens new weights sample "
                "depends on the speed of engines and training",
                flag="--rl-deterministic",
                remedy=remedy,
            )

    def _check_continues(self, flag: str) -> None:
        """Refuse a flag of responses that continue after an update if there are none."""
        if self.keeps_unfinished or self.samples_ahead:
            return
        if self.separate is None and not self.partial_rollouts:
            remedy = "add --rl-partial-rollouts or --rl-rollout-ranks"
        else:
            remedy = "give --rl-max-staleness 1 or more"
        raise UsageError(
            "has no effect, because no response continues after an update",
            flag=flag,
            remedy=f"{remedy}, or drop it",
        )

    def check_kv_after_update(self, *, has_cuda: bool) -> None:
        """Check that kept keys and values are used, and that their memory is not needed."""
        if self.kv_after_update == "recompute":
            return
        flag = f"--rl-kv-after-update {self.kv_after_update}"
        self._check_continues(flag)
        if has_cuda and not self.samples_ahead:
            raise UsageError(
                "is not possible on GPUs, where engines give the memory of keys and values to "
                "training",
                flag=flag,
                remedy="drop it: they are recomputed",
            )


@dataclass(frozen=True, slots=True)
class EvaluationOptions(Parameters):
    """Options of evaluations on held-out prompts."""

    eval_interval: int = param(20, "steps between evaluations; 0 disables evaluation", least=0)
    num_eval_prompts: int = param(
        128, "held-out prompts per evaluation, of each set if there are several", above=0
    )
    eval_samples: int = param(
        1, "responses to each held-out prompt; several give pass@k, avg@k and maj@k", above=0
    )
    eval_temperature: float = param(
        0.0, "sampling temperature of evaluations; 0 is greedy", least=0
    )

    def __post_init__(self) -> None:
        Parameters.__post_init__(self)
        if self.eval_temperature:
            check_temperature("--rl-eval-temperature", self.eval_temperature, ", or 0 for greedy")

    def check_samples(self) -> None:
        """Check that several responses to a prompt may differ."""
        if self.eval_samples > 1 and not self.eval_temperature:
            raise UsageError(
                "makes all responses to a prompt equal at --rl-eval-temperature 0",
                flag=f"--rl-eval-samples {self.eval_samples}",
                remedy="give --rl-eval-temperature, for example 0.6",
            )
