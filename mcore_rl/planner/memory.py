"""Complete memory of a case on GPUs: the phases of a device, and the host memory of a node."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from mcore_rl.hybrid_engine.plan.placement import Placement
from mcore_rl.model.roles import ACTOR
from mcore_rl.model.tensors import embedding_specs, head_specs
from mcore_rl.moe.routing import RoutedLayers
from mcore_rl.planner.models import (
    Bytes,
    TrainedModel,
    largest_tensor,
    optimizer_bytes,
    stage_state,
    sum_over_layers,
)
from mcore_rl.planner.phases import Case, DeviceMemory, device_memory

# Per sampled token: its id and its log-prob; a sent one has a byte more: whether it was generated.
SAMPLED_TOKEN_BYTES = 8
SENT_TOKEN_BYTES = SAMPLED_TOKEN_BYTES + 1
# Largest piece in which a checkpoint of the optimizer's states is written and read, see
# mcore_rl.patches.megatron.optimizer_in_pieces.
PIECE_BYTES = 64 << 20
# Pinned memory is given in powers of two: the mean over sizes, whose logarithms are even.
PINNED_OVER_USED = 1 / math.log(2)
# Of a parameter whose optimizer is on the host by --optimizer-cpu-offload: two moments, and main
# parameter and gradient, which are pinned; all in float32, whatever --exp-avg-dtype is.
OFFLOADED_BYTES = 2 * 4 + PINNED_OVER_USED * 2 * 4
# The process that writes with --async-save: Python with torch, and a tensor.
WRITER_BYTES = 3 * 10**8
# In the names of host memory: what leaves the device for every rollout and returns.
OFFLOADED = "offloaded "
# Size of the files of `megatron.hf_export`; a rank holds one at once.
EXPORTED_FILE_BYTES = 5 << 30


@dataclass(frozen=True, slots=True)
class Memory(DeviceMemory):
    """All phases of a case, and the host memory of a node by purpose."""

    host_bytes: Mapping[str, int]

    @property
    def host_total_bytes(self) -> int:
        return sum(self.host_bytes.values())


def placement_of(case: Case) -> Placement:
    """Return the placement of the actor's weights in both layouts."""
    return Placement(case.shape, case.train, case.layers, case.rollout)


def adapters_of(case: Case) -> Placement | None:
    """Return the placement of the adapters that all hand-overs but the first one bring; None: each
    brings the actor's weights."""
    if not case.engine.loads_adapters:
        return None
    return placement_of(case).of_adapters(case.training.lora_rank, case.training.lora_targets)


def resident_of(case: Case) -> Bytes:
    """Return `[ranks of engines]`: bytes that each rank holds for rollout."""
    if not case.has_engines:
        return np.zeros(case.train.world_size, dtype=np.int64)
    resident = np.empty(case.rollout.world_size, dtype=np.int64)
    resident[list(case.rollout.rank_map) or slice(None)] = placement_of(case).resident_bytes
    return resident


def memory_of(case: Case, resident_bytes: Bytes, traffic_bytes: int = 0) -> Memory:
    """Plan the memory of a case.

    `resident_bytes` `[ranks of engines]` is what each holds for rollout; `traffic_bytes` is the
    most that a rank sends and receives in sum, of which delta transfers keep copies. With engines
    on ranks of their own, the host memory is that of a node of trainers, with the engines' part:
    more than a node of either takes.
    """
    device = device_memory(case, resident_bytes)
    host = _host(case, traffic_bytes, routed_bytes(case, device.kv_cache.tokens))
    return Memory(device.phases, device.kv_cache, host)


def sampled_bytes(case: Case) -> int:
    """Return a rank's bytes of tokens and log-probs while samples travel to the ranks that train
    on them."""
    return _travelling_bytes(case, kept=SAMPLED_TOKEN_BYTES, sent=SENT_TOKEN_BYTES)


def candidate_bytes(case: Case) -> int:
    """Return a rank's bytes of the most probable tokens at each position, as `sampled_bytes`."""
    token_bytes = 8 * case.training.num_top_tokens  # id and log-prob
    return _travelling_bytes(case, kept=token_bytes, sent=token_bytes)


