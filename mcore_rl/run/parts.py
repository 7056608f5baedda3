"""The stages that a run makes; `train.py` puts them in order.

Each stage takes what the one before returned. Timing, evaluation, checkpoints and alarms hang on
here, so that the story stays readable.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch.distributed as dist

from mcore_rl.batching.types import Rollout, StepBatch
from mcore_rl.common.agreement import EXIT_ALARM, EXIT_FAILED
from mcore_rl.common.errors import RunStopped
from mcore_rl.data.prompts import PromptDataset
from mcore_rl.hybrid_engine.sharding_manager import MegatronVLLMShardingManager
from mcore_rl.hybrid_engine.vllm.engine import VLLMEngine
from mcore_rl.megatron.hf_checkpoint import export
from mcore_rl.observe.progress import run_facts
from mcore_rl.observe.stage_timers import StageTimers
from mcore_rl.observe.trace.tracer import Tracer
from mcore_rl.observe.watchdog import StageWatchdog
from mcore_rl.roles.remote import Role
from mcore_rl.rollout.collector import Collected, Collector
from mcore_rl.rollout.engines import RolloutWorkers
from mcore_rl.run.early_exit import EarlyExit
from mcore_rl.run.learner import Learner, Learnt
from mcore_rl.run.recorder import RunRecorder
from mcore_rl.run.saver import RunSaver
from mcore_rl.run.startup import Job

logger = logging.getLogger(__name__)


class Parts:
    """What a run is made of on this rank, and its stages. All methods are collective."""

    def __init__(
        self,
        job: Job,
        *,
        first_step: int,
        eval_prompts: PromptDataset | None,
        learner: Learner,
        shards: Any,
        engine: VLLMEngine,
        manager: MegatronVLLMShardingManager,
        workers: RolloutWorkers,
        collector: Collector,
        timers: StageTimers,
        watchdog: StageWatchdog,
        tracer: Tracer,
        saver: RunSaver,
        recorder: RunRecorder,
        roles: Sequence[Role],
    ) -> None:
        self._job, self._config, self.first_step = job, job.config, first_step
        self._eval_prompts = eval_prompts
        self._accuracy: float | None = None
        self._shards, self._engine, self._workers = shards, engine, workers
        self.learner, self.manager, self._collector = learner, manager, collector
        self.timers, self._watchdog, self._tracer = timers, watchdog, tracer
        self._saver, self._recorder = saver, recorder
        self._roles = roles
        self._early_exit = EarlyExit(job.args)

    def collect(self, weight_version: int) -> Collected:
        """A step's samples with their rewards; in rollout mode."""
        return self._collector.collect(weight_version, self.manager.prefetch)

    def require_rewards(self, step: int, collected: Collected) -> None:
        """Raises RunStopped on all ranks, once what was learnt before is saved, if no sample of the
        step can be learnt from because its reward failed."""
        if any(sample.is_valid for sample in collected.scored):
            return
        # What goes on from here does this step again, and draws the same.
        self._collector.undo()
        self.manager.weight_version -= 1
        saved = ""
        if step:
            self._saver.save(step)
            saved = f"; what was learnt before is saved: go on with --load {self._saver.folder}"
        reasons = Counter(sample.why_not_valid for sample in collected.scored)
        if dist.get_rank() == 0:
            logger.error(
                "[Reward] step %d: none of %d samples has a reward to learn from; the most "
                "frequent reason, to be mended: %s%s",
                step,
                len(collected.scored),
                reasons.most_common(1)[0][0],
                saved,
            )
        raise RunStopped(EXIT_FAILED)

    def sample_eval(self, step: int, weight_version: int) -> list[Rollout] | None:
        """This engine's rollouts of held-out prompts, where an evaluation is due."""
        interval = self._config.eval_interval
        due = interval > 0 and (step % interval == 0 or step == self._config.num_steps)
        if self._eval_prompts is None or not due:
            return None
        with self.timers("eval"):
            count = min(self._config.num_eval_prompts, len(self._eval_prompts))
            return self._workers.generate(
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
                scored = self._workers.score(rollouts)
            self._accuracy = float(np.mean([s.reward >= 1.0 for s in scored]))
        return self._accuracy

    def make_batch(self, step: int, collected: Collected) -> StepBatch:
        """The samples as tensors, divided into mini-batches, ranks and micro-batches."""
        with self.timers("advantages"):
            return self.learner.make_batch(step, collected.scored)

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
        """A checkpoint every `--save-interval` steps."""
        self._saver.save_if_due(step)

    def record(
        self,
        step: int,
        collected: Collected,
        batch: StepBatch,
        learnt: Learnt,
    ) -> None:
        """Write the step's metrics and samples, and move the bar.

        Raises RunStopped on all ranks, once all is saved, if an alarm is to end the run, or a flag
        of Megatron before the last step.
        """
        alarm = self._recorder.record(step, collected, batch, learnt, self._accuracy)
        self._tracer.report()
        if alarm:
            self._stop(step, "[Health]", "--rl-on-alarm stop", EXIT_ALARM)
        if step + 1 < self._config.num_steps and (reason := self._early_exit.reason(step + 1)):
            self._stop(step, "[Exit]", reason, 0)

    def _stop(self, step: int, who: str, reason: str, exit_code: int) -> NoReturn:
        self._saver.save(step + 1)
        folder = self._saver.folder
        logger.info(
            "%s stopped after step %d by %s; go on with --load %s", who, step, reason, folder
        )
        raise RunStopped(exit_code)

    def finish(self) -> None:
        """Evaluate the final policy, save, export, and write the summary."""
        config = self._config
        with self.manager as engine:
            rollouts = self.sample_eval(config.num_steps, engine.weight_version)
        accuracy = self.evaluate(config.num_steps, rollouts)
        self._saver.save(config.num_steps)
        if config.export_hf:
            export(self._shards, self._job.checkpoint, Path(config.export_hf))
        facts = run_facts(
            config.directory,
            self._saver.folder,
            config.export_hf,
            self._job.args.tensorboard_dir,
        )
        self._recorder.finish(accuracy, facts)

    def abandon(self) -> None:
        """Before `close`, when this rank has failed: it waits for no other one."""
        for role in self._roles:
            role.abandon()

    def close(self) -> None:
        """End what would outlive the run: reward processes, the engine, open files. Idempotent."""
        self._watchdog.close()
        self._tracer.close()
        for role in self._roles:
            role.close()
        self._workers.close()
        self._engine.close()
        self._recorder.close()
