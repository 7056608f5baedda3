"""The program that runs a policy's Python in its own process; started by `runner`.

    python -I inside.py DESCRIPTOR_OF_REQUESTS DESCRIPTOR_OF_ANSWERS

`isolation.confine` has already confined it. It runs the code, and the parts of tests that need it.
It runs as a file, where this package may not be found, and imports only the standard library. The
code can read and change everything here, so nothing here is a secret: neither expected values nor
which request is a test and which a probe (see `grading`).
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import io
import json
import os
import signal
import sys
import threading
import traceback
import types
from typing import Any, BinaryIO

_VALUE = "_value_of_an_expression"
_MAX_DIGITS = 50_000  # of an int that is read or printed, as LiveCodeBench allows
_MAX_TRACEBACK = 1 << 16  # characters of a traceback


def main(requests: BinaryIO, answers: int) -> None:
    """Serve one process: report that it has started, then answer each request in turn.

    Requests and answers are JSON, one per line. The first request is the text of `plain_values`.
    Each further request has a `token`, which its answer repeats, and one of

        run, name[, before][, stdin]   run code in a new module; with `stdin`, as a program
        do[, space]                    run statements in that module, or among their own names
        value[, keep][, space]         evaluate an expression there, and keep the value by a name
        call, arguments, integer_keys  call what an expression is; keys of dicts at the latter
                                       positions are integers

    and is answered by `ended`, `error` (a traceback), and `value` for the latter two.
    """
    sys.set_int_max_str_digits(_MAX_DIGITS)
    os.write(answers, b"{}\n")
    _serve(requests, answers)
    os._exit(0)  # even if threads still run


def _serve(requests: BinaryIO, answers: int) -> None:
    # The code may replace anything that it finds by name: bind what is used later before it runs.
    read, loads, write = requests.readline, json.loads, os.write
    encode = json.JSONEncoder().encode
    clear_trace, clear_profile = sys.settrace, sys.setprofile
    restore_signals = Signals().restore
    originals, names_of_builtins = dict(vars(builtins)), vars(builtins)
    module = types.ModuleType("plain_values")
    exec(compile(loads(read()), module.__name__, "exec"), vars(module))
    program = Program(module.PlainValues())
    while line := read():
        request = loads(line)
        clear_trace(None)
        clear_profile(None)
        names_of_builtins.update(originals)
        fields = program.answer(request)
        restore_signals()
        answer = encode({**fields, "token": request["token"]}).encode() + b"\n"
        while answer:
            answer = answer[write(answers, answer) :]


class Signals:
    """The dispositions and the mask of signals before the code runs.

    A handler of the code's could otherwise run, and raise, wherever this file or a test is.
    """

    def __init__(self) -> None:
        self._numbers = signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}
        self._handlers = {number: signal.getsignal(number) for number in self._numbers}
        self._mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())

    def restore(
        self,
        *,
        mask: Any = signal.pthread_sigmask,
        handle: Any = signal.signal,
        set_timer: Any = signal.setitimer,
        leave: Any = os._exit,
        ignored: Any = signal.SIG_IGN,
        timers: Any = (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF),
    ) -> None:
        """Restore them, and stop the timers. The process ends if handlers prevent it."""
        for _ in range(len(self._numbers) + 1):  # each may be pending and raise
            try:
                mask(signal.SIG_BLOCK, self._numbers)
                for timer in timers:
                    set_timer(timer, 0)
                for number, handler in self._handlers.items():
                    handle(number, ignored)  # discards it if it is pending
                    handle(number, handler)
                mask(signal.SIG_SETMASK, self._mask)
                return
            except BaseException:
                continue
        leave(1)


class Program:
    """The code, and the module that it runs in."""

    def __init__(self, values: Any) -> None:
        """`values` is a `plain_values.PlainValues`."""
        self._names: dict[str, Any] = {}
        # Names of tests, by the number of their space, and the module's names as they were copied.
        # Apart from the code's own names, where it could find expected values.
        self._spaces: dict[int, tuple[dict[str, Any], dict[str, Any]]] = {}
        self._values = values
        self._streams: list[io.TextIOWrapper] = []
        self._stdout = os.dup(1)
        self._folder = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Execute a request; the answer holds what the code raises."""
        try:
            if "run" in request:
                self._run(request)
            elif "do" in request:
                self._execute(request["do"], "<test>", self._space(request))
            else:
                return {"ended": True, "value": self._values.as_json(self._value(request))}
            return {"ended": True}
        except BaseException as error:
            return {"ended": False, "error": self._traceback(error)}
        finally:
            self._flush()

    def _run(self, request: dict[str, Any]) -> None:
        module = types.ModuleType(request["name"])
        self._names = vars(module)
        # Under the names that its own imports, dataclasses and tests may look for.
        sys.modules[request["name"]] = sys.modules["solution"] = module
        if request.get("before"):
            self._execute(request["before"], "<before>", self._names)
        if "stdin" not in request:
            return self._execute(request["run"], "<code>", self._names)
        self._connect(request["stdin"], f"stdin_{request['token']}")
        try:
            self._execute(request["run"], "<code>", self._names)
        except SystemExit as left:
            if left.code not in (None, 0):
                raise
        for thread in threading.enumerate():
            if thread is not threading.main_thread() and not thread.daemon:
                thread.join()
        atexit._run_exitfuncs()

    def _connect(self, text: str, name: str) -> None:
        """Connect standard input to `text` and output to the pipe, by number and by name."""
        # A file of the folder, as a memory file may be refused; removed before the code runs.
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        file = os.open(name, flags, 0o600, dir_fd=self._folder)
        os.unlink(name, dir_fd=self._folder)
        data = text.encode(errors="surrogatepass")
        while data:
            data = data[os.write(file, data) :]
        os.lseek(file, 0, os.SEEK_SET)
        if file != 0:  # which an earlier program may have closed
            os.dup2(file, 0)
            os.close(file)
        os.dup2(self._stdout, 1)
        stdin = open(0, encoding="utf-8", errors="surrogatepass", closefd=False)
        stdout = open(1, "w", encoding="utf-8", errors="surrogatepass", closefd=False)
        sys.stdin = sys.__stdin__ = stdin  # type: ignore[misc]
        sys.stdout = sys.__stdout__ = stdout  # type: ignore[misc]
        self._streams = [stdout]

    def _value(self, request: dict[str, Any]) -> Any:
        names = self._space(request)
        if "call" in request:
            self._execute(f"{_VALUE} = (\n{request['call']}\n)", "<test>", names)
            arguments = request["arguments"]
            for position in request["integer_keys"]:
                arguments[position] = {int(k): each for k, each in arguments[position].items()}
            return names.pop(_VALUE)(*arguments)
        self._execute(f"{_VALUE} = (\n{request['value']}\n)", "<test>", names)
        value = names.pop(_VALUE)
        if "keep" in request:
            names[request["keep"]] = value
        return value

    def _space(self, request: dict[str, Any]) -> dict[str, Any]:
        if "space" not in request:
            return self._names
        names, taken_over = self._spaces.setdefault(request["space"], ({}, {}))
        for name, value in self._names.items():
            if names.get(name) is taken_over.get(name):  # the tests have not changed it
                names[name] = value
        taken_over.update(self._names)
        return names

    def _execute(
        self,
        source: str,
        name: str,
        names: dict[str, Any],
        *,
        exec: Any = exec,
        compile: Any = compile,
    ) -> None:
        self._values.module = self._names
        names.update(self._values.defined)
        exec(compile(source, name, "exec"), names)

    def _traceback(self, error: BaseException, *, format: Any = traceback.format_exception) -> str:
        """Return its traceback, without the frames of this file."""
        try:
            trace = error.__traceback__
            while trace and trace.tb_frame.f_code.co_filename == __file__:
                trace = trace.tb_next
            return "".join(format(type(error), error, trace))[:_MAX_TRACEBACK]
        except BaseException:
            return ""

    def _flush(self) -> None:
        for stream in (sys.stdout, sys.stderr, *self._streams):
            with contextlib.suppress(BaseException):
                stream.flush()


if __name__ == "__main__":
    with open(int(sys.argv[1]), "rb") as _requests:
        main(_requests, int(sys.argv[2]))
