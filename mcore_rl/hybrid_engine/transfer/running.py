"""One run of a transfer: pack, send and unpack, bucket after bucket. Internal to `transfer`.

    prepare(i)   read and pack what this rank sends in bucket i; with delta, compare it with the
                 last version and send the sizes of its messages ahead
    post(i)      start the messages of bucket i
    wait, unpack bucket i, and hand it to the caller

While the caller works on bucket i, bucket i + 1 travels, and with delta the sizes of i + 2.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from mcore_rl.hybrid_engine.plan.buckets import POST, PREPARE, SIZE_BYTES, Part, Placed
from mcore_rl.hybrid_engine.plan.moves import TensorInfo
from mcore_rl.hybrid_engine.transfer.delta import decode, encode, padded_bytes
from mcore_rl.hybrid_engine.transfer.wire import Call, CudaFlight, Flight, Wire, covered_seconds
from mcore_rl.model.boxes import Box, extent, show

Pieces = list[tuple[Box, torch.Tensor]]
_CHUNK_BYTES = 1 << 30  # page-locked memory per allocation
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
    waiting_bytes: int = 0  # peak of the copies that waited for the last piece of their tensor
    num_calls: int = 0  # messages and sizes, each once
    num_buckets: int = 0
    is_full: bool = True  # False: only changes travelled
    in_flight_seconds: float = 0.0  # time with at least one message of this rank in flight
    wait_seconds: float = 0.0  # time the caller waited for messages
    pack_seconds: float = 0.0  # reading, packing and comparing what is sent
    ranks_spoken_to: set[int] = field(default_factory=set)

    @property
    def hidden_share(self) -> float:
        """The share, 0 to 1, of the time in flight during which the caller did not wait."""
        if self.in_flight_seconds == 0:
            return 1.0
        return min(1.0, max(0.0, 1 - self.wait_seconds / self.in_flight_seconds))


class Copies:
    """The last version of every message of this rank, in host memory, and whether it is valid.

    Messages are padded to words of 8 bytes. If messages are on a device, the memory is page-locked,
    and copies run in the order of the device's stream without the host waiting.
    """

    def __init__(self, full_every: int, device: torch.device) -> None:
        self.full_every, self.device = full_every, device
        self._chunk, self._used = torch.empty(0, dtype=torch.uint8), 0
        self._known = self._invalidated = False
        self._runs = 0  # since the last full run, including it
        self._kept: dict[int, torch.Tensor] = {}

    def invalidate(self) -> None:
        """Mark the copies invalid, even if the current run succeeds."""
        self._known, self._invalidated = False, True

    def begin(self) -> bool:
        """Return whether this rank needs a full run. The copies are invalid until `end`."""
        wanted = not self._known or self._runs >= self.full_every
        self._known = self._invalidated = False
        return wanted

    def end(self, *, was_full: bool) -> None:
        """Mark the copies valid: the run succeeded on all ranks."""
        self._known = not self._invalidated
        self._runs = 1 if was_full else self._runs + 1

    def store(self, number: int, content: torch.Tensor) -> None:
        """Keep a complete message, padded."""
        if number not in self._kept:
            self._kept[number] = self._allocated(len(content))
        self._kept[number].copy_(content, non_blocking=True)

    def last(self, number: int) -> torch.Tensor:
        """Return the last version on the messages' device. Keep changes to it with `store`."""
        return self._kept[number].to(self.device, non_blocking=True)

    def _allocated(self, num_bytes: int) -> torch.Tensor:
        if self.device.type == "cpu":
            return torch.empty(num_bytes, dtype=torch.uint8)
        if self._used + num_bytes > len(self._chunk):
            # torch rounds page-locked memory up to a power of two.
            size = max(_CHUNK_BYTES, 1 << (num_bytes - 1).bit_length())
            self._chunk, self._used = torch.empty(size, dtype=torch.uint8, pin_memory=True), 0
        self._used += num_bytes
        return self._chunk[self._used - num_bytes : self._used]


