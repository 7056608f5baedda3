"""What the fullest rank holds in each phase of a run, in the order in which they come.

    build         Megatron's models: weights, gradients, main parameters; "resume" with --load,
                  where the optimizer is read whole
    start         the engine's share of the device, beside what of training cannot leave it
    canary        the build's state, and a forward pass over a few short prompts
    first switch  a hand-over before there are moments
    rollout       the engine's share: its weights, its activations, the KV cache; of training what
                  is not away
    log-probs     weights, gradients, optimizer, and a forward pass only
    values        the same of the critic
    train         weights, gradients, optimizer, activations
    train critic  the same of the critic's update, where there is one
    hand-over     weights of training and of rollout, the bucket; gradients and optimizer unless
                  away
    export        all of training, and the bucket

vLLM takes its share of the device whole, whatever others leave: at its start it refuses to begin
with less, and what is not weights or activations is KV cache from then on. So start and rollout
hold that share, and what stays beside it has to fit into the rest.

Actor and critic take turns on the same ranks: in every phase a rank holds its part of both, in one
the activations of one. This module is pure: it imports neither Megatron nor vLLM nor torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from mcore_rl.model.config_json import ModelShape
from mcore_rl.model.layout import PipelineLayers, RolloutLayout, TrainLayout
from mcore_rl.planner.activations import (
    engine_activation_bytes,
    log_prob_activation_bytes,
    train_activation_bytes,
)
from mcore_rl.planner.communicators import communicators_of
from mcore_rl.planner.models import ACTOR, TrainedModel, stage_state
from mcore_rl.planner.parameters import absorbed_bytes, drafter_bytes, kv_bytes_per_token
from mcore_rl.planner.settings import EngineSettings, Machine, TrainSettings

Bytes = npt.NDArray[np.int64]
Parts = dict[str, Bytes]  # part -> [ranks]
States = Mapping[str, list[dict[str, int]]]  # model -> stage -> part -> bytes of a rank

BUILD, RESUME, START, CANARY, FIRST_SWITCH = "build", "resume", "start", "canary", "first switch"
TRAIN, LOG_PROBS, HAND_OVER, ROLLOUT = "train", "log-probs", "hand-over", "rollout"
TRAIN_CRITIC, VALUES, BUILD_CRITIC = "train critic", "values", "build critic"
EXPORT = "export"
NCCL = "NCCL"  # the part that its communicators take, outside of torch
# A hand-over keeps all it needs beside both sets of weights under this many buckets.
BUCKETS = 2
CANARY_TOKENS = 64  # of a prompt, which has a micro-batch of its own


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

    @property
    def kv_bytes_per_token(self) -> int:
        """What a rank of the engine caches for a token."""
        layers = self.engine.drafter_layers
        return kv_bytes_per_token(self.shape, self.rollout.tp_size, drafter_layers=layers)

    @property
    def drafter_bytes(self) -> int:
        """What a rank of the engine holds beside the model, and on its host where it is carried."""
        return drafter_bytes(self.shape, self.rollout, self.engine.drafter_layers)

    @property
    def share_bytes(self) -> int:
        """What vLLM takes of a device, as it computes it."""
        return math.ceil(self.machine.gpu_bytes * self.engine.gpu_memory_utilization)


@dataclass(frozen=True, slots=True)
class Phase:
    """A phase on its fullest rank: part -> bytes, how much it may be, and what is lacking.

    `surely_lacking_bytes` is what is lacking by the parts alone whose size is exact, of a device of
    which nothing is reserved: a run cannot get through it.
    """

    name: str
    rank: int
    stage: int
    parts: Mapping[str, int]
    limit_bytes: int
    lacking_bytes: int  # 0 where it fits
    surely_lacking_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        return sum(self.parts.values())


@dataclass(frozen=True, slots=True)
class KVCache:
    """What vLLM's share leaves for the KV cache on the rank that has least; not below 0."""

    num_bytes: int
    bytes_per_token: int
    useful_utilization: float  # the largest share beside which training's part fits

    @property
    def tokens(self) -> int:
        return self.num_bytes // self.bytes_per_token


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """All phases of a case, in the order of a run."""

    phases: tuple[Phase, ...]
    kv_cache: KVCache

    def phase(self, name: str) -> Phase:
        """The phase of that name, which must be there."""
        return next(phase for phase in self.phases if phase.name == name)


