"""The pipes between a reward pool and its workers, and the check of the workers' messages.

    trainer ── tasks, one pipe that all workers read ──► workers
       ▲                                                   │
       └── answers, JSON, one pipe for each worker ────────┘

A reward can write into the pipe of its process. So every message is checked against the request
before pebble sees it: a worker must acknowledge an open task, under its own process id, and answer
its task, with one outcome per sample. The first invalid message fails the task of its worker
(`WorkerFault`) and breaks the pool, as that worker may have taken other tasks. Workers import this
module: it must stay free of torch and numpy.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import select
import threading
import time
from collections.abc import Callable
from multiprocessing import reduction
from multiprocessing.connection import Connection
from multiprocessing.context import get_spawning_popen
from typing import Any

from pebble.common.types import Result, ResultStatus
from pebble.pool.process import Acknowledgement, TaskProblem, TaskResult, WorkerTask

from mcore_rl.common.errors import UsageError
from mcore_rl.common.readers import InvalidData, finite_number, parse_json
from mcore_rl.rewards.functions import shortened
from mcore_rl.rewards.worker import Outcome, score_samples

MAX_MESSAGE_BYTES = 1 << 26  # thousands of samples with the longest failure texts
_LENGTH_BYTES = 4  # multiprocessing's length prefix, signed and big-endian
_CHUNK_BYTES = 1 << 16
_STALLED_SECONDS = 5.0  # workers write a message at once: one that stops halfway never ends

Message = Acknowledgement | TaskResult


class WorkerFault(Exception):
    """A worker answered a task wrongly; `kind` and `detail` are as in `Outcome`."""

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(f"{kind}: {detail}")
        self.kind, self.detail = kind, detail


class Answers:
    """The answers of all workers; pebble polls `fileno` and calls `recv` from one thread.

    Other threads of pebble call `asked` when a task is sent, and `opened` when a worker starts.
    """

    def __init__(self) -> None:
        self._epoll = select.epoll()
        # It makes the polling thread call `recv` although no message came.
        self._alarm = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._epoll.register(self._alarm, select.EPOLLIN)
        self._pipes: dict[int, _Pipe] = {}  # by descriptor
        self._open: dict[int, int | None] = {}  # task -> samples; None: it returns nothing
        self._lock = threading.RLock()  # guards what `close` ends
        self._closed = False
        self.fault: str | None = None  # why the pool breaks

    def fileno(self) -> int:
        """Return a descriptor that is readable while `recv` has work. OSError once closed."""
        with self._lock:
            if self._closed:
                raise OSError("the pipes of the workers are closed")
            return self._epoll.fileno()

    def asked(self, task: int, num_samples: int | None) -> None:
        """Record a task that is about to be sent; `num_samples` None: it returns nothing."""
        self._open[task] = num_samples

    def opened(self, process: Any) -> int:
        """Open a pipe for a process that is being started (a `Popen`); return the end that it
        writes, which the caller closes."""
        reader, writer = os.pipe()
        os.set_blocking(reader, False)
        with self._lock:
            self._pipes[reader] = _Pipe(reader, process)
            self._epoll.register(reader, select.EPOLLIN)
        return writer

    def check_clocks(self) -> None:
        """Break the pool if a message stopped halfway. May be called by any thread."""
        late = time.monotonic() - _STALLED_SECONDS
        if any(pipe.waits_since < late for pipe in list(self._pipes.values())):
            self._ring()

    def recv(self) -> Message | None:
        """Return a worker's next message; None: no message is complete. Raises OSError, which
        breaks the pool, after an invalid message."""
        if self.fault is not None:
            raise OSError(self.fault)
        with self._lock:
            if self._closed:
                raise OSError("the pipes of the workers are closed")
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._alarm)
            ready = {descriptor for descriptor, _ in self._epoll.poll(0)}
            late = time.monotonic() - _STALLED_SECONDS
            for descriptor, pipe in list(self._pipes.items()):
                if descriptor in ready or pipe.waits_since < late:
                    found = self._taken(pipe)
                    if found is not None:
                        return found
        return None

    def _taken(self, pipe: _Pipe) -> Message | None:
        try:
            message = pipe.next()
            if message is None:
                if pipe.waits_since < time.monotonic() - _STALLED_SECONDS:
                    raise InvalidData("a message stops halfway")
                return None
            return self._fitting(pipe, _as_message(parse_json(message)))
        except EOFError:
            self._forget(pipe)  # pebble handles the end of its process
            return None
        except InvalidData as error:
            detail = shortened(str(error))
            self.fault = f"a worker sent an invalid answer ({detail})"
            self._ring()
            if pipe.task is None:
                raise OSError(self.fault) from error
            fault = WorkerFault("wrote an invalid answer", detail)
            return TaskResult(pipe.task, Result(ResultStatus.FAILURE, fault))

    def _fitting(self, pipe: _Pipe, message: Message) -> Message:
        """Return `message` if it is valid for this worker now; otherwise raise InvalidData."""
        task = message.task
        if isinstance(message, Acknowledgement):
            if message.worker != pipe.process.pid or pipe.task is not None:
                raise InvalidData("it takes a task for another worker, or one too many")
            if task not in self._open or any(p.task == task for p in self._pipes.values()):
                raise InvalidData(f"it takes task {task}, which is not open")
            pipe.task = task
            return message
        if pipe.task != task:
            raise InvalidData(f"it answers task {task}, which it does not have")
        if message.result.status is ResultStatus.SUCCESS:
            num_samples, value = self._open[task], message.result.value
            if (None if value is None else len(value[0])) != num_samples:
                raise InvalidData(f"it has not one outcome for each of {num_samples} samples")
        del self._open[task]
        pipe.task = None
        return message

    def _ring(self) -> None:
        with self._lock:
            if not self._closed:
                os.eventfd_write(self._alarm, 1)

    def _forget(self, pipe: _Pipe) -> None:
        del self._pipes[pipe.descriptor]
        self._epoll.unregister(pipe.descriptor)
        os.close(pipe.descriptor)
        if pipe.task is not None:
            self._open.pop(pipe.task, None)

    def close(self) -> None:
        """Close all pipes. A second call does nothing."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            for pipe in list(self._pipes.values()):
                self._forget(pipe)
            self._epoll.close()
            os.close(self._alarm)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return io.BytesIO, ()  # a worker gets only a dummy that it can close


