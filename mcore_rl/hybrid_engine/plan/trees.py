"""Trees along which a slice travels from the ranks that hold it to all that need it.

Process groups and peers are costly on a device, so ranks that need the same slice do not get their
own group. A slice travels in hops, and a rank that has received it passes it on. It does so by
broadcast if one of Megatron's existing process groups consists of one rank that has the slice and
ranks that all still need it, else point to point. No rank receives a slice twice or without needing
it, whoever passes it on.

Example: DeepSeek-V3's engines keep shared experts unsharded. A TP rank's part of them first travels
to the other stages in the PP groups; each of these ranks then sends it to its TP group, in a node.

This module is pure: it imports neither Megatron nor vLLM nor torch.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True, slots=True)
class Leg:
    """A send of a slice by `sender`: to one rank, or by broadcast to the rest of a known group."""

    sender: int
    receivers: tuple[int, ...]

    @property
    def ranks(self) -> frozenset[int]:
        return frozenset((self.sender, *self.receivers))


@dataclass(frozen=True, slots=True)
class Tree:
    """The legs from `source` to all `receivers` (ascending); one leg reaches each receiver.

    A leg starts from a rank that has the slice: the source, or one that an earlier hop reached.

    Example: rank 0 sends to 2, then 0 and 2 broadcast in the groups {0, 1} and {2, 3}:

        Tree(0, (1, 2, 3), ((Leg(0, (2,)),), (Leg(0, (1,)), Leg(2, (3,)))))
    """

    source: int
    receivers: tuple[int, ...]
    hops: tuple[tuple[Leg, ...], ...]

    @property
    def ranks(self) -> frozenset[int]:
        return frozenset((self.source, *self.receivers))

    @property
    def legs(self) -> Iterable[Leg]:
        return (leg for hop in self.hops for leg in hop)

    def sends(self, rank: int) -> int:
        """Return how often `rank` sends the slice; a broadcast counts once."""
        return sum(leg.sender == rank for leg in self.legs)


@dataclass(frozen=True, slots=True)
class Neighbourhoods:
    """Nodes and pipelines of the ranks, a number per rank: equal numbers are near each other.

    Ranks of a node share its links. Ranks of a pipeline (a PP group) hold the same shard, each of
    different layers.

    Example: two nodes of two ranks, TP2 x PP2: `Neighbourhoods(node=(0, 0, 1, 1), pipeline=(0, 1,
    0, 1))`.
    """

    node: tuple[int, ...]
    pipeline: tuple[int, ...]

    @classmethod
    def alike(cls, world_size: int) -> Neighbourhoods:
        """Return neighbourhoods in which all ranks are equally near."""
        return cls((0,) * world_size, (0,) * world_size)


class KnownGroups:
    """Existing process groups, in families that each partition the ranks; earlier ones go first."""

    def __init__(self, families: Iterable[Sequence[Sequence[int]]] = ()) -> None:
        self._of_rank = [
            {rank: group for group in map(frozenset, family) if len(group) > 1 for rank in group}
            for family in families
        ]

    def __iter__(self) -> Iterator[Mapping[int, frozenset[int]]]:
        return iter(self._of_rank)

    @property
    def sets(self) -> frozenset[frozenset[int]]:
        return frozenset(group for family in self._of_rank for group in family.values())


class Forest:
    """The trees that bring one slice from its holders to its receivers.

    `load` holds the bytes that each rank has to send so far: among ranks that are equally near and
    free, the one with the least is chosen. `has_choice` is whether the load may have mattered.
    """

    def __init__(
        self,
        holders: Sequence[int],
        receivers: Collection[int],
        near: Neighbourhoods,
        groups: KnownGroups,
        load: Sequence[int],
    ) -> None:
        self._near, self._load = near, load
        self._waiting = set(receivers)
        self._free_at = dict.fromkeys(holders, 0)  # the hop in which a rank can send next
        self._root = {rank: rank for rank in holders}
        self._legs: dict[int, list[tuple[int, Leg]]] = defaultdict(list)  # of each root
        self.has_choice = False
        for family in groups:
            if self._waiting:
                self._broadcast(family)
        if self._waiting:
            self._pass_on()

    @cached_property
    def trees(self) -> list[Tree]:
        """The trees, ordered by source."""
        return [_tree(root, legs) for root, legs in sorted(self._legs.items())]

    def _broadcast(self, family: Mapping[int, frozenset[int]]) -> None:
        """Broadcast in each group of one rank that has the slice and others that all need it."""
        for rank in sorted(self._free_at):
            group = family.get(rank)
            if group is None or not self._waiting:
                continue
            others = group - {rank}
            if others <= self._waiting:
                self._add(rank, tuple(sorted(others)))

    def _add(self, sender: int, receivers: tuple[int, ...]) -> None:
        root, hop = self._root[sender], self._free_at[sender]
        self._legs[root].append((hop, Leg(sender, receivers)))
        self._free_at[sender] = hop + 1
        for rank in receivers:
            self._root[rank], self._free_at[rank] = root, hop + 1
        self._waiting.difference_update(receivers)

    def _pass_on(self) -> None:
        """Send to the remaining ranks one by one, each from the nearest rank that has the slice.

        Among equally near ranks, the one that is free first sends. A slice of one rank thus reaches
        n more in log2(n) hops, and no rank sends much more often than the others.
        """
        free: dict[tuple[int, int], list[tuple[int, int, int]]] = defaultdict(list)

        def offer(rank: int) -> None:
            entry = self._free_at[rank], self._load[rank], rank
            for place in self._places(rank):
                heapq.heappush(free[place], entry)

        self.has_choice = len(self._free_at) + len(self._waiting) > 2
        for rank in self._free_at:
            offer(rank)
        # Ranks with less to send go first, since early receivers pass the slice on more often.
        for rank in sorted(self._waiting, key=lambda rank: (self._load[rank], rank)):
            entries = next(free[place] for place in self._places(rank) if free[place])
            while entries[0][0] != self._free_at[entries[0][2]]:
                heapq.heappop(entries)  # it has sent since
            sender = entries[0][2]
            self._add(sender, (rank,))
            offer(sender)
            offer(rank)

    def _places(self, rank: int) -> tuple[tuple[int, int], ...]:
        """Return the places of `rank`, nearest first: node and pipeline, node, pipeline, world."""
        node, pipeline = self._near.node[rank], self._near.pipeline[rank]
        return (node, pipeline), (node, -1), (-1, pipeline), (-1, -1)


def _tree(root: int, legs: Sequence[tuple[int, Leg]]) -> Tree:
    hops: list[list[Leg]] = [[] for _ in range(1 + max(hop for hop, _ in legs))]
    for hop, leg in legs:
        hops[hop].append(leg)
    receivers = sorted(rank for _, leg in legs for rank in leg.receivers)
    ordered = (tuple(sorted(some, key=lambda leg: leg.sender)) for some in hops)
    return Tree(root, tuple(receivers), tuple(ordered))


@dataclass(frozen=True, slots=True)
class Connections:
    """The groups and peers that a rank's part in some trees needs on its device."""

    groups: frozenset[frozenset[int]]  # known groups: for broadcasts, or of all ranks for the rest
    peers: frozenset[int]  # point-to-point peers


def connections(
    trees: Iterable[Tree], known: Collection[frozenset[int]], world_size: int
) -> list[Connections]:
    """Return each rank's connections: `known` groups that `trees` use, and peers outside them."""
    groups: list[set[frozenset[int]]] = [set() for _ in range(world_size)]
    peers: list[set[int]] = [set() for _ in range(world_size)]
    everyone = frozenset(range(world_size))
    different = {id(tree): tree for tree in trees}.values()  # few objects occur many times
    for leg in {leg for tree in different for leg in tree.legs}:
        ranks = leg.ranks
        for rank in ranks:
            if ranks in known:
                groups[rank].add(ranks)
                continue
            peers[rank].update(ranks - {rank} if rank == leg.sender else {leg.sender})
            if everyone in known:
                groups[rank].add(everyone)
    return [
        Connections(frozenset(of_rank), frozenset(others))
        for of_rank, others in zip(groups, peers, strict=True)
    ]
