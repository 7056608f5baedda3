"""A folder's tokenizer and chat template, in a process of their own with limits.

    trainer ── request ──► process: loads, renders, tokenises, within memory and time
            ◄── answer ── token ids, a text, or why not
            ◄── (ends) ── it ran out of time or memory, or was aborted: one sentence, not a hang

The process is started at the first request, serves all that follow, and ends with this one. If it
ended itself, the next request starts another.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import mmap
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mcore_rl.common.errors import UsageError
from mcore_rl.data.messages import Message, RejectedRow
from mcore_rl.data.tokenizer_worker import LENGTH, MEMORY_BYTES, PLACE
from mcore_rl.model.families import FAMILIES

_END_SECONDS = 5.0
_RUN = "from mcore_rl.data.tokenizer_worker import main; main()"


@dataclass(frozen=True, slots=True)
class ChatTemplate:
    """Which chat template is used, and how.

    `chosen` is one of the tokenizer's templates by name, or a file; None is the default one.
    `kwargs` are its arguments. `date` (ISO) is the day that it is told; None: today.
    """

    chosen: str | None = None
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    date: str | None = None

    @property
    def is_file(self) -> bool:
        """Whether `chosen` is a file and not a name."""
        return self.chosen is not None and (
            self.chosen.endswith(".jinja") or os.sep in self.chosen or Path(self.chosen).is_file()
        )

    def text(self) -> str | None:
        """The file's content; None for a template of the tokenizer. Raises UsageError."""
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
    """The process has ended instead of answering. `row` is what it was at, None if not known."""

    def __init__(self, why: str, row: int | None) -> None:
        super().__init__(why)
        self.why, self.row = why, row


class RowRejected(RejectedRow):
    """A `RejectedRow` of a request of several; `row` is None if all of them are meant."""

    def __init__(self, problem: str, remedy: str, row: int | None) -> None:
        super().__init__(problem, remedy)
        self.row = row


class TokenizerProcess:
    """The tokenizer of a folder, with the interface of `ChatTokenizer` where that is needed.

    All methods raise UsageError for a folder without a usable tokenizer, RowRejected for what it
    refuses, and ProcessEnded where it took its process with it.
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
        """`version` is another one whenever the folder's files are."""
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
        """Load the tokenizer, and raise UsageError if that fails in whatever way."""
        try:
            self._ask("open")
        except (ProcessEnded, RejectedRow) as error:
            raise self._unusable(error) from error

    @property
    def eos_token_id(self) -> int | None:
        """The tokenizer's end of sequence. Raises UsageError as `open`."""
        self.open()
        found: int | None = self._ask("eos_token_id")
        return found

    def _unusable(self, error: Exception) -> UsageError:
        """The sentence for a tokenizer that fails by itself."""
        return UsageError(
            f"holds a tokenizer that cannot be used ({error})",
            flag=f"--rl-hf-checkpoint {self.folder}",
            remedy="download it again, from a publisher that you trust",
        )

    def tokenise(
        self, rows: Sequence[Mapping[str, Any]], *, limit: int, special: bool
    ) -> list[tuple[list[int], int, list[str]]]:
        """Each row's token ids; 0, or how many it has at least where these are more than
        `limit` for sure and it was not tokenised; and the names of what the template leaves out.

        A row is {"text": ...}, or {"messages": ...} with what else the template gets.
        """
        found = self._ask("tokenise", rows=list(rows), limit=limit, special=special)
        return [(ids, least, names) for ids, least, names in found]

    def render(self, messages: Sequence[Message], **options: Any) -> str:
        """`ChatTokenizer.render`."""
        return str(self._ask("render", messages=list(messages), options=options))

    def encode(self, texts: Sequence[str], *, special: bool) -> list[list[int]]:
        """`ChatTokenizer.encode`."""
        found: list[list[int]] = self._ask("encode", texts=list(texts), special=special)
        return found

    def is_special(self, token: int) -> bool:
        """`ChatTokenizer.is_special`."""
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
    """One process, started. It ends itself when the socket is closed."""

    def __init__(self, trusts_code: bool) -> None:
        self._socket, theirs = socket.socketpair()
        paths = (path or os.getcwd() for path in sys.path)
        with theirs, tempfile.TemporaryFile() as place:
            place.truncate(PLACE.size)
            self._place = mmap.mmap(place.fileno(), PLACE.size)
            handed = (theirs.fileno(), place.fileno())
            self.process = subprocess.Popen(
                # -P: what it may import is what this process may, and no more.
                [sys.executable, "-P", "-c", _RUN, str(int(trusts_code)), *map(str, handed)],
                env=os.environ
                | {
                    "PYTHONPATH": os.pathsep.join(dict.fromkeys(paths)),
                    "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1",
                },
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,  # what Rust prints of a panic is in the exit code
                pass_fds=handed,
            )

    @property
    def is_there(self) -> bool:
        return self.process.poll() is None

    def ask(self, message: bytes) -> dict[str, Any]:
        """The answer to a request. Raises ProcessEnded."""
        try:
            self._socket.sendall(LENGTH.pack(len(message)) + message)
            size = LENGTH.unpack(self._received(LENGTH.size))[0]
            answer: dict[str, Any] = json.loads(self._received(size))
        except (EOFError, ConnectionError) as error:
            row = int(PLACE.unpack_from(self._place)[0])
            why = _why(self.process.wait())
            self.close()
            raise ProcessEnded(why, None if row < 0 else row) from error
        except BaseException:  # KeyboardInterrupt: the answer would be taken for that of the next
            self.close()
            raise
        return answer

    def _received(self, size: int) -> bytes:
        found = bytearray()
        while len(found) < size:
            data = self._socket.recv(min(size - len(found), 1 << 20))
            if not data:
                raise EOFError
            found += data
        return bytes(found)

    def close(self) -> None:
        """End it."""
        self._socket.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(_END_SECONDS)
        self.process.kill()
        self.process.wait()


_lock = threading.Lock()
# By the process that started it, as a fork must not use its parent's, and whether it runs code.
_workers: dict[tuple[int, bool], _Worker] = {}


def _worker(trusts_code: bool) -> _Worker:
    key = (os.getpid(), trusts_code)
    if key not in _workers or not _workers[key].is_there:
        _workers[key] = _Worker(trusts_code)
    return _workers[key]


@atexit.register
def close_all() -> None:
    """End the processes that this one has started; a later request starts another."""
    for key in [key for key in _workers if key[0] == os.getpid()]:
        _workers.pop(key).close()


def _why(code: int) -> str:
    if code == -signal.SIGALRM:
        return "it took too long and was ended"
    if code < 0:
        names = signal.valid_signals() & {-code}
        name = signal.Signals(-code).name if names else str(-code)
        return f"its process was ended by {name}; it may have at most {MEMORY_BYTES >> 30} GiB"
    return f"its process ended with exit code {code}"
