"""What a worker process of a reward pool takes from itself before it runs a user's code.

Linux does all of this; elsewhere the parts that the system lacks are left out.
"""

from __future__ import annotations

import ctypes
import resource
import struct
import sys

# What libraries map beyond what they use: code, and what allocators and thread pools reserve.
_ADDRESS_SPACE_MARGIN_BYTES = 16 << 30

# To look into any process, and to raise one's own limits; only root has them.
_CAPABILITIES = {
    "CAP_SYS_PTRACE": 19,
    "CAP_SYS_ADMIN": 21,
    "CAP_SYS_RESOURCE": 24,
    "CAP_PERFMON": 38,
}
_CAPABILITY_VERSION_3 = 0x20080522  # linux/capability.h

_PR_SET_NO_NEW_PRIVS = 38  # linux/prctl.h
_LANDLOCK_CREATE_RULESET = 444  # these two are the same on all architectures
_LANDLOCK_RESTRICT_SELF = 446
_LANDLOCK_ACCESS_FS_MAKE_BLOCK = 1 << 11


def limit_memory(limit_bytes: int) -> None:
    """From here on memory beyond `limit_bytes` is refused, for good; 0 sets no limit.

    RLIMIT_DATA is what counts: private memory that can be written, which is what a function fills.
    RLIMIT_AS alone would also count what numpy or torch map and never touch, so that a limit that
    they start under would be none. It is set to more, for shared memory, which the other leaves
    out. Both are those of one process: what a reward starts itself has the same limits anew.
    """
    if limit_bytes == 0:
        return
    _lower(resource.RLIMIT_DATA, limit_bytes)
    _lower(resource.RLIMIT_AS, limit_bytes + _ADDRESS_SPACE_MARGIN_BYTES)


def write_no_core() -> None:
    """A reward that crashes leaves no file of its memory, which holds prompts and answers."""
    _lower(resource.RLIMIT_CORE, 0)


def drop_privileges() -> None:
    """Give up what root could take the other limits back by, also in programs started from here."""
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    header = struct.pack("=Ii", _CAPABILITY_VERSION_3, 0)
    # Effective, permitted, inheritable: their low words, then their high ones.
    sets = ctypes.create_string_buffer(24)
    if libc.capget(ctypes.c_char_p(header), sets) != 0:
        return
    words = list(struct.unpack("=6I", sets.raw))
    for number in _CAPABILITIES.values():
        high, bit = divmod(number, 32)
        for index in range(3):
            words[3 * high + index] &= ~(1 << bit)
    libc.capset(ctypes.c_char_p(header), ctypes.c_char_p(struct.pack("=6I", *words)))


def see_no_other_process() -> None:
    """Take from this process the sight of others' memory and environment under /proc.

    Call `drop_privileges` first.

    The trainer has the same user, whose secrets would otherwise stand in /proc/PID/environ. A
    process under Landlock may look only into processes under the same rules; these here forbid
    nothing but to make block devices, as there is no empty set. A kernel before 5.13, or one that
    was started without Landlock, leaves all as it is.
    """
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None)
    rules = struct.pack("=Q", _LANDLOCK_ACCESS_FS_MAKE_BLOCK)
    ruleset = libc.syscall(
        _LANDLOCK_CREATE_RULESET, ctypes.c_char_p(rules), ctypes.c_size_t(len(rules)), 0
    )
    if ruleset < 0:
        return
    libc.syscall(_LANDLOCK_RESTRICT_SELF, ruleset, 0)
    libc.close(ruleset)


def _lower(kind: int, value: int) -> None:
    """Both limits, so that it cannot be taken back; a lower one that is there already stays."""
    _, hard = resource.getrlimit(kind)
    if hard != resource.RLIM_INFINITY:
        value = min(value, hard)
    resource.setrlimit(kind, (value, value))
