"""The messages between the trainer and processes of users' code: JSON, data and no code.

    trainer ── {"turn": 1, "ask": ...} ──► process      without "ask": end
            ◄── {"turn": 1, "value": ...} ──            or "failed", or "refused"

A message is JSON text after its length in four bytes. User code can write anything into its socket;
the trainer accepts only what is checked here and, for values, by its callers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mcore_rl.common.errors import UsageError
from mcore_rl.common.readers import InvalidData, integer_within, parse_json
from mcore_rl.common.user_code import shortened

MAX_REQUEST_BYTES = 1 << 30
LENGTH_BYTES = 4

TOO_MUCH = "answered too much"
NO_ANSWER = "wrote an invalid answer"


@dataclass(frozen=True, slots=True)
class Failed:
    """The failure of a request, e.g. `Failed("raised KeyError", "'a'")`; `kind` groups failures for
    counting and logging."""

    kind: str
    detail: str = ""

    @property
    def failure(self) -> str:
        """The reason, in words."""
        return f"{self.kind}: {self.detail}" if self.detail else self.kind


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to a request: an unvalidated JSON value."""

    value: Any


class InvalidValue(ValueError):
    """User code returned an unusable value; `failed` holds the reason."""

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(kind)
        self.failed = Failed(kind, detail)


def framed(fields: Mapping[str, Any]) -> bytes:
    """Return a message in its wire format."""
    text = json.dumps(fields).encode()
    return len(text).to_bytes(LENGTH_BYTES, "big") + text


def refused(error: UsageError) -> list[str]:
    """Return the fields of a UsageError, for `as_refusal`."""
    return [error.found, error.flag, error.remedy]


def as_refusal(fields: Any) -> UsageError:
    """Return the UsageError of these fields; InvalidData if they are not from `refused`."""
    if not isinstance(fields, list) or len(fields) != 3:
        raise InvalidData("a refusal has a reason, a flag and a remedy")
    found, flag, remedy = map(as_text, fields)
    return UsageError(found, flag=flag, remedy=remedy)


def answer_of(message: bytes, turn: int) -> Answer | Failed | UsageError:
    """Return the answer to request `turn`; an invalid message is a failure."""
    try:
        fields = parse_json(message)
        if not isinstance(fields, dict) or integer_within(fields.get("turn"), turn, turn) is None:
            raise InvalidData(f"it is not of turn {turn}")
        if "failed" in fields:
            kind, detail = fields["failed"]
            return Failed(as_text(kind), as_text(detail))
        if "refused" in fields:
            return as_refusal(fields["refused"])
        return Answer(fields["value"])
    except (InvalidData, ValueError, LookupError, TypeError) as error:
        return Failed(NO_ANSWER, shortened(f"{type(error).__name__}: {error}"))


def as_text(value: object) -> str:
    """Return a text, shortened; InvalidData for anything else."""
    if not isinstance(value, str):
        raise InvalidData(f"expected a string, got a {type(value).__name__}")
    return shortened(value)


def as_integer(value: object) -> int:
    """Return an integer of 64 bits; InvalidData for anything else."""
    number = integer_within(value, -(1 << 63), (1 << 63) - 1)
    if number is None:
        raise InvalidData("a ticket or an exit code is an integer")
    return number


class Reader:
    """Reassembles messages from a byte stream."""

    def __init__(self, limit: int) -> None:
        """`limit` is the maximum length of a message, in bytes."""
        self._limit = limit
        self._bytes = bytearray()

    def add(self, data: bytes) -> None:
        self._bytes += data

    @property
    def is_too_long(self) -> bool:
        """Whether the current message exceeds the limit."""
        size = self._size
        return size is not None and size > self._limit

    def next(self) -> bytes | None:
        """Return the next complete message, or None."""
        size = self._size
        if size is None or len(self._bytes) < LENGTH_BYTES + size:
            return None
        message = bytes(self._bytes[LENGTH_BYTES : LENGTH_BYTES + size])
        del self._bytes[: LENGTH_BYTES + size]
        return message

    @property
    def _size(self) -> int | None:
        if len(self._bytes) < LENGTH_BYTES:
            return None
        return int.from_bytes(self._bytes[:LENGTH_BYTES], "big")
