"""The trainer's end of one process's connection: requests that wait for answers, in order."""

from __future__ import annotations

import contextlib
import math
import socket
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from mcore_rl.common.errors import UsageError
from mcore_rl.isolation import wire
from mcore_rl.isolation.wire import Answer, Failed

_CHUNK_BYTES = 1 << 18
# Processes end late calls by themselves (`process.guarded`). This margin covers what escapes their
# timer: blocked or consumed signals, a stopped process.
MARGIN_SECONDS = 10.0

Event = Answer | Failed | UsageError  # what follows a request


@dataclass(frozen=True, slots=True)
class _Request:
    turn: int
    message: bytes
    limit_seconds: float


class Session:
    """The requests of one ticket, to one process.

    The time of a request begins when the process exists and has answered the previous one.
    """

    def __init__(self, ticket: int, max_answer_bytes: int) -> None:
        self.ticket = ticket
        self.connection: socket.socket | None = None  # None: no process yet, or it is over
        self.has_process = False  # the zygote has reported it
        self.gone: Failed | None = None  # its process has ended
        self.is_closing = False  # over, but its process has not ended
        self.deadline = math.inf  # of its oldest request, by this process's clock
        self.limit_seconds = 0.0  # of that request
        self._asked: deque[_Request] = deque()  # unanswered
        self._num_asked = 0
        self._out: deque[memoryview] = deque()  # still to be sent
        self._max_answer_bytes = max_answer_bytes
        self._reader = wire.Reader(max_answer_bytes)

    @property
    def is_busy(self) -> bool:
        """Whether an answer is due."""
        return bool(self._asked)

    @property
    def has_unsent(self) -> bool:
        """Whether the connection could not take all messages yet."""
        return bool(self._out)

    def ask(self, request: Any, limit_seconds: float) -> None:
        """Add a request, and send it if there is a connection."""
        message = wire.framed({"turn": self._num_asked, "ask": request})
        self._asked.append(_Request(self._num_asked, message, limit_seconds))
        self._num_asked += 1
        if self.connection is not None:
            self._out.append(memoryview(message))
            self.send()

    def connect(self, connection: socket.socket) -> None:
        """Send all unanswered requests by a new connection."""
        connection.setblocking(False)
        self.connection = connection
        self._out = deque(memoryview(request.message) for request in self._asked)
        self.send()

    def disconnect(self) -> None:
        """Close the connection and stop the clock; requests stay."""
        if self.connection is not None:
            self.connection.close()
            self.connection = None
        self._out.clear()
        self.deadline = math.inf

    def drop(self) -> None:
        """End the session: close the connection and drop all requests."""
        self.disconnect()
        self._asked.clear()
        self.is_closing = True

    def end(self) -> None:
        """End an idle session; its process closes itself within the time of its last request."""
        self._out.append(memoryview(wire.framed({"turn": self._num_asked})))
        self.send()
        self.drop()
        self.deadline = time.monotonic() + self.limit_seconds + MARGIN_SECONDS

    def start_clock(self) -> None:
        """Start the time of the oldest request; without one, stop the clock."""
        self.deadline = math.inf
        if self._asked and self.has_process:
            self.limit_seconds = self._asked[0].limit_seconds
            self.deadline = time.monotonic() + self.limit_seconds + MARGIN_SECONDS

    def send(self) -> None:
        """Send what the process accepts now."""
        assert self.connection is not None, "it has no process"
        with contextlib.suppress(BlockingIOError):
            while self._out:
                try:
                    num_sent = self.connection.send(self._out[0])
                except (BrokenPipeError, ConnectionResetError):
                    self._out.clear()  # the zygote reports how it ended
                    return
                rest = self._out.popleft()[num_sent:]
                if rest:
                    self._out.appendleft(rest)

    def receive(self) -> Iterator[Event | None]:
        """Yield the answers that have arrived, as long as any is due; None: the process has closed
        the connection, and the zygote reports how it ended."""
        while self._asked and self.connection is not None:
            try:
                data = self.connection.recv(_CHUNK_BYTES)
            except BlockingIOError:
                return
            except ConnectionResetError:
                data = b""
            if not data:
                yield None
                return
            self._reader.add(data)
            while self._asked and (message := self._reader.next()) is not None:
                request = self._asked.popleft()
                yield wire.answer_of(message, request.turn)
            if self._asked and self._reader.is_too_long:
                limit = f"an answer has at most {self._max_answer_bytes >> 20} MiB"
                yield Failed(wire.TOO_MUCH, limit)
