"""Processes that tests look for."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable

import psutil


def lives(process: psutil.Process | int) -> bool:
    """Whether it has not ended. An orphan that has ended may be reaped a second later."""
    with contextlib.suppress(psutil.NoSuchProcess):
        found = psutil.Process(process) if isinstance(process, int) else process
        return bool(found.is_running() and found.status() != psutil.STATUS_ZOMBIE)
    return False


def wait_until_all_have_ended(pids: Iterable[int]) -> None:
    deadline = time.monotonic() + 120
    left = list(pids)
    while left := [pid for pid in left if lives(pid)]:
        assert time.monotonic() < deadline, f"after 120 s these still run: {left}"
        time.sleep(0.05)
