"""The process of one episode: it runs a user's environment for the trainer, turn by turn.

It is a fork of the zygote and shares only a socket with the trainer. It, and whatever it imports,
must stay free of torch, Megatron, vLLM and numpy.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import inspect
import json
import os
import random
import signal
import socket
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from mcore_rl.environments import wire
from mcore_rl.environments.interface import EnvironmentPrompt, Response
from mcore_rl.environments.wire import NonsenseError
from mcore_rl.rewards.worker import (
    EXIT_OUT_OF_MEMORY,
    die_with_parent,
    see_no_other_process,
    text_of,
)

if TYPE_CHECKING:
    import asyncio

_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h


def adopt_orphans() -> None:
    """Make this process the parent of descendants that lose theirs."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def hand_over(link: socket.socket, connection: socket.socket) -> None:
    """Send an episode's connection to the process at the other end of `link`."""
    socket.send_fds(link, [b"."], [connection.fileno()])


def run_episode(
    link: socket.socket, environment: type, *, parent: int, timeout_seconds: float
) -> None:
    """Serve one episode to its end; never returns. Call first after the fork from `parent`, the
    zygote, which sends the episode's connection over `link`."""
    code = 1
    try:
        _leave_the_zygote(parent)
        with link:
            _, descriptors, _, _ = socket.recv_fds(link, 1, 1)
        if not descriptors:
            os._exit(0)  # the zygote has ended or does not need it
        with contextlib.suppress(OSError), socket.socket(fileno=descriptors[0]) as connection:
            # An OSError means that the trainer has closed its end.
            code = _Episode(connection, environment, timeout_seconds).serve()
    finally:
        os._exit(code)


def _leave_the_zygote(parent: int) -> None:
    die_with_parent(parent=parent)
    os.setsid()
    adopt_orphans()  # its background processes end with it
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    see_no_other_process(send_no_signals=True)
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")  # the kernel kills this process first when memory runs out
    # Nobody reads the output of hundreds of episodes, and it could fill the run's log.
    nothing = os.open(os.devnull, os.O_WRONLY)
    for descriptor in (1, 2):
        os.dup2(nothing, descriptor)
    os.close(nothing)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.reconfigure(errors="replace")  # type: ignore[union-attr]


class _Episode:
    """The server of one episode; it answers each request before the next."""

    def __init__(
        self, connection: socket.socket, environment: type, timeout_seconds: float
    ) -> None:
        self._connection, self._class = connection, environment
        self._timeout_seconds = timeout_seconds
        self._reader = wire.Reader(wire.MAX_REQUEST_BYTES)
        self._runner: asyncio.Runner | None = None
        self._environment: Any = None
        self._pid = os.getpid()

    def serve(self) -> int:
        """Serve until the episode is over; return the exit code."""
        while (request := self._next()) is not None:
            answer = self._answer(request)
            if os.getpid() != self._pid:  # a fork that returned from the user's code
                os._exit(0)
            if answer is not None:
                self._connection.sendall(wire.framed({"turn": request["turn"], **answer}))
            if answer is None or "failed" in answer:
                return 0
            if request["turn"] and answer["value"][2]:
                self._close()
                return 0
        return 0

    def _next(self) -> dict[str, Any] | None:
        while (message := self._reader.next()) is None:
            data = self._connection.recv(1 << 16)
            if not data:
                return None
            self._reader.add(data)
        fields: dict[str, Any] = json.loads(message)
        return fields

    def _answer(self, request: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return the answer's fields; None: the episode is over."""
        # Undo what the last turn may have left behind.
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGALRM])
        signal.setitimer(signal.ITIMER_REAL, self._timeout_seconds)
        try:
            answer = self._asked(request)
            if answer is not None and len(json.dumps(answer)) > wire.MAX_ANSWER_BYTES - 64:
                limit = f"an answer has at most {wire.MAX_ANSWER_BYTES >> 20} MiB"
                return {"failed": [wire.TOO_MUCH, limit]}
            return answer
        except NonsenseError as error:
            return {"failed": [error.failed.kind, error.failed.detail]}
        except MemoryError:
            os._exit(EXIT_OUT_OF_MEMORY)
        except BaseException as error:  # SystemExit too costs only this sample
            if isinstance(error, OSError) and error.errno == errno.ENOMEM:
                os._exit(EXIT_OUT_OF_MEMORY)
            return {"failed": [f"raised {type(error).__name__}", text_of(error)]}
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)

    def _asked(self, request: Mapping[str, Any]) -> dict[str, Any] | None:
        if "prompt" in request:
            told = request["prompt"]
            _seed(told["seed"])
            prompt = EnvironmentPrompt(**{**told, "row": json.loads(told["row"])})
            self._environment = self._class()
            return {"value": wire.as_started(self._awaited(self._environment.start(prompt)))}
        if "response" in request:
            told = request["response"]
            response = Response(**{**told, "token_ids": tuple(told["token_ids"])})
            return {"value": wire.as_stepped(self._awaited(self._environment.step(response)))}
        self._end()
        return None

    def _close(self) -> None:
        self._answer({})

    def _end(self) -> None:
        close = getattr(self._environment, "close", None)
        if close is not None:
            self._awaited(close())

    def _awaited(self, value: Any) -> object:
        """Return `value`, or its result if it is awaitable; an episode uses one event loop."""
        if not inspect.isawaitable(value):
            return value
        if self._runner is None:
            import asyncio  # the zygote has done so

            self._runner = asyncio.Runner()
        return self._runner.run(_waited_for(value))


async def _waited_for(value: Any) -> object:
    return await value


def _seed(seed: int) -> None:
    """Seed the random generators, whose state forks share."""
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % (1 << 32))
