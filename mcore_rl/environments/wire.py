"""The requests to environments' processes, and the check of their answers.

An environment can write any JSON into its socket; the trainer accepts only what is checked here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mcore_rl.common.user_code import shortened
from mcore_rl.isolation.wire import NO_ANSWER, Answer, Failed, InvalidValue

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


Event = Started | Stepped | Failed


# In the environment's process -----------------------------------------------------------------


def as_started(value: object) -> list[Any]:
    """Convert the result of `start` for the message; InvalidValue if its type is not allowed."""
    return [None if value is None else plain_text(value, "start gives")]


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
    try:
        if is_first:
            (prompt,) = answer.value
            return Started(None if prompt is None else plain_text(prompt, ""))
        text, reward, done = as_stepped(tuple(answer.value))
        return Stepped(text, reward, done)
    except InvalidValue as error:
        return error.failed
    except (ValueError, LookupError, TypeError, ArithmeticError) as error:
        return Failed(NO_ANSWER, shortened(f"{type(error).__name__}: {error}"))
