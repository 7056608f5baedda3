"""The process that starts and ends confined programs; `client.Supervisor` starts it.

    python -I -B supervisor.py ROOT DESCRIPTOR_OF_CONTROL LEVEL[,LEVEL]

It starts in its own session, before a worker gives up the rights that namespaces need, so confined
code can neither see nor signal it. For each request it forks a monitor process:

    client ──control──► supervisor ──fork──► monitor ──► bwrap ──► PID 1 ──► code
       └──────────────connection───────────────┘  (or, without bwrap: monitor ──► code)

The monitor lets the code run until it ends, its time is over, it has written too much, or the
client closes the connection or is gone. It then kills all descendants, waits for their end, removes
the folder and answers. If a monitor is killed, the kernel kills what it has started.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import selectors
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.append(sys.argv[1])  # this package need not be installed

from mcore_rl.isolation import levels
from mcore_rl.isolation.confine import CONFINED
from mcore_rl.isolation.rights import adopt_orphans

MAX_MESSAGE_BYTES = 1 << 16
MAX_REQUEST_DESCRIPTORS = 16
_PARENT_SECONDS = 2.0  # between checks that the client's process exists
_WATCH_SECONDS = 0.05
_PROBE_SECONDS = 60.0
MAX_ENTRIES = 4096  # files and folders in the working folder
MAX_THREADS = 128
_MAX_DEPTH = 64
_MAX_MAPS_BYTES = 4 << 20  # of /proc/PID/maps
_STOP_SECONDS = 1.0
_CONFINE = str(Path(__file__).with_name("confine.py"))


def main(control: socket.socket, names: Sequence[str]) -> None:
    """Serve requests until the client's process has ended or closed its side."""
    parent = os.getppid()
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)
    level, faults = best_level(names)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # monitors are not waited for
    control.settimeout(_PARENT_SECONDS)
    while os.getppid() == parent:
        try:
            message, descriptors, _, _ = socket.recv_fds(
                control, MAX_MESSAGE_BYTES, MAX_REQUEST_DESCRIPTORS
            )
        except TimeoutError:
            continue
        if not message:
            return
        with socket.socket(fileno=descriptors[0]) as connection:
            request = json.loads(message)
            if "program" not in request:
                connection.send(json.dumps({"level": level, "faults": faults}).encode())
            elif os.fork() == 0:
                control.close()
                _serve(connection, level, request, descriptors[1:])
        for descriptor in descriptors[1:]:
            os.close(descriptor)


def best_level(names: Sequence[str]) -> tuple[str | None, dict[str, str]]:
    """Return the first level at which a program runs here, and why earlier levels fail."""
    faults: dict[str, str] = {}
    for name in names:
        try:
            _probe(name)
            return name, faults
        except (OSError, RuntimeError, subprocess.SubprocessError) as error:
            faults[name] = str(error)
    return None, faults


def _probe(name: str) -> None:
    with tempfile.TemporaryFile() as output:
        stdout = stderr = output.fileno()
        run = _Run(name, None, (), stdout, stderr, memory_bytes=1 << 30, disk_bytes=1 << 20)
        try:
            code = run.process.wait(_PROBE_SECONDS)
        finally:
            run.end()
            run.remove_folder()
        output.seek(0)
        lines = output.read().decode(errors="replace").strip().splitlines() or [""]
    if code != 0 or lines[-1] != CONFINED:
        raise RuntimeError(lines[-1] or f"it ended with exit code {code}")


def _serve(
    connection: socket.socket, level: str | None, request: dict[str, Any], given: Sequence[int]
) -> None:
    """Run as a monitor; never returns. `given` holds standard output and error, then the program's
    descriptors."""
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        adopt_orphans()
        assert level is not None, "the client has asked"
        deadline = time.monotonic() + request["seconds"]
        stdout, stderr, *descriptors = given
        run = _Run(
            level,
            request["program"],
            tuple(descriptors),
            stdout,
            stderr,
            memory_bytes=request["memory_bytes"],
            disk_bytes=request["disk_bytes"],
        )
        try:
            for descriptor in given:
                os.close(descriptor)
            why = run.watch(connection, deadline)
        finally:
            run.end()
        if not why:
            run.remove_folder()
        reply = {"code": run.process.returncode, "why": why}
        with contextlib.suppress(OSError):  # the client is gone
            connection.send(json.dumps(reply).encode())
        run.remove_folder()  # may take a while after excessive output
        os._exit(0)
    finally:
        traceback.print_exc()
        os._exit(1)


