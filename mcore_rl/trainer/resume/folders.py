"""The checkpoints of a run on disk: written aside, checked, and complete under their own name.

    <--save>/
      iter_0000040/                        complete: nothing else gets such a name
        integrity.json                     SHA-256 of every file, Megatron's manifest
        complete.json                      written last: the step, and the bytes of every file
        ...                                Megatron's files, and folders of ours
      critic/iter_0000040/                 the critic's, written in the same way before the actor's
      saving/iter_0000050/                 being written, or left by a run that was killed
      latest_checkpointed_iteration.txt    Megatron's: the newest step

`complete.json` makes a checkpoint complete: when it is written, everything else is on the disk.
Renames and the tracker follow; `recover` completes them after a kill. A folder without it does not
count, and the other checkpoints are unchanged.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mcore_rl.common.disk import replace_text, sync
from mcore_rl.common.errors import UsageError
from mcore_rl.common.readers import (
    InvalidData,
    integer_within,
    open_regular,
    parse_json,
    plain_file_name,
    read_regular,
)

logger = logging.getLogger(__name__)

SAVING = "saving"
TRACKER = "latest_checkpointed_iteration.txt"
COMPLETE = "complete.json"
INTEGRITY = "integrity.json"
_REPLACED = ".replaced"
_ROLLING = "rolling"
_FORMAT = 1
_NAME = re.compile(r"iter_(\d{7,})")


@dataclass(frozen=True, slots=True)
class Damage:
    """The damage to a file of a checkpoint."""

    file: Path
    reason: str

    def __str__(self) -> str:
        return f"{self.file}: {self.reason}"


def iteration_name(step: int) -> str:
    """Return Megatron's name of a checkpoint's folder."""
    return f"iter_{step:07d}"


def checkpoint_folder(save: str | None, run_directory: Path) -> Path:
    """Return where a run saves: `--save`, or in its own directory."""
    return Path(save) if save else run_directory / "checkpoints"


def critic_folder(folder: Path) -> Path:
    """Return the folder of the critic's checkpoints, below the actor's."""
    return folder / "critic"


def saving_folder(folder: Path) -> Path:
    """Return where checkpoints of `folder` are written before they are complete."""
    return folder / SAVING


def complete_steps(folder: Path) -> list[int]:
    """Return the steps of the checkpoints marked as complete, the newest first."""
    if not folder.is_dir():
        return []
    steps = []
    for entry in folder.iterdir():
        match = _NAME.fullmatch(entry.name)
        if match is not None and _record(entry, int(match[1])) is not None:
            steps.append(int(match[1]))
    return sorted(steps, reverse=True)


def places_of(folder: Path, beside: Sequence[Path]) -> list[Path]:
    """Return `folder`, and those `beside` it that have one of its steps or an earlier one.

    A critic that a run has added begins later than the steps before. If its first save was killed
    before the actor's, the run resumes without it."""
    newest = max(complete_steps(folder), default=0)
    begun = (place for place in beside if min(complete_steps(place), default=newest + 1) <= newest)
    return [folder, *begun]


def common_steps(places: Sequence[Path]) -> list[int]:
    """Return the steps that are complete in all folders, the newest first."""
    first, *others = map(complete_steps, places)
    return [step for step in first if all(step in other for other in others)]


def steps_to_try(load: Path, steps: Sequence[int], asked: int | None) -> list[int]:
    """Return which of the complete `steps` of `--load` to resume from: the newest that is
    undamaged, or only `--ckpt-step`. Raises UsageError if that is not one of them."""
    if asked is None or not steps:
        return list(steps)
    if asked not in steps:
        listed = f"step{'s' * (len(steps) > 1)} {', '.join(map(str, sorted(steps)))}"
        raise UsageError(
            f"is not in {load}, which has {listed} complete",
            flag=f"--ckpt-step {asked}",
            remedy="choose one of them, or drop the flag for the newest",
        )
    return [asked]