class _Pipe:
    """The trainer's end of a worker's pipe."""

    def __init__(self, descriptor: int, process: Any) -> None:
        self.descriptor, self.process = descriptor, process
        self.task: int | None = None  # acknowledged and not answered
        self.waits_since = float("inf")  # for the rest of an incomplete message
        self._bytes = bytearray()

    def next(self) -> bytes | None:
        """Return one message if it is complete, without bytes of later messages. EOFError at the
        end, InvalidData if it is longer than any answer."""
        while (missing := self._missing()) > 0:
            try:
                data = os.read(self.descriptor, min(missing, _CHUNK_BYTES))
            except BlockingIOError:
                return None
            if not data:
                raise EOFError
            self._bytes += data
            self.waits_since = time.monotonic()
        message = bytes(self._bytes[_LENGTH_BYTES:])
        self._bytes.clear()
        self.waits_since = float("inf")
        return message

    def _missing(self) -> int:
        if len(self._bytes) < _LENGTH_BYTES:
            return _LENGTH_BYTES - len(self._bytes)
        size = int.from_bytes(self._bytes[:_LENGTH_BYTES], "big", signed=True)
        if not 0 <= size <= MAX_MESSAGE_BYTES:
            raise InvalidData(f"a message of {size} bytes")
        return _LENGTH_BYTES + size - len(self._bytes)


class AnswerEnd:
    """The trainer's stand-in for the ends that workers write; each worker gets its own end."""

    def __init__(self, answers: Answers) -> None:
        self._answers = answers

    def close(self) -> None:
        """Do nothing: this end is not open here."""

    def __reduce__(self) -> tuple[Callable[..., Connection], tuple[Any, ...]]:
        process: Any = get_spawning_popen()
        writer = process.give(self._answers.opened(process))
        return connection, (AnswerWriter, writer, False, True)


