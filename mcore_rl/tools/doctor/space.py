"""Checks of free space: disks for checkpoints and temporary files, host memory, /dev/shm, and the
limits of open files and locked memory. Nothing is deleted."""

from __future__ import annotations

import contextlib
import glob
import math
import os
import re
import resource
import shlex
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from mcore_rl.common.byte_sizes import shown_bytes
from mcore_rl.common.machine import MachineMemory
from mcore_rl.planner.host import HostPhase
from mcore_rl.tools.doctor.finding import (
    LIMITS,
    SHARED_MEMORY,
    SPACE,
    Finding,
    green,
    plural,
    red,
    yellow,
)
from mcore_rl.trainer.resume.save_rule import NUM_NEWEST

SHARED_FOLDER = Path("/dev/shm")
_LEAST_BYTES = 1 << 30  # for logs, metrics, temporary files
# A rank's files: libraries, the checkpoint's files, the engine; and its sockets to each other rank,
# one for each group that both are in.
_FILES_OF_RANK = 256
_FILES_OF_PAIR = 8
# Buffers that an InfiniBand device reads are locked; a limit below this is a distribution's
# default, with which their registration fails.
_LOCKED_BYTES = 1 << 30
# Docker's default for a container is 64 MiB, in which NCCL dies of SIGBUS.
_LEAST_SHARED_BYTES = 65 << 20
# Generous estimate of NCCL's and vLLM's buffers between the processes of a machine.
_SHARED_BYTES_OF_RANK = 256 << 20
# multiprocessing's segments and semaphores, torch's tensors, mcore_rl's and NCCL's segments.
_SHARED_NAMES = re.compile(r"psm_|sem\.mp-|torch_|mcore_rl-|nccl-")
# A segment is created before it is mapped.
_YOUNG_SECONDS = 60
_MOST_NAMED = 40


@dataclass(frozen=True, slots=True)
class Saves:
    """A run's checkpoints: bytes of one, and the number that stays on the disk."""

    folder: Path
    checkpoint_bytes: int
    num_kept: int


def free_bytes(folder: Path) -> int:
    """Return the free bytes of the disk that `folder` is on, or would be on."""
    existing = folder.absolute()
    while not existing.exists():
        existing = existing.parent
    return shutil.disk_usage(existing).free


def num_kept(num_steps: int, save_interval: int | None, retain_interval: int | None) -> int:
    """Return the number of checkpoints at the end, or while the last one is written; the last step
    is always saved. Without `save_interval`, which is the given one, at most that many."""
    if save_interval is None:
        more = 2 if retain_interval is None else num_steps // retain_interval  # the best; a new one
        return min(num_steps, NUM_NEWEST + more)
    if save_interval >= num_steps:
        return 1
    return math.ceil(num_steps / math.lcm(save_interval, retain_interval or 1))


def check_saves(saves: Saves, free: int | None = None) -> Finding:
    """Check that the disk has room for all checkpoints; `free` replaces its free bytes."""
    free = free_bytes(saves.folder) if free is None else free
    one, count = saves.checkpoint_bytes, plural(saves.num_kept, "checkpoint")
    what = f"{count} of {shown_bytes(one)} in {saves.folder}, where {shown_bytes(free)} are free"
    if free < one:
        return red(SPACE, f"no room for one: {what}", "free space, or name another disk by --save")
    if free < one * saves.num_kept:  # all others still exist while the last one is written
        remedy = "free space, name another disk by --save, or keep fewer by --save-retain-interval"
        return yellow(SPACE, f"no room for all: {what}", remedy)
    return green(SPACE, what)


def check_folder(name: str, folder: Path, free: int | None = None) -> Finding:
    """Check free disk space for a folder with little data; `free` replaces its free bytes."""
    free = free_bytes(folder) if free is None else free
    what = f"{shown_bytes(free)} are free for {name}, {folder}"
    if free < _LEAST_BYTES:
        return yellow(SPACE, f"only {what}", "free some space, or use another folder")
    return green(SPACE, what)


