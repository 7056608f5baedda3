"""Puts a checkpoint together: what several writers write is complete at once, or not at all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from mcore_rl.resume import folders

Writer = Callable[[Path], None]


def write_checkpoint(folder: Path, step: int, writers: Sequence[Writer]) -> Path:
    """Have each of `writers` write below the folder that it is given, and complete the checkpoint.

    The first one is Megatron, which makes `iter_<step>` there; the others write into that. All are
    collective, as this is. Every file is hashed by one of the ranks. Returns the checkpoint's
    folder.

    Raises what a writer raises, on its rank; RuntimeError on all ranks, with the rank and the
    reason, if the folder cannot be made, or the files cannot be read or moved.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    saving = folders.saving_folder(folder)

    def prepare() -> None:
        if rank == 0:
            folders.clear_saving(folder)
            saving.mkdir(parents=True, exist_ok=True)

    _everywhere(prepare)
    for write in writers:
        write(saving)
    dist.barrier()
    place = saving / folders.iteration_name(step)
    found = _everywhere(
        lambda: folders.sealed(place, folders.share(folders.files_of(place), rank, world_size))
    )
    digests = {name: digest for part in found for name, digest in part.items()}

    def complete() -> None:
        if rank == 0:
            folders.complete(folder, step, digests)

    _everywhere(complete)
    return folder / folders.iteration_name(step)


def _everywhere(work: Callable[[], Any]) -> list[Any]:
    """What `work` returned on each rank; RuntimeError everywhere if it failed anywhere."""
    outcome: tuple[Any, str] = (None, "")
    try:
        outcome = (work(), "")
    except (OSError, RuntimeError) as error:
        outcome = (None, str(error))
    outcomes: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(outcomes, outcome)
    for rank, (_, failure) in enumerate(outcomes):
        if failure:
            raise RuntimeError(f"the checkpoint could not be written on rank {rank}: {failure}")
    return [result for result, _ in outcomes]
