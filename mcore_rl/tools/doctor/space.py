"""Is there room: on the disks for checkpoints and temporary files, and in the host's memory?"""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from mcore_rl.common.byte_sizes import shown_bytes
from mcore_rl.tools.doctor.finding import SPACE, Finding, green, plural, red, yellow

_LEAST_BYTES = 1 << 30  # for logs, metrics, temporary files


@dataclass(frozen=True, slots=True)
class Saves:
    """What a run saves: bytes of one checkpoint, and how many stay on the disk."""

    folder: Path
    checkpoint_bytes: int
    num_kept: int


def free_bytes(folder: Path) -> int:
    """Of the disk that `folder` is on, or would be."""
    existing = folder.absolute()
    while not existing.exists():
        existing = existing.parent
    return shutil.disk_usage(existing).free


def num_kept(num_steps: int, save_interval: int | None, retain_interval: int | None) -> int:
    """Checkpoints that are there at the end: the last step is always saved."""
    if not save_interval or save_interval >= num_steps:
        return 1
    kept = save_interval if not retain_interval else math.lcm(save_interval, retain_interval)
    return num_steps // kept + (1 if num_steps % kept else 0)


def check_disk(
    saves: Saves | None,
    others: Mapping[str, Path],
    *,
    free: Callable[[Path], int] = free_bytes,
) -> list[Finding]:
    """`others` are folders in which little is written, by what they are called."""
    findings = [] if saves is None else [_checkpoints(saves, free(saves.folder))]
    for name, folder in others.items():
        left = free(folder)
        what = f"{shown_bytes(left)} are free for {name}, {folder}"
        if left < _LEAST_BYTES:
            findings.append(yellow(SPACE, f"only {what}", "free some space, or name another"))
        else:
            findings.append(green(SPACE, what))
    return findings


def _checkpoints(saves: Saves, left: int) -> Finding:
    one = saves.checkpoint_bytes
    # While the last one is written, all the others are there.
    all_of_them = one * saves.num_kept
    what = (
        f"{plural(saves.num_kept, 'checkpoint')} of {shown_bytes(one)} in {saves.folder}, where "
        f"{shown_bytes(left)} are free"
    )
    if left < one:
        return red(SPACE, f"not one: {what}", "free space, or name another disk by --save")
    if left < all_of_them:
        remedy = "free space, name another disk by --save, or keep fewer by --save-retain-interval"
        return yellow(SPACE, f"not all of {what}", remedy)
    return green(SPACE, what)


def check_host_memory(
    needed_bytes: int, available_bytes: int, *, what_for: str, ranks: int
) -> Finding:
    """An estimate against what is free now, on this machine."""
    found = (
        f"{plural(ranks, 'rank')} here need some {shown_bytes(needed_bytes)} of host memory "
        f"({what_for}), and {shown_bytes(available_bytes)} are free"
    )
    if needed_bytes <= available_bytes:
        return green(SPACE, found)
    return red(SPACE, found, "end other programs, take fewer ranks here, or a machine with more")
