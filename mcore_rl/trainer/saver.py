"""When a run saves, the state that determines its next step, and when it ends early."""

from __future__ import annotations

import argparse
import logging
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, TextIO

import torch.distributed as dist

from mcore_rl.common import objects
from mcore_rl.data.demonstrations import Drawn
from mcore_rl.megatron import adapter as megatron_adapter
from mcore_rl.megatron import background
from mcore_rl.megatron import saving as megatron_checkpoint
from mcore_rl.observe.run_directory import read_metrics
from mcore_rl.observe.stage_timers import StageTimers
from mcore_rl.rollout.branch import Branch
from mcore_rl.trainer.job import Job
from mcore_rl.trainer.learner import Learner
from mcore_rl.trainer.resume import folders
from mcore_rl.trainer.resume.checkpoint_writer import OpenCheckpoint, begin_checkpoint
from mcore_rl.trainer.resume.folders import iteration_name
from mcore_rl.trainer.resume.point import REFERENCE, ROLLOUT
from mcore_rl.trainer.resume.save_rule import SaveRule, scores_of
from mcore_rl.trainer.resume.trainer_state import LOADED, TrainerState, trainer_writer
from mcore_rl.trainer.rollouts import Rollouts
from mcore_rl.trainer.sampling import bank_folder

logger = logging.getLogger(__name__)


