"""The ends of processes: exit codes in words, and an exit without Python's teardown."""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import sys
import threading
from typing import NoReturn


def describe_exit(code: int) -> str:
    """Return how a process ended: "exit code 7", "SIGSEGV"; for SIGKILL also who may have sent it.

    `code` is negative for a signal."""
    if code >= 0:
        return f"exit code {code}"
    name = next((each.name for each in signal.Signals if each == -code), f"signal {-code}")
    return f"{name}, which the kernel sends if memory runs out" if name == "SIGKILL" else name


def end_at_once(code: int) -> NoReturn:
    """Exit after other threads and the exit handlers, as Python does, but without tearing down its
    modules: with vLLM, Megatron and torch that takes seconds of each rank."""
    with contextlib.suppress(BrokenPipeError):  # the reader of a pipe may stop early
        threading._shutdown()  # type: ignore[attr-defined]  # ends idle executors before it waits
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)
