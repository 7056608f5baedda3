"""The folders that a run writes into are its own: two would overwrite each other's files.

A folder is held by a lock of the kernel on a file in it (`flock`), which goes with the process
however that ends; the file stays and means nothing. On NFS the server holds the lock, and frees it
when it has given up a machine that vanished; where a file system has no locks a warning says so.
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
# Open for as long as this process lives; by the folder.
_held: dict[Path, int] = {}
_NO_LOCKS = frozenset({errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP})


def make_directory(run_name: str, below: Path = Path("runs")) -> Path:
    """A new folder <run_name>-<date>-<time>.<milliseconds>, which no other run has."""
    while True:
        now = time.time()
        moment = time.strftime("%Y%m%d-%H%M%S", time.localtime(now))
        folder = below / f"{run_name}-{moment}.{int(now % 1 * 1000):03d}"
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
    """Have `folder`, which `flag` names, for this process until it ends; it is made if need be.

    Raises UsageError if another run has it. A process may hold it more than once.
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
    with contextlib.suppress(OSError):  # a full disk: who it is matters less than the lock
        who = f"process {os.getpid()} on {socket.gethostname()}\n"
        (real / LOCK).write_text(who, encoding="utf-8")


def _locked(file: Path) -> int:
    """A descriptor of the file with its lock; BlockingIOError if another process has it."""
    # A disk with a file open for writing cannot be made read-only. NFS locks no other.
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
    raise AssertionError("the second one returns or raises")
