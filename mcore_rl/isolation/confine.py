"""The first program of a confined process: drops its rights, then runs another program.

    python -I -B confine.py SETTINGS PROGRAM ARGUMENT...

SETTINGS is the JSON of `levels.settings`. Without PROGRAM it prints `CONFINED` and ends: a probe.
If any right cannot be dropped, it exits with code 1 and a traceback and runs nothing. It imports
only the standard library, as this package may not be found where it runs.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import struct
import sys
from collections.abc import Sequence
from typing import Any

CONFINED = "confined"

# linux/prctl.h
PR_SET_PDEATHSIG, PR_SET_SECCOMP, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 1, 22, 36, 38
_SECCOMP_MODE_FILTER = 2
_SIGKILL = 9
CAPABILITY_VERSION_3 = 0x20080522  # linux/capability.h
_MAX_DESCRIPTORS = 128
_MAX_STACK_BYTES = 64 << 20
_MAX_PENDING_SIGNALS = 64  # the kernel counts all processes of a user together
# Libraries map memory that they never touch. Shared memory, which this would leave room for, is
# refused.
_ADDRESS_SPACE_MARGIN_BYTES = 4 << 30

# linux/landlock.h; these call numbers are the same on all architectures.
_LANDLOCK_CREATE_RULESET, _LANDLOCK_ADD_RULE, _LANDLOCK_RESTRICT_SELF = 444, 445, 446
_LANDLOCK_CREATE_RULESET_VERSION = 1
_LANDLOCK_RULE_PATH_BENEATH = 1
_READ_FILE, _READ_FOLDER, _WRITE_FILE = 1 << 2, 1 << 3, 1 << 1
_ACCESS_OF_FILES = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1, 5: (1 << 16) - 1}
_ACCESS_OF_NETWORK, _ABI_WITH_NETWORK = 0b11, 4
SCOPE_SOCKETS, SCOPE_SIGNALS, _ABI_WITH_SCOPES = 0b01, 0b10, 6  # Linux 6.12


def main(settings: dict[str, Any], program: str | None, arguments: Sequence[str]) -> None:
    """Confine this process permanently and run `program` in it as `__main__`."""
    source = ""
    if program is not None:
        with open(program) as file:
            source = file.read()
    libc = ctypes.CDLL(None, use_errno=True)
    die_with(libc, settings["parent"])
    close_all_but(settings["descriptors"])
    limit(settings["memory_bytes"], settings["disk_bytes"])
    _checked(libc, libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")
    drop_capabilities(libc)
    if settings["readable"] is not None:
        restrict_files(libc, settings["readable"], settings["writable"])
    install_filter(libc, settings["filter"], settings["own_pid"])
    if program is None:
        print(CONFINED, flush=True)
        return
    sys.argv = [program, *arguments]
    exec(compile(source, program, "exec"), {"__name__": "__main__", "__file__": program})


def die_with(libc: ctypes.CDLL, parent: int | None) -> None:
    """Have the kernel kill this process when its parent ends; the filter keeps code from changing
    that. None: a namespace ends with its first process, which in turn ends with its parent."""
    if parent is not None:
        _checked(libc, libc.prctl(PR_SET_PDEATHSIG, _SIGKILL, 0, 0, 0), "a parent's death")
        if os.getppid() != parent:  # it has already ended
            os._exit(1)


def close_all_but(descriptors: Sequence[int]) -> None:
    """Close all descriptors except the standard streams and `descriptors`."""
    last = 2
    for kept in sorted(descriptors):
        os.closerange(last + 1, kept)
        last = max(last, kept)
    os.closerange(last + 1, resource.getrlimit(resource.RLIMIT_NOFILE)[0])


def limit(memory_bytes: int, disk_bytes: int) -> None:
    """Lower hard and soft limits; limits that are already lower stay."""
    for kind, most in (
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_FSIZE, disk_bytes),
        (resource.RLIMIT_DATA, memory_bytes),
        (resource.RLIMIT_AS, memory_bytes + _ADDRESS_SPACE_MARGIN_BYTES),
        (resource.RLIMIT_STACK, _MAX_STACK_BYTES),
        (resource.RLIMIT_NOFILE, _MAX_DESCRIPTORS),
        (resource.RLIMIT_SIGPENDING, _MAX_PENDING_SIGNALS),
    ):
        soft, hard = (
            most if there == resource.RLIM_INFINITY else min(most, there)
            for there in resource.getrlimit(kind)
        )
        resource.setrlimit(kind, (soft, hard))


def drop_capabilities(libc: ctypes.CDLL) -> None:
    """Drop all capabilities, root's too."""
    header = struct.pack("=Ii", CAPABILITY_VERSION_3, 0)
    none = ctypes.c_char_p(bytes(24))
    _checked(libc, libc.capset(ctypes.c_char_p(header), none), "capabilities")


