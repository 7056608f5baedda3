"""What a lost or stuck peer leaves behind, with stand-ins for streams and NCCL."""

from __future__ import annotations

import threading
from unittest.mock import MagicMock

import pytest
import torch
import torch.distributed as dist

from mcore_rl.hybrid_engine.plan.trees import Leg, Tree
from mcore_rl.hybrid_engine.transfer.transport import Call, Flight, Transport
from mcore_rl.hybrid_engine.transfer.worlds import JoinedWorld, PeerFailure
from tests.cuda.standins import CudaOnMeta

TREE = Tree(0, (1,), ((Leg(0, (1,)),),))


class Nccl(threading.local):
    """NCCL counts open group calls by thread; torch leaves one open if an operation fails."""

    open_groups = 0
    peer_is_lost = False

    def batch(self, operations: list[object]) -> list[dist.Work]:
        assert not self.open_groups, "this call would never start"
        self.open_groups += 1
        if Nccl.peer_is_lost:
            raise RuntimeError("remote process exited")
        self.open_groups -= 1
        return []


def test_a_lost_peer_leaves_no_group_call_open_in_the_callers_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    nccl = Nccl()
    for name in ("Stream", "Event", "stream", "current_stream", "set_device"):
        monkeypatch.setattr(torch.cuda, name, MagicMock())
    for name in ("P2POp", "all_reduce"):
        monkeypatch.setattr(dist, name, MagicMock())
    monkeypatch.setattr(dist, "batch_isend_irecv", nccl.batch)
    world = MagicMock(rank=0, size=2, lost=lambda error: error)
    with CudaOnMeta():
        transport = Transport([TREE], None, world, torch.device("cuda"))
    calls = [Call(TREE, torch.zeros(4, dtype=torch.uint8))]
    transport.start(calls).wait()
    monkeypatch.setattr(Nccl, "peer_is_lost", True)
    with pytest.raises(RuntimeError, match="remote process exited"):
        transport.start(calls)
    assert not nccl.open_groups
    transport.stop_thread()
    monkeypatch.setattr(Nccl, "peer_is_lost", False)
    transport.start(calls).wait()
    transport.stop_thread()


def test_messages_that_are_never_launched_end_with_the_worlds_timeout() -> None:
    """A peer that is alive and stuck: the sentence names it, and other ranks read it."""
    store = dist.HashStore()
    world = JoinedWorld(store, rank=0, size=1, name="stuck", timeout_seconds=0.5)
    blocked = threading.Event()
    flight = Flight([lambda: [MagicMock(wait=blocked.wait)]], world, "messages did not end")
    threading.Thread(target=flight.run, daemon=True).start()
    with pytest.raises(PeerFailure, match="^rank 0: messages did not end within 0.5 s$"):
        flight.wait()
    blocked.set()


def test_messages_are_named_by_their_ranks() -> None:
    waited: list[str] = []
    world = MagicMock(rank=0, size=2, poll=lambda since, what: waited.append(what))
    transport = Transport([TREE], {frozenset((0, 1)): MagicMock()}, world, torch.device("cpu"))
    blocked = threading.Event()
    transport._works = lambda calls, hop: [MagicMock(wait=blocked.wait)]  # type: ignore
    flight = transport.start([Call(TREE, torch.zeros(4, dtype=torch.uint8))])
    threading.Timer(0.6, blocked.set).start()
    flight.wait()
    transport.stop_thread()
    assert waited and set(waited) == {"messages from or to ranks 1 did not end"}
