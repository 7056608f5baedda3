"""The rights that a process of a user's code gives up before it runs that code.

On systems other than Linux, and on older kernels, missing parts are skipped. `confine` drops far
more, for code of a model.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import struct
import sys

from mcore_rl.isolation.confine import (
    CAPABILITY_VERSION_3,
    PR_SET_CHILD_SUBREAPER,
    PR_SET_NO_NEW_PRIVS,
    PR_SET_PDEATHSIG,
    SCOPE_SIGNALS,
    landlock_restrict,
    landlock_ruleset,
)

# Memory that libraries map but do not use: code, and reserves of allocators and thread pools.
_ADDRESS_SPACE_MARGIN_BYTES = 16 << 30

# To inspect any process and to raise one's own limits, which only root can: CAP_SYS_PTRACE,
# CAP_SYS_ADMIN, CAP_SYS_RESOURCE, CAP_PERFMON.
_CAPABILITIES = (19, 21, 24, 38)
_MAKE_BLOCK_DEVICE = 1 << 11  # linux/landlock.h


def limit_memory(limit_bytes: int) -> None:
    """Refuse memory beyond `limit_bytes` from here on, permanently; 0 sets no limit.

    RLIMIT_DATA counts private writable memory. RLIMIT_AS also counts what numpy or torch map and
    never touch; it is set higher, for shared memory, which RLIMIT_DATA omits. Both apply to each
    process that a user's code starts.
    """
    if limit_bytes == 0:
        return
    _lower(resource.RLIMIT_DATA, limit_bytes)
    _lower(resource.RLIMIT_AS, limit_bytes + _ADDRESS_SPACE_MARGIN_BYTES)


def write_no_core() -> None:
    """Disable core files: the memory of a crashed process holds prompts and answers."""
    _lower(resource.RLIMIT_CORE, 0)


def drop_privileges() -> None:
    """Drop root's capabilities to undo the other limits, also for programs started from here."""
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None)
    libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    header = struct.pack("=Ii", CAPABILITY_VERSION_3, 0)
    # Effective, permitted, inheritable: their low words, then their high ones.
    sets = ctypes.create_string_buffer(24)
    if libc.capget(ctypes.c_char_p(header), sets) != 0:
        return
    words = list(struct.unpack("=6I", sets.raw))
    for number in _CAPABILITIES:
        high, bit = divmod(number, 32)
        for index in range(3):
            words[3 * high + index] &= ~(1 << bit)
    libc.capset(ctypes.c_char_p(header), ctypes.c_char_p(struct.pack("=6I", *words)))


def see_no_other_process(*, send_no_signals: bool = False) -> None:
    """Remove this process's access to other processes' memory and environment under /proc.

    Call `drop_privileges` first. With `send_no_signals`, and Linux 6.12 or later, it can also
    signal only the processes that it starts from here on.

    A process under Landlock may inspect only processes under the same rules; otherwise
    /proc/PID/environ of the trainer would reveal its secrets. These rules forbid only the creation
    of block devices, as an empty set is not allowed. Kernels without Landlock restrict nothing.
    """
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None)
    scopes = SCOPE_SIGNALS if send_no_signals else 0
    ruleset = landlock_ruleset(libc, files=_MAKE_BLOCK_DEVICE, network=0, scopes=scopes)
    if ruleset >= 0:
        landlock_restrict(libc, ruleset)


def die_with_parent(parent: int, by: signal.Signals = signal.SIGKILL) -> None:
    """End this process with `parent`, even if it hangs and would not notice.

    The kernel also sends `by` when the thread ends that has started this process.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, by)
    if os.getppid() != parent:  # it ended before the call above
        os._exit(1)


def adopt_orphans() -> None:
    """Make this process the parent of descendants that lose theirs."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _lower(kind: int, value: int) -> None:
    """Lower both limits, so that it cannot be undone; a limit that is already lower stays."""
    _, hard = resource.getrlimit(kind)
    if hard != resource.RLIM_INFINITY:
        value = min(value, hard)
    resource.setrlimit(kind, (value, value))
