"""Imported by `--rl-import`: every rank is killed once the metrics of a step are written.

The step is in the variable MCORE_RL_TEST_END_AT_STEP. With MCORE_RL_TEST_END_LAUNCHER_OF, a rank,
it is the launcher of that rank which is killed, by it, and nobody else.
"""

import os
import signal


def end_at(last_step, launcher_of):
    from mcore_rl.train import Run

    record = Run.record

    def record_and_end(self, step, *args):
        record(self, step, *args)
        if step == last_step and launcher_of in (None, os.environ["RANK"]):
            os.kill(os.getpid() if launcher_of is None else os.getppid(), signal.SIGKILL)

    Run.record = record_and_end


if "RANK" in os.environ:  # not in the workers of rewards, which import this as well
    end_at(
        int(os.environ["MCORE_RL_TEST_END_AT_STEP"]),
        os.environ.get("MCORE_RL_TEST_END_LAUNCHER_OF"),
    )
