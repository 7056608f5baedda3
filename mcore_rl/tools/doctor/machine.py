"""Checks of this machine's ports, shared memory, limits and disks. Nothing is deleted."""

from __future__ import annotations

import contextlib
import glob
import math
import os
import re
import resource
import shlex
import shutil
import socket
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import psutil

from mcore_rl.common.addresses import is_loopback
from mcore_rl.common.byte_sizes import shown_bytes
from mcore_rl.tools.doctor.finding import Finding, green, plural, red, yellow
from mcore_rl.trainer.resume.save_rule import NUM_NEWEST

_PORT = 29500  # torchrun's
_PORT_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_SHARED = Path("/dev/shm")
# Bytes. Docker's default for a container is 64 MiB, in which NCCL dies of SIGBUS; a generous
# estimate of NCCL's and vLLM's buffers between the processes of a machine.
_LEAST_SHARED, _SHARED_OF_RANK = 65 << 20, 256 << 20
# multiprocessing's segments and semaphores, torch's tensors, mcore_rl's and NCCL's segments.
_SHARED_NAMES = re.compile(r"psm_|sem\.mp-|torch_|mcore_rl-|nccl-")
_YOUNG_SECONDS = 60  # a segment is created before it is mapped
_MOST_NAMED = 40
_LEAST_BYTES = 1 << 30  # for logs, metrics, temporary files
# Buffers that an InfiniBand device reads are locked; a limit below this is a distribution's
# default, with which their registration fails.
_LOCKED = 1 << 30


def _enough(
    area: str, have: float, what: str, remedy: str, *, least: float = 0, wanted: float = 0
) -> Finding:
    """Compare what there is with the least that a run needs, and with what it may take."""
    if have < least:
        return red(area, f"only {what}", remedy)
    return yellow(area, f"only {what}", remedy) if have < wanted else green(area, what)


def check_ports(
    environment: Mapping[str, str], *, local_ranks: int, port_range: Path = _PORT_RANGE
) -> Iterator[Finding]:
    """Check ports for the job's `local_ranks` processes here. Binds a port for a moment.

    `port_range` is the file with the first and the last port that the kernel gives to connections.
    """
    yield _rendezvous(environment)
    try:
        first, last = map(int, port_range.read_text(encoding="ascii").split())
    except (OSError, ValueError):
        yield green("ports", "the kernel's range of ports for connections cannot be read")
        return
    used = {connection.laddr.port for connection in psutil.net_connections("tcp")}
    free = last - first + 1 - len(used & {*range(first, last + 1)})
    # gloo and NCCL connect a rank to others in each group, and its engine listens on a few.
    needed = 64 * local_ranks
    what = f"{free:,} ports of {first} to {last} are free for connections, of which "
    what += f"{plural(local_ranks, 'rank')} may take {needed:,}"
    remedy = "end programs that hold connections, or widen net.ipv4.ip_local_port_range"
    yield _enough("ports", free, what, remedy, least=needed)
    port = environment.get("MASTER_PORT", "")
    if port.isdecimal() and first <= int(port) <= last:
        what = f"MASTER_PORT={port} is in that range: a connection may take it before the start"
        yield yellow("ports", what, f"set a port below {first}")


def _rendezvous(environment: Mapping[str, str]) -> Finding:
    text, address = environment.get("MASTER_PORT"), environment.get("MASTER_ADDR")
    if text is not None and not (text.isdecimal() and 0 < int(text) < 1 << 16):
        return red("ports", f"MASTER_PORT={text} is not a port", "set it to a number up to 65535")
    port, here = int(text or _PORT), (socket.gethostname(), socket.getfqdn())
    if address and not is_loopback(address) and address not in here:
        return green("ports", f"MASTER_ADDR={address}, where port {port} is needed, is elsewhere")
    if is_free(port):
        return green("ports", f"port {port} of the rendezvous is free")
    other = next(each for each in range(_PORT + 1, 1 << 16) if is_free(each))
    if text is not None:
        what = f"MASTER_PORT={port} is taken by another program"
        return red("ports", what, f"set another one, as MASTER_PORT={other}")
    what = f"port {port}, torchrun's own, is taken: a job on several machines cannot use it"
    return yellow("ports", what, f"set MASTER_PORT={other} for such a job")


def is_free(port: int) -> bool:
    """Return whether a server could listen there now."""
    with contextlib.suppress(OSError), socket.create_server(("", port)):
        return True
    return False


