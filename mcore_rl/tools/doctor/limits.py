"""What the kernel lets a process of this user have: open files, locked memory."""

from __future__ import annotations

import resource

from mcore_rl.common.byte_sizes import shown_bytes
from mcore_rl.tools.doctor.finding import LIMITS, Finding, green, plural, red, yellow

# Of a rank: libraries, the checkpoint's files, the engine; and a socket to each other rank in the
# groups that both are in.
_FILES_OF_RANK = 256
_FILES_OF_PAIR = 8
# Buffers that an InfiniBand device reads are locked; less than this is what a distribution's
# default would be, and registering fails.
_LOCKED_BYTES = 1 << 30


def check_limits(
    *,
    world_size: int,
    infiniband: bool,
    open_files: int | None = None,
    locked_bytes: int | None = None,
) -> list[Finding]:
    """Limits of this process, which its children inherit, unless they are given (-1: none)."""
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
