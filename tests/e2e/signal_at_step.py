"""Imported by `--rl-import`: rank 1 gets SIGTERM, as from a scheduler, in the second step."""

import os
import signal

from mcore_rl.run_parts.parts import Parts

make_batch = Parts.make_batch
batches = 0


def make_batch_and_signal(self, *args):
    global batches
    batches += 1
    if os.environ["RANK"] == "1" and batches == 2:
        os.kill(os.getpid(), signal.SIGTERM)
    return make_batch(self, *args)


Parts.make_batch = make_batch_and_signal
