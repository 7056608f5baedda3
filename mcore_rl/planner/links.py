"""What a hand-over moves, over which links and in which time: by the planning of the run itself.

The moves are those of `plan.make_plan`, with the tensors of a stage taken together (see
`placement`), so that received bytes are exact. What each replica of a slice sends depends on how
finely sources take turns: a run, which plans tensor by tensor, spreads it at least as evenly.

This module is pure: it imports neither Megatron nor vLLM nor torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mcore_rl.hybrid_engine.layout import TrainLayout
from mcore_rl.hybrid_engine.placement import Placement
from mcore_rl.hybrid_engine.plan import Neighbourhoods, Plan, make_plan
from mcore_rl.planner.settings import Machine

Bytes = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes of one hand-over, each `[ranks]` int64.

    A receiver counts what comes from another node as such, even if a neighbour receives the same. A
    source counts what it sends once, however many receive it, and as sent to other nodes if any
    receiver is there.
    """

    received_own_node: Bytes
    received_other_nodes: Bytes
    sent_own_node: Bytes
    sent_other_nodes: Bytes
    lower_bound: Bytes
    resident: Bytes  # needed for rollout, received or held

    @property
    def received(self) -> Bytes:
        return self.received_own_node + self.received_other_nodes

    @property
    def sent(self) -> Bytes:
        return self.sent_own_node + self.sent_other_nodes

    def seconds(self, machine: Machine) -> float:
        """Of the slowest rank, at full rates, both directions and both kinds of links at a time."""
        own = np.maximum(self.received_own_node, self.sent_own_node) / machine.own_node_rate
        other = np.maximum(self.received_other_nodes, self.sent_other_nodes)
        return float(np.maximum(own, other / machine.other_nodes_rate).max())


def neighbourhoods(train: TrainLayout, ranks_per_node: int) -> Neighbourhoods:
    """As in a run: nodes of consecutive ranks, and pipelines."""
    ranks = range(train.world_size)
    return Neighbourhoods(
        node=tuple(rank // ranks_per_node for rank in ranks),
        pipeline=tuple(train.pp_group(rank)[0] for rank in ranks),
    )


def plan_moves(placement: Placement, rank_map: Sequence[int], near: Neighbourhoods) -> Plan:
    """The moves of all ranks under slot -> rank."""
    slot_of = dict(zip(rank_map, range(len(rank_map)), strict=True))
    ranks = range(placement.train.world_size)
    return make_plan(
        placement.infos,
        order=list(placement.infos),
        have=[placement.held[placement.train_class[rank]] for rank in ranks],
        need=[placement.needed[placement.slot_class[slot_of[rank]]] for rank in ranks],
        near=near,
    )


def traffic_of(placement: Placement, rank_map: Sequence[int], machine: Machine) -> Traffic:
    """What every rank sends and receives under slot -> rank; an empty map is the identity."""
    world = placement.train.world_size
    rank_map = rank_map or range(world)
    near = neighbourhoods(placement.train, machine.ranks_per_node)
    plan = plan_moves(placement, rank_map, near)
    node = np.array(near.node)
    received, sent = np.zeros((2, 2, world), dtype=np.int64)  # each [own node or others, ranks]
    for move in plan.moves:
        receivers = np.array(move.receivers)
        elsewhere = (node[receivers] != node[move.source]).astype(np.intp)
        received[elsewhere, receivers] += move.num_bytes
        sent[int(elsewhere.any()), move.source] += move.num_bytes
    resident = np.empty(world, dtype=np.int64)
    resident[np.array(rank_map)] = placement.resident_bytes
    return Traffic(
        received[0], received[1], sent[0], sent[1], placement.lower_bound_bytes, resident
    )


def gather_bytes(placement: Placement) -> Bytes:
    """`[ranks]`: what a rank receives where every tensor is gathered whole on every rank.

    The usual export: broadcast over PP, all-gather over TP, every expert over EP, whatever the
    engine needs.
    """
    whole = sum(info.num_bytes for info in placement.infos.values())
    return whole - placement.trained_bytes
