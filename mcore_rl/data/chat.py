"""Tokenizer with a run's chat template: rendering, and detection of fields that it omits.

It runs in the process of `tokenizer_process`, since both come with a downloaded folder. A template
does not report fields that it ignores, so every kind of field is rendered once more with another
value: if nothing changes, the template omits it. Later rows need no second rendering if their texts
are found in the first.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import date as Date
from datetime import datetime
from functools import cached_property
from typing import Any

from mcore_rl.data.messages import (
    CALL_FIELDS,
    LINK_FIELDS,
    REASONING_FIELDS,
    Message,
    RejectedRow,
    check_order_of_results,
    continues,
    function_of,
    text_of,
    variants,
)

# Among the fields that the model does not get.
ADDED_END = "the end token that the tokenizer adds to every text"
_MARK = "MCORERLMARK"
_DATE = "strftime_now"  # the function that a template calls for the date
_LEAVES_OUT = "the chat template leaves out"
_LONGEST_REASON = 200  # characters
_NOT_WORDS = re.compile(r"[^\w\s]")


class ChatTokenizer:
    """Renderer of conversations and encoder of texts; a template's errors become RejectedRow."""

    def __init__(
        self,
        tokenizer: Any,
        *,
        template: str | None = None,
        kwargs: Mapping[str, Any] | None = None,
        date: str | None = None,
        ends: Sequence[int] = (),
    ) -> None:
        """Set up `tokenizer`; the text `template` replaces its template.

        `kwargs` are the template's arguments, `date` (ISO) the date that it gets (None: today).
        `ends` are the tokens at which the model's responses end, beside the tokenizer's own."""
        self.tokenizer, self._template = tokenizer, template
        self._ends = ends
        self._kwargs = dict(kwargs or {})
        day = Date.today() if date is None else Date.fromisoformat(date)
        # Midnight, so that a template that asks for the hour renders the same all day.
        self._now = datetime.combine(day, datetime.min.time())
        self._read: set[tuple[Any, ...]] = set()  # kinds of fields that the template reads

    @property
    def template(self) -> str | None:
        """Text of the template in use; the default one if there are several."""
        if self._template is not None:
            return self._template
        own = self.tokenizer.chat_template
        return own.get("default") if isinstance(own, dict) else own

    def reads(self, name: str) -> bool:
        """Return whether the template has an argument of this name, as far as can be determined."""
        own = type(self.tokenizer).apply_chat_template.__module__.startswith("transformers.")
        return not own or bool(re.search(rf"\b{re.escape(name)}\b", self.template or ""))

    def render(
        self,
        messages: Sequence[Message],
        *,
        opens_turn: bool = True,
        continues_turn: bool = False,
        **given: Any,
    ) -> str:
        """Return the text of a conversation; `given` may have tools, documents and kwargs.

        `opens_turn` adds the start of the assistant's turn; `continues_turn` ends at the last text.
        """
        options = {**self._kwargs, **(given.get("kwargs") or {})}
        # A tokenizer with its own code may only accept the arguments that it needs.
        options |= {name: given[name] for name in ("tools", "documents") if given.get(name)}
        if self._template is not None:
            options["chat_template"] = self._template
        if continues_turn:
            options["continue_final_message"] = True
        if _DATE in (self.template or ""):
            options[_DATE] = self._now.strftime
        try:
            return str(
                self.tokenizer.apply_chat_template(
                    list(messages),
                    tokenize=False,
                    add_generation_prompt=opens_turn and not continues_turn,
                    **options,
                )
            )
        except Exception as error:  # a template may raise any Python exception
            reason = str(error).strip().partition("\n")[0][:_LONGEST_REASON]
            raise RejectedRow(
                f"the chat template refuses the messages ({reason or type(error).__name__})",
                "correct the row or pass --rl-no-chat-template",
            ) from error

    def prompt(self, row: Mapping[str, Any]) -> tuple[str, list[str]]:
        """Return the text of a prompts row, and the names of fields that the template omits.

        `row` has the messages, and may have tools, documents and kwargs. Raises RejectedRow if the
        template refuses it, or omits content that the model needs.
        """
        return self._accepted(row, is_complete=False)[:2]

    def conversation(self, row: Mapping[str, Any]) -> tuple[str, list[str], list[Message]]:
        """Return the text of a complete conversation, which nothing continues, the omitted fields
        as `prompt`, and the messages in the form that the template accepts."""
        return self._accepted(row, is_complete=True)

    def _accepted(
        self, row: Mapping[str, Any], *, is_complete: bool
    ) -> tuple[str, list[str], list[Message]]:
        for message in row["messages"]:
            self._refuse_rendered(message)
        for name in row.get("kwargs") or ():
            if not self.reads(name):
                raise RejectedRow(
                    f"the chat template does not read the argument {name!r}",
                    "correct its name or remove it",
                )
        refusal: RejectedRow | None = None
        for messages in variants(row["messages"]):
            try:
                return (*self._verified(messages, row, is_complete=is_complete), messages)
            except RejectedRow as error:
                # Prefer the error that names an omitted field.
                if refusal is None or _says_loss(error) and not _says_loss(refusal):
                    refusal = error
        assert refusal is not None, "there is always the row as it is"
        raise refusal

    def encode(self, texts: Sequence[str], *, special: bool) -> list[list[int]]:
        """Return token ids of texts; `special` adds the tokenizer's own where a text lacks them."""
        if not texts:
            return []
        if len(texts) == 1:
            token_ids = [list(self.tokenizer(texts[0], add_special_tokens=False)["input_ids"])]
        else:
            token_ids = self.tokenizer(list(texts), add_special_tokens=False)["input_ids"]
        if not special:
            return token_ids
        before, behind = self._added_tokens
        if self.left_out_of_texts:
            behind = []
        begins, ends = map(self._text_of_tokens, (before, behind))
        return [
            [
                *(() if begins and text.lstrip().startswith(begins) else before),
                *ids,
                *(() if ends and text.rstrip().endswith(ends) else behind),
            ]
            for text, ids in zip(texts, token_ids, strict=True)
        ]

    def is_special(self, token: int) -> bool:
        """Return whether it is one of the tokenizer's special tokens."""
        added = getattr(self.tokenizer, "added_tokens_decoder", {})
        known = added.get(token)
        return token in self.tokenizer.all_special_ids or bool(known is not None and known.special)

    @cached_property
    def ends(self) -> frozenset[int]:
        """The tokens at which a response ends."""
        own = self.tokenizer.eos_token_id
        return frozenset({*self._ends, *(() if own is None else (own,))})

    def is_blank(self, token: int) -> bool:
        """Return whether it is text of blanks alone."""
        return not self.is_special(token) and not self.tokenizer.decode([token]).strip()

    def end_token(self) -> int:
        """Return the token that ends a response. Raises RejectedRow without one."""
        own: int | None = self.tokenizer.eos_token_id
        if own is None and not self.ends:
            raise RejectedRow(
                "the tokenizer has no token that ends a sequence, which a response would have to "
                "learn",
                "use a chat template, or a tokenizer with an eos_token",
            )
        return min(self.ends) if own is None else own

    @cached_property
    def left_out_of_texts(self) -> list[str]:
        """What the tokenizer adds to a text and the model does not get: a model that reads its end
        token behind a prompt has nothing to continue."""
        adds_end = any(token in self.ends for token in self._added_tokens[1])
        return [ADDED_END] if adds_end else []

    # ------------------------------------------------------------------------- special tokens

    @cached_property
    def _added_tokens(self) -> tuple[list[int], list[int]]:
        """The tokens that the tokenizer puts before and after a text."""
        text = "a"
        bare = list(self.tokenizer(text, add_special_tokens=False)["input_ids"])
        whole = list(self.tokenizer(text, add_special_tokens=True)["input_ids"])
        at = next((n for n in range(len(whole)) if whole[n : n + len(bare)] == bare), len(whole))
        return whole[:at], whole[at + len(bare) :]

    def _text_of_tokens(self, ids: list[int]) -> str:
        return "".join(self.tokenizer.convert_ids_to_tokens(ids))

    def _refuse_rendered(self, message: Message) -> None:
        """Raise RejectedRow for a text that is rendered already: it would be rendered twice."""
        text = text_of(message).strip() + "\n"
        for frame, what in self._frames.items():
            if frame.match(text):
                raise RejectedRow(
                    f"the text {what}, as one that is rendered already",
                    "pass --rl-no-chat-template, or write the text without the template's tokens",
                )

    @cached_property
    def _frames(self) -> dict[re.Pattern[str], str]:
        return {re.compile(each, re.DOTALL): what for each, what in self._find_frames()}

    def _find_frames(self) -> Iterator[tuple[str, str]]:
        """Yield patterns of rendered texts, each with a description of such a text.

        A text begins with a special token, or has the template's first lines around a message,
        without special tokens."""
        special = {str(token) for token in self.tokenizer.all_special_tokens}
        added = getattr(self.tokenizer, "added_tokens_decoder", {})
        special |= {str(token.content) for token in added.values() if token.special}
        tokens = re.compile("|".join(map(re.escape, sorted(special - {""})[::-1])) or r"(?!)")
        around = [(str(self.tokenizer.bos_token or ""), "")]
        for roles in (["user"], ["system", "user"]):
            try:
                text = self.render([{"role": role, "content": _MARK} for role in roles])
            except RejectedRow:
                continue
            *before, behind = text.split(_MARK)
            around += [(each, behind) for each in before]
        for ahead, behind in around:
            if token := tokens.match(ahead.lstrip()):
                yield re.escape(token[0]), f"begins with {token[0]!r}"
            opener = re.sub(r"(?<=\n).*", "", tokens.sub("", ahead).lstrip(), flags=re.DOTALL)
            closer = tokens.sub("", behind).rstrip()
            if _NOT_WORDS.search(opener):
                yield re.escape(opener.rstrip()), f"begins with {opener.rstrip()!r}"
            elif opener and closer:  # both, as a user's text may begin with a word
                line = re.match(r"\s*[^\n]*", closer)[0]  # type: ignore[index]
                what = f"begins with {opener.rstrip()!r} and has {line.strip()!r}"
                yield f"{re.escape(opener)}.*{re.escape(line)}\\n", what
            elif _NOT_WORDS.search(closer):
                yield rf".*{re.escape(closer)}\s*\Z", f"ends with {closer.strip()!r}"

    # ------------------------------------------------------------- fields that the template omits

    def _verified(
        self, messages: list[Message], row: Mapping[str, Any], *, is_complete: bool
    ) -> tuple[str, list[str]]:
        inputs: dict[str, Any] = {name: row.get(name) for name in ("tools", "documents", "kwargs")}
        continues_turn = not is_complete and continues(messages)

        def render(changed: list[Message], **others: Any) -> str:
            how = {"opens_turn": not is_complete, "continues_turn": continues_turn}
            return self.render(changed, **how, **inputs | others)

        text = render(messages)
        if continues_turn:
            _refuse_second_thought(text_of(messages[-1]).strip(), text)
        if not re.search(rf"\b{LINK_FIELDS[0]}\b", self.template or ""):
            check_order_of_results(messages)
        left_out: list[str] = []
        for number, message in enumerate(messages):
            self._refuse_disfigured(message, number, text, messages, render)
            for field in message:
                if field in ("role", *LINK_FIELDS) or self._reaches(
                    messages, number, field, text, render
                ):
                    continue
                self._refuse_if_needed(field, number, message)
                left_out.append(f"{field} of {message['role']} messages")
        for name in ("tools", "documents"):
            entries = row.get(name)
            if entries and not self._shows_entries(name, entries, text, messages, render):
                if name == "tools":
                    raise RejectedRow(
                        f"{_LEAVES_OUT} its tools",
                        "use a template that reads them (--rl-chat-template), or rename the column",
                    )
                left_out.append(name)
        return text, sorted(set(left_out))

    def _reaches(
        self,
        messages: list[Message],
        number: int,
        field: str,
        text: str,
        render: Callable[..., str],
    ) -> bool:
        """Return whether the template reads this field of this message."""
        message = messages[number]
        parts = [container[key] for container, key in _parts(message, field)]
        last = len(messages) - 1
        asked = max((n for n in range(last + 1) if messages[n]["role"] == "user"), default=-1)
        kind = (
            message["role"],
            field,
            tuple(message),
            _shape(message[field]),
            len(parts) > 1,
            number == 0,
            number > asked,
        )
        if kind in self._read and all(is_shown(part, text) for part in parts):
            return True
        for index in range(len(parts)):
            changed = copy.deepcopy(messages)
            _mark(changed[number], field, index)
            if not _differs(text, render, changed):
                return False
        self._read.add(kind)
        return True

    def _refuse_if_needed(self, field: str, number: int, message: Message) -> None:
        """Raise RejectedRow for omitted content or calls, and reasoning that is read nowhere."""
        template = self.template or ""
        if field in REASONING_FIELDS:
            known = [name for name in REASONING_FIELDS if re.search(rf"\b{name}\b", template)]
            if field in known:
                return
            remedy = f"call it {known[0]}" if known else "put it into the content, or remove it"
        elif field == "content" or field in CALL_FIELDS:
            if field == "content" and not text_of(message).strip():
                return
            remedy = "use a template that reads it (--rl-chat-template), or remove the row"
        else:
            return
        raise RejectedRow(
            f"{_LEAVES_OUT} the {field} of message {number + 1} (role {message['role']})",
            remedy,
        )

    def _refuse_disfigured(
        self,
        message: Message,
        number: int,
        text: str,
        messages: list[Message],
        render: Callable[..., str],
    ) -> None:
        """Raise RejectedRow for values that the template writes as Python does or escapes twice."""
        for value in _not_texts(message):
            if isinstance(value, str):
                is_wrong = json.dumps(value, ensure_ascii=False) in text
            else:
                is_wrong = repr(value) in text and repr(value) != json.dumps(value)
            if is_wrong:
                raise RejectedRow(
                    f"the chat template cannot write a {type(value).__name__} of message "
                    f"{number + 1} (role {message['role']})",
                    "write a text, or use a template that can (--rl-chat-template)",
                )
        if "content" in message and message["content"] is None and "None" in text:
            changed = copy.deepcopy(messages)
            changed[number]["content"] = ""
            if render(changed).count("None") < text.count("None"):
                raise RejectedRow(
                    f"the chat template writes the null of message {number + 1} as None",
                    'write "" in its place',
                )

    def _shows_entries(
        self,
        name: str,
        entries: Sequence[Mapping[str, Any]],
        text: str,
        messages: list[Message],
        render: Callable[..., str],
    ) -> bool:
        """Return whether the template reads each tool or document."""
        for index in range(len(entries)):
            changed = copy.deepcopy(list(entries))
            inner: Any = function_of(changed[index])
            entry_name = inner.get("name")
            if not isinstance(entry_name, str):
                changed[index] = _marked(changed[index])
            elif (name, len(entries)) in self._read and entry_name in text:
                continue
            else:
                inner["name"] = _marked(entry_name)
            if not _differs(text, render, messages, **{name: changed}):
                return False
        self._read.add((name, len(entries)))
        return True


