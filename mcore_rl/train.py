"""The stages of a run. Start it with the launcher, once per node: `python -m mcore_rl.launch ... -m
mcore_rl.train <Megatron and --rl-* flags>`. torchrun works as well, and so does whatever sets RANK,
WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT.

prompts ─► engine (rollout mode) ─► rewards ─► log-probs, values ─► advantages ─► updates
               ▲                                                                     │
               └───────────── weights, by the sharding manager ◄─────────────────────┘
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import logging
import os
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn, TextIO

if __name__ == "__main__":
    # The imports create millions of objects and no garbage: collect only after them.
    gc.disable()

import torch.distributed as dist

from mcore_rl.batching.types import StepBatch
from mcore_rl.common.agreement import EXIT_ALARM, EXIT_FAILED, leave_reason, leave_together
from mcore_rl.common.errors import RunStopped
from mcore_rl.common.exits import end_at_once
from mcore_rl.common.parameters import ExtraArgs
from mcore_rl.common.run_output import log_file, setup_logging
from mcore_rl.common.spawning import main_script_left_out
from mcore_rl.flags.parser import with_rl_args
from mcore_rl.hybrid_engine.peft_export import export_adapter
from mcore_rl.job.inputs import check_data
from mcore_rl.job.start import job_from_args, start
from mcore_rl.model.roles import ACTOR, ROLLOUT
from mcore_rl.observe.progress import run_facts
from mcore_rl.rollout.evaluation import is_due
from mcore_rl.rollout.sampler import Collected
from mcore_rl.trainer.build import Parts, build
from mcore_rl.trainer.engine_ranks import serve_engines
from mcore_rl.trainer.exports import RunExports
from mcore_rl.trainer.job import Job
from mcore_rl.trainer.learner import Updates
from mcore_rl.trainer.models import serve_role
from mcore_rl.trainer.roles.teacher_server import NoTeacherLeft
from mcore_rl.trainer.rollouts import NoServersLeft
from mcore_rl.trainer.saver import early_exit

logger = logging.getLogger(__name__)


def train(run: Run) -> None:
    """Run the remaining steps, evaluate the final policy, write outputs, release all resources.

    Collective. Raises what ended the run: RunStopped on all ranks if it was stopped on request,
    anything else on the rank where it occurred.
    """
    try:
        try:
            _do_steps(run)
        except NoServersLeft as error:
            run.stop_without_servers(error)
        except NoTeacherLeft as error:
            run.stop_without_teacher(error)
    except RunStopped:
        raise
    except BaseException as error:
        # Now, since the launcher ends this process while others are still being torn down.
        leave_reason(f"{type(error).__name__}: {error}".splitlines()[0])
        logger.exception("rank %s: the run ended early", os.environ.get("RANK", "0"))
        run.abandon()
        raise
    finally:
        run.close()


def _do_steps(run: Run) -> None:
    for step in range(run.first_step, run.config.trainer.num_steps):
        with run.manager as engine:  # hands the weights to the engines; training is back on exit
            run.sample_eval(step, engine.weight_version)
            collected = run.collect(engine.weight_version)
        run.require_rewards(step, collected)
        run.evaluate()
        batch = run.with_log_probs(run.make_batch(step, collected))
        batch = run.with_advantages(collected, batch)
        updates = run.update(step, batch)
        run.record(step, collected, batch, updates)
        run.save_if_due(step)  # last: a saved step is not repeated, so its metrics must exist
    run.finish()


class Run:
    """The stages of a run on this rank, each of which takes what the previous one returned. All
    methods but `abandon` are collective."""

    def __init__(self, job: Job, parts: Parts) -> None:
        self.job, self.config, self.parts = job, job.config, parts
        self.first_step, self.manager = parts.models.state.iteration, parts.rollouts.manager
        self._learner, self._saver = parts.models.learner, parts.saver
        self._rollouts = parts.rollouts
        self._exports = RunExports(
            job.config.trainer,
            parts.models.shards,
            job.spec.checkpoint,
            apart_from=(job.config.run.directory, parts.saver.folder),
        )
        self._monitors, self._timers = parts.monitors, parts.monitors.timers
        self._evaluation: dict[str, float] = {}
        self._num_done = self.first_step

    def sample_eval(self, step: int, weight_version: int) -> None:
        """Sample held-out prompts if an evaluation is due; in rollout mode."""
        config = self.config
        if self.parts.inputs.eval_prompts is not None and is_due(
            config.evaluation, step, config.trainer.num_steps
        ):
            self._rollouts.sample_eval(step, weight_version)

    def collect(self, weight_version: int) -> Collected:
        """Return a step's samples with their rewards; in rollout mode."""
        return self._rollouts.collect(weight_version)

    def require_rewards(self, step: int, collected: Collected) -> None:
        """Raise RunStopped on all ranks, after a checkpoint of the steps before, if the step has no
        valid sample because rewards failed. A step whose other groups are all filtered continues,
        and learns nothing."""
        why_not_valid = collected.table.why_not_valid
        if None in why_not_valid or any(collected.table.dropped):
            return
        self._undo_rollout()
        saved = ""
        if step:
            self._saver.save(step)
            saved = f"; earlier steps are saved: resume with --load {self._saver.folder}"
        if dist.get_rank() == 0:
            logger.error(
                "[Reward] step %d: none of %d samples has a reward to learn from; the most "
                "frequent reason: %s%s",
                step,
                len(why_not_valid),
                Counter(why_not_valid).most_common(1)[0][0],
                saved,
            )
        raise RunStopped(EXIT_FAILED)

    def evaluate(self) -> float | None:
        """Return the held-out accuracy of `sample_eval`: the share of samples whose reward is at
        least 1; None if no evaluation was due."""
        self._evaluation = self._rollouts.evaluate()
        return self._evaluation.get("eval/accuracy")

    def make_batch(self, step: int, collected: Collected) -> StepBatch:
        """Return the samples as tensors, divided into mini-batches, ranks and micro-batches."""
        with self._timers("advantages"):
            return self._learner.make_batch(step, collected.table)

    def with_log_probs(self, batch: StepBatch) -> StepBatch:
        """Add the log-probs of actor and reference and the critic's values, before the update."""
        with self._timers("log_probs"):
            return self._learner.with_log_probs(batch)

    def with_advantages(self, collected: Collected, batch: StepBatch) -> StepBatch:
        """Add the advantages."""
        with self._timers("advantages"):
            return self._learner.with_advantages(collected.table, batch)

    def update(self, step: int, batch: StepBatch) -> Updates:
        """Take one optimizer step per mini-batch and epoch."""
        with self._timers("train"):
            return self._learner.update(step, batch)

    def record(self, step: int, collected: Collected, batch: StepBatch, updates: Updates) -> None:
        """Write the step's metrics and samples, and move the progress bar.

        Raises RunStopped on all ranks, after a checkpoint, if an alarm, or a flag of Megatron
        before the last step, ends the run.
        """
        alarm = self._monitors.recorder.record(step, collected, batch, updates, self._evaluation)
        self._exports.note(step, self._evaluation)
        self._num_done = step + 1
        self._monitors.tracer.end_step()
        if alarm:
            self._stop(step + 1, "[Health]", "--rl-on-alarm stop", EXIT_ALARM)
        if step + 1 < self.config.trainer.num_steps and (
            reason := early_exit(self.job.args, step + 1)
        ):
            self._stop(step + 1, "[Exit]", reason, 0)

    def _stop(self, num_steps: int, who: str, reason: str, exit_code: int) -> NoReturn:
        resume = "no step is done"
        if num_steps:
            self._saver.save(num_steps)
            resume = f"resume with --load {self._saver.folder}"
        logger.info("%s stopped after step %d by %s; %s", *(who, num_steps - 1, reason, resume))
        raise RunStopped(exit_code)

    def stop_without_servers(self, why: NoServersLeft) -> NoReturn:
        """Raise RunStopped on all ranks, after a checkpoint of the steps that are done."""
        self._stop(
            self._num_done, "[Servers]", f"--rl-rollout-server-wait-minutes: {why}", EXIT_ALARM
        )

    def stop_without_teacher(self, why: NoTeacherLeft) -> NoReturn:
        """Raise RunStopped on all ranks, after a checkpoint of the steps that are done."""
        self._undo_rollout()
        self._stop(self._num_done, "[Teacher]", f"--rl-teacher-wait-minutes: {why}", EXIT_ALARM)

    def _undo_rollout(self) -> None:
        """Make a resumed run repeat this step and draw the same prompts."""
        self._rollouts.undo()
        self.manager.weight_version -= 1

    def save_if_due(self, step: int) -> None:
        """Save a checkpoint, and export the policy, if it is time."""
        self._saver.save_if_due(step)
        self._exports.export_if_due(step + 1)

    def finish(self) -> None:
        """Evaluate the final policy, save, export, and write the summary."""
        config = self.config
        with self.manager as engine:
            self.sample_eval(config.trainer.num_steps, engine.weight_version)
        self.evaluate()
        self._saver.save(config.trainer.num_steps)
        self._exports.export(config.trainer.num_steps)
        self._exports.note(config.trainer.num_steps, self._evaluation)
        if config.lora.export:
            assert self.job.spec.lora is not None, "refused by model.lora"
            export_adapter(
                self.parts.models.state.chunks,
                self.job.spec.lora,
                self.job.spec.checkpoint.folder,
                Path(config.lora.export),
            )
        tensorboard = self.job.args.tensorboard_dir
        facts = run_facts(
            config.run.directory, self._saver.folder, config.trainer.export_hf, tensorboard
        )
        self._monitors.recorder.finish(self._evaluation, facts)

    def abandon(self) -> None:
        """Prepare `close` on a rank that has failed: do not wait for any other."""
        self._rollouts.abandon()
        for role in self.parts.roles:
            role.abandon()

    def close(self) -> None:
        """End what would outlive the run: reward processes, the engine, open files. Idempotent."""
        self._monitors.watchdog.close()
        self._monitors.tracer.close()
        for role in self.parts.roles:
            role.close()
        self._rollouts.close()
        self._monitors.recorder.close()


