"""The conversation of a sample as token ids: what the model generated is never tokenised again.

    prompt ids │ turn 1, as generated │ observation │ turn 2, as generated │ ...

A tokenizer need not give back the ids whose text it is given: `decode`, then `encode` may join or
split tokens, and then the model would be trained on a text that it has not written. So only what an
environment says is tokenised, by itself, and put behind the ids that are there:

- a text as it stands, without special tokens of the tokenizer's own;
- messages by what the chat template puts between the end of a turn of the assistant's and the
  beginning of its next one. That is the end of a rendering of a small conversation, with these
  messages behind an assistant's turn; of the tokens that end the turn the model has written its own
  end of sequence, unless it was cut by its length: then they are part of what it reads;
- token ids as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from mcore_rl.common.errors import UsageError
from mcore_rl.environments.wire import Failed
from mcore_rl.rewards.functions import shortened

_ASKED, _ANSWERED = "question", "MCORERLANSWER"  # contents in the small conversation
_USER = {"role": "user", "content": _ASKED}
_ASSISTANT = {"role": "assistant", "content": _ANSWERED}


class ConversationTokens:
    """Token ids of what environments say. Not collective; every rank of a TP group may have its
    own, or one tells the others its ids.

    `vocabulary` is the number of ids that the model knows, None if that is not known; `ends` are
    the ids at which the engine ends a response. Raises UsageError if the chat template that is to
    be used does not say what stands between two turns.
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
        """`place` is where the tokenizer lies, for messages."""
        self._tokenizer, self._ends = tokenizer, frozenset(ends)
        self._vocabulary = vocabulary
        self._use_chat_template = use_chat_template
        if use_chat_template:
            self._check_template(place)

    def first(self, token_ids: np.ndarray, told: Any) -> np.ndarray | Failed:
        """`[p]` int32: what the model reads first, `token_ids` being those of the prompt, and
        `told` what the environment's start returned."""
        if told is None:
            return token_ids
        if isinstance(told, str) and self._use_chat_template:
            told = [{"role": "user", "content": told}]
        found: Sequence[int] | Failed
        if isinstance(told, str):
            found = self._encoded(told, special=True)  # as a prompt of the file
        elif _is_messages(told):
            text = self._rendered(list(told))
            found = text if isinstance(text, Failed) else self._encoded(text)
        else:
            found = list(told)
        if not isinstance(found, Failed) and not found:
            return Failed("returned no tokens", "the model cannot begin with nothing")
        return self._checked(found)

    def observed(self, generated: np.ndarray, observation: Any) -> np.ndarray | Failed:
        """`[o]` int32: what stands behind `generated`, `[r]` int32 as the engine gave it, before
        the model's next turn."""
        if isinstance(observation, str):
            return self._checked(self._encoded(observation))
        if not _is_messages(observation):
            return self._checked(list(observation))
        text = self._rendered([_USER, _ASSISTANT, *observation])
        if isinstance(text, Failed):
            return text
        _, found, behind = text.partition(_ANSWERED)
        if not found:
            return Failed("returned messages that the chat template leaves out", "")
        token_ids = self._encoded(behind)
        if len(generated) and int(generated[-1]) in self._ends:
            token_ids = token_ids[self._num_ending(token_ids) :]
        return self._checked(token_ids)

    def _num_ending(self, token_ids: Sequence[int]) -> int:
        """Tokens up to the end of the assistant's turn, that end included."""
        for index, token in enumerate(token_ids):
            if token in self._ends:
                return index + 1
        return 0

    def _encoded(self, text: str, *, special: bool = False) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=special)["input_ids"])

    def _rendered(self, messages: list[Any]) -> str | Failed:
        from jinja2 import TemplateError

        if self._tokenizer.chat_template is None or not self._use_chat_template:
            return Failed("returned messages", "no chat template is used that gives them a form")
        try:
            return str(
                self._tokenizer.apply_chat_template(
                    [dict(each) for each in messages], tokenize=False, add_generation_prompt=True
                )
            )
        except (TemplateError, TypeError, ValueError, LookupError) as error:
            return Failed("returned messages that the chat template refuses", shortened(str(error)))

    def _checked(self, token_ids: Sequence[int] | Failed) -> np.ndarray | Failed:
        if isinstance(token_ids, Failed):
            return token_ids
        found = np.asarray(token_ids, dtype=np.int64)
        if self._vocabulary is not None and (found >= self._vocabulary).any():
            return Failed(
                "returned a token that the model does not have",
                f"token {found.max()}, and its vocabulary has {self._vocabulary}",
            )
        return found.astype(np.int32)

    # ------------------------------------------------------------------------ the chat template

    def _check_template(self, place: str) -> None:
        """What it puts behind a turn must not depend on the turn, and must begin with its end."""
        fault = self._fault()
        if fault is not None:
            raise UsageError(
                f"has a chat template that cannot carry several turns: {fault}",
                flag=f"--rl-hf-checkpoint {place}".strip(),
                remedy="give another one in its folder, or pass --rl-no-chat-template and have the "
                "environment return texts or token ids",
            )

    def _fault(self) -> str | None:
        next_turn = {"role": "user", "content": "MCORERLNEXT"}
        short, long = [_USER, _ASSISTANT], [_USER, _ASSISTANT, next_turn]
        first, text = self._rendered([_USER]), self._rendered(long)
        again = self._rendered([*long, _ASSISTANT, next_turn])
        for each in (first, text, again):
            if isinstance(each, Failed):
                return f"it refuses a conversation of user and assistant in turn ({each.detail})"
        assert isinstance(text, str) and isinstance(again, str) and isinstance(first, str)
        before, found, behind = text.partition(_ANSWERED)
        if not found or _ANSWERED in behind or again.count(_ANSWERED) != 2:
            return "it does not keep what the assistant has said before"
        _, _, behind_again = again.rpartition(_ANSWERED)
        if behind != behind_again:
            return "what it puts behind a turn depends on those before"
        if not again.startswith(text[: len(before) + len(_ANSWERED)]):
            return "it changes earlier turns once others follow"
        ended = self._without_prompt(short)
        tail = ended.rpartition(_ANSWERED)[2]
        if not behind.startswith(tail):
            return "it ends a turn otherwise once others follow"
        if not self._num_ending(self._encoded(tail)):
            return (
                "it does not end an assistant's turn by a token at which the engine ends a "
                f"response ({', '.join(map(str, sorted(self._ends))) or 'there is none'})"
            )
        return None

    def _without_prompt(self, messages: Sequence[Any]) -> str:
        return str(
            self._tokenizer.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=False
            )
        )


def _is_messages(told: Any) -> bool:
    return bool(told) and isinstance(told[0], dict)
