"""Connections between the launchers of a job on several machines: none outlives another's failure.

Ranks whose peers on another machine have died usually wait for them, in gloo or NCCL, until
`--distributed-timeout-minutes` are over, and torchrun's static rendezvous does not inform
launchers that another has ended. Here node 0's launcher accepts a connection from each other
launcher for as long as it runs. A launcher that ends sends its exit code and the reason, and node
0 forwards them to all. A connection that breaks without a message means that a launcher or a
machine is gone.

Node 0's port, and a secret that admits only launchers of this job, are in torchrun's store, which
all launchers know.
"""

from __future__ import annotations

import contextlib
import json
import logging
import secrets
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from mcore_rl.common.readers import InvalidData, integer_within, parse_json

logger = logging.getLogger(__name__)

_KEY = "mcore_rl/companions"
_JOIN_SECONDS = 3600  # machines of a job may start long after each other
_TIE_SECONDS = 60
_MOST_NODES = 1 << 20
_MOST_BYTES = 1 << 16  # of a message, including its newline
_ADMIT_SECONDS = 60.0  # for a new connection to send the secret
# A machine that vanishes is detected after a minute: idle time, then three probes.
_KEEP_ALIVE = {
    socket.TCP_KEEPIDLE: 30,
    socket.TCP_KEEPINTVL: 10,
    socket.TCP_KEEPCNT: 3,
    socket.TCP_USER_TIMEOUT: 60_000,  # milliseconds, for sent data without acknowledgement
}


@dataclass(frozen=True, slots=True)
class Ended:
    """The end of another node's launcher; `sentence`, the reason, may be empty."""

    node: int
    host: str
    exit_code: int | None  # None: the connection broke without a message
    sentence: str = ""


class Companions:
    """This launcher's connections to other nodes' launchers. The first launcher to end with a
    non-zero exit code or without one is `failed`, and `on_failure` is called from a thread.

    `connect` makes a client of torchrun's store; it may wait until the store exists.
    """

    def __init__(
        self,
        node: int,
        num_nodes: int,
        address: str,
        connect: Callable[[], Any],
        on_failure: Callable[[], None],
    ) -> None:
        self.failed: Ended | None = None
        self._node, self._address, self._connect = node, address, connect
        self._num_nodes = num_nodes
        self._missing = num_nodes - 1 if node == 0 else 1
        self._complete = threading.Event()
        self._on_failure = on_failure
        self._lock = threading.Lock()
        self._tied: dict[socket.socket, Ended] = {}  # the peer, recorded as if it had broken off
        self._has_ended = False

    def start(self) -> None:
        """Connect in a thread, so that nothing waits for machines that are not started yet."""
        work = self._host if self._node == 0 else self._join
        threading.Thread(target=work, name="companions", daemon=True).start()

    def wait(self) -> None:
        """Return once this launcher is connected: to node 0 or, on node 0, to all others. The end
        of one is then known to all. After a minute, warn about missing connections and return."""
        if not self._complete.wait(_TIE_SECONDS):
            self._complete.set()
            logger.warning(
                "no connection between the launchers of node %d and %s: should one of them fail, "
                "the ranks of others wait for --distributed-timeout-minutes; let machines of a job "
                "reach each other on all ports",
                self._node,
                f"of {self._missing} other(s)" if self._node == 0 else "of node 0",
            )

    def end(self, exit_code: int, sentence: str) -> None:
        """Send the others how this launcher ends; their messages are ignored from now on."""
        with self._lock:
            self._has_ended = True
            tied = list(self._tied)
        self._tell(tied, Ended(self._node, socket.gethostname(), exit_code, sentence))
        for connection in tied:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_WR)

    # ---------------------------------------------------------------------------------- inside

    def _host(self) -> None:
        secret = secrets.token_hex(16)
        with _listening(self._address) as server:
            port = server.getsockname()[1]
            self._connect().set(_KEY, json.dumps([port, secret]).encode())
            while not self._has_ended:
                connection, _ = server.accept()
                threading.Thread(target=self._admit, args=(connection, secret), daemon=True).start()

    def _admit(self, connection: socket.socket, secret: str) -> None:
        """Listen to a peer that knows the secret; disconnect any other."""
        _keep_alive(connection)
        with contextlib.suppress(OSError), connection:
            connection.settimeout(_ADMIT_SECONDS)
            lines = _lines(connection)
            gone = self._introduced(next(lines, None), secret)
            if gone is not None:
                _send(connection, ["admitted"])
                connection.settimeout(None)
                self._hear(connection, lines, gone)

    def _introduced(self, said: Any, secret: str) -> Ended | None:
        """Return the peer as if it had broken off, or None if it is not a launcher of this job."""
        if not isinstance(said, list) or len(said) != 3:
            return None
        found, node, host = said
        if not isinstance(found, str) or not isinstance(host, str):
            return None
        if not secrets.compare_digest(found.encode(errors="replace"), secret.encode()):
            return None
        node = integer_within(node, 1, self._num_nodes - 1)
        return None if node is None else Ended(node, _shown(host), None)

    def _join(self) -> None:
        port, secret = json.loads(self._connect().get(_KEY))
        with socket.create_connection((self._address, port)) as connection:
            _keep_alive(connection)
            _send(connection, [secret, self._node, socket.gethostname()])
            lines = _lines(connection)
            if next(lines, None) is not None:  # admitted
                self._hear(connection, lines, Ended(0, self._address, None))

    def _hear(self, connection: socket.socket, lines: Iterator[Any], gone: Ended) -> None:
        """Wait for the peer's last message."""
        with self._lock:
            self._tied[connection] = gone
            self._missing -= 1
            if self._missing == 0:
                self._complete.set()
            failed = self.failed
        if failed is not None:  # before this peer connected
            self._tell([connection], failed)
        said = None
        with contextlib.suppress(OSError):
            said = next(lines, None)
        ended = _ended(said) or gone  # an invalid message only shows that the peer is gone
        with self._lock:
            del self._tied[connection]
            if self._has_ended or self.failed is not None or ended.exit_code == 0:
                return
            self.failed, others = ended, list(self._tied)
        self._tell(others, ended)
        self._on_failure()

    @staticmethod
    def _tell(connections: list[socket.socket], ended: Ended) -> None:
        for connection in connections:
            with contextlib.suppress(OSError):
                _send(connection, [ended.node, ended.host, ended.exit_code, ended.sentence])


