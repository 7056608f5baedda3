"""From who has what and who needs what to moves: the same list on every rank.

Pure: holdings and needs are boxes of checkpoint tensors, the result is a dataclass. Every needed
element is covered exactly once, either by a move or by the receiver itself. What several ranks need
of one source goes out once, to all of them.

Here the source of a slice is the receiver itself, else the nearest holder by a distance that the
caller gives. Choosing the rank map, spreading load over replicas and the lower bound are not
decided here yet; they change `nearest` and the order of moves, not the types.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from mcore_rl.hybrid_engine.boxes import Box, intersect, show, subtract, uncovered, volume

Boxes = Mapping[str, Sequence[Box]]  # tensor -> disjoint boxes


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A checkpoint tensor: its full shape, and the bytes and name of its element type."""

    shape: tuple[int, ...]
    dtype: str
    itemsize: int

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.itemsize


@dataclass(frozen=True, slots=True)
class Move:
    """`source` sends one box of one tensor, once, to all `receivers`."""

    tensor: str
    box: Box
    source: int
    receivers: tuple[int, ...]
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Plan:
    """Moves in the order of the tensors; every rank holds the same plan."""

    moves: tuple[Move, ...]

    def received_bytes(self, rank: int) -> int:
        return sum(m.num_bytes for m in self.moves if rank in m.receivers)

    def sent_bytes(self, rank: int) -> int:
        return sum(m.num_bytes for m in self.moves if rank == m.source)


def make_plan(
    tensors: Mapping[str, TensorInfo],
    *,
    order: Sequence[str],
    have: Sequence[Boxes],
    need: Sequence[Boxes],
    distance: Callable[[int, int], int],
) -> Plan:
    """Plan the moves of all ranks.

    `have[rank]` and `need[rank]` are that rank's boxes; `order` names the tensors in the order in
    which they travel. `distance(receiver, holder)` ranks the possible sources of a slice; ties go
    to the lowest rank. Raises RuntimeError naming the tensor, rank and box that nobody holds.
    """
    moves: list[Move] = []
    for tensor in order:
        holders: dict[Box, list[int]] = defaultdict(list)
        for rank, boxes in enumerate(have):
            for box in boxes.get(tensor, ()):
                holders[box].append(rank)
        wanted = _sources(tensor, holders, have, need, distance)
        itemsize = tensors[tensor].itemsize
        moves.extend(
            Move(tensor, box, source, tuple(receivers), volume(box) * itemsize)
            for (source, box), receivers in wanted.items()
        )
    return Plan(tuple(moves))


def _sources(
    tensor: str,
    holders: Mapping[Box, Sequence[int]],
    have: Sequence[Boxes],
    need: Sequence[Boxes],
    distance: Callable[[int, int], int],
) -> dict[tuple[int, Box], list[int]]:
    """(source, box) -> receivers, of one tensor."""
    wanted: dict[tuple[int, Box], list[int]] = defaultdict(list)
    for rank, boxes in enumerate(need):
        missing = [
            part
            for box in boxes.get(tensor, ())
            for part in uncovered(box, have[rank].get(tensor, ()))
        ]
        while missing:
            box = missing.pop()
            held, part = _best_overlap(box, holders)
            if part is None:
                raise RuntimeError(
                    f"rank {rank} needs {tensor}{show(box)} and no rank holds it; the weight map "
                    "and the engine's needs do not describe the same checkpoint"
                )
            source = min(holders[held], key=lambda holder: (distance(rank, holder), holder))
            wanted[source, part].append(rank)
            missing.extend(subtract(box, part))
    # In a fixed order whatever the order of the boxes above.
    return dict(sorted(wanted.items(), key=lambda item: (item[0][1], item[0][0])))


def _best_overlap(box: Box, holders: Mapping[Box, Sequence[int]]) -> tuple[Box, Box | None]:
    """The held box that overlaps `box` most, and the overlap."""
    best: tuple[Box, Box | None] = ((), None)
    for held in holders:
        part = intersect(box, held)
        if part is not None and (best[1] is None or volume(part) > volume(best[1])):
            best = (held, part)
    return best
