"""Which tokens of a demonstration are the assistant's: those that supervised training learns.

Few chat templates mark the assistant's turns, so they are found by rendering prefixes. A turn
begins where the conversation before it ends, with the start of the assistant's turn that a template
adds for generation, and ends where the conversation up to it ends:

    <|user|>1+1=<|assistant|>2<eos><|user|>2+2=<|assistant|>4<eos>
                             ~~~~~~                         ~~~~~~

Both must be prefixes of the complete conversation, in text and in tokens. Then the model learns
each turn after exactly the tokens that it gets in generation. This module runs in the tokenizer's
process.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from mcore_rl.data.chat import ChatTokenizer
from mcore_rl.data.messages import RejectedRow
from mcore_rl.data.options import ALL
from mcore_rl.data.tokenizer import TooLong


class Demonstrated(NamedTuple):
    """A tokenised demonstration: `spans` has begin and end of each turn, [b0, e0, b1, e1, ...].

    `least` is 0, or a lower bound of the tokens of a row that is certainly too long; it then has no
    tokens. `left_out` are fields that the template omits.
    """

    token_ids: list[int]
    least: int
    left_out: list[str]
    spans: list[int]


def demonstrated(
    chat: ChatTokenizer, row: Mapping[str, Any], too_long: TooLong, *, loss_on: str
) -> Demonstrated:
    """Tokenise a row with all of its assistant's turns, or the last, as spans.

    A row is {"text": prompt, "response": text}, or {"messages": ...} with the template's other
    inputs. Raises RejectedRow, also if a turn does not follow its prefix.
    """
    if "text" in row:
        return _without_template(chat, row["text"], row["response"], too_long)
    text, left_out, messages = chat.conversation(row)
    if least := too_long.least_tokens(text):
        return Demonstrated([], least, left_out, [])
    turns = [n for n, message in enumerate(messages) if message["role"] == "assistant"]
    inputs: dict[str, Any] = {name: row.get(name) for name in ("tools", "documents", "kwargs")}
    (ids,) = chat.encode([text], special=False)
    spans: list[int] = []
    for turn in turns if loss_on == ALL else turns[-1:]:
        parts = (
            chat.render(messages[:turn], **inputs),
            chat.render(messages[: turn + 1], opens_turn=False, **inputs),
        )
        spans += _span(chat, text, ids, parts, turn + 1)
    return Demonstrated(ids, 0, left_out, spans)


def _without_template(
    chat: ChatTokenizer, prompt: str, response: str, too_long: TooLong
) -> Demonstrated:
    """Tokenise prompt and response by themselves, as they are in generation, and end them."""
    if least := too_long.least_tokens(prompt + response):
        return Demonstrated([], least, [], [])
    end = chat.tokenizer.eos_token_id
    if end is None:
        raise RejectedRow(
            "the tokenizer has no token that ends a sequence, which a response would have to learn",
            "use a chat template, or a tokenizer with an eos_token",
        )
    (first,) = chat.encode([prompt], special=True)
    (second,) = chat.encode([response], special=False)
    ids = [*first, *second, end]
    return Demonstrated(ids, 0, [], [len(first), len(ids)])


def _span(
    chat: ChatTokenizer, text: str, ids: list[int], parts: tuple[str, str], number: int
) -> Iterator[int]:
    """Yield begin and end of a turn, message `number`; `parts` are the texts before it and up to
    its end."""
    for part in parts:
        if not text.startswith(part):
            raise RejectedRow(
                "the chat template renders the messages before the end of the assistant's turn, "
                f"message {number}, differently when later ones follow",
                "give --rl-sft-loss-on last, or a template whose conversations only grow "
                "(--rl-chat-template)",
            )
    before, whole = chat.encode(list(parts), special=False)
    for prefix in (before, whole):
        if ids[: len(prefix)] != prefix:
            raise RejectedRow(
                f"the tokenizer joins text across a boundary of the assistant's turn, message "
                f"{number}, so that its tokens are not those of generation",
                "use a template that separates turns by special tokens or line ends "
                "(--rl-chat-template)",
            )
    end = _end_of_turn(chat, ids, len(before), len(whole))
    if end == len(before):
        raise RejectedRow(
            f"the chat template leaves out the assistant's turn, message {number}",
            "use a template that reads it (--rl-chat-template), or remove the row",
        )
    yield from (len(before), end)


def _end_of_turn(chat: ChatTokenizer, ids: list[int], begin: int, end: int) -> int:
    """Return the end without blanks after the token at which generation ends."""
    last = next((n for n in range(end - 1, begin - 1, -1) if chat.is_special(ids[n])), None)
    if last is None or chat.tokenizer.decode(ids[last + 1 : end]).strip():
        return end
    return last + 1
