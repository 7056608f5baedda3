"""Client of the separate, limited process that runs a folder's tokenizer and chat template.

    trainer ── request ──► process: loads, renders, tokenises, within memory and time
            ◄── answer ── token ids, a text, or an error
            ◄── (ends) ── it ran out of time or memory, or aborted: one sentence, not a hang

It is the one process of a `ProcessPool`. The first request starts it. It serves all later requests
and ends with this process. If it ends earlier, the next request starts another.
"""

from __future__ import annotations

import atexit
import json
import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from mcore_rl.common.errors import UsageError
from mcore_rl.data.messages import Message, RejectedRow
from mcore_rl.data.tokenizer_worker import OPEN_SECONDS, ROW_WALL_SECONDS, encoding_seconds
from mcore_rl.isolation.pool import ProcessPool, StartsFailed
from mcore_rl.isolation.wire import MAX_REQUEST_BYTES, Failed
from mcore_rl.isolation.zygote import Program
from mcore_rl.model.families import FAMILIES

_MEMORY_GIB = 4.0
# Where transformers finds what it has cached, and how many threads a tokenizer has.
_VARIABLES = (
    *("HF_HOME", "HF_HUB_CACHE", "HF_HUB_OFFLINE", "HF_MODULES_CACHE", "TRANSFORMERS_OFFLINE"),
    *("XDG_CACHE_HOME", "RAYON_NUM_THREADS", "TOKENIZERS_PARALLELISM"),
)


@dataclass(frozen=True, slots=True)
class ChatTemplate:
    """Chat template and its arguments.

    `chosen` is the name of one of the tokenizer's templates, or a file; None is the default one.
    `kwargs` are its arguments. `date` (ISO) is the date that it gets; None: today.
    """

    chosen: str | None = None
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    date: str | None = None

    @property
    def is_file(self) -> bool:
        """Whether `chosen` is a file instead of a name."""
        return self.chosen is not None and (
            self.chosen.endswith(".jinja") or os.sep in self.chosen or os.path.isfile(self.chosen)
        )

    def text(self) -> str | None:
        """Return the file's content; None for a template of the tokenizer. Raises UsageError."""
        if not self.is_file:
            return None
        assert self.chosen is not None
        try:
            return Path(self.chosen).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "it is not UTF-8"
            raise UsageError(
                f"cannot be read ({reason})",
                flag=f"--rl-chat-template {self.chosen}",
                remedy="give a file of Jinja, or the name of one of the tokenizer's templates",
            ) from error


class ProcessEnded(RuntimeError):
    """The process ended before it answered."""


class RowRejected(RejectedRow):
    """`RejectedRow` for a request with several rows; `row` is None if it concerns all."""

    def __init__(self, problem: str, remedy: str, row: int | None) -> None:
        super().__init__(problem, remedy)
        self.row = row


class Tokenised(NamedTuple):
    """Tokens of a row.

    `least` is 0, or a lower bound of the tokens of a row that is certainly too long; it then has
    none. `left_out` are fields that the model does not get. `spans` are those of `Demonstrated`.
    """

    ids: list[int]
    least: int
    left_out: list[str]
    spans: Sequence[int] = ()


