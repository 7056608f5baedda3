"""Reader of prompts files (JSON Lines or Parquet), which checks every row."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import pyarrow as pa
import pyarrow.parquet as pq

from mcore_rl.batching.types import Answer
from mcore_rl.common.errors import UsageError
from mcore_rl.common.readers import MAX_DEPTH, InvalidData, finite_number, parse_json
from mcore_rl.data.messages import (
    MEDIA_COLUMNS,
    MESSAGES_IN_TEXT,
    Message,
    RejectedRow,
    checked_kwargs,
    checked_messages,
    checked_tools,
    continues,
    function_of,
    parse_if_text,
    text_of,
    without_nulls,
)
from mcore_rl.data.tokenizer_process import ChatTemplate

_ROWS_PER_BATCH = 4096
_JSON_SUFFIXES = (".jsonl", ".json")
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_NOT_READ = object()  # placeholder for a value of bytes
_TOOLS, _DOCUMENTS, _KWARGS = "tools", "documents", "chat_template_kwargs"  # columns


@dataclass(frozen=True, slots=True)
class Responses:
    """The responses of demonstrations.

    `column` holds a text or one assistant's message in a list, which follows the prompt. Without
    `is_required`, prompts of a row without it must be messages with assistant's turns. `loss_on` is
    --rl-sft-loss-on.
    """

    column: str
    loss_on: str
    is_required: bool = False


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
    and `max_prompt_tokens` limits prompt and responses together.
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
    media: tuple[str, ...] = ()  # columns with images and the like, which the model does not get
    response: str | None = None  # of a demonstration without chat template

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
        messages = self.prompt
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        if system_prompt is not None and messages[0]["role"] != "system":
            messages = [{"role": "system", "content": system_prompt}, *messages]
        return {
            "messages": _plain(messages),
            "tools": _plain(self.tools),
            "documents": _plain(self.documents),
            "kwargs": _plain(self.kwargs),
        }

    def as_json(self) -> str:
        """Return all columns as JSON, for rewards."""
        return json.dumps(_plain(self.columns), ensure_ascii=False)


def check_prompts(source: PromptSource) -> int:
    """Read the complete file without a tokenizer; return its number of rows.

    Not collective. Raises UsageError for a file that is missing, empty, unreadable or has another
    suffix, for a broken line (with its number), a missing column and a value of a wrong type.
    """
    return sum(1 for _ in read_rows(source))


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
    check_path(source)
    read = _read_parquet if source.path.suffix == ".parquet" else _read_json_lines
    place = None
    for place, fields in read(source):
        found = []
        for column, column_flag in _columns_of(source):
            try:
                found.append(_value_of(fields, column))
            except KeyError:
                raise UsageError(
                    f"names a column that {source.given} lacks in {place}, which has "
                    f"{_names(fields)}",
                    flag=f"{column_flag} {column!r}",
                    remedy="name one that all rows have",
                ) from None
        prompt, answer = (*found, "")[:2]  # demonstrations have no answer
        yield _checked_row(prompt, answer, fields, source, place)
    if place is None:
        raise UsageError("holds no rows", flag=source.given, remedy="write one prompt per line")


def _columns_of(source: PromptSource) -> list[tuple[str, str]]:
    """Return the columns that every row needs, with the flags that name them."""
    prompt = (source.prompt_column, "--rl-prompt-column")
    if source.responses is not None:
        return [prompt]
    return [prompt, (source.answer_column, "--rl-answer-column")]


def _value_of(fields: dict[str, Any], column: str) -> Any:
    """Return the value of a column, or of `a.b`; raise KeyError if it is missing."""
    if column in fields:
        return fields[column]
    value: Any = fields
    for name in column.split("."):
        if not isinstance(value, dict):
            raise KeyError(name)
        value = value[name]
    return value


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


def _read_json_lines(source: PromptSource) -> Iterator[tuple[str, dict[str, Any]]]:
    with source.path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            place = f"line {number}"
            try:
                fields = parse_json(line.removeprefix(_BYTE_ORDER_MARK) if number == 1 else line)
            except InvalidData as error:
                raise UsageError(
                    f", {place}, is not valid JSON ({error})",
                    flag=source.given,
                    remedy="each line must be one JSON object in UTF-8",
                ) from error
            if b"\\ud" in line.lower() and not _is_unicode(fields):
                _refuse(source, place, "holds half a surrogate pair", "write complete pairs")
            if not isinstance(fields, dict):
                _refuse(source, place, "is not a JSON object", "write {...} with the columns")
            yield place, fields


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
            wanted = {
                name if name in schema.names else name.split(".")[0]
                for name, _ in _columns_of(source)
            }
            if not wanted.issubset(schema.names):
                yield "its schema", dict.fromkeys(schema.names)
            for column in schema:
                _check_depth(column, source)
            # Without images and the like, which make up most of such a file.
            columns = [f.name for f in schema if f.name in wanted or not _is_bytes(f.type)]
            media = {name: _NOT_READ for name in MEDIA_COLUMNS if name in schema.names}
            number = 0
            for batch in file.iter_batches(batch_size=_ROWS_PER_BATCH, columns=columns):
                for fields in batch.to_pylist(maps_as_pydicts="lossy"):
                    number += 1
                    yield f"row {number}", media | fields
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
            _refuse(
                source,
                f"column {column.name!r}",
                f"is nested deeper than {MAX_DEPTH} levels",
                "reduce the nesting",
            )
        waiting += [(kind.field(n).type, depth + 1) for n in range(kind.num_fields)]


def _is_bytes(kind: pa.DataType) -> bool:
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return _is_bytes(kind.value_type)
    if pa.types.is_struct(kind):
        return any(_is_bytes(field.type) for field in kind)
    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind))


def _checked_row(
    prompt: Any, answer: Any, fields: dict[str, Any], source: PromptSource, place: str
) -> PromptRow:
    checked_answer = _checked_answer(answer, source, place)
    media = tuple(name for name in MEDIA_COLUMNS if fields.get(name))
    columns = {name: value for name, value in fields.items() if value is not _NOT_READ}
    is_parquet = source.path.suffix == ".parquet"
    try:
        messages = _checked_prompt(prompt, source, is_parquet=is_parquet)
        response = None
        if source.responses is not None:
            messages, response = _demonstration(messages, fields, source, source.responses)
        for_template = [
            without_nulls(fields.get(name)) if is_parquet else fields.get(name)
            for name in (_TOOLS, _DOCUMENTS, _KWARGS)
        ]
        tools = checked_tools(for_template[0], _TOOLS)
        kwargs = checked_kwargs(for_template[2], f"column {_KWARGS!r}")
        if not source.use_chat_template:
            _refuse_without_template(messages, tools, kwargs)
            return PromptRow(
                place, messages, checked_answer, columns, media=media, response=response
            )
        # A column of this name may be only for the reward.
        documents = for_template[1]
        is_theirs = isinstance(documents, list) and all(isinstance(d, dict) for d in documents)
        return PromptRow(
            place,
            messages,
            checked_answer,
            columns,
            tools,
            documents if is_theirs and documents else None,
            kwargs,
            media,
        )
    except RejectedRow as error:
        _refuse(source, place, error.problem, error.remedy)


def _checked_prompt(value: Any, source: PromptSource, *, is_parquet: bool) -> str | list[Message]:
    column = f"column {source.prompt_column!r} is"
    if isinstance(value, str):
        if not value.strip():
            raise RejectedRow(f"{column} blank", "write a prompt or remove the row")
        if not MESSAGES_IN_TEXT.fullmatch(value):
            return value
        value = parse_if_text(value, f"column {source.prompt_column!r}, which looks like messages,")
    if not isinstance(value, list) or not value or not isinstance(value[0], dict):
        raise RejectedRow(f"{column} {_kind(value)}", "write a string or a list of messages")
    return checked_messages(
        list(map(_without_nulls_inside, value)) if is_parquet else value,
        is_complete=source.responses is not None,
    )


def _demonstration(
    prompt: str | list[Message],
    fields: dict[str, Any],
    source: PromptSource,
    responses: Responses,
) -> tuple[str | list[Message], str | None]:
    """Return the conversation of a row with its response; without chat template, both by
    themselves."""
    column = f"column {responses.column!r}"
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    response = fields.get(responses.column)
    if response is None:
        if responses.is_required or not any(each["role"] == "assistant" for each in messages):
            raise RejectedRow(
                f"it has no {column}"
                + ("" if responses.is_required else ", and no message of the assistant"),
                "write what the assistant is to answer",
            )
        return messages, None
    if continues(messages):
        raise RejectedRow(
            f"its prompt ends with the assistant's turn, and {column} has another",
            "remove one of the two",
        )
    answer = _response_message(response, column)
    if isinstance(prompt, str) and not source.use_chat_template:
        return prompt, text_of(answer)
    return [*messages, answer], None


def _response_message(response: Any, column: str) -> Message:
    if isinstance(response, str):
        response = [{"role": "assistant", "content": response}]
    is_one = isinstance(response, list) and len(response) == 1 and isinstance(response[0], dict)
    if not is_one or response[0].get("role") != "assistant":
        raise RejectedRow(
            f"{column} is neither a text nor one message of the assistant in a list",
            "write one of them; conversations of several turns belong into the prompt's column",
        )
    (message,) = checked_messages(list(map(_without_nulls_inside, response)), is_complete=True)
    return message


def _without_nulls_inside(message: Any) -> Any:
    """Drop nulls inside a Parquet message's fields; `checked_messages` handles the fields."""
    if not isinstance(message, dict):
        return message
    return {name: without_nulls(value) for name, value in message.items()}


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


def _checked_answer(value: Any, source: PromptSource, place: str) -> Answer:
    if isinstance(value, list | dict):
        plain: list[Any] | dict[str, Any] = _plain(value)
        return plain
    # An integer may exceed the range of float.
    is_integer = isinstance(value, int) and not isinstance(value, bool)
    if isinstance(value, str) or is_integer or finite_number(value) is not None:
        return str(value)
    column = f"column {source.answer_column!r} is {_kind(value)}"
    _refuse(source, place, column, "write a string, a finite number, a list or an object")


def _kind(value: Any) -> str:
    if value is None or isinstance(value, float):
        return "null" if value is None else repr(value)
    return f"of type {type(value).__name__} ({repr(value)[:60]})"


def _refuse(source: PromptSource, place: str, problem: str, remedy: str) -> NoReturn:
    raise UsageError(f", {place}: {problem}", flag=source.given, remedy=remedy)