def _travelling_bytes(case: Case, *, kept: int, sent: int) -> int:
    """Return a rank's bytes while samples of `kept` bytes a token are sent as `sent`: its engine's
    samples, the copies that it sends, and those that it receives."""
    engine, train = case.engine, case.train
    received = engine.sampled_tokens_in_all // train.dp_size * sent
    if not case.has_engines:  # controllers of servers send them
        return 2 * received
    # One message per receiver: the ranks of TP, CP and PP receive the same samples, and each rank
    # of an engine's TP group sends to a part of them.
    receivers = max(1, train.world_size // train.dp_size // case.rollout.tp_size)
    packed = engine.sampled_tokens * sent * (1 + receivers)
    return engine.sampled_tokens * kept + max(packed + received, 2 * received)


def routed_bytes(case: Case, kv_cache_tokens: int) -> dict[str, int]:
    """Return a rank's host bytes of the samples' chosen experts: those of its own samples with
    messages to and from other ranks, and those that vLLM keeps next to the KV cache.
    """
    shape, engine, train = case.shape, case.engine, case.train
    if shape.experts is None or not engine.replays_experts:
        return {}
    sizes = (shape.experts.topk, shape.experts.num_experts)
    num_moe_layers = len(shape.moe_layers)
    token_bytes = RoutedLayers(shape.moe_layers, *sizes).bytes_a_token
    kept = engine.sampled_tokens * token_bytes
    # One message per receiver; its neighbours in TP and CP receive the same.
    receivers = max(1, train.tp_size * train.cp_size // case.rollout.tp_size)
    fullest = max(
        sum(shape.is_moe_layer[layer] for chunk in stage for layer in chunk)
        for stage in case.layers
    )
    of_stage = RoutedLayers(tuple(range(fullest)), *sizes).bytes_a_token
    received = engine.sampled_tokens_in_all // train.dp_size * of_stage
    in_vllm = kv_cache_tokens * shape.num_layers * (token_bytes - 1) // num_moe_layers
    return {
        "experts of samples": kept + max(kept * (1 + receivers) + received, 2 * received),
        "experts in vLLM": in_vllm,
    }


def score_bytes(case: Case, model: TrainedModel) -> int:
    """Return a rank's host bytes of what a teacher in a folder scores in a step, on the ranks of
    `model`: float32 numbers of each token, and a copy on their way."""
    tokens = math.ceil(case.engine.sampled_tokens_in_all / model.train.dp_size)
    return 2 * 4 * (1 + case.training.teacher_outputs) * tokens


def exported_file_bytes(case: Case) -> int:
    """Return the bytes of the largest file of an export."""
    ends = (*embedding_specs(case.shape), *head_specs(case.shape))
    in_layers = sum_over_layers(case.shape, lambda specs: sum(spec.num_bytes for spec in specs))
    return min(EXPORTED_FILE_BYTES, sum(spec.num_bytes for spec in ends) + in_layers)


def checkpoint_copies_bytes(models: Iterable[TrainedModel]) -> int:
    """Return a rank's host bytes besides the state while checkpoints of `models`, on the same or
    other ranks, are written or read, on the rank that needs most."""
    of_ranks: dict[tuple[int, ...], list[TrainedModel]] = {}
    for model in models:
        of_ranks.setdefault(model.ranks, []).append(model)
    return max(map(_copies_bytes, of_ranks.values()))


def _copies_bytes(models: Sequence[TrainedModel]) -> int:
    """Return `checkpoint_copies_bytes` of models on the same ranks."""
    if not models[0].training.saves_in_background:
        return max(map(_largest_copy_bytes, models))
    # All of it at once, of all models, beside the process that writes.
    return WRITER_BYTES + sum(map(_saved_bytes, models))


def _saved_bytes(model: TrainedModel) -> int:
    """Return an upper bound on the bytes that a rank saves: weights, which data parallelism
    divides, and its share of the optimizer."""
    stages = zip(stage_state(model), optimizer_bytes(model), strict=True)
    return max(state["weights"] + optimizer for state, optimizer in stages)


def _largest_copy_bytes(model: TrainedModel) -> int:
    elements = largest_tensor(model)
    tensor = elements * model.training.weight_bytes
    if model.training.saved_in_pieces:
        return max(tensor, min(PIECE_BYTES, elements * 4))
    # Complete buffers of the distributed optimizer, or float32 states that are made for it.
    return tensor + max(optimizer_bytes(model))


def _host(case: Case, traffic_bytes: int, routed: Mapping[str, int]) -> dict[str, int]:
    """Return host bytes of a node whose ranks are all on the fullest stage of each model; if models
    have separate ranks, of a node with the ranks that take more."""
    sharing: dict[tuple[int, ...], list[TrainedModel]] = {}
    for model in case.models:
        sharing.setdefault(model.ranks, []).append(model)
    for teacher in case.teachers:
        if teacher.ranks:
            sharing[teacher.ranks] = [teacher]
    of_ranks = []
    for models in sharing.values():
        sizes: dict[str, int] = {}
        for model in models:
            is_teacher = model in case.teachers
            if is_teacher or (case.teachers and model.name == ACTOR):
                sizes["teacher's scores"] = score_bytes(case, model)
            if is_teacher:
                continue
            sizes |= _state_on_host(case, model)
            if model.name == ACTOR:
                sizes |= _actors_host_bytes(case, traffic_bytes, routed)
        # Models are saved one after the other.
        if case.engine.saves_checkpoints and models[0] not in case.teachers:
            sizes["checkpoint being written"] = checkpoint_copies_bytes(models)
        of_ranks.append(sizes)
    per_rank = max(of_ranks, key=lambda sizes: sum(sizes.values()))
    ranks = min(case.machine.ranks_per_node, case.train.world_size)
    return {name: size * ranks for name, size in per_rank.items() if size}


def _state_on_host(case: Case, model: TrainedModel) -> dict[str, int]:
    """Return purpose -> host bytes of a model's state on a rank."""
    engine, state = case.engine, stage_state(model)
    weights, gradients, optimizer = (
        max(held[part] for held in state) for part in ("weights", "gradients", "optimizer")
    )
    on_host = 0
    if model.training.optimizer_host_share:
        moved = max(optimizer_bytes(model)) - optimizer
        on_host = math.ceil(moved / model.training.optimizer_bytes * OFFLOADED_BYTES)
    away = engine.offloaded if model.ranks == () else frozenset()
    kept = away if engine.keeps_gradients else frozenset()
    away_at_start = engine.away_at_start - away if model.ranks == () else frozenset()
    is_reference = engine.keeps_reference and model.name == ACTOR
    num_teachers = case.num_swapped if model.name == ACTOR else 0
    sizes = {
        f"{OFFLOADED}parameters": weights if "parameters" in away else 0,
        f"{OFFLOADED}gradients": gradients if "gradients" in kept else 0,
        f"{OFFLOADED}optimizer": optimizer if "optimizer" in away else 0,
        "optimizer of --optimizer-cpu-offload": on_host,
        "reference policy": weights if is_reference else 0,
        "teacher's weights": num_teachers * weights,
        "parameters while engines start": weights if "parameters" in away_at_start else 0,
    }
    whose = "" if model.name == ACTOR else f"{model.name}'s "
    return {f"{whose}{name}": size for name, size in sizes.items()}


def _actors_host_bytes(case: Case, traffic_bytes: int, routed: Mapping[str, int]) -> dict[str, int]:
    """Return purpose -> host bytes of what only a rank of the actor holds."""
    engine, is_drafter_trained = case.engine, case.training.mtp_layers > 0
    samples = case.has_engines or case.has_servers
    return {
        "copies for delta": traffic_bytes if engine.delta else 0,
        "drafter's weights": 0 if is_drafter_trained else case.drafter_bytes,
        f"{OFFLOADED}CUDA graphs": engine.graph_bytes if engine.offloads_graphs else 0,
        "samples": sampled_bytes(case) if samples else 0,
        "candidates of samples": candidate_bytes(case) if samples else 0,
        **routed,
        "file being exported": exported_file_bytes(case) if engine.exports else 0,
    }
