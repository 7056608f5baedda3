"""Puts a checkpoint together: what several writers write is complete at once, or not at all."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from mcore_rl.common import objects
from mcore_rl.trainer.resume import folders

Writer = Callable[[Path], None]
# What a disk says; a connection that another rank has dropped is not a reason to look at it.
_OF_DISKS = frozenset(
    {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.EFBIG, errno.ESTALE}
    | {errno.EACCES, errno.EPERM, errno.ENOENT, errno.ENOTDIR}
)
# What comes from another process or rank is a text.
_ERRNO = re.compile(r"\[Errno (\d+)\] [^\n:]+")


def write_checkpoint(folder: Path, step: int, writers: Sequence[Writer]) -> Path:
    """Have each of `writers` write below the folder that it is given, and complete the checkpoint.

    The first one is Megatron, which makes `iter_<step>` there; the others write into that. All are
    collective, as this is. Every file is hashed by one of the ranks. Returns the checkpoint's
    folder.

    Raises RuntimeError on all ranks, with the folder and the reason, if the folder cannot be made,
    or the files cannot be read or moved; on the ranks that notice if the disk fails a writer. What
    else a writer raises is raised on its rank.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    saving = folders.saving_folder(folder)

    def prepare() -> None:
        if rank == 0:
            folders.clear_saving(folder)
            saving.mkdir(parents=True, exist_ok=True)

    def everywhere(work: Callable[[], Any]) -> list[Any]:
        return _everywhere(work, lambda reason: _not_written(folder, step, reason))

    everywhere(prepare)
    for write in writers:
        with _hearing_megatron() as heard:
            try:
                write(saving)
            except BaseException as error:  # as torch's own of a distributed checkpoint is
                if not (reason := _disk_reason(error, heard, saving)):
                    raise
                raise RuntimeError(_not_written(folder, step, reason)) from error
    objects.barrier()
    place = saving / folders.iteration_name(step)
    found = everywhere(
        lambda: folders.sealed(place, folders.share(folders.files_of(place), rank, world_size))
    )
    digests = {name: digest for part in found for name, digest in part.items()}

    def complete() -> None:
        if rank == 0:
            folders.complete(folder, step, digests)

    everywhere(complete)
    return folder / folders.iteration_name(step)


def _not_written(folder: Path, step: int, reason: str) -> str:
    """The line that a run ends with when the disk takes no checkpoint."""
    before = next(iter(folders.complete_steps(folder)), None)
    kept = "none was complete before"
    if before is not None:
        kept = f"that of step {before} is complete: mend this and go on by --load {folder}"
    return f"the checkpoint of step {step} could not be written to {folder}: {reason}; {kept}"


def _disk_reason(error: BaseException, heard: Sequence[str], folder: Path) -> str:
    """ "[Errno 28] No space left on device", if that is behind `error`; "" if the disk is not.

    Megatron's writer logs it (`heard`) and raises no more than the type of what it has caught; a
    rank whose own writer went well is told even less, and asks the disk.
    """
    for text in (*map(str, _causes(error)), *heard):
        for found in _ERRNO.finditer(text):
            if int(found[1]) in _OF_DISKS:
                return found[0]
    try:
        with tempfile.TemporaryFile(dir=folder) as probe:
            probe.write(bytes(1 << 20))
            probe.flush()
            os.fsync(probe.fileno())
    except OSError as refused:
        return f"[Errno {refused.errno}] {refused.strerror}"
    return ""


class _Listener(logging.Handler):
    """Keeps what is logged as an error."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


@contextlib.contextmanager
def _hearing_megatron() -> Iterator[list[str]]:
    listener, logger = _Listener(), logging.getLogger("megatron")
    logger.addHandler(listener)
    try:
        yield listener.texts
    finally:
        logger.removeHandler(listener)


def _causes(error: BaseException) -> Iterator[BaseException]:
    """`error`, and what it was raised for or while handling."""
    at: BaseException | None = error
    while at is not None:
        yield at
        at = at.__cause__ or at.__context__


def _everywhere(work: Callable[[], Any], told: Callable[[str], str]) -> list[Any]:
    """What `work` returned on each rank; RuntimeError everywhere if it failed anywhere.

    `told` makes its text of the rank and the reason.
    """
    outcome: tuple[Any, str] = (None, "")
    try:
        outcome = (work(), "")
    except (OSError, RuntimeError) as error:
        outcome = (None, str(error))
    outcomes = objects.all_gather(outcome)
    for rank, (_, failure) in enumerate(outcomes):
        if failure:
            raise RuntimeError(told(f"on rank {rank}: {failure}"))
    return [result for result, _ in outcomes]
