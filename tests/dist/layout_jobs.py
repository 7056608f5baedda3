"""One hand-over in one pair of layouts, and everything that the planner predicts about it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist

from mcore_rl.hybrid_engine.plan.placement import Placement, with_rank_map
from mcore_rl.hybrid_engine.switch_report import TO_ROLLOUT
from mcore_rl.megatron.adapter import broadcast_groups
from mcore_rl.model.boxes import Box, disjoint, volume
from mcore_rl.model.layout import RolloutLayout
from mcore_rl.model.tensors import checkpoint_tensors
from mcore_rl.planner.links import traffic_of
from tests.dist.jobs import handed_over_from_disk, started
from tests.engine_place import EnginePlace
from tests.model_shapes import MACHINE


def hand_over(
    flags: list[str], rollout_tp: int, rollout_dp: int, expert_parallel: bool
) -> dict[str, Any]:
    """Load by vLLM from disk, zero, hand over by Megatron, compare; planned and measured bytes."""
    job, _, shards = started(flags)
    rollout = RolloutLayout(dist.get_world_size(), rollout_tp, expert_parallel, rollout_dp)
    placement = Placement(job.spec.shape, job.spec.train_layout, job.spec.layers, rollout)
    rollout = with_rank_map(placement, ranks_per_node=dist.get_world_size())
    job = dataclasses.replace(job, spec=dataclasses.replace(job.spec, rollout_layout=rollout))
    rank = dist.get_rank()
    engine, manager, reports, from_disk, handed_over = handed_over_from_disk(job, shards)
    slot, place = rollout.slot(rank), EnginePlace.of(engine)
    traffic = traffic_of(placement, rollout.rank_map, MACHINE)
    connections, planned = manager.stream.transfer.connections, traffic.connections[rank]
    own_groups = [set(dist.get_process_group_ranks(g)) for g in broadcast_groups().values()]
    specs = {name: (spec.shape, spec.dtype) for name, spec in checkpoint_tensors(job.spec.shape)}
    tensors = manager.stream.tensors
    held = {name: shards.boxes(name) for name in tensors}
    result = {
        "stored_equal": handed_over == from_disk and len(from_disk) > 10,
        "engine_slot": [place.engine_index, place.tp_rank, place.ep_rank],
        "layout_slot": [
            slot // rollout.slots_per_engine,
            rollout.tp_rank(rank),
            slot % rollout.slots_per_engine if rollout.expert_parallel else 0,
        ],
        "received": next(r.received_bytes for r in reports if r.direction == TO_ROLLOUT),
        "planned": int(
            placement.received_bytes([rollout.rank(s) for s in range(rollout.world_size)])[rank]
        ),
        "lower_bound": manager.stream.lower_bound_bytes,
        "planned_lower_bound": int(placement.lower_bound_bytes[rank]),
        "resident": _bytes(tensors, manager.stream.need),
        "planned_resident": int(placement.resident_bytes[slot]),
        "held": _bytes(tensors, held),
        "planned_held": int(placement.trained_bytes[rank]),
        "other_needs": _other(
            expanded(placement, placement.needed[placement.slot_class[slot]]), manager.stream.need
        ),
        "other_holdings": _other(
            expanded(placement, placement.held[placement.train_class[rank]]), held
        ),
        "unlike_the_checkpoint": [
            name for name, info in tensors.items() if specs.get(name) != (info.shape, info.dtype)
        ],
        "groups": len(connections.groups),
        "groups_as_planned": connections.groups == planned.groups,
        "groups_are_megatrons": all(set(group) in own_groups for group in connections.groups),
        "speaks_point_to_point": [bool(connections.peers), bool(planned.peers)],
        "made_groups": manager.stream.transfer.num_groups,
        "planned_to_make": traffic.num_own_groups,
        "layout": f"{job.spec.train_layout.describe()} -> {rollout.describe()}",
    }
    engine.close()
    dist.destroy_process_group()
    return result


def expanded(
    placement: Placement, boxes: Mapping[str, tuple[Box, ...]]
) -> dict[str, tuple[Box, ...]]:
    """Boxes of fused tensors as boxes of the checkpoint's tensors."""
    found: dict[str, tuple[Box, ...]] = {}
    for fused, (box,) in boxes.items():
        tensor = placement.tensors[fused]
        cut = box[2:]
        if "." + tensor.spec.name not in fused:  # embedding, norm, head
            found[tensor.spec.name] = (cut,)
            continue
        is_moe = ".moe." in fused
        layers = [
            layer
            for chunk in placement.layers[tensor.stages[0]]
            for layer in chunk
            if placement.shape.is_moe_layer[layer] == is_moe
        ]
        for layer in layers:
            for expert in range(*box[1]):
                name = f"model.layers.{layer}.{tensor.spec.name.format(expert=expert)}"
                found[name] = (cut,)
    return found


def _other(
    expected: Mapping[str, tuple[Box, ...]], found: Mapping[str, tuple[Box, ...]]
) -> list[str]:
    """Tensors of which the table says something else than is so."""
    names = expected.keys() | {name for name, boxes in found.items() if boxes}
    return sorted(
        name for name in names if disjoint(expected.get(name, ())) != disjoint(found.get(name, ()))
    )


def _bytes(tensors: Mapping[str, Any], boxes: Mapping[str, tuple[Box, ...]]) -> int:
    return sum(
        volume(box) * tensors[name].itemsize
        for name, some in boxes.items()
        for box in disjoint(some)
    )