class RunSaver:
    """The writer of a run's checkpoints.

    Methods are collective over the actor's ranks. Megatron saves parameters, optimizer and
    schedule, `TrainerState` the rest. A critic saves in a folder of its own. With `--async-save`
    `save_if_due` begins a checkpoint, which a later call completes.
    """

    def __init__(
        self,
        job: Job,
        *,
        state: megatron_adapter.TrainState,
        learner: Learner,
        rollouts: Rollouts,
        prompts: Drawn,
        eval_prompts: Drawn | None,
        timers: StageTimers,
        has_loaded: bool,
        began_with: str,
        branch: Branch | None,
        day: str,
        log: TextIO | None,
    ) -> None:
        """`has_loaded`: the step of `state` is saved already. `began_with`, the name of `branch`
        and `day` become `TrainerState`'s `began_with`, `branch` and `date`."""
        self.folder = folders.checkpoint_folder(job.args.save, job.config.run.directory)
        self._job, self._state, self._timers, self._log = job, state, timers, log
        self._learner, self._rollouts = learner, rollouts
        self._prompts, self._eval_prompts = prompts, eval_prompts
        self._saved_at = state.iteration if has_loaded else -1
        self._began_with, self._branch, self._day = began_with, branch, day
        self._rule = SaveRule(job.spec.save_interval, job.args.save_retain_interval)
        self._open: tuple[int, OpenCheckpoint] | None = None  # being written, with its step
        self._last = time.monotonic()  # the start or the last save
        logger.info("[Save] to %s %s", self.folder, self._rule)

    def save_if_due(self, step: int) -> None:
        """Save if `SaveRule` says so; `step` is the last one, counted from 0."""
        self._advance(waits=False)
        if self._job.args.async_save:
            background.reserve(self._state)
        # One clock for all ranks.
        if objects.broadcast(self._rule.is_due(step + 1, time.monotonic() - self._last)):
            self._begin(step + 1)
            if not self._job.args.async_save:
                self._advance(waits=True)

    def save(self, num_steps: int) -> None:
        """Save the state after `num_steps` steps, unless that has been saved, and complete it. The
        last save of a run."""
        self._begin(num_steps)
        self._advance(waits=True)
        if self._job.args.async_save:
            background.release()  # an export needs memory, too

    def _begin(self, num_steps: int) -> None:
        """Begin the checkpoint after `num_steps` steps, once the one before is complete."""
        if self._saved_at == num_steps:
            return
        self._advance(waits=True)
        critic = self._learner.critic
        with self._timers("checkpoint"), megatron_adapter.megatron_output_to(self._log):
            if critic is not None:
                critic.save(num_steps, self.folder)
            checkpoint = begin_checkpoint(
                self.folder,
                num_steps,
                self._writers(num_steps),
                is_rolling=self._rule.is_rolling,
            )
        self._open = num_steps, checkpoint
        self._saved_at, self._last = num_steps, time.monotonic()

    def _advance(self, *, waits: bool) -> None:
        """Complete the checkpoint that was begun, if its files are written; with `waits`, wait.

        The actor's is completed last, since it cannot be resumed without the critic's.
        """
        if self._open is None:
            return
        (num_steps, checkpoint), critic = self._open, self._learner.critic
        with self._timers("checkpoint"), megatron_adapter.megatron_output_to(self._log):
            if critic is not None and not critic.has_saved(waits=waits):
                return
            if not checkpoint.advance(waits=waits):
                return
            self._open = None
            if self._branch is not None and dist.get_rank() == 0:
                # Before groups are removed: an earlier checkpoint must not find the others.
                replace(self._branch, step=num_steps).write(bank_folder(self._job))
            self._rollouts.saved()
            if dist.get_rank() == 0:
                self._prune()

    def _prune(self) -> None:
        """Delete older checkpoints. Only now: until the actor's is complete, an older step is the
        last with both."""
        args, scores = self._job.args, {}
        is_here = args.load is not None and Path(args.load).resolve() == self.folder.resolve()
        if self._rule.is_rolling:
            scores = scores_of(read_metrics(self._job.config.run.directory / "metrics.jsonl"))
        for step in self._rule.surplus(
            folders.complete_steps(self.folder),
            folders.rolling_steps(self.folder),
            scores,
            loaded=args.ckpt_step if is_here else None,
        ):
            try:
                # The critic's first: without the actor's it would not be found again.
                folders.remove(folders.critic_folder(self.folder), step)
                folders.remove(self.folder, step)
            except OSError as error:
                logger.warning("[Save] the checkpoint of step %d stays: %s", step, error)

    def _writers(self, num_steps: int) -> list[Any]:
        args, reference = self._job.args, self._learner.reference

        def write_actor(saving: Path) -> None:
            megatron_checkpoint.save_checkpoint(args, self._state, num_steps, saving)

        def write_rollout(saving: Path) -> None:
            self._rollouts.save(saving / iteration_name(num_steps) / ROLLOUT)

        writers = [write_actor, trainer_writer(self._trainer_state(num_steps)), write_rollout]
        # Otherwise it is in the Hugging Face folder.
        if reference is not None and (reference.version or self._began_with == LOADED):

            def write_reference(saving: Path) -> None:
                folder = saving / iteration_name(num_steps) / REFERENCE
                reference.save(args, num_steps, folder)

            writers.append(write_reference)
        return writers

    def _trainer_state(self, num_steps: int) -> TrainerState:
        reference, demonstrations = self._learner.reference, self._learner.demonstrations
        state = TrainerState(
            step=num_steps,
            layout=self._job.spec.train_layout.describe(),
            weight_version=self._rollouts.manager.weight_version,
            prompts=self._prompts.fingerprint,
            eval_prompts="" if self._eval_prompts is None else self._eval_prompts.fingerprint,
            kl_controller=self._learner.kl_controller.state_dict(),
            entropy_controller=self._learner.entropy_controller.state_dict(),
            reference_version=0 if reference is None else reference.version,
            began_with=self._began_with,
            branch="" if self._branch is None else self._branch.name,
            optimizer_by_parameter=True,
            date=self._day,
            lora="" if (lora := self._job.spec.lora) is None else lora.describe(),
            demonstrations="" if demonstrations is None else demonstrations.fingerprint,
        )
        return state.drawing(self._rollouts.position, self._prompts.begin)


def early_exit(args: argparse.Namespace, num_steps: int) -> str | None:
    """Return which of Megatron's flags ends the run after `num_steps` steps, in words. Collective.

    `--exit-signal-handler` (with `--exit-signal`), `--exit-duration-in-mins` and `--exit-interval`,
    as in Megatron. The same on all ranks: one rank's reason is enough. Minutes are counted from the
    start of this process.
    """
    from megatron.training.global_vars import get_signal_handler

    if args.exit_signal_handler and any(get_signal_handler().signals_received()):
        return f"{args.exit_signal.name}, by --exit-signal-handler"
    if args.exit_interval and num_steps % args.exit_interval == 0:
        return f"--exit-interval {args.exit_interval}"
    if args.exit_duration_in_mins:
        if objects.on_any(_minutes_since_start() > args.exit_duration_in_mins):
            return f"--exit-duration-in-mins {args.exit_duration_in_mins}"
    return None


def _minutes_since_start() -> float:
    """Return the age of this process, by a clock that nobody sets: that of the kernel's start."""
    fields = Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    started = int(fields[19]) / os.sysconf("SC_CLK_TCK")  # `starttime` of proc(5)
    return (time.clock_gettime(time.CLOCK_BOOTTIME) - started) / 60
