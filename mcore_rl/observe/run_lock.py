"""Locks on the folders that a run writes into: two runs would overwrite each other's files.

A folder is locked by a kernel lock (`flock`) on a file in it, which is released whenever the
process ends; the file itself stays and has no meaning. On NFS the server holds the lock, and
releases it once it has given up a vanished machine. A file system without locks causes a warning.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import socket
import time
from pathlib import Path

from mcore_rl.common.errors import UsageError

logger = logging.getLogger(__name__)

LOCK = ".run.lock"
# Descriptors by folder; they stay open until this process ends.
_held: dict[Path, int] = {}
_NO_LOCKS = frozenset({errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP})


def make_directory(run_name: str) -> Path:
    """Create a new folder, `runs/<run_name>-<date>-<time>.<milliseconds>`."""
    while True:
        now = time.time()
        moment = time.strftime("%Y%m%d-%H%M%S", time.localtime(now))
        folder = Path("runs") / f"{run_name}-{moment}.{int(now % 1 * 1000):03d}"
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            time.sleep(0.001)
            continue
        except OSError as error:
            raise UsageError(
                f": {folder} cannot be made ({error.strerror})",
                flag=f"--rl-run-name {run_name}",
                remedy="give --rl-run-dir",
            ) from error
        return folder


def hold(folder: Path, flag: str) -> None:
    """Lock `folder`, which `flag` names, until this process ends; create it if it is missing.

    Raises UsageError if another run has locked it. A process may call it more than once.
    """
    real = Path(os.path.realpath(folder))
    if real in _held:
        return
    try:
        real.mkdir(parents=True, exist_ok=True)
        _held[real] = _locked(real / LOCK)
    except BlockingIOError as error:
        who = (real / LOCK).read_text(encoding="utf-8", errors="replace").strip()
        raise UsageError(
            f"is in use by another run{f' ({who})' if who else ''}",
            flag=f"{flag} {folder}",
            remedy="give another folder, or wait until that run has ended",
        ) from error
    except OSError as error:
        if error.errno in _NO_LOCKS:
            logger.warning(
                "%s %s cannot be locked (%s): take care that no other run writes there",
                flag,
                folder,
                error.strerror,
            )
            return
        raise UsageError(
            f": nothing can be written there ({error.strerror})",
            flag=f"{flag} {folder}",
            remedy="choose another folder or make room",
        ) from error
    with contextlib.suppress(OSError):  # on a full disk the lock is held without a name
        who = f"process {os.getpid()} on {socket.gethostname()}\n"
        (real / LOCK).write_text(who, encoding="utf-8")


def _locked(file: Path) -> int:
    """Return a descriptor of the locked file; BlockingIOError if another process has the lock."""
    # A file open for writing blocks a read-only remount, but NFS only locks files open for writing.
    for access in (os.O_RDONLY, os.O_RDWR):
        handle = os.open(file, access | os.O_CREAT, 0o666)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(handle)
            if error.errno == errno.EBADF and access == os.O_RDONLY:
                continue
            raise
        return handle
    raise AssertionError("the second attempt returns or raises")
