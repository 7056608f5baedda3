"""Readers of files, JSON, YAML and file names from outside this process, or cut short by a crash.

They return plain values (dict, list, str, int, float, bool, None) within bounds, or raise
`InvalidData`, whatever the input. Worker processes import this module, so it needs only the
standard library; YAML is imported on use.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import stat
from collections.abc import Callable, Iterable, Iterator
from io import BufferedReader
from pathlib import Path
from typing import Any

FETCH_LFS = "is a pointer of Git LFS: fetch the files by git lfs pull"
_LFS_POINTER = b"version https://git-lfs.github.com"
MAX_DEPTH = 64  # of nested lists and objects
MAX_YAML_VALUES = 10_000  # after aliases are expanded
MAX_YAML_CHARACTERS = 1 << 20  # a parser in Python reads some 100,000 a second
MAX_FILE_NAME_BYTES = 255  # NAME_MAX of Linux
_MAX_FILE_BYTES = 1 << 28  # of a file that is read at once


class InvalidData(ValueError):
    """Input that cannot be read as data; the message says why."""


def parse_json(text: str | bytes) -> Any:
    """Return the value of one JSON document.

    `text` of type bytes must be UTF-8. Raises InvalidData for anything but JSON, for integers of
    more than 4300 digits, and for lists and objects nested deeper than `MAX_DEPTH`. `NaN` and
    `Infinity` are accepted, as Python writes them; `finite_number` rejects them.
    """
    try:
        value = json.loads(text.decode("utf-8") if isinstance(text, bytes) else text)
    except RecursionError:
        raise InvalidData(f"is nested deeper than {MAX_DEPTH} levels") from None
    except ValueError as error:  # also UnicodeDecodeError and an integer with too many digits
        raise InvalidData(str(error)) from error
    # Counting brackets is a hundred times cheaper than a walk, and proves most documents shallow.
    opening = ("[", "{") if isinstance(text, str) else (b"[", b"{")
    if sum(map(text.count, opening)) > MAX_DEPTH:  # type: ignore[arg-type]
        _check_shape(value, None)
    return value


def parse_yaml(text: str, *, number_of: Callable[[str], Any] | None = None) -> Any:
    """Return the value of one YAML document of plain data; None for an empty document.

    Raises InvalidData for anything but YAML's plain types, for documents nested deeper than
    `MAX_DEPTH`, for a duplicate key in a mapping, for more than `MAX_YAML_CHARACTERS`, for more
    than `MAX_YAML_VALUES` values, and for aliases and merges (`<<`) that expand to more or to
    themselves. `number_of` converts the texts that YAML would read as numbers or dates (`1.10`,
    `010`, `12:30`, `2026_01`).
    """
    import yaml

    if len(text) > MAX_YAML_CHARACTERS:
        raise InvalidData(f"has more than {MAX_YAML_CHARACTERS:,} characters")
    too_many = f"has more than {MAX_YAML_VALUES:,} values, aliases expanded"

    class Loader(yaml.SafeLoader):
        def compose_mapping_node(self, anchor: Any) -> Any:
            node = super().compose_mapping_node(anchor)
            seen: set[str] = set()
            for key, _ in node.value:
                if isinstance(key, yaml.ScalarNode) and key.value in seen:
                    raise InvalidData(f"has the key {key.value[:60]!r} twice")
                seen |= {key.value} if isinstance(key, yaml.ScalarNode) else set()
            return node

        def flatten_mapping(self, node: Any) -> None:
            super().flatten_mapping(node)
            if len(node.value) > MAX_YAML_VALUES:
                raise InvalidData(too_many)

    for kind in ("int", "float", "timestamp") if number_of else ():
        Loader.add_constructor(
            f"tag:yaml.org,2002:{kind}",
            lambda loader, node: number_of(loader.construct_scalar(node)),  # type: ignore[misc,arg-type]
        )
    depth = num_nodes = 0
    try:
        # Events are parsed without recursion, so the depth is checked before recursive code runs.
        for event in yaml.parse(text, Loader=yaml.SafeLoader):
            num_nodes += isinstance(event, yaml.NodeEvent)
            if num_nodes > 2 * MAX_YAML_VALUES:  # each with its key
                raise InvalidData(too_many)
            depth += isinstance(event, yaml.CollectionStartEvent)
            depth -= isinstance(event, yaml.CollectionEndEvent)
            if depth > MAX_DEPTH:
                raise InvalidData(f"is nested deeper than {MAX_DEPTH} levels")
        value = yaml.load(text, Loader=Loader)
    except yaml.YAMLError as error:
        raise InvalidData(" ".join(str(error).split())) from error
    # From an invalid date, number or key, or an alias inside the value that it refers to.
    except (ValueError, TypeError, OverflowError, RecursionError) as error:
        raise error if isinstance(error, InvalidData) else InvalidData(str(error)) from error
    _check_shape(value, MAX_YAML_VALUES)
    return value


def open_regular(path: Path) -> BufferedReader:
    """Open a regular file, or a link to one, for reading. Raises OSError for anything else: a pipe
    would block, and a device may never end."""
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    return open(handle, "rb")


def read_regular(path: Path, max_bytes: int = _MAX_FILE_BYTES) -> bytes:
    """Return the content of a regular file. Raises OSError, also for a longer file."""
    with open_regular(path) as file:
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise OSError(errno.EFBIG, f"it has more than {max_bytes} bytes", str(path))
    return content


def is_lfs_pointer(path: Path) -> bool:
    """Return whether a file is a Git LFS pointer, left in place of a file that was not fetched."""
    with contextlib.suppress(OSError), open_regular(path) as file:
        return file.read(len(_LFS_POINTER)) == _LFS_POINTER
    return False


def lines_of(path: Path, max_bytes: int) -> Iterator[bytes]:
    """Yield the lines of a file, without ever holding more than `max_bytes` of a line.

    A longer line, such as zeros after a crash, is cut there and keeps its newline if it has one.
    Raises OSError.
    """
    with path.open("rb") as file:
        while line := file.readline(max_bytes):
            rest = line
            while rest and not rest.endswith(b"\n"):
                rest = file.readline(max_bytes)
            yield line if rest is line or not rest else line[:-1] + b"\n"


def number(value: Any) -> float | None:
    """Return `value` as a float, finite or not, if it is an int (not a bool) or float in range."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value)
    except OverflowError:
        return None


