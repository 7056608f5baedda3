"""Oracles and shortcuts for tests of transfer plans."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

from mcore_rl.hybrid_engine.plan.trees import Leg, Tree
from mcore_rl.model.boxes import Box, contains, intersect, volume


def covers_once(box: Box, pieces: Sequence[Box]) -> bool:
    """Return whether `pieces` are a partition of `box`: inside it, disjoint, of its volume."""
    is_inside = all(contains(box, piece) for piece in pieces)
    overlaps = any(intersect(a, b) is not None for a, b in combinations(pieces, 2))
    return is_inside and not overlaps and sum(map(volume, pieces)) == volume(box)


def direct(source: int, receivers: Sequence[int]) -> Tree:
    """Return the tree of one hop from `source` to each of `receivers`, point to point."""
    ranks = tuple(sorted(receivers))
    return Tree(source, ranks, (tuple(Leg(source, (rank,)) for rank in ranks),))