def store_client(address: str, port: int) -> Any:
    """Return a client of torchrun's store on node 0, once the store exists."""
    from torch.distributed import TCPStore

    return TCPStore(
        address,
        port,
        is_master=False,
        wait_for_workers=False,
        timeout=timedelta(seconds=_JOIN_SECONDS),
    )


def _listening(address: str) -> socket.socket:
    """Listen on `address`, or on all addresses if the machine does not own it (as behind NAT)."""
    family, _, _, _, place = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0]
    try:
        return socket.create_server(place, family=family)
    except OSError:
        return socket.create_server(("", 0))


def _keep_alive(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEP_ALIVE.items():
        connection.setsockopt(socket.IPPROTO_TCP, option, value)


def _send(connection: socket.socket, values: list[Any]) -> None:
    connection.sendall(json.dumps(values).encode() + b"\n")


def _lines(connection: socket.socket) -> Iterator[Any]:
    """Yield the messages of a connection, up to its end or the first line that is not JSON."""
    with connection.makefile("rb") as file, contextlib.suppress(InvalidData):
        while line := file.readline(_MOST_BYTES):
            yield parse_json(line)


def _ended(said: Any) -> Ended | None:
    """Parse a message of `Companions._tell`; None if it is not valid."""
    if not isinstance(said, list) or len(said) != 4:
        return None
    node, host, exit_code, sentence = said
    texts = isinstance(host, str) and isinstance(sentence, str)
    if integer_within(node, 0, _MOST_NODES) is None or not texts:
        return None
    if exit_code is not None and integer_within(exit_code, -255, 255) is None:
        return None
    return Ended(node, _shown(host), exit_code, _shown(sentence))


def _shown(text: str) -> str:
    """Replace the characters that a log cannot hold."""
    return text.encode(errors="replace").decode()