class AnswerWriter(Connection):
    """A worker's end, which sends pebble's messages as JSON."""

    def send(self, obj: Any) -> None:
        """Send a message; TypeError, which pebble handles, for a result that is not allowed."""
        self.send_bytes(json.dumps(_as_json(obj)).encode())


class TaskWriter(Connection):
    """The connection that sends tasks, and records what their answers must be."""

    def __init__(self, handle: int, answers: Answers) -> None:
        super().__init__(handle, readable=False)
        self._answers = answers

    def send(self, obj: WorkerTask) -> None:
        """Send a task, pickled: workers trust the trainer."""
        scores = obj.payload.function is score_samples
        self._answers.asked(obj.id, len(list(obj.payload.args)[0]) if scores else None)
        super().send(obj)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return io.BytesIO, ()  # a worker closes it


class TaskReader(Connection):
    """The tasks' end; in a worker a plain connection that unpickles functions and arguments."""

    def __reduce__(self) -> tuple[Callable[..., Connection], tuple[Any, ...]]:
        return connection, (Connection, reduction.DupFd(self.fileno()), True, False)


def connection(
    kind: type[Connection], duplicate: Any, readable: bool, writable: bool
) -> Connection:
    """Open a connection, in a worker, on a descriptor that it was started with."""
    return kind(duplicate.detach(), readable=readable, writable=writable)


def _as_json(message: Acknowledgement | TaskResult | TaskProblem) -> dict[str, Any]:
    if isinstance(message, Acknowledgement):
        return {"worker": message.worker, "task": message.task}
    if isinstance(message, TaskResult) and message.result.status is ResultStatus.SUCCESS:
        return {"task": message.task, "value": message.result.value}
    # pebble wraps the exception of a task.
    error = message.result.value.exception if isinstance(message, TaskResult) else message.error
    told = {"task": message.task, "error": type(error).__name__, "text": str(error)}
    if isinstance(error, UsageError):
        told |= {"text": error.found, "flag": error.flag, "remedy": error.remedy}
    return told


def _as_message(fields: Any) -> Message:
    """Parse the result of `_as_json`; InvalidData for anything else."""
    if not isinstance(fields, dict):
        raise InvalidData("it is no object")
    task = _whole(fields.get("task"))
    if "worker" in fields:
        return Acknowledgement(_whole(fields["worker"]), task)
    if "error" not in fields:
        return TaskResult(task, Result(ResultStatus.SUCCESS, _value(fields.get("value"))))
    name, text = _text(fields["error"]), _text(fields.get("text"))
    error: Exception = WorkerFault("failed in its worker", f"{name}: {text}")
    if name == UsageError.__name__:
        flag, remedy = (_text(fields.get(each)) for each in ("flag", "remedy"))
        error = UsageError(text, flag=flag, remedy=remedy)
    return TaskResult(task, Result(ResultStatus.FAILURE, error))


def _value(value: Any) -> tuple[list[Outcome], float] | None:
    """Parse the value of `score_samples`; other calls in workers return nothing."""
    if value is None:
        return None
    if not isinstance(value, list) or len(value) != 2 or not isinstance(value[0], list):
        raise InvalidData("it has other values than outcomes and seconds")
    seconds = finite_number(value[1])
    if seconds is None or seconds < 0:
        raise InvalidData("its seconds are not a number from 0 on")
    return [_outcome(parts) for parts in value[0]], seconds


def _outcome(parts: Any) -> Outcome:
    if not isinstance(parts, list) or len(parts) != len(Outcome._fields):
        raise InvalidData("an outcome has a reward, a kind and a detail")
    reward = finite_number(parts[0])
    if reward is None:
        raise InvalidData("a reward is a finite number")
    return Outcome(reward, None if parts[1] is None else _text(parts[1]), _text(parts[2]))


def _whole(number: Any) -> int:
    if not isinstance(number, int) or isinstance(number, bool):
        raise InvalidData("the number of a task or of a process is an integer")
    return number


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise InvalidData("a reason is a text")
    return shortened(value)
