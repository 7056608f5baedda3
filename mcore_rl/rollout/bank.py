"""Finished groups on the disk, so that they survive a kill between two checkpoints.

Each process that is the first rank of its TP group appends to a file of its own. A file is a header
line and records; integers are little-endian:

    mcore_rl bank 1 <CRC-32 of the fingerprint> <fingerprint>\\n
    magic (8 bytes), length of the payload (8), draw (8), CRC-32 (4), payload: `group_to_bytes`

The fingerprint is a line of text that names everything that a group depends on: model,
environments, prompts, seed, number of samples. A record's checksum covers the fingerprint, length,
draw and payload, so a record of another run is not mistaken for one of this run even if the header
is damaged. After damage, a reader continues at the next magic whose record is intact.
"""

from __future__ import annotations

import logging
import os
import re
import struct
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from zlib import crc32

from mcore_rl.batching.types import Prompt
from mcore_rl.common.disk import sync
from mcore_rl.rollout.pending import MALFORMED, group_from_bytes, group_to_bytes
from mcore_rl.rollout.segments import OpenGroup

logger = logging.getLogger(__name__)

_NAME = re.compile(r"group_(\d+)_(\d+)\.bank")  # the owner and the number of the file
_MAGIC = b"\x89RLBANK\n"  # not ASCII: not part of any JSON
_FRAME = struct.Struct("<8sQQI")
_FORMAT = b"mcore_rl bank 1 "


class Bank:
    """A TP group's finished groups that no checkpoint has trained on; on its first rank.

    A process starts a new file; its number is higher than those of earlier processes. Files of
    owners that a run with fewer TP groups no longer has are passed on to the others.
    """

    def __init__(self, folder: Path, *, owner: int, num_owners: int, fingerprint: str) -> None:
        """`owner` is the TP group, of `num_owners`. `fingerprint` has one line."""
        assert "\n" not in fingerprint, "a fingerprint has one line"
        folder.mkdir(parents=True, exist_ok=True)
        sync(folder.parent)
        self._folder, self._owner, self._num_owners = folder, owner, num_owners
        self._fingerprint = fingerprint.encode()
        number = 1 + max((number for number, _, _ in _files(folder)), default=0)
        self._file = folder / f"group_{owner:05d}_{number}.bank"

    def append(self, group: OpenGroup) -> None:
        """Write a finished group with its rewards. It is on the disk when this returns. Raises
        OSError; a later call may succeed."""
        assert group.is_sampled, f"draw {group.draw} has not finished"
        is_new = not self._file.exists()
        with self._file.open("ab") as file:
            if is_new:
                file.write(_header(self._fingerprint))
            file.write(_record(self._fingerprint, group.draw, group_to_bytes(group)))
            file.flush()
            os.fsync(file.fileno())
        if is_new:
            sync(self._folder)

    def forget(self, draws: Collection[int]) -> None:
        """Remove the groups of these draws, which a checkpoint has trained on or dropped. Raises
        OSError; a file then has all its groups or none of these."""
        for _, owner, path in _files(self._folder):
            if owner % self._num_owners != self._owner:
                continue
            data = path.read_bytes()
            frames, _ = _scan(data, self._fingerprint)
            if not frames and not data.startswith(_header(self._fingerprint)):
                continue  # of another run
            kept = [frame for frame in frames if frame.draw not in draws]
            if frames and len(kept) == len(frames):
                continue
            partial = path.with_name(path.name + ".partial")
            if not kept:
                partial.unlink(missing_ok=True)  # of a process that was killed
                path.unlink()
                continue
            with partial.open("wb") as file:
                file.write(_header(self._fingerprint))
                for frame in kept:
                    file.write(memoryview(data)[frame.start : frame.end])
            sync(partial)
            partial.replace(path)
        sync(self._folder)


@dataclass(frozen=True, slots=True)
class BankedGroup:
    """A finished group on the disk, which no process has in its memory before `read`."""

    _draw: int
    _path: Path
    _start: int  # byte of the record when the bank was read
    _num_bytes: int
    _fingerprint: bytes
    _prompt_of: Callable[[int], Prompt]

    def read(self) -> OpenGroup | None:
        """Read the group, also after its owner has forgotten others. None, with a warning, if that
        fails: the draw must then be sampled again."""
        try:
            group = group_from_bytes(self._record()[_FRAME.size :], self._prompt_of)
            if group.draw != self._draw or not group.is_sampled:
                raise ValueError("it is not the finished group of this draw")
            return group
        except MALFORMED as error:
            why = f"{type(error).__name__}: {error}"
            name = self._path.name
            logger.warning("[Bank] draw %d of %s is sampled again: %s", self._draw, name, why)
            return None

    def _record(self) -> bytes:
        with self._path.open("rb") as file:
            file.seek(self._start)
            record = file.read(self._num_bytes)
            if _frame(record, 0, self._fingerprint) == _Frame(self._draw, 0, self._num_bytes):
                return record
            file.seek(0)
            data = file.read()
        for frame in reversed(_scan(data, self._fingerprint)[0]):
            if frame.draw == self._draw:
                return data[frame.start : frame.end]
        raise ValueError("its record is gone")


