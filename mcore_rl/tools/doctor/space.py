"""Checks of free space: disks for checkpoints and temporary files, host memory, /dev/shm, and the
limits of open files and locked memory. Nothing is deleted."""

from __future__ import annotations

import contextlib
import math
import re
import resource
import shlex
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from mcore_rl.common.byte_sizes import shown_bytes
from mcore_rl.common.machine_memory import MachineMemory
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

_LEAST_BYTES = 1 << 30  # for logs, metrics, temporary files


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
    """Return the number of checkpoints at the end; the last step is always saved."""
    if not save_interval or save_interval >= num_steps:
        return 1
    kept = save_interval if not retain_interval else math.lcm(save_interval, retain_interval)
    return num_steps // kept + (1 if num_steps % kept else 0)


def check_disk(
    saves: Saves | None,
    others: Mapping[str, Path],
    *,
    free: Callable[[Path], int] = free_bytes,
) -> list[Finding]:
    """Check free disk space. `others` are folders with little data, by name."""
    findings = [] if saves is None else [_checkpoints(saves, free(saves.folder))]
    for name, folder in others.items():
        left = free(folder)
        what = f"{shown_bytes(left)} are free for {name}, {folder}"
        if left < _LEAST_BYTES:
            findings.append(yellow(SPACE, f"only {what}", "free some space, or name another"))
        else:
            findings.append(green(SPACE, what))
    return findings


def _checkpoints(saves: Saves, left: int) -> Finding:
    one = saves.checkpoint_bytes
    # All others still exist while the last one is written.
    all_of_them = one * saves.num_kept
    what = (
        f"{plural(saves.num_kept, 'checkpoint')} of {shown_bytes(one)} in {saves.folder}, where "
        f"{shown_bytes(left)} are free"
    )
    if left < one:
        return red(SPACE, f"not one: {what}", "free space, or name another disk by --save")
    if left < all_of_them:
        remedy = "free space, name another disk by --save, or keep fewer by --save-retain-interval"
        return yellow(SPACE, f"not all of {what}", remedy)
    return green(SPACE, what)


def check_host_memory(phase: HostPhase, machine: MachineMemory, *, ranks: int) -> Finding:
    """Compare the plan's fullest phase with this machine: red only if exact parts exceed its limit,
    which a start refuses."""
    needed = phase.total_bytes
    parts = ", ".join(f"{part} {shown_bytes(size)}" for part, size in phase.parts.items())
    found = (
        f"{plural(ranks, 'rank')} here need some {shown_bytes(needed)} of host memory in phase "
        f"{phase.name} ({parts}); {machine.source} is {shown_bytes(machine.limit_bytes)}, of which "
        f"{shown_bytes(machine.available_bytes)} are free"
    )
    if needed <= machine.available_bytes:
        return green(SPACE, found)
    if phase.exact_bytes > machine.limit_bytes:
        return red(SPACE, found, "take fewer ranks here, or a machine with more")
    return yellow(SPACE, found, "end other programs, take fewer ranks here, or a machine with more")


# A rank's files: libraries, the checkpoint's files, the engine; and its sockets to each other rank,
# one for each group that both are in.
_FILES_OF_RANK = 256
_FILES_OF_PAIR = 8
# Buffers that an InfiniBand device reads are locked; a limit below this is a distribution's
# default, with which their registration fails.
_LOCKED_BYTES = 1 << 30


def check_limits(
    *,
    world_size: int,
    infiniband: bool,
    open_files: int | None = None,
    locked_bytes: int | None = None,
) -> list[Finding]:
    """Check the given limits (-1: none), or by default this process's, which children inherit."""
    if open_files is None:
        open_files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if locked_bytes is None:
        locked_bytes = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    findings = [_open_files(open_files, world_size)]
    if not infiniband:
        return findings
    if locked_bytes == resource.RLIM_INFINITY:
        return [*findings, green(LIMITS, "memory may be locked without a limit, for InfiniBand")]
    make = yellow if locked_bytes >= _LOCKED_BYTES else red
    what = f"ulimit -l lets {shown_bytes(locked_bytes)} be locked, and InfiniBand locks its buffers"
    remedy = "set it to unlimited (limits.conf, the Slurm daemon, or --ulimit memlock=-1)"
    return [*findings, make(LIMITS, what, remedy)]


