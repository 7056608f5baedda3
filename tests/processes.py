"""Processes that tests look for."""

from __future__ import annotations

import contextlib

import psutil


def lives(process: psutil.Process | int) -> bool:
    """Whether it has not ended. An orphan that has ended may be reaped a second later."""
    with contextlib.suppress(psutil.NoSuchProcess):
        found = psutil.Process(process) if isinstance(process, int) else process
        return bool(found.is_running() and found.status() != psutil.STATUS_ZOMBIE)
    return False
