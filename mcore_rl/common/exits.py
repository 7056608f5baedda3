"""Exit codes of processes, in words."""

from __future__ import annotations

import signal


def describe_exit(code: int) -> str:
    """Return how a process ended: "exit code 7", "SIGSEGV"; for SIGKILL also who may have sent it.

    `code` is negative for a signal."""
    if code >= 0:
        return f"exit code {code}"
    name = next((each.name for each in signal.Signals if each == -code), f"signal {-code}")
    return f"{name}, which the kernel sends if memory runs out" if name == "SIGKILL" else name
