"""Device memory of the fullest rank in each phase of a run, in order.

    build         Megatron's models: weights, gradients, main parameters; "resume" with --load,
                  which reads the complete optimizer
    build critic  the same on a critic's own ranks; "build teacher" on a teacher's
    start         the engine's share of the device, and the training state that cannot leave it
    canary        the build's state, and a forward pass over a few short prompts
    first switch  a hand-over before there are moments
    rollout       the engine's share: its weights, its activations, the KV cache; the training
                  state that is not offloaded
    log-probs     weights, gradients, optimizer, and a forward pass only
    values        the same for the critic
    teacher       the same for a teacher in a folder, with its scores of a step
    train         weights, gradients, optimizer, activations
    train critic  the same for the critic's update, if there is one
    hand-over     weights of training and of rollout, the bucket; gradients and optimizer unless
                  offloaded
    export        all of training, and the bucket
    update        with engines on ranks of their own: their share, and the bucket

vLLM always takes its complete share of the device: it refuses to start with less, and from then on
everything but weights, activations and CUDA graphs is KV cache. So start and rollout hold that
share, and everything else has to fit into the rest. CUDA graphs stay in all later phases, with
--rl-rollout-offload-cuda-graphs only in hand-overs.

Actor and critic take turns on the same ranks: in every phase a rank holds its part of both, and
the activations of one. With engines on ranks of their own, start, rollout and update are phases of
these ranks, which hold nothing of training; the others are phases of the trainers, from which
nothing is offloaded. With servers there are the trainers alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from mcore_rl.model.config_json import ModelShape
from mcore_rl.model.layout import PipelineLayers, RolloutLayout, TrainLayout
from mcore_rl.model.roles import ACTOR, TEACHER
from mcore_rl.planner.activations import (
    log_prob_activation_bytes,
    teacher_activation_bytes,
    train_activation_bytes,
)
from mcore_rl.planner.engine import (
    absorbed_bytes,
    drafter_bytes,
    engine_activation_bytes,
    kv_bytes_per_token,
    state_bytes,
)
from mcore_rl.planner.models import Bytes, TrainedModel, stage_state, teacher_head_bytes
from mcore_rl.planner.settings import EngineSettings, Machine, TrainSettings

Parts = dict[str, Bytes]  # part -> [ranks]
States = Mapping[str, list[dict[str, int]]]  # model -> stage -> part -> bytes of a rank

BUILD, RESUME, START, CANARY, FIRST_SWITCH = "build", "resume", "start", "canary", "first switch"
TRAIN, LOG_PROBS, HAND_OVER, ROLLOUT = "train", "log-probs", "hand-over", "rollout"
TRAIN_CRITIC, VALUES, BUILD_CRITIC = "train critic", "values", "build critic"
SCORES, BUILD_TEACHER = "teacher", "build teacher"
EXPORT, UPDATE = "export", "update"
NCCL = "NCCL"  # the part of its communicators, outside of torch
GRAPHS = "CUDA graphs"  # of the engine
TEACHER_WEIGHTS = f"{TEACHER} weights"  # and its output layer on the actor's last stage
# A hand-over needs less than this many buckets besides both sets of weights.
BUCKETS = 2
CANARY_TOKENS = 64  # of a prompt, which has a separate micro-batch


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A job to be planned. Layout and settings are the actor's unless stated otherwise."""

    shape: ModelShape
    train: TrainLayout
    layers: PipelineLayers
    rollout: RolloutLayout  # with its rank map
    # Ranks of the world that only run engines, `rollout.world_size` of them; empty: the actor's.
    engine_ranks: tuple[int, ...] = ()
    training: TrainSettings
    engine: EngineSettings
    machine: Machine
    critic: TrainedModel | None = None
    teachers: tuple[TrainedModel, ...] = ()  # in folders
    has_engines: bool = True  # of the job's own; without, `rollout` has no meaning
    # Engines that the job does not start. Without these and engines of its own it is supervised.
    has_servers: bool = False

    @property
    def is_separate(self) -> bool:
        """Whether engines have ranks of their own."""
        return bool(self.engine_ranks)

    @property
    def world_size(self) -> int:
        separate = {
            rank for model in (self.critic, *self.teachers) if model for rank in model.ranks
        }
        return self.train.world_size + len(self.engine_ranks) + len(separate)

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
        """All models that are trained, the actor first."""
        return (self.actor,) if self.critic is None else (self.actor, self.critic)

    def is_swapped(self, teacher: TrainedModel) -> bool:
        """Whether the actor scores with the teacher's weights, which are in host memory."""
        own = (teacher.shape, teacher.train)
        return not teacher.ranks and own == (self.shape, self.train)

    @property
    def num_swapped(self) -> int:
        """The number of teachers whose weights are swapped into the actor's model."""
        return sum(map(self.is_swapped, self.teachers))

    @property
    def communicators(self) -> dict[str, int]:
        """The maximum number of a rank's NCCL communicators, see `communicators_of`."""
        is_separate = self.is_separate or self.has_servers
        counts = communicators_of(self.train, self.rollout, is_separate=is_separate)
        if not self.has_engines:
            counts["engine"] = 0
            counts["hand-over"] *= self.has_servers
        return counts

    @property
    def own_teachers(self) -> tuple[TrainedModel, ...]:
        """The teachers with a model of their own."""
        return tuple(each for each in self.teachers if not self.is_swapped(each))

    @property
    def scoring_teachers(self) -> tuple[TrainedModel, ...]:
        """The models that score as teachers in folders: the actor's, if it does, and their own."""
        return (*((self.actor,) if self.num_swapped else ()), *self.own_teachers)

    @property
    def held(self) -> tuple[TrainedModel, ...]:
        """All models that devices hold: those that are trained, and teachers."""
        return (*self.models, *self.own_teachers)

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes that a rank of the engine caches per token."""
        layers = self.engine.drafter_layers
        return kv_bytes_per_token(self.shape, self.rollout.tp_size, drafter_layers=layers)

    @property
    def sample_bytes(self) -> int:
        """Bytes that a rank of the engine caches for a sample of the greatest length."""
        state = state_bytes(self.shape, self.rollout.tp_size)
        return self.engine.max_model_tokens * self.kv_bytes_per_token + state

    @property
    def drafter_bytes(self) -> int:
        """Bytes of the drafter on a rank of the engine, and on its host if it is not trained."""
        return drafter_bytes(self.shape, self.rollout, self.engine.drafter_layers)

    @property
    def share_bytes(self) -> int:
        """Bytes that vLLM takes of a device, by its own formula."""
        return math.ceil(self.machine.gpu_bytes * self.engine.gpu_memory_utilization)


@dataclass(frozen=True, slots=True)
class Phase:
    """A phase on its fullest rank: part -> bytes, the limit, and the missing bytes.

    `surely_lacking_bytes` counts only parts whose size is exact, on a device without reserve: if
    it is not 0, the run cannot pass this phase. Example: Phase("hand-over", 4, 1, {"weights":
    6 * GB, "rollout weights": 52 * GB, "bucket": GB}, limit_bytes=76 * GB, lacking_bytes=0)
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
    """The KV cache in vLLM's share, on the rank where it is smallest; 0 or more."""

    num_bytes: int
    bytes_per_token: int
    useful_utilization: float  # the largest share that leaves enough for training

    @property
    def tokens(self) -> int:
        return self.num_bytes // self.bytes_per_token


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """All phases of a case, in the order of a run."""

    phases: tuple[Phase, ...]
    kv_cache: KVCache

    def phase(self, name: str) -> Phase:
        """Return the phase of that name, which must exist."""
        return next(phase for phase in self.phases if phase.name == name)


