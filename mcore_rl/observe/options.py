"""Options of the run directory and of monitoring."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from mcore_rl.common.parameters import Parameters, param


@dataclass(frozen=True, slots=True)
class RunOptions(Parameters):
    """The flags of the run directory, traces and the watchdog."""

    run_dir: str | None = param(None, "directory of metrics, samples and checkpoints")
    run_name: str = param(
        "run", "prefix of the default run directory, runs/<name>-<date>-<time>.<n>"
    )
    num_logged_rollouts: int = param(8, "samples per step in rollouts.jsonl", least=0)
    trace: int = param(
        0,
        "trace this many steps after the first one: files for ui.perfetto.dev and a table of times "
        "in the run directory's trace/",
        least=0,
    )
    stage_timeout_seconds: float = param(
        3600.0,
        "time limit of a stage, in seconds; the run ends with a report of each rank; 0 disables it",
        least=0,
    )

    @property
    def directory(self) -> Path:
        """The run directory; before the run has one, the pattern of its name."""
        return Path(self.run_dir or f"runs/{self.run_name}-<date>-<time>.<n>")


@dataclass(frozen=True, slots=True)
class AlarmOptions(Parameters):
    """The flags of alarms; a threshold of 0 disables its alarm."""

    on_alarm: str = param(
        "warn",
        "what an alarm does: warn, or save a checkpoint and stop the run (exit code 75)",
        choices=("warn", "stop"),
    )
    alarm_window: int = param(
        10, "steps that an alarm considers", least=2, advice="one step is not a trend"
    )
    alarm_reward_std: float = param(
        1e-3, "alarm if the standard deviation of rewards is below this", least=0
    )
    alarm_kl: float = param(1.0, "alarm if the KL to the reference is above this", least=0)
    alarm_entropy: float = param(
        0.1, "alarm if the entropy is below this share of its first value", least=0
    )
    alarm_response_tokens: float = param(
        3.0, "alarm if response length changes by more than this factor", least=0
    )
    alarm_clip_fraction: float = param(
        0.5, "alarm if the share of clipped tokens is above this", least=0
    )
    alarm_mismatch: float = param(0.1, "alarm if kl/rollout_actor is above this", least=0)
    alarm_grad_norm: float = param(
        10.0, "alarm if the gradient norm is this many times the median of the last steps", least=0
    )
    alarm_host_growth_mib: float = param(
        64.0, "alarm if a rank's host memory grows by more than this per step, in MiB", least=0
    )
    alarm_device_growth_mib: float = param(
        64.0, "alarm if a rank's device memory grows by more than this per step, in MiB", least=0
    )
    alarm_expert_imbalance: float = param(
        0.0, "alarm if an expert gets more than this many times the mean load of its layer", least=0
    )
    alarm_unused_experts: float = param(
        0.5, "alarm if the share of experts without a token in a layer is above this", least=0
    )
    alarm_tokens_per_second: float = param(
        0.5, "alarm if rollout is slower than this share of its initial speed", least=0
    )
