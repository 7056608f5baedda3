"""Finished groups on the disk, so that they survive a kill between two checkpoints.

Each process that is the first rank of its TP group appends to files of its own. A file is a header
line and records; integers are little-endian:

    mcore_rl bank 1 <CRC-32 of the fingerprint> <fingerprint>\\n
    magic (8 bytes), length of the payload (8), draw (8), CRC-32 (4), payload: `group_to_bytes`

The fingerprint is a line of text that names everything that a group depends on: the run's branch
(`branch`), model, environments, prompts, seed, number of samples. A record's checksum covers the
fingerprint, length, draw and payload, so a record of another run is not mistaken for one of this
run even if the header is damaged. After damage, a reader continues at the next magic whose record
is intact. No reader holds more than one record, and each reads a file in linear time.

A checkpoint holds its unfinished groups in files of the same format. They are files of its own, so
that its folder is complete wherever it is copied.
"""

from __future__ import annotations

import logging
import os
import re
import struct
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO
from zlib import crc32

from mcore_rl.batching.types import Prompt
from mcore_rl.common.disk import sync
from mcore_rl.common.readers import open_regular
from mcore_rl.rollout.group_encoding import (
    MALFORMED,
    EngineLimits,
    group_from_bytes,
    group_to_bytes,
)
from mcore_rl.rollout.segments import OpenGroup

logger = logging.getLogger(__name__)

_NAME = re.compile(r"group_(\d+)_(\d+)\.bank")  # the owner and the number of the file
_MAGIC = b"\x89RLBANK\n"  # not ASCII: not part of any JSON
_FRAME = struct.Struct("<8sQQI")
_FORMAT = b"mcore_rl bank 1 "
_OF_CHECKPOINT = b"of the checkpoint"  # the fingerprint of a file that belongs to one
_MOST_HEADER_BYTES = 1 << 20
_CHUNK_BYTES = 1 << 20
_MOST_FAULTS = 8  # of a file that are described
# Bytes that may be read for records that turn out to be damaged, in sizes of the file. Without a
# limit, many false frames would each be checked to the end of the file.
_MOST_READ_AGAIN = 4


class Bank:
    """A TP group's finished groups that no checkpoint has trained on; on its first rank.

    A process starts a new file, and another one with each `forget`; their numbers are higher than
    those of earlier processes. Files of owners that a run with fewer TP groups no longer has are
    passed on to the others. One thread may append while another one forgets.
    """

    def __init__(self, folder: Path, *, owner: int, num_owners: int, fingerprint: str) -> None:
        """`owner` is the TP group, of `num_owners`. `fingerprint` has one line."""
        assert "\n" not in fingerprint, "a fingerprint has one line"
        folder.mkdir(parents=True, exist_ok=True)
        sync(folder.parent)
        self._folder, self._owner, self._num_owners = folder, owner, num_owners
        self._fingerprint = fingerprint.encode()
        self._number = _next_number(_files(folder))
        self._lock = threading.Lock()

    @property
    def _file(self) -> Path:
        return self._folder / f"group_{self._owner:05d}_{self._number}.bank"

    def append(self, group: OpenGroup) -> None:
        """Write a finished group with its rewards. It is on the disk when this returns. Raises
        OSError; a later call may succeed."""
        assert group.is_sampled, f"draw {group.draw} has not finished"
        payload = group_to_bytes(group)
        with self._lock:
            is_new = not self._file.exists()
            with self._file.open("ab") as file:
                if is_new:
                    file.write(_header(self._fingerprint))
                file.write(_frame_of(self._fingerprint, group.draw, payload))
                file.write(payload)
                file.flush()
                os.fsync(file.fileno())
        if is_new:
            sync(self._folder)

    def forget(self, draws: Collection[int]) -> None:
        """Remove the groups of these draws, which a checkpoint has trained on or dropped, but not
        those that are appended meanwhile. Raises OSError if some files cannot be rewritten: each of
        them then has all its groups."""
        with self._lock:
            files = _files(self._folder)
            self._number = _next_number(files)
        mine = [
            path
            for _, owner, path in files
            if owner % self._num_owners == self._owner and path.is_file()
        ]
        failures: dict[str, OSError] = {}
        for path in mine:
            try:
                self._trim(path, draws)
            except OSError as error:
                failures[path.name] = error
        sync(self._folder)
        if failures:
            name, first = next(iter(failures.items()))
            more = f", and {len(failures) - 1} more files" if len(failures) > 1 else ""
            raise OSError(first.errno, f"{first.strerror}: {name}{more}")

    def _trim(self, path: Path, draws: Collection[int]) -> None:
        """Remove these draws' groups, and what is damaged, from a file."""
        partial = path.with_name(path.name + ".partial")
        with open_regular(path) as file:
            scanned = _Records(file, self._fingerprint).scan()
            if not scanned.frames and not scanned.is_of_run:
                return
            kept = [frame for frame in scanned.frames if frame.draw not in draws]
            if scanned.frames and len(kept) == len(scanned.frames):
                return
            if kept:
                with partial.open("wb") as copy:
                    copy.write(_header(self._fingerprint))
                    for frame in kept:
                        for chunk in _chunks(file, frame.start, frame.end):
                            copy.write(chunk)
        if kept:
            sync(partial)
            partial.replace(path)
        else:
            partial.unlink(missing_ok=True)  # of a process that was killed
            path.unlink()