def communicators_of(
    train: TrainLayout, rollout: RolloutLayout, *, is_separate: bool = False
) -> dict[str, int]:
    """Return the maximum number of a rank's NCCL communicators: Megatron's, engine's, hand-over's.
    A rank has all of them; if engines are on ranks of their own, it has those of its role.

    A communicator is created at the first collective of its group, if it has several ranks. Its
    size is an assumption (`Machine.communicator_bytes`): NVIDIA gives no formula
    (github.com/NVIDIA/nccl, issues 864, 964 and 986).

    The hand-over broadcasts in Megatron's groups. Only its plan shows whether it also makes a group
    of all ranks (`links.Traffic.num_own_groups`), so this group is counted here.
    """
    tp, pp, ep, etp = train.tp_size, train.pp_size, train.ep_size, train.etp_size
    megatron = [train.world_size, tp, pp, train.cp_size, train.dp_size * train.cp_size, tp * pp]
    if etp != tp:
        megatron.append(etp)
    if ep > 1:
        megatron += [ep, etp * ep, etp * ep * pp, train.edp_size]
    # Each group has torch's communicator and vLLM's.
    engine = [rollout.world_size, rollout.tp_size, rollout.dp_size, rollout.ep_size]
    return {
        "Megatron": sum(size > 1 for size in megatron),
        "engine": 2 * sum(size > 1 for size in engine),
        "hand-over": int(train.world_size > 1 or is_separate),
    }


def device_memory(case: Case, resident_bytes: Bytes) -> DeviceMemory:
    """Plan the device memory of a case; `resident_bytes` `[ranks of engines]` are held for
    rollout."""
    return _Planning(case, resident_bytes).memory()


