"""What the fullest rank holds in each phase of a step, and what a node's host memory must take.

    train         weights, gradients, optimizer, activations
    train critic  the same of the critic's update, where there is one
    log-probs     weights, gradients, optimizer, and a forward pass only
    values        the same of the critic
    hand-over     weights of training and of rollout, the bucket; gradients and optimizer unless
                  away
    rollout       weights of rollout, the engine's activations, the KV cache; the rest unless away

Actor and critic take turns on the same ranks: in every phase a rank holds its part of both, in one
the activations of one. This module is pure: it imports neither Megatron nor vLLM nor torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from mcore_rl.hf_config import ModelShape
from mcore_rl.hybrid_engine.layout import PipelineLayers, RolloutLayout, TrainLayout
from mcore_rl.planner.activations import (
    engine_activation_bytes,
    log_prob_activation_bytes,
    train_activation_bytes,
)
from mcore_rl.planner.models import ACTOR, TrainedModel, optimizer_bytes, stage_state
from mcore_rl.planner.parameters import kv_bytes_per_token
from mcore_rl.planner.settings import EngineSettings, Machine, TrainSettings

Bytes = npt.NDArray[np.int64]
Parts = dict[str, Bytes]  # part -> [ranks]
States = Mapping[str, list[dict[str, int]]]  # model -> stage -> part -> bytes of a rank

TRAIN, LOG_PROBS, HAND_OVER, ROLLOUT = "train", "log-probs", "hand-over", "rollout"
TRAIN_CRITIC, VALUES = "train critic", "values"
# A hand-over keeps all it needs beside both sets of weights under this many buckets.
BUCKETS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A job to be planned. Without further words layout and settings are the actor's."""

    shape: ModelShape
    train: TrainLayout
    layers: PipelineLayers
    rollout: RolloutLayout  # with its rank map
    training: TrainSettings
    engine: EngineSettings
    machine: Machine
    critic: TrainedModel | None = None

    @property
    def actor(self) -> TrainedModel:
        return TrainedModel(
            name=ACTOR,
            shape=self.shape,
            train=self.train,
            layers=self.layers,
            training=self.training,
        )

    @property
    def models(self) -> tuple[TrainedModel, ...]:
        """All that are trained, the actor first."""
        return (self.actor,) if self.critic is None else (self.actor, self.critic)


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


def part_name(model: TrainedModel, part: str) -> str:
    """A part of a model's state: "weights" of the actor, "critic weights" of the critic."""
    return part if model.name == ACTOR else f"{model.name} {part}"


def memory_of(case: Case, resident_bytes: Bytes, traffic_bytes: int = 0) -> Memory:
    """Plan the memory of a case.

    `resident_bytes` `[ranks]` is what each rank holds for rollout; `traffic_bytes` what a rank at
    most sends and receives together, of which delta transfers keep copies.
    """
    states = {model.name: stage_state(model) for model in case.models}
    phases = []
    for model in case.models:
        name = TRAIN if model.name == ACTOR else TRAIN_CRITIC
        phases.append(_pass(name, case, states, model, train_activation_bytes(*_of(model))))
    for model in case.models:
        name = LOG_PROBS if model.name == ACTOR else VALUES
        phases.append(_pass(name, case, states, model, log_prob_activation_bytes(*_of(model))))
    phases.append(_hand_over(case, states, resident_bytes))
    rollout, kv_cache = _rollout(case, states, resident_bytes)
    return Memory((*phases, rollout), kv_cache, _host(case, states, traffic_bytes))


def _of(model: TrainedModel) -> tuple[ModelShape, TrainLayout, PipelineLayers, TrainSettings]:
    return model.shape, model.train, model.layers, model.training


def _staying(
    case: Case, states: States, model: TrainedModel, away: frozenset[str] = frozenset()
) -> Parts:
    """What training has on the ranks of `model`, of all models that are there; without the kinds of
    offload that are `away`."""
    kind = {"weights": "parameters"}
    return {
        part_name(other, part): other.of_ranks([held[part] for held in states[other.name]])
        for other in case.models
        if other.ranks == model.ranks
        for part in states[other.name][0]
        if kind.get(part, part) not in away
    }


