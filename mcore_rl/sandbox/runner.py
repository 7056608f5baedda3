"""A sandbox for a policy's Python, used by the reward and the environment `python_sandbox`.

The process has an empty folder, no network, no other processes, limited memory, disk and time, and
access to Python's files only. `isolation` confines it; `inside` and `plain_values` run in it.
Processes of rewards and environments import this module: it imports nothing heavy.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import secrets
import selectors
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mcore_rl.common.errors import UsageError
from mcore_rl.common.readers import InvalidData, parse_json
from mcore_rl.isolation.client import Supervisor, start_supervisor
from mcore_rl.isolation.levels import Level
from mcore_rl.sandbox.code_tests import Suite, texts
from mcore_rl.sandbox.grading import Grading, Reply, Request

CODE_SECONDS = 5.0
MEMORY_BYTES = 1 << 30
DISK_BYTES = 64 << 20  # of all files together
MAX_OUTPUT_CHARACTERS = 4000
_MAX_ANSWER_BYTES = 4 << 20
_MAX_KEPT_BYTES = {"stdout": 16 << 20, "stderr": 1 << 16, "answers": _MAX_ANSWER_BYTES + 2}
_MAX_PIPE_BYTES = 1 << 20  # that a process may have in a pipe
_READ_BYTES = 1 << 16
_LEAVE_SECONDS = 1.0  # from its last answer to its end
_log = logging.getLogger(__name__)
_INSIDE = Path(__file__).with_name("inside.py")
_VALUES = Path(__file__).with_name("plain_values.py").read_text(encoding="utf-8")


@dataclass(frozen=True, slots=True)
class Ran:
    """The result of running code and its tests."""

    stdout: str
    stderr: str
    ended: bool  # ran to its end: nothing raised, within its limits
    passed: tuple[bool, ...] = ()  # each test in turn; no test was run if the code did not end
    why: str = ""  # why it was stopped, if it was

    @property
    def all_passed(self) -> bool:
        """Whether the code ran and every test passed."""
        return self.ended and not self.why and all(self.passed)


def seconds_left() -> float:
    """Return the seconds that the code may take, within the time of a reward or an environment."""
    left_seconds = signal.getitimer(signal.ITIMER_REAL)[0]
    return max(0.1, min(CODE_SECONDS, left_seconds - 1.0)) if left_seconds else CODE_SECONDS


def report_of(ran: Ran) -> str:
    """Return the report to a policy: the beginning and end of long outputs."""
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
    tests: Suite | Sequence[str] = (),
    *,
    timeout_seconds: float = CODE_SECONDS,
    memory_bytes: int = MEMORY_BYTES,
    stops_early: bool = False,
    by: Supervisor | None = None,
) -> Ran:
    """Run `code` in a new process, and grade it by `tests`: a suite, or texts of Python.

    Blocks for little more than `timeout_seconds`. With `stops_early` the first failed test ends the
    run. `by` starts and confines processes, by default this process's supervisor. RuntimeError:
    this machine cannot confine code as required, and nothing was run.
    """
    by = by or start_supervisor()
    by.level()  # the first call waits for the supervisor's start
    suite = tests if isinstance(tests, Suite) else texts(tests)
    grading = Grading(code, suite, stops_early=stops_early)
    deadline = time.monotonic() + timeout_seconds
    exchange = _Exchange(grading)
    # A program may end its process; the next one then needs another.
    while exchange.is_open:
        _Process(by, deadline, memory_bytes).until(
            deadline, f"it took longer than {timeout_seconds:g} s", exchange
        )
    return Ran(
        grading.stdout,
        grading.stderr,
        grading.has_ended,
        tuple(grading.passed),
        exchange.why or grading.why,
    )


def check_sandbox(flag: str, accepted: Sequence[str] = ()) -> Level:
    """Return how code is confined here, and log it once.

    `accepted` lists protections that may be missing (`--rl-sandbox-accept`). Raises UsageError,
    with `flag`, if another one is missing, or if code cannot be run.
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
            "elsewhere, behind --rl-reward http; or list in --rl-sandbox-accept what may be "
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
    """Describe the level and what it lacks, for a log line."""
    parts = [f"code is confined by {level.name}"]
    if level.lacks:
        parts.append(f"not protected: {', '.join(sorted(level.lacks))}")
    return "; ".join([*parts, level.remarks] if level.remarks else parts)