def _refuse_second_thought(begun: str, text: str) -> None:
    """Raise RejectedRow if the template writes its own <think> before that of the last message."""
    before = text.rstrip().removesuffix(begun).rstrip()
    if begun.startswith("<think>") and before.endswith(("<think>", "</think>")):
        raise RejectedRow(
            "the chat template writes a <think> of its own before that of the last message",
            "use a template that does not (--rl-chat-template), or render the prompt yourself and "
            "pass --rl-no-chat-template",
        )


def _says_loss(error: RejectedRow) -> bool:
    return error.problem.startswith(_LEAVES_OUT)


def _differs(text: str, render: Callable[..., str], *changed: Any, **others: Any) -> bool:
    try:
        return render(*changed, **others) != text
    except RejectedRow:  # the template checks the field, so it reads it
        return True


def _parts(message: Message, field: str) -> Iterator[tuple[Any, Any]]:
    """Yield the values of a field that a template could omit separately: container and key."""
    value = message[field]
    if field == "tool_calls":
        for call in value:
            function = function_of(call)
            yield function, "name"
            if function.get("arguments") not in (None, "", {}):
                yield function, "arguments"
    elif isinstance(value, list):
        for index in range(len(value)):
            yield value, index
    elif value not in (None, ""):
        yield message, field


