"""Sends the messages of a bucket, and says when they were on their way.

What goes from one source to one receiver travels point to point, all such messages of a bucket as
one batch in a group of all ranks; what goes to several receivers by broadcast in the group made of
source and receivers. So there are as many groups as there are distinct sets of three or more ranks,
plus one, less those that the caller has already.

On the host (gloo) messages are asynchronous by themselves, and a thread waits for them, so that
their end is known also while the caller is busy. On CUDA they follow each other on a stream of
their own, and events tell when. **The CUDA part was not run: it is written from PyTorch's
documentation of streams, events and NCCL groups.**
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from mcore_rl.hybrid_engine.buckets import Message
from mcore_rl.hybrid_engine.worlds import World

Groups = Mapping[frozenset[int], dist.ProcessGroup]
_TEXT_BYTES = 1024


class Flight:
    """Messages on their way. `wait` returns when all have arrived or left, or raises their error.

    `interval` is when they set out and when they were through, in seconds of one clock, once `wait`
    has returned.
    """

    def __init__(self, works: Sequence[dist.Work]) -> None:
        self._works = works
        self._done = threading.Event()
        self._error: Exception | None = None
        self._start = time.perf_counter()
        self._end = self._start

    def watch(self) -> None:
        """Wait in the thread that stands by for this, and take the time."""
        try:
            for work in self._works:
                work.wait()
        except Exception as error:  # raised again by `wait`, which else never returned
            self._error = error
        self._end = time.perf_counter()
        self._done.set()

    def wait(self) -> None:
        """Block until all messages are through; raises what broke one."""
        self._done.wait()
        if self._error is not None:
            raise self._error

    def interval(self) -> tuple[float, float]:
        """(start, end) in seconds of `time.perf_counter`, after `wait`."""
        return self._start, self._end


class CudaFlight:
    """As `Flight`, on the device. Not run, see above."""

    def __init__(self, origin: Any, start: Any, end: Any) -> None:
        self._origin, self._start, self._end = origin, start, end

    def wait(self) -> None:
        """Block the host until all messages are through."""
        # The host waits: what it launches next on its own stream then finds the data in place.
        self._end.synchronize()

    def interval(self) -> tuple[float, float]:
        """(start, end) in seconds since the wire was made, after `wait`."""
        return (
            self._origin.elapsed_time(self._start) / 1e3,
            self._origin.elapsed_time(self._end) / 1e3,
        )


@dataclass(frozen=True, slots=True)
class Call:
    """One message and its bytes on this rank, uint8 `[n]`: what to send, or where to receive."""

    message: Message
    data: torch.Tensor
    sends: bool


class Wire:
    """The groups that a plan needs over the ranks of `world`, and its messages on them.

    Constructing is collective over the world: groups are made in the order in which `sets` names
    them, which must be the same on all ranks, as must the keys of `groups`, the groups that exist
    already. `num_groups` is how many were made.

    Deadlock freedom: all ranks start the messages they take part in in one common order, never wait
    before starting one except for messages earlier in that order, and the messages of one batch are
    started together. So the earliest unfinished message has been started by all its ranks, or will
    be, and ends; by induction all do. On CUDA each message runs after the earlier ones of its rank,
    whatever their groups, so that communicators never wait for each other crosswise.
    """

    def __init__(
        self,
        sets: Iterable[frozenset[int]],
        groups: Groups | None,
        world: World,
        device: torch.device,
    ) -> None:
        self._world, self._device = world, device
        self._groups = dict(groups or {})
        self._own: list[Any] = []
        everyone = frozenset(range(world.size))
        for ranks in [everyone, *dict.fromkeys(sets)]:
            if ranks not in self._groups and (len(ranks) > 2 or ranks == everyone):
                self._groups[ranks] = world.new_group(sorted(ranks))
                self._own.append(self._groups[ranks])
        self._everyone = self._groups[everyone]
        self.num_groups = len(self._own)
        self._waiter: queue.SimpleQueue[Flight | None] | None = None
        self._stream: Any = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)
            self._origin = torch.cuda.Event(enable_timing=True)
            self._origin.record()
            # Point-to-point calls among some ranks must not be the first on their group.
            self.any(False)

    def any(self, here: bool) -> bool:
        """Whether it is so on any rank. Collective over the world."""
        flag = torch.tensor([int(here)], dtype=torch.int32, device=self._device)
        dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=self._everyone)
        return bool(flag.item())

    def exchange(self, text: str) -> list[str]:
        """Each rank's text, the first bytes of it. Collective over the world."""
        mine = torch.zeros(_TEXT_BYTES, dtype=torch.uint8)
        data = text.encode()[:_TEXT_BYTES]
        mine[: len(data)] = torch.tensor(list(data), dtype=torch.uint8)
        mine = mine.to(self._device)
        everyone = [torch.empty_like(mine) for _ in range(self._world.size)]
        dist.all_gather(everyone, mine, group=self._everyone)
        texts = [bytes(data.tolist()).rstrip(b"\0") for data in everyone]
        return [data.decode(errors="replace") for data in texts]

    def close(self) -> None:
        """Free the groups that were made. Collective."""
        self.rest()
        for group in self._own:
            if group is not dist.GroupMember.NON_GROUP_MEMBER:
                dist.destroy_process_group(group)
        self._own.clear()

    def rest(self) -> None:
        """End the waiting thread until there is something to send again."""
        if self._waiter is not None:
            self._waiter.put(None)
            self._waiter = None

    def start(self, calls: Sequence[Call]) -> Flight | CudaFlight:
        """Send and receive these; the data belong to the flight until its `wait` returns.

        All ranks of a message call this with the message in the same place of the common order.
        """
        if self._stream is not None:
            return self._start_cuda(calls)
        flight = Flight(list(self._works(calls)))
        if self._waiter is None:
            self._waiter = queue.SimpleQueue()
            threading.Thread(target=_stand_by, args=(self._waiter,), daemon=True).start()
        self._waiter.put(flight)
        return flight

    def _start_cuda(self, calls: Sequence[Call]) -> CudaFlight:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        # What the caller has launched so far fills what is sent, or still reads what will be
        # overwritten.
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            start.record()
            for work in self._works(calls):
                work.wait()  # makes this stream wait for NCCL's, not the host
            end.record()
        return CudaFlight(self._origin, start, end)

    def _works(self, calls: Sequence[Call]) -> Iterator[dist.Work]:
        """Start broadcasts in the order of `calls`, then one batch of what goes point to point."""
        batch: list[dist.P2POp] = []
        for call in calls:
            source, (receiver, *_) = call.message.source, call.message.receivers
            group = self._groups.get(call.message.participants)
            if group is not None:
                work = dist.broadcast(call.data, src=source, group=group, async_op=True)
                assert work is not None, f"not in the group of {call.message.participants}"
                yield work
                continue
            operation = dist.isend if call.sends else dist.irecv
            peer = receiver if call.sends else source
            batch.append(dist.P2POp(operation, call.data, group=self._everyone, group_peer=peer))
        if batch:
            yield from dist.batch_isend_irecv(batch)


def _stand_by(flights: queue.SimpleQueue[Flight | None]) -> None:
    """What the waiting thread does; None ends it."""
    while (flight := flights.get()) is not None:
        flight.watch()


def covered_seconds(intervals: Iterable[tuple[float, float]]) -> float:
    """How long at least one of `intervals` was running."""
    total, until = 0.0, float("-inf")
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total