class Run:
    """The state of one `stream`. `arrivals` executes the run."""

    def __init__(
        self,
        *,
        rank: int,
        buckets: Sequence[Sequence[Placed]],
        steps: Sequence[tuple[str, int]],
        buffers: Sequence[torch.Tensor],
        tensors: Mapping[str, TensorInfo],
        wire: Wire,
        copies: Copies | None,
        read: ReadSlice,
        stats: TransferStats,
    ) -> None:
        self._rank = rank
        self._buckets, self._steps, self._buffers = buckets, list(reversed(steps)), buffers
        self._tensors, self._wire, self._copies = tensors, wire, copies
        self._read, self._stats = read, stats
        self._full = True
        self._flights: dict[tuple[str, int], Flight | CudaFlight] = {}
        self._intervals: list[tuple[float, float]] = []
        self._sizes: dict[int, int] = {}  # number of a message -> the bytes it travels with
        self._fault: str | None = None  # the first read that failed

    def arrivals(self) -> Iterator[tuple[int, dict[str, Pieces]]]:
        """Yield (bucket, the pieces that this rank received in it), valid until the next item.

        Collective. Raises RuntimeError on all ranks at the end if one could not read what it sends.
        """
        if self._copies is not None:
            self._full = self._wire.any(self._copies.begin())
        self._stats.is_full = self._full
        self._stats.num_buckets = len(self._buckets)
        try:
            self._advance(0, post=True)
            for bucket in range(len(self._buckets)):
                # Packing the next bucket overlaps with this one's messages.
                self._advance(bucket + 1, post=False)
                self._wait(POST, bucket)
                self._advance(bucket + 1, post=True)
                yield bucket, self._unpack(bucket)
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
        if self._wire.any(self._fault is not None):
            faults = self._wire.exchange(self._fault or "")
            raise RuntimeError(
                "; ".join(f"rank {r} could not send {f}" for r, f in enumerate(faults) if f)
                + "; what was handed over is not complete"
            )
        if self._copies is not None:
            self._copies.end(was_full=self._full)

    def _buffer(self, bucket: int) -> torch.Tensor:
        return self._buffers[bucket % len(self._buffers)]

    def _prepare(self, bucket: int) -> None:
        """Pack what this rank sends; with delta, encode the changes and send the sizes ahead."""
        started = time.perf_counter()
        buffer = self._buffer(bucket)
        for placed in self._buckets[bucket]:
            size = placed.message.num_bytes
            if placed.message.source == self._rank:
                self._pack(placed, buffer)
                if self._copies is not None:
                    size = self._compare(placed, buffer, self._copies)
            self._sizes[placed.number] = size
        self._stats.pack_seconds += time.perf_counter() - started
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

    def _compare(self, placed: Placed, buffer: torch.Tensor, copies: Copies) -> int:
        """Keep the version that is sent; return the bytes that the message travels with."""
        num_bytes = placed.message.num_bytes
        end = placed.content + padded_bytes(num_bytes)
        if self._full:
            copies.store(placed.number, buffer[placed.content : end])
            return num_bytes
        last = copies.last(placed.number)
        size = encode(buffer[placed.encoded : end], last, num_bytes)
        if size:
            copies.store(placed.number, last)
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
        share = self._wire.share(placed.message.tree)
        stats.ranks_spoken_to |= share.partners
        stats.sent_bytes += size * share.num_sends
        if placed.message.source != self._rank:
            stats.received_bytes += size
            stats.saved_bytes -= size
            stats.header_bytes += size - weights

    def _start(self, what: str, bucket: int, calls: Sequence[Call]) -> None:
        if calls:
            self._flights[what, bucket] = self._wire.start(calls)

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
            if self._copies is not None:
                content = self._updated(placed, buffer, self._copies)
            for part in placed.message.parts:
                arrived.setdefault(part.tensor, []).append((part.box, self._view(content, part)))
        return arrived

    def _updated(self, placed: Placed, buffer: torch.Tensor, copies: Copies) -> torch.Tensor:
        """Update the copy of a message; return its content on the messages' device."""
        size, num_bytes = self._sizes[placed.number], placed.message.num_bytes
        content = buffer[placed.content : placed.content + padded_bytes(num_bytes)]
        if size == num_bytes:
            content[num_bytes:].zero_()
            copies.store(placed.number, content)
            return content
        last = copies.last(placed.number)
        if size:
            weights = decode(buffer[placed.region(size)], last, num_bytes)
            self._stats.header_bytes += size - weights
            copies.store(placed.number, last)
        # On the host `last` is the copy itself; on a device it is temporary, so copy to the buffer.
        return last if content.device.type == "cpu" else content.copy_(last)
