"""The ranks' temporary folder: a rank that is killed removes nothing itself.

The launcher removes the folder at its end, and `cleanup` does so if the launcher is killed. If both
are killed, the next launcher removes it: a living launcher holds a lock in its folder.
"""

from __future__ import annotations

import contextlib
import fcntl
import getpass
import logging
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

logger = logging.getLogger(__name__)

_PREFIX = "mcore_rl_"
# A socket's path may have 107 characters, of which Megatron's writer and vLLM need 55 below it.
_MAX_CHARACTERS = 50


@contextlib.contextmanager
def temporary_folder() -> Iterator[str]:
    """Create a folder and make it TMPDIR for the ranks; remove it afterwards.

    Caches that outlive a run stay where they were.
    """
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", kernel_cache())
    where = tempfile.gettempdir()
    if len(where) > _MAX_CHARACTERS:
        logger.warning(
            "TMPDIR %s is longer than %d characters and leaves no room for the names of sockets: "
            "the ranks use /tmp",
            where,
            _MAX_CHARACTERS,
        )
        where = "/tmp"
    _remove_leftovers(Path(where))
    with (
        tempfile.TemporaryDirectory(
            dir=where, prefix=_PREFIX, ignore_cleanup_errors=True
        ) as folder,
        open(f"{folder}/partial.lock", "w") as lock,
    ):
        with contextlib.suppress(OSError):  # without file locks the folder may stay
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.rename(lock.name, lock_of(Path(folder)))  # never seen without its lock
        os.environ["TMPDIR"] = folder
        yield folder


def kernel_cache() -> str:
    """Return torch's default folder of compiled kernels; to ask torch costs a second of imports."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = f"uid_{os.getuid()}"
    user = re.sub(r'[\\/:*?"<>|]', "_", user)
    return os.path.join(tempfile.gettempdir(), f"torchinductor_{user}")


def lock_of(folder: Path) -> Path:
    """Return the file that a launcher locks; its name has the id of the machine's last boot.

    On a network file system possibly only one machine knows of a lock.
    """
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
    return folder / f"launcher.{boot}.lock"


def _remove_leftovers(where: Path) -> None:
    """Remove the temporary folders of this user's killed launchers on this machine.

    Other users write there, too: follow no links, and open nothing outside of this user's folders.
    """
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
    for folder in where.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            status = folder.lstat()
            if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
                continue
            with open(os.open(lock_of(folder), flags), "rb") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if stat.S_ISREG(os.fstat(lock.fileno()).st_mode):
                    shutil.rmtree(folder, ignore_errors=True)