def newest_undamaged(
    load: Path,
    steps: Sequence[int],
    asked: int | None,
    damage_of: Callable[[int], list[Damage]],
    *,
    logs: bool = True,
) -> int | None:
    """Return the first of the complete `steps` of `--load` to resume from; None without any.

    Warns of those that `damage_of` finds damaged, if `logs`. Raises UsageError if all are damaged,
    and for a `--ckpt-step` that is not there.
    """
    reports: list[Damage] = []
    for step in steps_to_try(load, steps, asked):
        damaged = damage_of(step)
        if not damaged:
            return step
        for each in damaged if logs else ():
            logger.warning(
                "[Resume] the checkpoint of step %d is bad: %s; restore that file, or resume at an "
                "older step",
                step,
                each,
            )
        reports += damaged
    if not reports:
        return None
    raise UsageError(
        f": no checkpoint can be read, the newest because of {reports[0]}",
        flag=f"--load {load}" if asked is None else f"--ckpt-step {asked}",
        remedy="restore that file, or drop --load to begin again",
    )


def tracked_step(folder: Path) -> int | None:
    """Return the step that Megatron would load, None if it finds none ("release" included)."""
    with contextlib.suppress(OSError, ValueError):
        return int(read_regular(folder / TRACKER).decode())
    return None


def check_load(
    load: Path | None,
    *,
    asked: int | None,
    pretrained: str | None,
    may_begin: bool,
    exits: bool,
) -> None:
    """Raise UsageError if the user names a checkpoint and there is nothing to resume from.

    `load` is `--load`, `asked` `--ckpt-step`, `pretrained` `--pretrained-checkpoint`, which
    Megatron uses if `load` has nothing; `may_begin` and `exits` are `--rl-load-or-start` and
    `--exit-on-missing-checkpoint`. For one process, since another may be recovering the folder.
    """
    if load is not None and _has_checkpoint(load, asked):
        return
    if pretrained is not None and not (Path(pretrained) / TRACKER).is_file():
        raise UsageError(
            f"{_emptiness(Path(pretrained))} (there is no {TRACKER})",
            flag=f"--pretrained-checkpoint {pretrained}",
            remedy="correct the path or drop the flag",
        )
    if pretrained is not None:
        _check_tracked(Path(pretrained), f"--pretrained-checkpoint {pretrained}")
    if load is None:
        return
    if asked is not None:
        raise UsageError(
            f"is not in --load {load}, which {_emptiness(load)}",
            flag=f"--ckpt-step {asked}",
            remedy="correct the path or drop --ckpt-step",
        )
    if exits or not may_begin:
        other = "drop --exit-on-missing-checkpoint and " if exits else ""
        raise UsageError(
            _emptiness(load),
            flag=f"--load {load}",
            remedy=f"correct the path, or {other}give --rl-load-or-start to begin where nothing "
            "is saved yet",
        )


def _has_checkpoint(load: Path, asked: int | None) -> bool:
    """Return whether there is a checkpoint: Megatron's, or ours, even if a kill interrupted its
    save."""
    if complete_steps(load) or complete_steps(saving_folder(load)):
        return True
    if asked is not None:  # needs no tracker
        _check_record(load, asked, f"--load {load}")
        return (load / iteration_name(asked)).is_dir()
    if not (load / TRACKER).is_file():
        return False
    _check_tracked(load, f"--load {load}")
    return True


def _check_tracked(folder: Path, flag: str) -> None:
    """Raise UsageError if the tracker does not name a checkpoint: Megatron would end with exit code
    0, or raise on each rank."""
    content = ""
    with contextlib.suppress(OSError):
        content = read_regular(folder / TRACKER).decode(errors="replace").strip()
    is_step = content.isdecimal() and len(content) < 19
    place = folder / (iteration_name(int(content)) if is_step else "release")
    if not (is_step or content == "release") or not place.is_dir():
        raise UsageError(
            f": {TRACKER} there has {content[:40]!r}, which names no checkpoint in the folder",
            flag=flag,
            remedy="write the step of one there, or name another folder",
        )
    if is_step:
        _check_record(folder, int(content), flag)


def _check_record(folder: Path, step: int, flag: str) -> None:
    """Raise UsageError for a checkpoint of ours with a damaged record, which would load as one of
    Megatron's without the state of the run."""
    place = folder / iteration_name(step)
    if (place / COMPLETE).exists() and _record(place, step) is None:
        raise UsageError(
            f": {place.name}/{COMPLETE} is damaged", flag=flag, remedy="load another checkpoint"
        )


def _emptiness(folder: Path) -> str:
    if folder.is_dir():
        return "has no complete checkpoint" if any(folder.iterdir()) else "is an empty folder"
    return "is a file, not a folder" if folder.exists() else "does not exist"


