"""A file of prompts, read and checked row by row: JSON Lines or Parquet."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import pyarrow as pa
import pyarrow.parquet as pq

from mcore_rl.batching.types import Answer
from mcore_rl.common.errors import UsageError

_ROWS_PER_BATCH = 4096
_JSON_SUFFIXES = (".jsonl", ".json")


@dataclass(frozen=True, slots=True)
class PromptSource:
    """A file of prompts and how it is read.

    `prompt_column` holds a string or a list of {role, content} messages; `answer_column` a string,
    a list, an object, or an integer or finite float, which becomes a string. `a.b` is field `b` of
    column `a`, unless there is a column of that name. With `use_chat_template` a string is one
    user message; without it, it goes to the model as it stands. Longer prompts than
    `max_prompt_tokens` are dropped. `trust_remote_code` lets the checkpoint's folder bring code of
    its own for its tokenizer, which then runs.
    """

    path: Path
    max_prompt_tokens: int
    prompt_column: str = "prompt"
    answer_column: str = "answer"
    use_chat_template: bool = True
    trust_remote_code: bool = False


class PromptRow(NamedTuple):
    """A checked row. `place` says where it stands, for messages: "line 3"."""

    place: str
    prompt: str | list[dict[str, str]]
    answer: Answer
    columns: dict[str, Any]

    @property
    def text(self) -> str:
        """What `Prompt.text` is: the column's string, or the messages' contents in turn."""
        if isinstance(self.prompt, str):
            return self.prompt
        return "\n\n".join(message["content"] for message in self.prompt)

    def as_json(self) -> str:
        """All columns, for rewards."""
        return json.dumps(_plain(self.columns), ensure_ascii=False)


def check_prompts(source: PromptSource, flag: str = "--rl-prompts") -> int:
    """Reads the whole file without a tokenizer; returns its number of rows.

    Not collective. Raises UsageError for a file that is missing, empty, of another suffix or
    unreadable, for a broken line (with its number), a missing column and a value of a wrong type.
    """
    return sum(1 for _ in read_rows(source, flag))


def check_path(source: PromptSource, flag: str) -> None:
    path = source.path
    if path.suffix not in (*_JSON_SUFFIXES, ".parquet"):
        raise UsageError(
            f"has the suffix {path.suffix!r}, but .jsonl or .json (one JSON object a line) or "
            ".parquet is needed",
            flag=f"{flag} {path}",
            remedy="convert or rename it",
        )
    if not path.is_file():
        state = "is not a file" if path.exists() else "does not exist"
        raise UsageError(state, flag=f"{flag} {path}", remedy="give a .jsonl or .parquet file")
    if not os.access(path, os.R_OK):
        raise UsageError(
            "cannot be read", flag=f"{flag} {path}", remedy="give yourself the permission (chmod)"
        )
    if path.stat().st_size == 0:
        raise UsageError("is empty", flag=f"{flag} {path}", remedy="write one prompt a line")


def read_rows(source: PromptSource, flag: str) -> Iterator[PromptRow]:
    check_path(source, flag)
    read = _read_parquet if source.path.suffix == ".parquet" else _read_json_lines
    place = None
    for place, fields in read(source, flag):
        found = []
        for column, column_flag in (
            (source.prompt_column, "--rl-prompt-column"),
            (source.answer_column, "--rl-answer-column"),
        ):
            try:
                found.append(_value_of(fields, column))
            except KeyError:
                raise UsageError(
                    f"names a column that {flag} {source.path} lacks in {place}, which has "
                    f"{_names(fields)}",
                    flag=f"{column_flag} {column!r}",
                    remedy="name one that all rows have",
                ) from None
        prompt, answer = found
        yield PromptRow(
            place,
            _checked_prompt(prompt, source, flag, place),
            _checked_answer(answer, source, flag, place),
            fields,
        )
    if place is None:
        raise UsageError(
            "holds no rows", flag=f"{flag} {source.path}", remedy="write one prompt a line"
        )


def _value_of(fields: dict[str, Any], column: str) -> Any:
    """Of a column, or of `a.b` in it; KeyError where there is none."""
    if column in fields:
        return fields[column]
    value: Any = fields
    for name in column.split("."):
        if not isinstance(value, dict):
            raise KeyError(name)
        value = value[name]
    return value


def _names(fields: dict[str, Any]) -> str:
    """The columns of a row, and what an object among them has."""
    names = []
    for name, value in fields.items():
        names += [
            name,
            *(f"{name}.{inner}" for inner in (value if isinstance(value, dict) else ())),
        ]
    return ", ".join(map(repr, names)) or "no columns"


def _plain(value: Any) -> Any:
    """What JSON can hold: a date by its text, bytes and a number that is not finite as null."""
    if isinstance(value, dict):
        return {str(name): _plain(entry) for name, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(entry) for entry in value]
    if isinstance(value, bytes) or (isinstance(value, float) and not math.isfinite(value)):
        return None
    return value if isinstance(value, str | int | float | None) else str(value)


def _read_json_lines(source: PromptSource, flag: str) -> Iterator[tuple[str, dict[str, Any]]]:
    with source.path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            place = f"line {number}"
            try:
                fields = json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"))
                is_whole = b"\\ud" not in line.lower() or _is_unicode(fields)
            # Of the JSON and of the UTF-8; of JSON that is nested too deep.
            except (ValueError, RecursionError) as error:
                raise UsageError(
                    f", {place}, is not valid JSON ({error})",
                    flag=f"{flag} {source.path}",
                    remedy="each line must be one JSON object in UTF-8",
                ) from error
            if not is_whole:
                _refuse(source, flag, place, "holds half a surrogate pair", "write whole ones")
            if not isinstance(fields, dict):
                _refuse(source, flag, place, "is no JSON object", "write {...} with the columns")
            yield place, fields


def _is_unicode(fields: Any) -> bool:
    try:
        json.dumps(fields, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


def _read_parquet(source: PromptSource, flag: str) -> Iterator[tuple[str, dict[str, Any]]]:
    try:
        with pq.ParquetFile(source.path, memory_map=True) as file:
            schema = file.schema_arrow
            wanted = {
                name if name in schema.names else name.split(".")[0]
                for name in (source.prompt_column, source.answer_column)
            }
            if not wanted.issubset(schema.names):
                yield "its schema", dict.fromkeys(schema.names)
            # Without images and the like, which are most of such a file.
            columns = [f.name for f in schema if f.name in wanted or not _is_bytes(f.type)]
            number = 0
            for batch in file.iter_batches(batch_size=_ROWS_PER_BATCH, columns=columns):
                for fields in batch.to_pylist():
                    number += 1
                    yield f"row {number}", fields
    except (pa.ArrowException, UnicodeDecodeError, OSError) as error:
        raise UsageError(
            f"cannot be read as Parquet ({error})",
            flag=f"{flag} {source.path}",
            remedy="write it again",
        ) from error


def _is_bytes(kind: pa.DataType) -> bool:
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return _is_bytes(kind.value_type)
    if pa.types.is_struct(kind):
        return any(_is_bytes(field.type) for field in kind)
    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind))


def _checked_prompt(
    value: Any, source: PromptSource, flag: str, place: str
) -> str | list[dict[str, str]]:
    column = f"column {source.prompt_column!r} is"
    if isinstance(value, str):
        if not value.strip():
            _refuse(source, flag, place, f"{column} blank", "write a prompt or remove the row")
        return value
    if not isinstance(value, list) or not value or not all(map(_is_message, value)):
        _refuse(
            source,
            flag,
            place,
            f"{column} {_kind(value)}",
            "write a string or a list of {role, content} messages, all strings",
        )
    if not source.use_chat_template:
        _refuse(
            source,
            flag,
            place,
            f"{column} a list of messages, which need the chat template",
            "leave out --rl-no-chat-template or write a string",
        )
    return [{"role": message["role"], "content": message["content"]} for message in value]


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and all(
        isinstance(value.get(key), str) for key in ("role", "content")
    )


def _checked_answer(value: Any, source: PromptSource, flag: str, place: str) -> Answer:
    if isinstance(value, list | dict):
        plain: list[Any] | dict[str, Any] = _plain(value)
        return plain
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if isinstance(value, str) or (is_number and math.isfinite(value)):
        return str(value)
    column = f"column {source.answer_column!r} is {_kind(value)}"
    _refuse(source, flag, place, column, "write a string, a finite number, a list or an object")


def _kind(value: Any) -> str:
    if value is None or isinstance(value, float):
        return "null" if value is None else repr(value)
    return f"of type {type(value).__name__} ({repr(value)[:60]})"


def _refuse(source: PromptSource, flag: str, place: str, problem: str, remedy: str) -> NoReturn:
    raise UsageError(f", {place}: {problem}", flag=f"{flag} {source.path}", remedy=remedy)
