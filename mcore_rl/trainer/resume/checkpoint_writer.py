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
from torch.distributed.checkpoint import CheckpointException

from mcore_rl.common import objects
from mcore_rl.megatron import background
from mcore_rl.trainer.resume import folders

Writer = Callable[[Path], None]
# Errors of a disk.
_DISK_ERRORS = frozenset(
    {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.EFBIG, errno.ESTALE}
    | {errno.EACCES, errno.EPERM, errno.ENOENT, errno.ENOTDIR}
)
# Errors of other processes or ranks arrive as text.
_ERRNO = re.compile(r"\[Errno (\d+)\] [^\n:]+")


class OpenCheckpoint:
    """A checkpoint of which some files may still be written by processes (`megatron.background`).
    Methods are collective."""

    def __init__(self, folder: Path, step: int, *, is_rolling: bool = False) -> None:
        """`is_rolling` is that of `folders.complete`."""
        self._folder, self._step, self._is_rolling = folder, step, is_rolling

    def advance(self, *, waits: bool) -> bool:
        """Complete the checkpoint if its files are written, with `waits` wait for them. Return
        whether it is complete. Every file is hashed by one rank, or by the process that wrote it.
        Raises as `begin_checkpoint`."""
        folder, step = self._folder, self._step
        with _reported(folder, step, in_background=True):
            if not background.finish(waits=waits):
                return False
        objects.barrier()  # all writers of all ranks have ended
        place = folders.saving_folder(folder) / folders.iteration_name(step)
        mine = background.take_digests(place)
        known = {name for names in objects.all_gather([*mine]) for name in names}

        def seal() -> dict[str, str]:
            others = [file for file in folders.files_of(place) if file.as_posix() not in known]
            share = folders.share(others, dist.get_rank(), dist.get_world_size())
            return mine | folders.sealed(place, share)

        parts = _everywhere(seal, folder, step)
        digests = {name: digest for part in parts for name, digest in part.items()}

        def complete() -> None:
            if dist.get_rank() == 0:
                folders.complete(folder, step, digests, is_rolling=self._is_rolling)

        _everywhere(complete, folder, step)
        return True


def write_checkpoint(folder: Path, step: int, writers: Sequence[Writer]) -> None:
    """Call `writers` and complete the checkpoint; see `begin_checkpoint`."""
    begin_checkpoint(folder, step, writers).advance(waits=True)


def begin_checkpoint(
    folder: Path, step: int, writers: Sequence[Writer], *, is_rolling: bool = False
) -> OpenCheckpoint:
    """Call `writers`, each with the folder to write below; the checkpoint is not yet complete.

    The first one is Megatron's, which makes `iter_<step>` there; the others write into it. This
    call and all writers are collective. What they write is the state at the time of the call.

    Raises RuntimeError with the folder and the reason: on all ranks if the folder cannot be made,
    or files cannot be read or moved, or a process cannot write; on the ranks that notice if the
    disk fails a writer. Any other error of a writer is raised on its rank.
    """
    rank, saving = dist.get_rank(), folders.saving_folder(folder)

    def prepare() -> None:
        if rank == 0:
            folders.clear_saving(folder)
            saving.mkdir(parents=True, exist_ok=True)

    _everywhere(prepare, folder, step)
    for write in writers:
        with _reported(folder, step):
            write(saving)
    return OpenCheckpoint(folder, step, is_rolling=is_rolling)


@contextlib.contextmanager
def _reported(folder: Path, step: int, *, in_background: bool = False) -> Iterator[None]:
    """Raise RuntimeError with the disk's reason for an error inside, if there is one, or, of
    processes, with any."""
    with _megatron_errors() as logged:
        try:
            yield
        except BaseException as error:  # torch's error of a distributed checkpoint is one
            reason = _disk_reason(error, logged, folders.saving_folder(folder))
            if not reason and in_background and isinstance(error, CheckpointException):
                reason = "; ".join(str(failure) for failure, _ in error.failures.values())
                reason = reason or "a process that writes it has failed on another rank"
            if not reason:
                raise
            raise RuntimeError(_not_written(folder, step, reason)) from error


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
        for match in _ERRNO.finditer(text):
            if int(match[1]) in _DISK_ERRORS:
                return match[0]
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
