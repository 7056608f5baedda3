"""Connections between the launchers of a job on several machines: none outlives another's failure.

Ranks whose peers on another machine have died usually wait for them until
`--distributed-timeout-minutes` are over, and torchrun's static rendezvous does not tell launchers
that another has ended. So each launcher keeps a connection to that of node 0. One that ends sends
its exit code and the reason, and node 0 forwards the first failure to all. A connection that breaks
without a message means that a launcher or a machine is gone.

    a launcher ─── its end, or a lost connection ───► node 0's ─── a failure ───► all others

Launchers connect after torchrun's rendezvous, before they start their ranks. Its store has node 0's
port, and a secret that admits only launchers of this job.
"""

from __future__ import annotations

import contextlib
import json
import logging
import secrets
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import wait
from typing import Any

from torch.distributed import DistError, Store, TCPStore

from mcore_rl.common.readers import InvalidData, integer_within, parse_json

logger = logging.getLogger(__name__)

STORE_KEY = "mcore_rl/peers"
CONNECT_SECONDS = 60.0
MESSAGE_SECONDS = 5.0
_MAX_NODES = 1 << 20
_MAX_BYTES = 1 << 16  # of a message, including its newline
_ADMITTED = ["admitted"]
# A machine that vanishes is detected after a minute: idle time, then three probes.
_KEEP_ALIVE = {
    socket.TCP_KEEPIDLE: 30,
    socket.TCP_KEEPINTVL: 10,
    socket.TCP_KEEPCNT: 3,
    socket.TCP_USER_TIMEOUT: 60_000,  # milliseconds, for sent data without acknowledgement
}


@dataclass(frozen=True, slots=True)
class NodeExit:
    """The end of another node's launcher, as `NodeExit(1, "node7", 1, "rank 9: a bug")`."""

    node: int
    host: str
    exit_code: int | None  # None: the connection broke without a message
    sentence: str = ""  # the reason


class Peers:
    """This launcher's connections to other nodes' launchers.

    The first launcher that ends with a non-zero exit code or without one is `failed`. Then
    `on_failure` is called, in a thread.
    """

    def __init__(self, node: int, num_nodes: int, on_failure: Callable[[], None]) -> None:
        self.failed: NodeExit | None = None
        self._node, self._num_nodes = node, num_nodes
        self._on_failure = on_failure
        # Peer -> its end if the connection breaks.
        self._peers: dict[socket.socket, NodeExit] = {}

    def connect(self, store: Store, address: str) -> None:
        """Connect to node 0's `address`; on node 0, to all others. Waits for them for a minute.

        The end of one is then known to all. Missing connections cause a warning.
        """
        with contextlib.suppress(OSError, DistError):
            if self._node == 0:
                self._accept(store, address)
            else:
                self._join(store, address)
        if missing := (self._num_nodes - 1 if self._node == 0 else 1) - len(self._peers):
            logger.warning(
                "no connection between the launchers of node %d and %s: should one of them fail, "
                "the ranks of others wait for --distributed-timeout-minutes; let machines of a job "
                "reach each other on all ports",
                self._node,
                f"of {missing} other(s)" if self._node == 0 else "of node 0",
            )
        threading.Thread(target=self.watch, name="peers", daemon=True).start()

    def end(self, exit_code: int, sentence: str) -> None:
        """Send the others how this launcher ends."""
        self._send(NodeExit(self._node, socket.gethostname(), exit_code, sentence))

    def _accept(self, store: Store, address: str) -> None:
        secret, deadline = secrets.token_hex(16), time.monotonic() + CONNECT_SECONDS
        with _listening(address) as server:
            store.set(STORE_KEY, json.dumps([server.getsockname()[1], secret]))
            while len(self._peers) < self._num_nodes - 1:
                server.settimeout(max(0.0, deadline - time.monotonic()))
                self.admit(server.accept()[0], secret)

    def admit(self, connection: socket.socket, secret: str) -> None:
        """Keep the connection of a peer that knows the secret; close any other."""
        with contextlib.suppress(OSError):
            peer = _peer_of(_received(connection, MESSAGE_SECONDS), secret, self._num_nodes)
            if peer is not None:
                _send(connection, _ADMITTED)
                _keep_alive(connection)
                self._peers[connection] = peer
                return
        connection.close()

    def _join(self, store: Store, address: str) -> None:
        port, secret = json.loads(store.get(STORE_KEY))
        connection = socket.create_connection((address, port), timeout=CONNECT_SECONDS)
        _send(connection, [secret, self._node, socket.gethostname()])
        if _received(connection, CONNECT_SECONDS) == _ADMITTED:
            _keep_alive(connection)
            self._peers[connection] = NodeExit(0, address, None)

    def watch(self) -> None:
        """Wait until a peer fails, and tell the others; or until all have ended without failure."""
        running = dict(self._peers)
        while running:
            for connection in wait(list(running)):
                assert isinstance(connection, socket.socket)
                gone = running.pop(connection)
                with contextlib.suppress(OSError):
                    gone = _exit_of(_received(connection, MESSAGE_SECONDS)) or gone
                if gone.exit_code != 0:
                    self.failed = gone
                    self._send(gone)
                    self._on_failure()
                    return

    def _send(self, ended: NodeExit) -> None:
        for connection in self._peers:
            with contextlib.suppress(OSError):
                _send(connection, [ended.node, ended.host, ended.exit_code, ended.sentence])


def store_client(address: str, port: int) -> TCPStore:
    """Return a client of torchrun's store on node 0, which must exist."""
    timeout = timedelta(seconds=CONNECT_SECONDS)
    return TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=timeout)


def _listening(address: str) -> socket.socket:
    """Listen on `address`, or on all addresses if the machine does not own it (as behind NAT)."""
    family, _, _, _, place = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0]
    try:
        return socket.create_server(place, family=family)
    except OSError:
        return socket.create_server(("", 0))


def _keep_alive(connection: socket.socket) -> None:
    connection.settimeout(None)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEP_ALIVE.items():
        connection.setsockopt(socket.IPPROTO_TCP, option, value)


def _send(connection: socket.socket, values: list[Any]) -> None:
    connection.sendall(json.dumps(values).encode() + b"\n")


def _received(connection: socket.socket, seconds: float) -> Any:
    """Return the next message; None for one that is not JSON, and at the connection's end.

    Raises OSError if the connection breaks or the message is not complete after `seconds`.
    """
    line, deadline = b"", time.monotonic() + seconds
    while not line.endswith(b"\n") and len(line) < _MAX_BYTES:
        connection.settimeout(max(0.001, deadline - time.monotonic()))
        if not (byte := connection.recv(1)):  # not more: the next message has its own reader
            break
        line += byte
    try:
        return parse_json(line)
    except InvalidData:
        return None


def _peer_of(message: Any, secret: str, num_nodes: int) -> NodeExit | None:
    """Return the peer as if it had broken off, or None if it is not a launcher of this job."""
    match message:
        case [str() as found, node, str() as host]:
            is_known = secrets.compare_digest(found.encode(errors="replace"), secret.encode())
            if is_known and integer_within(node, 1, num_nodes - 1) is not None:
                return NodeExit(node, host, None)
    return None


def _exit_of(message: Any) -> NodeExit | None:
    """Return the end that a message reports; None if it is not valid."""
    match message:
        case [node, str() as host, code, str() as sentence]:
            has_code = code is None or integer_within(code, -255, 255) is not None
            if has_code and integer_within(node, 0, _MAX_NODES) is not None:
                return NodeExit(node, host, code, sentence)
    return None
