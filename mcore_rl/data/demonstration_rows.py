"""Conversations of supervised training: what a row says, and which of its turns are learned.

    prompt, response                    the response follows the prompt
    prompt, chosen, rejected            a pair: either side follows the prompt
    chosen, rejected, conversations     their common beginning is the prompt
    prompt, a conversation              all of its assistant's turns, or the last

A response is a text, one message or several, also as JSON. A side or response that repeats the
prompt is a whole conversation. Fields of messages (`MARKS`) say which turns are not learned. This
module is pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from mcore_rl.data.messages import (
    TOOL_ROLES,
    Message,
    RejectedRow,
    continues,
    text_of,
    text_or_messages,
    value_of,
)
from mcore_rl.data.options import ALL

# Fields of a message that say whether the turn is learned: 0 or false, 1 or true.
MARKS = ("weight", "loss", "train", "training", "loss_mask", "step_loss_mask")
_INSTRUCTIONS = ("system", "developer")
_ASKING = (*_INSTRUCTIONS, "user")


@dataclass(frozen=True, slots=True)
class Responses:
    """The responses of demonstrations.

    `column` holds what follows the prompt. `other` is the column of a pair's other side; without
    one, prompts of a row without a response must be messages with assistant's turns, of which
    `loss_on` (--rl-sft-loss-on) are learned. With `append_end` (--rl-sft-append-end) a learned turn
    without an end token gets one.
    """

    column: str
    loss_on: str = ALL
    other: str | None = None
    append_end: bool = False


class Demonstration(NamedTuple):
    """A conversation, and the numbers of the messages to learn, from 0.

    Without a chat template `prompt` may be a text, which `response` follows.
    """

    prompt: str | list[Message]
    learned: tuple[int, ...] = ()
    response: str | None = None


class _Row(NamedTuple):
    """How the columns of a row are read."""

    fields: Mapping[str, Any]
    is_parquet: bool

    def of(self, column: str, *, may_be_blank: bool = False) -> str | list[Message] | None:
        """Return a column's text or messages; None if it is missing or null."""
        try:
            value = value_of(self.fields, column)
        except KeyError:
            return None
        if value is None:
            return None
        return text_or_messages(
            value,
            column,
            is_parquet=self.is_parquet,
            is_complete=True,
            may_be_blank=may_be_blank,
        )


def demonstration_of(
    fields: Mapping[str, Any],
    prompt_column: str,
    responses: Responses,
    *,
    is_parquet: bool,
    use_chat_template: bool,
) -> Demonstration:
    """Return what a row teaches. Raises RejectedRow."""
    row = _Row(fields, is_parquet)
    prompt = row.of(prompt_column)
    sides = [_Side.of(row, name) for name in (responses.column, responses.other) if name]
    for side in sides:
        if responses.other and side.messages is None:
            raise RejectedRow(
                f"it has no column {side.column!r}", "write what the assistant is to answer"
            )
    asked, answers = _divided(prompt, prompt_column, sides)
    messages = [*asked, *answers[0]]
    turns = [n for n, message in enumerate(messages) if message["role"] == "assistant"]
    if responses.other is not None:
        turns = [n for n in turns if n >= len(asked)]
    elif responses.loss_on != ALL:
        turns = turns[-1:]
    if not turns:
        raise RejectedRow(
            f"it has no column {responses.column!r}, and no message of the assistant"
            if sides[0].messages is None
            else f"column {responses.column!r} has no message of the assistant",
            "write what the assistant is to answer",
        )
    learned = tuple(n for n in turns if _is_learned(messages[n], n + 1))
    if not learned:
        raise RejectedRow(
            "its messages are marked so that none of these turns is learned", "remove the row"
        )
    messages = list(map(_without_marks, messages))
    answer = messages[-1]
    if not use_chat_template and isinstance(prompt, str) and [answer] == messages[1:]:
        return Demonstration(prompt, response=text_of(answer))
    return Demonstration(messages, learned)


class _Side(NamedTuple):
    """A response as messages, None if the row has none."""

    column: str
    messages: list[Message] | None = None

    @classmethod
    def of(cls, row: _Row, column: str) -> _Side:
        content = row.of(column, may_be_blank=True)
        if isinstance(content, str):
            content = [{"role": "assistant", "content": content}]
        return cls(column, content)

    @property
    def is_whole(self) -> bool:
        """Whether it is a conversation, instead of what follows one."""
        return bool(self.messages) and self.messages[0]["role"] in _ASKING  # type: ignore[index]

    @property
    def place(self) -> str:
        return f"column {self.column!r}"


