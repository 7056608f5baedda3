"""Outlives a launcher that is killed, and ends what that has left; `mcore_rl.launch` starts it.

    python guard.py MARK FOLDER

Reads standard input, a pipe from the launcher, to its end, which comes when the launcher is gone.
Then it kills the processes whose environment has MARK, and removes FOLDER. The kernel ends ranks
and workers of rewards by itself; writers of checkpoints and what a reward has started are left.
Nothing but the standard library is imported: it starts at once and takes little memory.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import time
from pathlib import Path

# As the launcher has it: multiprocessing's trackers remove a dead rank's shared memory, then end.
_TRACKER_SECONDS = 20
_LIMIT_SECONDS = 60


def marked(mark: str) -> dict[int, bool]:
    """The processes whose environment has `mark`, NAME=VALUE; whether each is a tracker."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            if mark.encode() in (folder / "environ").read_bytes().split(b"\0"):
                command = (folder / "cmdline").read_bytes()
                found[int(folder.name)] = b"multiprocessing.resource_tracker" in command
    found.pop(os.getpid(), None)
    return found


def end(mark: str) -> None:
    """Return when no process with the mark is left, or after a minute."""
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
