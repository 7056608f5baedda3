"""A session whose last worker ends during the comparison of an update."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist

from mcore_rl.hybrid_engine.remote.session import Session
from mcore_rl.hybrid_engine.transfer.worlds import JoinedWorld, reach_store
from mcore_rl.hybrid_engine.vllm.sliced_tensor import Pieces
from mcore_rl.model.boxes import Box, slices
from tests.dist.small_session import Engine, Shards, attestor_of, session

_BOX = ((0, 8),)
_TIMEOUT = 300.0
_kept: list[Any] = []


def worker_ends() -> str:
    """Two trainers update two workers, the second of which ends. Return what a rank is told."""
    rank, store = int(os.environ["RANK"]), _store()
    of_rank = _session(store, rank, "ends")
    if rank == 3:
        attestor_of(of_rank).finish = lambda _: os._exit(3)
    told = _updated(of_rank)
    _meet(store, rank, 3, "again")  # for the end of a process closes its sockets
    return told


def worker_hangs() -> list[str]:
    """Two trainers update two workers, the second of which hangs, and then continues. Rank 0 is
    told so by `check`. Return what a rank is told for each part of an update."""
    rank, store, told = int(os.environ["RANK"]), _store(), []
    for part in ("wait", "finish"):  # before the stream, and after it
        of_rank = _session(store, rank, part)
        if rank == 0:
            of_rank._world.check = _Check()
        if rank == 3:
            attestor = attestor_of(of_rank)
            of_attestor = getattr(attestor, part)

            def hang(*given: Any, name: str = part, go_on: Any = of_attestor) -> Any:
                store.get(f"{name}/others have gone on")
                return go_on(*given)

            setattr(attestor, part, hang)
        told.append(_updated(of_rank))
        if rank < 3:
            _meet(store, rank, 3, f"{part}, others")  # they do not wait for the one that hangs
            store.set(f"{part}/others have gone on", "")
        _meet(store, rank, 4, f"{part}, all")
    return told


def sends_changes() -> dict[str, Any]:
    """Two trainers update two workers by delta in bfloat16: all, nothing, then one row. Return the
    bytes that this rank received each time, and the last values of the tensor."""
    rank, size, rows = int(os.environ["RANK"]), 1 << 16, 1024
    store, values = _store(), torch.arange(size).view(rows, -1) % 256 / 16
    half = ((rank * rows // 2, (rank + 1) * rows // 2), (0, size // rows))
    loaded = torch.zeros(rows, size // rows, dtype=torch.bfloat16)

    def read(_: str, box: Box, at: Any = ...) -> torch.Tensor:
        return values[slices(box)][at]

    def load(name: str, pieces: Pieces, on_write: Any) -> None:
        for box, data in pieces:
            loaded[slices(box)] = data
            on_write(name, box, loaded[slices(box)])

    world = JoinedWorld(store, rank=rank, size=4, name="delta", timeout_seconds=_TIMEOUT)
    of_rank = session(
        world,
        tuple(values.shape),
        shards=Shards([half], read) if rank < 2 else None,
        engine=None if rank < 2 else Engine(((0, rows), (0, size // rows)), load),
        dtype="bf16",
        delta=True,
    )
    received = []
    for version in ("1", "2", "3"):
        if version == "3":
            values[17] += 1
        report = of_rank.update(version, plan_id=of_rank.plan_id)
        received.append(report.received_bytes[rank])
    of_rank.close()
    equal = torch.equal(loaded, values.bfloat16())
    return {"received": received, "equal": equal, "needed": report.needed_bytes[rank]}


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
    return session(
        world,
        (8,),
        shards=Shards([_BOX], lambda *_: torch.arange(8.0)) if trains else None,
        engine=None if trains else Engine(_BOX, _load),
    )


def _updated(of_rank: Session) -> str:
    """Return what a rank is told by an update."""
    try:
        of_rank.update("1", plan_id=of_rank.plan_id)
    except RuntimeError as error:
        return str(error)
    return "no error"


def _store() -> dist.Store:
    """Return the store of the job's ranks, which outlives them."""
    return reach_store("127.0.0.1", int(os.environ["MASTER_PORT"]), _TIMEOUT)


def _meet(store: dist.Store, rank: int, size: int, name: str) -> None:
    """Return when all ranks have called this."""
    world = JoinedWorld(store, rank=rank, size=size, name=name, timeout_seconds=_TIMEOUT)
    world.gather(None, of=None)
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


def _load(name: str, pieces: Pieces, on_write: Any) -> None:
    _kept.append(on_write)  # as a circle of references may do in an engine
    for box, data in pieces:
        on_write(name, box, data)
