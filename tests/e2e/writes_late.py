"""Imported by `--rl-import`: the second engine writes its part of a checkpoint a second late."""

import os
import time


def write_late():
    from mcore_rl.rollout import sampler

    write = sampler.write_groups

    def write_groups(groups, folder, tp_group):
        if tp_group == 1:
            time.sleep(1.0)
        write(groups, folder, tp_group)

    sampler.write_groups = write_groups


if "RANK" in os.environ:  # not in the workers of rewards, which import this as well
    write_late()
