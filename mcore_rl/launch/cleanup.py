"""Ends the processes that a run leaves behind.

    python cleanup.py MARK FOLDER

The launcher calls `end_processes` before it exits, and starts this script for the case that it is
killed itself: once standard input, a pipe from the launcher, closes, the script ends the processes
whose environment has MARK, and removes FOLDER. It imports only the standard library, so that it
starts at once and takes little memory.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

ENDING_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
_GRACE_SECONDS = 3
_TRACKER_SECONDS = 20
_LIMIT_SECONDS = 60


def end_processes(find: Callable[[], list[int]]) -> None:
    """Kill the processes that `find` returns, until it returns none or a minute has passed.

    They have a few seconds to end by themselves. multiprocessing's resource trackers have more
    time: they remove the shared memory of dead processes, and then end.
    """
    started = time.monotonic()
    while (left := find()) and (passed := time.monotonic() - started) < _LIMIT_SECONDS:
        for pid in left:
            if passed > (_TRACKER_SECONDS if _is_tracker(pid) else _GRACE_SECONDS):
                with contextlib.suppress(OSError):  # it has ended
                    os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)


def marked(mark: str) -> list[int]:
    """Return the other processes whose environment has `mark` (NAME=VALUE)."""
    pids = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended, or belongs to another user
            if mark.encode() in (folder / "environ").read_bytes().split(b"\0"):
                pids.append(int(folder.name))
    return [pid for pid in pids if pid != os.getpid()]


def _is_tracker(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return b"multiprocessing.resource_tracker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False


def main(mark: str, folder: str) -> None:
    for number in ENDING_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    sys.stdin.buffer.read()
    end_processes(lambda: marked(mark))
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