def finite_number(value: Any) -> float | None:
    """Return `value` as a float if it is an int (not a bool) or a float, finite and in range."""
    as_float = number(value)
    return as_float if as_float is not None and math.isfinite(as_float) else None


def integer_within(value: Any, least: int, most: int) -> int | None:
    """Return `value` if it is an int (not a bool) from `least` to `most`, else None."""
    is_integer = isinstance(value, int) and not isinstance(value, bool)
    return value if is_integer and least <= value <= most else None


def plain_file_name(value: Any) -> str:
    """Return `value` if it is a file name without separators and control characters, not "..";
    raise InvalidData otherwise."""
    if not isinstance(value, str):
        raise InvalidData(f"names a file by a {type(value).__name__}")
    shown = repr(value if len(value) <= 60 else value[:60] + "...")
    is_plain = value not in ("", ".", "..") and not set(value) & set("/\\") and value.isprintable()
    if not is_plain:
        raise InvalidData(f"names a file {shown}, which is not a name within its folder")
    if len(value.encode()) > MAX_FILE_NAME_BYTES:
        raise InvalidData(f"names a file {shown} of more than {MAX_FILE_NAME_BYTES} bytes")
    return value


def _check_shape(value: Any, max_values: int | None) -> None:
    """Raise InvalidData for a value nested too deep or, with aliases expanded, too large."""
    waiting: list[Iterator[Any]] = [iter((value,))]
    count = 0
    while waiting:
        entry = next(waiting[-1], waiting)
        if entry is waiting:
            waiting.pop()
            continue
        count += 1
        if max_values is not None and count > max_values:
            raise InvalidData(f"has more than {max_values:,} values, aliases expanded")
        inner: Iterable[Any] = ()
        if isinstance(entry, dict):
            inner = entry.values()
        elif isinstance(entry, list | set | tuple):
            inner = entry
        else:
            continue
        if len(waiting) > MAX_DEPTH:
            raise InvalidData(f"is nested deeper than {MAX_DEPTH} levels")
        waiting.append(iter(inner))
