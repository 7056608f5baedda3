"""A sample's conversation as token ids; generated tokens are never tokenized again.

    prompt ids │ turn 1, as generated │ observation │ turn 2, as generated │ ...

`encode(decode(ids))` may join or split tokens, and the model would be trained on a text that it has
not written. So only observations are tokenized, separately, and appended to the ids:

- a text unchanged, without the tokenizer's special tokens;
- messages as the text that the chat template puts between the end of an assistant's turn and the
  beginning of the next: the end of a rendering of a small conversation, in which these messages
  follow an assistant's turn. The model has written its own end of sequence, unless its length limit
  cut the turn; then the end of sequence is part of the observation;
- token ids unchanged.

Most templates end a turn with an end of sequence. Some write another token once messages follow
(gpt-oss: <|end|> for <|return|>). Some write none, as the first token of the next message ends the
turn (GLM: <|user|>). Templates without the roles `tool` or `system` get these messages as a user's.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np

from mcore_rl.common.errors import UsageError
from mcore_rl.common.user_code import shortened
from mcore_rl.data.chat import ChatTokenizer, is_shown
from mcore_rl.data.messages import RejectedRow
from mcore_rl.data.options import DataOptions
from mcore_rl.data.prompt_cache import tokenizer_process
from mcore_rl.data.prompts import chat_template
from mcore_rl.data.tokenizer import response_ends, vocabulary_size
from mcore_rl.data.tokenizer_process import ProcessEnded, TokenizerProcess
from mcore_rl.environments.tool_formats import ToolFormat, format_of
from mcore_rl.isolation.wire import Failed

logger = logging.getLogger(__name__)

_QUESTION, _ANSWER = "question", "MCORERLANSWER"  # contents in the small conversation
_CALL = "MCORERLCALL"  # ends the arguments of a call in it
_USER = {"role": "user", "content": _QUESTION}
_ASSISTANT = {"role": "assistant", "content": _ANSWER}
_REFUSED = "returned messages that the chat template refuses"
_LEFT_OUT = "returned messages that the chat template leaves out"
_NO_TOOLS = "set tool_schemas that the chat template leaves out"

Messages = Sequence[Mapping[str, Any]]


class ConversationTokens:
    """The tokenizer of observations. Not collective; every rank of a TP group may have its own, or
    one sends its ids to the others.

    `vocabulary` is the number of ids that the model knows, None if unknown; `ends` are the ids at
    which the engine ends a response. Raises UsageError if the chat template in use does not
    determine the text between two turns.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        use_chat_template: bool,
        ends: Sequence[int],
        vocabulary: int | None = None,
        place: str = "",
    ) -> None:
        """`tokenizer` is a `TokenizerProcess` or one of transformers; messages name its path
        `place`."""
        in_process = isinstance(tokenizer, TokenizerProcess | ChatTokenizer)
        self._chat = tokenizer if in_process else ChatTokenizer(tokenizer)
        self.ends = frozenset(ends)
        self._vocabulary = vocabulary
        self._use_chat_template = use_chat_template
        self._num_ending = 0  # tokens that a template appends to a turn, the end included
        self._warned_roles: set[str] = set()
        if use_chat_template:
            self._check_template(place)

    @classmethod
    def of_model(
        cls,
        folder: Path,
        options: DataOptions,
        *,
        trust_remote_code: bool,
        date: str | None = None,
    ) -> Self:
        """Return the tokenizer of the Hugging Face folder, in a process of its own; `date` as in
        `ChatTemplate`."""
        uses_template = not options.no_chat_template
        process = tokenizer_process(
            folder,
            chat_template(options, date),
            use_template=uses_template,
            trust_remote_code=trust_remote_code,
        )
        return cls(
            process,
            use_chat_template=uses_template,
            ends=response_ends(folder, process),
            vocabulary=vocabulary_size(folder),
            place=str(folder),
        )

    def tool_format(self, tool_parser: str, reasoning_parser: str) -> ToolFormat | None:
        """Return the format in which the model calls tools, by the names of the flags; None: it has
        none that is known."""
        return format_of(self._chat.template, tool_parser, reasoning_parser)

    def first(
        self, token_ids: np.ndarray, prompt: Any, tools: str | None = None
    ) -> np.ndarray | Failed:
        """Return `[p]` int32, the model's first input. `token_ids` are those of the file's prompt;
        `prompt` is the result of the environment's start, and `tools` the JSON of its functions,
        which the chat template describes before messages."""
        if prompt is None:
            return token_ids
        if isinstance(prompt, str) and self._use_chat_template:
            prompt = [{"role": "user", "content": prompt}]
        input_ids: Sequence[int] | Failed
        if isinstance(prompt, str):
            input_ids = self._encoded(prompt, special=True)  # like a prompt of the file
        elif _is_messages(prompt):
            text = self._first_text(prompt, [] if tools is None else json.loads(tools))
            input_ids = text if isinstance(text, Failed) else self._encoded(text)
        else:
            input_ids = list(prompt)
        if not isinstance(input_ids, Failed) and not input_ids:
            return Failed("returned no tokens", "the model needs at least one")
        return self._checked(input_ids)

    def observed(self, generated: np.ndarray, observation: Any) -> np.ndarray | Failed:
        """Return `[o]` int32, the tokens between `generated`, `[r]` int32 as the engine returned
        them, and the model's next turn."""
        if isinstance(observation, str):
            return self._checked(self._encoded(observation))
        if not _is_messages(observation):
            return self._checked(list(observation))
        last = int(generated[-1]) if len(generated) else None
        failed: Failed | None = None
        for messages, begins in _forms_after_a_turn(observation):
            text = self._rendered(messages)
            if isinstance(text, Failed):
                failed = failed or text
                continue
            _, separator, behind = text.rpartition(begins)
            if not separator or not _all_shown(messages[2:], behind):
                failed = failed or Failed(_LEFT_OUT, "")
                continue
            self._warn_if_changed(observation, messages[2:])
            ids = self._encoded(behind)
            if isinstance(ids, Failed):
                return ids
            if begins == _CALL:  # the model has written the call, up to its end
                ids = ids[next((n for n, each in enumerate(ids) if each in self.ends), 0) :]
                return self._checked(ids[1:] if last in self.ends else ids)
            return self._checked(ids[self._num_written(ids, last) :])
        assert failed is not None, "there is always one form"
        return failed

    def _num_written(self, ids: Sequence[int], last: int | None) -> int:
        """Count the tokens of a turn's ending that the model wrote, if `last` is its last token."""
        if last not in self.ends:
            return 0
        if self._num_ending:
            return self._num_ending
        return int(bool(ids) and ids[0] == last)

    def _first_text(self, messages: Messages, tools: Sequence[Any]) -> str | Failed:
        failed: Failed | None = None
        for form in _forms_of_a_start(messages):
            text = self._rendered(form, tools=tools)
            if isinstance(text, str) and not all(t["function"]["name"] in text for t in tools):
                text = Failed(_NO_TOOLS, "give --rl-tool-parser none, or another template")
            if isinstance(text, str) and _all_shown(form, text):
                self._warn_if_changed(messages, form)
                return text
            failed = failed or (text if isinstance(text, Failed) else Failed(_LEFT_OUT, ""))
        assert failed is not None, "there is always one form"
        return failed

    def _warn_if_changed(self, given: Messages, used: Messages) -> None:
        roles = ", ".join(dict.fromkeys(str(each["role"]) for each in given))
        if list(given) != list(used) and roles not in self._warned_roles:
            self._warned_roles.add(roles)
            logger.warning(
                "the chat template cannot render the environment's messages (roles %s): the model "
                "reads them as a user's message",
                roles,
            )

    def _encoded(self, text: str, *, special: bool = False) -> list[int] | Failed:
        try:
            return list(self._chat.encode([text], special=special)[0])
        except (RejectedRow, ProcessEnded) as error:
            return Failed("returned a text that cannot be tokenized", shortened(str(error)))

    def _rendered(
        self, messages: Messages, *, opens_turn: bool = True, tools: Sequence[Any] = ()
    ) -> str | Failed:
        if not self._use_chat_template:
            return Failed("returned messages", "no chat template is used that could render them")
        try:
            more: dict[str, Any] = {"tools": list(tools)} if tools else {}
            copies = [dict(each) for each in messages]
            return str(self._chat.render(copies, opens_turn=opens_turn, **more))
        except RejectedRow as error:
            reason = error.problem.partition("(")[2].removesuffix(")") or error.problem
            return Failed(_REFUSED, shortened(reason))
        except ProcessEnded as error:
            return Failed(_REFUSED, shortened(str(error)))

    def _checked(self, token_ids: Sequence[int] | Failed) -> np.ndarray | Failed:
        if isinstance(token_ids, Failed):
            return token_ids
        ids = np.asarray(token_ids, dtype=np.int64)
        if self._vocabulary is not None and (ids >= self._vocabulary).any():
            return Failed(
                "returned a token that the model does not have",
                f"token {ids.max()}, and its vocabulary has {self._vocabulary}",
            )
        return ids.astype(np.int32)

    # ------------------------------------------------------------------------ the chat template

    def _check_template(self, place: str) -> None:
        """Check that a turn's ending does not depend on the turn and begins with its end."""
        fault = self._fault()
        if fault is not None:
            raise UsageError(
                f"has a chat template that cannot carry several turns: {fault}",
                flag=f"--rl-hf-checkpoint {place}".strip(),
                remedy="give another one by --rl-chat-template, or pass --rl-no-chat-template and "
                "have the environment return texts or token ids",
            )

    def _fault(self) -> str | None:
        next_turn = {"role": "user", "content": "MCORERLNEXT"}
        short, long = [_USER, _ASSISTANT], [_USER, _ASSISTANT, next_turn]
        first, text = self._rendered([_USER]), self._rendered(long)
        again = self._rendered([*long, _ASSISTANT, next_turn])
        ended = self._rendered(short, opens_turn=False)
        for each in (first, text, again, ended):
            if isinstance(each, Failed):
                return f"it refuses a conversation of user and assistant in turn ({each.detail})"
        assert isinstance(text, str) and isinstance(again, str) and isinstance(ended, str)
        before, separator, behind = text.partition(_ANSWER)
        if not separator or _ANSWER in behind or again.count(_ANSWER) != 2:
            return "it does not keep the assistant's earlier turns"
        _, _, behind_again = again.rpartition(_ANSWER)
        if behind != behind_again:
            return "the text that it puts after a turn depends on earlier turns"
        if not again.startswith(text[: len(before) + len(_ANSWER)]):
            return "it changes earlier turns once others follow"
        return self._ending_fault(ended.rpartition(_ANSWER)[2], behind)

    def _ending_fault(self, tail: str, behind: str) -> str | None:
        """Set `_num_ending` from the endings of a last turn and of a turn that others follow;
        return the reason if that fails."""
        in_tail, in_history = self._encoded(tail), self._encoded(behind)
        if isinstance(in_tail, Failed) or isinstance(in_history, Failed):
            return "its texts cannot be tokenized"
        self._num_ending = next((n for n, t in enumerate(in_tail, 1) if t in self.ends), 0)
        if behind.startswith(tail) and self._num_ending:
            return None
        is_replaced = len(in_tail) == self._num_ending == 1 and self._chat.is_special(in_history[0])
        is_ended_by_next = not tail.strip() and in_history[:1] and in_history[0] in self.ends
        if is_replaced or is_ended_by_next:
            return None
        if not behind.startswith(tail):
            return "it ends a turn differently once others follow"
        return (
            "it does not end an assistant's turn with a token at which the engine ends a "
            f"response ({', '.join(map(str, sorted(self.ends))) or 'there is none'})"
        )