@dataclass(frozen=True, slots=True)
class BankedGroup:
    """A finished group on the disk, which no process has in its memory before `read`."""

    _frame: _Frame  # when the bank was read
    _path: Path
    _fingerprint: bytes
    _prompt_of: Callable[[int], Prompt]
    _limits: EngineLimits
    _fits: Callable[[OpenGroup], bool]

    def read(self) -> OpenGroup | None:
        """Read the group, also after its owner has forgotten others. None, with a warning, if that
        fails: the draw must then be sampled again."""
        try:
            group = group_from_bytes(self._payload(), self._prompt_of, self._limits)
            if group.draw != self._frame.draw or not group.is_sampled or not self._fits(group):
                raise ValueError("it is not the finished group of this draw")
            return group
        except MALFORMED as error:
            why = f"{type(error).__name__}: {error}"
            draw, name = self._frame.draw, self._path.name
            logger.warning("[Bank] draw %d of %s is sampled again: %s", draw, name, why)
            return None

    def _payload(self) -> bytes:
        with open_regular(self._path) as file:
            records = _Records(file, self._fingerprint)
            starts = [start for draw, start in records.walk() if draw == self._frame.draw]
            for start in (self._frame.start, *reversed(starts)):
                record = records.frame(start)
                if isinstance(record, _Frame) and record.draw == self._frame.draw:
                    return record.payload(file)
        raise ValueError("its record is gone")


def read_bank(
    folder: Path,
    prompt_of: Callable[[int], Prompt],
    *,
    fingerprint: str,
    limits: EngineLimits | None = None,
    fits: Callable[[OpenGroup], bool] = lambda group: True,
) -> tuple[dict[int, BankedGroup], list[str]]:
    """Return the groups of all owners by draw, and a description of what was skipped: damaged
    places, and how many groups are of other runs or branches. On the first rank of each TP group;
    before the first `forget` of its job.

    `prompt_of` returns the prompt of a draw. A group that is not within `limits`, or does not fit,
    is not read. Of a draw that was recorded twice, the last intact record counts. There may be
    groups that the newest checkpoint has trained on, if the job was killed before it could forget
    them.

    Examples of descriptions: "group_00003_1.bank: record at byte 5120: its checksum differs"; "144
    in 2 files of another start in this folder, or ...".
    """
    groups: dict[int, BankedGroup] = {}
    skipped: list[str] = []
    of_others: list[int] = []  # groups of each file
    run, limits = fingerprint.encode(), limits or EngineLimits()
    for _, _, path in _files(folder):
        try:
            with open_regular(path) as file:
                scanned = _Records(file, run).scan()
        except OSError as error:
            skipped.append(f"{path.name}: {error.strerror}")
            continue
        for frame in scanned.frames:
            groups[frame.draw] = BankedGroup(frame, path, run, prompt_of, limits, fits)
        of_others += [scanned.num_of_others] if scanned.is_of_another else []
        skipped += [f"{path.name}: {fault}" for fault in scanned.faults]
    if of_others:
        places = "1 file" if len(of_others) == 1 else f"{len(of_others)} files"
        skipped.append(
            f"{sum(of_others)} in {places} of another start in this folder, or of a run with "
            "another model, other prompts or settings; these files may be deleted"
        )
    return groups, skipped


