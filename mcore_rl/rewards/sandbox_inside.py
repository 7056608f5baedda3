"""The program that runs a policy's Python in a process of its own; started by `sandbox`.

    python -I sandbox_inside.py DESCRIPTOR_OF_REQUESTS DESCRIPTOR_OF_ANSWERS

`isolation.confine` has confined it before. It gives up connections and other processes once more,
then runs the code, and tests behind it. It is run as a file, where this package may not be found:
it imports the standard library alone.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import platform
import struct
import sys
import traceback
from typing import BinaryIO

_CLONE_THREAD = 0x00010000  # linux/sched.h
_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP = 38, 22
_SECCOMP_MODE_FILTER = 2

# linux/audit.h, and asm/unistd.h: socket, clone, fork, vfork, and those that both have.
_MACHINES = {
    "x86_64": (0xC000003E, {"socket": 41, "clone": 56, "fork": 57, "vfork": 58}),
    "aarch64": (0xC00000B7, {"socket": 198, "clone": 220}),
}
_IO_URING_SETUP, _CLONE3 = 425, 435
_ERRNO_EACCES, _ERRNO_ENOSYS, _ERRNO_EAGAIN = 13, 38, 11
_X32_BIT = 0x40000000


def main(requests: BinaryIO, answers: BinaryIO) -> None:
    """Serve one run: limits, code and tests."""

    def tell(**fields: object) -> None:
        answers.write(json.dumps(fields).encode() + b"\n")

    first = json.loads(requests.readline())
    fault = _give_up()
    tell(fault=fault)
    if fault is None:
        names: dict[str, object] = {"__name__": "__main__"}
        ran = _runs(first["code"], "<code>", names)
        tell(ran=ran)
        # Not here before: what the code can do to be told right, it does without the tests.
        while ran and "end" not in (test := json.loads(requests.readline())):
            passed = _runs(test["code"], "<test>", names)
            tell(test=test["number"], passed=passed, key=test["key"])
    tell(over=True)
    os._exit(0)  # whatever threads there are


def _runs(code: str, name: str, names: dict[str, object]) -> bool:
    """Whether it runs to its end; what it raises is written to standard error."""
    try:
        exec(compile(code, name, "exec"), names)
        return True
    except BaseException as error:
        with contextlib.suppress(BaseException):
            frames = error.__traceback__.tb_next if error.__traceback__ else None
            traceback.print_exception(type(error), error, frames)
        return False
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(BaseException):
                stream.flush()


# What it gives up -----------------------------------------------------------------------------


def _give_up() -> str | None:
    """Why the code cannot be kept from the network and from starting processes; None if it is.

    `isolation.confine` has confined this process before. What is refused here is refused whoever
    starts this program, with errors that Python knows how to tell.
    """
    if sys.platform != "linux":
        return "it is not Linux"
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    return _open_nothing(libc)


def _open_nothing(libc: ctypes.CDLL) -> str | None:
    """No socket and no process from here on, by a filter of system calls."""
    machine = platform.machine()
    if machine not in _MACHINES:
        return f"no filter of system calls is known for {machine}"
    architecture, calls = _MACHINES[machine]
    refused = {calls["socket"]: _ERRNO_EACCES, _IO_URING_SETUP: _ERRNO_ENOSYS}
    refused |= {_CLONE3: _ERRNO_ENOSYS}  # the C library then takes clone
    refused |= {calls[name]: _ERRNO_EAGAIN for name in ("fork", "vfork") if name in calls}
    program = _filter(architecture, refused, calls["clone"])
    lines = ctypes.create_string_buffer(program, len(program))
    header = struct.pack("=HxxxxxxQ", len(program) // 8, ctypes.addressof(lines))
    if libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.c_char_p(header), 0, 0) != 0:
        return f"the kernel takes no filter of system calls (errno {ctypes.get_errno()})"
    return None


def _filter(architecture: int, refused: dict[int, int], clone: int) -> bytes:
    """Of classic BPF: a call by its number to what becomes of it."""
    load, equal, bit_set, at_least, give = 0x20, 0x15, 0x45, 0x35, 0x06
    allow, kill, deny = 0x7FFF0000, 0x80000000, 0x00050000
    lines = [
        (load, 0, 0, 4),  # seccomp_data.arch
        (equal, 1, 0, architecture),
        (give, 0, 0, kill),
        (load, 0, 0, 0),  # seccomp_data.nr
        (at_least, 0, 1, _X32_BIT),
        (give, 0, 0, kill),
    ]
    for number, errno in refused.items():
        lines += [(equal, 0, 1, number), (give, 0, 0, deny | errno)]
    lines += [
        (equal, 0, 3, clone),
        (load, 0, 0, 16),  # the low half of its first argument
        (bit_set, 1, 0, _CLONE_THREAD),
        (give, 0, 0, deny | _ERRNO_EAGAIN),
        (give, 0, 0, allow),
    ]
    return b"".join(struct.pack("=HBBI", *line) for line in lines)


if __name__ == "__main__":
    with open(int(sys.argv[1]), "rb") as _requests, open(int(sys.argv[2]), "wb", 0) as _answers:
        main(_requests, _answers)
