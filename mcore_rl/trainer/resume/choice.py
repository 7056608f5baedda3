"""The choice of the checkpoint to resume from: the newest that is complete and undamaged."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from pathlib import Path

import torch.distributed as dist

from mcore_rl.common import objects
from mcore_rl.common.errors import UsageError
from mcore_rl.trainer.resume import folders
from mcore_rl.trainer.resume.folders import Damage

logger = logging.getLogger(__name__)


def choose(folder: Path, *, beside: Sequence[Path] = (), step: int | None = None) -> int | None:
    """Return the step to resume from, None without a checkpoint of mcore_rl. Collective.

    `folder` is `--load`; a step counts if the folders `beside` it (a critic's) have it, too, and
    `step` is `--ckpt-step`, if given. Each file is read by one rank and compared with its digest. A
    damaged checkpoint is named in a warning, and the previous one is taken. Nothing is deleted.

    Raises UsageError on all ranks if `step` is missing or damaged, or if every checkpoint is
    damaged.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    places = [folder, *(place for place in beside if place.is_dir())]
    found: list[list[int]] = [[]]
    if rank == 0:
        for place in places:
            _recover(place)
        found = [folders.common_steps(places)]
    steps: list[int] = objects.broadcast(found[0])
    steps = folders.steps_to_try(folder, steps, step)
    reports: list[Damage] = []
    for candidate in steps:
        started = time.perf_counter()
        damaged = _damage(places, candidate, rank, world_size)
        if not damaged:
            logger.info(
                "[Resume] going on from step %d of %s, whose files are as they were written "
                "(checked in %.1f s)",
                candidate,
                folder,
                time.perf_counter() - started,
            )
            return candidate
        for damage in damaged:
            if rank == 0:
                logger.warning("[Resume] the checkpoint of step %d is bad: %s", candidate, damage)
        reports += damaged
    if reports:
        raise UsageError(
            f": no checkpoint can be read, the newest because of {reports[0]}",
            flag=f"--load {folder}" if step is None else f"--ckpt-step {step}",
            remedy="restore that file, or drop --load to begin again",
        )
    return None


def _recover(place: Path) -> None:
    """Finish killed saves, without raising for a read-only folder, since other ranks wait."""
    try:
        for step in folders.recover(place):
            logger.info("[Resume] the save of step %d in %s was finished", step, place)
    except OSError as error:
        logger.warning("[Resume] %s cannot be put in order (%s)", place, error)


def _damage(places: Sequence[Path], step: int, rank: int, world_size: int) -> list[Damage]:
    """Return the damage that any rank has found, the same on all."""
    mine = [
        damage
        for place in places
        for damage in folders.damage(place, step, rank=rank, world_size=world_size)
    ]
    everywhere = objects.all_gather(mine)
    return sorted({damage for found in everywhere for damage in found}, key=str)