def _open_files(limit: int, world_size: int) -> Finding:
    if limit == resource.RLIM_INFINITY:
        return green(LIMITS, "files may be opened without a limit")
    needed = _FILES_OF_RANK + _FILES_OF_PAIR * world_size
    what = f"ulimit -n is {limit:,}"
    if limit < needed:
        what += f", and one of {plural(world_size, 'rank')} may open some {needed:,} files"
        return red(LIMITS, what, f"ulimit -n {max(needed, 65536)} before the start")
    return green(LIMITS, what)


FOLDER = Path("/dev/shm")
# Docker's default for a container is 64 MiB, in which NCCL dies of SIGBUS.
_LEAST_SHARED_BYTES = 65 << 20
# Generous estimate of NCCL's and vLLM's buffers between the processes of a machine.
_BYTES_OF_RANK = 256 << 20
# multiprocessing's segments and semaphores, torch's tensors, mcore_rl's and NCCL's segments.
_NAMES = re.compile(r"psm_|sem\.mp-|torch_|mcore_rl-|nccl-")
# A segment is created before it is mapped.
_YOUNG_SECONDS = 60
_MOST_NAMED = 40


def check_shared_memory(
    *,
    local_ranks: int,
    folder: Path = FOLDER,
    proc: Path = Path("/proc"),
    free_bytes: int | None = None,
) -> list[Finding]:
    """Check /dev/shm for the job's `local_ranks` processes here, with its `free_bytes` if given."""
    if not folder.is_dir():
        what = f"{folder} is not there: processes cannot share memory"
        return [red(SHARED_MEMORY, what, f"mount a tmpfs on {folder}")]
    free = shutil.disk_usage(folder).free if free_bytes is None else free_bytes
    needed = _BYTES_OF_RANK * local_ranks
    what = f"{shown_bytes(free)} of {folder} are free"
    remedy = "enlarge it: --shm-size 16g or --ipc host for a container, else mount -o remount,size="
    if free < _LEAST_SHARED_BYTES:
        found = red(SHARED_MEMORY, f"only {what}", remedy)
    elif free < needed:
        what += f", and {plural(local_ranks, 'rank')} may take {shown_bytes(needed)}"
        found = yellow(SHARED_MEMORY, what, remedy)
    else:
        found = green(SHARED_MEMORY, what)
    return [found, *_leftovers(folder, proc)]


def _leftovers(folder: Path, proc: Path) -> list[Finding]:
    left = leftovers(folder, proc)
    if not left:
        return []
    size = sum(path.stat().st_blocks * 512 for path in left)  # allocated blocks only
    what = f"{plural(len(left), 'file')} of dead processes in {folder} hold {shown_bytes(size)}"
    more = "" if len(left) <= _MOST_NAMED else f" (and {len(left) - _MOST_NAMED} more)"
    command = shlex.join(["rm", *(str(path) for path in left[:_MOST_NAMED])])
    return [yellow(SHARED_MEMORY, what, f"{command}{more}")]


def leftovers(folder: Path = FOLDER, proc: Path = Path("/proc")) -> list[Path]:
    """Return files of shared memory, a minute old or more, that no visible process maps or opens.

    Processes of another container that shares the folder are not visible.
    """
    found = []
    held = _held(folder, proc)
    for path in sorted(folder.iterdir()):
        with contextlib.suppress(OSError):  # deleted meanwhile
            age = time.time() - path.stat().st_mtime
            named = _NAMES.match(path.name) is not None
            if named and age > _YOUNG_SECONDS and str(path) not in held:
                found.append(path)
    return found


def _held(folder: Path, proc: Path) -> set[str]:
    """Return paths below `folder` that processes have mapped or open."""
    held = set()
    for process in proc.iterdir():
        if not process.name.isdecimal():
            continue
        # Other users' processes cannot be read; their files could not be removed either.
        with contextlib.suppress(OSError):
            maps = (process / "maps").read_text(encoding="utf-8", errors="replace")
            for line in maps.splitlines():
                _, mark, name = line.partition(f"{folder}/")
                if mark:
                    held.add(f"{folder}/{name}")
        with contextlib.suppress(OSError):
            for handle in (process / "fd").iterdir():
                with contextlib.suppress(OSError):
                    held.add(str(handle.readlink()))
    return held