def check_beginning(
    save: Path, load: Path | None, chosen: int | None, *, asked: int | None, finetune: bool
) -> None:
    """Raise UsageError if a run would begin below the steps in `save`.

    `load` is `--load`, and `chosen` the step there to resume from, None if it has no checkpoint of
    mcore_rl; `asked` is `--ckpt-step`.
    """
    if load is None or finetune:  # counts from 0
        refuse_to_fall_behind(save, 0)
    elif chosen is None:
        refuse_to_fall_behind(save, tracked_step(load) or 0)  # Megatron's own
    elif asked is not None or save.resolve() != load.resolve():
        refuse_to_fall_behind(save, chosen)
    # Otherwise it is the newest: later ones are damaged, and are replaced.


def refuse_to_fall_behind(save: Path, first_step: int) -> None:
    """Raise UsageError if a run that begins at `first_step` would save below another's steps.

    The highest number counts as the newest, so `--load` would later resume the other run.
    """
    later = [step for step in complete_steps(save) if step > first_step]
    if later:
        raise UsageError(
            f"has a checkpoint of step {later[0]}, and this run begins at step {first_step}: "
            "--load would later resume the other run",
            flag=f"--save {save}",
            remedy="give another --save or --rl-run-dir, --load it, or move it away",
        )


def files_of(folder: Path) -> list[Path]:
    """Return all files of a checkpoint but its own records, relative to it, in a fixed order."""
    paths = (path.relative_to(folder) for path in sorted(folder.rglob("*")) if path.is_file())
    return [path for path in paths if path.as_posix() not in (COMPLETE, INTEGRITY)]


def share(files: Sequence[Path], rank: int, world_size: int) -> list[Path]:
    """Return one reader's share of the files."""
    return list(files[rank::world_size])


def sealed(folder: Path, files: Sequence[Path]) -> dict[str, str]:
    """Return the hexadecimal SHA-256 of files of a checkpoint, and flush them to the disk."""
    digests = {}
    for file in files:
        digests[file.as_posix()] = _sha256(folder / file)
        sync(folder / file)
    return digests


def complete(
    folder: Path, step: int, digests: Mapping[str, str], *, is_rolling: bool = False
) -> Path:
    """Make what was written to `saving` a complete checkpoint; return its folder. One process.

    `digests`, from `sealed`, cover all its files. A checkpoint of the same step is replaced. A
    rolling one is marked as deletable by `SaveRule`. Raises RuntimeError if a file has no digest or
    does not exist.
    """
    written = saving_folder(folder) / iteration_name(step)
    missing = {file.as_posix() for file in files_of(written)} ^ digests.keys()
    if missing:
        raise RuntimeError(f"{sorted(missing)[0]} of {written} is not there, or has no digest")
    sizes = {name: (written / name).stat().st_size for name in digests}
    for path in _folders_of(written):
        sync(path)
    _write(written / INTEGRITY, {"algorithm": "sha256", "files": dict(sorted(digests.items()))})
    record = {"format": _FORMAT, "step": step, "bytes": sizes, _ROLLING: is_rolling}
    _write(written / COMPLETE, record)
    target = _move_into_place(folder, step)
    replace_text(folder / TRACKER, str(step))
    return target


def rolling_steps(folder: Path) -> list[int]:
    """Return the complete checkpoints that `complete` has marked as rolling, the newest first."""
    return [step for step in complete_steps(folder) if _is_rolling(folder / iteration_name(step))]


def remove(folder: Path, step: int) -> None:
    """Delete a checkpoint, if it is there. One process. A kill leaves it complete, or what is left
    of it in `saving`, which the next save clears. A symbolic link is left alone, as by Megatron.
    Raises OSError."""
    place = folder / iteration_name(step)
    removed = saving_folder(folder) / (place.name + _REPLACED)
    if place.is_symlink() or not place.is_dir():
        return
    removed.parent.mkdir(exist_ok=True)
    shutil.rmtree(removed, ignore_errors=True)
    place.rename(removed)
    sync(folder)
    shutil.rmtree(removed)
    with contextlib.suppress(OSError):  # another checkpoint may be written there
        removed.parent.rmdir()


