"""A session whose last worker ends during the comparison of an update."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from mcore_rl.hybrid_engine.proof.attest import FULL
from mcore_rl.hybrid_engine.remote.session import Session
from mcore_rl.hybrid_engine.transfer.worlds import JoinedWorld, reach_store
from mcore_rl.model.tensors import TensorInfo

_TENSOR, _BOX = "weight", ((0, 8),)
_TIMEOUT = 300.0
_kept: list[Any] = []


def worker_ends() -> str:
    """Two trainers update two workers, the second of which ends. Return what a rank is told."""
    rank, store = int(os.environ["RANK"]), _store()
    session = _session(store, rank, "ends")
    if rank == 3:
        assert session._attestor is not None
        session._attestor.finish = lambda: os._exit(3)  # type: ignore[method-assign,assignment]
    told = _updated(session, rank)
    _meet(store, rank, 3, "again")  # for the end of a process closes its sockets
    return told


def worker_hangs() -> list[str]:
    """Two trainers update two workers, the second of which hangs, and then continues. Rank 0 is
    told so by `check`. Return what a rank is told for each part of an update."""
    rank, store, told = int(os.environ["RANK"]), _store(), []
    for part in ("wait", "finish"):  # before the stream, and after it
        session = _session(store, rank, part)
        if rank == 0:
            session._world.check = _Check()
        if rank == 3:
            of_attestor = getattr(session._attestor, part)

            def hang(name: str = part, go_on: Any = of_attestor) -> Any:
                store.get(f"{name}/others have gone on")
                return go_on()

            setattr(session._attestor, part, hang)
        told.append(_updated(session, rank))
        if rank < 3:
            _meet(store, rank, 3, f"{part}, others")  # they do not wait for the one that hangs
            store.set(f"{part}/others have gone on", "")
        _meet(store, rank, 4, f"{part}, all")
    return told


class _Check:
    """Finds a server that does not answer at its third call: not before the messages."""

    num_calls = 0

    def __call__(self) -> None:
        self.num_calls += 1
        if self.num_calls > 2:
            raise RuntimeError("http://b does not answer")


def _session(store: dist.Store, rank: int, name: str) -> Session:
    """Return a rank's session: two trainers, then two workers."""
    world = JoinedWorld(store, rank=rank, size=4, name=name, timeout_seconds=_TIMEOUT)
    trains = rank < 2
    return Session(
        world,
        bucket_bytes=1 << 20,
        device="cpu",
        tensors={_TENSOR: TensorInfo((8,), "float32", 4)} if trains else None,
        have={_TENSOR: (_BOX,)} if trains else None,
        learn=None if trains else lambda _: {_TENSOR: (_BOX,)},
        attest=FULL,
    )


def _updated(session: Session, rank: int) -> str:
    """Return what a rank is told by an update."""
    trains = rank < 2
    try:
        session.update(
            "1",
            plan_id=session.plan_id,
            read=(lambda *_: torch.arange(8.0)) if trains else None,
            load=None if trains else _load,
        )
    except RuntimeError as error:
        return str(error)
    return "no error"


def _store() -> dist.Store:
    """Return the store of the job's ranks, which outlives them."""
    return reach_store("127.0.0.1", int(os.environ["MASTER_PORT"]), _TIMEOUT)


def _meet(store: dist.Store, rank: int, size: int, name: str) -> None:
    """Return when all ranks have called this."""
    world = JoinedWorld(store, rank=rank, size=size, name=name, timeout_seconds=_TIMEOUT)
    world.exchange(None)
    world.close()


class _Kernels:
    """An event of a device that passes it after `num_queries`; -1: never."""

    def __init__(self, num_queries: int) -> None:
        self._left = num_queries

    def query(self) -> bool:
        self._left -= 1
        return self._left == -1


def waits_for_kernels() -> list[str]:
    """What ends rank 0's wait for messages on its device: their end, a failed call, a lost rank."""
    rank, told = int(os.environ["RANK"]), []
    store = _store()

    def fail() -> None:
        raise RuntimeError("the server refused the call")

    for name in ("ends", "call", "rank"):
        world = JoinedWorld(store, rank=rank, size=2, name=name, timeout_seconds=_TIMEOUT)
        world.meet()
        if rank == 1:
            if name == "rank":
                world.fail("its loader failed")
            _meet(store, 1, 2, f"{name}, told")
            continue
        world.check = fail if name == "call" else world.check
        try:
            world.synchronize(_Kernels(3 if name == "ends" else -1))  # type: ignore[arg-type]
            told.append("no error")
        except RuntimeError as error:
            told.append(str(error))
        _meet(store, 0, 2, f"{name}, told")
    return told


def _load(arriving: Iterator[tuple[str, Any]], on_write: Any) -> None:
    _kept.append(on_write)  # as a circle of references may do in an engine
    for name, pieces in arriving:
        for box, data in pieces:
            on_write(name, box, data)