def write_records(path: Path, records: Iterable[tuple[int, bytes]]) -> None:
    """Write draws and encoded groups into a file of a checkpoint."""
    with path.open("wb") as file:
        file.write(_header(_OF_CHECKPOINT))
        for draw, payload in records:
            file.write(_frame_of(_OF_CHECKPOINT, draw, payload))
            file.write(payload)


def read_records(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield what `write_records` wrote. Raises OSError, or ValueError if any part is damaged."""
    with open_regular(path) as file:
        scanned = _Records(file, _OF_CHECKPOINT).scan()
        if scanned.faults or not scanned.is_of_run:
            raise ValueError(next(iter(scanned.faults), "it belongs to a run"))
        for frame in scanned.frames:
            yield frame.draw, frame.payload(file)


@dataclass(frozen=True, slots=True)
class _Frame:
    """An intact record of a file: its draw, and its bytes from `start` to `end`."""

    draw: int
    start: int
    end: int

    def payload(self, file: BinaryIO) -> bytes:
        file.seek(self.start + _FRAME.size)
        return file.read(self.end - self.start - _FRAME.size)


@dataclass(frozen=True, slots=True)
class _Found:
    """What a file has; `num_of_others` counts its records if it is of another run."""

    frames: list[_Frame]
    faults: list[str]
    is_of_run: bool = False  # by its header
    is_of_another: bool = False  # by its header
    num_of_others: int = 0


class _Faults:
    """The damaged places of a file, of which there may be millions."""

    def __init__(self, first: list[str]) -> None:
        self._first, self._num_more = first, 0

    def add(self, fault: str) -> None:
        if len(self._first) < _MOST_FAULTS:
            self._first.append(fault)
        else:
            self._num_more += 1

    def described(self) -> list[str]:
        more = [f"{self._num_more} more places are damaged"] if self._num_more else []
        return self._first + more


class _Records:
    """The records of a file."""

    def __init__(self, file: BinaryIO, fingerprint: bytes) -> None:
        self._file, self._fingerprint = file, fingerprint
        self._size = os.fstat(file.fileno()).st_size
        self._left_bytes = _MOST_READ_AGAIN * self._size
        self._chunk, self._chunk_at = b"", 0  # where magics are searched

    def scan(self) -> _Found:
        """Find the intact records, and what is wrong with the file."""
        header, first_line = _header(self._fingerprint), self._first_line()
        is_of_run = first_line == header
        if not is_of_run and first_line == _header(first_line[len(_header(b"")) - 1 : -1]):
            num_of_others = sum(1 for _ in self.walk())
            return _Found([], [], is_of_another=True, num_of_others=num_of_others)
        frames: list[_Frame] = []
        faults = _Faults([] if is_of_run else ["its header is damaged"])
        at, is_damaged = len(header) if is_of_run else 0, not is_of_run
        while at < self._size:
            start = self._find_magic(at)
            if start != at and not is_damaged:
                end = self._size if start < 0 else start
                faults.add(f"record at byte {at}: bytes to {end} are not a record")
            if start < 0:
                break
            record = self.frame(start)
            is_damaged = isinstance(record, str)
            if isinstance(record, _Frame):
                frames.append(record)
                at = record.end
            else:
                faults.add(f"record at byte {start}: {record}")
                at = start + 1
        return _Found(frames, faults.described(), is_of_run=is_of_run)

    def frame(self, start: int) -> _Frame | str:
        """Return the record that begins at `start`, or what is wrong with it."""
        begin = start + _FRAME.size
        if begin > self._size:
            return "it ends within its frame"
        magic, length, draw, checksum = _FRAME.unpack(self._bytes(start, _FRAME.size))
        if magic != _MAGIC:
            return "it does not begin with a frame"
        if length > self._size - begin:
            return f"it has {self._size - begin} of {length} bytes"
        if length > self._left_bytes:
            return "it is not read, since too much of the file is damaged"
        computed = _checksum_before(self._fingerprint, draw, length)
        for chunk in _chunks(self._file, begin, begin + length):
            computed = crc32(chunk, computed)
        if computed != checksum:
            self._left_bytes -= length
            return "its checksum differs"
        return _Frame(draw, start, begin + length)

    def _find_magic(self, at: int) -> int:
        """Return where the next magic begins, from `at` on; -1 without one."""
        while at < self._size:
            self._bytes(at, len(_MAGIC))  # are in the chunk now
            offset = self._chunk.find(_MAGIC, at - self._chunk_at)
            if offset >= 0:
                return self._chunk_at + offset
            end = self._chunk_at + len(self._chunk)
            if end >= self._size:
                break
            at = end - len(_MAGIC) + 1
        return -1

    def _bytes(self, start: int, count: int) -> bytes:
        """Return `count` bytes from `start` on, zeros behind the end of the file."""
        at = start - self._chunk_at
        if at < 0 or at + count > len(self._chunk):
            self._chunk = os.pread(self._file.fileno(), _CHUNK_BYTES, start)
            self._chunk_at, at = start, 0
        return self._chunk[at : at + count].ljust(count, b"\0")

    def walk(self) -> Iterator[tuple[int, int]]:
        """Yield draws and beginnings of the records up to the first that is damaged, without
        reading payloads."""
        at = len(self._first_line())
        while at + _FRAME.size <= self._size:
            frame = os.pread(self._file.fileno(), _FRAME.size, at)
            magic, length, draw, _ = _FRAME.unpack(frame.ljust(_FRAME.size, b"\0"))
            if magic != _MAGIC or length > self._size - at - _FRAME.size:
                break
            yield draw, at
            at += _FRAME.size + length

    def _first_line(self) -> bytes:
        self._file.seek(0)
        return self._file.readline(_MOST_HEADER_BYTES)


def _chunks(file: BinaryIO, start: int, end: int) -> Iterator[bytes]:
    """Yield the bytes of a file from `start` to `end`, or to its end."""
    while start < end and (chunk := os.pread(file.fileno(), min(_CHUNK_BYTES, end - start), start)):
        yield chunk
        start += len(chunk)


def _files(folder: Path) -> list[tuple[int, int, Path]]:
    """Return the number, owner and path of all files, in the order in which they were begun."""
    matches = ((path, _NAME.fullmatch(path.name)) for path in folder.glob("*.bank"))
    return sorted((int(name[2]), int(name[1]), path) for path, name in matches if name is not None)


def _next_number(files: Sequence[tuple[int, int, Path]]) -> int:
    return 1 + max((number for number, _, _ in files), default=0)


def _header(fingerprint: bytes) -> bytes:
    return b"%b%08x %b\n" % (_FORMAT, crc32(fingerprint), fingerprint)


def _frame_of(fingerprint: bytes, draw: int, payload: bytes) -> bytes:
    checksum = crc32(payload, _checksum_before(fingerprint, draw, len(payload)))
    return _FRAME.pack(_MAGIC, len(payload), draw, checksum)


def _checksum_before(fingerprint: bytes, draw: int, length: int) -> int:
    """Return the checksum of a record before its payload."""
    return crc32(struct.pack("<QQ", length, draw), crc32(fingerprint))
