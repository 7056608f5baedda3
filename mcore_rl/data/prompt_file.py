"""Reader of prompts files (JSON Lines or Parquet), which checks every row."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from mcore_rl.batching.types import Answer
from mcore_rl.common.errors import UsageError
from mcore_rl.common.readers import MAX_DEPTH, InvalidData, finite_number, parse_json
from mcore_rl.data.demonstration_rows import Demonstration, Responses, demonstration_of
from mcore_rl.data.messages import (
    MEDIA_COLUMNS,
    Message,
    RejectedRow,
    checked_kwargs,
    checked_tools,
    function_of,
    kind_of,
    text_of,
    text_or_messages,
    value_of,
    without_nulls,
)
from mcore_rl.data.tokenizer_process import ChatTemplate

_ROWS_PER_BATCH = 4096
_ROWS_WITH_MEDIA = 64  # each of them may have megabytes
_JSON_SUFFIXES = (".jsonl", ".json")
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_TOOLS, _DOCUMENTS, _KWARGS = "tools", "documents", "chat_template_kwargs"  # columns


@dataclass(frozen=True, slots=True)
class PromptSource:
    """Prompts file and the settings for reading it.

    `prompt_column` holds a string, or a list of messages or its JSON; `answer_column` a string, a
    list, an object, or an integer or finite float, which becomes a string. `a.b` is field `b` of
    column `a`, unless a column has that name. With `use_chat_template` a string is one user
    message, and `template` selects the template, which also gets the columns `tools`, `documents`
    and `chat_template_kwargs`. Without it, a string goes to the model unchanged. `system_prompt`
    precedes messages that do not begin with a system message. Prompts longer than
    `max_prompt_tokens` are dropped. `trust_remote_code` allows the tokenizer code in the
    checkpoint's folder to run. With `responses` the rows are demonstrations, which need no answer,
    and `max_prompt_tokens` limits prompt and responses together. With `skips_bad_rows`
    (--rl-bad-rows skip) a row that cannot be used is left out.
    """

    path: Path
    max_prompt_tokens: int
    prompt_column: str = "prompt"
    answer_column: str = "answer"
    use_chat_template: bool = True
    trust_remote_code: bool = False
    template: ChatTemplate = field(default_factory=ChatTemplate)
    system_prompt: str | None = None
    flag: str = "--rl-prompts"  # that names the file
    responses: Responses | None = None
    skips_bad_rows: bool = False

    @property
    def given(self) -> str:
        """The flag with its value, for messages."""
        return f"{self.flag} {self.path}"

    @property
    def limit(self) -> str:
        """The flags of `max_prompt_tokens` with its value, for messages."""
        if self.responses is None:
            return f"--rl-max-prompt-tokens {self.max_prompt_tokens}"
        both = "--rl-max-prompt-tokens plus --rl-max-response-tokens"
        return f"{both}, {self.max_prompt_tokens},"


class PromptRow(NamedTuple):
    """Checked row; `place` is its location for messages: "line 3"."""

    place: str
    prompt: str | list[Message]
    answer: Answer
    columns: dict[str, Any]
    tools: list[dict[str, Any]] | None = None
    documents: list[dict[str, Any]] | None = None
    kwargs: dict[str, Any] | None = None  # for the chat template, for this row
    response: str | None = None  # of a demonstration without chat template
    learned: tuple[int, ...] = ()  # messages of a demonstration that are learned, from 0
    problem: str = ""  # why the row cannot be used and is skipped; it has no columns then

    @property
    def text(self) -> str:
        """Value of `Prompt.text`: the column's string, or the messages' contents in order."""
        if isinstance(self.prompt, str):
            return self.prompt
        return "\n\n".join(filter(None, map(text_of, self.prompt)))

    def request(
        self, *, use_chat_template: bool, system_prompt: str | None = None
    ) -> dict[str, Any]:
        """Return the row's request to the tokenizer's process."""
        if not use_chat_template:
            return {"text": self.prompt, "response": self.response}
        messages, learned = self.prompt, self.learned
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        if system_prompt is not None and messages[0]["role"] != "system":
            messages = [{"role": "system", "content": system_prompt}, *messages]
            learned = tuple(number + 1 for number in learned)
        return {
            "messages": _plain(messages),
            "learned": learned,
            "tools": _plain(self.tools),
            "documents": _plain(self.documents),
            "kwargs": _plain(self.kwargs),
        }

    def as_json(self) -> str:
        """Return all columns as JSON, for rewards."""
        return json.dumps(_plain(self.columns), ensure_ascii=False)


def check_prompts(source: PromptSource) -> int:
    """Read the complete file without a tokenizer; return its number of usable rows.

    Not collective. Raises UsageError for a file that is missing, empty, unreadable or has another
    suffix, for a broken line (with its number), a missing column and a value of a wrong type.
    """
    return sum(1 for row in read_rows(source) if not row.problem)


def check_path(source: PromptSource) -> None:
    path = source.path
    if path.suffix not in (*_JSON_SUFFIXES, ".parquet"):
        raise UsageError(
            f"has the suffix {path.suffix!r}, but .jsonl or .json (one JSON object per line) or "
            ".parquet is needed",
            flag=source.given,
            remedy="convert or rename it",
        )
    if not path.is_file():
        state = "is not a file" if path.exists() else "does not exist"
        raise UsageError(state, flag=source.given, remedy="give a .jsonl or .parquet file")
    if not os.access(path, os.R_OK):
        raise UsageError("cannot be read", flag=source.given, remedy="make it readable (chmod)")
    if path.stat().st_size == 0:
        raise UsageError("is empty", flag=source.given, remedy="write one prompt per line")


def read_rows(source: PromptSource) -> Iterator[PromptRow]:
    """Yield the rows of a file, checked. Raises UsageError for the first that cannot be used, or
    yields it with its `problem` if the source skips bad rows."""
    check_path(source)
    read = _read_parquet if source.path.suffix == ".parquet" else _read_json_lines
    place = None
    for place, fields in read(source):
        try:
            if isinstance(fields, RejectedRow):
                raise fields
            yield _checked_row(fields, source, place)
        except RejectedRow as error:
            yield bad_row(source, place, error)
    if place is None:
        raise UsageError("holds no rows", flag=source.given, remedy="write one prompt per line")


def bad_row(source: PromptSource, place: str, error: RejectedRow) -> PromptRow:
    """Return the entry of a row that is skipped. Raises UsageError unless the source skips it."""
    if not source.skips_bad_rows:
        if isinstance(error, _MissingColumn):
            raise UsageError(
                f"names a column that {source.given} lacks in {place}, which has {error.names}",
                flag=error.given,
                remedy="name one that all rows have",
            ) from error
        raise UsageError(
            f", {place}: {error.problem}", flag=source.given, remedy=error.remedy
        ) from error
    return PromptRow(place, "", "", {}, problem=error.problem)


def _columns_of(source: PromptSource) -> list[tuple[str, str]]:
    """Return the columns that every row needs, with the flags that name them. Demonstrations may
    be conversations in any of theirs."""
    if source.responses is not None:
        return []
    return [
        (source.prompt_column, "--rl-prompt-column"),
        (source.answer_column, "--rl-answer-column"),
    ]


class _MissingColumn(RejectedRow):
    def __init__(self, column: str, flag: str, fields: dict[str, Any]) -> None:
        super().__init__(f"it has no column {column!r}", f"name one that all rows have by {flag}")
        self.given, self.names = f"{flag} {column!r}", _names(fields)


def _needed(fields: dict[str, Any], column: str, flag: str) -> Any:
    try:
        return value_of(fields, column)
    except KeyError:
        raise _MissingColumn(column, flag, fields) from None


def _names(fields: dict[str, Any]) -> str:
    """Return the columns of a row, and the fields of objects among them."""
    names = []
    for name, value in fields.items():
        names += [
            name,
            *(f"{name}.{inner}" for inner in (value if isinstance(value, dict) else ())),
        ]
    return ", ".join(map(repr, names)) or "no columns"


def _plain(value: Any) -> Any:
    """Convert to JSON values: a date to its text, bytes and non-finite numbers to null."""
    if isinstance(value, dict):
        return {str(name): _plain(entry) for name, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(entry) for entry in value]
    if isinstance(value, bytes) or (isinstance(value, float) and not math.isfinite(value)):
        return None
    return value if isinstance(value, str | int | float | None) else str(value)


def _read_json_lines(source: PromptSource) -> Iterator[tuple[str, dict[str, Any] | RejectedRow]]:
    with source.path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                try:
                    yield f"line {number}", _parsed(line, is_first=number == 1)
                except RejectedRow as error:
                    yield f"line {number}", error


def _parsed(line: bytes, *, is_first: bool) -> dict[str, Any]:
    try:
        fields = parse_json(line.removeprefix(_BYTE_ORDER_MARK) if is_first else line)
    except InvalidData as error:
        raise RejectedRow(
            f"is not valid JSON ({error})", "each line must be one JSON object in UTF-8"
        ) from error
    if b"\\ud" in line.lower() and not _is_unicode(fields):
        raise RejectedRow("holds half a surrogate pair", "write complete pairs")
    if not isinstance(fields, dict):
        raise RejectedRow("is not a JSON object", "write {...} with the columns")
    return fields


def _is_unicode(fields: Any) -> bool:
    try:
        json.dumps(fields, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


def _read_parquet(source: PromptSource) -> Iterator[tuple[str, dict[str, Any]]]:
    try:
        with pq.ParquetFile(source.path, memory_map=True) as file:
            schema = file.schema_arrow
            needed = _columns_of(source)
            read = [name for name, _ in needed]
            if source.responses is not None:
                names = source.responses.column, source.responses.other
                read = [source.prompt_column, *filter(None, names)]
            wanted = {name if name in schema.names else name.split(".")[0] for name in read}
            for name, flag in needed:
                if name not in schema.names and name.split(".")[0] not in schema.names:
                    error = _MissingColumn(name, flag, dict.fromkeys(schema.names))
                    bad_row(dataclasses.replace(source, skips_bad_rows=False), "its schema", error)
            for column in schema:
                _check_depth(column, source)
            # Of images and the like it is enough to know whether there are any.
            of_bytes = {f.name for f in schema if f.name not in wanted and _is_bytes(f.type)}
            media = [name for name in MEDIA_COLUMNS if name in of_bytes]
            columns = [name for name in schema.names if name not in of_bytes or name in media]
            number, num_rows = 0, _ROWS_WITH_MEDIA if media else _ROWS_PER_BATCH
            for batch in file.iter_batches(batch_size=num_rows, columns=columns):
                given = {name: _has_value(batch.column(name)) for name in media}
                rows = batch.drop_columns(media).to_pylist(maps_as_pydicts="lossy")
                for index, fields in enumerate(rows):
                    number += 1
                    yield f"row {number}", fields | {n: True for n in media if given[n][index]}
    except (pa.ArrowException, UnicodeDecodeError, OSError) as error:
        raise UsageError(
            f"cannot be read as Parquet ({error})",
            flag=source.given,
            remedy="recreate the file",
        ) from error


def _check_depth(column: pa.Field, source: PromptSource) -> None:
    """Raise UsageError for a column nested deeper than JSON may be."""
    waiting = [(column.type, 1)]
    while waiting:
        kind, depth = waiting.pop()
        if depth > MAX_DEPTH:
            raise UsageError(
                f", column {column.name!r}: is nested deeper than {MAX_DEPTH} levels",
                flag=source.given,
                remedy="reduce the nesting",
            )
        waiting += [(kind.field(n).type, depth + 1) for n in range(kind.num_fields)]


def _has_value(column: pa.Array) -> list[bool]:
    """Return for each row whether the column has a value other than an empty list."""
    if isinstance(column, pa.ListArray | pa.LargeListArray):
        lengths = pc.fill_null(pc.list_value_length(column), 0)
        return [bool(length) for length in lengths.to_pylist()]
    return list(column.is_valid().to_pylist())


def _is_bytes(kind: pa.DataType) -> bool:
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return _is_bytes(kind.value_type)
    if pa.types.is_struct(kind):
        return any(_is_bytes(field.type) for field in kind)
    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind))


def _checked_row(fields: dict[str, Any], source: PromptSource, place: str) -> PromptRow:
    """Return a row. Raises RejectedRow."""
    for name in MEDIA_COLUMNS:
        if fields.get(name):
            raise RejectedRow(
                f"it has {name}, which no model gets here",
                "remove such rows, or skip them by --rl-bad-rows skip",
            )
    is_parquet = source.path.suffix == ".parquet"
    answer: Answer = ""  # demonstrations have none
    if source.responses is None:
        prompt, value = (_needed(fields, name, flag) for name, flag in _columns_of(source))
        answer = _checked_answer(value, source)
        demonstration = Demonstration(
            text_or_messages(prompt, source.prompt_column, is_parquet=is_parquet, is_complete=False)
        )
    else:
        demonstration = demonstration_of(
            fields,
            source.prompt_column,
            source.responses,
            is_parquet=is_parquet,
            use_chat_template=source.use_chat_template,
        )
    for_template = [
        without_nulls(fields.get(name)) if is_parquet else fields.get(name)
        for name in (_TOOLS, _DOCUMENTS, _KWARGS)
    ]
    tools = checked_tools(for_template[0], _TOOLS)
    kwargs = checked_kwargs(for_template[2], f"column {_KWARGS!r}")
    row = PromptRow(place, demonstration.prompt, answer, fields)
    if not source.use_chat_template:
        _refuse_without_template(demonstration.prompt, tools, kwargs)
        return row._replace(response=demonstration.response)
    # A column of this name may be only for the reward.
    documents = for_template[1]
    is_theirs = isinstance(documents, list) and all(isinstance(d, dict) for d in documents)
    return row._replace(
        tools=tools,
        documents=documents if is_theirs and documents else None,
        kwargs=kwargs,
        learned=demonstration.learned,
    )


def _refuse_without_template(
    messages: str | list[Message], tools: list[dict[str, Any]] | None, kwargs: dict[str, Any]
) -> None:
    """Raise RejectedRow for parts that only a chat template can give to the model."""
    remedy = "leave out --rl-no-chat-template or write a string with all of it"
    if not isinstance(messages, str):
        raise RejectedRow("its prompt is a list of messages, which need the chat template", remedy)
    names = [str(function_of(tool).get("name")) for tool in tools or ()]
    if not all(name in messages for name in names):
        raise RejectedRow("it has tools, which need the chat template", remedy)
    if kwargs:
        raise RejectedRow(f"it has {_KWARGS}, which need the chat template", remedy)


def _checked_answer(value: Any, source: PromptSource) -> Answer:
    if isinstance(value, list | dict):
        plain: list[Any] | dict[str, Any] = _plain(value)
        return plain
    # An integer may exceed the range of float.
    is_integer = isinstance(value, int) and not isinstance(value, bool)
    if isinstance(value, str) or is_integer or finite_number(value) is not None:
        return str(value)
    raise RejectedRow(
        f"column {source.answer_column!r} is {kind_of(value)}",
        "write a string, a finite number, a list or an object",
    )