class _Planning:
    """Planner of one case's phases, from the state before the first update, which has no moments
    unless they were loaded, and the state after it."""

    def __init__(self, case: Case, resident: Bytes) -> None:
        self._case = case
        absorbed = absorbed_bytes(
            case.shape, case.rollout.tp_size, drafter_layers=case.engine.drafter_layers
        )
        self._resident = resident + absorbed + case.drafter_bytes
        self._engine_used = engine_activation_bytes(case.shape, case.rollout, case.engine)
        self._bucket = np.full(
            case.train.world_size, BUCKETS * case.engine.bucket_bytes, dtype=np.int64
        )
        self._trained: States = {m.name: stage_state(m) for m in case.held}
        self._first = self._trained
        if not case.engine.loads_checkpoint:
            self._first = {m.name: stage_state(m, with_moments=False) for m in case.held}

    def memory(self) -> DeviceMemory:
        case = self._case
        if not case.has_engines:
            nothing = KVCache(0, case.kv_bytes_per_token, useful_utilization=0.0)
            return DeviceMemory(tuple(self._phases()), nothing)
        with_engine = [
            self._with_engine(START, self._first, case.engine.away_at_start),
            self._with_engine(ROLLOUT, self._trained, case.engine.offloaded),
        ]
        if case.is_separate:
            with_engine.append(self._with_engine(UPDATE, self._trained, frozenset()))
        engine_parts = ("rollout weights", "activations", GRAPHS, "KV cache")
        beside = max(
            phase.total_bytes
            - max(case.share_bytes, sum(phase.parts.get(part, 0) for part in engine_parts))
            for phase in with_engine
        )
        kv_cache = KVCache(
            num_bytes=max(
                0,
                case.share_bytes
                - self._engine_used
                - case.engine.graph_bytes
                - int(self._resident.max()),
            ),
            bytes_per_token=case.kv_bytes_per_token,
            useful_utilization=max(0, case.machine.usable_bytes - beside) / case.machine.gpu_bytes,
        )
        return DeviceMemory(tuple(self._phases(*with_engine)), kv_cache)

    def _phases(
        self,
        start: Phase | None = None,
        rollout: Phase | None = None,
        update: Phase | None = None,
    ) -> Iterator[Phase]:
        case, engine, actor = self._case, self._case.engine, self._case.actor
        hands_over = case.has_engines or case.has_servers
        name = RESUME if engine.loads_checkpoint else BUILD
        yield self._phase(name, self._staying(self._first, actor), actor)
        for model in (case.critic, *case.teachers):
            if model is not None and model.ranks != actor.ranks:
                name = BUILD_CRITIC if model == case.critic else BUILD_TEACHER
                yield self._phase(name, self._staying(self._first, model), model)
        if start is not None:
            yield start
        if engine.has_canary and hands_over:
            yield self._pass(CANARY, self._first, actor, self._canary_bytes())
        if hands_over:
            yield self._switch(FIRST_SWITCH, self._first)
        if rollout is not None:
            yield rollout
        yield from self._scoring()
        for model in case.models:
            name = TRAIN if model.name == ACTOR else TRAIN_CRITIC
            yield self._pass(name, self._trained, model, train_activation_bytes(model))
        if hands_over:
            yield self._switch(HAND_OVER, self._trained)
        if update is not None:
            yield update
        if engine.exports:
            parts = {
                **self._staying(self._trained, actor),
                "bucket": self._bucket,
                **self._graphs(actor),
            }
            yield self._phase(EXPORT, parts, actor)

    def _scoring(self) -> Iterator[Phase]:
        """Yield the forward passes before the update."""
        case = self._case
        for model in case.models:
            name = LOG_PROBS if model.name == ACTOR else VALUES
            yield self._pass(name, self._trained, model, log_prob_activation_bytes(model))
        for teacher in case.scoring_teachers:
            used = teacher_activation_bytes(teacher, case.engine.sampled_tokens_in_all)
            yield self._pass(SCORES, self._trained, teacher, used)

    def _pass(self, name: str, states: States, model: TrainedModel, used: list[int]) -> Phase:
        """Return the phase of one model's pass, with the activations `used` by stage."""
        parts = {
            **self._staying(states, model),
            "activations": model.of_ranks(used),
            **self._graphs(model),
        }
        return self._phase(name, parts, model)

    def _canary_bytes(self) -> list[int]:
        actor = self._case.actor
        short = replace(
            actor.training, micro_batch_size=1, positions=CANARY_TOKENS, packed_tokens=0
        )
        return log_prob_activation_bytes(replace(actor, training=short))

    def _switch(self, name: str, states: States) -> Phase:
        """Return a hand-over's phase, during which the parameters stay on the device."""
        actor = self._case.actor
        if self._case.is_separate or not self._case.has_engines:
            return self._phase(
                name, {**self._staying(states, actor), "bucket": self._bucket}, actor
            )
        left = self._staying(states, actor, self._case.engine.offloaded - {"parameters"})
        graphs = self._graphs(actor, sleeps=False)
        parts = {**left, "rollout weights": self._resident, "bucket": self._bucket, **graphs}
        return self._phase(name, parts, actor)

    def _graphs(self, model: TrainedModel, *, sleeps: bool = True) -> Parts:
        """Return the CUDA graphs on the ranks of `model` while the engine sleeps, or is awake."""
        engine = self._case.engine
        is_away = sleeps and engine.offloads_graphs
        beside_engine = model.ranks == self._case.actor.ranks and not self._case.is_separate
        if not engine.graph_bytes or is_away or not beside_engine:
            return {}
        return {GRAPHS: np.full(model.train.world_size, engine.graph_bytes, dtype=np.int64)}

    def _with_engine(self, name: str, states: States, away: frozenset[str]) -> Phase:
        """Return a phase with the engine, whose KV cache takes the rest of its share."""
        case, share = self._case, self._case.share_bytes
        left = {} if case.is_separate else self._staying(states, case.actor, away)
        used = np.full_like(self._resident, self._engine_used)
        graphs: Parts = {}
        if case.engine.graph_bytes:
            graphs = {GRAPHS: np.full_like(self._resident, case.engine.graph_bytes)}
        if name == UPDATE:
            left = {"bucket": np.full_like(self._resident, BUCKETS * case.engine.bucket_bytes)}
        cache = np.maximum(0, share - self._resident - used - case.engine.graph_bytes)
        engine = {"rollout weights": self._resident, "activations": used, **graphs}
        parts = {**left, **engine, "KV cache": cache}
        phase = self._phase(name, parts, None if case.is_separate else case.actor, share=share)
        # The share must hold its weights and activations, and a complete sample in the KV cache.
        surely_short = int(self._resident.max()) - share
        return replace(
            phase,
            lacking_bytes=max(
                phase.lacking_bytes,
                surely_short + self._engine_used + case.engine.graph_bytes + case.sample_bytes,
            ),
            surely_lacking_bytes=max(phase.surely_lacking_bytes, surely_short),
        )

    def _staying(
        self, states: States, model: TrainedModel, away: frozenset[str] = frozenset()
    ) -> Parts:
        """Return the state of all models on the ranks of `model`, without the offloaded kinds
        `away`."""
        kind = {"weights": "parameters"}
        actor, teachers = self._case.actor, self._case.teachers
        parts = {
            other.part_name(part): other.of_ranks([held[part] for held in states[other.name]])
            for other in self._case.held
            if other.ranks == model.ranks
            for part in (("weights",) if other in teachers else states[other.name][0])
            if other in teachers or kind.get(part, part) not in away
        }
        if actor.training.teacher_hidden and model.ranks == actor.ranks:
            head = actor.of_ranks(teacher_head_bytes(actor))
            parts[TEACHER_WEIGHTS] = parts.get(TEACHER_WEIGHTS, 0) + head
        return parts

    def _phase(
        self, name: str, parts: Parts, model: TrainedModel | None, *, share: int = 0
    ) -> Phase:
        """Return the phase of the fullest rank among the ranks of `model`, with its stage in
        `model`; None: among the engines' own ranks. The engine takes all of its `share` of the
        device."""
        machine = self._case.machine
        if nccl := self._nccl_bytes(model):
            parts[NCCL] = np.full_like(next(iter(parts.values())), nccl)
        total: Bytes = np.stack(list(parts.values())).sum(axis=0)
        at = int(np.argmax(total))
        exact = {m.part_name(part) for m in self._case.held for part in m.training.exact}
        exact |= set() if share else {"rollout weights"}
        sure = [sizes for part, sizes in parts.items() if part in exact]
        surely = share + (int(np.stack(sure).sum(axis=0).max()) if sure else 0)
        ranks = self._case.engine_ranks if model is None else model.ranks
        return Phase(
            name,
            rank=ranks[at] if ranks else at,
            stage=0 if model is None else model.train.pp_rank(at),
            parts={part: int(sizes[at]) for part, sizes in parts.items()},
            limit_bytes=machine.usable_bytes,
            lacking_bytes=max(0, int(total[at]) - machine.usable_bytes),
            surely_lacking_bytes=max(0, surely - machine.gpu_bytes),
        )

    def _nccl_bytes(self, model: TrainedModel | None) -> int:
        """Return the bytes of a rank's communicators; None: of an engine's own rank."""
        counts = self._case.communicators
        if self._case.is_separate:
            del counts["engine" if model is not None else "Megatron"]
        return sum(counts.values()) * self._case.machine.communicator_bytes
