"""Imported by `--rl-import`: a disk fills up, or becomes read-only, while a run continues.

MCORE_RL_TEST_DISK is a JSON object: `folder` (where the disk is mounted), `how` ("full" or
"read-only"), `after` and `until` (the steps whose metrics are written last before and in that
state; no `until`: it stays so).
"""

import contextlib
import errno
import json
import os
import subprocess
from pathlib import Path


def spoil(plan):
    if plan["how"] == "read-only":
        subprocess.run(["mount", "-o", "remount,ro", plan["folder"]], check=True)
        return
    with filler_of(plan).open("wb", buffering=0) as file, contextlib.suppress(OSError):
        size = 1 << 20
        while size:
            try:
                file.write(bytes(size))
            except OSError as error:
                assert error.errno == errno.ENOSPC
                size //= 2


def filler_of(plan):
    return Path(plan["folder"]) / "filler"


def spoil_at_a_step(plan):
    from mcore_rl.train import Run

    record = Run.record

    def record_and_spoil(self, step, *args):
        record(self, step, *args)
        if os.environ["RANK"] == "0" and step == plan["after"]:
            spoil(plan)
        if os.environ["RANK"] == "0" and step == plan.get("until"):
            filler_of(plan).unlink()

    Run.record = record_and_spoil


if "RANK" in os.environ:  # not in the workers of rewards, which import this as well
    spoil_at_a_step(json.loads(os.environ["MCORE_RL_TEST_DISK"]))
