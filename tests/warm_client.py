"""Stands in for Python: `python ARGUMENTS` in a fork of a process that has imported what it needs.

tests/warm_python.py copies this file, executable, beside the socket of that process, and says what
is different from a new Python. This program passes on its arguments, its environment, its working
directory, its standard streams and the signals that it gets, and ends as the fork does. Where the
fork cannot stand in, this program becomes a real Python. It imports little, since it is started for
each process.
"""

import json
import os
import signal
import socket
import sys
from collections.abc import Iterator

PASSED_ON = {
    getattr(signal, f"SIG{name}") for name in "HUP INT QUIT TERM USR1 USR2 ALRM CONT".split()
}


def ask(environment: dict[str, str]) -> Iterator[str]:
    """The lines that answer the request for a fork."""
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(os.path.join(os.path.dirname(__file__), "socket"))
    request = {
        "arguments": sys.argv[1:],
        # The ranks of a launcher, too.
        "environment": {"PYTHON_EXEC": os.path.abspath(__file__), **environment},
        "folder": os.getcwd(),
    }
    data = json.dumps(request).encode()
    connection.sendall(b"%d\n" % len(data))
    sent = socket.send_fds(connection, [data], [0, 1, 2])
    connection.sendall(data[sent:])
    return connection.makefile()


def main() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, PASSED_ON)  # until the fork exists
    environment = dict(os.environ)
    try:
        answers = ask(environment)
        pid = int(next(answers, "0"))
    except OSError:  # the server is gone, or a stream is closed
        pid = 0
    if not pid:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, PASSED_ON)
        os.execve(sys.executable, [sys.executable, *sys.argv[1:]], environment)

    for number in PASSED_ON:
        signal.signal(number, lambda number, _: os.kill(pid, number))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, PASSED_ON)
    code = int(next(answers, -signal.SIGKILL))
    if code < 0:
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


if __name__ == "__main__":
    main()
