"""The trainer's side of the zygote: start it, request forks and kills.

The zygote is started by exec, so it holds none of the trainer's memory, with a few environment
variables, and only the standard streams and one socket as file descriptors. Only `close` blocks.
Messages are untrusted data: a user's module runs in the zygote too.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator
from typing import Any

from mcore_rl.common.readers import InvalidData, parse_json
from mcore_rl.common.user_code import shortened
from mcore_rl.isolation import wire
from mcore_rl.isolation.variables import process_environment
from mcore_rl.isolation.zygote import MAX_CONTROL_BYTES, Program

_START_SECONDS = 60.0  # for its imports
_ANSWER_SECONDS = 60.0  # for a fork or a kill
_END_SECONDS = 10.0

Ended = int | str  # an exit code, negative for a signal; or why no process exists


class ZygoteProcess:
    """A zygote; its start begins with the constructor."""

    def __init__(self, program: Program) -> None:
        self.control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.control.setblocking(False)
        self.control.send(json.dumps(dataclasses.asdict(program)).encode())
        with theirs:
            self._process = start_process(program, theirs)
        self._out: deque[tuple[bytes, socket.socket | None]] = deque()
        self._is_ready = False
        self._since = time.monotonic()
        self._asked: dict[int, float] = {}  # unconfirmed forks, and since when
        self._killed: dict[int, float] = {}  # unconfirmed kills, and since when
        self._there: set[int] = set()
        self.why_broken = ""  # why it is unusable, if it is

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def __contains__(self, ticket: int) -> bool:
        """Return whether this ticket has a process or is to get one."""
        return ticket in self._there or ticket in self._asked

    def has_not_forked(self, ticket: int) -> bool:
        """Return whether this ticket's process was requested and, as far as known, not forked."""
        return ticket in self._asked

    def fork(self, ticket: int, connection: socket.socket) -> None:
        """Request a process with this connection, which is closed here."""
        self._asked[ticket] = time.monotonic()
        self._out.append((json.dumps({"fork": ticket}).encode(), connection))

    def kill(self, ticket: int) -> None:
        """Request the end of a process; `reports` returns it."""
        self._killed[ticket] = time.monotonic()
        self._out.append((json.dumps({"kill": ticket}).encode(), None))
        self.flush()

    def flush(self) -> None:
        """Send what it accepts now."""
        while self._out:
            message, connection = self._out[0]
            descriptors = [] if connection is None else [connection.fileno()]
            try:
                socket.send_fds(self.control, [message], descriptors)
            except BlockingIOError:
                return
            except OSError as error:
                self._break(f"it cannot be reached ({error.strerror})")
                return
            self._out.popleft()
            if connection is not None:
                connection.close()

    def reports(self) -> Iterator[tuple[int, Ended | None]]:
        """Yield its reports since the last call: tickets whose process has started (None) or ended.
        UsageError: it cannot import what it needs."""
        while not self.why_broken and (message := self._next()) is not None:
            yield from self._parse(message)
        self.flush()
        self._check_clocks()

    def _next(self) -> bytes | None:
        try:
            message = self.control.recv(MAX_CONTROL_BYTES)
        except BlockingIOError:
            return None
        except ConnectionResetError:
            message = b""
        if not message:
            code = None
            with contextlib.suppress(subprocess.TimeoutExpired):  # its socket closes just before
                code = self._process.wait(1.0)
            self._break(f"its process has ended, exit code {code}")
            return None
        return message

    def _parse(self, message: bytes) -> Iterator[tuple[int, Ended | None]]:
        try:
            fields = parse_json(message)
            if not self._is_ready:  # its first message, sent once
                self._check_start(fields)
            elif "forked" in fields:
                ticket = wire.as_integer(fields["forked"])
                if self._asked.pop(ticket, None) is not None:
                    self._there.add(ticket)
                    yield ticket, None
            else:
                ticket = wire.as_integer(fields["ended"])
                ended: Ended = (
                    wire.as_integer(fields["code"])
                    if "code" in fields
                    else wire.as_text(fields["reason"])
                )
                if ticket in self:
                    self._there.discard(ticket)
                    self._asked.pop(ticket, None)
                    self._killed.pop(ticket, None)
                    yield ticket, ended
        except (InvalidData, TypeError, LookupError) as error:
            self._break(f"it sent a malformed message ({type(error).__name__})")

    def _check_start(self, fields: Any) -> None:
        """Check its first message; UsageError if it could not import what it needs."""
        if "refused" in fields:
            raise wire.as_refusal(fields["refused"])
        if fields["ready"] is not True:
            raise InvalidData("it is neither ready nor refused")
        self._is_ready, self._since = True, time.monotonic()

    def _check_clocks(self) -> None:
        now = time.monotonic()
        oldest = min((*self._asked.values(), *self._killed.values()), default=math.inf)
        if not self._is_ready and now - self._since > _START_SECONDS:
            self._break(f"it was not ready after {_START_SECONDS:g} s")
        elif self._is_ready and now - max(oldest, self._since) > _ANSWER_SECONDS:
            self._break(f"it did not answer within {_ANSWER_SECONDS:g} s")

    def _break(self, why: str) -> None:
        self.why_broken = self.why_broken or shortened(why)

    def close(self) -> None:
        """End it and its descendants."""
        for _, connection in self._out:
            if connection is not None:
                connection.close()
        self._out.clear()
        self.control.close()  # ends it, unless a fork of this process also holds the socket
        self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_SECONDS if self._is_ready else 0.0)
        self._process.kill()
        self._process.wait()


def start_process(program: Program, control: socket.socket) -> subprocess.Popen[bytes]:
    """Run `run_zygote`. Its output is unbuffered if it has a descriptor of its own, as the process
    may be killed."""
    main = (
        f"import sys; sys.path[:] = {sys.path!r}; from mcore_rl.isolation.zygote import run_zygote;"
        f" run_zygote({control.fileno()}, {os.getpid()})"
    )
    return subprocess.Popen(
        [sys.executable, *(() if program.output is None else ("-u",)), "-c", main],
        env=process_environment(os.environ, program.environment_names),
        stdin=subprocess.DEVNULL,
        stdout=program.output,
        stderr=program.output,
        pass_fds=(control.fileno(),),
        # A signal for the trainer, which may continue to the end of its step, does not reach it.
        start_new_session=True,
    )
