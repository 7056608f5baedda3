"""The program of a tokenizer's process: it loads, renders and tokenises.

A tokenizer and its chat template come with a downloaded folder. They may loop, allocate any amount
of memory, or abort their process. They therefore run in a process of a `ProcessPool`, with limits
on memory and on the time of each step. torch is not imported unless the folder's own code may need
it: it would take most of the start-up time.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from mcore_rl.common.errors import UsageError
from mcore_rl.data.assistant_turns import demonstrated
from mcore_rl.data.chat import ChatTokenizer
from mcore_rl.data.messages import RejectedRow
from mcore_rl.data.tokenizer import (
    TooLong,
    load_tokenizer,
    register_model_type,
    response_ends,
    vocabulary_size,
)
from mcore_rl.isolation.process import Service

OPEN_SECONDS = 180.0
ROW_SECONDS = 10.0  # CPU time, after which the row is rejected
ROW_WALL_SECONDS = 40.0  # wall time, for code that does not return to Python; then the process ends
_ENCODE_SECONDS = 60.0
_CHARACTERS_PER_SECOND = 10_000  # for the slowest tokenizer on a busy machine
_REASON_CHARACTERS = 200

Request = Mapping[str, Any]


def encoding_seconds(num_characters: int) -> float:
    """Return the time that a tokenizer has for texts."""
    return _ENCODE_SECONDS + num_characters / _CHARACTERS_PER_SECOND


def load(settings: dict[str, Any]) -> Callable[[], Service]:
    """Return what creates the service; see `run_zygote`."""
    if not settings["trusts_code"]:
        sys.modules["torch"] = None  # type: ignore[assignment]  # transformers then finds no torch
    os.environ["TRANSFORMERS_NO_ADVISORY_WARNINGS"] = "1"
    return _TokenizerService


class _Slow(RuntimeError):
    """Timeout of a step in code that Python can interrupt."""


class _TokenizerService:
    """The tokenizers of the settings in its requests."""

    def __init__(self) -> None:
        self._row: int | None = None  # that is being rendered
        signal.signal(signal.SIGVTALRM, _interrupt)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)  # the trainer may ignore it

    def answer(self, request: Request) -> dict[str, Any]:
        """Return the value of an operation, or why its input is rejected. SIGALRM ends the process
        when a step takes too long, in Python, C and Rust alike."""
        self._row = None
        signal.setitimer(signal.ITIMER_REAL, OPEN_SECONDS)
        try:
            chat = _chat_tokenizer(json.dumps(request["settings"], sort_keys=True))
            operation: Callable[[Any, Request], Any] = getattr(self, request["operation"])
            return {"value": operation(chat, request)}
        except UsageError:
            raise
        except RejectedRow as error:
            return {"rejected": [self._row, error.problem, error.remedy]}
        except Exception as error:  # whatever tokenizers and templates raise
            return {"rejected": [self._row, _failure(error), ""]}
        finally:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
            signal.setitimer(signal.ITIMER_REAL, 0)

    def close(self) -> None:
        """Do nothing; the process ends."""

    # ------------------------------------------------------------------------------- operations

    def open(self, chat: Any, request: Request) -> None:
        """Do nothing; the tokenizer is loaded by now."""

    def eos_token_id(self, chat: Any, request: Request) -> int | None:
        """Return the tokenizer's end of sequence."""
        token_id: int | None = chat.tokenizer.eos_token_id
        return token_id

    def template(self, chat: Any, request: Request) -> str | None:
        """Return the text of the chat template in use."""
        text: str | None = chat.template if request["settings"]["use_template"] else None
        return text

    def is_special(self, chat: Any, request: Request) -> bool:
        """Call `ChatTokenizer.is_special`."""
        return bool(chat.is_special(request["token"]))

    def tokenise(self, chat: Any, request: Request) -> list[Any]:
        """Return the rows of `TokenizerProcess.tokenise`: ids, lower bound or 0, omitted fields."""
        texts: list[tuple[str, list[str]] | str] = self._each(
            request, lambda row: self._text_of(chat, row)
        )
        read = [each for each in texts if not isinstance(each, str)]
        self._begin_encoding(sum(len(text) for text, _ in read))
        too_long = TooLong(chat.tokenizer, request["limit"])
        least = [too_long.least_tokens(text) for text, _ in read]
        # A chat template writes its own special tokens.
        encoded = chat.encode(
            [text for (text, _), cut in zip(read, least, strict=True) if not cut],
            special=request["special"],
        )
        ids, added = iter(encoded), chat.left_out_of_texts if request["special"] else []
        tokenised = iter(
            [[] if cut else next(ids), cut, [*missing, *added]]
            for (_, missing), cut in zip(read, least, strict=True)
        )
        return [each if isinstance(each, str) else next(tokenised) for each in texts]

    def _text_of(self, chat: Any, row: Request) -> tuple[str, list[str]]:
        text, missing = (row["text"], []) if "text" in row else chat.prompt(row)
        text.encode()  # UnicodeEncodeError for half a surrogate pair, which aborts tokenizers
        return text, missing

    def demonstrate(self, chat: Any, request: Request) -> list[Any]:
        """Return the rows of `TokenizerProcess.demonstrate`."""
        too_long = TooLong(chat.tokenizer, request["limit"])

        def of_row(row: Request) -> Any:
            json.dumps(row, ensure_ascii=False).encode()  # as in `tokenise`
            return demonstrated(chat, row, too_long, append_end=request["append_end"])

        return self._each(request, of_row)

    def _each(self, request: Request, make: Callable[[Request], Any]) -> list[Any]:
        """Return what `make` returns for each row; with `skips` the problem of a rejected one."""
        results = []
        for number, row in enumerate(request["rows"]):
            self._begin_row(number)
            try:
                results.append(make(row))
            except RejectedRow as error:
                if not request["skips"]:
                    raise
                results.append(error.problem)
            except Exception as error:
                if not request["skips"]:
                    raise
                results.append(_failure(error))
        self._end_rows()
        return results

    def decode(self, chat: Any, request: Request) -> list[str]:
        """Return the texts of tokens, special ones included."""
        return [chat.tokenizer.decode(ids, skip_special_tokens=False) for ids in request["ids"]]

    def vocabulary(self, chat: Any, request: Request) -> dict[str, int]:
        """Return the number of each token."""
        return dict(chat.tokenizer.get_vocab())

    def render(self, chat: Any, request: Request) -> str:
        """Return the text of a conversation, see `ChatTokenizer.render`."""
        self._begin_row(0)
        text: str = chat.render(request["messages"], **request["options"])
        text.encode()
        return text

    def encode(self, chat: Any, request: Request) -> list[list[int]]:
        """Return the token ids of texts, see `ChatTokenizer.encode`."""
        self._begin_encoding(sum(map(len, request["texts"])))
        token_ids: list[list[int]] = chat.encode(request["texts"], special=request["special"])
        return token_ids

    # ------------------------------------------------------------------------------------ limits

    def _begin_row(self, number: int) -> None:
        self._row = number
        signal.setitimer(signal.ITIMER_REAL, ROW_WALL_SECONDS)
        # Repeated every second, in case the interrupted code catches the first exception.
        signal.setitimer(signal.ITIMER_VIRTUAL, ROW_SECONDS, 1.0)

    def _end_rows(self) -> None:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        self._row = None

    def _begin_encoding(self, num_characters: int) -> None:
        signal.setitimer(signal.ITIMER_REAL, encoding_seconds(num_characters))


