"""Which tokens of a demonstration are the assistant's: those that supervised training learns.

Few chat templates mark the assistant's turns, so they are found by rendering prefixes. A turn
begins where the conversation before it ends, with the start of the assistant's turn that a template
adds for generation, and ends where the conversation up to it ends:

    <|user|>1+1=<|assistant|>2<eos><|user|>2+2=<|assistant|>4<eos>
                             ~~~~~~                         ~~~~~~

Both must be prefixes of the complete conversation, in text and in tokens. Then the model learns
each turn after exactly the tokens that it gets in generation. A turn that does not end in a token
at which generation ends teaches no end; it gets one on request. This module runs in the tokenizer's
process.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from mcore_rl.data.chat import ChatTokenizer
from mcore_rl.data.messages import Message, RejectedRow
from mcore_rl.data.tokenizer import TooLong

# What the model does not get, as in `ChatTokenizer.prompt`.
NO_END = "an end token at the end of a learned turn (--rl-sft-append-end adds it)"
_MARK = "MCORERLTURN"


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
    chat: ChatTokenizer, row: Mapping[str, Any], too_long: TooLong, *, append_end: bool = False
) -> Demonstrated:
    """Tokenise a row with its learned turns as spans.

    A row is {"text": prompt, "response": text}, or {"messages": ..., "learned": numbers of the
    learned messages} with the template's other inputs. Raises RejectedRow, also if a turn does not
    follow its prefix.
    """
    if "text" in row:
        return _without_template(chat, row["text"], row["response"], too_long)
    text, left_out, messages = chat.conversation(row)
    if least := too_long.least_tokens(text):
        return Demonstrated([], least, left_out, [])
    inputs: dict[str, Any] = {name: row.get(name) for name in ("tools", "documents", "kwargs")}
    (ids,) = chat.encode([text], special=False)
    spans: list[int] = []
    for turn in row["learned"]:
        parts = (
            _before(chat, messages, turn, inputs),
            chat.render(messages[: turn + 1], opens_turn=False, **inputs),
        )
        spans += _span(chat, text, ids, parts, turn + 1)
    if all(ids[end - 1] in chat.ends for end in spans[1::2]):
        return Demonstrated(ids, 0, left_out, spans)
    if not append_end:
        return Demonstrated(ids, 0, [*left_out, NO_END], spans)
    tokens, moved = _with_ends(chat, ids, spans)
    return Demonstrated(tokens, 0, left_out, moved)


def _before(
    chat: ChatTokenizer, messages: list[Message], turn: int, inputs: Mapping[str, Any]
) -> str:
    """Return the text before a turn, which ends with the start of it."""
    if turn:
        return chat.render(messages[:turn], **inputs)
    # Few templates render no messages. The conversation begins with what they write before the
    # assistant's text, if that is what they write for generation.
    asked = [{"role": "user", "content": _MARK}]
    opener = chat.render(asked, **inputs).removeprefix(
        chat.render(asked, opens_turn=False, **inputs)
    )
    said = [{"role": "assistant", "content": _MARK}, *messages[1:]]
    before, mark, _ = chat.render(said, opens_turn=False, **inputs).partition(_MARK)
    if not mark or not opener or not before.endswith(opener):
        raise RejectedRow(
            "the chat template has no start of the assistant's turn for a conversation that begins "
            "with one",
            "begin it with the user's message, or use another template (--rl-chat-template)",
        )
    return before


def _with_ends(
    chat: ChatTokenizer, ids: list[int], spans: list[int]
) -> tuple[list[int], list[int]]:
    """Return tokens and spans with an end token behind the text of each turn that lacks one; the
    blanks behind it are not learned."""
    extended: list[int] = []
    moved: list[int] = []
    done = 0
    for begin, end in zip(spans[::2], spans[1::2], strict=True):
        is_ended = ids[end - 1] in chat.ends
        while not is_ended and end > begin and chat.is_blank(ids[end - 1]):
            end -= 1
        extended += ids[done:begin]
        moved.append(len(extended))
        extended += ids[begin:end] if is_ended else [*ids[begin:end], chat.end_token()]
        moved.append(len(extended))
        done = end
    return [*extended, *ids[done:]], moved


def _without_template(
    chat: ChatTokenizer, prompt: str, response: str, too_long: TooLong
) -> Demonstrated:
    """Tokenise prompt and response by themselves, as they are in generation, and end them."""
    if least := too_long.least_tokens(prompt + response):
        return Demonstrated([], least, [], [])
    (first,) = chat.encode([prompt], special=True)
    (second,) = chat.encode([response], special=False)
    ids = [*first, *second]
    if not second or second[-1] not in chat.ends:
        ids.append(chat.end_token())
    return Demonstrated(ids, 0, chat.left_out_of_texts, [len(first), len(ids)])


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
