"""Traffic of a hand-over by link, and its duration, from the planning code of the run itself.

The moves come from `plan.make_plan`, with all tensors of a stage planned together (see
`placement`), so received bytes are exact. The bytes that each replica of a slice sends depend on
how often sources alternate: a run, which plans tensor by tensor, spreads them at least as evenly.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import numpy.typing as npt

from mcore_rl.hybrid_engine.plan.placement import Placement
from mcore_rl.hybrid_engine.plan.transfer_plan import Move, Plan, make_plan
from mcore_rl.hybrid_engine.plan.trees import (
    Connections,
    KnownGroups,
    Neighbourhoods,
    connections,
)
from mcore_rl.model.boxes import Boxes
from mcore_rl.model.layout import TrainLayout
from mcore_rl.planner.models import Bytes
from mcore_rl.planner.settings import Machine


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes of one hand-over, each `[ranks]` int64; the trainers are first if engines have ranks of
    their own.

    A receiver counts bytes from another node as such, even if a neighbour receives the same
    broadcast. A sender counts a broadcast once, whatever the number of receivers, and as sent to
    other nodes if any receiver is on another node; forwarded bytes count as sent, too.
    """

    received_own_node: Bytes
    received_other_nodes: Bytes
    sent_own_node: Bytes
    sent_other_nodes: Bytes
    lower_bound: Bytes
    resident: Bytes  # needed for rollout, received or held
    connections: tuple[Connections, ...]  # of each rank

    @property
    def received(self) -> Bytes:
        return self.received_own_node + self.received_other_nodes

    @property
    def sent(self) -> Bytes:
        return self.sent_own_node + self.sent_other_nodes

    @property
    def num_own_groups(self) -> int:
        """Process groups made for the hand-over: one of all ranks, if any two ranks exchange point
        to point and no Megatron group (all other groups are Megatron's) has all ranks."""
        everyone = frozenset(range(len(self.connections)))
        return int(any(c.peers and everyone not in c.groups for c in self.connections))

    @property
    def num_communicators(self) -> Bytes:
        """`[ranks]`: number of each rank's process groups, including Megatron's."""
        own = self.num_own_groups
        return np.array([own + len(of_rank.groups) for of_rank in self.connections])

    @property
    def num_communicators_in_all(self) -> int:
        used = set().union(*(of_rank.groups for of_rank in self.connections))
        return self.num_own_groups + len(used)

    @property
    def num_peers(self) -> Bytes:
        """`[ranks]`: number of each rank's point-to-point peers."""
        return np.array([len(of_rank.peers) for of_rank in self.connections])

    def seconds(self, machine: Machine) -> float:
        """Return the seconds of the slowest rank, which uses both kinds of link in both directions
        at once."""
        own = np.maximum(self.received_own_node, self.sent_own_node) / machine.own_node_rate
        other = np.maximum(self.received_other_nodes, self.sent_other_nodes)
        return float(np.maximum(own, other / machine.other_nodes_rate).max())


