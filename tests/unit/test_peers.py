"""Messages between launchers of several machines, over local sockets."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from typing import Any

import pytest
import torch.distributed as dist
from hypothesis import given

from mcore_rl.launch import peers
from mcore_rl.launch.peers import NodeExit, Peers
from tests import hostile

SECRET = "0123abcd"
HELLO = [SECRET, 1, "node-1"]
GOODBYE = [1, "node-1", 2, "it has ended"]


def line(value: Any) -> bytes:
    return json.dumps(value).encode() + b"\n"


class Listener:
    """Node 0 of three, and the connection of a client that has sent a greeting."""

    def __init__(self, hello: bytes) -> None:
        self._failed = threading.Event()
        self.node = Peers(0, 3, self._failed.set)
        with socket.create_server(("127.0.0.1", 0)) as server:
            self._client = socket.create_connection(server.getsockname(), timeout=60)
            ours, _ = server.accept()
        self._client.sendall(hello)
        self.node.admit(ours, SECRET)

    def failure_after(self, goodbye: bytes) -> NodeExit | None:
        """The failure that node 0 sees once the client has sent this and hung up."""
        with contextlib.suppress(OSError):  # it was sent away
            self._client.sendall(goodbye)
            self._client.shutdown(socket.SHUT_WR)
        self.node.watch()
        assert self._failed.is_set() == (self.node.failed is not None)
        return self.node.failed

    def answers(self) -> list[Any]:
        """What node 0 has answered, once the client has hung up."""
        found = []
        with contextlib.suppress(OSError), self._client.makefile("rb") as file:
            self._client.shutdown(socket.SHUT_WR)
            for answer in file:
                found.append(json.loads(answer))
                if found == [["admitted"]]:
                    break  # it stays connected
        return found

    def close(self) -> None:
        self._client.close()


@pytest.fixture
def admitted():
    with contextlib.closing(Listener(line(HELLO))) as listener:
        yield listener


def test_admitted_peer_reports_exit(admitted):
    assert admitted.failure_after(line(GOODBYE)) == NodeExit(1, "node-1", 2, "it has ended")


def test_exit_of_peer_with_0_is_not_a_failure(admitted):
    assert admitted.failure_after(line([1, "node-1", 0, ""])) is None


@pytest.mark.parametrize(
    "goodbye",
    [b"", b"{", b"[]", b"7", b"[" * 60_000, b'[1, "node-1", 1e999, ""]', b'[1, "n", "0", ""]']
    + [b'[1, "n", 0, "", 5]', b'{"a": 1, "b": 2, "c": 3, "d": 4}', b"[1, 2, 0, 4]", b"\xff"],
)
def test_invalid_message_counts_as_lost_launcher(goodbye, admitted):
    assert admitted.failure_after(goodbye + b"\n") == NodeExit(1, "node-1", None)


@pytest.mark.parametrize(
    "hello",
    [["wrong", 1, "n"], [SECRET, 0, "n"], [SECRET, 3, "n"], [SECRET, True, "n"], [SECRET, 1, None]]
    + [[SECRET, 10**400, "n"], [SECRET, float("inf"), "n"], ["\ud800", 1, "n"], [SECRET, 1], 5],
)
def test_invalid_greeting_is_rejected(hello):
    with contextlib.closing(Listener(line(hello))) as listener:
        assert listener.answers() == []
        assert listener.failure_after(line(GOODBYE)) is None


@hostile.BOUNDED
@given(hostile.messages(HELLO), hostile.messages(GOODBYE))
def test_any_message_is_failure_of_peer_or_rejected(hello, goodbye):
    with contextlib.closing(Listener(hello[:60_000] + b"\n")) as listener:
        failed = listener.failure_after(goodbye[:60_000] + b"\n")
        assert failed is None or listener.answers() == [["admitted"]]
        assert failed is None or failed.exit_code is None or -256 < failed.exit_code < 256


def test_strangers_do_not_block_peers(monkeypatch):
    """One sends nothing, one lacks the secret; afterwards no connection is accepted."""
    monkeypatch.setattr(peers, "MESSAGE_SECONDS", 0.5)
    store = dist.HashStore()
    nodes = [Peers(rank, 2, lambda: None) for rank in range(2)]
    host = threading.Thread(target=nodes[0].connect, args=(store, "127.0.0.1"))
    host.start()
    address = "127.0.0.1", json.loads(store.get(peers.STORE_KEY))[0]
    with socket.create_connection(address), socket.create_connection(address) as liar:
        liar.sendall(line([SECRET, 1, "elsewhere"]) + line(GOODBYE))
        nodes[1].connect(store, "127.0.0.1")
        host.join()
        assert not nodes[0].failed and not nodes[1].failed
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(address)
    nodes[1].end(7, "a bug")
    while nodes[0].failed is None:
        pass
    assert nodes[0].failed.exit_code == 7 and nodes[0].failed.sentence == "a bug"


def test_missing_peers_cause_warning(monkeypatch, caplog):
    monkeypatch.setattr(peers, "CONNECT_SECONDS", 0.1)
    Peers(0, 3, lambda: None).connect(dist.HashStore(), "127.0.0.1")
    assert "2 other(s)" in caplog.text and "reach each other on all ports" in caplog.text