def _forms_after_a_turn(observation: Messages) -> Iterator[tuple[Messages, str]]:
    """Yield small conversations with `observation` after a turn, and the text that ends the turn:
    unchanged, after a tool call for templates that require one, and as a user's message."""
    yield [_USER, _ASSISTANT, *observation], _ANSWER
    named = next((each for each in observation if each["role"] == "tool"), None)
    if named is not None:
        function = {"name": named.get("name", "tool"), "arguments": {"argument": _CALL}}
        link = named.get("tool_call_id", "call00000")
        call = {"id": link, "type": "function", "function": function}
        calling = {"role": "assistant", "content": "", "tool_calls": [call]}
        yield [_USER, calling, *observation], _CALL
    if any(each["role"] != "user" for each in observation):
        yield [_USER, _ASSISTANT, _as_users(observation)], _ANSWER


def _forms_of_a_start(messages: Messages) -> Iterator[Messages]:
    """Yield the messages unchanged, then with system texts at the head of the user's message."""
    yield messages
    num_system = next((n for n, m in enumerate(messages) if m["role"] != "system"), len(messages))
    if num_system and messages[num_system : num_system + 1]:
        if messages[num_system]["role"] == "user":
            head = messages[: num_system + 1]
            yield [_as_users(head), *messages[num_system + 1 :]]


def _as_users(messages: Messages) -> Mapping[str, Any]:
    return {"role": "user", "content": "\n\n".join(str(each["content"]) for each in messages)}


def _all_shown(messages: Messages, text: str) -> bool:
    return all(is_shown(each["content"], text) for each in messages)


def _is_messages(observation: Any) -> bool:
    return bool(observation) and isinstance(observation[0], dict)
