"""Diagnosis of a rank that was killed: its stage, and whether memory ran out.

A rank writes its stage into a file of the launcher's temporary folder, which survives SIGKILL. The
launcher compares the kernel's out-of-memory counters with their values at its start.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Mapping
from pathlib import Path

from mcore_rl.common.agreement import LAUNCHER
from mcore_rl.common.machine import control_groups

_NOTE_BYTES = 120
_note: tuple[int, int] | None = None  # process id, descriptor of its note
THE_GROUP, THE_MACHINE = "this job's control group", "this machine"


def note_stage(stage: str) -> None:
    """Note that this process is in `stage`, for a launcher that finds it killed. Never raises."""
    global _note
    if LAUNCHER not in os.environ:
        return
    with contextlib.suppress(OSError):
        if _note is None or _note[0] != os.getpid():  # a fork opens its own note
            flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
            _note = os.getpid(), os.open(_note_of(os.environ["TMPDIR"], os.getpid()), flags, 0o600)
        os.pwrite(_note[1], stage.encode()[:_NOTE_BYTES].ljust(_NOTE_BYTES), 0)


def noted_stage(folder: str | Path, pid: int) -> str:
    """Return the last note of process `pid`, whose temporary folder was `folder`; "" if none."""
    with contextlib.suppress(OSError):
        return _note_of(folder, pid).read_bytes().decode(errors="replace").strip()
    return ""


def _note_of(folder: str | Path, pid: int) -> Path:
    return Path(folder) / f"stage.{pid}"


def memory_kills(root: Path = Path("/")) -> dict[str, int]:
    """Return how many processes the out-of-memory killer has ended, if the kernel reports it.

    `THE_GROUP` counts this process's control group (v2: with its descendants), `THE_MACHINE` all.
    """
    groups = itertools.islice(control_groups(root), 1)  # the innermost one that exists
    names = ("memory.events", "memory.oom_control")  # of version 2 and 1
    places = {
        THE_MACHINE: [root / "proc/vmstat"],
        THE_GROUP: [group / name for group in groups for name in names],
    }
    kills = {}
    for whose, files in places.items():
        for file in files:
            count = _count(file)
            if count is not None:
                kills[whose] = count
                break
    return kills


def _count(file: Path) -> int | None:
    with contextlib.suppress(OSError, ValueError):
        for line in file.read_text(encoding="utf-8").splitlines():
            name, _, value = line.partition(" ")
            if name == "oom_kill":
                return int(value)
    return None


def describe_kills(
    stages: Mapping[int, str], before: Mapping[str, int], after: Mapping[str, int]
) -> str:
    """Describe ranks that SIGKILL ended, rank -> stage, and whether memory ran out.

    `before` and `after` are counters of `memory_kills`. Returns "" if neither has happened.
    """
    ranks = ", ".join(
        f"rank {n}{f' (in stage {stage})' if stage else ''}" for n, stage in stages.items()
    )
    who = f"SIGKILL ended {ranks}" if stages else "a process of this run was killed"
    for whose in (THE_GROUP, THE_MACHINE):
        risen = after.get(whose, 0) - before.get(whose, 0)
        if whose in before and risen > 0:
            return (
                f"{who}: memory ran out, since the out-of-memory counter of {whose} rose by "
                f"{risen}; compare the host memory that `mcore-rl plan` prints with what is there, "
                "and take fewer ranks a machine, a larger machine or a larger limit"
            )
    if not stages:
        return ""
    if not before:
        return f"{who}; out-of-memory counters cannot be read here: memory may have run out"
    return f"{who}; no out-of-memory counter rose: something else sent it"
