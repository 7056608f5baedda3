"""A process that `mcore_rl.launch` starts to clean up after a launcher that is killed.

    python guard.py MARK FOLDER

It reads standard input, a pipe from the launcher, until the launcher is gone. Then it kills the
processes whose environment has MARK, and removes FOLDER. The kernel ends ranks and reward workers;
checkpoint writers and processes that a reward started would remain. The script imports only the
standard library, so it starts at once and takes little memory.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import time
from pathlib import Path

# As in the launcher: multiprocessing's trackers remove a dead rank's shared memory, then end.
_TRACKER_SECONDS = 20
_LIMIT_SECONDS = 60


def marked(mark: str) -> dict[int, bool]:
    """Return the processes whose environment has `mark` (NAME=VALUE), and if each is a tracker."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended, or belongs to another user
            if mark.encode() in (folder / "environ").read_bytes().split(b"\0"):
                command = (folder / "cmdline").read_bytes()
                found[int(folder.name)] = b"multiprocessing.resource_tracker" in command
    found.pop(os.getpid(), None)
    return found


def end(mark: str) -> None:
    """Kill the processes with the mark; return when none is left, or after a minute."""
    started = time.monotonic()
    while (left := marked(mark)) and time.monotonic() - started < _LIMIT_SECONDS:
        has_time = time.monotonic() - started < _TRACKER_SECONDS
        for pid, is_tracker in left.items():
            if not (is_tracker and has_time):
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
        time.sleep(0.1)


def main(mark: str, folder: str) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)
    sys.stdin.buffer.read()
    end(mark)
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