class _Run:
    """One confined program and its descendants, from start to end."""

    def __init__(
        self,
        level: str,
        program: str | None,
        descriptors: tuple[int, ...],
        stdout: int,
        stderr: int,
        *,
        memory_bytes: int,
        disk_bytes: int,
    ) -> None:
        self._disk_bytes = disk_bytes
        self._is_confined = level == levels.BUBBLEWRAP
        self._folder = None if self._is_confined else tempfile.mkdtemp(prefix="mcore_rl_sandbox_")
        self._info, info = os.pipe()
        try:
            settings = levels.settings(
                level,
                folder=self._folder,
                parent=os.getpid(),
                descriptors=descriptors,
                memory_bytes=memory_bytes,
                disk_bytes=disk_bytes,
            )
            command = [sys.executable, "-I", "-B", _CONFINE, json.dumps(settings)]
            command += [] if program is None else [program, *map(str, descriptors)]
            if self._is_confined:
                programs = (_CONFINE,) if program is None else (_CONFINE, program)
                command = levels.bubblewrap_command(programs, disk_bytes, info) + command
            self.process = subprocess.Popen(
                command,
                cwd=self._folder,
                # bwrap keeps the variable by which the launcher's guard finds processes.
                env=None if self._is_confined else levels.environment(self._folder),
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                pass_fds=(*descriptors, info) if self._is_confined else descriptors,
                start_new_session=True,
            )
        except BaseException:
            self.remove_folder()
            os.close(self._info)
            raise
        finally:
            os.close(info)
        self._info_text = b""  # output of bwrap's --info-fd
        self._inner: int | None = None  # the first process of the namespace

    def watch(self, connection: socket.socket, deadline: float) -> str:
        """Wait until the program has ended (return an empty text) or must be ended (return why)."""
        wakes, waker = socket.socketpair()
        waker.setblocking(False)
        with wakes, waker, selectors.DefaultSelector() as selector:
            signal.set_wakeup_fd(waker.fileno(), warn_on_full_buffer=False)
            signal.signal(signal.SIGCHLD, lambda *_: None)
            selector.register(connection, selectors.EVENT_READ)
            selector.register(wakes, selectors.EVENT_READ)
            if self._is_confined:
                selector.register(self._info, selectors.EVENT_READ)
            try:
                return self._watch(selector, connection, wakes, deadline)
            finally:
                signal.set_wakeup_fd(-1)

    def _watch(
        self,
        selector: selectors.BaseSelector,
        connection: socket.socket,
        wakes: socket.socket,
        deadline: float,
    ) -> str:
        next_look = time.monotonic() + _WATCH_SECONDS
        while self.process.poll() is None:
            left_seconds = deadline - time.monotonic()
            if left_seconds <= 0:
                return "its time is over"
            events = selector.select(min(left_seconds, _WATCH_SECONDS))
            ready = {key.fileobj for key, _ in events}
            if connection in ready:  # the client no longer waits for it
                return ""
            if wakes in ready:
                wakes.recv(1 << 12)
            if self._info in ready and self._read_info():
                selector.unregister(self._info)
            if time.monotonic() >= next_look:
                if why := self._excess():
                    return why
                next_look = time.monotonic() + _WATCH_SECONDS
        return ""

    def _read_info(self) -> bool:
        """Read bwrap's information, which arrives in pieces; return whether it is complete."""
        data = os.read(self._info, 1 << 12)
        self._info_text += data
        if match := re.search(rb'"child-pid":\s*(\d+)\s*[,}]', self._info_text):
            self._inner = int(match[1])
        return not data or self._inner is not None

    def _excess(self) -> str:
        """Return the limit that the program exceeds; an empty text if none."""
        with contextlib.suppress(OSError):  # it has just ended
            code = self._inner_code() if self._is_confined else self.process.pid
            if code is not None and len(os.listdir(f"/proc/{code}/task")) > MAX_THREADS:
                return f"it had more than {MAX_THREADS} threads"
        if self._is_folder_full():
            return (
                f"its folder held more than {self._disk_bytes >> 20} MiB or {MAX_ENTRIES} entries"
            )
        return ""

    def _inner_code(self) -> int | None:
        """Return the process that runs the code, a child of the namespace's first process."""
        if self._inner is None:
            return None
        children = Path(f"/proc/{self._inner}/task/{self._inner}/children").read_text().split()
        return int(children[0]) if children else None

    def _is_folder_full(self) -> bool:
        if self._folder is not None:
            return _stopped_exceeds(self._folder, self.process.pid, self._disk_bytes)
        if self._inner is None:
            return False
        try:
            used = os.statvfs(levels.folder_seen_from_outside(self._inner))
        except OSError:
            return False  # it has just ended
        used_bytes = (used.f_blocks - used.f_bfree) * used.f_frsize
        entries = used.f_files - used.f_ffree
        return used_bytes > self._disk_bytes + (1 << 20) or entries > MAX_ENTRIES

    def end(self) -> None:
        """Kill the program and its descendants, and wait for their end."""
        os.close(self._info)
        self.process.kill()
        self.process.wait()
        # This process has adopted the orphans, the first process of a namespace among them; the
        # kernel kills that one with bwrap, and ends it after all others in the namespace.
        with contextlib.suppress(ChildProcessError):
            while True:
                os.waitpid(-1, 0)

    def remove_folder(self) -> None:
        """Remove the program's folder, if there is one."""
        if self._folder is None or not os.path.lexists(self._folder):
            return
        with contextlib.suppress(RecursionError):
            shutil.rmtree(self._folder, ignore_errors=True)  # follows no link
        if os.path.lexists(self._folder):  # folders that are too deep or not accessible
            for command in (["chmod", "-R", "u+rwx"], ["rm", "-rf"]):
                subprocess.run([*command, "--", self._folder], stderr=subprocess.DEVNULL)