def recover(folder: Path) -> list[int]:
    """Finish complete saves that a kill interrupted; return their steps. One process.

    The tracker then names the newest: without one, or if it is not a number, Megatron takes the
    folder for empty, or exits.
    """
    saved = sorted(complete_steps(saving_folder(folder)))
    for step in saved:
        _move_into_place(folder, step)
    tracked, newest = tracked_step(folder), max(complete_steps(folder), default=None)
    if newest is not None and (tracked is None or tracked < newest):
        replace_text(folder / TRACKER, str(newest))
    return saved


def _move_into_place(folder: Path, step: int) -> Path:
    written = saving_folder(folder) / iteration_name(step)
    target = folder / iteration_name(step)
    replaced = written.with_name(written.name + _REPLACED)
    if target.exists():
        shutil.rmtree(replaced, ignore_errors=True)
        target.rename(replaced)
    written.rename(target)
    sync(folder)
    shutil.rmtree(replaced, ignore_errors=True)
    (saving_folder(folder) / TRACKER).unlink(missing_ok=True)  # Megatron writes one there
    with contextlib.suppress(OSError):  # a killed run may have left another step there
        saving_folder(folder).rmdir()
    return target


def clear_saving(folder: Path) -> None:
    """Remove the incomplete checkpoints that killed runs have left."""
    saving = saving_folder(folder)
    for left in saving.iterdir() if saving.is_dir() else ():
        match = _NAME.fullmatch(left.name.removesuffix(_REPLACED))
        is_replaced = left.name.endswith(_REPLACED)
        if match is not None and (is_replaced or _record(left, int(match[1])) is None):
            shutil.rmtree(left, ignore_errors=True)


def damage(folder: Path, step: int, *, rank: int = 0, world_size: int = 1) -> list[Damage]:
    """Return what is missing, cut short or changed since a complete checkpoint was written.

    Sizes are compared for all files, digests for this reader's share.
    """
    place = folder / iteration_name(step)
    sizes, damaged = _record(place, step), []
    if sizes is None:
        return [Damage(place / COMPLETE, "it is not there or cannot be read")]
    try:
        expected = parse_json(read_regular(place / INTEGRITY))["files"]
        if not isinstance(expected, dict):
            raise InvalidData("files is not an object")
    except (OSError, ValueError, KeyError, TypeError) as error:
        return [Damage(place / INTEGRITY, f"it cannot be read ({error})")]
    for name, size in sizes.items():
        with contextlib.suppress(OSError):
            now = (place / name).stat().st_size
            if now != size:
                damaged.append(Damage(place / name, f"{now} bytes instead of {size}"))
            continue
        damaged.append(Damage(place / name, "it is missing"))
    if damaged:
        return damaged
    for file in share([Path(name) for name in sorted(sizes)], rank, world_size):
        try:
            changed = _sha256(place / file) != expected.get(file.as_posix())
        except OSError as error:
            damaged.append(Damage(place / file, f"it cannot be read ({error})"))
            continue
        if changed:
            damaged.append(Damage(place / file, "its content has changed (SHA-256)"))
    return damaged


def recorded_bytes(folder: Path, step: int) -> int:
    """Return the total size in bytes of a complete checkpoint's files, as they were written."""
    return sum((_record(folder / iteration_name(step), step) or {}).values())


def _record(place: Path, step: int) -> dict[str, int] | None:
    """Return the bytes of each file of a complete checkpoint, all below its folder, else None."""
    try:
        record = parse_json(read_regular(place / COMPLETE))
        if record["format"] != _FORMAT or record["step"] != step:
            return None
        sizes = record["bytes"]
        is_right = all(
            integer_within(size, 0, 1 << 62) is not None
            and all(map(plain_file_name, name.split("/")))
            for name, size in sizes.items()
        )
        return sizes if is_right else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _is_rolling(place: Path) -> bool:
    """Return whether a complete checkpoint is marked as rolling; earlier versions marked none."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        return parse_json(read_regular(place / COMPLETE)).get(_ROLLING) is True
    return False


def _folders_of(folder: Path) -> list[Path]:
    """Return `folder` and all folders below it, the deepest first."""
    below = [path for path in folder.rglob("*") if path.is_dir()]
    return [*sorted(below, key=lambda path: len(path.parts), reverse=True), folder]


def _sha256(path: Path) -> str:
    with open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _write(path: Path, content: Mapping[str, object]) -> None:
    replace_text(path, json.dumps(content, indent=1) + "\n")