def neighbourhoods(
    train: TrainLayout, ranks_per_node: int, num_engine_ranks: int = 0
) -> Neighbourhoods:
    """Return each rank's node and pipeline, as in a run: a node has consecutive ranks. Where
    `num_engine_ranks` follow the trainers, pipelines do not count."""
    ranks = range(train.world_size + num_engine_ranks)
    return Neighbourhoods(
        node=tuple(rank // ranks_per_node for rank in ranks),
        pipeline=tuple(0 if num_engine_ranks else train.pp_group(rank)[0] for rank in ranks),
    )


def plan_moves(
    placement: Placement,
    rank_map: Sequence[int],
    near: Neighbourhoods,
    *,
    is_separate: bool = False,
) -> Plan:
    """Return the moves of all ranks under slot -> rank, in the order of the stages. If engines
    have ranks of their own, these follow the trainers, and `rank_map` counts from the first."""
    slot_of = dict(zip(rank_map, range(len(rank_map)), strict=True))
    ranks = range(placement.train.world_size)
    groups = _groups(placement, is_separate)
    stage_of = [placement.train.pp_rank(rank) for rank in ranks]
    slot_class = [placement.slot_class[slot_of[rank]] for rank in range(len(rank_map))]
    nothing: Boxes = {}
    # What the other side holds, or needs.
    of_engines = [nothing] * len(rank_map) if is_separate else []
    of_trainers = [nothing] * len(ranks) if is_separate else []
    load = [0] * len(near.node)
    moves: list[Move] = []
    for stages, tensors in _by_holders(placement).items():
        needed = {
            at: {name: boxes[name] for name in tensors if name in boxes}
            for at, boxes in placement.needed.items()
        }
        plan = make_plan(
            placement.infos,
            order=tensors,
            have=[
                placement.held[placement.train_class[rank]] if stage_of[rank] in stages else nothing
                for rank in ranks
            ]
            + of_engines,
            need=of_trainers + [needed[at] for at in slot_class],
            near=near,
            groups=groups,
            load=load,
        )
        moves.extend(plan.moves)
    return Plan(tuple(moves))


def _by_holders(placement: Placement) -> dict[tuple[int, ...], list[str]]:
    """Return stages -> tensors that they hold; stages that share a tensor form one entry."""
    tensors = placement.tensors.values()
    joined = {stage: t.stages for t in tensors if len(t.stages) > 1 for stage in t.stages}
    by_stages: dict[tuple[int, ...], list[str]] = defaultdict(list)
    for tensor in tensors:
        by_stages[joined.get(tensor.stages[0], tensor.stages)].append(tensor.name)
    return by_stages


def traffic_of(
    placement: Placement, rank_map: Sequence[int], machine: Machine, *, is_separate: bool = False
) -> Traffic:
    """Return each rank's traffic under slot -> rank; an empty map is the identity.

    If engines have ranks of their own, these follow the trainers. They hold nothing of training, so
    that each must receive everything it needs."""
    num_engine_ranks = placement.rollout.world_size
    rank_map = rank_map or range(num_engine_ranks)
    near = neighbourhoods(
        placement.train, machine.ranks_per_node, num_engine_ranks if is_separate else 0
    )
    plan = plan_moves(placement, rank_map, near, is_separate=is_separate)
    received, sent = _over_links(plan, np.array(near.node))
    resident = np.empty(num_engine_ranks, dtype=np.int64)
    resident[np.array(rank_map)] = placement.resident_bytes
    if is_separate:
        resident = np.concatenate([np.zeros(placement.train.world_size, np.int64), resident])
    known = _groups(placement, is_separate).sets
    return Traffic(
        received[0],
        received[1],
        sent[0],
        sent[1],
        resident if is_separate else placement.lower_bound_bytes,
        resident,
        tuple(connections((move.tree for move in plan.moves), known, len(near.node))),
    )


def _groups(placement: Placement, is_separate: bool) -> KnownGroups:
    """Return Megatron's groups; between trainers and engines none is of use."""
    return KnownGroups() if is_separate else KnownGroups(placement.train.groups().values())


def _over_links(plan: Plan, node: npt.NDArray[np.int64]) -> tuple[Bytes, Bytes]:
    """Return received and sent bytes, each `[own node or others, ranks]`; `node` is `[ranks]`."""
    received, sent = np.zeros((2, 2, len(node)), dtype=np.int64)
    # By identity: many moves share one tree of thousands of ranks, which is slow to hash.
    trees = {id(move.tree): move.tree for move in plan.moves}
    along = dict.fromkeys(trees, 0)
    for move in plan.moves:
        along[id(move.tree)] += move.num_bytes
    legs = [(leg, along[key]) for key, tree in trees.items() for leg in tree.legs]
    if not legs:
        return received, sent
    senders = np.array([leg.sender for leg, _ in legs])
    sizes = np.array([size for _, size in legs])
    counts = np.array([len(leg.receivers) for leg, _ in legs])
    receivers = np.fromiter(chain.from_iterable(leg.receivers for leg, _ in legs), np.int64)
    elsewhere = (node[receivers] != node[np.repeat(senders, counts)]).astype(np.intp)
    np.add.at(received, (elsewhere, receivers), np.repeat(sizes, counts))
    any_elsewhere = np.maximum.reduceat(elsewhere, np.cumsum(counts) - counts)
    np.add.at(sent, (any_elsewhere, senders), sizes)
    return received, sent


def gather_bytes(placement: Placement, *, is_separate: bool = False) -> Bytes:
    """Return `[ranks]`: received bytes if every rank gathers every complete tensor."""
    whole = sum(info.num_bytes for info in placement.infos.values())
    held = placement.trained_bytes
    if is_separate:
        held = np.concatenate([held, np.zeros(placement.rollout.world_size, np.int64)])
    return whole - held
