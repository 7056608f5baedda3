"""Transport of messages along their trees, over process groups, with the times that it takes.

If a leg's ranks are one of the caller's groups, it is a broadcast in that group. All other legs are
point to point, one batch per hop, in one group of all ranks, which is created only if there are
such legs. A transport therefore adds one group or none.

A thread starts the messages. On the host (gloo) it also waits for them, hop by hop: a rank thus
passes on what it has received while the caller is busy, and the end of the messages is known. On
CUDA they follow each other on a separate stream, and events record the times. There the caller
waits until all messages are launched. The thread is needed for failures: an `isend` that fails
after a peer is lost leaves NCCL's group call open in its thread (seen with torch 2.11), where every
later communicator would be created too late and every later call be held back.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from mcore_rl.common.spans import COLLECTIVE, span
from mcore_rl.hybrid_engine.plan.trees import Connections, Leg, Tree
from mcore_rl.hybrid_engine.transfer.worlds import POLL_SECONDS, World

Groups = Mapping[frozenset[int], dist.ProcessGroup]


class Flight:
    """Messages in flight. `wait` returns when all have arrived or left, or raises their error.

    Once `wait` has returned, `interval` is the start and the end of the messages, in seconds of one
    clock.
    """

    def __init__(
        self, hops: Sequence[Callable[[], Iterable[dist.Work]]], world: World, what: str
    ) -> None:
        """`what` says of the messages that they did not end, for `World.poll`."""
        self._hops, self._world, self._what = hops, world, what
        self._done = threading.Event()
        self._error: Exception | None = None
        self._start = self._end = 0.0

    def run(self) -> None:
        """Start the hops one after the other, in the transport's thread, and measure the time."""
        self._start = time.perf_counter()
        try:
            for start in self._hops:
                for work in list(start()):
                    work.wait()
        except Exception as error:  # `wait` raises it; without this it would never return
            self._error = error
        self._hops = ()  # they hold process groups
        self._end = time.perf_counter()
        self._done.set()

    def wait(self) -> None:
        """Block until all messages are complete; raise the error of one that failed."""
        started = time.monotonic()
        while not self._done.wait(POLL_SECONDS):
            self._world.poll(started, self._what)
        if self._error is not None:
            raise self._world.lost(self._error) from None

    def interval(self) -> tuple[float, float]:
        """Return (start, end) in seconds of `time.perf_counter`; valid after `wait`."""
        return self._start, self._end


class CudaFlight:
    """A `Flight` on the device, which has been launched."""

    def __init__(self, world: World, origin: Any, start: Any, end: Any) -> None:
        self._world = world
        self._origin, self._start, self._end = origin, start, end

    def wait(self) -> None:
        """Block the host until all messages are complete."""
        # Kernels that the host launches next on its own stream then find the data in place.
        self._world.synchronize(self._end)

    def interval(self) -> tuple[float, float]:
        """Return (start, end) in seconds since the transport was created; valid after `wait`."""
        return (
            self._origin.elapsed_time(self._start) / 1e3,
            self._origin.elapsed_time(self._end) / 1e3,
        )


@dataclass(frozen=True, slots=True)
class Call:
    """One message and its bytes on this rank, uint8 `[n]`, to be sent or received into."""

    tree: Tree
    data: torch.Tensor


@dataclass(frozen=True, slots=True)
class Share:
    """This rank's part in a tree."""

    hops: tuple[tuple[Leg, ...], ...]  # its legs in each of the tree's hops
    num_sends: int  # a broadcast counts once
    partners: frozenset[int]  # ranks that it sends to or receives from


