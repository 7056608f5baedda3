"""Execution of a plan over torch.distributed, bucket by bucket, while the caller works.

The plan is cut into rounds of messages (see `buckets`), the same on all ranks; a rank takes part in
some of them. Buffers rotate: while the caller works on one bucket, the next travels in another.
Together they never exceed `bucket_bytes`, whatever the largest tensor. With `delta` only changes
since the last version travel (see `delta`). A third buffer then rotates, because the sizes of
messages travel one bucket further ahead, so that no rank waits for them.

All ranks start their messages in one order (`buckets.steps`), and a rank waits for a message only
after it has started all earlier ones. `wire.Wire` explains why this cannot deadlock.

Bytes are counted on this rank, at the calls.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping
from functools import cached_property

import torch

from mcore_rl.hybrid_engine.plan.buckets import Route, frame_of, make_route, slot_bytes
from mcore_rl.hybrid_engine.plan.moves import Plan, TensorInfo
from mcore_rl.hybrid_engine.plan.trees import Connections
from mcore_rl.hybrid_engine.transfer.running import Copies, Pieces, ReadSlice, Run, TransferStats
from mcore_rl.hybrid_engine.transfer.wire import Groups, Wire
from mcore_rl.hybrid_engine.transfer.worlds import DefaultWorld, World

__all__ = ["Pieces", "ReadSlice", "Transfer", "TransferStats"]


class Transfer:
    """One plan, ready to run any number of times.

    Constructing it is collective (it may create a process group), and so are `stream` and `close`.
    The plan's ranks are ranks of `world`, by default the job's. `groups` maps sets of ranks to
    existing process groups over them, the same sets on all ranks; the plan may broadcast only in
    these. Messages are built on `device`; on the CPU they travel over gloo, whatever the job's
    backend is. `bucket_bytes` caps what this rank has in flight, all buffers together; UsageError
    if a buffer does not hold one element. `keep_buffers` keeps the buffers between runs instead of
    freeing them for training.

    With `delta`, an unchanged message costs 8 bytes, and changes arrive bit for bit. Each rank then
    keeps a copy of all it sends and receives in host memory. Messages that are built on a device
    are compared there; each one's copy is brought to the device for it. Everything travels in the
    first run, in every `full_every`th run after a full one, after `invalidate`, and after a run
    that failed on any rank.
    """

    def __init__(
        self,
        plan: Plan,
        tensors: Mapping[str, TensorInfo],
        *,
        bucket_bytes: int,
        groups: Groups | None = None,
        world: World | None = None,
        device: torch.device | str,
        delta: bool = False,
        full_every: int = 50,
        keep_buffers: bool = False,
    ) -> None:
        assert full_every >= 1, f"full_every is {full_every}"
        self._plan, self._tensors = plan, tensors
        self._device = torch.device(device)
        world = world or DefaultWorld(self._device)
        self._rank = world.rank
        self._num_buffers = 3 if delta else 2
        itemsizes = {name: tensors[name].itemsize for name in {m.tensor for m in plan.moves}}
        self._frame = frame_of(itemsizes, with_delta=delta)
        self._share = slot_bytes(bucket_bytes, self._num_buffers, self._frame)
        self._wire = Wire((move.tree for move in plan.moves), groups, world, self._device)
        self.num_groups = self._wire.num_groups  # created here, the same on all ranks
        self._copies = Copies(full_every, self._device) if delta else None
        self._keep_buffers = keep_buffers
        self._buffers: list[torch.Tensor] = []
        self._running: Iterator[tuple[int, dict[str, Pieces]]] | None = None
        self.stats = TransferStats()

    @cached_property
    def _route(self) -> Route:
        """This rank's part in the plan, computed before the first run."""
        return make_route(self._plan, self._tensors, self._rank, self._share, self._frame)

    @property
    def connections(self) -> Connections:
        """The given groups that this rank has used so far, and its point-to-point peers."""
        return self._wire.connections

    def close(self) -> None:
        """Free buffers, copies and the process groups that this transfer created. Collective."""
        self._wire.close()
        self._buffers.clear()
        if self._copies is not None:
            self._copies = Copies(self._copies.full_every, self._device)

    def invalidate(self) -> None:
        """Discard this rank's copies: the next run transfers everything. Not collective.

        Has no effect without delta.
        """
        if self._copies is not None:
            self._copies.invalidate()

    def stream(
        self, read: ReadSlice, *, partial: bool = False, keep: bool = True
    ) -> Generator[tuple[str, Pieces], None, None]:
        """Yield (tensor, pieces of it that this rank received), in the plan's order. Collective.

        `read(tensor, box)` returns the values of a box that this rank holds, in the tensor's dtype.
        Tensors that this rank does not receive are not yielded.

        With `keep` the caller owns the data. Without, they are valid until it requests the next
        item, and must not be written to. A tensor is yielded when its last piece has arrived;
        pieces from earlier buckets are copied to wait for it. With `partial` it is yielded once for
        every bucket that contains pieces of it, each time with only those pieces. With `partial`
        and without `keep`, nothing beyond the bucket is held.

        The other ranks wait for what this one sends. A caller that stops early must close the
        iterator or call `drain`: both take part in the rest and discard it. If `read` fails, the
        rest still travels, with zeros for what could not be read, and then RuntimeError is raised
        on all ranks.
        """
        if self._running is not None:
            raise RuntimeError(
                f"rank {self._rank}: a transfer was started before the last one had ended; exhaust "
                "its iterator, close it or call drain"
            )
        self.stats = TransferStats(saved_bytes=self._route.planned_bytes)
        self._running = self._arrivals(read)
        return self._deliver(self._running, partial, keep)

    def drain(self) -> None:
        """Take part in the rest of a run that was not exhausted, and discard it.

        Has no effect after a run that was exhausted.
        """
        if self._running is not None:
            for _ in self._running:
                pass

    def _deliver(
        self,
        buckets: Iterator[tuple[int, dict[str, Pieces]]],
        partial: bool,
        keep: bool,
    ) -> Generator[tuple[str, Pieces], None, None]:
        waiting: dict[str, Pieces] = {}
        waiting_bytes = 0
        try:
            for number, arrived in buckets:
                for tensor in sorted(arrived, key=self._route.position.__getitem__):
                    pieces = arrived.pop(tensor)
                    complete = self._route.last_bucket[tensor] == number
                    if keep or not (partial or complete):
                        pieces = [(box, data.clone()) for box, data in pieces]
                    if not (partial or complete):
                        waiting.setdefault(tensor, []).extend(pieces)
                        waiting_bytes += _num_bytes(pieces)
                        self.stats.waiting_bytes = max(self.stats.waiting_bytes, waiting_bytes)
                        continue
                    before = waiting.pop(tensor, [])
                    waiting_bytes -= _num_bytes(before)
                    yield tensor, [*before, *pieces]
                    if self._running is not buckets:
                        return  # drained: the buffers have been reused
        finally:
            self.drain()

    def _arrivals(self, read: ReadSlice) -> Iterator[tuple[int, dict[str, Pieces]]]:
        """Execute `Run.arrivals` with its buffers."""
        run = Run(
            rank=self._rank,
            buckets=self._route.buckets,
            steps=self._route.steps,
            buffers=self._allocated(),
            tensors=self._tensors,
            wire=self._wire,
            copies=self._copies,
            read=read,
            stats=self.stats,
        )
        try:
            yield from run.arrivals()
        finally:
            self._running = None
            self._wire.rest()
            if not self._keep_buffers:
                self._buffers.clear()

    def _allocated(self) -> list[torch.Tensor]:
        """Return the rotating buffers, each as large as the fullest bucket that it will hold."""
        if not self._buffers:
            sizes = [bucket[-1].end for bucket in self._route.buckets]
            for first in range(self._num_buffers):
                size = max(sizes[first :: self._num_buffers], default=0)
                self._buffers.append(torch.empty(size, dtype=torch.uint8, device=self._device))
        self.stats.buffer_bytes = sum(buffer.numel() for buffer in self._buffers)
        return self._buffers


def _num_bytes(pieces: Pieces) -> int:
    return sum(data.nbytes for _, data in pieces)