def part_name(model: TrainedModel, part: str) -> str:
    """A part of a model's state: "weights" of the actor, "critic weights" of the critic."""
    return part if model.name == ACTOR else f"{model.name} {part}"


def device_memory(case: Case, resident_bytes: Bytes) -> DeviceMemory:
    """Plan the device memory of a case; `resident_bytes` `[ranks]` is what each rank holds for
    rollout."""
    return _Planning(case, resident_bytes).memory()


class _Planning:
    """What the phases of one case are made of: the state before the first update, which has no
    moments unless they were loaded, and the state from then on."""

    def __init__(self, case: Case, resident: Bytes) -> None:
        self._case = case
        layers = case.engine.drafter_layers
        self._resident = (
            resident
            + absorbed_bytes(case.shape, case.rollout.tp_size, drafter_layers=layers)
            + case.drafter_bytes
        )
        self._trained: States = {m.name: stage_state(m) for m in case.models}
        self._first = self._trained
        if not case.engine.loads_checkpoint:
            self._first = {m.name: stage_state(m, with_moments=False) for m in case.models}
        per_rank = sum(communicators_of(case.train, case.rollout).values())
        self._nccl = per_rank * case.machine.communicator_bytes

    def memory(self) -> DeviceMemory:
        case = self._case
        start = self._with_engine(START, self._first, case.engine.away_at_start)
        rollout = self._with_engine(ROLLOUT, self._trained, case.engine.offloaded)
        beside = max(
            phase.total_bytes - max(case.share_bytes, self._engine_bytes(phase))
            for phase in (start, rollout)
        )
        kv_cache = KVCache(
            num_bytes=max(0, case.share_bytes - self._engine_used - int(self._resident.max())),
            bytes_per_token=case.kv_bytes_per_token,
            useful_utilization=max(0, case.machine.usable_bytes - beside) / case.machine.gpu_bytes,
        )
        phases = (*self._before(), start, *self._until(rollout), *self._steps())
        return DeviceMemory(phases, kv_cache)

    # ------------------------------------------------------------------------------ the phases

    def _before(self) -> Iterator[Phase]:
        actor, critic = self._case.actor, self._case.critic
        name = RESUME if self._case.engine.loads_checkpoint else BUILD
        yield self._phase(name, self._staying(self._first, actor), actor)
        if critic is not None and critic.ranks != actor.ranks:
            yield self._phase(BUILD_CRITIC, self._staying(self._first, critic), critic)

    def _until(self, rollout: Phase) -> Iterator[Phase]:
        """The first way to rollout."""
        if self._case.engine.has_canary:
            yield self._canary()
        yield self._switch(FIRST_SWITCH, self._first)
        yield rollout

    def _steps(self) -> Iterator[Phase]:
        for model in self._case.models:
            name = LOG_PROBS if model.name == ACTOR else VALUES
            yield self._pass(name, self._trained, model, log_prob_activation_bytes(*_of(model)))
        for model in self._case.models:
            name = TRAIN if model.name == ACTOR else TRAIN_CRITIC
            yield self._pass(name, self._trained, model, train_activation_bytes(*_of(model)))
        yield self._switch(HAND_OVER, self._trained)
        if self._case.engine.exports:
            actor = self._case.actor
            staying = self._staying(self._trained, actor)
            yield self._phase(EXPORT, {**staying, "bucket": self._bucket}, actor)

    def _pass(
        self, name: str, states: States, model: TrainedModel, activations: list[int]
    ) -> Phase:
        """A pass of one model over its batch."""
        used = {"activations": model.of_ranks(activations)}
        return self._phase(name, {**self._staying(states, model), **used}, model)

    def _canary(self) -> Phase:
        actor = self._case.actor
        short = replace(
            actor.training, micro_batch_size=1, positions=CANARY_TOKENS, packed_tokens=0
        )
        used = log_prob_activation_bytes(actor.shape, actor.train, actor.layers, short)
        return self._pass(CANARY, self._first, actor, used)

    def _switch(self, name: str, states: States) -> Phase:
        """The parameters stay until they were handed over."""
        actor = self._case.actor
        left = self._staying(states, actor, self._case.engine.offloaded - {"parameters"})
        parts = {**left, "rollout weights": self._resident, "bucket": self._bucket}
        return self._phase(name, parts, actor)

    def _with_engine(self, name: str, states: States, away: frozenset[str]) -> Phase:
        """The KV cache gets what the engine leaves of its share."""
        case = self._case
        left = self._staying(states, case.actor, away)
        used = np.full_like(self._resident, self._engine_used)
        cache = np.maximum(0, case.share_bytes - self._resident - used)
        engine = {"rollout weights": self._resident, "activations": used, "KV cache": cache}
        phase = self._phase(name, {**left, **engine}, case.actor, share=case.share_bytes)
        sample = case.engine.max_model_tokens * case.kv_bytes_per_token
        # It must hold one sample to the end, and its weights at any rate.
        short = int(self._resident.max()) + self._engine_used + sample - case.share_bytes
        surely = int(self._resident.max()) - case.share_bytes
        return replace(
            phase,
            lacking_bytes=max(phase.lacking_bytes, short),
            surely_lacking_bytes=max(phase.surely_lacking_bytes, surely),
        )

    # ------------------------------------------------------------------------- what they share

    @property
    def _bucket(self) -> Bytes:
        return np.full_like(self._resident, BUCKETS * self._case.engine.bucket_bytes)

    @property
    def _engine_used(self) -> int:
        return engine_activation_bytes(self._case.shape, self._case.rollout, self._case.engine)

    @staticmethod
    def _engine_bytes(phase: Phase) -> int:
        return sum(phase.parts[p] for p in ("rollout weights", "activations", "KV cache"))

    def _staying(
        self, states: States, model: TrainedModel, away: frozenset[str] = frozenset()
    ) -> Parts:
        """What training has on the ranks of `model`, of all models that are there; without the
        kinds of offload that are `away`."""
        kind = {"weights": "parameters"}
        return {
            part_name(other, part): other.of_ranks([held[part] for held in states[other.name]])
            for other in self._case.models
            if other.ranks == model.ranks
            for part in states[other.name][0]
            if kind.get(part, part) not in away
        }

    def _phase(self, name: str, parts: Parts, model: TrainedModel, *, share: int = 0) -> Phase:
        """The phase of the rank that holds most, among those of `model`, whose stages count.
        `share` of the device is taken for the engine whole."""
        machine = self._case.machine
        if self._nccl:
            parts[NCCL] = np.full(model.train.world_size, self._nccl, dtype=np.int64)
        total: Bytes = np.stack(list(parts.values())).sum(axis=0)
        at = int(np.argmax(total))
        exact = {part_name(m, part) for m in self._case.models for part in m.training.exact}
        exact |= set() if share else {"rollout weights"}
        sure = [sizes for part, sizes in parts.items() if part in exact]
        surely = share + (int(np.stack(sure).sum(axis=0).max()) if sure else 0)
        return Phase(
            name,
            rank=model.ranks[at] if model.ranks else at,
            stage=model.train.pp_rank(at),
            parts={part: int(sizes[at]) for part, sizes in parts.items()},
            limit_bytes=machine.usable_bytes,
            lacking_bytes=max(0, int(total[at]) - machine.usable_bytes),
            surely_lacking_bytes=max(0, surely - machine.gpu_bytes),
        )


def _of(model: TrainedModel) -> tuple[ModelShape, TrainLayout, PipelineLayers, TrainSettings]:
    return model.shape, model.train, model.layers, model.training