def _stopped_exceeds(folder: str, pid: int, most_bytes: int) -> bool:
    """Apply `_exceeds` to a child that is stopped meanwhile, so that it cannot hide a file.

    A child that does not stop in time, on a busy machine for example, has not been measured. The
    signal stays pending, so that it cannot write either until a later call measures it.
    """
    deadline = time.monotonic() + _STOP_SECONDS
    options = os.WSTOPPED | os.WEXITED | os.WNOWAIT | os.WNOHANG
    os.kill(pid, signal.SIGSTOP)
    while (state := os.waitid(os.P_PID, pid, options)) is None:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.0005)
    try:
        return state.si_code == os.CLD_STOPPED and _exceeds(folder, pid, most_bytes)
    finally:
        os.kill(pid, signal.SIGCONT)


def _exceeds(folder: str, pid: int, most_bytes: int) -> bool:
    """Return whether a process has written more below `folder` than it may, removed files included.

    Anything that cannot be measured (a path that is too deep, a folder that cannot be listed, a
    removed file that is mapped, too many mappings) counts as too much. A link counts as itself.
    """
    num_bytes = num_entries = 0
    try:
        # All threads share descriptors and memory, but a main thread that has exited has neither.
        thread = f"/proc/{pid}/task/{os.listdir(f'/proc/{pid}/task')[-1]}"
        for entry in (*_removed(thread), *_entries(folder)):
            num_entries += 1
            num_bytes += 512 * entry.st_blocks
            if num_bytes > most_bytes + (1 << 20) or num_entries > MAX_ENTRIES:
                return True
        with open(f"{thread}/maps", "rb") as file:
            maps = file.read(_MAX_MAPS_BYTES)
        return len(maps) == _MAX_MAPS_BYTES or any(
            line.endswith(b"(deleted)") and os.fsencode(folder) in line
            for line in maps.splitlines()
        )
    except (FileNotFoundError, ProcessLookupError):
        return False  # it has just ended
    except OSError:
        return True


def _entries(folder: str) -> Iterator[os.stat_result]:
    folders = [(folder, 0)]
    while folders:
        path, depth = folders.pop()
        if depth > _MAX_DEPTH:
            raise OSError(errno.ELOOP, "too deep to be measured", path)
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):  # it has just been removed
            with os.scandir(path) as entries:
                for entry in entries:
                    with contextlib.suppress(FileNotFoundError):
                        yield entry.stat(follow_symlinks=False)
                        if entry.is_dir(follow_symlinks=False):
                            folders.append((entry.path, depth + 1))


def _removed(thread: str) -> Iterator[os.stat_result]:
    """Yield open files without a name; `thread` is a folder of /proc."""
    for name in os.listdir(f"{thread}/fd"):
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            status = os.stat(f"{thread}/fd/{name}")
            if stat.S_ISREG(status.st_mode) and status.st_nlink == 0:
                yield status


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[2])), sys.argv[3].split(","))
