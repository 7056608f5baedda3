"""The client's side of confined programs."""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mcore_rl.isolation.levels import LEVELS, PROTECTIONS, Level
from mcore_rl.isolation.supervisor import MAX_MESSAGE_BYTES

_ROOT = Path(__file__).resolve().parents[2]
_PROGRAM = Path(__file__).with_name("supervisor.py")
_START_SECONDS = 120.0
_END_SECONDS = 30.0
# TMPDIR: where folders of runs are created. MCORE_RL_LAUNCHER: the launcher's guard finds processes
# of a killed run by it.
_PASSED_ON = ("PATH", "HOME", "LANG", "TMPDIR", "MCORE_RL_LAUNCHER")


class Unprotected(RuntimeError):
    """This machine cannot confine a program as required."""


class Confined:
    """A running confined program.

    `stdout` and `stderr` are unbuffered binary files, to be read by the caller.
    """

    def __init__(self, connection: socket.socket, stdout: int, stderr: int) -> None:
        self._connection = connection
        self.stdout = open(stdout, "rb", buffering=0)
        self.stderr = open(stderr, "rb", buffering=0)
        self.returncode: int | None = None  # set at the end; negative for a signal
        self.why = ""  # the reason, if the supervisor has ended it

    def wait(self, seconds: float) -> bool:
        """Return whether it ends within `seconds`; then none of its descendants is left."""
        if self.returncode is None and select.select([self._connection], [], [], seconds)[0]:
            message = b""
            with contextlib.suppress(OSError):  # ended below
                message = self._connection.recv(MAX_MESSAGE_BYTES)
            reply: dict[str, Any] = json.loads(message) if message else {}
            self.returncode = reply.get("code", -9)
            self.why = reply.get("why", "its supervisor has ended")
        return self.returncode is not None

    def end(self) -> None:
        """Kill it and its descendants, and wait for their end. RuntimeError: it does not end."""
        if self.returncode is None:
            with contextlib.suppress(OSError):  # it has just ended
                self._connection.shutdown(socket.SHUT_WR)
        ended = self.wait(_END_SECONDS)
        self._connection.close()
        if not ended:
            raise RuntimeError(f"a confined process does not end within {_END_SECONDS:g} s")


class Supervisor:
    """A child process that starts confined programs.

    Start it before this process drops its rights (`rights.see_no_other_process`): a process
    restricted by Landlock cannot create namespaces. Threads and forks of this process may use it.
    It ends with this process, or by `close`.

    `accepted` lists protections (`levels.PROTECTIONS`) that may be missing. `levels` lists the
    levels to try, best first.
    """

    def __init__(
        self, *, accepted: Sequence[str] = (), levels: Sequence[str] = tuple(LEVELS)
    ) -> None:
        self._accepted = frozenset(accepted)
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        environment = {name: os.environ[name] for name in _PASSED_ON if name in os.environ}
        with theirs:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-I", "-B", str(_PROGRAM), str(_ROOT)),
                    *(str(theirs.fileno()), ",".join(levels)),
                ],
                env=environment,
                cwd="/",
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._level: Level | None = None

    @property
    def pid(self) -> int:
        """The supervisor's process id."""
        return self._process.pid

    def fileno(self) -> int:
        """Return the descriptor that forks of this process need to use the supervisor."""
        return self._control.fileno()

    @property
    def is_alive(self) -> bool:
        """Whether it accepts requests."""
        return self._pid != os.getpid() or self._process.poll() is None

    def level(self) -> Level:
        """Return how programs are confined. Unprotected: an unaccepted protection is missing."""
        with self._lock:
            if self._level is None:
                self._level = self._ask_level()
            return self._level

    def _ask_level(self) -> Level:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with ours:
            with theirs:
                self._send({}, theirs)
            ours.settimeout(_START_SECONDS)
            reply = json.loads(ours.recv(MAX_MESSAGE_BYTES) or b'{"level": null, "faults": {}}')
        faults = "; ".join(f"{name}: {why}" for name, why in reply["faults"].items())
        if reply["level"] is None:
            raise Unprotected(f"code cannot be confined ({faults or 'the supervisor has ended'})")
        level = LEVELS[reply["level"]]
        if missing := sorted(level.lacks - self._accepted):
            raise Unprotected(
                f"{', '.join(missing)} cannot be protected from code ({faults}); not guaranteed: "
                + "; ".join(PROTECTIONS[name] for name in missing)
            )
        return level

    def start(
        self,
        program: Path,
        descriptors: Sequence[int],
        *,
        seconds: float,
        memory_bytes: int,
        disk_bytes: int,
    ) -> Confined:
        """Run a Python file, which needs only the standard library, in an empty folder.

        It inherits `descriptors`, whose numbers are its arguments, and is ended after `seconds`.
        Raises the errors of `level`.
        """
        self.level()
        connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        stdout, stdout_end = os.pipe()
        stderr, stderr_end = os.pipe()
        request = {
            "program": str(program),
            "seconds": seconds,
            "memory_bytes": memory_bytes,
            "disk_bytes": disk_bytes,
        }
        try:
            with theirs:
                self._send(request, theirs, stdout_end, stderr_end, *descriptors)
        except BaseException:
            connection.close()
            for descriptor in (stdout, stderr):
                os.close(descriptor)
            raise
        finally:
            os.close(stdout_end)
            os.close(stderr_end)
        return Confined(connection, stdout, stderr)

    def _send(self, request: dict[str, Any], connection: socket.socket, *descriptors: int) -> None:
        try:
            sent = [connection.fileno(), *descriptors]
            socket.send_fds(self._control, [json.dumps(request).encode()], sent)
        except OSError as error:
            raise Unprotected(f"the supervisor of code cannot be reached ({error})") from error

    def close(self) -> None:
        """End the supervisor. A started program runs on until its `Confined` is ended or gone."""
        self._control.close()
        if self._pid == os.getpid():
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_END_SECONDS)

    def __enter__(self) -> Supervisor:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


_shared: Supervisor | None = None
_shared_lock = threading.Lock()


def start_supervisor(accepted: Sequence[str] = ()) -> Supervisor:
    """Start this process's supervisor, unless it or the process that it was forked from has one.

    `accepted` only counts if a supervisor is started.
    """
    global _shared
    with _shared_lock:
        if _shared is None or not _shared.is_alive:
            _shared = Supervisor(accepted=accepted)
        return _shared
