"""The messages between trainer and environment processes: JSON, data and no code.

Every message is its text, preceded by its length in four bytes. An environment can write anything
into its socket; the trainer accepts only what is checked here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mcore_rl.common.readers import integer_within, parse_json
from mcore_rl.rewards.functions import shortened
from mcore_rl.rewards.worker import Outcome

MAX_ANSWER_BYTES = 1 << 20  # of an environment's message, JSON
MAX_REQUEST_BYTES = 1 << 30
LENGTH_BYTES = 4

TOO_MUCH = "answered too much"
NO_ANSWER = "wrote an invalid answer"

_LARGEST_REWARD = 3.4e38  # training keeps a turn's reward in float32

Plain = str | list[dict[str, str]] | list[int]  # a text, messages or token ids

_ONE_OF = "give a text, messages with role and content, or token ids"


@dataclass(frozen=True, slots=True)
class Started:
    """The environment is ready; `prompt` replaces the prompt unless it is None."""

    prompt: Plain | None


@dataclass(frozen=True, slots=True)
class Stepped:
    """The environment's answer to a turn; `observation` may only be None if `done`."""

    observation: Plain | None
    reward: float
    done: bool


@dataclass(frozen=True, slots=True)
class Failed:
    """The sample is lost; `kind` groups failures as a reward's `Outcome.kind` does."""

    kind: str
    detail: str = ""

    @property
    def outcome(self) -> Outcome:
        """The failure as a reward's outcome."""
        return Outcome(0.0, self.kind, self.detail)

    @property
    def failure(self) -> str:
        """The reason, in words."""
        return self.outcome.failure or ""


Event = Started | Stepped | Failed


class NonsenseError(ValueError):
    """An environment returned an unusable value; `failed` holds the reason."""

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(kind)
        self.failed = Failed(kind, detail)


def framed(fields: Mapping[str, Any]) -> bytes:
    """Return a message in its wire format."""
    text = json.dumps(fields).encode()
    return len(text).to_bytes(LENGTH_BYTES, "big") + text


# In the environment's process -----------------------------------------------------------------


def as_started(value: object) -> list[Any]:
    """Convert the result of `start` for the message; NonsenseError if its type is not allowed."""
    return [None if value is None else plain_text(value, "start gives")]


def as_stepped(value: object) -> list[Any]:
    """Convert the result of `step` for the message; NonsenseError if its type is not allowed."""
    names = ("observation", "reward", "done")
    if isinstance(value, tuple):
        if len(value) != len(names):
            raise NonsenseError(
                f"returned tuple of {len(value)}", "a step gives (observation, reward, done)"
            )
        observation, reward, done = value
    elif all(hasattr(value, name) for name in names):
        observation, reward, done = (getattr(value, name) for name in names)
    else:
        raise NonsenseError(f"returned {type(value).__name__}", "a step gives a StepResult")
    if not isinstance(done, bool) and type(done).__name__ not in ("bool_", "bool"):
        raise NonsenseError(f"returned done of type {type(done).__name__}", "it is True or False")
    done = bool(done)
    text = None if done else plain_text(observation, "what is not done gives an observation:")
    return [text, _reward(reward), done]


def plain_text(value: object, who: str) -> Plain:
    """Return a text, messages or token ids as JSON types; NonsenseError for anything else."""
    if isinstance(value, str):
        return _unicode(value)
    if hasattr(value, "tolist"):  # an array of numpy or torch, which are not imported for this
        value = value.tolist()
    if not isinstance(value, Sequence) or isinstance(value, (bytes, bytearray)):
        raise NonsenseError(f"returned {type(value).__name__}", f"{who} {_ONE_OF}")
    if all(isinstance(each, Mapping) for each in value):
        return [_message(each) for each in value]
    if all(hasattr(each, "__index__") and not isinstance(each, bool) for each in value):
        ids = [each.__index__() for each in value]
        if all(0 <= each < 1 << 31 for each in ids):
            return ids
        raise NonsenseError("returned no token ids", f"{who} those from 0 on")
    raise NonsenseError("returned a list of neither", f"{who} {_ONE_OF}")


def _message(message: Mapping[Any, Any]) -> dict[str, str]:
    texts = all(isinstance(each, str) for pair in message.items() for each in pair)
    if not texts or not {"role", "content"} <= message.keys():
        raise NonsenseError("returned no messages", "one has a role and a content, both texts")
    return {_unicode(name): _unicode(text) for name, text in message.items()}


def _unicode(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise NonsenseError("returned no Unicode", shortened(str(error))) from error
    return text


def _reward(value: Any) -> float:
    detail = "a reward is a finite number"
    if isinstance(value, str) or not hasattr(value, "__float__"):
        raise NonsenseError(f"returned reward of type {type(value).__name__}", detail)
    number = float(value)
    if not abs(number) <= _LARGEST_REWARD:
        raise NonsenseError(f"returned reward {number}", detail)
    return number


# In the trainer -------------------------------------------------------------------------------


def event_of(message: bytes, turn: int) -> Event:
    """Return the event of the answer to request `turn`; an invalid answer is a failure."""
    try:
        fields = parse_json(message)
        if integer_within(fields["turn"], turn, turn) is None:
            raise ValueError(f"it is not of turn {turn}")
        if "failed" in fields:
            kind, detail = fields["failed"]
            return Failed(shortened(_text(kind)), shortened(_text(detail)))
        if turn == 0:
            (prompt,) = fields["value"]
            return Started(None if prompt is None else plain_text(prompt, ""))
        text, reward, done = as_stepped(tuple(fields["value"]))
        return Stepped(text, reward, done)
    except NonsenseError as error:
        return error.failed
    except (ValueError, LookupError, TypeError, ArithmeticError) as error:
        return Failed(NO_ANSWER, shortened(f"{type(error).__name__}: {error}"))


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"a {type(value).__name__} where a text belongs")
    return value


class Reader:
    """An assembler of messages from a stream of bytes."""

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
