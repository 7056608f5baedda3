"""Client of the separate, limited process that runs a folder's tokenizer and chat template.

    trainer ── request ──► process: loads, renders, tokenises, within memory and time
            ◄── answer ── token ids, a text, or an error
            ◄── (ends) ── it ran out of time or memory, or aborted: one sentence, not a hang

The first request starts the process. It serves all later requests and ends with this process. If it
ends earlier, the next request starts another.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import mmap
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from mcore_rl.common.errors import UsageError
from mcore_rl.common.exits import describe_exit
from mcore_rl.data.messages import Message, RejectedRow
from mcore_rl.data.tokenizer_worker import MEMORY_BYTES, PLACE
from mcore_rl.model.families import FAMILIES

_END_SECONDS = 5.0
_RUN = "from mcore_rl.data.tokenizer_worker import main; main()"


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
    """End of the process before it answered; `row` is its current row, None if unknown."""

    def __init__(self, why: str, row: int | None) -> None:
        super().__init__(why)
        self.why, self.row = why, row


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
        with _lock:
            answer = _worker(self._trusts).ask(json.dumps(request).encode())
        if "refused" in answer:
            found, flag, remedy = answer["refused"]
            raise UsageError(found, flag=flag, remedy=remedy)
        if "rejected" in answer:
            row, problem, remedy = answer["rejected"]
            raise RowRejected(problem, remedy, None if row < 0 else row)
        return answer["value"]


class _Worker:
    """Started process; it ends itself when the connection closes."""

    def __init__(self, trusts_code: bool) -> None:
        self._connection, theirs = multiprocessing.Pipe()
        paths = (path or os.getcwd() for path in sys.path)
        with theirs, tempfile.TemporaryFile() as place:
            place.truncate(PLACE.size)
            self._place = mmap.mmap(place.fileno(), PLACE.size)
            handed = (theirs.fileno(), place.fileno())
            self.process = subprocess.Popen(
                # -P: it may import exactly what this process may.
                [sys.executable, "-P", "-c", _RUN, str(int(trusts_code)), *map(str, handed)],
                env=os.environ
                | {
                    "PYTHONPATH": os.pathsep.join(dict.fromkeys(paths)),
                    "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1",
                },
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,  # a Rust panic also shows in the exit code
                pass_fds=handed,
            )

    def ask(self, message: bytes) -> dict[str, Any]:
        """Return the answer to a request; raise ProcessEnded if the process ends first."""
        try:
            self._connection.send_bytes(message)
            answer: dict[str, Any] = json.loads(self._connection.recv_bytes())
        except (EOFError, OSError) as error:
            row = int(PLACE.unpack_from(self._place)[0])
            why = _why(self.process.wait())
            self.close()
            raise ProcessEnded(why, None if row < 0 else row) from error
        except BaseException:  # KeyboardInterrupt: the next request would get this one's answer
            self.close()
            raise
        return answer

    def close(self) -> None:
        """End the process."""
        self._connection.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(_END_SECONDS)
        self.process.kill()
        self.process.wait()


_lock = threading.Lock()
# Keys: process that started it (a fork must not use its parent's), and whether it runs code.
_workers: dict[tuple[int, bool], _Worker] = {}


def _worker(trusts_code: bool) -> _Worker:
    key = (os.getpid(), trusts_code)
    if key not in _workers or _workers[key].process.poll() is not None:
        _workers[key] = _Worker(trusts_code)
    return _workers[key]


@atexit.register
def close_all() -> None:
    """End the processes that this process started; a later request starts another."""
    for key in [key for key in _workers if key[0] == os.getpid()]:
        _workers.pop(key).close()


def _why(code: int) -> str:
    if code == -signal.SIGALRM:
        return "it took too long and was ended"
    may_have = f"; it may have at most {MEMORY_BYTES >> 30} GiB" if code < 0 else ""
    return f"its process ended: {describe_exit(code)}{may_have}"