def restrict_files(libc: ctypes.CDLL, readable: Sequence[str], writable: Sequence[str]) -> None:
    """Use Landlock to allow reading only `readable`, writing only in `writable`, and no TCP; where
    the kernel can, also no signals to other processes and no abstract sockets of theirs."""
    version = landlock_version(libc)
    _checked(libc, version, "Landlock")
    files = max(access for abi, access in _ACCESS_OF_FILES.items() if abi <= version)
    ruleset = landlock_ruleset(
        libc, files=files, network=_ACCESS_OF_NETWORK, scopes=SCOPE_SOCKETS | SCOPE_SIGNALS
    )
    _checked(libc, ruleset, "Landlock")
    for paths, access in ((readable, _READ_FILE | _READ_FOLDER), (writable, files)):
        for path in paths:
            _allow(libc, ruleset, path, access)
    _allow(libc, ruleset, os.devnull, _READ_FILE | _WRITE_FILE)
    _checked(libc, landlock_restrict(libc, ruleset), "Landlock")


def landlock_version(libc: ctypes.CDLL) -> int:
    """Return the kernel's version of Landlock; negative without it."""
    version: int = libc.syscall(
        _LANDLOCK_CREATE_RULESET, None, ctypes.c_size_t(0), _LANDLOCK_CREATE_RULESET_VERSION
    )
    return version


def landlock_ruleset(libc: ctypes.CDLL, *, files: int, network: int, scopes: int) -> int:
    """Return a set of rules that refuses these accesses; negative for an error. What the kernel
    does not know yet is left out."""
    version = landlock_version(libc)
    rules = struct.pack("=Q", files)
    if version >= _ABI_WITH_NETWORK:
        rules += struct.pack("=Q", network)
    if version >= _ABI_WITH_SCOPES:
        rules += struct.pack("=Q", scopes)
    ruleset: int = libc.syscall(
        _LANDLOCK_CREATE_RULESET, ctypes.c_char_p(rules), ctypes.c_size_t(len(rules)), 0
    )
    return ruleset


def landlock_restrict(libc: ctypes.CDLL, ruleset: int) -> int:
    """Apply a set of rules to this process and close it; negative for an error."""
    code: int = libc.syscall(_LANDLOCK_RESTRICT_SELF, ruleset, 0)
    os.close(ruleset)
    return code


def _allow(libc: ctypes.CDLL, ruleset: int, path: str, access: int) -> None:
    try:
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return  # the path does not exist
    if not os.path.isdir(path):
        access &= _READ_FILE | _WRITE_FILE
    rule = ctypes.c_char_p(struct.pack("=Qi", access, descriptor))
    code = libc.syscall(_LANDLOCK_ADD_RULE, ruleset, _LANDLOCK_RULE_PATH_BENEATH, rule, 0)
    _checked(libc, code, "Landlock")
    os.close(descriptor)


def install_filter(libc: ctypes.CDLL, program: str, own_pid: int) -> None:
    """Install the filter `program` (hex), with this process's id, known only here, for
    `own_pid`."""
    lines = b"".join(
        struct.pack("=HBBI", *line, os.getpid() if value == own_pid else value)
        for *line, value in struct.iter_unpack("=HBBI", bytes.fromhex(program))
    )
    kept = ctypes.create_string_buffer(lines, len(lines))
    header = struct.pack("=HxxxxxxQ", len(lines) // 8, ctypes.addressof(kept))
    code = libc.prctl(PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.c_char_p(header), 0, 0)
    _checked(libc, code, "the filter of system calls")


def _checked(libc: ctypes.CDLL, code: int, what: str) -> None:
    if code < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), sys.argv[2] if sys.argv[2:] else None, sys.argv[3:])
