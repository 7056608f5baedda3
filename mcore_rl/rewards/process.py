"""The start of a reward pool's processes, and what they inherit from the trainer.

A reward processes unread text and may be code that few have read. It gets a new process (exec, so
it holds none of the trainer's memory), an environment of a few variables, and only the standard
streams and its pipes (`answers`) as file descriptors.
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

# Variables of Python, the dynamic linker and numerical libraries; none of them is a secret.
_PASSED_ON = (
    *("PATH", "HOME", "USER", "LOGNAME", "LANG", "LANGUAGE", "LC_*", "TZ", "TMPDIR", "TERM"),
    *("PYTHONPATH", "PYTHONHOME", "PYTHONHASHSEED", "PYTHONUTF8", "PYTHONIOENCODING"),
    *("PYTHONUNBUFFERED", "PYTHONDONTWRITEBYTECODE", "PYTHONPYCACHEPREFIX", "PYTHONWARNINGS"),
    *("PYTHONNOUSERSITE", "PYTHONSAFEPATH", "PYTHONFAULTHANDLER", "VIRTUAL_ENV"),
    *("LD_LIBRARY_PATH", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"),
    "MCORE_RL_LAUNCHER",  # finds the processes of rewards when the launcher is killed
)


def worker_environment(
    environment: Mapping[str, str], extra_names: Sequence[str] = ()
) -> dict[str, str]:
    """Return a worker's part of `environment`: what programs need, and `extra_names`."""
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
    """The spawn context of workers: the trainer has threads (gloo, vLLM, pebble) and maybe CUDA."""

    def __init__(self, environment_names: Sequence[str] = ()) -> None:
        """`environment_names` lists variables that workers get in addition to the usual ones."""
        super().__init__()
        process = functools.partial(WorkerProcess, environment_names=tuple(environment_names))
        self.Process = process  # type: ignore[assignment, misc]
        self.answers: Answers | None = None  # once pipes exist

    def Pipe(self, duplex: bool = True) -> tuple[Any, Any]:
        """Return the ends to read and to write: of tasks at the first call, then of answers."""
        assert not duplex, "workers are talked to by pipes of one direction"
        if self.answers is not None:
            return self.answers, AnswerEnd(self.answers)
        self.answers = Answers()
        reader, writer = os.pipe()
        return TaskReader(reader, writable=False), TaskWriter(writer, self.answers)


class WorkerPopen(popen_spawn_posix.Popen):
    """multiprocessing's way to start a process, with a given environment.

    The child gets neither the pipe to this process's resource tracker, by which it could remove
    shared memory, nor (see `WorkerProcess`) the key that authenticates the trainer's processes.
    """

    def __init__(self, process_obj: SpawnProcess, environment: Mapping[str, str]) -> None:
        self._environment = dict(environment)
        self._given: list[int] = []
        super().__init__(process_obj)

    def give(self, descriptor: int) -> Any:
        """Pass a descriptor to the process while it is pickled; it is closed here afterwards."""
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
        self.sentinel, child_end = os.pipe()  # closes when the child is gone
        child_reader, writer = os.pipe()
        # The writer also stays open: its end would tell the child that this process has ended.
        self.finalizer = util.Finalize(self, util.close_fds, (self.sentinel, writer))  # type: ignore[attr-defined]
        try:
            self._process = subprocess.Popen(
                spawn.get_command_line(pipe_handle=child_reader),
                env=self._environment,
                stdin=subprocess.DEVNULL,
                pass_fds=(*self._fds, child_reader, child_end),  # type: ignore[attr-defined]
                # So that its own processes end with it, and a signal for the trainer, which may
                # continue to the end of its step, does not reach it.
                start_new_session=True,
            )
        finally:
            for descriptor in (child_reader, child_end, *self._given):
                os.close(descriptor)
        self.pid = self._process.pid
        with open(writer, "wb", closefd=False) as pipe:
            pipe.write(message.getbuffer())

    def poll(self, flag: int = os.WNOHANG) -> int | None:
        """Return the exit code, or None while the process runs; waits unless `flag` forbids it.

        After its end, the processes that it has started are killed.
        """
        if self.returncode is None:
            options = os.WEXITED | os.WNOWAIT | (flag & os.WNOHANG)
            assert self.pid is not None
            with contextlib.suppress(ChildProcessError):  # already reaped elsewhere
                if os.waitid(os.P_PID, self.pid, options) is None:
                    return None
                # Before it is reaped: its process id cannot have been reused yet.
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(self.pid, signal.SIGKILL)
            self.returncode = self._process.wait()
        return self.returncode
