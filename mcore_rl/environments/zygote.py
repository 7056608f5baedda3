"""The zygote, which imports the user's modules once and forks the processes of episodes.

It starts anew and drops rights as reward workers do. It then gives a process to an episode when the
trainer sends a socket, kills the processes that the trainer names, and reports which have ended and
how. All descendants of an episode end with it; everything ends with the trainer, however that ends.

A fork and its set-up take milliseconds, and a step's samples begin all at once. So once all
episodes have ended, while the trainer trains, the zygote forks as many spares as ran concurrently.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import selectors
import signal
import socket
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from mcore_rl.common.errors import UsageError
from mcore_rl.common.spawning import forbid_runs
from mcore_rl.environments.episode import adopt_orphans, hand_over, run_episode
from mcore_rl.environments.interface import resolve_environment
from mcore_rl.isolation.client import start_supervisor
from mcore_rl.rewards.functions import PYTHON_SANDBOX
from mcore_rl.rewards.worker import (
    die_with_parent,
    drop_privileges,
    limit_memory,
    see_no_other_process,
    write_no_core,
)

MAX_CONTROL_BYTES = 1 << 16  # of a message between the trainer and this process


def run_zygote(
    control: socket.socket,
    spec: str,
    imports: Sequence[str],
    memory_bytes: int,
    timeout_seconds: float,
    sandbox_accept: Sequence[str],
) -> None:
    """Serve the trainer at the other end of `control`, a socket that keeps messages separate."""
    forbid_runs()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    die_with_parent()  # during the imports
    # Now, as processes started later cannot create namespaces.
    supervisor = start_supervisor(sandbox_accept) if spec == PYTHON_SANDBOX else None
    limit_memory(memory_bytes)
    write_no_core()
    drop_privileges()
    see_no_other_process()
    ours = _open_descriptors()
    if supervisor is not None:
        ours.discard(supervisor.fileno())  # episodes run code through it
    told: dict[str, Any] = {"ready": True}
    environment: type = object
    try:
        environment = resolve_environment(spec, imports)
    except UsageError as error:
        told = {"refused": [error.found, error.flag, error.remedy]}
    import asyncio  # noqa: F401 - which most episodes need: once, not once in each

    gc.collect()
    gc.freeze()  # so that forks share the memory
    helpers = set() if supervisor is None else {supervisor.pid}
    zygote = _Zygote(control, environment, timeout_seconds, ours, helpers)
    try:
        zygote.tell(told)
        zygote.serve()
    finally:
        zygote.end_all()


def _open_descriptors() -> set[int]:
    """Return the descriptors that episodes must not inherit; never the standard streams."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # of the listing itself
            os.fstat(int(name))
            found.add(int(name))
    return found - {0, 1, 2}


class _Zygote:
    def __init__(
        self,
        control: socket.socket,
        environment: type,
        timeout_seconds: float,
        ours: set[int],
        helpers: set[int],
    ) -> None:
        self._control, self._environment = control, environment
        self._timeout_seconds = timeout_seconds
        self._episodes: dict[int, int] = {}  # process -> ticket
        self._spares: deque[tuple[int, socket.socket]] = deque()  # idle processes
        self._most_episodes = 0  # concurrently, since there were none
        self._helpers = helpers  # processes that serve all episodes
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
        signal.signal(signal.SIGTERM, _leave)
        # A thread of the trainer that ends also sends it: only a new parent means the end.
        die_with_parent(signal.SIGHUP)

    def tell(self, fields: Mapping[str, Any]) -> None:
        """Send a message; blocks until the trainer has read enough of the earlier ones."""
        self._control.sendall(json.dumps(fields).encode())

    def serve(self) -> None:
        """Serve until the trainer disconnects or is gone."""
        with contextlib.suppress(OSError):  # of a broken connection
            while os.getppid() == self._parent:
                timeout = 0.0 if self._lacks_spares() else None
                ready = {key.fileobj for key, _ in self._selector.select(timeout)}
                if self._wakes in ready:
                    with contextlib.suppress(BlockingIOError):
                        self._wakes.recv(1 << 12)
                self._reap()
                if self._control in ready and not self._obey():
                    return
                if not ready and self._lacks_spares():
                    self._prepare()

    def _lacks_spares(self) -> bool:
        return not self._episodes and len(self._spares) < self._most_episodes

    def _prepare(self) -> None:
        try:
            self._spares.append(self._forked())
        except OSError:
            self._most_episodes = 0  # until the next request for a process

    def _obey(self) -> bool:
        """Execute the next message; return False if none will follow."""
        message, descriptors, _, _ = socket.recv_fds(self._control, MAX_CONTROL_BYTES, 1)
        if not message:
            return False
        fields = json.loads(message)
        if "fork" in fields:
            self._begin(fields["fork"], socket.socket(fileno=descriptors[0]))
        for ticket in fields.get("kill", ()):
            for pid in [pid for pid, each in self._episodes.items() if each == ticket]:
                _kill(pid)
        return True

    def _begin(self, ticket: int, connection: socket.socket) -> None:
        """Begin an episode, in a spare or a new process."""
        if not self._episodes:
            self._most_episodes = 0
        with connection:
            try:
                pid = self._given(connection)
            except OSError as error:
                self.tell({"ended": ticket, "reason": f"cannot be started: {error.strerror}"})
                return
        self._episodes[pid] = ticket
        self._most_episodes = max(self._most_episodes, len(self._episodes))
        self.tell({"forked": ticket})

    def _given(self, connection: socket.socket) -> int:
        """Pass the connection to a process, and return the process."""
        while self._spares:
            pid, link = self._spares.popleft()
            with link, contextlib.suppress(OSError):  # unless it has just ended
                hand_over(link, connection)
                return pid
        pid, link = self._forked()
        with link:
            hand_over(link, connection)
        return pid

    def _forked(self) -> tuple[int, socket.socket]:
        """Fork a process that waits for a connection; return it and the socket to send that on."""
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
                    for other in (link, *(each for _, each in self._spares)):
                        other.close()
                    self._episodes.clear()
                    self._spares.clear()
                    run_episode(
                        theirs,
                        self._environment,
                        parent=self._pid,
                        timeout_seconds=self._timeout_seconds,
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
            ticket = self._episodes.pop(ended, None)
            self._forget_spare(ended)
            self._kill_orphans()
            if ticket is not None:
                code = os.waitstatus_to_exitcode(status)
                self.tell({"ended": ticket, "code": code})

    def _kill_orphans(self) -> None:
        """Kill children that were not forked here: they have lost the episode that started them."""
        known = self._episodes.keys() | self._helpers | {pid for pid, _ in self._spares}
        for pid in _children() - known:
            _kill(pid)

    def _forget_spare(self, ended: int) -> None:
        for pid, link in [each for each in self._spares if each[0] == ended]:
            link.close()
            self._spares.remove((pid, link))
            # Memory may be short: fork no spares until a process is requested.
            self._most_episodes = 0

    def end_all(self) -> None:
        """Kill every descendant and wait for its end."""
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        left = self._episodes.keys() | {pid for pid, _ in self._spares}
        while left := _children() | left:
            for pid in left:
                _kill(pid)
            with contextlib.suppress(ChildProcessError):
                left.discard(os.waitpid(-1, 0)[0])


def _leave(*_: object) -> None:
    raise SystemExit(0)


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
