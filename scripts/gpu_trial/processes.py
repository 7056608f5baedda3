"""End a stage with everything that it started, and record its memory."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

MARK = "MCORE_RL_GPU_TRIAL"  # in the environment of every process of a stage
# Time for a launcher to end its ranks in order and clean up shared memory.
GRACE_SECONDS = 20.0


def processes_of(mark: str) -> list[int]:
    """Return the living processes whose environment has the mark, in any session."""
    wanted = f"{MARK}={mark}".encode()
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if wanted in (folder / "environ").read_bytes().split(b"\0"):
                state = re.search(r"^State:\s+(\S)", (folder / "status").read_text(), re.MULTILINE)
                if state and state[1] not in "ZX" and int(folder.name) != os.getpid():
                    found.append(int(folder.name))
    return found


def end_all(process: subprocess.Popen[Any], mark: str, grace_seconds: float) -> None:
    """End the process and all processes with its mark: by SIGTERM, then by SIGKILL.

    Returns when none of them lives.
    """
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)  # launchers end their ranks by themselves
    deadline = time.monotonic() + grace_seconds
    while processes_of(mark) and time.monotonic() < deadline:
        process.poll()
        time.sleep(0.1)
    while left := processes_of(mark):
        for pid in left:
            _kill(pid, signal.SIGKILL)
        process.poll()
        time.sleep(0.05)
    process.wait()


def _kill(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def memory_reader() -> Callable[[], list[int]]:
    """Return a function that returns bytes in use: of each GPU, or of the host without a GPU.

    The driver reports them, so that memory of NCCL, vLLM, CUDA and other processes counts, too.
    """
    if _gpu_bytes() is not None:
        return lambda: _gpu_bytes() or []
    return lambda: [_host_bytes()]


def _gpu_bytes() -> list[int] | None:
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
        return [int(line) << 20 for line in done.stdout.split()]
    except (OSError, ValueError, subprocess.SubprocessError):
        return None


def _host_bytes() -> int:
    text = Path("/proc/meminfo").read_text()
    found = dict(re.findall(r"^(\w+):\s+(\d+) kB", text, re.MULTILINE))
    return (int(found["MemTotal"]) - int(found["MemAvailable"])) << 10


class Memory:
    """The bytes in use before a stage, and the highest bytes since."""

    def __init__(self, read: Callable[[], list[int]]) -> None:
        self._read = read
        self._before = self._highest = read()

    def sample(self) -> None:
        now = self._read()
        if len(now) == len(self._highest):  # otherwise the driver did not answer
            self._highest = [max(pair) for pair in zip(self._highest, now, strict=True)]

    def found(self) -> dict[str, list[int]]:
        return {"before_bytes": self._before, "highest_bytes": self._highest}
