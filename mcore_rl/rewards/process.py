"""How the processes of a reward pool are started, and what of the trainer's they get to see.

A reward meets text that nobody has read before and may be code that few have. It gets a process
that is new (exec, so nothing of the trainer's memory is in it), an environment of a few names, no
file descriptor but the standard streams and its pipes, and its answers are JSON.
"""

from __future__ import annotations

import contextlib
import fnmatch
import functools
import io
import json
import math
import os
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import popen_spawn_posix, reduction, spawn, util
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnContext, SpawnProcess, set_spawning_popen
from typing import Any

from pebble.common.types import Result, ResultStatus
from pebble.pool.process import Acknowledgement, TaskProblem, TaskResult

from mcore_rl.common.errors import UsageError
from mcore_rl.common.spawning import main_script_left_out
from mcore_rl.rewards.worker import Outcome

# What Python, the dynamic linker and numerical libraries read; nothing in it is a secret.
_PASSED_ON = (
    *("PATH", "HOME", "USER", "LOGNAME", "LANG", "LANGUAGE", "LC_*", "TZ", "TMPDIR", "TERM"),
    *("PYTHONPATH", "PYTHONHOME", "PYTHONHASHSEED", "PYTHONUTF8", "PYTHONIOENCODING"),
    *("PYTHONUNBUFFERED", "PYTHONDONTWRITEBYTECODE", "PYTHONPYCACHEPREFIX", "PYTHONWARNINGS"),
    *("PYTHONNOUSERSITE", "PYTHONSAFEPATH", "PYTHONFAULTHANDLER", "VIRTUAL_ENV"),
    *("LD_LIBRARY_PATH", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"),
    "MCORE_RL_LAUNCHER",  # what a reward starts is found by it when the launcher is killed
)


def worker_environment(
    environment: Mapping[str, str], extra_names: Sequence[str] = ()
) -> dict[str, str]:
    """The part of `environment` that a worker gets: what programs need, and `extra_names`."""
    return {
        name: value
        for name, value in environment.items()
        if name in extra_names or any(fnmatch.fnmatchcase(name, known) for known in _PASSED_ON)
    }


class WorkerProcess(SpawnProcess):
    """A spawned process that does not run the parent's main script again."""

    def __init__(self, *args: Any, environment_names: Sequence[str] = (), **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.authkey = os.urandom(32)
        self._environment_names = tuple(environment_names)

    def start(self) -> None:
        """Start the process, as a child to which the main script is unknown."""
        with main_script_left_out():
            super().start()

    def _Popen(self, process_obj: SpawnProcess) -> WorkerPopen:  # type: ignore[override]
        return WorkerPopen(process_obj, worker_environment(os.environ, self._environment_names))


class WorkerContext(SpawnContext):
    """Fork is not an option: the trainer has threads (gloo, vLLM, pebble) and maybe CUDA."""

    def __init__(self, environment_names: Sequence[str] = ()) -> None:
        """`environment_names` are variables that workers get besides those that all get."""
        super().__init__()
        process = functools.partial(WorkerProcess, environment_names=tuple(environment_names))
        self.Process = process  # type: ignore[assignment, misc]

    def Pipe(self, duplex: bool = True) -> tuple[AnswerReader, Connection]:
        """A pipe of one direction: for tasks, or for answers, which are JSON."""
        assert not duplex, "workers are talked to by pipes of one direction"
        reader, writer = os.pipe()
        return AnswerReader(reader, writable=False), TaskWriter(writer, readable=False)


class WorkerPopen(popen_spawn_posix.Popen):
    """multiprocessing's way to start a process, with an environment that is given.

    The child gets neither the pipe to this process's resource tracker, by which it could have
    shared memory removed, nor (see `WorkerProcess`) the key by which its processes know each other.
    """

    def __init__(self, process_obj: SpawnProcess, environment: Mapping[str, str]) -> None:
        self._environment = dict(environment)
        super().__init__(process_obj)

    def _launch(self, process_obj: SpawnProcess) -> None:
        preparation = spawn.get_preparation_data(process_obj.name)
        preparation["authkey"] = bytes(process_obj.authkey)
        message = io.BytesIO()
        set_spawning_popen(self)
        try:
            reduction.dump(preparation, message)
            reduction.dump(process_obj, message)
        finally:
            set_spawning_popen(None)
        self.sentinel, child_end = os.pipe()  # tells by its end that the child is gone
        child_reader, writer = os.pipe()
        # The writer stays open as well: by its end the child would know of this process's.
        self.finalizer = util.Finalize(self, util.close_fds, (self.sentinel, writer))  # type: ignore[attr-defined]
        try:
            self._process = subprocess.Popen(
                spawn.get_command_line(pipe_handle=child_reader),
                env=self._environment,
                stdin=subprocess.DEVNULL,
                pass_fds=(*self._fds, child_reader, child_end),  # type: ignore[attr-defined]
                # So that what it starts ends with it, and a signal for the trainer, which may go on
                # to the end of its step, does not reach it.
                start_new_session=True,
            )
        finally:
            os.close(child_reader)
            os.close(child_end)
        self.pid = self._process.pid
        with open(writer, "wb", closefd=False) as pipe:
            pipe.write(message.getbuffer())

    def poll(self, flag: int = os.WNOHANG) -> int | None:
        """The exit code, or None while the process runs; waits for it unless `flag` says not to.

        Once it has ended, the processes that it has started are killed.
        """
        if self.returncode is None:
            options = os.WEXITED | os.WNOWAIT | (flag & os.WNOHANG)
            assert self.pid is not None
            with contextlib.suppress(ChildProcessError):  # somebody else has reaped it
                if os.waitid(os.P_PID, self.pid, options) is None:
                    return None
                # Before it is reaped: its number cannot be another's yet.
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(self.pid, signal.SIGKILL)
            self.returncode = self._process.wait()
        return self.returncode


class TaskWriter(Connection):
    """Sends tasks to workers. What a worker gets of the same class sends answers."""

    def __reduce__(self) -> tuple[Callable[..., Connection], tuple[Any, ...]]:
        return _connection, (AnswerWriter, reduction.DupFd(self.fileno()), False, True)


class AnswerWriter(Connection):
    """A worker's end: sends what pebble sends as JSON."""

    def send(self, obj: Any) -> None:
        """TypeError, which pebble answers, for what a task must not return."""
        self.send_bytes(json.dumps(_as_json(obj)).encode())


class AnswerReader(Connection):
    """Reads what workers send, as data: a reward can write into the pipe of its process as well."""

    def recv(self) -> Any:
        """The next message; OSError if it is none of a worker, by which the pool breaks."""
        message = self.recv_bytes()
        try:
            return _as_message(json.loads(message))
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise OSError(f"a worker sent what is no answer ({error})") from error

    def __reduce__(self) -> tuple[Callable[..., Connection], tuple[Any, ...]]:
        # In the worker it reads tasks: functions and their arguments, pickled by the trainer.
        return _connection, (Connection, reduction.DupFd(self.fileno()), True, False)


def _connection(
    kind: type[Connection], duplicate: Any, readable: bool, writable: bool
) -> Connection:
    return kind(duplicate.detach(), readable=readable, writable=writable)


def _as_json(message: Acknowledgement | TaskResult | TaskProblem) -> dict[str, Any]:
    if isinstance(message, Acknowledgement):
        return {"worker": message.worker, "task": message.task}
    if isinstance(message, TaskResult) and message.result.status is ResultStatus.SUCCESS:
        return {"task": message.task, "value": message.result.value}
    # pebble wraps what a task has raised.
    error = message.result.value.exception if isinstance(message, TaskResult) else message.error
    told = {"task": message.task, "error": type(error).__name__, "text": str(error)}
    if isinstance(error, UsageError):
        told |= {"text": error.found, "flag": error.flag, "remedy": error.remedy}
    return told


def _as_message(fields: Any) -> Acknowledgement | TaskResult:
    """ValueError and the like for anything but what `_as_json` makes."""
    task = _whole(fields["task"])
    if "worker" in fields:
        return Acknowledgement(_whole(fields["worker"]), task)
    if "error" not in fields:
        return TaskResult(task, Result(ResultStatus.SUCCESS, _value(fields["value"])))
    name, text = str(fields["error"]), str(fields["text"])
    error: Exception = RuntimeError(f"{name}: {text}")
    if name == UsageError.__name__:
        error = UsageError(text, flag=str(fields["flag"]), remedy=str(fields["remedy"]))
    return TaskResult(task, Result(ResultStatus.FAILURE, error))


def _value(value: Any) -> tuple[list[Outcome], float] | None:
    """Of `score_samples`; what else runs in workers returns nothing."""
    if value is None:
        return None
    outcomes, seconds = value
    return [_outcome(*parts) for parts in outcomes], float(seconds)


def _outcome(reward: Any, kind: Any, detail: Any) -> Outcome:
    if not math.isfinite(reward):
        raise ValueError(f"a reward of {reward}")
    return Outcome(float(reward), None if kind is None else str(kind), str(detail))


def _whole(number: Any) -> int:
    if not isinstance(number, int):
        raise TypeError(f"{number!r} is no whole number")
    return number
