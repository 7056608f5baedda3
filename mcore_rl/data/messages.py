"""Checks and normalisation of a row's chat messages, tools and template arguments.

A row's fields go to the chat template unchanged, or the row is rejected. Only equivalent forms are
normalised: a field that is null or an empty list counts as missing, as in OpenAI's API; Parquet
writes every field of a struct into all of its values.

This module is pure; the tokenizer's process imports it, so it must stay cheap.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn

from mcore_rl.common.readers import InvalidData, parse_json

Message = dict[str, Any]

# Fields of a message that hold the model's reasoning; each template reads its own.
REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")
# Fields that link a result to its call, or describe a call; templates pair them by order.
LINK_FIELDS = ("tool_call_id",)
CALL_FIELDS = ("tool_calls", "function_call")
# Columns of a row that only a multimodal model can use.
MEDIA_COLUMNS = ("image", "images", "video", "videos", "audio", "audios")
# A list of messages, as JSON or as a Python literal. Other strings are texts.
_LIST_IN_TEXT = re.compile(
    r"""\s*\[\s*\{(?=.*["']role["']\s*:)(?=.*["'](content|tool_calls)["']\s*:).*\}\s*\]\s*""",
    re.DOTALL,
)
# One message, or messages with the fields `from` and `value`. A text may be JSON of any kind, so
# the roles are those of conversations.
_ROLE = r"""["'](system|developer|user|assistant|tool|function|human|gpt)["']"""
_MESSAGE_IN_TEXT = re.compile(
    rf"""\s*(\[\s*)?\{{(?=.*["'](role|from)["']\s*:\s*{_ROLE})"""
    r"""(?=.*["'](content|tool_calls|value)["']\s*:).*\}\s*(\]\s*)?""",
    re.DOTALL,
)
TOOL_ROLES = ("tool", "function", "ipython", "observation")
# Template arguments that a user may not set.
_RESERVED = frozenset(
    "messages conversation tools documents add_generation_prompt continue_final_message "
    "chat_template tokenize return_dict return_tensors return_assistant_tokens_mask padding "
    "truncation max_length tokenizer_kwargs strftime_now raise_exception self".split()
)


class RejectedRow(ValueError):
    """Problem of a row's prompt and its remedy."""

    def __init__(self, problem: str, remedy: str) -> None:
        super().__init__(f"{problem}; {remedy}")
        self.problem, self.remedy = problem, remedy


def text_or_messages(
    value: Any, column: str, *, is_parquet: bool, is_complete: bool, may_be_blank: bool = False
) -> str | list[Message]:
    """Return the text of a column, or its messages, which it holds as a list, as one message, or
    as the JSON of either. Raises RejectedRow for other values."""
    where = f"column {column!r}"
    if isinstance(value, str):
        if not value.strip() and not may_be_blank:
            raise RejectedRow(f"{where} is blank", "write a text or remove the row")
        if not (_LIST_IN_TEXT.fullmatch(value) or _MESSAGE_IN_TEXT.fullmatch(value)):
            return value
        value = parse_if_text(value, f"{where}, which looks like messages,")
    if isinstance(value, dict) and ("role" in value or "from" in value):
        value = [value]
    if not isinstance(value, list) or not value or not isinstance(value[0], dict):
        raise RejectedRow(f"{where} is {kind_of(value)}", "write a string or a list of messages")
    return checked_messages(
        list(map(_without_nulls_inside, value)) if is_parquet else value, is_complete=is_complete
    )


def kind_of(value: Any) -> str:
    """Describe a value of a type that is not accepted."""
    if value is None or isinstance(value, float):
        return "null" if value is None else repr(value)
    return f"of type {type(value).__name__} ({repr(value)[:60]})"


def value_of(fields: Mapping[str, Any], column: str) -> Any:
    """Return the value of a column, or of `a.b`; raise KeyError if it is missing."""
    if column in fields:
        return fields[column]
    value: Any = fields
    for name in column.split("."):
        if not isinstance(value, dict):
            raise KeyError(name)
        value = value[name]
    return value


def checked_messages(value: Sequence[Any], *, is_complete: bool = False) -> list[Message]:
    """Return the messages without null fields; raise RejectedRow for invalid ones. If they are a
    complete conversation, the model does not continue the last one."""
    messages = [_checked_message(message, number) for number, message in enumerate(value, start=1)]
    if continues(messages) and not is_complete:
        last = messages[-1]
        if any(last.get(field) for field in CALL_FIELDS) or not text_of(last).strip():
            raise RejectedRow(
                f"message {len(messages)}, the last one, is the assistant's and has no text that "
                "could be continued",
                "end with what the assistant is to answer, or with the beginning of its answer",
            )
    return messages


def continues(messages: Sequence[Message]) -> bool:
    """Return whether the model continues the last message instead of starting a new one."""
    return bool(messages[-1]["role"] == "assistant")


def text_of(message: Message) -> str:
    """Return the text of a message's content; "" without content."""
    content = message.get("content")
    if isinstance(content, str):
        return content
    if isinstance(content, list) and all(map(_is_text_part, content)):
        return "".join(part["text"] for part in content)
    return "" if content is None else json.dumps(content, ensure_ascii=False, default=str)


def checked_tools(value: Any, column: str) -> list[dict[str, Any]] | None:
    """Return a row's tools or documents, given as a list of objects or its JSON; None if empty."""
    value = parse_if_text(value, column)
    if not value:
        return None
    if not isinstance(value, list) or not all(isinstance(each, dict) for each in value):
        raise RejectedRow(
            f"column {column!r} is not a list of objects",
            "write what the chat template reads as its tools, or rename the column",
        )
    return value


def checked_kwargs(value: Any, where: str) -> dict[str, Any]:
    """Return arguments for the chat template, given as an object or its JSON."""
    value = parse_if_text(value, where)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise RejectedRow(f"{where} is not an object", 'write {"name": value}')
    for name in value:
        if name in _RESERVED or not name.isidentifier():
            raise RejectedRow(f"{where} sets {name!r}, which is reserved", "drop it")
    return value


def parse_if_text(value: Any, where: str) -> Any:
    """Parse a text as JSON, None if blank; return other values unchanged. Raises RejectedRow."""
    if not isinstance(value, str):
        return value
    if not value.strip():
        return None
    try:
        return parse_json(value)
    except InvalidData as error:
        raise RejectedRow(f"{where} is not valid JSON ({error})", "write JSON") from error


def without_nulls(value: Any) -> Any:
    """Remove null fields, which Parquet puts into every struct, at any depth."""
    if isinstance(value, dict):
        return {name: without_nulls(each) for name, each in value.items() if each is not None}
    return [without_nulls(each) for each in value] if isinstance(value, list) else value


def _without_nulls_inside(message: Any) -> Any:
    """Drop nulls inside a Parquet message's fields; `checked_messages` handles the fields."""
    if not isinstance(message, dict):
        return message
    return {name: without_nulls(value) for name, value in message.items()}


def variants(messages: list[Message]) -> Iterator[list[Message]]:
    """Yield the messages unchanged, then in equivalent forms.

    Templates expect call arguments as an object or as its JSON, and the content of a message with
    calls only as null, an empty text or a missing field.
    """
    seen: list[list[Message]] = []
    for content, other in itertools.product((..., None, ""), (False, True)):
        form = [_variant(message, content, other) for message in messages]
        if form not in seen:
            seen.append(form)
            yield form


def _variant(message: Message, content: Any, other: bool) -> Message:
    if not any(field in message for field in CALL_FIELDS):
        return message
    variant = dict(message)
    if content is not ... and not message.get("content"):
        variant["content"] = content
    if other and "tool_calls" in message:
        variant["tool_calls"] = [_other_arguments(call) for call in message["tool_calls"]]
    return variant


def _other_arguments(call: dict[str, Any]) -> dict[str, Any]:
    """Return a call with its arguments converted from JSON to an object or vice versa."""
    function = function_of(call)
    arguments = function.get("arguments")
    if isinstance(arguments, dict):
        arguments = json.dumps(arguments, ensure_ascii=False)
    elif isinstance(arguments, str):
        try:
            parsed = parse_json(arguments)
        except InvalidData:
            return call
        if not isinstance(parsed, dict):
            return call
        arguments = parsed
    else:
        return call
    changed = {**function, "arguments": arguments}
    return {**call, "function": changed} if "function" in call else changed


def function_of(call: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the object with a call's or tool's name: its `function`, or itself if not nested."""
    inner = call.get("function")
    return inner if isinstance(inner, dict) else call


def check_order_of_results(messages: Sequence[Message]) -> None:
    """Raise RejectedRow for results in another order than their calls.

    Templates that omit the ids pair them by order."""
    waiting: list[Any] = []
    for number, message in enumerate(messages, start=1):
        if calls := message.get("tool_calls"):
            waiting = [call.get("id") for call in calls]
        elif (call_id := message.get("tool_call_id")) in waiting:
            if call_id != waiting.pop(0):
                _reject(
                    number,
                    f"answers call {call_id!r} before an earlier one, and the chat template leaves "
                    "out the ids",
                    "write results in the order of their calls",
                )


def _checked_message(message: Any, number: int) -> Message:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        _reject(number, "is not an object with a role", "write {role, content}")
    kept = {name: each for name, each in message.items() if each is not None and each != []}
    if "tool_calls" in kept:
        _check_calls(kept["tool_calls"], number)
    for field in (*REASONING_FIELDS, "name", "tool_call_id"):
        if field in kept and not isinstance(kept[field], str):
            _reject(number, f"has a {field} that is not a text", "write a text")
    if message.get("content") is not None:
        kept["content"] = _checked_content(message["content"], message["role"], number)
    elif any(kept.get(field) for field in (*CALL_FIELDS, *REASONING_FIELDS)):
        if "content" in message:
            kept["content"] = None
    else:
        _reject(
            number,
            "has no content",
            "write a text; only messages with calls or reasoning may have null",
        )
    return kept


def _check_calls(calls: Any, number: int) -> None:
    is_list = isinstance(calls, list) and all(isinstance(each, dict) for each in calls)
    if not is_list or not all(isinstance(function_of(c).get("name"), str) for c in calls):
        _reject(
            number,
            "has tool_calls that are not a list of calls",
            'write [{"type": "function", "function": {"name": ..., "arguments": ...}}]',
        )


def _checked_content(content: Any, role: str, number: int) -> Any:
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        for part in content:
            kind = part.get("type") if isinstance(part, dict) else None
            if isinstance(kind, str) and kind != "text":
                _reject(
                    number,
                    f"has a part of type {kind!r}, and only texts can be given to the model",
                    "remove the row, or describe the part by a text",
                )
        if content and all(map(_is_text_part, content)):
            return [without_nulls(part) for part in content]
    if role in TOOL_ROLES and isinstance(content, dict | list):
        return content
    _reject(
        number,
        f"has a content of type {type(content).__name__}",
        'write a text, or parts {"type": "text", "text": ...}',
    )


def _is_text_part(part: Any) -> bool:
    return (
        isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)
    )


def _reject(number: int, problem: str, remedy: str) -> NoReturn:
    raise RejectedRow(f"message {number} {problem}", remedy)
