"""The zygote, a process that forks the processes of a user's code.

It drops rights before it imports anything of the user's. It then forks a process when the trainer
sends a socket, kills the processes that the trainer names, and reports which have ended and how.
All descendants of a session end with it; everything ends with the trainer, however that ends.

A fork takes milliseconds, and a step's samples begin all at once. So once all sessions have ended,
while the trainer trains, the zygote forks as many spares as ran concurrently.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import selectors
import signal
import socket
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from mcore_rl.common.errors import UsageError
from mcore_rl.common.spawning import forbid_runs
from mcore_rl.isolation import wire
from mcore_rl.isolation.client import start_supervisor
from mcore_rl.isolation.process import Service, run_process
from mcore_rl.isolation.rights import (
    adopt_orphans,
    die_with_parent,
    drop_privileges,
    limit_memory,
    see_no_other_process,
    write_no_core,
)

MAX_CONTROL_BYTES = 1 << 16  # of a message between the trainer and this process


@dataclass(frozen=True, slots=True)
class Program:
    """What the processes of a pool run, and their limits, e.g.

    Program("environment shop:Shop", "mcore_rl.environments.service", {"spec": "shop:Shop", ...},
            memory_gib=4.0, memory_flag="--rl-environment-memory-gib")
    """

    owner: str  # for messages
    module: str  # has `load`, see `run_zygote`
    settings: dict[str, Any]  # of the module, as JSON
    memory_gib: float  # of each process; 0: unlimited
    memory_flag: str = ""  # for messages
    max_answer_bytes: int = 1 << 20
    environment_names: tuple[str, ...] = ()  # variables that processes get besides the usual ones
    runs_code: bool = False  # in a sandbox
    sandbox_accept: tuple[str, ...] = ()  # protections that the sandbox may lack
    is_silent: bool = False  # discard the output of processes
    output: int | None = None  # a descriptor for their output; None: this process's


def run_zygote(control: int, parent: int) -> None:
    """Serve the trainer, the process `parent`, at the other end of the socket `control`.

    `load` of the program's module gets its settings, once rights are dropped, and returns what a
    new process calls for its service; its UsageError is passed on to the trainer.
    """
    forbid_runs()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    die_with_parent(parent)  # during the imports
    connection = socket.socket(fileno=control)
    program = Program(**json.loads(connection.recv(MAX_CONTROL_BYTES)))
    # Now, as processes started later cannot create namespaces.
    supervisor = start_supervisor(program.sandbox_accept) if program.runs_code else None
    limit_memory(int(program.memory_gib * 2**30))
    write_no_core()
    drop_privileges()
    see_no_other_process()
    ours = _open_descriptors()
    if supervisor is not None:
        ours.discard(supervisor.fileno())  # sessions run code through it
    report: dict[str, Any] = {"ready": True}
    service: Callable[[], Service] | None = None
    try:
        service = importlib.import_module(program.module).load(program.settings)
    except UsageError as error:
        report = {"refused": wire.refused(error)}
    import asyncio  # noqa: F401 - once, as most sessions need it

    gc.collect()
    gc.freeze()  # so that forks share the memory
    supervisor_pid = None if supervisor is None else supervisor.pid
    zygote = _Zygote(connection, service, program, ours, supervisor_pid)
    try:
        zygote.send(report)
        zygote.serve()
    finally:
        zygote.end_all()


def _open_descriptors() -> set[int]:
    """Return the descriptors that sessions must not inherit; never the standard streams."""
    descriptors = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # of the listing itself
            os.fstat(int(name))
            descriptors.add(int(name))
    return descriptors - {0, 1, 2}


class _Zygote:
    def __init__(
        self,
        control: socket.socket,
        service: Callable[[], Service] | None,
        program: Program,
        ours: set[int],
        supervisor: int | None,
    ) -> None:
        self._control, self._service, self._program = control, service, program
        self._sessions: dict[int, int] = {}  # process -> ticket
        self._spares: deque[tuple[int, socket.socket]] = deque()  # idle processes
        self._most_sessions = 0  # concurrently, since there were none
        self._supervisor = supervisor  # its process, which serves all sessions
        self._parent = os.getppid()
        self._pid = os.getpid()
        adopt_orphans()
        self._wakes, wakes = socket.socketpair()
        for end in (self._wakes, wakes):
            end.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(control, selectors.EVENT_READ)
        self._selector.register(self._wakes, selectors.EVENT_READ)
        self._ours = ours | {self._wakes.fileno(), wakes.fileno(), self._selector.fileno()}
        self._waker = wakes
        signal.set_wakeup_fd(wakes.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGHUP, lambda *_: None)
        # No exception: a handler may run within a fork, which would swallow it.
        self._is_leaving = False
        signal.signal(signal.SIGTERM, self._leave)
        # A thread of the trainer that ends also sends it: only a new parent means the end.
        die_with_parent(self._parent, signal.SIGHUP)

    def _leave(self, *_: object) -> None:
        self._is_leaving = True

    def send(self, fields: Mapping[str, Any]) -> None:
        """Send a message; blocks until the trainer has read enough of the earlier ones."""
        self._control.sendall(json.dumps(fields).encode())

    def serve(self) -> None:
        """Serve until the trainer disconnects or is gone."""
        with contextlib.suppress(OSError):  # of a broken connection
            while os.getppid() == self._parent and not self._is_leaving:
                timeout = 0.0 if self._lacks_spares() else None
                ready = {key.fileobj for key, _ in self._selector.select(timeout)}
                if self._wakes in ready:
                    with contextlib.suppress(BlockingIOError):
                        self._wakes.recv(1 << 12)
                self._reap()
                if self._control in ready and not self._handle_message():
                    return
                if not ready and self._lacks_spares():
                    self._fork_spare()

    def _lacks_spares(self) -> bool:
        return not self._sessions and len(self._spares) < self._most_sessions

    def _fork_spare(self) -> None:
        try:
            self._spares.append(self._forked())
        except OSError:
            self._most_sessions = 0  # until the next request for a process

    def _handle_message(self) -> bool:
        """Execute the next message; return False if none will follow."""
        message, descriptors, _, _ = socket.recv_fds(self._control, MAX_CONTROL_BYTES, 1)
        if not message:
            return False
        fields = json.loads(message)
        if "fork" in fields:
            self._begin(fields["fork"], socket.socket(fileno=descriptors[0]))
        else:
            for pid in [pid for pid, each in self._sessions.items() if each == fields["kill"]]:
                _kill(pid)
        return True

    def _begin(self, ticket: int, connection: socket.socket) -> None:
        """Begin a session, in a spare or a new process."""
        if not self._sessions:
            self._most_sessions = 0
        with connection:
            try:
                pid = self._pass_on(connection)
            except OSError as error:
                self.send({"ended": ticket, "reason": f"cannot be started: {error.strerror}"})
                return
        self._sessions[pid] = ticket
        self._most_sessions = max(self._most_sessions, len(self._sessions))
        self.send({"forked": ticket})

    def _pass_on(self, connection: socket.socket) -> int:
        """Pass the connection to a process, and return the process."""
        while self._spares:
            pid, link = self._spares.popleft()
            with link, contextlib.suppress(OSError):  # unless it has just ended
                socket.send_fds(link, [b"."], [connection.fileno()])
                return pid
        pid, link = self._forked(connection)
        with link:
            socket.send_fds(link, [b"."], [connection.fileno()])
        return pid

    def _forked(self, *ours: socket.socket) -> tuple[int, socket.socket]:
        """Fork a process that waits for a connection; return it and the socket to send that on.
        It does not inherit the sockets `ours`."""
        link, theirs = socket.socketpair()
        with theirs:
            try:
                pid = os.fork()
            except OSError:
                link.close()
                raise
            if pid == 0:
                try:
                    for descriptor in self._ours:
                        with contextlib.suppress(OSError):
                            os.close(descriptor)
                    for other in (link, *ours, *(each for _, each in self._spares)):
                        other.close()
                    self._sessions.clear()
                    self._spares.clear()
                    assert self._service is not None, "the trainer forks nothing after a refusal"
                    run_process(
                        theirs,
                        self._service,
                        parent=self._pid,
                        is_silent=self._program.is_silent,
                        max_answer_bytes=self._program.max_answer_bytes,
                    )
                finally:
                    os._exit(1)
        return pid, link

    def _reap(self) -> None:
        """Reap ended processes and kill what they have left running."""
        while (ended := _next_ended()) is not None:
            # Before it is reaped: its process and group ids cannot have been reused yet.
            _kill(ended)
            _, status = os.waitpid(ended, 0)
            if ended == self._supervisor:
                raise SystemExit(1)  # the trainer starts another zygote
            ticket = self._sessions.pop(ended, None)
            self._forget_spare(ended)
            self._kill_orphans()
            if ticket is not None:
                code = os.waitstatus_to_exitcode(status)
                self.send({"ended": ticket, "code": code})

    def _kill_orphans(self) -> None:
        """Kill children that were not forked here: they have lost the session that started them."""
        known = self._sessions.keys() | {self._supervisor, *(pid for pid, _ in self._spares)}
        for pid in _children() - known:
            _kill(pid)

    def _forget_spare(self, ended: int) -> None:
        for pid, link in [each for each in self._spares if each[0] == ended]:
            link.close()
            self._spares.remove((pid, link))
            # Memory may be short: fork no spares until a process is requested.
            self._most_sessions = 0

    def end_all(self) -> None:
        """Kill every descendant and wait for its end."""
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        left = self._sessions.keys() | {pid for pid, _ in self._spares}
        while left := _children() | left:
            for pid in left:
                _kill(pid)
            with contextlib.suppress(ChildProcessError):
                left.discard(os.waitpid(-1, 0)[0])


def _next_ended() -> int | None:
    """Return a child that has ended but is not reaped."""
    with contextlib.suppress(ChildProcessError):
        ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        return None if ended is None else ended.si_pid
    return None


def _children() -> set[int]:
    """Return the children of this process; empty if the kernel does not list them."""
    pid = os.getpid()
    with contextlib.suppress(OSError), open(f"/proc/{pid}/task/{pid}/children") as file:
        return set(map(int, file.read().split()))
    return set()


def _kill(pid: int) -> None:
    """Kill a process that is not reaped yet, and its group if it has its own."""
    for kill in (os.kill, os.killpg):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            kill(pid, signal.SIGKILL)