class Transport:
    """The groups that some trees need over the ranks of `world`, and messages along these trees.

    Constructing is collective over the world: `trees` and the keys of `groups`, which exist
    already, must be the same on all ranks. The ranks of a leg to several receivers must be one of
    these groups. `num_groups` is the number of groups created, the same on all ranks: one for
    point-to-point legs, or none.

    Deadlock freedom: messages have one common order. Among messages that are started together, the
    first legs of all come first: broadcasts in the order of the messages, then all point-to-point
    legs at once. Then come the second legs, and so on. All ranks start their legs in this order,
    and before they start a leg they wait only for earlier ones. The earliest unfinished leg has
    therefore been started by all its ranks, or will be, and ends; by induction all legs end. A leg
    comes after the one that brought its sender the message, which belongs to an earlier hop. On
    CUDA each leg runs after its rank's earlier legs, whatever their groups, so communicators never
    wait for each other in a cycle.
    """

    def __init__(
        self,
        trees: Iterable[Tree],
        groups: Groups | None,
        world: World,
        device: torch.device,
    ) -> None:
        self._world, self._device = world, device
        self._groups = {ranks: group for ranks, group in (groups or {}).items() if len(ranks) > 1}
        self._shares: dict[Tree, Share] = {}
        self._used: set[frozenset[int]] = set()
        self._peers: set[int] = set()
        self._own: list[Any] = []
        self._everyone: Any = None
        self._waiter: queue.SimpleQueue[Flight | None] | None = None
        self._stream: Any = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)
            self._origin = torch.cuda.Event(enable_timing=True)
            self._origin.record()
        legs = {leg for tree in set(trees) for leg in tree.legs}
        if any(leg.ranks not in self._groups for leg in legs):
            self._make_group_of_all()
        self.num_groups = len(self._own)

    def _make_group_of_all(self) -> None:
        everyone = frozenset(range(self._world.size))
        self._everyone = self._groups.get(everyone)
        if self._everyone is None:
            self._everyone = self._world.new_group(sorted(everyone))
            self._own.append(self._everyone)
        if self._stream is not None:
            # A group's first call must not be a point-to-point call among some of its ranks.
            dist.all_reduce(torch.zeros(1, device=self._device), group=self._everyone)

    def share(self, tree: Tree) -> Share:
        """Return this rank's part in `tree`."""
        part = self._shares.get(tree)
        if part is None:
            rank = self._world.rank
            hops = tuple(tuple(leg for leg in hop if rank in leg.ranks) for hop in tree.hops)
            legs = [leg for hop in hops for leg in hop]
            partners = {r for leg in legs if leg.sender == rank for r in leg.receivers}
            partners |= {leg.sender for leg in legs} - {rank}
            part = self._shares[tree] = Share(hops, tree.sends(rank), frozenset(partners))
        return part

    @property
    def connections(self) -> Connections:
        """The groups and peers that this rank has used so far, counted at the calls."""
        return Connections(frozenset(self._used), frozenset(self._peers))

    def any(self, here: bool) -> bool:
        """Return whether `here` is true on any rank. Collective over the world."""
        flag, group = torch.tensor([int(here)], dtype=torch.int32), self._world.control
        with span("all_reduce", COLLECTIVE):
            work = dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=group, async_op=True)
            self._world.wait(work, group)
        return bool(flag.item())

    def exchange(self, text: str) -> list[str]:
        """Return the text of each rank. Collective over the world."""
        return self._world.gather(text, of=str)

    def close(self) -> None:
        """Free the groups that this transport created. Collective."""
        self.stop_thread()
        for group in self._own:
            if group is not dist.GroupMember.NON_GROUP_MEMBER:
                dist.destroy_process_group(group)
        self._own.clear()

    def stop_thread(self) -> None:
        """End the thread; `start` begins a new one."""
        if self._waiter is not None:
            self._waiter.put(None)
            self._waiter = None

    def start(self, calls: Sequence[Call]) -> Flight | CudaFlight:
        """Send and receive `calls`; the data belong to the flight until its `wait` returns.

        All ranks of a message must pass it at the same place of the common order.
        """
        num_hops = max(len(call.tree.hops) for call in calls)
        hops = [partial(self._works, calls, hop) for hop in range(num_hops)]
        partners = sorted(set().union(*(self.share(call.tree).partners for call in calls)))
        what = f"messages from or to ranks {', '.join(map(str, partners))} did not end"
        if self._stream is None:
            return self._in_thread(hops, what)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        # The caller's launched kernels fill the data to send, or still read what is overwritten.
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        self._in_thread([partial(self._launch, hops, start, end)], what).wait()
        return CudaFlight(self._world, self._origin, start, end)

    def _in_thread(self, hops: Sequence[Callable[[], Iterable[dist.Work]]], what: str) -> Flight:
        flight = Flight(hops, self._world, what)
        if self._waiter is None:
            self._waiter = queue.SimpleQueue()
            threading.Thread(target=_run_flights, args=(self._waiter,), daemon=True).start()
        self._waiter.put(flight)
        return flight

    def _launch(
        self, hops: Sequence[Callable[[], Iterable[dist.Work]]], start: Any, end: Any
    ) -> Iterable[dist.Work]:
        # Otherwise the thread returns to the first device, and has a context of its own there.
        torch.cuda.set_device(self._stream.device)
        with torch.cuda.stream(self._stream):
            start.record()
            for hop in hops:
                for work in hop():
                    work.wait()  # makes this stream wait for NCCL's, not the host
            end.record()
        return ()

    def _works(self, calls: Sequence[Call], hop: int) -> Iterator[dist.Work]:
        """Start one hop: broadcasts in the order of `calls`, then the point-to-point batch."""
        batch: list[dist.P2POp] = []
        for call in calls:
            hops = self.share(call.tree).hops
            for leg in hops[hop] if hop < len(hops) else ():
                group = self._groups.get(leg.ranks)
                if group is not None:
                    self._used.add(leg.ranks)
                    work = dist.broadcast(call.data, src=leg.sender, group=group, async_op=True)
                    assert work is not None, f"not in the group of {sorted(leg.ranks)}"
                    yield work
                    continue
                (receiver,) = leg.receivers
                sends = leg.sender == self._world.rank
                operation = dist.isend if sends else dist.irecv
                peer = receiver if sends else leg.sender
                self._peers.add(peer)
                if not self._own:
                    self._used.add(frozenset(range(self._world.size)))
                batch.append(
                    dist.P2POp(operation, call.data, group=self._everyone, group_peer=peer)
                )
        if batch:
            yield from dist.batch_isend_irecv(batch)


def _run_flights(flights: queue.SimpleQueue[Flight | None]) -> None:
    """Run the flights of the queue until it yields None: the body of the transport's thread."""
    while (flight := flights.get()) is not None:
        flight.run()
        del flight  # its calls hold process groups


def covered_seconds(intervals: Iterable[tuple[float, float]]) -> float:
    """Return how long at least one of `intervals` was running."""
    total, until = 0.0, float("-inf")
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total
