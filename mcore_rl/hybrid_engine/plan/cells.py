"""Cells: a cut of each tensor such that every held or needed box consists of complete parts.

The edges of all held and all needed boxes of a tensor form a grid; its squares are the cells. A box
contains a cell completely or not at all. Hashes of cells at the source can therefore be compared
with hashes where the cells arrive, whatever way they took.

One of its holders attests each needed cell, so that every element counts once in the world. All
ranks have about equal work.

Pure: boxes in, dataclasses out, the same on every rank.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from mcore_rl.hybrid_engine.plan.transfer_plan import by_object
from mcore_rl.model.boxes import Box, Boxes, show, volume
from mcore_rl.model.tensors import TensorInfo


@dataclass(frozen=True, slots=True)
class Cell:
    """A slice that every held and every needed box contains or does not touch.

    Example: `Cell("lm_head.weight", ((0, 64), (0, 7168)), holders=(0, 2), owner=0, number=17)`.
    """

    tensor: str
    box: Box
    holders: tuple[int, ...]  # ascending
    owner: int  # the holder that attests it
    number: int  # counts the cells of all tensors


def make_cells(
    tensors: Mapping[str, TensorInfo], have: Sequence[Boxes], need: Sequence[Boxes]
) -> dict[str, tuple[Cell, ...]]:
    """Return the cells of each tensor that any rank needs; they cover each needed element once.

    `have[rank]` and `need[rank]` are that rank's boxes. Pure, and the same on every rank. Raises
    RuntimeError naming the rank, tensor and slice that no rank holds.
    """
    held: dict[str, dict[Box, list[int]]] = defaultdict(lambda: defaultdict(list))
    needed: dict[str, dict[Box, int]] = defaultdict(dict)  # box -> a rank that needs it
    for (holdings,), ranks in by_object(have):
        for tensor, boxes in holdings.items():
            for box in boxes:
                held[tensor][box].extend(ranks)
    for (needs,), ranks in by_object(need):
        for tensor, boxes in needs.items():
            for box in boxes:
                needed[tensor].setdefault(box, ranks[0])
    cells: dict[str, tuple[Cell, ...]] = {}
    load = [0] * len(have)
    numbers = itertools.count()
    for tensor in sorted(needed):
        itemsize, of_tensor = tensors[tensor].itemsize, []
        for box, holders in _refined(tensor, held[tensor], needed[tensor]):
            owner = min(holders, key=lambda rank: (load[rank], rank))
            load[owner] += volume(box) * itemsize
            of_tensor.append(Cell(tensor, box, tuple(sorted(holders)), owner, next(numbers)))
        cells[tensor] = tuple(of_tensor)
    return cells


def _refined(
    tensor: str, held: Mapping[Box, list[int]], needed: Mapping[Box, int]
) -> Iterator[tuple[Box, set[int]]]:
    """Yield (box, holders) of every needed cell, on the grid that all boxes' edges form."""
    dims = len(next(iter(needed)))
    edges = [sorted({edge for box in (*held, *needed) for edge in box[dim]}) for dim in range(dims)]
    holders: dict[tuple[int, ...], set[int]] = defaultdict(set)
    for box, ranks in held.items():
        for at in _squares(box, edges):
            holders[at].update(ranks)
    wanted = {at: rank for box, rank in needed.items() for at in _squares(box, edges)}
    for at, rank in sorted(wanted.items()):
        box = tuple((edges[dim][i], edges[dim][i + 1]) for dim, i in enumerate(at))
        if not holders[at]:
            raise RuntimeError(f"rank {rank} needs {tensor}{show(box)} and no rank holds it")
        yield box, holders[at]


def _squares(box: Box, edges: Sequence[Sequence[int]]) -> Iterator[tuple[int, ...]]:
    """Return the grid positions of the squares of `box`."""
    ranges = (
        range(bisect_left(edges[dim], start), bisect_left(edges[dim], stop))
        for dim, (start, stop) in enumerate(box)
    )
    return itertools.product(*ranges)
