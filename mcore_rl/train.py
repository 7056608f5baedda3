"""The story of a run. Start it with the launcher: `python -m mcore_rl.launch ... -m mcore_rl.train
<Megatron and --rl-* flags>`; torchrun and Slurm do as well.

prompts ─► engine (rollout mode) ─► rewards ─► log-probs, values ─► advantages ─► updates
               ▲                                                                     │
               └───────────── weights, by the sharding manager ◄─────────────────────┘
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Callable
from typing import Any, TextIO

from mcore_rl.common.agreement import leave_reason, leave_together
from mcore_rl.common.errors import RunStopped
from mcore_rl.common.run_output import log_file, setup_logging
from mcore_rl.common.spawning import main_script_left_out
from mcore_rl.flags.options import ExtraArgs, with_rl_args
from mcore_rl.flags.roles import ACTOR
from mcore_rl.run.assembly import build_parts
from mcore_rl.run.builders import check_data, serve_role
from mcore_rl.run.parts import Parts
from mcore_rl.run.startup import Job, job_from_args, start


def train(job: Job, parts: Parts) -> None:
    """Run the steps that are left, evaluate the final policy, write what was asked for, and end
    what would outlive the run.

    Collective. Raises what has ended it: RunStopped on all ranks as asked, anything else where it
    was raised.
    """
    try:
        _do_steps(job, parts)
    except RunStopped:
        raise
    except BaseException as error:
        # Said now: the launcher ends this process while others are still being torn down.
        leave_reason(f"{type(error).__name__}: {error}".splitlines()[0])
        rank = os.environ.get("RANK", "0")
        logging.getLogger("mcore_rl").exception("rank %s: the run ended early", rank)
        parts.abandon()
        raise
    finally:
        parts.close()


def _do_steps(job: Job, parts: Parts) -> None:
    config = job.config
    for step in range(parts.first_step, config.num_steps):
        with parts.manager as engine:  # the engines get the policy; leaving gives training back
            eval_rollouts = parts.sample_eval(step, engine.weight_version)
            collected = parts.collect(engine.weight_version)
        parts.require_rewards(step, collected)
        parts.evaluate(step, eval_rollouts)
        batch = parts.with_log_probs(parts.make_batch(step, collected))
        batch = parts.with_advantages(collected, batch)
        learnt = parts.update(step, batch)
        parts.record(step, collected, batch, learnt)
        parts.save_if_due(step)  # last: what is saved is not done again, so its line is there
    parts.finish()


def initialize(extra_args: ExtraArgs | None = None, **megatron_options: Any) -> Job:
    """Check the command line of a fork's script, derive what it leaves out, and start Megatron.

    What `-m mcore_rl.train` does at its start, `--rl-config` included, with Megatron's own
    `parse_and_validate_args` and `initialize_megatron`, which gets `megatron_options`.
    `extra_args` is Megatron's `extra_args_provider`: a function that adds the fork's flags to the
    parser and returns it. Collective; a user's mistake ends every rank with exit code 2. Megatron's
    output goes where MCORE_RL_MEGATRON_LOG says. Returns the job for `run`; its `args` are
    Megatron's, those of `get_args()`.
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
    """The whole run on an initialised Megatron, for a fork's script.

    `job` is what `initialize` returned, or Megatron's arguments, with the flags of
    `mcore_rl.add_rl_args`, of a fork that has parsed them and started Megatron by itself.
    `model_provider` is the fork's own (default: the model that config.json describes); actor and
    critic are built by it, a reward model is what its own config.json describes. Collective. A
    user's mistake ends every rank with exit code 2. Raises RunStopped, a SystemExit, on all ranks
    if an alarm or a flag of Megatron ends the run early.
    """
    setup_logging()
    if not isinstance(job, Job):
        job = job_from_args(job, also_check=check_data)
    with main_script_left_out():
        _play_role(job, model_provider)


def _play_role(
    job: Job, model_provider: Callable[..., Any] | None = None, log: TextIO | None = None
) -> None:
    if job.world.role != ACTOR:
        setup_logging(quiet=True)
        serve_role(job, model_provider, log=log)
        return
    setup_logging()  # the actor's first rank may not be the job's
    train(job, build_parts(job, model_provider, log=log))


def main(tokens: list[str] | None = None) -> None:
    """Entry point of `-m mcore_rl.train`."""
    setup_logging()
    tokens = sys.argv[1:] if tokens is None else tokens
    with log_file() as log:
        job = start(tokens, also_check=check_data, log=log, writes=True)
        try:
            with main_script_left_out():
                _play_role(job, log=log)
        except RunStopped as stopped:
            leave_together(stopped.exit_code)


if __name__ == "__main__":
    main()
