"""Who has what and who needs what, made known to every rank, and what follows from it alone.

Collective, but only at the start of a run: the boxes depend on the layouts, not on the weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mcore_rl.common import objects
from mcore_rl.hybrid_engine.plan.moves import Boxes, TensorInfo
from mcore_rl.model.boxes import Box, uncovered, volume


@dataclass(frozen=True, slots=True)
class Holdings:
    """`have[rank]` and `need[rank]`: checkpoint tensor -> boxes. Equal ones are one object."""

    have: tuple[Boxes, ...]
    need: tuple[Boxes, ...]

    def lower_bound_bytes(self, rank: int, tensors: Mapping[str, TensorInfo]) -> int:
        """The least that `rank` could receive, whichever rank's place in rollout it took."""
        places = {id(need): need for need in self.need}
        return min(missing_bytes(tensors, self.have[rank], need) for need in places.values())


def exchange(have: Mapping[str, Sequence[Box]], need: Mapping[str, Sequence[Box]]) -> Holdings:
    """Tell all ranks what this one has and needs. Collective over the world."""
    mine = tuple(
        {name: tuple(some) for name, some in boxes.items() if some} for boxes in (have, need)
    )
    everybody = objects.all_gather(mine)
    known: dict[frozenset[Any], Boxes] = {}

    def only_one(boxes: Boxes) -> Boxes:
        return known.setdefault(frozenset(boxes.items()), boxes)

    return Holdings(
        have=tuple(only_one(held) for held, _ in everybody),
        need=tuple(only_one(needed) for _, needed in everybody),
    )


def missing_bytes(tensors: Mapping[str, TensorInfo], have: Boxes, need: Boxes) -> int:
    """What is needed and not held."""
    return sum(
        volume(part) * tensors[name].itemsize
        for name, boxes in need.items()
        for box in boxes
        for part in uncovered(box, have.get(name, ()))
    )
