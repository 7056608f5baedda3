"""From who has what and who needs what to moves: the same list on every rank.

Pure: holdings and needs are boxes of checkpoint tensors, the result is a dataclass. Every needed
element is covered exactly once, either by a move or by the receiver itself. What several ranks need
of one source goes out once, to all of them.

Where a slice lies on several ranks, a receiver takes it from the nearest: first those of its own
pipeline in its own node, then its node, then its pipeline, then anywhere. Among equally near ones
the one that has the least to send so far is taken, and receivers that have the same choice get the
same source, so that the slice is not sent twice for no reason.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mcore_rl.hybrid_engine.boxes import Box, intersect, show, subtract, uncovered, volume

Boxes = Mapping[str, Sequence[Box]]  # tensor -> disjoint boxes
Choices = dict[tuple[int, ...], list[int]]  # holders that may be the source -> receivers
_MANY_BOXES = 16


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
class Neighbourhoods:
    """Which ranks are near each other: equal numbers, one per rank.

    Ranks of a node share its links; ranks of a pipeline (a PP group) hold the same part of every
    layer, each of other layers.
    """

    node: tuple[int, ...]
    pipeline: tuple[int, ...]

    @classmethod
    def alike(cls, world_size: int) -> Neighbourhoods:
        """No rank is nearer than another."""
        return cls((0,) * world_size, (0,) * world_size)


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
    near: Neighbourhoods | None = None,
) -> Plan:
    """Plan the moves of all ranks.

    `have[rank]` and `need[rank]` are that rank's boxes; `order` names the tensors in the order in
    which they travel. Ranks may share one mapping object, which saves work. `near` is None where
    all ranks are equally near. Raises RuntimeError naming the tensor, rank and box that nobody
    holds.
    """
    near = near or Neighbourhoods.alike(len(have))
    groups = _by_object(have, need)
    load = [0] * len(have)
    # Most tensors of a stage have the same holders and receivers.
    known: dict[tuple[tuple[int, ...], tuple[int, ...]], Choices] = {}
    moves: list[Move] = []
    for tensor in order:
        itemsize = tensors[tensor].itemsize
        holders: dict[Box, list[int]] = defaultdict(list)
        missing: dict[Box, list[int]] = defaultdict(list)
        for (held, needed), ranks in groups:
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
            if ends not in known:
                known[ends] = _choices(*ends, near)
            for source, receivers in _sources(known[ends], load):
                load[source] += num_bytes
                moves.append(Move(tensor, box, source, tuple(receivers), num_bytes))
    return Plan(tuple(moves))


def _by_object(
    have: Sequence[Boxes], need: Sequence[Boxes]
) -> list[tuple[tuple[Boxes, Boxes], list[int]]]:
    """Ranks that have and need the same, as far as the caller gave them the same objects."""
    ranks: dict[tuple[int, int], list[int]] = defaultdict(list)
    for rank, (held, needed) in enumerate(zip(have, need, strict=True)):
        ranks[id(held), id(needed)].append(rank)
    return [((have[some[0]], need[some[0]]), some) for some in ranks.values()]


def _cut_by_holder(
    tensor: str, missing: Mapping[Box, Sequence[int]], holders: Mapping[Box, Sequence[int]]
) -> dict[tuple[Box, Box], list[int]]:
    """(part, held box it lies in) -> receivers: each missing box, cut where its holders change."""
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


def _choices(receivers: Sequence[int], holders: Sequence[int], near: Neighbourhoods) -> Choices:
    """The nearest holders of each receiver -> the receivers that have these."""
    if len(holders) == 1:
        return {tuple(holders): list(receivers)}
    by_node, by_pipeline, by_both = _index(holders, near)
    choices: Choices = defaultdict(list)
    for rank in receivers:
        node, pipeline = near.node[rank], near.pipeline[rank]
        choice = (
            by_both.get((node, pipeline))
            or by_node.get(node)
            or by_pipeline.get(pipeline)
            or holders
        )
        choices[tuple(choice)].append(rank)
    return choices


def _sources(choices: Choices, load: Sequence[int]) -> list[tuple[int, list[int]]]:
    """(source, its receivers): of each choice of holders the one that is least loaded."""
    found: dict[int, list[int]] = defaultdict(list)
    for choice, ranks in choices.items():
        found[min(choice, key=lambda holder: (load[holder], holder))].extend(ranks)
    return [(source, sorted(ranks)) for source, ranks in sorted(found.items())]


def _index(
    holders: Sequence[int], near: Neighbourhoods
) -> tuple[
    dict[int, list[int]],
    dict[int, list[int]],
    dict[tuple[int, int], list[int]],
]:
    """Holders by node, by pipeline and by both."""
    by_node: dict[int, list[int]] = defaultdict(list)
    by_pipeline: dict[int, list[int]] = defaultdict(list)
    by_both: dict[tuple[int, int], list[int]] = defaultdict(list)
    for rank in holders:
        node, pipeline = near.node[rank], near.pipeline[rank]
        by_node[node].append(rank)
        by_pipeline[pipeline].append(rank)
        by_both[node, pipeline].append(rank)
    return by_node, by_pipeline, by_both


def _best_overlap(
    box: Box, held_boxes: Sequence[Box], ranges: npt.NDArray[np.int64]
) -> tuple[Box, Box | None]:
    """The held box that overlaps `box` most, and the overlap; the first of equals.

    `ranges` are the held boxes as an array. Where there are many, as experts make them on thousands
    of ranks, they are compared there.
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
