"""Executes a plan over torch.distributed, bucket by bucket.

All ranks walk the plan in the same order. Moves are packed into buckets of at most `bucket_bytes`;
within a bucket, what one source sends to one set of receivers travels as one message. A message
goes by broadcast over the process group made of source and receivers; PP groups are given, others
are created once. The first bucket of the next tensors starts only when the caller has taken what
was in this one, so one bucket is in flight.

Bytes are counted where they are sent, on this rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist

from mcore_rl.hybrid_engine.boxes import Box, extent
from mcore_rl.hybrid_engine.plan import Move, Plan, TensorInfo

Pieces = list[tuple[Box, torch.Tensor]]
ReadSlice = Callable[[str, Box], torch.Tensor]


@dataclass(slots=True)
class TransferStats:
    """What this rank did, in bytes and calls."""

    received_bytes: int = 0
    sent_bytes: int = 0
    largest_bucket_bytes: int = 0
    num_calls: int = 0
    ranks_spoken_to: set[int] = field(default_factory=set)


class Transfer:
    """One plan, ready to run any number of times.

    Constructing it is collective (it may create process groups), and so is `stream`. `groups` maps
    sets of ranks to existing process groups over them; `device` is where messages are built.
    """

    def __init__(
        self,
        plan: Plan,
        tensors: Mapping[str, TensorInfo],
        *,
        bucket_bytes: int,
        groups: Mapping[frozenset[int], dist.ProcessGroup] | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        self._tensors = tensors
        self._device = device
        self._rank = dist.get_rank()
        self._buckets = _split(plan, bucket_bytes)
        self._order = [
            list(dict.fromkeys(move.tensor for move in bucket)) for bucket in self._buckets
        ]
        self._groups = dict(groups or {})
        self._own_groups: list[dist.ProcessGroup] = []
        for move in plan.moves:
            ranks = _participants(move)
            if ranks not in self._groups:
                self._groups[ranks] = dist.new_group(sorted(ranks))
                self._own_groups.append(self._groups[ranks])
        self.stats = TransferStats()

    def close(self) -> None:
        """Free the process groups that this transfer created. Collective."""
        for group in self._own_groups:
            if group is not dist.GroupMember.NON_GROUP_MEMBER:
                dist.destroy_process_group(group)
        self._own_groups.clear()

    def stream(self, read: ReadSlice) -> Iterator[tuple[str, Pieces]]:
        """Yield (tensor, what this rank received of it), in the plan's order. Collective.

        `read(tensor, box)` gives the values of a box that this rank holds. A tensor split over
        several buckets is yielded when its last piece is here; tensors of which this rank receives
        nothing are not yielded. The caller must exhaust the iterator, or the other ranks hang.
        """
        self.stats = TransferStats()
        waiting: dict[str, Pieces] = {}
        for number, bucket in enumerate(self._buckets):
            self._run(bucket, read, waiting)
            later = {m.tensor for m in self._buckets[number + 1]} if self._more(number) else set()
            # Messages arrive by source; the caller gets tensors in the order of the plan.
            for tensor in [t for t in self._order[number] if t in waiting and t not in later]:
                yield tensor, waiting.pop(tensor)

    def _more(self, number: int) -> bool:
        return number + 1 < len(self._buckets)

    def _run(self, bucket: list[Move], read: ReadSlice, arrived: dict[str, Pieces]) -> None:
        messages: dict[tuple[int, frozenset[int]], list[Move]] = {}
        for move in bucket:
            messages.setdefault((move.source, _participants(move)), []).append(move)
        held = 0
        for (source, ranks), moves in messages.items():
            if self._rank not in ranks:
                continue
            num_bytes = sum(move.num_bytes for move in moves)
            held += num_bytes
            if source == self._rank:
                flat = torch.cat([_as_bytes(read(m.tensor, m.box), self._device) for m in moves])
                self.stats.sent_bytes += num_bytes
            else:
                flat = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
                self.stats.received_bytes += num_bytes
            dist.broadcast(flat, src=source, group=self._groups[ranks])
            self.stats.num_calls += 1
            self.stats.ranks_spoken_to |= ranks - {self._rank}
            if source != self._rank:
                self._unpack(flat, moves, arrived)
        self.stats.largest_bucket_bytes = max(self.stats.largest_bucket_bytes, held)

    def _unpack(self, flat: torch.Tensor, moves: list[Move], arrived: dict[str, Pieces]) -> None:
        start = 0
        for move in moves:
            dtype = getattr(torch, self._tensors[move.tensor].dtype)
            part = flat[start : start + move.num_bytes]
            # Mixed dtypes in one message may leave a part off its element's alignment.
            part = part if start % dtype.itemsize == 0 else part.clone()
            data = part.view(dtype).view(extent(move.box))
            arrived.setdefault(move.tensor, []).append((move.box, data))
            start += move.num_bytes


def _participants(move: Move) -> frozenset[int]:
    return frozenset((move.source, *move.receivers))


def _as_bytes(data: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    return data.to(device).contiguous().view(-1).view(torch.uint8)


def _split(plan: Plan, bucket_bytes: int) -> list[list[Move]]:
    """The moves, in order, in buckets of at most `bucket_bytes`; larger moves are cut by rows.

    Only a single row that is larger than that stands alone in a bucket of its own size.
    """
    buckets: list[list[Move]] = []
    size = 0
    for move in (part for whole in plan.moves for part in _by_rows(whole, bucket_bytes)):
        if not buckets or size + move.num_bytes > bucket_bytes:
            buckets.append([])
            size = 0
        buckets[-1].append(move)
        size += move.num_bytes
    return buckets


def _by_rows(move: Move, limit: int) -> Iterator[Move]:
    """`move` as moves of consecutive rows, each of at most `limit` bytes where a row allows it."""
    if move.num_bytes <= limit or not move.box:
        yield move
        return
    (start, stop), *rest = move.box
    row_bytes = move.num_bytes // (stop - start)
    step = max(1, limit // row_bytes)
    for first in range(start, stop, step):
        last = min(first + step, stop)
        box = ((first, last), *rest)
        yield replace(move, box=box, num_bytes=(last - first) * row_bytes)
