"""Read JSON, YAML and file names that someone else wrote or that a crash has cut short.

A downloaded folder, a prompt file, a worker's message and a metrics file are all data that this
process did not write. These functions return plain values (dict, list, str, int, float, bool, None)
within bounds, or raise `InvalidData`, whatever the input. Callers turn it into a sentence that
names the file. Worker processes import this module, so it needs the standard library alone; YAML is
imported on use.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

MAX_DEPTH = 64  # of lists and objects within each other
MAX_YAML_VALUES = 100_000  # after its aliases are expanded
MAX_FILE_NAME_BYTES = 255  # NAME_MAX of Linux


class InvalidData(ValueError):
    """The input cannot be read as data, and the message says why."""


def parse_json(text: str | bytes, *, max_depth: int = MAX_DEPTH) -> Any:
    """The value of one JSON document.

    `text` of type bytes must be UTF-8. Raises InvalidData for anything else than JSON, for integers
    of more than 4300 digits, and for lists and objects nested deeper than `max_depth`. `NaN` and
    `Infinity` are accepted, as Python writes them; `finite_number` rejects them.
    """
    try:
        value = json.loads(text.decode("utf-8") if isinstance(text, bytes) else text)
    except RecursionError:
        raise InvalidData(f"is nested deeper than {max_depth} levels") from None
    except ValueError as error:  # also UnicodeDecodeError and an integer of too many digits
        raise InvalidData(str(error)) from error
    # Counting is a hundred times cheaper than walking, and proves most documents shallow.
    opening = ("[", "{") if isinstance(text, str) else (b"[", b"{")
    if sum(map(text.count, opening)) > max_depth:  # type: ignore[arg-type]
        _check_shape(value, max_depth, None)
    return value


def parse_yaml(text: str, *, max_depth: int = MAX_DEPTH) -> Any:
    """The value of one YAML document of plain data; None for an empty one.

    Raises InvalidData for anything else than YAML's plain types, for documents nested deeper than
    `max_depth`, for a key that a mapping has twice, and for aliases and merges (`<<`) that expand
    to more than `MAX_YAML_VALUES` values or to themselves.
    """
    import yaml

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
                raise InvalidData(f"has more than {MAX_YAML_VALUES} values, aliases expanded")

    depth = 0
    try:
        # The events come without recursion: depth is known before anything recursive runs.
        for event in yaml.parse(text, Loader=yaml.SafeLoader):
            depth += isinstance(event, yaml.CollectionStartEvent)
            depth -= isinstance(event, yaml.CollectionEndEvent)
            if depth > max_depth:
                raise InvalidData(f"is nested deeper than {max_depth} levels")
        value = yaml.load(text, Loader=Loader)
    except yaml.YAMLError as error:
        raise InvalidData(" ".join(str(error).split())) from error
    # Of a date, a number or a key that is none, and of an alias within what it names.
    except (ValueError, TypeError, OverflowError, RecursionError) as error:
        raise error if isinstance(error, InvalidData) else InvalidData(str(error)) from error
    _check_shape(value, max_depth, MAX_YAML_VALUES)
    return value


def lines_of(path: Path, max_bytes: int) -> Iterator[bytes]:
    """The lines of a file, without ever holding more than `max_bytes` of one.

    A longer line, as a crash may leave in zeros, is cut there and keeps its end, if it has one.
    Raises OSError.
    """
    with path.open("rb") as file:
        while line := file.readline(max_bytes):
            rest = line
            while rest and not rest.endswith(b"\n"):
                rest = file.readline(max_bytes)
            yield line if rest is line or not rest else line[:-1] + b"\n"


def number(value: Any) -> float | None:
    """`value` as a float, finite or not, if it is an int or a float (no bool) that one can hold."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value)
    except OverflowError:
        return None


def finite_number(value: Any) -> float | None:
    """`value` as a float if it is an int or a float (no bool) that a finite float can hold."""
    found = number(value)
    return found if found is not None and math.isfinite(found) else None


def integer_within(value: Any, least: int, most: int) -> int | None:
    """`value` if it is an int (no bool) from `least` to `most`."""
    is_integer = isinstance(value, int) and not isinstance(value, bool)
    return value if is_integer and least <= value <= most else None


def plain_file_name(value: Any) -> str:
    """`value` if it names a file within a folder: no separator, no parent, no control character.

    Raises InvalidData otherwise.
    """
    if not isinstance(value, str):
        raise InvalidData(f"names a file by a {type(value).__name__}")
    shown = repr(value if len(value) <= 60 else value[:60] + "...")
    is_plain = value not in ("", ".", "..") and not set(value) & set("/\\") and value.isprintable()
    if not is_plain:
        raise InvalidData(f"names a file {shown}, which is not a name within its folder")
    if len(value.encode()) > MAX_FILE_NAME_BYTES:
        raise InvalidData(f"names a file {shown} of more than {MAX_FILE_NAME_BYTES} bytes")
    return value


def _check_shape(value: Any, max_depth: int, max_values: int | None) -> None:
    """InvalidData for a value that is nested too deep or, aliases expanded, too large."""
    waiting: list[Iterator[Any]] = [iter((value,))]
    count = 0
    while waiting:
        entry = next(waiting[-1], waiting)
        if entry is waiting:
            waiting.pop()
            continue
        count += 1
        if max_values is not None and count > max_values:
            raise InvalidData(f"has more than {max_values} values, aliases expanded")
        inner: Iterable[Any] = ()
        if isinstance(entry, dict):
            inner = entry.values()
        elif isinstance(entry, list | set | tuple):
            inner = entry
        else:
            continue
        if len(waiting) > max_depth:
            raise InvalidData(f"is nested deeper than {max_depth} levels")
        waiting.append(iter(inner))
