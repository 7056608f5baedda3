"""Python programs in forks of a process that has imported torch, vLLM and Megatron.

The imports take longer than most of these programs. The parent of the ranks (rank_pool.py) has a
second process that forks for whoever runs the program at `WarmPython.program`, warm_client.py:

    test ── subprocess ──► warm_client ── socket ──► server ── fork ──► handler ── fork ──► program
                                ◄──────── pid, then exit code ────────────┘

Different from a new Python: what is imported already, and the parent's stand-ins for CUDA in
Megatron; the program is not below warm_client in the tree of processes, and has a session of its
own. So tests of kills, of orphans and of imports start a real Python. So does warm_client where
`obstacle` finds that the program would notice.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import ctypes
import json
import logging
import os
import random
import runpy
import select
import signal
import socket
import struct
import sys
import tempfile
import threading
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_PEER = (socket.SOL_SOCKET, socket.SO_PEERCRED)
# Variables that Python, and packages while they are imported, read.
_READ_EARLY = (
    *("PYTHON", "LD_", "OMP_", "KMP_", "MKL_", "GOMP_", "TORCH", "PYTORCH", "TRITON"),
    *("VLLM_", "HF_", "TRANSFORMERS_", "TOKENIZERS_", "NVTE_", "CUDA_"),
)
# Among these names: what is read later, or here.
_READ_LATE = (
    *("PYTHON_EXEC", "PYTHONPATH", "PYTHONUNBUFFERED", "TORCHELASTIC_", "TORCH_ELASTIC_"),
    *("TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCHINDUCTOR_CACHE_DIR", "TORCH_CPP_LOG_LEVEL"),
    *("VLLM_HOST_IP", "VLLM_SERVER_DEV_MODE"),
)


class WarmPython:
    """The program, and where its server listens."""

    def __init__(self, folder: Path) -> None:
        self.program = folder / "python"
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(str(folder / "socket"))
        self.listener.listen(64)
        client = Path(__file__).with_name("warm_client.py").read_text()
        self.program.write_text(f"#!{sys.executable} -IS\n{client}")
        self.program.chmod(0o755)
        self._folder = folder

    def cpu_seconds(self) -> float:
        """What all programs that have ended have used, with the children that they waited for."""
        return sum(map(float, self._noted("cpu_seconds")))

    def refused(self) -> list[str]:
        """Why real Pythons ran programs, and which."""
        return self._noted("refused")

    def _noted(self, name: str) -> list[str]:
        file = self._folder / name
        return file.read_text().splitlines() if file.exists() else []


def fork_of(program: str | Path, client: int) -> int | None:
    """The process that runs for `client`, which was started as `program`."""
    noted = Path(program).with_name(f"fork_of_{client}")
    return int(noted.read_text().split()[-1]) if noted.exists() else None


def obstacle(
    request: Mapping[str, Any], before: Mapping[str, str], after: Mapping[str, str]
) -> str:
    """Why a fork would run a program in another way than a new Python; "" if nothing is known.

    The forking process had the environment `before` its imports, some of which set variables, and
    the one `after` them. Whoever starts a program may have either.
    """
    environment = request["environment"]
    for name in sorted({*before, *after, *environment}):
        if name.startswith(_READ_EARLY) and not name.startswith(_READ_LATE):
            if environment.get(name) not in (before.get(name), after.get(name)):
                return f"{name} is {environment.get(name)} and was {before.get(name)}"
    arguments = _without_u(request["arguments"])
    if not arguments or (arguments[0].startswith("-") and arguments[0] not in ("-m", "-c")):
        return f"an option of Python: {arguments[:1]}"
    for folder in _folders(request):
        for entry in sorted(os.listdir(folder)) if os.path.isdir(folder) else ():
            name = entry.partition(".")[0]
            if name in ("sitecustomize", "usercustomize") or entry.endswith("-info"):
                return f"{folder} has {entry}"
            if name in sys.modules and not _is_from(name, folder):
                return f"{name} in {folder} is another one"
    return ""


def _without_u(arguments: Sequence[str]) -> Sequence[str]:
    return arguments[1:] if arguments[:1] == ["-u"] else arguments


def _folders(request: Mapping[str, Any]) -> list[str]:
    """What Python would put before the installed packages."""
    arguments = _without_u(request["arguments"])
    first = request["folder"]
    if arguments and not arguments[0].startswith("-"):
        first = os.path.dirname(os.path.join(first, arguments[0]))
    more = request["environment"].get("PYTHONPATH", "")
    return [first, *(os.path.abspath(each) for each in more.split(os.pathsep) if each)]


def _is_from(name: str, folder: str) -> bool:
    module = sys.modules[name]
    places = [getattr(module, "__file__", None), *getattr(module, "__path__", ())]
    return any(place and Path(place).is_relative_to(folder) for place in places)


def serve(
    listener: socket.socket, before: Mapping[str, str], end_group: Callable[[int], None]
) -> int:
    """Fork a process that answers on `listener` as long as this one lives; return its id.

    This one had the environment `before` its imports. `end_group` ends what a program has left in
    its process group.
    """
    parent = os.getpid()
    if pid := os.fork():
        listener.close()
        return pid
    _die_with(parent)
    signal.signal(signal.SIGCHLD, _wait_for_handlers)
    while True:
        connection, _ = listener.accept()
        server = os.getpid()
        if os.fork() == 0:
            listener.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            _die_with(server)
            try:
                _handle(connection, before, end_group)
            finally:
                os._exit(0)
        connection.close()


def _wait_for_handlers(*_: object) -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _die_with(parent: int) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def _handle(
    connection: socket.socket, before: Mapping[str, str], end_group: Callable[[int], None]
) -> None:
    """Fork the program that is asked for, and answer how it ends."""
    request, streams = _receive(connection)
    if why := obstacle(request, before, os.environ):
        _note(connection, "refused", f"{why}: {request['arguments'][:4]}")
        connection.sendall(b"0\n")
        return
    handler = os.getpid()
    pid = os.fork()
    if pid == 0:
        connection.close()
        _become(request, streams, handler)
    for stream in streams:
        os.close(stream)
    client, _, _ = struct.unpack("3i", connection.getsockopt(*_PEER, 12))
    _note(connection, f"fork_of_{client}", str(pid))
    connection.sendall(b"%d\n" % pid)
    ended = os.pidfd_open(pid)
    ready, _, _ = select.select([connection.fileno(), ended], [], [])
    if ended not in ready:  # nobody waits any more
        os.kill(pid, signal.SIGKILL)
    _, status, used = os.wait4(pid, 0)
    _note(connection, "cpu_seconds", str(used.ru_utime + used.ru_stime))
    end_group(pid)
    with contextlib.suppress(OSError):
        connection.sendall(b"%d\n" % os.waitstatus_to_exitcode(status))


def _note(connection: socket.socket, name: str, line: str) -> None:
    with open(Path(connection.getsockname()).with_name(name), "a") as file:
        file.write(f"{line}\n")


def _receive(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
    size = b""
    while not size.endswith(b"\n"):
        size += connection.recv(1)
    data, streams, _, _ = socket.recv_fds(connection, int(size), 3)
    while len(data) < int(size):
        data += connection.recv(int(size) - len(data))
    return json.loads(data), streams


def _become(request: Mapping[str, Any], streams: Sequence[int], handler: int) -> NoReturn:
    """Run the program in this process, as `python ARGUMENTS` would."""
    os.setsid()
    _die_with(handler)
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    base = [folder for folder in sys.path[1:] if folder not in given]
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    tempfile.tempdir = None
    random.seed()
    logging.root.handlers.clear()  # some import has added one
    logging.root.setLevel(logging.WARNING)
    arguments = request["arguments"]
    sys.orig_argv = [sys.executable, *arguments]
    unbuffered = "-u" in arguments[:1] or bool(os.environ.get("PYTHONUNBUFFERED"))
    # The same objects: loggers have them.
    sys.stdout.reconfigure(line_buffering=unbuffered)  # type: ignore[union-attr]
    sys.argv = [*_without_u(arguments)]
    sys.path[:] = [*_folders(request), *base]
    code = 1
    try:
        code = _run()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _run() -> int:
    """`sys.argv`, to its end; return the exit code."""
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    main.__dict__["__builtins__"] = builtins
    code: object = 0
    try:
        if sys.argv[0] == "-m":
            _, name, *rest = sys.argv
            sys.argv = ["-m", *rest]
            if not hasattr(sys.modules.get(name), "__path__"):
                sys.modules.pop(name, None)  # the program is another copy
            runpy._run_module_as_main(name)  # type: ignore[attr-defined]
        elif sys.argv[0] == "-c":
            _, text, *rest = sys.argv
            sys.argv = ["-c", *rest]
            exec(compile(text, "<string>", "exec"), main.__dict__)
        else:
            main.__dict__["__file__"] = sys.argv[0]
            exec(compile(Path(sys.argv[0]).read_bytes(), sys.argv[0], "exec"), main.__dict__)
    except SystemExit as leave:
        code = leave.code
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    if isinstance(code, str):
        print(code, file=sys.stderr)
    return 0 if code is None else code if isinstance(code, int) else 1
