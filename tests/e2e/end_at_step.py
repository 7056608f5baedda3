"""Imported by `--rl-import`: every rank is killed once the metrics of a step are written.

The step is in the variable MCORE_RL_TEST_END_AT_STEP.
"""

import multiprocessing
import os
import signal


def end_at(last_step):
    from mcore_rl.run_parts.parts import Parts

    record = Parts.record

    def record_and_end(self, step, *args):
        record(self, step, *args)
        if step == last_step:
            os.kill(os.getpid(), signal.SIGKILL)

    Parts.record = record_and_end


if multiprocessing.parent_process() is None:  # the workers of rewards import this as well
    end_at(int(os.environ["MCORE_RL_TEST_END_AT_STEP"]))