def check_shared_memory(
    *, local_ranks: int, folder: Path = _SHARED, free: int | None = None
) -> Iterator[Finding]:
    """Check /dev/shm for the job's `local_ranks` processes here; `free` replaces its free bytes."""
    if not folder.is_dir():
        what = f"{folder} does not exist: processes cannot share memory"
        yield red("shared memory", what, f"mount a tmpfs on {folder}")
        return
    free, needed = free_bytes(folder) if free is None else free, _SHARED_OF_RANK * local_ranks
    what = f"{shown_bytes(free)} of {folder} are free, of which {plural(local_ranks, 'rank')} may "
    remedy = "enlarge it: --shm-size 16g or --ipc host for a container, else mount -o remount,size="
    what += f"take {shown_bytes(needed)}"
    yield _enough("shared memory", free, what, remedy, least=_LEAST_SHARED, wanted=needed)
    if left := leftovers(folder):
        size = shown_bytes(sum(path.stat().st_blocks * 512 for path in left))  # allocated blocks
        what = f"{plural(len(left), 'file')} of dead processes in {folder} hold {size}"
        more = "" if len(left) <= _MOST_NAMED else f" (and {len(left) - _MOST_NAMED} more)"
        command = shlex.join(["rm", *map(str, left[:_MOST_NAMED])])
        yield yellow("shared memory", what, f"{command}{more}")


def leftovers(folder: Path = _SHARED) -> list[Path]:
    """Return files of shared memory, a minute old, that no visible process maps or opens."""
    files, held = [], set()
    for maps in glob.iglob("/proc/[0-9]*/maps"):
        with contextlib.suppress(OSError), open(maps, errors="replace") as file:
            held.update(re.findall(rf"{re.escape(str(folder))}/.*", file.read()))
    for handle in glob.iglob("/proc/[0-9]*/fd/*"):
        with contextlib.suppress(OSError):
            held.add(os.readlink(handle))
    for path in sorted(folder.iterdir()):
        with contextlib.suppress(OSError):  # deleted meanwhile
            is_old = time.time() - path.stat().st_mtime > _YOUNG_SECONDS
            if is_old and _SHARED_NAMES.match(path.name) and str(path) not in held:
                files.append(path)
    return files


def check_limits(
    world_size: int, *, has_infiniband: bool, files: int | None = None, locked: int | None = None
) -> Iterator[Finding]:
    """Check the limits of open files and of locked memory, by default those of this process, which
    its children inherit."""
    # A rank's files: libraries, the checkpoint's files, the engine; and its sockets to each other
    # rank, one for each group that both are in.
    needed = 256 + 8 * world_size
    have, shown = _limit(resource.RLIMIT_NOFILE, files)
    what = f"ulimit -n is {shown}, and one of {plural(world_size, 'rank')} may open about "
    remedy = f"ulimit -n {max(needed, 65536)} before the start"
    yield _enough("limits", have, f"{what}{needed:,} files", remedy, least=needed)
    if has_infiniband:
        have, shown = _limit(resource.RLIMIT_MEMLOCK, locked)
        what = f"ulimit -l is {shown} bytes, and InfiniBand locks its buffers"
        remedy = "set it to unlimited (limits.conf, the Slurm daemon, or --ulimit memlock=-1)"
        yield _enough("limits", have, what, remedy, least=_LOCKED, wanted=math.inf)


def _limit(kind: int, limit: int | None) -> tuple[float, str]:
    limit = resource.getrlimit(kind)[0] if limit is None else limit
    return (math.inf, "unlimited") if limit == resource.RLIM_INFINITY else (limit, f"{limit:,}")


def free_bytes(folder: Path) -> int:
    """Return the free bytes of the disk that `folder` is on, or would be on."""
    existing = folder.absolute()
    while not existing.exists():
        existing = existing.parent
    return shutil.disk_usage(existing).free


def check_folder(name: str, folder: Path, free: int | None = None) -> Finding:
    """Check free disk space for a folder with little data; `free` replaces its free bytes."""
    free = free_bytes(folder) if free is None else free
    what = f"{shown_bytes(free)} are free for {name}, {folder}"
    return _enough("space", free, what, "free some, or use another folder", wanted=_LEAST_BYTES)


def num_kept(num_steps: int, save_interval: int | None, retain_interval: int | None) -> int:
    """Return the number of checkpoints at the end, or while the last one is written; the last step
    is always saved. Without `save_interval`, which is the given one, at most that many."""
    if save_interval is None:
        more = 2 if retain_interval is None else num_steps // retain_interval  # the best; a new one
        return min(num_steps, NUM_NEWEST + more)
    if save_interval >= num_steps:
        return 1
    return math.ceil(num_steps / math.lcm(save_interval, retain_interval or 1))


def check_saves(folder: Path, one: int, count: int, free: int | None = None) -> Finding:
    """Check that the disk has room for `count` checkpoints of `one` byte count each, which exist
    together while the last one is written; `free` replaces its free bytes."""
    free = free_bytes(folder) if free is None else free
    what = f"{shown_bytes(free)} are free in {folder} for {plural(count, 'checkpoint')} of "
    remedy = "free space, name another disk by --save, or keep fewer by --save-retain-interval"
    what += shown_bytes(one)
    return _enough("space", free, what, remedy, least=one, wanted=one * count)
