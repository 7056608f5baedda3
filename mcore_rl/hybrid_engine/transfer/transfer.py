"""Execution of a plan over torch.distributed, bucket by bucket, while the caller works.

The plan is cut into rounds of messages (see `buckets`), the same on all ranks; a rank takes part in
some of them. Buffers rotate: while the caller works on one bucket, the next travels in another.
Together they never exceed `bucket_bytes`, whatever the largest tensor. With `delta` only changes
since the last version travel (see `delta`). A third buffer then rotates, because the sizes of
messages travel one bucket further ahead, so that no rank waits for them:

    prepare(i)   read and pack what this rank sends in bucket i; with delta, compare it with the
                 last version and send the sizes of its messages ahead
    post(i)      start the messages of bucket i
    wait, unpack bucket i, and hand it to the caller

All ranks start their messages in one order (`buckets.steps`), and a rank waits for a message only
after it has started all earlier ones. `transport.Transport` explains why this cannot deadlock.

Bytes are counted on this rank, at the calls.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch

from mcore_rl.hybrid_engine.plan.buckets import (
    POST,
    PREPARE,
    SIZE_BYTES,
    Part,
    Placed,
    Route,
    frame_of,
    make_route,
    padded_bytes,
    slot_bytes,
)
from mcore_rl.hybrid_engine.plan.transfer_plan import Plan
from mcore_rl.hybrid_engine.plan.trees import Connections
from mcore_rl.hybrid_engine.transfer.delta import LastVersion, decode, encode
from mcore_rl.hybrid_engine.transfer.transport import (
    Call,
    CudaFlight,
    Flight,
    Groups,
    Transport,
    covered_seconds,
)
from mcore_rl.hybrid_engine.transfer.worlds import DefaultWorld, World
from mcore_rl.model.boxes import Box, extent, show
from mcore_rl.model.tensors import TensorInfo

Pieces = list[tuple[Box, torch.Tensor]]
ReadSlice = Callable[[str, Box], torch.Tensor]


@dataclass(slots=True)
class TransferStats:
    """Bytes, calls and seconds of one `stream` on this rank.

    Not counted: the 4-byte all-reduce at the end of a run and, with delta, at its start.
    """

    received_bytes: int = 0  # headers included
    sent_bytes: int = 0  # headers and passed-on messages included; a broadcast counts once
    header_bytes: int = 0  # part of `received_bytes`: sizes, tables and bitmaps of delta mode
    saved_bytes: int = 0  # planned minus received bytes
    largest_bucket_bytes: int = 0  # used in the fullest of the rotating buffers
    buffer_bytes: int = 0  # all rotating buffers together
    num_calls: int = 0  # messages and sizes, each once
    num_buckets: int = 0
    is_full: bool = True  # False: only changes travelled
    in_flight_seconds: float = 0.0  # time with at least one message of this rank in flight
    wait_seconds: float = 0.0  # time the caller waited for messages
    peer_ranks: set[int] = field(default_factory=set)

    @property
    def hidden_share(self) -> float:
        """The share, 0 to 1, of the time in flight during which the caller did not wait."""
        if self.in_flight_seconds == 0:
            return 1.0
        return min(1.0, max(0.0, 1 - self.wait_seconds / self.in_flight_seconds))


class Transfer:
    """One plan, ready to run any number of times.

    Constructing it is collective (it may create a process group), and so are `stream` and `close`.
    The plan's ranks are ranks of `world`, by default the job's. `groups` maps sets of ranks to
    existing process groups over them, the same sets on all ranks; the plan may broadcast only in
    these. Messages are built on `device`; on the CPU they travel over gloo, whatever the job's
    backend is. `bucket_bytes` caps what this rank has in flight, all buffers together; UsageError
    if a buffer does not hold one element.

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
        self._transport = Transport((move.tree for move in plan.moves), groups, world, self._device)
        self.num_groups = self._transport.num_groups  # created here, the same on all ranks
        self._last = LastVersion(full_every, self._device) if delta else None
        self._buffers: list[torch.Tensor] = []
        self._running: Iterator[dict[str, Pieces]] | None = None
        self.stats = TransferStats()

    @cached_property
    def _route(self) -> Route:
        """This rank's part in the plan, computed before the first run."""
        return make_route(self._plan, self._tensors, self._rank, self._share, self._frame)

    @property
    def connections(self) -> Connections:
        """The given groups that this rank has used so far, and its point-to-point peers."""
        return self._transport.connections

    def close(self) -> None:
        """Free buffers, copies and the process groups that this transfer created. Collective."""
        self._transport.close()
        self._buffers.clear()
        if self._last is not None:
            self._last = LastVersion(self._last.full_every, self._device)

    def invalidate(self) -> None:
        """Discard this rank's copies: the next run transfers everything. Not collective.

        Has no effect without delta.
        """
        if self._last is not None:
            self._last.invalidate()

    def stream(self, read: ReadSlice) -> Generator[tuple[str, Pieces], None, None]:
        """Yield (tensor, pieces of it that this rank received), in the plan's order. Collective.

        `read(tensor, box)` returns the values of a box that this rank holds, in the tensor's dtype.
        Tensors that this rank does not receive are not yielded. A tensor is yielded once for every
        bucket that contains pieces of it, each time with only those pieces. These are valid until
        the caller requests the next item, and must not be written to: nothing is held beyond the
        bucket.

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
        return self._deliver(self._running)

    def drain(self) -> None:
        """Take part in the rest of a run that was not exhausted, and discard it.

        Has no effect after a run that was exhausted.
        """
        if self._running is not None:
            for _ in self._running:
                pass

    def _deliver(
        self, buckets: Iterator[dict[str, Pieces]]
    ) -> Generator[tuple[str, Pieces], None, None]:
        try:
            for arrived in buckets:
                for tensor in sorted(arrived, key=self._route.position.__getitem__):
                    yield tensor, arrived.pop(tensor)
                    if self._running is not buckets:
                        return  # drained: the buffers have been reused
        finally:
            self.drain()

    def _arrivals(self, read: ReadSlice) -> Iterator[dict[str, Pieces]]:
        """Execute a run with its buffers."""
        run = _Run(
            rank=self._rank,
            route=self._route,
            buffers=self._allocated(),
            tensors=self._tensors,
            transport=self._transport,
            last=self._last,
            read=read,
            stats=self.stats,
        )
        try:
            yield from run.arrivals()
        finally:
            self._running = None
            self._transport.stop_thread()
            self._buffers.clear()  # training needs the memory

    def _allocated(self) -> list[torch.Tensor]:
        """Return the rotating buffers, each as large as the fullest bucket that it will hold."""
        if not self._buffers:
            sizes = [bucket[-1].end for bucket in self._route.buckets]
            for first in range(self._num_buffers):
                size = max(sizes[first :: self._num_buffers], default=0)
                self._buffers.append(torch.empty(size, dtype=torch.uint8, device=self._device))
        self.stats.buffer_bytes = sum(buffer.numel() for buffer in self._buffers)
        return self._buffers


class _Run:
    """The state of one `stream`. `arrivals` executes the run."""

    def __init__(
        self,
        *,
        rank: int,
        route: Route,
        buffers: Sequence[torch.Tensor],
        tensors: Mapping[str, TensorInfo],
        transport: Transport,
        last: LastVersion | None,
        read: ReadSlice,
        stats: TransferStats,
    ) -> None:
        self._rank = rank
        self._buckets, self._steps, self._buffers = route.buckets, route.steps[::-1], buffers
        self._tensors, self._transport, self._last = tensors, transport, last
        self._read, self._stats = read, stats
        self._full = True
        self._flights: dict[tuple[str, int], Flight | CudaFlight] = {}
        self._intervals: list[tuple[float, float]] = []
        self._sizes: dict[int, int] = {}  # number of a message -> the bytes it travels with
        self._fault: str | None = None  # the first read that failed

    def arrivals(self) -> Iterator[dict[str, Pieces]]:
        """Yield the pieces that this rank received in each bucket, valid until the next item.

        Collective. Raises RuntimeError on all ranks at the end if one could not read what it sends.
        """
        if self._last is not None:
            self._full = self._transport.any(self._last.begin())
        self._stats.is_full = self._full
        self._stats.num_buckets = len(self._buckets)
        try:
            self._advance(0, post=True)
            for bucket in range(len(self._buckets)):
                # Packing the next bucket overlaps with this one's messages.
                self._advance(bucket + 1, post=False)
                self._wait(POST, bucket)
                self._advance(bucket + 1, post=True)
                yield self._unpack(bucket)
        finally:
            self._stats.in_flight_seconds = covered_seconds(self._intervals)
        self._end()

    def _advance(self, bucket: int, *, post: bool) -> None:
        """Take the steps up to the posting of `bucket`; with `post`, including it."""
        while self._steps:
            what, at = self._steps[-1]
            if what == PREPARE:
                self._prepare(at)
            elif at < bucket or post:
                self._post(at)
            else:
                return
            self._steps.pop()
            if (what, at) == (POST, bucket):
                return  # the next step needs the buffer that the caller now gets

    def _end(self) -> None:
        if self._transport.any(self._fault is not None):
            faults = self._transport.exchange(self._fault or "")
            raise RuntimeError(
                "; ".join(f"rank {r} could not send {f}" for r, f in enumerate(faults) if f)
                + "; what was handed over is not complete"
            )
        if self._last is not None:
            self._last.end(was_full=self._full)

    def _buffer(self, bucket: int) -> torch.Tensor:
        return self._buffers[bucket % len(self._buffers)]

    def _prepare(self, bucket: int) -> None:
        """Pack what this rank sends; with delta, encode the changes and send the sizes ahead."""
        buffer = self._buffer(bucket)
        for placed in self._buckets[bucket]:
            size = placed.message.num_bytes
            if placed.message.source == self._rank:
                self._pack(placed, buffer)
                if self._last is not None:
                    size = self._compare(placed, buffer, self._last)
            self._sizes[placed.number] = size
        if self._full:
            return
        calls = []
        for placed in self._buckets[bucket]:
            header = buffer[placed.start : placed.start + SIZE_BYTES]
            if placed.message.source == self._rank:
                header.view(torch.int64).fill_(self._sizes[placed.number])
            self._count(placed, SIZE_BYTES, weights=0)
            calls.append(Call(placed.message.tree, header))
        self._start(PREPARE, bucket, calls)

    @torch.no_grad()
    def _pack(self, placed: Placed, buffer: torch.Tensor) -> None:
        """Copy each part once, from its source into the buffer."""
        content = buffer[placed.content : placed.end]
        content[placed.message.num_bytes :].zero_()
        for part in placed.message.parts:
            target = self._view(content, part)
            try:
                data = self._read(part.tensor, part.box)
                if data.dtype != target.dtype or data.shape != target.shape:
                    raise RuntimeError(
                        f"read as {list(data.shape)} of {data.dtype}, expected "
                        f"{list(target.shape)} of {target.dtype}"
                    )
                target.copy_(data)
            except Exception as error:  # other ranks must not hang: `_end` reports it to all
                target.zero_()
                self._fault = self._fault or f"{part.tensor}{show(part.box)}: {error}"

    def _view(self, content: torch.Tensor, part: Part) -> torch.Tensor:
        """Return a part of a message as a tensor of its dtype and shape."""
        dtype = getattr(torch, self._tensors[part.tensor].dtype)
        data = content[part.offset : part.offset + part.num_bytes]
        return data.view(dtype).view(extent(part.box))

    def _compare(self, placed: Placed, buffer: torch.Tensor, last: LastVersion) -> int:
        """Keep the version that is sent; return the bytes that the message travels with."""
        num_bytes = placed.message.num_bytes
        end = placed.content + padded_bytes(num_bytes)
        if self._full:
            last.store(placed.number, buffer[placed.content : end])
            return num_bytes
        old = last.get(placed.number)
        size = encode(buffer[placed.encoded : end], old, num_bytes)
        if size:
            last.store(placed.number, old)
        return size

    def _post(self, bucket: int) -> None:
        """Start the messages once their sizes are known."""
        buffer = self._buffer(bucket)
        if not self._full:
            self._wait(PREPARE, bucket)
        calls = []
        for placed in self._buckets[bucket]:
            sends = placed.message.source == self._rank
            if not (self._full or sends):
                self._sizes[placed.number] = self._received_size(placed, buffer)
            size = self._sizes[placed.number]
            if size:
                self._count(placed, size, weights=size)
                calls.append(Call(placed.message.tree, buffer[placed.region(size)]))
        held = self._buckets[bucket][-1].end
        self._stats.largest_bucket_bytes = max(self._stats.largest_bucket_bytes, held)
        self._start(POST, bucket, calls)

    def _received_size(self, placed: Placed, buffer: torch.Tensor) -> int:
        header = buffer[placed.start : placed.start + SIZE_BYTES]
        size = int(header.view(torch.int64).item())
        if not 0 <= size <= placed.message.num_bytes:
            raise RuntimeError(
                f"rank {self._rank}: rank {placed.message.source} announced {size} bytes for a "
                f"message of {placed.message.num_bytes}"
            )
        return size

    def _count(self, placed: Placed, size: int, *, weights: int) -> None:
        stats = self._stats
        stats.num_calls += 1
        share = self._transport.share(placed.message.tree)
        stats.peer_ranks |= share.partners
        stats.sent_bytes += size * share.num_sends
        if placed.message.source != self._rank:
            stats.received_bytes += size
            stats.saved_bytes -= size
            stats.header_bytes += size - weights

    def _start(self, what: str, bucket: int, calls: Sequence[Call]) -> None:
        if calls:
            self._flights[what, bucket] = self._transport.start(calls)

    def _wait(self, what: str, bucket: int) -> None:
        flight = self._flights.pop((what, bucket), None)
        if flight is None:
            return  # no message of this bucket changed
        started = time.perf_counter()
        flight.wait()
        self._stats.wait_seconds += time.perf_counter() - started
        self._intervals.append(flight.interval())

    def _unpack(self, bucket: int) -> dict[str, Pieces]:
        """Return the received pieces: views of the bucket, or on the host of delta's copies."""
        arrived: dict[str, Pieces] = {}
        buffer = self._buffer(bucket)
        for placed in self._buckets[bucket]:
            if placed.message.source == self._rank:
                continue
            content = buffer[placed.content : placed.end]
            if self._last is not None:
                content = self._updated(placed, buffer, self._last)
            for part in placed.message.parts:
                arrived.setdefault(part.tensor, []).append((part.box, self._view(content, part)))
        return arrived

    def _updated(self, placed: Placed, buffer: torch.Tensor, last: LastVersion) -> torch.Tensor:
        """Update the copy of a message; return its content on the messages' device."""
        size, num_bytes = self._sizes[placed.number], placed.message.num_bytes
        content = buffer[placed.content : placed.content + padded_bytes(num_bytes)]
        if size == num_bytes:
            content[num_bytes:].zero_()
            last.store(placed.number, content)
            return content
        old = last.get(placed.number)
        if size:
            weights = decode(buffer[placed.region(size)], old, num_bytes)
            self._stats.header_bytes += size - weights
            last.store(placed.number, old)
        # On the host `old` is the copy itself; on a device it is temporary, so copy to the buffer.
        return old if content.device.type == "cpu" else content.copy_(old)