def _failure(error: Exception) -> str:
    reason = str(error).strip().partition("\n")[0][:_REASON_CHARACTERS]
    reason = f"{type(error).__name__}: {reason}" if reason else type(error).__name__
    return f"the tokenizer fails on it ({reason})"


@lru_cache(maxsize=4)
def _chat_tokenizer(settings_json: str) -> Any:
    """Load the tokenizer of a request's settings."""
    settings = json.loads(settings_json)
    for model_type, class_name in settings["model_types"].items():
        register_model_type(model_type, class_name)
    tokenizer = load_tokenizer(
        Path(settings["folder"]),
        trust_remote_code=settings["trust_remote_code"],
        needs_template=settings["use_template"] and settings["template"] is None,
    )
    template = settings["template"]
    own = tokenizer.chat_template
    if settings["use_template"] and isinstance(own, dict) or settings["template_name"]:
        names = own if isinstance(own, dict) else {} if own is None else {"default": own}
        name = settings["template_name"] or "default"
        if template is None and name not in names:
            given = settings["template_name"]
            raise UsageError(
                "is neither a file nor a template of the tokenizer"
                if given
                else f"is needed, since the tokenizer of {settings['folder']} has no default one",
                flag=f"--rl-chat-template {given}" if given else "--rl-chat-template",
                remedy=f"give one of {', '.join(sorted(names)) or 'your own files (.jinja)'}",
            )
        template = template or names[name]
    size = vocabulary_size(Path(settings["folder"]))
    ends = response_ends(Path(settings["folder"]), tokenizer)
    chat = ChatTokenizer(
        tokenizer,
        template=template,
        kwargs=settings["kwargs"],
        date=settings["date"],
        ends=[token for token in ends if size is None or token < size],
    )
    unknown = [name for name in settings["kwargs"] if not chat.reads(name)]
    if settings["use_template"] and unknown:
        raise UsageError(
            f"sets {unknown[0]!r}, which the chat template does not read",
            flag="--rl-chat-template-kwargs",
            remedy="correct the name or drop it",
        )
    return chat


def _interrupt(number: int, frame: object) -> None:
    raise _Slow(f"it takes longer than {ROW_SECONDS:g} s")
