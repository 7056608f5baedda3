"""Complete memory of a case: the phases of a device, and the host memory of a node.

This module is pure: it imports neither Megatron nor vLLM nor torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from mcore_rl.hybrid_engine.plan.placement import Placement
from mcore_rl.model.tensors import Cut, embedding_specs, head_specs, layer_specs
from mcore_rl.moe.routing import RoutedLayers
from mcore_rl.planner.models import ACTOR, TrainedModel, optimizer_bytes, stage_state
from mcore_rl.planner.parameters import vocabulary_rows
from mcore_rl.planner.phases import Bytes, Case, DeviceMemory, States, device_memory

# Per sampled token: its id and its log-prob; a sent one has a byte more: whether it was generated.
SAMPLED_TOKEN_BYTES = 8
SENT_TOKEN_BYTES = SAMPLED_TOKEN_BYTES + 1
# Largest piece in which a checkpoint of the optimizer's states is written and read, see
# mcore_rl.patches.megatron.optimizer_in_pieces.
PIECE_BYTES = 64 << 20
# Size of the files of `checkpoint.export`; a rank holds one at once.
EXPORTED_FILE_BYTES = 5 << 30


@dataclass(frozen=True, slots=True)
class Memory(DeviceMemory):
    """All phases of a case, and the host memory of a node by purpose."""

    host_bytes: Mapping[str, int]

    @property
    def host_total_bytes(self) -> int:
        return sum(self.host_bytes.values())


def resident_of(case: Case) -> Bytes:
    """Return `[ranks]`: bytes that each rank holds for rollout."""
    placement = _placement_of(case)
    resident = np.empty(case.train.world_size, dtype=np.int64)
    resident[list(case.rollout.rank_map) or slice(None)] = placement.resident_bytes
    return resident


def received_of(case: Case) -> Bytes:
    """Return `[ranks]`: bytes that a hand-over brings each rank; it reads the rest in place."""
    placement = _placement_of(case)
    return placement.received_bytes(case.rollout.rank_map or range(case.train.world_size))


def _placement_of(case: Case) -> Placement:
    return Placement(case.shape, case.train, case.layers, case.rollout)


def memory_of(case: Case, resident_bytes: Bytes, traffic_bytes: int = 0) -> Memory:
    """Plan the memory of a case.

    `resident_bytes` `[ranks]` is what each rank holds for rollout; `traffic_bytes` is the most that
    a rank sends and receives in sum, of which delta transfers keep copies.
    """
    device = device_memory(case, resident_bytes)
    routed = routed_bytes(case, device.kv_cache.tokens)
    return Memory(device.phases, device.kv_cache, _host(case, traffic_bytes, routed))


def sampled_bytes(case: Case) -> int:
    """Return a rank's bytes of tokens and log-probs while samples travel to the ranks that train
    on them: its engine's samples, the copies that it sends, and those that it receives."""
    engine, train = case.engine, case.train
    # One message per receiver: the ranks of TP, CP and PP receive the same samples, and each rank
    # of an engine's TP group sends to a part of them.
    receivers = max(1, train.world_size // train.dp_size // case.rollout.tp_size)
    received = engine.sampled_tokens_in_all // train.dp_size * SENT_TOKEN_BYTES
    packed = engine.sampled_tokens * SENT_TOKEN_BYTES * (1 + receivers)
    kept = engine.sampled_tokens * SAMPLED_TOKEN_BYTES
    return kept + max(packed + received, 2 * received)


def routed_bytes(case: Case, kv_cache_tokens: int) -> dict[str, int]:
    """Return a rank's host bytes of the samples' chosen experts: those of its own samples with
    messages to and from other ranks, and those that vLLM keeps next to the KV cache.
    """
    experts, engine = case.shape.experts, case.engine
    if experts is None or not engine.replays_experts:
        return {}
    train = case.train
    routed = RoutedLayers(case.shape.moe_layers, experts.topk, experts.num_experts)
    a_token = routed.bytes_a_token
    kept = engine.sampled_tokens * a_token
    # One message per receiver; its neighbours in TP and CP receive the same.
    receivers = max(1, train.tp_size * train.cp_size // case.rollout.tp_size)
    fullest = max(
        sum(case.shape.is_moe_layer[layer] for chunk in stage for layer in chunk)
        for stage in case.layers
    )
    of_stage = RoutedLayers(tuple(range(fullest)), experts.topk, experts.num_experts)
    received = engine.sampled_tokens_in_all // train.dp_size * of_stage.bytes_a_token
    return {
        "experts of samples": kept + max(kept * (1 + receivers) + received, 2 * received),
        "experts in vLLM": kv_cache_tokens
        * case.shape.num_layers
        * (a_token - 1)
        // len(routed.layers),
    }


def exported_file_bytes(case: Case) -> int:
    shape = case.shape
    of_kind = {
        is_moe: sum(spec.num_bytes for spec in layer_specs(shape, is_moe=is_moe))
        for is_moe in set(shape.is_moe_layer)
    }
    ends = sum(spec.num_bytes for spec in (*embedding_specs(shape), *head_specs(shape)))
    return min(EXPORTED_FILE_BYTES, ends + sum(of_kind[kind] for kind in shape.is_moe_layer))


def _host(case: Case, traffic_bytes: int, routed: Mapping[str, int]) -> dict[str, int]:
    """Return host bytes of a node whose ranks are all on the fullest stage of each model; if models
    have separate ranks, of a node with the ranks that take more."""
    states = {model.name: stage_state(model) for model in case.models}
    sharing: dict[tuple[int, ...], list[TrainedModel]] = {}
    for model in case.models:
        sharing.setdefault(model.ranks, []).append(model)
    of_ranks = [
        _host_of_rank(case, states, models, traffic_bytes, routed) for models in sharing.values()
    ]
    per_rank = max(of_ranks, key=lambda sizes: sum(sizes.values()))
    ranks = min(case.machine.ranks_per_node, case.train.world_size)
    return {name: size * ranks for name, size in per_rank.items() if size}


def _host_of_rank(
    case: Case,
    states: States,
    models: list[TrainedModel],
    traffic_bytes: int,
    routed: Mapping[str, int],
) -> dict[str, int]:
    """Return purpose -> host bytes of a rank that holds `models`."""
    engine = case.engine
    found: dict[str, int] = {}
    checkpoint = 0
    for model in models:
        is_actor = model.name == ACTOR
        state = states[model.name]
        weights = max(held["weights"] for held in state)
        optimizer = max(held["optimizer"] for held in state)
        gradients = max(held["gradients"] for held in state) if engine.keeps_gradients else 0
        on_host = 0
        if model.training.optimizer_host_share:
            on_host = max(optimizer_bytes(model)) - optimizer
        away = engine.offloaded if model.ranks == () else frozenset()
        sizes = {
            "offloaded parameters": weights if "parameters" in away else 0,
            "offloaded gradients": gradients if "gradients" in away else 0,
            "offloaded optimizer": optimizer if "optimizer" in away else 0,
            "optimizer of --optimizer-cpu-offload": on_host,
            "reference policy": weights if engine.keeps_reference and is_actor else 0,
        }
        whose = "" if is_actor else f"{model.name}'s "
        found.update({f"{whose}{name}": size for name, size in sizes.items()})
        if model.ranks == () and "parameters" in engine.away_at_start - away:
            found[f"{whose}parameters while engines start"] = weights
        if is_actor:
            found["copies for delta"] = traffic_bytes if engine.delta else 0
            # A drafter that is not trained.
            carried = 0 if model.training.mtp_layers else case.drafter_bytes
            found["drafter's weights"] = carried
            found["samples"] = sampled_bytes(case)
            found.update(routed)
            found["file being exported"] = exported_file_bytes(case) if engine.exports else 0
        # Models are saved one after the other.
        checkpoint = max(checkpoint, checkpoint_copies_bytes(model))
    found["checkpoint being written"] = checkpoint if engine.saves_checkpoints else 0
    return found


def checkpoint_copies_bytes(model: TrainedModel) -> int:
    """Return a rank's host bytes besides the state while a checkpoint is written or read."""
    elements = largest_tensor(model)
    tensor = elements * model.training.weight_bytes
    if model.training.saved_in_pieces:
        return max(tensor, min(PIECE_BYTES, elements * 4))
    # Complete buffers of the distributed optimizer, or float32 states that are made for it.
    return tensor + max(optimizer_bytes(model))


def largest_tensor(model: TrainedModel) -> int:
    """Return an upper bound on the elements of a rank's largest weight. Gate and up of an MLP are
    one weight, and so are Q, K and V of attention."""
    shape, tp_size = model.shape, model.train.tp_size
    sizes = [vocabulary_rows(shape, tp_size, model.training) * shape.hidden_size]
    for is_moe in set(shape.is_moe_layer):
        for spec in layer_specs(shape, is_moe=is_moe):
            ranks = model.train.etp_size if spec.num_experts else tp_size
            fused = 1 if spec.cut is Cut.COLUMNS or shape.latent else 3
            if "gate_proj" in spec.name or "up_proj" in spec.name:
                fused = 2
            if spec.cut is Cut.REPLICATED:
                ranks = fused = 1
            sizes.append(fused * math.prod(spec.shape) // ranks)
    return max(sizes)
