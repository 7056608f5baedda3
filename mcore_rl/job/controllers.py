"""Controllers of `--rl-rollout-servers`: processes beside a job's ranks, without a GPU.

    python -m mcore_rl.job.controllers NUMBER     started by the first rank of each machine in turn

A controller reads the job from its standard input, meets the ranks at the job's store, and ends
soon after the rank that has started it.
"""

from __future__ import annotations

import argparse
import os
import pickle
import subprocess
import sys
import threading
import time
from dataclasses import replace

from mcore_rl.common.agreement import EXIT_FAILED, leave_cause, leave_reason
from mcore_rl.common.exits import describe_exit, end_at_once
from mcore_rl.common.run_output import setup_logging
from mcore_rl.flags.parsed_flags import import_given_files
from mcore_rl.spec import JobSpec

GRACE_SECONDS = 5.0


def start_controllers(spec: JobSpec, args: argparse.Namespace, rank: int) -> None:
    """Start the controllers that `rank` starts. Does not wait for them."""
    if not spec.roles.has_controllers or rank % spec.ranks_per_node:
        return
    # They call the reward model's ranks, and parse no flags.
    reward_model = spec.reward_model and replace(spec.reward_model, extra_args=_no_flags)
    sent = replace(spec, critic=None, reward_model=reward_model, teachers=())
    facts = {name: getattr(args, name) for name in ("seed", "distributed_timeout_minutes")}
    node, num_nodes = rank // spec.ranks_per_node, -(-spec.roles.world_size // spec.ranks_per_node)
    for number in range(node, len(spec.roles.rollout), num_nodes):
        environment = os.environ | {
            "RANK": str(spec.roles.rollout[number]),
            "LOCAL_RANK": "0",
            "CUDA_VISIBLE_DEVICES": "",
        }
        process = subprocess.Popen(
            [sys.executable, "-m", "mcore_rl.job.controllers", str(number)],
            stdin=subprocess.PIPE,
            env=environment,
        )
        assert process.stdin is not None
        for part in (spec.tokens, sent, facts):
            pickle.dump(part, process.stdin)
        process.stdin.flush()  # it stays open for as long as this process lives
        threading.Thread(target=end_with_controller, args=(process, number), daemon=True).start()


def _no_flags(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    return parser


def end_with_controller(process: subprocess.Popen[bytes], number: int) -> None:
    """End this rank, and by the launcher the job, soon after a controller that fails: the other
    ranks may be waiting for it to join them."""
    if not (code := process.wait()):
        return
    what = f"controller {number} of --rl-rollout-servers ended by"
    if code < 0:  # it cannot report itself
        leave_cause(f"{what} {describe_exit(code)}")
    time.sleep(GRACE_SECONDS)  # in which a call of it reports why
    leave_reason(f"{what} {describe_exit(code)}")
    os._exit(EXIT_FAILED)


def main() -> None:
    setup_logging(quiet=True)
    import_given_files(pickle.load(sys.stdin.buffer))  # what the job refers to by name
    spec, facts = pickle.load(sys.stdin.buffer), pickle.load(sys.stdin.buffer)
    threading.Thread(target=_end_with_parent, daemon=True).start()

    from mcore_rl.job.environment import join_store
    from mcore_rl.job.start import start_engine_rank
    from mcore_rl.trainer.controller_ranks import serve_controllers
    from mcore_rl.trainer.job import enter_role

    world = enter_role(spec.roles, join_store())
    serve_controllers(start_engine_rank(spec, argparse.Namespace(**facts), world))
    end_at_once(0)


def _end_with_parent() -> None:
    """Wait for the end of the rank that has started this process, then for this process to end."""
    os.read(sys.stdin.fileno(), 1)  # not by the buffer, whose lock the end of this process needs
    time.sleep(GRACE_SECONDS)
    os._exit(EXIT_FAILED)


if __name__ == "__main__":
    main()
