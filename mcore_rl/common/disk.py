"""What must be on the disk before the program continues."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
from pathlib import Path

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2  # linux/fcntl.h, linux/fs.h


def sync(path: Path) -> None:
    """Flush a file, or the names in a folder, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def replace_folder(new: Path, target: Path) -> None:
    """Give the folder `new` the name of `target`, and delete the one that had it; the name always
    names one of both. A file system that cannot exchange names, such as NFS, has neither for a
    moment. Raises OSError."""
    sync(new)
    if target.is_dir() and not _exchange(new, target):
        old = target.with_name(target.name + ".replaced")
        shutil.rmtree(old, ignore_errors=True)
        target.rename(old)
        new.rename(target)
        new = old
    elif not target.is_dir():
        new.rename(target)
    sync(target.parent)
    shutil.rmtree(new, ignore_errors=True)


def _exchange(one: Path, other: Path) -> bool:
    """Exchange the names of two folders; return whether the system can."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    names = os.fsencode(one), os.fsencode(other)
    return rename is not None and not rename(
        _AT_FDCWD, names[0], _AT_FDCWD, names[1], _RENAME_EXCHANGE
    )


def replace_text(path: Path, text: str) -> None:
    """Replace a file atomically; it is on the disk when this returns. Raises OSError, and leaves
    the file as it was."""
    partial = path.with_name(path.name + ".partial")
    try:
        partial.write_text(text, encoding="utf-8")
        sync(partial)
        partial.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise
    sync(path.parent)
