"""The processor cores that this process may use."""

from __future__ import annotations

import contextlib
import math
import os
from pathlib import Path

from mcore_rl.common.machine_memory import control_groups


def available_cores(root: Path = Path("/")) -> int:
    """Return the cores of the affinity mask, or fewer if a cgroup grants less processor time.

    `root` is the folder that contains /proc and /sys.
    """
    cores = len(os.sched_getaffinity(0))
    for folder in control_groups(root, "cpu"):
        cores = int(min(cores, max(1.0, _quota(folder))))
    return cores


def _quota(folder: Path) -> float:
    """Return the cores that a cgroup grants; inf without a limit."""
    with contextlib.suppress(OSError, ValueError):  # of version 2
        granted, whole = (folder / "cpu.max").read_text().split()
        return int(granted) / int(whole)  # ValueError for "max"
    with contextlib.suppress(OSError, ValueError):  # of version 1
        quota = int((folder / "cpu.cfs_quota_us").read_text())
        period = int((folder / "cpu.cfs_period_us").read_text())
        return quota / period if quota > 0 else math.inf
    return math.inf