def _divided(
    prompt: str | list[Message] | None, prompt_column: str, sides: Sequence[_Side]
) -> tuple[list[Message], list[list[Message]]]:
    """Return the messages of the prompt, and those of each side that follow them."""
    asked = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    conversations = [each.messages or [] for each in sides]
    is_alone = asked is None and all(len(each) > 1 for each in conversations)
    if len(sides) > 1 and (is_alone or all(each.is_whole for each in sides)):
        common = _num_common(conversations)
        before, answers = conversations[0][:common], [each[common:] for each in conversations]
        if not before:
            raise RejectedRow(
                f"{sides[0].place} and {sides[1].place} have no common beginning, which would be "
                "the prompt",
                "write both as conversations that begin with the same question",
            )
        asked = _joined(prompt, asked, before, sides[0])
    elif asked is None:
        if not sides[0].is_whole or len(sides) > 1:
            raise RejectedRow(
                f"it has no column {prompt_column!r}",
                "name the prompt's column by --rl-prompt-column, or write whole conversations",
            )
        asked, answers = [], conversations
    else:
        answers = []
        for side, messages in zip(sides, conversations, strict=True):
            if side.is_whole and len(sides) == 1:
                asked, messages = _joined(prompt, asked, messages, side), []
            elif side.is_whole:
                whole = _joined(asked, asked, messages, side)
                end = len(whole) - len(_body(messages)) + len(_body(asked))
                asked, messages = whole[:end], whole[end:]
            answers.append(messages)
    for side, messages in zip(sides, answers, strict=True):
        _check_order(asked, messages, side)
    return asked, answers


def _check_order(asked: Sequence[Message], answer: Sequence[Message], side: _Side) -> None:
    """Raise RejectedRow for a side that does not begin with a turn of the assistant."""
    if not answer:
        return
    role = answer[0]["role"]
    if role == "assistant" and asked and continues(asked):
        raise RejectedRow(
            f"its prompt ends with the assistant's turn, and {side.place} has another",
            "remove one of the two",
        )
    if role != "assistant" and role not in TOOL_ROLES:
        raise RejectedRow(
            f"{side.place} continues after the prompt with a message of the role {role!r}",
            "begin it with what the assistant is to answer, or with the whole prompt",
        )


def _num_common(sides: Sequence[Sequence[Message]]) -> int:
    """Count the messages with which both sides begin; the last of either is not among them."""
    pairs = zip(*(each[:-1] for each in sides), strict=False)
    return next((n for n, pair in enumerate(pairs) if not _same(*pair)), min(map(len, sides)) - 1)


def _joined(
    prompt: str | list[Message] | None,
    asked: Sequence[Message] | None,
    whole: list[Message],
    side: _Side,
) -> list[Message]:
    """Return the conversation `whole`, in which the prompt must be: messages as its beginning, a
    text as one of the user's messages. An instruction may be in one of the two only."""
    if asked is None:
        return whole
    mine, theirs = (each[: len(each) - len(_body(each))] for each in (list(asked), whole))
    body = _body(whole)
    if isinstance(prompt, str):
        is_there = any(_same(each, asked[0]) for each in body)
    else:
        start = _body(asked)
        is_there = len(start) <= len(body) and all(map(_same, start, body))
        is_there &= not (mine and theirs) or (
            len(mine) == len(theirs) and all(map(_same, mine, theirs))
        )
    if not is_there:
        raise RejectedRow(
            f"{side.place} is a conversation that does not have the prompt",
            "begin it with the prompt's messages, or with the assistant's answer",
        )
    return [*(theirs or mine), *body]


def _body(messages: Sequence[Message]) -> list[Message]:
    """Return the messages behind the instructions at the beginning."""
    first = next((n for n, each in enumerate(messages) if each["role"] not in _INSTRUCTIONS), None)
    return [] if first is None else list(messages[first:])


def _same(one: Message, other: Message) -> bool:
    """Return whether two messages say the same; marks and blanks around texts do not count."""

    def plain(message: Message) -> Message:
        return {
            name: value.strip() if isinstance(value, str) else value
            for name, value in message.items()
            if name not in MARKS
        }

    return plain(one) == plain(other)


def _is_learned(message: Message, number: int) -> bool:
    """Return whether no mark of an assistant's turn excludes it."""
    for name in MARKS:
        value = message.get(name, True)
        if value not in (0, 1):  # False and True are 0 and 1
            raise RejectedRow(
                f"message {number} has the {name} {value!r:.60}, and a turn is learned or not",
                "write 0 or 1, or remove it",
            )
        if not value:
            return False
    return True


def _without_marks(message: Message) -> Message:
    """Return the message without marks that were obeyed: those of the assistant, and 0."""
    is_learned = message["role"] == "assistant"
    return {
        name: value
        for name, value in message.items()
        if name not in MARKS or not (is_learned or value in (0, False))
    }