def initialize(extra_args: ExtraArgs | None = None, **megatron_options: Any) -> Job:
    """Check a fork's command line, derive the flags it leaves out, and start Megatron.

    `-m mcore_rl.train` starts in the same way, `--rl-config` included. `megatron_options` are for
    Megatron's `initialize_megatron`. `extra_args` is its `extra_args_provider`: a function that
    adds the fork's flags to the parser and returns it. Collective; a user's mistake ends every rank
    with exit code 2. Megatron's output goes where MCORE_RL_MEGATRON_LOG says. Returns the job for
    `run`; its `args` are Megatron's.
    """
    setup_logging()
    with log_file() as log:
        return start(
            sys.argv[1:],
            also_check=check_data,
            log=log,
            program=sys.argv[0],
            writes=True,
            extra_args=with_rl_args(extra_args),
            megatron_options=megatron_options,
        )


def run(job: Job | argparse.Namespace, model_provider: Callable[..., Any] | None = None) -> None:
    """Run everything on an initialised Megatron, for a fork's script.

    `job` is what `initialize` returned, or the arguments of a fork that started Megatron itself,
    with the flags of `mcore_rl.add_rl_args`. `model_provider` is the fork's own and builds actor
    and critic (default: the model that config.json describes); a reward model always follows its
    own config.json. Collective. A user's mistake ends every rank with exit code 2. Raises
    RunStopped, a SystemExit, on all ranks if an alarm or a flag of Megatron ends the run early.
    """
    setup_logging()
    if not isinstance(job, Job):
        job = job_from_args(job, also_check=check_data)
    with main_script_left_out():
        _run_role(job, model_provider)


def _run_role(
    job: Job, model_provider: Callable[..., Any] | None = None, log: TextIO | None = None
) -> None:
    if job.world.role != ACTOR:
        setup_logging(quiet=True)
        with contextlib.closing(job.watchdog()):  # it answers the actor's
            if job.world.role == ROLLOUT:
                serve_engines(job, log=log)
            else:
                serve_role(job, model_provider, log=log)
        return
    setup_logging()  # the actor's first rank may differ from the job's
    train(Run(job, build(job, model_provider, log=log)))


def main(tokens: list[str] | None = None) -> None:
    """Run `-m mcore_rl.train`."""
    setup_logging()
    tokens = sys.argv[1:] if tokens is None else tokens
    with log_file() as log:
        job = start(tokens, also_check=check_data, log=log, writes=True)
        try:
            with main_script_left_out():
                _run_role(job, log=log)
        except RunStopped as stopped:
            leave_together(stopped.exit_code)


if __name__ == "__main__":
    # Imported by name, so that the changes of --rl-import files to this module take effect.
    from mcore_rl.train import main as main_by_name

    gc.freeze()
    gc.enable()
    main_by_name()
    end_at_once(0)
