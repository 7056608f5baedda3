"""What launchers of several machines take of each other's messages, over local sockets."""

from __future__ import annotations

import contextlib
import json
import socket
from typing import Any

import pytest
from hypothesis import given

from mcore_rl.common.companions import Companions, Ended
from tests import hostile

SECRET = "0123abcd"
HELLO = [SECRET, 1, "node-1"]
GOODBYE = [1, "node-1", 2, "it has ended"]


def admitted(*sent: bytes) -> tuple[Companions, list[Any]]:
    """Node 0 of three after somebody has sent this and hung up, and what it has answered."""
    failures: list[str] = []
    node = Companions(0, 3, "127.0.0.1", lambda: None, lambda: failures.append("failed"))
    theirs, ours = socket.socketpair()
    with theirs:
        # The buffer of a pair of sockets holds it, so that one thread is enough.
        theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
        theirs.sendall(b"".join(sent))
        theirs.shutdown(socket.SHUT_WR)
        node._admit(_Quiet(ours.detach()), SECRET)
        answers = []
        with contextlib.suppress(ConnectionResetError):  # it hung up before it had read all
            answers += [json.loads(line) for line in theirs.makefile("rb")]
    assert failures == (["failed"] if node.failed else [])
    return node, answers


class _Quiet(socket.socket):
    """Without the options of TCP, which a pair of local sockets does not have."""

    def __init__(self, descriptor: int) -> None:
        super().__init__(fileno=descriptor)

    def setsockopt(self, *_: Any) -> None:
        pass


def line(value: Any) -> bytes:
    return json.dumps(value).encode() + b"\n"


def test_who_knows_the_secret_is_heard_to_its_end():
    node, answers = admitted(line(HELLO), line(GOODBYE))
    assert answers == [["admitted"]] and node.failed == Ended(1, "node-1", 2, "it has ended")
    assert admitted(line(HELLO), line([1, "node-1", 0, ""]))[0].failed is None


@pytest.mark.parametrize(
    "goodbye",
    [b"", b"{", b"[]", b"7", b"[" * 60_000, b'[1, "node-1", 1e999, ""]', b'[1, "n", "0", ""]']
    + [b'[1, "n", 0, "", 5]', b'{"a": 1, "b": 2, "c": 3, "d": 4}', b"[1, 2, 0, 4]", b"\xff"],
)
def test_last_words_that_make_no_sense_are_those_of_a_launcher_that_is_gone(goodbye):
    assert admitted(line(HELLO), goodbye + b"\n")[0].failed == Ended(1, "node-1", None)


@pytest.mark.parametrize(
    "hello",
    [["wrong", 1, "n"], [SECRET, 0, "n"], [SECRET, 3, "n"], [SECRET, True, "n"], [SECRET, 1, None]]
    + [[SECRET, 10**400, "n"], [SECRET, float("inf"), "n"], ["\ud800", 1, "n"], [SECRET, 1], 5],
)
def test_who_cannot_introduce_itself_is_sent_away(hello):
    node, answers = admitted(line(hello), line(GOODBYE))
    assert answers == [] and node.failed is None and node._missing == 2


@hostile.BOUNDED
@given(hostile.messages(HELLO), hostile.messages(GOODBYE))
def test_any_words_leave_a_launcher_that_is_heard_gone_or_sent_away(hello, goodbye):
    node, answers = admitted(hello[:60_000] + b"\n", goodbye[:60_000] + b"\n")
    assert answers in ([], [["admitted"]])
    assert not node._tied and node._missing == 2 - len(answers)
    assert answers or node.failed is None
    if node.failed is not None:
        f"{node.failed.node:d} {node.failed.host} {node.failed.sentence}".encode()
        assert node.failed.exit_code is None or -256 < node.failed.exit_code < 256
