"""Writing a checkpoint: the files of all writers become complete together, or not at all."""

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
# Errors of a disk.
_DISK_ERRORS = frozenset(
    {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.EFBIG, errno.ESTALE}
    | {errno.EACCES, errno.EPERM, errno.ENOENT, errno.ENOTDIR}
)
# Errors of other processes or ranks arrive as text.
_ERRNO = re.compile(r"\[Errno (\d+)\] [^\n:]+")


def write_checkpoint(folder: Path, step: int, writers: Sequence[Writer]) -> None:
    """Call `writers`, each with the folder to write below, and complete the checkpoint.

    The first one is Megatron's, which makes `iter_<step>` there; the others write into it. This
    call and all writers are collective. Every file is hashed by one rank.

    Raises RuntimeError with the folder and the reason: on all ranks if the folder cannot be made,
    or files cannot be read or moved; on the ranks that notice if the disk fails a writer. Any other
    error of a writer is raised on its rank.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    saving = folders.saving_folder(folder)

    def prepare() -> None:
        if rank == 0:
            folders.clear_saving(folder)
            saving.mkdir(parents=True, exist_ok=True)

    _everywhere(prepare, folder, step)
    for write in writers:
        with _megatron_errors() as logged:
            try:
                write(saving)
            except BaseException as error:  # torch's error of a distributed checkpoint is one
                if not (reason := _disk_reason(error, logged, saving)):
                    raise
                raise RuntimeError(_not_written(folder, step, reason)) from error
    objects.barrier()
    place = saving / folders.iteration_name(step)

    def seal() -> dict[str, str]:
        return folders.sealed(place, folders.share(folders.files_of(place), rank, world_size))

    found = _everywhere(seal, folder, step)
    digests = {name: digest for part in found for name, digest in part.items()}

    def complete() -> None:
        if rank == 0:
            folders.complete(folder, step, digests)

    _everywhere(complete, folder, step)


def _not_written(folder: Path, step: int, reason: str) -> str:
    """Return the message of a run that ends because a checkpoint could not be written."""
    before = next(iter(folders.complete_steps(folder)), None)
    kept = "none was complete before"
    if before is not None:
        kept = f"that of step {before} is complete: repair the disk and resume with --load {folder}"
    return f"the checkpoint of step {step} could not be written to {folder}: {reason}; {kept}"


def _disk_reason(error: BaseException, logged: Sequence[str], folder: Path) -> str:
    """Return the disk's error behind `error`, as "[Errno 28] No space left on device", or "".

    Megatron's writer logs it (`logged`) and raises only the type of its cause. A rank whose own
    writer succeeded has no error and probes the disk.
    """
    for text in (*map(str, _causes(error)), *logged):
        for found in _ERRNO.finditer(text):
            if int(found[1]) in _DISK_ERRORS:
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
    """A handler that keeps logged errors."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


@contextlib.contextmanager
def _megatron_errors() -> Iterator[list[str]]:
    listener, logger = _Listener(), logging.getLogger("megatron")
    logger.addHandler(listener)
    try:
        yield listener.texts
    finally:
        logger.removeHandler(listener)


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Yield `error`, then its causes and contexts."""
    at: BaseException | None = error
    while at is not None:
        yield at
        at = at.__cause__ or at.__context__


def _everywhere(work: Callable[[], Any], folder: Path, step: int) -> list[Any]:
    """Return `work`'s result on each rank; raise RuntimeError on all ranks if it failed on any."""
    outcome: tuple[Any, str] = (None, "")
    try:
        outcome = (work(), "")
    except (OSError, RuntimeError) as error:
        outcome = (None, str(error))
    outcomes = objects.all_gather(outcome)
    for rank, (_, failure) in enumerate(outcomes):
        if failure:
            raise RuntimeError(_not_written(folder, step, f"on rank {rank}: {failure}"))
    return [result for result, _ in outcomes]
