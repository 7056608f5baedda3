"""/dev/shm: how much there is, and what dead processes have left in it. Nothing is deleted."""

from __future__ import annotations

import contextlib
import re
import shlex
import shutil
import time
from pathlib import Path

from mcore_rl.common.byte_sizes import shown_bytes
from mcore_rl.tools.doctor.finding import SHARED_MEMORY, Finding, green, plural, red, yellow

FOLDER = Path("/dev/shm")
# Docker gives a container 64 MiB unless it is told otherwise, in which NCCL dies of SIGBUS.
_LEAST_BYTES = 65 << 20
# NCCL's and vLLM's buffers between the processes of a machine, generously.
_BYTES_OF_RANK = 256 << 20
# multiprocessing's segments and semaphores, torch's tensors, ours.
_NAMES = re.compile(r"psm_|sem\.mp-|torch_|mcore_rl-|nccl-")
# A segment is made before it is mapped.
_YOUNG_SECONDS = 60
_MOST_NAMED = 40


def check_shared_memory(
    *,
    local_ranks: int,
    folder: Path = FOLDER,
    proc: Path = Path("/proc"),
    free_bytes: int | None = None,
) -> list[Finding]:
    """`local_ranks` are the job's processes here; `free_bytes` are asked unless given."""
    if not folder.is_dir():
        what = f"{folder} is not there: processes cannot share memory"
        return [red(SHARED_MEMORY, what, f"mount a tmpfs on {folder}")]
    free = shutil.disk_usage(folder).free if free_bytes is None else free_bytes
    needed = _BYTES_OF_RANK * local_ranks
    what = f"{shown_bytes(free)} of {folder} are free"
    remedy = "enlarge it: --shm-size 16g or --ipc host for a container, else mount -o remount,size="
    if free < _LEAST_BYTES:
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
    size = sum(path.stat().st_blocks * 512 for path in left)  # what is not written takes none
    what = f"{plural(len(left), 'file')} of dead processes in {folder} hold {shown_bytes(size)}"
    more = "" if len(left) <= _MOST_NAMED else f" (and {len(left) - _MOST_NAMED} more)"
    command = shlex.join(["rm", *(str(path) for path in left[:_MOST_NAMED])])
    return [yellow(SHARED_MEMORY, what, f"{command}{more}")]


def leftovers(folder: Path = FOLDER, proc: Path = Path("/proc")) -> list[Path]:
    """Files of shared memory that no process seen here has mapped or open, a minute old or more.

    Processes of another container that shares the folder are not seen.
    """
    found = []
    held = _held(folder, proc)
    for path in sorted(folder.iterdir()):
        with contextlib.suppress(OSError):  # gone meanwhile
            age = time.time() - path.stat().st_mtime
            named = _NAMES.match(path.name) is not None
            if named and age > _YOUNG_SECONDS and str(path) not in held:
                found.append(path)
    return found


def _held(folder: Path, proc: Path) -> set[str]:
    """Paths below `folder` that processes have mapped or open."""
    held = set()
    for process in proc.iterdir():
        if not process.name.isdecimal():
            continue
        # Other users' processes cannot be read; what is theirs could not be removed either.
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
