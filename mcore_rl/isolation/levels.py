"""The levels of confinement, best first, and the protections that each of them lacks.

A program always gets the system-call filter (`seccomp`), its own limits, and a supervisor that it
cannot reach; levels differ in how they protect files.
"""

from __future__ import annotations

import functools
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mcore_rl.common.errors import UsageError
from mcore_rl.isolation.seccomp import MACHINES, OWN_PID, allow_list

# The promises of docs/using/security.md about python_sandbox.
PROTECTIONS = {
    "files": "it reads and changes no file but Python's own and those in its folder",
    "signals": "it signals, stops, limits and traces no other process",
    "lifetime": "it ends with its time, its worker, the pool and the launcher",
    "network": "it opens no connection",
    "memory": "it takes no more memory than it may",
    "disk": "it writes no more than it may",
}

BUBBLEWRAP, LANDLOCK, SECCOMP = "bubblewrap", "landlock", "seccomp"

# The code's folder in a mount namespace; it need not exist outside.
_FOLDER = "/sandbox"
_SYSTEM = ("/usr/lib", "/usr/lib32", "/usr/lib64", "/lib", "/lib32", "/lib64")
_FILES = ("/etc/ld.so.cache", "/etc/localtime", "/usr/share/zoneinfo")
_DEVICES = ("/dev/null", "/dev/full", "/dev/random", "/dev/urandom")  # /dev/zero maps to memory
_OF_PREFIX = ("bin", "lib", "lib64", "include", "pyvenv.cfg")


@dataclass(frozen=True, slots=True)
class Level:
    """One way to confine a program."""

    name: str
    lacks: frozenset[str]  # of PROTECTIONS
    remarks: str = ""


LEVELS = {
    level.name: level
    for level in (
        Level(BUBBLEWRAP, frozenset()),
        Level(
            LANDLOCK,
            frozenset(),
            "it can learn names, sizes and times of files, and write more than it may for some "
            "hundredths of a second",
        ),
        Level(SECCOMP, frozenset({"files", "memory", "disk"})),
    )
}


@functools.cache
def readable_paths() -> tuple[str, ...]:
    """Return the paths that Python and its packages need. A prefix may be the folder of a project,
    so only its installed folders are listed."""
    prefixes = (sys.prefix, sys.exec_prefix, sys.base_prefix, sys.base_exec_prefix)
    paths = {os.path.join(prefix, name) for prefix in prefixes for name in _OF_PREFIX}
    paths |= {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    paths |= {sys.executable, os.path.realpath(sys.executable), *_SYSTEM, *_FILES}
    kept: list[str] = []
    for path in sorted(map(os.path.normpath, paths)):
        if os.path.exists(path) and not any(Path(path).is_relative_to(each) for each in kept):
            kept.append(path)
    return tuple(kept)


def parse_accepted(text: str | None, flag: str) -> tuple[str, ...]:
    """Parse the protections that a flag allows to be missing. UsageError: a name is unknown."""
    names = tuple(name.strip() for name in text.split(",")) if text else ()
    for name in names:
        if name not in PROTECTIONS:
            raise UsageError(
                "is not a protection of python_sandbox",
                flag=f"{flag} {name}",
                remedy=f"choose from {', '.join(PROTECTIONS)}",
            )
    return names


def settings(
    level: str,
    *,
    folder: str | None,
    parent: int,
    descriptors: tuple[int, ...],
    memory_bytes: int,
    disk_bytes: int,
) -> dict[str, Any]:
    """Return the settings for `confine`. `folder` is None in a mount namespace, which has its own.

    RuntimeError: no system-call filter exists for this machine.
    """
    machine = platform.machine()
    if sys.platform != "linux" or machine not in MACHINES:
        raise RuntimeError(f"no filter of system calls is known for {sys.platform} on {machine}")
    by_landlock = level == LANDLOCK
    return {
        "parent": None if level == BUBBLEWRAP else parent,
        "descriptors": descriptors,
        "memory_bytes": memory_bytes,
        "disk_bytes": disk_bytes,
        "readable": (*readable_paths(), *_DEVICES) if by_landlock else None,
        "writable": [folder] if by_landlock else None,
        "filter": allow_list(machine, own_files=level == BUBBLEWRAP).hex(),
        "own_pid": OWN_PID,
    }


def environment(folder: str | None) -> dict[str, str]:
    """Return a confined program's environment, with one thread for each library."""
    home = folder or _FOLDER
    threads = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
    return {
        "PATH": os.defpath,
        "HOME": home,
        "TMPDIR": home,
        "LANG": "C.UTF-8",
        **dict.fromkeys(threads, "1"),
    }


@functools.cache
def _bwrap() -> tuple[str, bool]:
    """Return bwrap's path, and whether it can limit the size of a tmpfs."""
    path = shutil.which("bwrap")
    if path is None:
        raise FileNotFoundError("bwrap is not in PATH")
    shown = subprocess.run([path, "--help"], capture_output=True, text=True, check=False)
    return path, "--size" in shown.stdout + shown.stderr


def bubblewrap_command(programs: tuple[str, ...], disk_bytes: int, info: int) -> list[str]:
    """Return the start of a command that runs the rest in its own namespaces. Only
    `readable_paths()` and `programs` can be read there, and only an empty tmpfs written. bwrap
    describes the process inside on the descriptor `info`. FileNotFoundError: bwrap is missing."""
    path, has_size = _bwrap()
    command = [path, "--unshare-all", "--unshare-user", "--die-with-parent", "--new-session"]
    command += ["--cap-drop", "ALL", "--hostname", "sandbox", "--info-fd", str(info)]
    for place in readable_paths():
        if os.path.islink(place) and place in _SYSTEM:  # /lib, which is /usr/lib
            target = os.path.relpath(os.path.realpath(place), os.path.dirname(place))
            command += ["--symlink", target, place]
        else:
            command += ["--ro-bind", place, place]
    for program in programs:
        command += ["--ro-bind", program, program]
    for device in _DEVICES:
        command += ["--dev-bind", device, device]
    # A little more than a file may have, so that the file limit is reported first.
    size = ["--size", str(disk_bytes + (1 << 20))] if has_size else []
    command += [*size, "--tmpfs", _FOLDER, "--remount-ro", "/", "--chdir", _FOLDER, "--clearenv"]
    for name, value in environment(None).items():
        command += ["--setenv", name, value]
    return [*command, "--"]


def folder_seen_from_outside(pid: int) -> Path:
    """Return the path from outside to the working folder of a process in a mount namespace."""
    return Path(f"/proc/{pid}/root{_FOLDER}")