class TokenizerProcess:
    """Tokenizer of a folder, with the needed part of `ChatTokenizer`'s interface.

    All methods raise UsageError for a folder without a usable tokenizer, RowRejected for rejected
    input, and ProcessEnded if the process ended.
    """

    def __init__(
        self,
        folder: Path | str,
        *,
        version: str,
        trust_remote_code: bool = False,
        use_template: bool = True,
        template: ChatTemplate | None = None,
    ) -> None:
        """Store the settings; `version` changes with the folder's files."""
        template = template or ChatTemplate()
        text = template.text() if use_template else None
        self.folder = str(folder)
        self._trusts = trust_remote_code
        self._settings = {
            "folder": self.folder,
            "version": version,
            "trust_remote_code": trust_remote_code,
            "use_template": use_template,
            "template": text,
            "template_name": template.chosen if use_template and text is None else None,
            "kwargs": dict(template.kwargs) if use_template else {},
            "date": template.date,
            "model_types": {each.model_type: each.class_name for each in FAMILIES.values()},
        }

    def open(self) -> None:
        """Load the tokenizer; raise UsageError for any failure."""
        try:
            self._ask("open")
        except (ProcessEnded, RejectedRow) as error:
            raise UsageError(
                f"holds a tokenizer that cannot be used ({error})",
                flag=f"--rl-hf-checkpoint {self.folder}",
                remedy="download it again, from a publisher that you trust",
            ) from error

    @property
    def eos_token_id(self) -> int | None:
        """The tokenizer's end of sequence; raises UsageError like `open`."""
        self.open()
        token_id: int | None = self._ask("eos_token_id")
        return token_id

    @property
    def template(self) -> str | None:
        """The text of the chat template in use; None without one."""
        text: str | None = self._ask("template")
        return text

    def tokenise(
        self, rows: Sequence[Mapping[str, Any]], *, limit: int, special: bool, skips: bool = False
    ) -> list[Tokenised | str]:
        """Return the tokens of rows; with `skips` for a rejected row its problem.

        A row is {"text": ...}, or {"messages": ...} with the template's other inputs. One that
        certainly exceeds `limit` is not tokenised."""
        answers = self._ask("tokenise", rows=list(rows), limit=limit, special=special, skips=skips)
        return [each if isinstance(each, str) else Tokenised(*each) for each in answers]

    def demonstrate(
        self,
        rows: Sequence[Mapping[str, Any]],
        *,
        limit: int,
        append_end: bool,
        skips: bool = False,
    ) -> list[Tokenised | str]:
        """Return the tokens of demonstrations, see `assistant_turns.demonstrated`."""
        answers = self._ask(
            "demonstrate", rows=list(rows), limit=limit, append_end=append_end, skips=skips
        )
        return [each if isinstance(each, str) else Tokenised(*each) for each in answers]

    def decode(self, ids: Sequence[Sequence[int]]) -> list[str]:
        """Return the texts of tokens, special ones included."""
        texts: list[str] = self._ask("decode", ids=[list(each) for each in ids])
        return texts

    def vocabulary(self) -> dict[str, int]:
        """Return the number of each token, added ones included; raises UsageError like `open`."""
        self.open()
        numbers: dict[str, int] = self._ask("vocabulary")
        return numbers

    def render(self, messages: Sequence[Message], **options: Any) -> str:
        """Call `ChatTokenizer.render`."""
        return str(self._ask("render", messages=list(messages), options=options))

    def encode(self, texts: Sequence[str], *, special: bool) -> list[list[int]]:
        """Call `ChatTokenizer.encode`."""
        token_ids: list[list[int]] = self._ask("encode", texts=list(texts), special=special)
        return token_ids

    def is_special(self, token: int) -> bool:
        """Call `ChatTokenizer.is_special`."""
        return bool(self._ask("is_special", token=token))

    def _ask(self, operation: str, **fields: Any) -> Any:
        request = {"operation": operation, "settings": self._settings, **fields}
        size = len(json.dumps(fields))
        if size > MAX_REQUEST_BYTES:
            raise ProcessEnded(f"it gets at most {MAX_REQUEST_BYTES >> 30} GiB at once")
        # The process ends a step that takes too long; this is for one whose timer is off.
        num_rows = max(1, len(fields.get("rows", ())))
        limit_seconds = OPEN_SECONDS + num_rows * ROW_WALL_SECONDS + encoding_seconds(size)
        with _lock:
            try:
                event = _pool(self._trusts).call(request, limit_seconds=limit_seconds)
            except StartsFailed as error:
                raise ProcessEnded(str(error)) from error
        if isinstance(event, UsageError):
            raise event
        if isinstance(event, Failed):
            raise ProcessEnded(_why(event))
        if "rejected" in event.value:
            row, problem, remedy = event.value["rejected"]
            raise RowRejected(problem, remedy, row)
        return event.value["value"]


_lock = threading.Lock()
# Keys: process that started it (a fork must not use its parent's), and whether it runs code.
_pools: dict[tuple[int, bool], ProcessPool] = {}


def _pool(trusts_code: bool) -> ProcessPool:
    key = (os.getpid(), trusts_code)
    if key not in _pools:
        program = Program(
            "the tokenizer",
            "mcore_rl.data.tokenizer_worker",
            {"trusts_code": trusts_code},
            memory_gib=_MEMORY_GIB,
            max_answer_bytes=MAX_REQUEST_BYTES,
            environment_names=tuple(os.environ) if trusts_code else _VARIABLES,
            is_silent=True,  # a Rust panic also shows in the exit code
        )
        _pools[key] = ProcessPool(program, 1)
    return _pools[key]


@atexit.register
def close_all() -> None:
    """End the processes that this process started; a later request starts another."""
    for key in [key for key in _pools if key[0] == os.getpid()]:
        _pools.pop(key).close()


def _why(failed: Failed) -> str:
    if failed.kind == "timed out":
        return "it took too long and was ended"
    return f"it {failed.failure}; it may have at most {_MEMORY_GIB:g} GiB"
