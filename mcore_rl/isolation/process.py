"""A process that runs a user's code for the trainer, one request after the other.

It is a fork of the zygote and shares only a socket with the trainer. It, and whatever it imports,
must stay free of torch, Megatron, vLLM and numpy.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import inspect
import json
import os
import signal
import socket
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from mcore_rl.common.errors import UsageError
from mcore_rl.common.user_code import shortened
from mcore_rl.isolation import wire
from mcore_rl.isolation.rights import adopt_orphans, die_with_parent, see_no_other_process
from mcore_rl.isolation.wire import Failed, InvalidValue

if TYPE_CHECKING:
    import asyncio

EXIT_OUT_OF_MEMORY = 112  # of a process that has no memory left

T = TypeVar("T")


class Service(Protocol):
    """What a process does with its requests."""

    def answer(self, request: Any) -> Any:
        """Return the answer to a request: a value of JSON, or a failure, which ends the process.
        A UsageError reaches the trainer as such. The request None asks to import what is needed."""

    def close(self) -> None:
        """Clean up: no request will follow."""


def run_process(
    link: socket.socket,
    service: Callable[[], Service],
    *,
    parent: int,
    is_silent: bool,
    max_answer_bytes: int,
) -> None:
    """Serve the trainer until no request follows; never returns. Call first after the fork from
    `parent`, the zygote, which sends the trainer's connection over `link`."""
    code = 1
    try:
        _leave_the_zygote(parent, is_silent)
        with link:
            _, descriptors, _, _ = socket.recv_fds(link, 1, 1)
        if not descriptors:
            os._exit(0)  # the zygote has ended or does not need it
        with contextlib.suppress(OSError), socket.socket(fileno=descriptors[0]) as connection:
            # An OSError means that the trainer has closed its end.
            _serve(connection, service(), max_answer_bytes)
            code = 0
    finally:
        os._exit(code)


def _leave_the_zygote(parent: int, is_silent: bool) -> None:
    die_with_parent(parent)
    os.setsid()
    adopt_orphans()  # its background processes end with it
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    see_no_other_process(send_no_signals=True)
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")  # the kernel kills this process first when memory runs out
    if is_silent:
        nothing = os.open(os.devnull, os.O_WRONLY)
        for descriptor in (1, 2):
            os.dup2(nothing, descriptor)
        os.close(nothing)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.reconfigure(errors="replace")  # type: ignore[union-attr]


def _serve(connection: socket.socket, service: Service, max_answer_bytes: int) -> None:
    pid = os.getpid()
    reader = wire.Reader(wire.MAX_REQUEST_BYTES)
    while (request := _next(connection, reader)) is not None:
        if "ask" not in request:
            service.close()
            return
        answer = _answer(service, request["ask"])
        if os.getpid() != pid:  # a fork that returned from the user's code
            os._exit(0)
        message = wire.framed({"turn": request["turn"], **answer})
        if len(message) > max_answer_bytes:
            limit = f"an answer has at most {max_answer_bytes >> 20} MiB"
            answer = {"failed": [wire.TOO_MUCH, limit]}
            message = wire.framed({"turn": request["turn"], **answer})
        connection.sendall(message)
        if "value" not in answer:
            return


def _next(connection: socket.socket, reader: wire.Reader) -> dict[str, Any] | None:
    while (message := reader.next()) is None:
        data = connection.recv(1 << 16)
        if not data:
            return None
        reader.add(data)
    fields: dict[str, Any] = json.loads(message)
    return fields


def _answer(service: Service, request: Any) -> dict[str, Any]:
    try:
        value = service.answer(request)
    except UsageError as error:
        return {"refused": wire.refused(error)}
    for stream in (sys.stdout, sys.stderr):  # now, as the process may be killed later
        with contextlib.suppress(Exception):  # user code may have closed or replaced them
            stream.flush()
    if isinstance(value, Failed):
        return {"failed": [value.kind, value.detail]}
    return {"value": value}


def guarded(call: Callable[[], T], timeout_seconds: float) -> T | Failed:
    """Call a user's code; return its result, or how it failed.

    SIGALRM ends the process when the time is over, in Python and C code alike. Without memory the
    process ends with EXIT_OUT_OF_MEMORY, because the memory's owner may outlive the call.
    """
    # Undo what the last call may have left behind.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGALRM])
    signal.setitimer(signal.ITIMER_REAL, timeout_seconds)
    try:
        return call()
    except InvalidValue as error:
        return error.failed
    except MemoryError:
        os._exit(EXIT_OUT_OF_MEMORY)
    except BaseException as error:  # SystemExit too fails only this sample
        if isinstance(error, OSError) and error.errno == errno.ENOMEM:
            os._exit(EXIT_OUT_OF_MEMORY)
        return Failed(f"raised {type(error).__name__}", text_of(error))
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def text_of(error: BaseException) -> str:
    """Return the text of a user's exception, shortened."""
    try:
        return shortened(str(error))
    except Exception:  # a user's exception whose __str__ raises
        return "(its text cannot be shown)"


def awaited(value: Any) -> Any:
    """Return `value`, or its result if it is awaitable."""
    return _runner().run(_waited_for(value)) if inspect.isawaitable(value) else value


async def _waited_for(value: Any) -> Any:
    return await value


@functools.cache
def _runner() -> asyncio.Runner:
    """Return the process's only event loop; an HTTP session, for example, belongs to its loop."""
    import asyncio  # the zygote has done so

    return asyncio.Runner()