class _Exchange:
    """The requests and answers of one run: one request at a time, each with its own token.

    An answer must have the token of its request, so it cannot be written before the request was
    read.
    """

    def __init__(self, grading: Grading) -> None:
        self._grading = grading
        self._dialogue = grading.dialogue()
        self._request: Request | None = next(self._dialogue, None)
        self._token = ""
        self.why = ""  # why it was cut short

    @property
    def is_open(self) -> bool:
        """Whether requests remain."""
        return self._request is not None and not self.why

    def request(self) -> bytes:
        """Return the line of the next request."""
        assert self._request is not None
        self._token = secrets.token_hex(8)
        return json.dumps({**self._request, "token": self._token}).encode() + b"\n"

    def answered(self, line: bytes, stdout: str, stderr: str) -> None:
        """Process the answer to the last request, with the output meanwhile."""
        try:
            fields = parse_json(line)
        except InvalidData:
            fields = None
        if not isinstance(fields, dict) or fields.get("token") != self._token:
            return self.forged()
        self._send(Reply(fields, stdout, stderr))

    def ended(self, exit_code: int, stdout: str, stderr: str) -> None:
        """Process the end of the process, in place of an answer."""
        self._send(Reply({}, stdout, stderr, exit_code))

    def forged(self) -> None:
        """Discard all results: the process wrote something that was not requested."""
        self._grading.passed = [False] * len(self._grading.passed)
        self.why = "its process wrote answers of its own"

    def _send(self, reply: Reply) -> None:
        try:
            self._request = self._dialogue.send(reply)
        except StopIteration:
            self._request = None


class _Process:
    """One process, from its start to its end."""

    def __init__(self, by: Supervisor, deadline: float, memory_bytes: int) -> None:
        self._to_send = b""  # the process writes first
        self._kept = {name: bytearray() for name in ("stdout", "stderr", "answers")}
        requests, self._requests = os.pipe()
        self._answers, answers = os.pipe()
        try:
            self._process = by.start(
                _INSIDE,
                (requests, answers),
                seconds=max(0.1, deadline - time.monotonic()) + _LEAVE_SECONDS,
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

    def until(self, deadline: float, too_long: str, exchange: _Exchange) -> None:
        """Transport requests and answers until none remain or the process has ended. At the
        deadline the process is ended."""
        process = self._process
        for stream in (process.stdout, process.stderr):
            os.set_blocking(stream.fileno(), False)
        has_started = False
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ, "stdout")
            selector.register(process.stderr, selectors.EVENT_READ, "stderr")
            selector.register(self._answers, selectors.EVENT_READ, "answers")
            try:
                while exchange.is_open and self._answers in selector.get_map():
                    left_seconds = deadline - time.monotonic()
                    if left_seconds <= 0:
                        exchange.why = too_long
                        break
                    for key, _ in selector.select(left_seconds):
                        self._serve(selector, key)
                    line = self._next_answer(exchange)
                    if line is None:
                        continue
                    if has_started:
                        exchange.answered(line, *self._written())
                    else:
                        has_started = True
                        self._to_send = json.dumps(_VALUES).encode() + b"\n"
                    if exchange.is_open:
                        self._to_send += exchange.request()
                        selector.register(self._requests, selectors.EVENT_WRITE, None)
                if exchange.is_open:  # it has closed its answers, or ended
                    process.wait(_LEAVE_SECONDS)
            finally:
                process.end()
                written = self._written()
                for stream in (process.stdout, process.stderr):
                    stream.close()
                os.close(self._answers)
                os.close(self._requests)
        if exchange.is_open:
            exit_code = -signal.SIGKILL if process.returncode is None else process.returncode
            if process.why or not has_started:
                exchange.why = process.why or f"its process ended with exit code {exit_code}"
            exchange.ended(exit_code, *written)

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
        if not self._read(key.data, key.fd):
            selector.unregister(key.fileobj)

    def _next_answer(self, exchange: _Exchange) -> bytes | None:
        """Return the process's answer, if it is complete."""
        line, newline, more = bytes(self._kept["answers"]).partition(b"\n")
        if more or (not newline and len(line) > _MAX_ANSWER_BYTES):
            exchange.forged()
        if more or not newline:
            return None
        self._kept["answers"].clear()
        return line

    def _written(self) -> tuple[str, str]:
        """Return standard output and error since the last call. Output written before an answer is
        in its pipe by the time that the answer arrives."""
        for stream, name in ((self._process.stdout, "stdout"), (self._process.stderr, "stderr")):
            with contextlib.suppress(BlockingIOError):
                for _ in range(_MAX_PIPE_BYTES // _READ_BYTES):  # a thread may continue to write
                    if not self._read(name, stream.fileno()):
                        break
        stdout, stderr = _decoded(self._kept["stdout"]), _decoded(self._kept["stderr"])
        self._kept["stdout"].clear()
        self._kept["stderr"].clear()
        return stdout, stderr

    def _read(self, name: str, descriptor: int) -> bool:
        """Read and keep what is available; return False at the end."""
        data = os.read(descriptor, _READ_BYTES)
        room = _MAX_KEPT_BYTES[name] - len(self._kept[name])
        self._kept[name] += data[: max(0, room)]
        return bool(data)


def _decoded(data: bytearray) -> str:
    """Decode with lone surrogates as the process wrote them, or else U+FFFD for invalid UTF-8."""
    try:
        return data.decode(errors="surrogatepass")
    except UnicodeDecodeError:
        return data.decode(errors="replace")