def read_bank(
    folder: Path, prompt_of: Callable[[int], Prompt], *, fingerprint: str
) -> tuple[dict[int, BankedGroup], list[str]]:
    """Return the groups of all owners by draw, and a description of what was skipped, one for each
    damaged place or file of another run. On the first rank of each TP group; before the first
    `forget` of its job.

    `prompt_of` returns the prompt of a draw. Of a draw that was recorded twice, the last intact
    record counts. There may be groups that the newest checkpoint has trained on, if the job was
    killed before it could forget them.

    Example of a description: "group_00003_1.bank: record at byte 5120: its checksum differs".
    """
    groups: dict[int, BankedGroup] = {}
    skipped: list[str] = []
    run = fingerprint.encode()
    for _, _, path in _files(folder):
        try:
            data = path.read_bytes()
        except OSError as error:
            skipped.append(f"{path.name}: {error.strerror}")
            continue
        frames, faults = _scan(data, run)
        for frame in frames:
            place = path, frame.start, frame.end - frame.start
            groups[frame.draw] = BankedGroup(frame.draw, *place, run, prompt_of)
        skipped += [f"{path.name}: {fault}" for fault in faults]
    return groups, skipped


@dataclass(frozen=True, slots=True)
class _Frame:
    """An intact record of a file: its draw, and its bytes from `start` to `end`."""

    draw: int
    start: int
    end: int


def _files(folder: Path) -> list[tuple[int, int, Path]]:
    """Return the number, owner and path of all files, in the order in which they were begun."""
    found = ((path, _NAME.fullmatch(path.name)) for path in folder.glob("*.bank"))
    return sorted((int(name[2]), int(name[1]), path) for path, name in found if name is not None)


def _header(fingerprint: bytes) -> bytes:
    return b"%b%08x %b\n" % (_FORMAT, crc32(fingerprint), fingerprint)


def _record(fingerprint: bytes, draw: int, payload: bytes) -> bytes:
    checksum = _checksum(fingerprint, draw, payload)
    return _FRAME.pack(_MAGIC, len(payload), draw, checksum) + payload


def _checksum(fingerprint: bytes, draw: int, payload: bytes | memoryview) -> int:
    place = struct.pack("<QQ", len(payload), draw)
    return crc32(payload, crc32(place, crc32(fingerprint)))


def _scan(data: bytes, fingerprint: bytes) -> tuple[list[_Frame], list[str]]:
    """Return the intact records of a file, and what is wrong with it."""
    header, first_line = _header(fingerprint), data[: data.find(b"\n") + 1]
    if first_line == header:
        at, faults = len(header), []
    elif first_line == _header(first_line[len(_header(b"")) - 1 : -1]):
        return [], ["it belongs to a run with another model, other prompts or settings"]
    else:
        at, faults = 0, ["its header is damaged"]
    frames: list[_Frame] = []
    is_damaged = bool(faults)
    while at < len(data):
        start = data.find(_MAGIC, at)
        if start != at and not is_damaged:
            end = len(data) if start < 0 else start
            faults.append(f"record at byte {at}: bytes to {end} are not a record")
        if start < 0:
            break
        found = _frame(data, start, fingerprint)
        is_damaged = isinstance(found, str)
        if isinstance(found, _Frame):
            frames.append(found)
            at = found.end
        else:
            faults.append(f"record at byte {start}: {found}")
            at = start + 1
    return frames, faults


def _frame(data: bytes, start: int, fingerprint: bytes) -> _Frame | str:
    """Return the record that begins at `start`, or what is wrong with it."""
    begin = start + _FRAME.size
    if begin > len(data):
        return "it ends within its frame"
    _, length, draw, checksum = _FRAME.unpack_from(data, start)
    if length > len(data) - begin:
        return f"it has {len(data) - begin} of {length} bytes"
    if _checksum(fingerprint, draw, memoryview(data)[begin : begin + length]) != checksum:
        return "its checksum differs"
    return _Frame(draw, start, begin + length)
