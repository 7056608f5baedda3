"""Run a stage's process to its end or its limit, with everything that it started; its memory."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

MARK = "MCORE_RL_GPU_TRIAL"  # in the environment of every process of a stage
# Time for a launcher to end its ranks in order and clean up shared memory.
GRACE_SECONDS = 20.0
_POLL_SECONDS = 0.5


def run_limited(
    command: Sequence[str],
    *,
    cwd: Path,
    log: Path,
    environment: Mapping[str, str],
    limit_seconds: float,
    grace_seconds: float = GRACE_SECONDS,
    now: Callable[[], float] = time.monotonic,
) -> dict[str, Any]:
    """Run a command with its output in `log`; afterwards nothing that it started lives.

    Returns `exit_code`, `seconds`, `limit_seconds`, `timed_out`, `left_processes` (those that
    outlived the command) and `memory_bytes` (before, and the highest, of each device).
    """
    mark, started = f"{os.getpid()}-{time.time_ns()}", now()
    before = highest = memory_in_use()
    with log.open("w") as output:
        process = subprocess.Popen(
            command,
            cwd=cwd,
            env={**environment, MARK: mark},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            while process.poll() is None and now() - started <= limit_seconds:
                used = memory_in_use()
                if len(used) == len(highest):  # otherwise the driver did not answer
                    highest = [max(pair) for pair in zip(highest, used)]  # noqa: B905 (Python 3.9)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(timeout=_POLL_SECONDS)
        finally:
            timed_out = process.poll() is None
            left = processes_of(mark)
            end_all(process, mark, grace_seconds)
    return {
        "exit_code": process.returncode,
        "seconds": round(now() - started, 1),
        "limit_seconds": limit_seconds,
        "timed_out": timed_out,
        "left_processes": [] if timed_out else left,
        "memory_bytes": {"before": before, "highest": highest},
    }


def processes_of(mark: str) -> list[int]:
    """Return the living processes whose environment has the mark, in any session."""
    wanted = f"{MARK}={mark}".encode()
    pids = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if wanted in (folder / "environ").read_bytes().split(b"\0"):
                state = re.search(r"^State:\s+(\S)", (folder / "status").read_text(), re.MULTILINE)
                if state and state[1] not in "ZX" and int(folder.name) != os.getpid():
                    pids.append(int(folder.name))
    return pids


def end_all(process: subprocess.Popen[Any], mark: str, grace_seconds: float) -> None:
    """End the process and all processes with its mark: by SIGTERM, then by SIGKILL."""
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)  # launchers end their ranks by themselves
    deadline = time.monotonic() + grace_seconds
    while processes_of(mark) and time.monotonic() < deadline:
        process.poll()
        time.sleep(0.1)
    while left := processes_of(mark):
        for pid in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        process.poll()
        time.sleep(0.05)
    process.wait()


def memory_in_use() -> list[int]:
    """Return bytes in use by all programs: of each GPU by its driver, or of the host without one.

    So memory of NCCL, vLLM, CUDA and other processes counts, too.
    """
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
        return [int(line) << 20 for line in done.stdout.split()]
    except (OSError, ValueError, subprocess.SubprocessError):
        text = Path("/proc/meminfo").read_text()
        memory = dict(re.findall(r"^(\w+):\s+(\d+) kB", text, re.MULTILINE))
        return [(int(memory["MemTotal"]) - int(memory["MemAvailable"])) << 10]
