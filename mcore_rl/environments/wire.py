"""The requests to environments' processes, and the check of their answers.

An environment can write any JSON into its socket; the trainer accepts only what is checked here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mcore_rl.common.readers import InvalidData, parse_json
from mcore_rl.common.user_code import shortened
from mcore_rl.isolation.wire import NO_ANSWER, Answer, Failed, InvalidValue

MAX_STATE_BYTES = 1 << 18  # the trainer holds one state per open sample
_LARGEST_REWARD = 3.4e38  # training keeps a turn's reward in float32

Plain = str | list[dict[str, str]] | list[int]  # a text, messages or token ids

_ONE_OF = "give a text, messages with role and content, or token ids"


@dataclass(frozen=True, slots=True)
class Started:
    """The environment is ready; `prompt` replaces the prompt unless it is None. `state` is JSON;
    None if the class does not keep its state. `tools` is the JSON of `tool_schemas`; None without
    any."""

    prompt: Plain | None
    state: str | None = None
    tools: str | None = None


@dataclass(frozen=True, slots=True)
class Stepped:
    """The environment's answer to a turn; `observation` may only be None if `done`. `state` as in
    `Started`; None if `done`."""

    observation: Plain | None
    reward: float
    done: bool
    state: str | None = None


Event = Started | Stepped | Failed


# In the environment's process -----------------------------------------------------------------


def as_started(value: object) -> list[Any]:
    """Convert the result of `start` for the message; InvalidValue if its type is not allowed."""
    return [None if value is None else plain_text(value, "start gives")]


def checked_tools(text: object) -> str | None:
    """Return the JSON of tools if they are functions with names, None for None; InvalidValue for
    anything else."""
    if text is None:
        return None
    try:
        checked = checked_state(text)
        names = [each["function"]["name"] for each in parse_json(checked)]
    except (InvalidData, TypeError, LookupError) as error:
        raise InvalidValue("set invalid tool_schemas", shortened(str(error))) from error
    if not names or not all(isinstance(name, str) and name for name in names):
        raise InvalidValue("set invalid tool_schemas", "each function has a name")
    return checked


def as_stepped(value: object) -> list[Any]:
    """Convert the result of `step` for the message; InvalidValue if its type is not allowed."""
    names = ("observation", "reward", "done")
    if isinstance(value, tuple):
        if len(value) != len(names):
            raise InvalidValue(
                f"returned tuple of {len(value)}", "a step gives (observation, reward, done)"
            )
        observation, reward, done = value
    elif all(hasattr(value, name) for name in names):
        observation, reward, done = (getattr(value, name) for name in names)
    else:
        raise InvalidValue(f"returned {type(value).__name__}", "a step gives a StepResult")
    if not isinstance(done, bool) and type(done).__name__ not in ("bool_", "bool"):
        raise InvalidValue(f"returned done of type {type(done).__name__}", "done is True or False")
    done = bool(done)
    text = (
        None if done else plain_text(observation, "a step that is not done gives an observation:")
    )
    return [text, _reward(reward), done]


def as_state(value: object) -> str:
    """Convert the result of `state` to JSON; InvalidValue if that is not possible."""
    try:
        text = json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidValue("returned a state that is not JSON", shortened(str(error))) from error
    return checked_state(text)


def checked_state(text: object) -> str:
    """Return a state if it is JSON as `as_state` writes it; InvalidValue for anything else."""
    kind = "returned a state that is not JSON"
    if not isinstance(text, str) or not text.isascii():
        raise InvalidValue(kind, "it is not ASCII")
    if len(text) > MAX_STATE_BYTES:
        limit = f"a state has at most {MAX_STATE_BYTES >> 10} KiB as JSON"
        raise InvalidValue("returned too large a state", limit)
    try:
        parse_json(text)
    except InvalidData as error:
        raise InvalidValue(kind, shortened(str(error))) from error
    return text


def plain_text(value: object, who: str) -> Plain:
    """Return a text, messages or token ids as JSON types; InvalidValue for anything else."""
    if isinstance(value, str):
        return _unicode(value)
    if hasattr(value, "tolist"):  # an array of numpy or torch, which are not imported for this
        value = value.tolist()
    if not isinstance(value, Sequence) or isinstance(value, (bytes, bytearray)):
        raise InvalidValue(f"returned {type(value).__name__}", f"{who} {_ONE_OF}")
    if all(isinstance(each, Mapping) for each in value):
        return [_message(each) for each in value]
    if all(hasattr(each, "__index__") and not isinstance(each, bool) for each in value):
        ids = [each.__index__() for each in value]
        if all(0 <= each < 1 << 31 for each in ids):
            return ids
        raise InvalidValue("returned invalid token ids", "a token id is from 0 to 2147483647")
    raise InvalidValue("returned a list of other or mixed types", f"{who} {_ONE_OF}")


def _message(message: Mapping[Any, Any]) -> dict[str, str]:
    texts = all(isinstance(each, str) for pair in message.items() for each in pair)
    if not texts or not {"role", "content"} <= message.keys():
        raise InvalidValue(
            "returned invalid messages", "a message has a role and a content, both texts"
        )
    return {_unicode(name): _unicode(text) for name, text in message.items()}


def _unicode(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidValue("returned invalid Unicode", shortened(str(error))) from error
    return text


def _reward(value: Any) -> float:
    detail = "a reward is a finite number"
    if isinstance(value, str) or not hasattr(value, "__float__"):
        raise InvalidValue(f"returned reward of type {type(value).__name__}", detail)
    number = float(value)
    if not abs(number) <= _LARGEST_REWARD:
        raise InvalidValue(f"returned reward {number}", detail)
    return number


# In the trainer -------------------------------------------------------------------------------


def event_of(answer: Answer | Failed, *, is_first: bool) -> Event:
    """Return the event of an answer; an invalid value is a failure."""
    if isinstance(answer, Failed):
        return answer
    num_fields = 1 if is_first else 3
    try:
        fields, rest = answer.value[:num_fields], answer.value[num_fields:]
        tools = checked_tools(rest.pop()) if is_first and len(rest) == 2 else None
        state = None if rest in ([], [None]) else checked_state(*rest)
        if is_first:
            (prompt,) = fields
            return Started(None if prompt is None else plain_text(prompt, ""), state, tools)
        text, reward, done = as_stepped(tuple(fields))
        return Stepped(text, reward, done, state)
    except InvalidValue as error:
        return error.failed
    except (ValueError, LookupError, TypeError, ArithmeticError) as error:
        return Failed(NO_ANSWER, shortened(f"{type(error).__name__}: {error}"))
