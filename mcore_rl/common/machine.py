"""Host memory and processor cores available to this process: the machine's or a cgroup's."""

from __future__ import annotations

import contextlib
import math
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_V1_UNLIMITED = 1 << 62  # cgroup version 1 reports a missing limit as pages near 2^63


@dataclass(frozen=True, slots=True)
class MachineMemory:
    """Bytes of host memory: a hard limit, and the part of it that is free now."""

    limit_bytes: int
    available_bytes: int
    source: str  # of the limit: "the machine's memory", or a cgroup by its folder


def machine_memory(root: Path = Path("/")) -> MachineMemory:
    """Return the tightest limit among the machine and all cgroups of this process.

    `root` is the folder that contains /proc and /sys. Memory that the kernel can reclaim, such as
    the page cache, counts as available.
    """
    meminfo = (root / "proc/meminfo").read_text()
    total, available = (_kilobytes(meminfo, name) for name in ("MemTotal", "MemAvailable"))
    memory = MachineMemory(total, available, "the machine's memory")
    for folder in control_groups(root):
        limit = _limit(folder)
        if limit is None:
            continue
        available = min(memory.available_bytes, max(0, limit - _used(folder)))
        if limit < memory.limit_bytes:
            memory = MachineMemory(limit, available, f"the limit of cgroup {folder}")
        else:
            memory = MachineMemory(memory.limit_bytes, available, memory.source)
    return memory


def _kilobytes(text: str, name: str) -> int:
    match = re.search(rf"^{name}:\s+(\d+) kB", text, re.MULTILINE)
    assert match is not None, f"/proc/meminfo has no {name}"
    return int(match[1]) << 10


def control_groups(root: Path = Path("/"), controller: str = "memory") -> Iterator[Path]:
    """Yield a controller's folders: this process's control group, then its ancestors.

    In a container the path may be the host's path, of which only the topmost folder exists.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        mounted = root / "sys/fs/cgroup" / (controller if controllers else "")
        names = [name for name in path.split("/") if name not in ("", "..")]
        for depth in range(len(names), -1, -1):
            folder = mounted.joinpath(*names[:depth])
            if folder.is_dir():
                yield folder


def _limit(folder: Path) -> int | None:
    for name in ("memory.max", "memory.limit_in_bytes"):
        limit = _number(folder / name)
        if limit is not None and limit < _V1_UNLIMITED:
            return limit
    return None


def _used(folder: Path) -> int:
    used = _number(folder / "memory.current")
    if used is None:
        used = _number(folder / "memory.usage_in_bytes") or 0
    try:
        stat = (folder / "memory.stat").read_text()
    except OSError:
        return used
    counts = dict(line.split(" ", 1) for line in stat.splitlines())
    # Version 1 reports the sum with its child groups under another name.
    files = counts.get("total_inactive_file", counts.get("inactive_file", "0"))
    return used - int(files)


def _number(file: Path) -> int | None:
    try:
        text = file.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None  # "max" means unlimited


def available_cores(root: Path = Path("/")) -> int:
    """Return the cores of the affinity mask, or fewer if a cgroup grants less processor time.

    `root` is the folder that contains /proc and /sys.
    """
    cores = len(os.sched_getaffinity(0))
    for folder in control_groups(root, "cpu"):
        cores = int(min(cores, max(1.0, _quota(folder))))
    return cores


def threads_per_rank(local_ranks: int, *, has_gpu: bool, num_cores: int) -> int:
    """Return the OpenMP threads of each of a machine's ranks, if the user names no number."""
    return 1 if has_gpu else max(1, num_cores // local_ranks)


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
