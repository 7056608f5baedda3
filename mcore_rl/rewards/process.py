"""How the processes of a reward pool are started, and what of the trainer's they get to see.

A reward meets text that nobody has read before and may be code that few have. It gets a process
that is new (exec, so nothing of the trainer's memory is in it), an environment of a few names, no
file descriptor but the standard streams and its pipes (`answers`).
"""

from __future__ import annotations

import contextlib
import fnmatch
import functools
import io
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from multiprocessing import popen_spawn_posix, reduction, spawn, util
from multiprocessing.context import SpawnContext, SpawnProcess, set_spawning_popen
from typing import Any

from mcore_rl.common.spawning import main_script_left_out
from mcore_rl.rewards.answers import AnswerEnd, Answers, TaskReader, TaskWriter

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
        self.answers: Answers | None = None  # once there are pipes

    def Pipe(self, duplex: bool = True) -> tuple[Any, Any]:
        """Ends to read and to write: of the tasks at the first call, then of the answers."""
        assert not duplex, "workers are talked to by pipes of one direction"
        if self.answers is not None:
            return self.answers, AnswerEnd(self.answers)
        self.answers = Answers()
        reader, writer = os.pipe()
        return TaskReader(reader, writable=False), TaskWriter(writer, self.answers)


class WorkerPopen(popen_spawn_posix.Popen):
    """multiprocessing's way to start a process, with an environment that is given.

    The child gets neither the pipe to this process's resource tracker, by which it could have
    shared memory removed, nor (see `WorkerProcess`) the key by which its processes know each other.
    """

    def __init__(self, process_obj: SpawnProcess, environment: Mapping[str, str]) -> None:
        self._environment = dict(environment)
        self._given: list[int] = []
        super().__init__(process_obj)

    def give(self, descriptor: int) -> Any:
        """While the process is pickled: it gets this descriptor, which is closed here then."""
        self._given.append(descriptor)
        return reduction.DupFd(descriptor)

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
            for descriptor in (child_reader, child_end, *self._given):
                os.close(descriptor)
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
