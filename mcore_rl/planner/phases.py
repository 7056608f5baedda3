"""What the fullest rank holds in each phase of a step, and what a node's host memory must take.

    train       weights, gradients, optimizer, activations
    log-probs   the same, with a forward pass only
    hand-over   weights of training and of rollout, the bucket; gradients and optimizer unless away
    rollout     weights of rollout, the engine's activations, the KV cache; the rest unless away

This module is pure: it imports neither Megatron nor vLLM nor torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mcore_rl.hf_config import ModelShape
from mcore_rl.hybrid_engine.layout import PipelineLayers, RolloutLayout, TrainLayout
from mcore_rl.planner.activations import (
    engine_activation_bytes,
    log_prob_activation_bytes,
    train_activation_bytes,
)
from mcore_rl.planner.parameters import (
    kv_bytes_per_token,
    optimizer_parameters,
    stage_parameters,
)
from mcore_rl.planner.settings import EngineSettings, Machine, TrainSettings

Bytes = npt.NDArray[np.int64]

TRAIN, LOG_PROBS, HAND_OVER, ROLLOUT = "train", "log-probs", "hand-over", "rollout"
# A hand-over keeps all it needs beside both sets of weights under this many buckets.
BUCKETS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A job to be planned."""

    shape: ModelShape
    train: TrainLayout
    layers: PipelineLayers
    rollout: RolloutLayout  # with its rank map
    training: TrainSettings
    engine: EngineSettings
    machine: Machine


@dataclass(frozen=True, slots=True)
class Phase:
    """A phase on its fullest rank: part -> bytes, how much it may be, and what is lacking."""

    name: str
    rank: int
    stage: int
    parts: Mapping[str, int]
    limit_bytes: int
    lacking_bytes: int  # 0 where it fits

    @property
    def total_bytes(self) -> int:
        return sum(self.parts.values())


@dataclass(frozen=True, slots=True)
class KVCache:
    """What is left for the KV cache on the rank that has least; not below 0."""

    num_bytes: int
    bytes_per_token: int
    limited_by: str  # "memory" or "--rl-rollout-gpu-memory-utilization"
    useful_utilization: float  # at which vLLM may take all that training leaves

    @property
    def tokens(self) -> int:
        return self.num_bytes // self.bytes_per_token


@dataclass(frozen=True, slots=True)
class Memory:
    """All phases of a case, and the host memory of a node by what it is for."""

    phases: tuple[Phase, ...]
    kv_cache: KVCache
    host_bytes: Mapping[str, int]

    @property
    def host_total_bytes(self) -> int:
        return sum(self.host_bytes.values())


def memory_of(case: Case, resident_bytes: Bytes, traffic_bytes: int = 0) -> Memory:
    """Plan the memory of a case.

    `resident_bytes` `[ranks]` is what each rank holds for rollout; `traffic_bytes` what a rank at
    most sends and receives together, of which delta transfers keep copies.
    """
    state = stage_state(case)
    phases = [
        _of_stages(TRAIN, case, state, train_activation_bytes(*_model(case))),
        _of_stages(LOG_PROBS, case, state, log_prob_activation_bytes(*_model(case))),
        _hand_over(case, state, resident_bytes),
    ]
    rollout, kv_cache = _rollout(case, state, resident_bytes)
    return Memory((*phases, rollout), kv_cache, _host(case, state, traffic_bytes))


def _model(case: Case) -> tuple[ModelShape, TrainLayout, PipelineLayers, TrainSettings]:
    return case.shape, case.train, case.layers, case.training


def stage_state(case: Case) -> list[dict[str, int]]:
    """What a rank of each stage holds on the device between two passes."""
    training = case.training
    return [
        {
            "weights": parameters.total * training.weight_bytes,
            "gradients": parameters.total * training.gradient_bytes,
            "optimizer": math.ceil(optimizer * (1 - training.optimizer_host_share)),
        }
        for parameters, optimizer in zip(
            stage_parameters(*_model(case)), _optimizer_bytes(case), strict=True
        )
    ]


def _optimizer_bytes(case: Case) -> list[int]:
    """Of a rank of each stage, on the device and on the host together."""
    return [
        optimizer_parameters(parameters, case.train, case.training) * case.training.optimizer_bytes
        for parameters in stage_parameters(*_model(case))
    ]


