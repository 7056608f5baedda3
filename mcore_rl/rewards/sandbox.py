"""Runs a policy's Python in a process that can do little: a reward, and a tool of environments.

The process has an empty folder, no network, no other processes, memory, disk and seconds that are
limited, and of the files nothing but Python's own; see `isolation`, which confines it, and
`sandbox_inside`, which runs in it.
Processes of rewards and environments import this module: nothing heavy is imported here.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import re
import secrets
import selectors
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mcore_rl.common.errors import UsageError
from mcore_rl.isolation.client import Supervisor, start_supervisor
from mcore_rl.isolation.levels import Level

CODE_SECONDS = 5.0
MEMORY_BYTES = 1 << 30
DISK_BYTES = 64 << 20  # of all files together
MAX_OUTPUT_CHARACTERS = 4000
_MAX_KEPT_BYTES = 1 << 16  # of standard output and of standard error, each
_MAX_ANSWER_BYTES = 1 << 20
_LEAVE_SECONDS = 1.0  # from its last answer to its end
_log = logging.getLogger(__name__)
_INSIDE = Path(__file__).with_name("sandbox_inside.py")

_BLOCK = re.compile(r"```[ \t]*(?:python|py)?[ \t]*\r?\n(?P<code>.*?)```", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Ran:
    """What became of some code and its tests."""

    stdout: str
    stderr: str
    ended: bool  # to its end: it raised nothing, within its limits
    passed: tuple[bool, ...] = ()  # each test in turn; none was run if the code did not end
    why: str = ""  # it was stopped, if it was

    @property
    def all_passed(self) -> bool:
        """Whether it ran, and every test with it."""
        return self.ended and all(self.passed)


def code_in(text: str) -> str | None:
    """The last block of Python in a text of Markdown; None without one."""
    blocks = _BLOCK.findall(text)
    return str(blocks[-1]) if blocks else None


def tests_in(answer: Any) -> list[str]:
    """The tests that a prompt's answer holds: one text, or a list of texts; empty ones are none.
    ValueError for anything else."""
    tests = answer if isinstance(answer, list) else [answer]
    if not all(isinstance(each, str) for each in tests):
        raise ValueError("the answer is not a text of tests, nor a list of such")
    return [each for each in tests if each.strip()]


def seconds_left() -> float:
    """Of the time that a reward or an environment has, what its code may take."""
    left_seconds = signal.getitimer(signal.ITIMER_REAL)[0]
    return max(0.1, min(CODE_SECONDS, left_seconds - 1.0)) if left_seconds else CODE_SECONDS


def report_of(ran: Ran) -> str:
    """What a policy is told: of long outputs their beginning and their end."""
    parts = [_cut(ran.stdout.strip()), _cut(ran.stderr.strip())]
    if ran.why:
        parts.append(f"stopped: {ran.why}")
    if ran.passed:
        parts.append(f"tests passed: {sum(ran.passed)} of {len(ran.passed)}")
    return "\n".join(part for part in parts if part) or "(no output)"


def _cut(text: str) -> str:
    if len(text) <= MAX_OUTPUT_CHARACTERS:
        return text
    half = MAX_OUTPUT_CHARACTERS // 2
    return f"{text[:half]}\n... {len(text) - 2 * half} characters left out ...\n{text[-half:]}"


def run_python(
    code: str,
    tests: Sequence[str] = (),
    *,
    timeout_seconds: float = CODE_SECONDS,
    memory_bytes: int = MEMORY_BYTES,
    by: Supervisor | None = None,
) -> Ran:
    """Run `code` in a new process and then, with what it has defined, each of `tests`.

    Blocks for `timeout_seconds` at most, and a little. A test passes if it raises nothing and is
    not skipped. `by` starts and confines the process; by default the supervisor of this process.
    RuntimeError: this machine cannot confine code as it has to be, and nothing was run.
    """
    by = by or start_supervisor()
    by.level()  # the first call waits for the supervisor's start
    return _Process(by, code, tests, timeout_seconds, memory_bytes).until(
        time.monotonic() + timeout_seconds, f"it took longer than {timeout_seconds:g} s"
    )


def check_sandbox(flag: str, accepted: Sequence[str] = ()) -> Level:
    """How code is confined here, which is logged once.

    `accepted` are protections that may be missing (`--rl-sandbox-accept`). Raises UsageError, of
    `flag`, if another one is, or if code cannot be run.
    """
    try:
        with Supervisor(accepted=accepted) as by:
            level = by.level()
            ran = run_python("", ["assert True"], timeout_seconds=60.0, by=by)
    except RuntimeError as error:
        raise UsageError(
            f"cannot be used here: {error}",
            flag=flag,
            remedy="run on Linux for x86_64 or aarch64 with bubblewrap installed and user "
            "namespaces allowed, or with Landlock (docs/using/security.md); or have code run "
            "elsewhere, behind --rl-reward http; or name with --rl-sandbox-accept what may stay "
            "unprotected",
        ) from error
    if not ran.all_passed:
        raise UsageError(
            f"cannot be used here: its process did not run ({ran.why or ran.stderr.strip()})",
            flag=flag,
            remedy="make `python -I` work",
        )
    _log_once(describe(level))
    return level


@functools.cache
def _log_once(text: str) -> None:
    _log.info("python_sandbox: %s", text)


def describe(level: Level) -> str:
    """The level and what it lacks, for a log line."""
    told = [f"code is confined by {level.name}"]
    if level.lacks:
        told.append(f"not protected: {', '.join(sorted(level.lacks))}")
    return "; ".join([*told, level.remarks] if level.remarks else told)


class _Process:
    """One run, from its start to its end."""

    def __init__(
        self,
        by: Supervisor,
        code: str,
        tests: Sequence[str],
        timeout_seconds: float,
        memory_bytes: int,
    ) -> None:
        # Which tests have passed is told with what the code could not know when it ran.
        self._keys = [secrets.token_hex(16) for _ in tests]
        self._to_send = _line({"code": code})
        self._tests = b"".join(
            _line({"code": test, "number": number, "key": key})
            for number, (test, key) in enumerate(zip(tests, self._keys, strict=True))
        )
        self._kept = {name: bytearray() for name in ("stdout", "stderr", "answers")}
        self._ran = False
        requests, self._requests = os.pipe()
        self._answers, answers = os.pipe()
        try:
            self._process = by.start(
                _INSIDE,
                (requests, answers),
                seconds=timeout_seconds + _LEAVE_SECONDS,
                memory_bytes=memory_bytes,
                disk_bytes=DISK_BYTES,
            )
        except BaseException:
            os.close(self._requests)
            os.close(self._answers)
            raise
        finally:
            os.close(requests)
            os.close(answers)
        os.set_blocking(self._requests, False)

    def until(self, deadline: float, too_long: str) -> Ran:
        """Read what it says until it ends, or end it at the deadline."""
        process, why = self._process, ""
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ, "stdout")
            selector.register(process.stderr, selectors.EVENT_READ, "stderr")
            selector.register(self._answers, selectors.EVENT_READ, "answers")
            selector.register(self._requests, selectors.EVENT_WRITE, None)
            try:
                while self._answers in selector.get_map() and not why:
                    left_seconds = deadline - time.monotonic()
                    for key, _ in selector.select(max(0.0, left_seconds)):
                        self._serve(selector, key)
                    why = too_long if left_seconds <= 0 else ""
                if not why:
                    process.wait(_LEAVE_SECONDS)
            finally:
                process.end()
                why = why or process.why
                for name in ("stdout", "stderr"):  # what it has left there; nobody else writes
                    stream = getattr(process, name)
                    os.set_blocking(stream.fileno(), False)
                    while stream in selector.get_map() and (data := stream.read(1 << 16)):
                        self._keep(name, data)
                    stream.close()
                os.close(self._answers)
                os.close(self._requests)
        return self._told(why)

    def _serve(self, selector: selectors.BaseSelector, key: selectors.SelectorKey) -> None:
        if key.data is None:
            try:
                self._to_send = self._to_send[os.write(key.fd, self._to_send) :]
            except BlockingIOError:
                return
            except BrokenPipeError:
                self._to_send = b""
            if not self._to_send:
                selector.unregister(key.fileobj)
            return
        data = os.read(key.fd, 1 << 16)
        self._keep(key.data, data)
        if not data:
            selector.unregister(key.fileobj)
        elif key.data == "answers" and not self._ran and b'"ran": true' in self._kept["answers"]:
            self._ran = True
            self._to_send = self._tests + _line({"end": True})
            selector.register(self._requests, selectors.EVENT_WRITE, None)

    def _keep(self, name: str, data: bytes) -> None:
        room = _MAX_ANSWER_BYTES if name == "answers" else _MAX_KEPT_BYTES
        self._kept[name] += data[: max(0, room - len(self._kept[name]))]

    def _told(self, why: str) -> Ran:
        answers: dict[str, object] = {}
        passed: dict[int, bool] = {}
        for line in bytes(self._kept["answers"]).splitlines():
            with contextlib.suppress(ValueError, TypeError, LookupError):  # the code's own
                fields = json.loads(line)
                number = fields.get("test")
                if number is None:
                    answers = {**fields, **answers}
                elif fields["key"] == self._keys[number]:
                    passed[number] = fields["passed"] is True
        if (fault := answers.get("fault")) is not None:
            raise RuntimeError(f"code cannot be kept from the network: {fault}")
        if answers.get("over") is not True:
            why = why or f"its process ended with exit code {self._process.returncode}"
        stdout, stderr = (
            bytes(self._kept[name]).decode(errors="replace") for name in ("stdout", "stderr")
        )
        results = tuple(passed.get(number, False) for number in range(len(self._keys)))
        return Ran(stdout, stderr, answers.get("ran") is True, results, why)


def _line(fields: dict[str, object]) -> bytes:
    return json.dumps(fields).encode() + b"\n"
