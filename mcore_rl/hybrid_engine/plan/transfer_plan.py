"""Planner of moves from holdings and needs: the same list on every rank.

Pure: holdings and needs are boxes of checkpoint tensors, the result is a dataclass. Every needed
element is covered exactly once, either by a move or by the receiver itself.

If several ranks hold a slice, a receiver takes it from the nearest: first from its own pipeline in
its own node, then from its node, its pipeline, and any rank. Ranks that have received the slice
pass it on (see `trees`). Among equally near holders, the one with the least to send so far is
chosen.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mcore_rl.hybrid_engine.plan.trees import Forest, KnownGroups, Neighbourhoods, Tree
from mcore_rl.model.boxes import Box, Boxes, intersect, show, subtract, uncovered, volume
from mcore_rl.model.tensors import TensorInfo

_MANY_BOXES = 16
_WAYS = 4  # forests per set of holders and receivers: more balance better but take more messages


@dataclass(frozen=True, slots=True)
class Move:
    """One box of one tensor that travels from a rank that holds it along a tree of receivers.

    Example: `Move("model.norm.weight", ((0, 7168),), tree, num_bytes=14336)`.
    """

    tensor: str
    box: Box
    tree: Tree
    num_bytes: int

    @property
    def source(self) -> int:
        return self.tree.source

    @property
    def receivers(self) -> tuple[int, ...]:
        return self.tree.receivers


@dataclass(frozen=True, slots=True)
class Plan:
    """Moves in the order of the tensors; every rank holds the same plan."""

    moves: tuple[Move, ...]

    def received_bytes(self, rank: int) -> int:
        return sum(m.num_bytes for m in self.moves if rank in m.receivers)

    def sent_bytes(self, rank: int) -> int:
        """Return the bytes that `rank` sends or passes on; a broadcast counts once."""
        return sum(m.num_bytes * m.tree.sends(rank) for m in self.moves)


def make_plan(
    tensors: Mapping[str, TensorInfo],
    *,
    order: Sequence[str],
    have: Sequence[Boxes],
    need: Sequence[Boxes],
    near: Neighbourhoods | None = None,
    groups: KnownGroups | None = None,
    load: list[int] | None = None,
) -> Plan:
    """Plan the moves of all ranks.

    `have[rank]` and `need[rank]` are that rank's boxes; `order` names the tensors in the order in
    which they travel. Ranks may share one mapping object, which saves work. `near` is None if all
    ranks are equally near, `groups` if there are no groups to broadcast in. `load` holds the bytes
    that each rank already has to send; the plan's are added to it. Raises RuntimeError naming the
    tensor, rank and box that no rank holds.
    """
    near, known_groups = near or Neighbourhoods.alike(len(have)), groups or KnownGroups()
    groups_of_ranks = by_object(have, need)
    load = [0] * len(have) if load is None else load
    # Most tensors of a stage share holders and receivers, and take the same forests in turn.
    known: dict[tuple[tuple[int, ...], tuple[int, ...]], deque[Forest]] = {}
    moves: list[Move] = []
    for tensor in order:
        itemsize = tensors[tensor].itemsize
        holders: dict[Box, list[int]] = defaultdict(list)
        missing: dict[Box, list[int]] = defaultdict(list)
        for (held, needed), ranks in groups_of_ranks:
            boxes = held.get(tensor, ())
            for box in boxes:
                holders[box].extend(ranks)
            for box in needed.get(tensor, ()):
                for part in uncovered(box, boxes):
                    missing[part].extend(ranks)
        wanted = _cut_by_holder(tensor, missing, holders)
        for (box, held_box), ranks in sorted(wanted.items()):
            num_bytes = volume(box) * itemsize
            ends = tuple(sorted(ranks)), tuple(sorted(holders[held_box]))
            ways = known.setdefault(ends, deque())
            if not ways or (ways[-1].has_choice and len(ways) < _WAYS):
                ways.append(Forest(ends[1], ends[0], near, known_groups, load))
            else:
                ways.rotate(-1)
            for tree in ways[-1].trees:
                for leg in tree.legs:
                    load[leg.sender] += num_bytes
                moves.append(Move(tensor, box, tree, num_bytes))
    return Plan(tuple(moves))


def by_object(*by_rank: Sequence[Boxes]) -> list[tuple[tuple[Boxes, ...], list[int]]]:
    """Group the ranks whose mappings are the same objects (see `weight_stream.exchange`)."""
    ranks: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for rank, mappings in enumerate(zip(*by_rank, strict=True)):
        ranks[tuple(map(id, mappings))].append(rank)
    return [(tuple(each[some[0]] for each in by_rank), some) for some in ranks.values()]


def _cut_by_holder(
    tensor: str, missing: Mapping[Box, Sequence[int]], holders: Mapping[Box, Sequence[int]]
) -> dict[tuple[Box, Box], list[int]]:
    """Cut missing boxes where holders change: (part, held box around it) -> receivers."""
    wanted: dict[tuple[Box, Box], list[int]] = defaultdict(list)
    held_boxes = sorted(holders)
    ranges = np.array(held_boxes, dtype=np.int64)  # [boxes, dimensions, 2]
    for box, ranks in missing.items():
        left = [box]
        while left:
            rest = left.pop()
            held, part = _best_overlap(rest, held_boxes, ranges)
            if part is None:
                raise RuntimeError(
                    f"rank {min(ranks)} needs {tensor}{show(rest)} and no rank holds it; the "
                    "weight map and the engine's needs do not describe the same checkpoint"
                )
            wanted[part, held].extend(ranks)
            left.extend(subtract(rest, part))
    return wanted


def _best_overlap(
    box: Box, held_boxes: Sequence[Box], ranges: npt.NDArray[np.int64]
) -> tuple[Box, Box | None]:
    """Return the held box that overlaps `box` most, and the overlap; the first of equals.

    `ranges` are the held boxes as an array, which is used if there are many: experts on thousands
    of ranks.
    """
    if len(held_boxes) > _MANY_BOXES and box:
        mine = np.array(box, dtype=np.int64)
        shared = np.minimum(ranges[..., 1], mine[:, 1]) - np.maximum(ranges[..., 0], mine[:, 0])
        volumes = np.maximum(shared, 0).prod(axis=1)
        best_held = held_boxes[int(volumes.argmax())]
        return best_held, intersect(box, best_held)
    best: tuple[Box, Box | None] = ((), None)
    for held in held_boxes:
        part = intersect(box, held)
        if part is not None and (best[1] is None or volume(part) > volume(best[1])):
            best = (held, part)
    return best