def _of_stages(name: str, case: Case, state: list[dict[str, int]], activations: list[int]) -> Phase:
    """A phase in which all ranks of a stage are alike."""
    parts = [{**held, "activations": used} for held, used in zip(state, activations, strict=True)]
    stage = max(range(len(parts)), key=lambda i: sum(parts[i].values()))
    rank = stage * case.train.ranks_per_stage
    return _phase(name, case, rank, parts[stage])


def _phase(name: str, case: Case, rank: int, parts: Mapping[str, int]) -> Phase:
    limit = case.machine.usable_bytes
    lacking = max(0, sum(parts.values()) - limit)
    return Phase(name, rank, case.train.pp_rank(rank), parts, limit, lacking)


def _staying(case: Case, state: dict[str, int], *, parameters_leave: bool) -> dict[str, int]:
    """What training leaves on the device; its parameters at least until they were handed over."""
    away = {"weights": "parameters"}
    gone = case.engine.offloaded - (frozenset() if parameters_leave else {"parameters"})
    return {part: size for part, size in state.items() if away.get(part, part) not in gone}


def _hand_over(case: Case, state: list[dict[str, int]], resident: Bytes) -> Phase:
    left = [_staying(case, held, parameters_leave=False) for held in state]
    rank = _fullest(case, left, resident)
    parts = {
        **left[case.train.pp_rank(rank)],
        "rollout weights": int(resident[rank]),
        "bucket": BUCKETS * case.engine.bucket_bytes,
    }
    return _phase(HAND_OVER, case, rank, parts)


def _rollout(case: Case, state: list[dict[str, int]], resident: Bytes) -> tuple[Phase, KVCache]:
    """The KV cache gets what is left, within vLLM's share of the device."""
    left = [_staying(case, held, parameters_leave=True) for held in state]
    rank = _fullest(case, left, resident)
    stage = case.train.pp_rank(rank)
    used = engine_activation_bytes(case.shape, case.rollout, case.engine)
    parts = {**left[stage], "rollout weights": int(resident[rank]), "activations": used}
    machine = case.machine
    by_memory = machine.usable_bytes - sum(parts.values())
    engine = int(resident[rank]) + used
    by_share = int(machine.gpu_bytes * case.engine.gpu_memory_utilization) - engine
    kv_cache = KVCache(
        num_bytes=max(0, min(by_memory, by_share)),
        bytes_per_token=kv_bytes_per_token(case.shape, case.rollout.tp_size),
        limited_by=("memory" if by_memory <= by_share else "--rl-rollout-gpu-memory-utilization"),
        useful_utilization=max(0, engine + by_memory) / machine.gpu_bytes,
    )
    parts["KV cache"] = kv_cache.num_bytes
    sample = case.engine.max_model_tokens * kv_cache.bytes_per_token
    lacking = max(0, sample - min(by_memory, by_share))  # it must hold one sample to the end
    return Phase(ROLLOUT, rank, stage, parts, machine.usable_bytes, lacking), kv_cache


def _fullest(case: Case, left: list[dict[str, int]], resident: Bytes) -> int:
    of_stage = np.array([sum(parts.values()) for parts in left], dtype=np.int64)
    return int(np.argmax(np.repeat(of_stage, case.train.ranks_per_stage) + resident))


def _host(case: Case, state: list[dict[str, int]], traffic_bytes: int) -> dict[str, int]:
    """Of a node whose ranks are all on the fullest stage."""
    training, engine = case.training, case.engine
    weights = max(held["weights"] for held in state)
    optimizer = max(held["optimizer"] for held in state)
    gradients = max(held["gradients"] for held in state) if engine.keeps_gradients else 0
    on_host = max(_optimizer_bytes(case)) - optimizer if training.optimizer_host_share else 0
    per_rank = {
        "offloaded parameters": weights if "parameters" in engine.offloaded else 0,
        "offloaded gradients": gradients if "gradients" in engine.offloaded else 0,
        "offloaded optimizer": optimizer if "optimizer" in engine.offloaded else 0,
        "optimizer of --optimizer-cpu-offload": on_host,
        "reference policy": weights if engine.keeps_reference else 0,
        "copies for delta": traffic_bytes if engine.delta else 0,
        # Written from host memory: this rank's share of weights and optimizer.
        "checkpoint being written": (
            weights + optimizer + on_host if engine.saves_checkpoints else 0
        ),
    }
    ranks = min(case.machine.ranks_per_node, case.train.world_size)
    return {name: size * ranks for name, size in per_rank.items() if size}