def check_host_memory(phase: HostPhase, machine: MachineMemory, *, ranks: int) -> Finding:
    """Compare the plan's fullest phase with this machine: red only if exact parts exceed its limit,
    which a start refuses."""
    needed = phase.total_bytes
    what = (
        f"{plural(ranks, 'rank')} here {'needs' if ranks == 1 else 'need'} about "
        f"{shown_bytes(needed)} of host memory in phase "
        f"{phase.name} ({phase.described}); {machine.source} is "
        f"{shown_bytes(machine.limit_bytes)}, of which {shown_bytes(machine.available_bytes)} are "
        "free"
    )
    if needed <= machine.available_bytes:
        return green(SPACE, what)
    if phase.exact_bytes > machine.limit_bytes:
        return red(SPACE, what, "use fewer ranks here, or a machine with more")
    return yellow(SPACE, what, "end other programs, use fewer ranks here, or a machine with more")


def check_open_files(world_size: int, limit: int | None = None) -> Finding:
    """Check the limit of open files, by default this process's, which its children inherit."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0] if limit is None else limit
    if limit == resource.RLIM_INFINITY:
        return green(LIMITS, "open files have no limit")
    needed = _FILES_OF_RANK + _FILES_OF_PAIR * world_size
    what = f"ulimit -n is {limit:,}"
    if limit >= needed:
        return green(LIMITS, what)
    what += f", and one of {plural(world_size, 'rank')} may open about {needed:,} files"
    return red(LIMITS, what, f"ulimit -n {max(needed, 65536)} before the start")


def check_locked_memory(limit: int | None = None) -> Finding:
    """Check the limit of locked memory for InfiniBand, by default this process's."""
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0] if limit is None else limit
    if limit == resource.RLIM_INFINITY:
        return green(LIMITS, "locked memory has no limit, for InfiniBand")
    make = yellow if limit >= _LOCKED_BYTES else red
    what = f"ulimit -l is {shown_bytes(limit)}, and InfiniBand locks its buffers"
    remedy = "set it to unlimited (limits.conf, the Slurm daemon, or --ulimit memlock=-1)"
    return make(LIMITS, what, remedy)


def check_shared_memory(
    *, local_ranks: int, folder: Path = SHARED_FOLDER, free: int | None = None
) -> Iterator[Finding]:
    """Check /dev/shm for the job's `local_ranks` processes here; `free` replaces its free bytes."""
    if not folder.is_dir():
        what = f"{folder} does not exist: processes cannot share memory"
        yield red(SHARED_MEMORY, what, f"mount a tmpfs on {folder}")
        return
    free = free_bytes(folder) if free is None else free
    needed = _SHARED_BYTES_OF_RANK * local_ranks
    what = f"{shown_bytes(free)} of {folder} are free"
    remedy = "enlarge it: --shm-size 16g or --ipc host for a container, else mount -o remount,size="
    if free < _LEAST_SHARED_BYTES:
        yield red(SHARED_MEMORY, f"only {what}", remedy)
    elif free < needed:
        what += f", and {plural(local_ranks, 'rank')} may take {shown_bytes(needed)}"
        yield yellow(SHARED_MEMORY, what, remedy)
    else:
        yield green(SHARED_MEMORY, what)
    if left := leftovers(folder):
        size = sum(path.stat().st_blocks * 512 for path in left)  # allocated blocks only
        what = f"{plural(len(left), 'file')} of dead processes in {folder} hold {shown_bytes(size)}"
        more = "" if len(left) <= _MOST_NAMED else f" (and {len(left) - _MOST_NAMED} more)"
        command = shlex.join(["rm", *map(str, left[:_MOST_NAMED])])
        yield yellow(SHARED_MEMORY, what, f"{command}{more}")


def leftovers(folder: Path = SHARED_FOLDER) -> list[Path]:
    """Return files of shared memory, a minute old, that no visible process maps or opens."""
    files, held = [], _held(folder)
    for path in sorted(folder.iterdir()):
        with contextlib.suppress(OSError):  # deleted meanwhile
            is_old = time.time() - path.stat().st_mtime > _YOUNG_SECONDS
            if is_old and _SHARED_NAMES.match(path.name) and str(path) not in held:
                files.append(path)
    return files


def _held(folder: Path) -> set[str]:
    """Return paths below `folder` that this user's processes have mapped or open."""
    held = set()
    for maps in glob.iglob("/proc/[0-9]*/maps"):
        with contextlib.suppress(OSError), open(maps, errors="replace") as file:
            held.update(re.findall(rf"{re.escape(str(folder))}/.*", file.read()))
    for handle in glob.iglob("/proc/[0-9]*/fd/*"):
        with contextlib.suppress(OSError):
            held.add(os.readlink(handle))
    return held
