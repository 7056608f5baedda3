"""What observes a run: stages and their times, the recorder, the watchdog, the tracer."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist

from mcore_rl.moe.expert_load import ExpertLoad
from mcore_rl.observe.stage_timers import StageTimers
from mcore_rl.observe.trace import Tracer
from mcore_rl.observe.watchdog import StageWatchdog
from mcore_rl.trainer.job import Job
from mcore_rl.trainer.models import Models
from mcore_rl.trainer.recorder import RunRecorder, SampleMetrics
from mcore_rl.trainer.rollouts import Rollouts


@dataclass(frozen=True, slots=True)
class Monitors:
    """What observes a run."""

    timers: StageTimers
    watchdog: StageWatchdog
    recorder: RunRecorder
    tracer: Tracer


def build_monitors(
    job: Job,
    models: Models,
    rollouts: Rollouts,
    sample_metrics: SampleMetrics,
    timers: StageTimers,
    watchdog: StageWatchdog,
) -> Monitors:
    """Build recorder and tracer, and let all monitors observe the hand-over."""
    first_step, sample_store, learner = models.state.iteration, models.sample_store, models.learner
    expert_load = None
    if job.spec.routed_layers is not None:
        expert_load = ExpertLoad(
            models.state.chunks,
            job.spec.routed_layers,
            replay=learner.actor.replay,
            of_rollout=None if sample_store.routed is None else sample_store.load,
        )
    recorder = RunRecorder(
        job,
        first_step=first_step,
        device=models.shards.device,
        timers=timers,
        rates=learner.rates,
        expert_load=expert_load,
        sample_store=sample_store,
        sample_metrics=sample_metrics,
    )
    timers.on_stage_end.append(recorder.note_stage)
    tracer = _tracer(job, first_step)
    manager = rollouts.manager
    manager.on_reshard_start += [
        lambda report: watchdog.enter(f"hand-over {report.direction}"),
    ]
    manager.on_reshard_end += [
        lambda _: watchdog.leave(),
        recorder.note_reshard,
    ]
    tracer.start()
    return Monitors(timers, watchdog, recorder, tracer)


def _tracer(job: Job, first_step: int) -> Tracer:
    rank, layout = dist.get_rank(), job.spec.train_layout
    return Tracer(
        job.config.run.trace,
        first_step=first_step,
        num_steps_left=job.config.trainer.num_steps - first_step,
        folder=job.config.run.directory / "trace",
        rank=rank,
        label=f"tp{layout.tp_rank(rank)} pp{layout.pp_rank(rank)} "
        f"cp{layout.cp_rank(rank)} dp{layout.dp_rank(rank)}",
    )