def _pass(
    name: str, case: Case, states: States, model: TrainedModel, activations: list[int]
) -> Phase:
    """A pass of one model over its batch."""
    used = {"activations": model.of_ranks(activations)}
    return _phase(name, case, {**_staying(case, states, model), **used}, model)


def _phase(name: str, case: Case, parts: Parts, model: TrainedModel) -> Phase:
    """Of the rank that holds most, among those of `model`, whose stages count."""
    total: Bytes = np.stack(list(parts.values())).sum(axis=0)
    at = int(np.argmax(total))
    of_rank = {part: int(sizes[at]) for part, sizes in parts.items()}
    limit = case.machine.usable_bytes
    rank = model.ranks[at] if model.ranks else at
    lacking = max(0, int(total[at]) - limit)
    return Phase(name, rank, model.train.pp_rank(at), of_rank, limit, lacking)


def _hand_over(case: Case, states: States, resident: Bytes) -> Phase:
    """The parameters stay until they were handed over."""
    left = _staying(case, states, case.actor, case.engine.offloaded - {"parameters"})
    bucket = np.full_like(resident, BUCKETS * case.engine.bucket_bytes)
    parts = {**left, "rollout weights": resident, "bucket": bucket}
    return _phase(HAND_OVER, case, parts, case.actor)


def _rollout(case: Case, states: States, resident: Bytes) -> tuple[Phase, KVCache]:
    """The KV cache gets what is left, within vLLM's share of the device."""
    used = engine_activation_bytes(case.shape, case.rollout, case.engine)
    left = _staying(case, states, case.actor, case.engine.offloaded)
    full = _phase(
        ROLLOUT,
        case,
        {**left, "rollout weights": resident, "activations": np.full_like(resident, used)},
        case.actor,
    )
    machine = case.machine
    by_memory = machine.usable_bytes - full.total_bytes
    engine = full.parts["rollout weights"] + used
    by_share = int(machine.gpu_bytes * case.engine.gpu_memory_utilization) - engine
    kv_cache = KVCache(
        num_bytes=max(0, min(by_memory, by_share)),
        bytes_per_token=kv_bytes_per_token(case.shape, case.rollout.tp_size),
        limited_by=("memory" if by_memory <= by_share else "--rl-rollout-gpu-memory-utilization"),
        useful_utilization=max(0, engine + by_memory) / machine.gpu_bytes,
    )
    sample = case.engine.max_model_tokens * kv_cache.bytes_per_token
    lacking = max(0, sample - min(by_memory, by_share))  # it must hold one sample to the end
    parts = {**full.parts, "KV cache": kv_cache.num_bytes}
    return replace(full, parts=parts, lacking_bytes=lacking), kv_cache


def _host(case: Case, states: States, traffic_bytes: int) -> dict[str, int]:
    """Of a node whose ranks are all on the fullest stage of each model; where models have ranks of
    their own, of a node with those that take more."""
    sharing: dict[tuple[int, ...], list[TrainedModel]] = {}
    for model in case.models:
        sharing.setdefault(model.ranks, []).append(model)
    of_ranks = [_host_of_rank(case, states, models, traffic_bytes) for models in sharing.values()]
    per_rank = max(of_ranks, key=lambda sizes: sum(sizes.values()))
    ranks = min(case.machine.ranks_per_node, case.train.world_size)
    return {name: size * ranks for name, size in per_rank.items() if size}


def _host_of_rank(
    case: Case, states: States, models: list[TrainedModel], traffic_bytes: int
) -> dict[str, int]:
    """By what it is for, of a rank that holds `models`."""
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
        if is_actor:
            found["copies for delta"] = traffic_bytes if engine.delta else 0
        # Written from host memory, one model after the other: this rank's share of the larger one.
        checkpoint = max(checkpoint, weights + optimizer + on_host)
    found["checkpoint being written"] = checkpoint if engine.saves_checkpoints else 0
    return found