def _shape(value: Any) -> Any:
    """Return the type of a field's value as a template may distinguish it, with keys of parts."""
    if isinstance(value, list):
        return frozenset(tuple(each) if isinstance(each, dict) else type(each) for each in value)
    return type(value)


def _mark(message: Message, field: str, index: int) -> None:
    """Change part `index` of `_parts` in place; of a text part, only its text."""
    container, key = list(_parts(message, field))[index]
    part = container[key]
    if isinstance(container, list) and isinstance(part, dict) and isinstance(part.get("text"), str):
        part["text"] += _MARK
    else:
        container[key] = _marked(part)


def _marked(value: Any) -> Any:
    if isinstance(value, str):
        return value + _MARK
    if isinstance(value, dict):
        return {name: _marked(each) for name, each in value.items()}
    if isinstance(value, list):
        return list(map(_marked, value))
    return _MARK


def is_shown(value: Any, text: str) -> bool:
    """Return whether the text has all texts and numbers of a value, verbatim or as JSON."""
    if isinstance(value, dict):
        if value.get("type") == "text" and "text" in value:
            return is_shown(value["text"], text)
        return all(is_shown(each, text) for each in value.values())
    if isinstance(value, list):
        return all(is_shown(each, text) for each in value)
    if isinstance(value, str):
        bare = value.strip()
        return bare in text or json.dumps(bare, ensure_ascii=False)[1:-1] in text
    return json.dumps(value) in text


def _not_texts(message: Message) -> Iterator[Any]:
    """Yield the values of a message that can be written in several forms."""
    content = message.get("content")
    if isinstance(content, list):
        yield from content
    elif isinstance(content, dict):
        yield content
    for call in message.get("tool_calls", ()):
        arguments = function_of(call).get("arguments")
        if isinstance(arguments, dict) or (isinstance(arguments, str) and arguments[:1] == "{"):
            yield arguments
