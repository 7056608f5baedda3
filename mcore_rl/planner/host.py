"""Host memory of a node without GPUs, phase by phase; models and engines are in host memory, too.

    build, resume      Megatron's models, as on a device
    start              the engine's weights and KV cache are added, and stay; gradients, which
                       are offloaded meanwhile, are released
    first switch       received data is added, and released; on a CPU without 16-bit matrix
                       products the first pass, the canary's or the rollout's, leaves a float32
                       copy of the engine's linear weights
    log-probs, train   a pass, as on a device; "teacher" is a teacher's
    save               the state, and copies of the data being written
    export             the state without widened weights, and the file being written

Without a GPU nothing is offloaded for rollout. The processes also count: the interpreter with
torch, Megatron and vLLM.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from mcore_rl.common.byte_sizes import shown_bytes
from mcore_rl.model.roles import ACTOR
from mcore_rl.planner.activations import (
    log_prob_activation_bytes,
    teacher_activation_bytes,
    train_activation_bytes,
)
from mcore_rl.planner.engine import widened_bytes
from mcore_rl.planner.memory import (
    checkpoint_copies_bytes,
    exported_file_bytes,
    placement_of,
    resident_of,
    score_bytes,
)
from mcore_rl.planner.models import (
    Bytes,
    TrainedModel,
    largest_tensor,
    stage_state,
    teacher_head_bytes,
)
from mcore_rl.planner.phases import (
    BUCKETS,
    BUILD,
    EXPORT,
    FIRST_SWITCH,
    HAND_OVER,
    LOG_PROBS,
    RESUME,
    ROLLOUT,
    SCORES,
    START,
    TEACHER_WEIGHTS,
    TRAIN,
    TRAIN_CRITIC,
    VALUES,
    Case,
    Parts,
)

SAVE = "save"
# A rank's process before it has a model, without mapped files; see benchmarks/real_size.py.
PROCESS_BYTES = 7 * 10**8
# Per element of the largest weight: its gradient in float32, as computed, and in 16 bits.
GRADIENT_BYTES = 6
# Per element of the largest weight: two float32 temporaries of AdamW, without activations.
UPDATE_BYTES = 8
# Parts whose size is exact, so that a run surely needs them.
EXACT = frozenset({"rollout weights", "KV cache"})


@dataclass(frozen=True, slots=True)
class HostPhase:
    """A phase on the fullest node: part -> bytes of all its ranks together.

    Example: HostPhase("save", {"processes": 1_400_000_000, "weights": 2_384_000_000, "copies":
    622_000_000}, exact_bytes=2_384_000_000)
    """

    name: str
    parts: Mapping[str, int]
    exact_bytes: int  # of the parts whose size is exact

    @property
    def total_bytes(self) -> int:
        return sum(self.parts.values())

    @property
    def described(self) -> str:
        """The parts in words."""
        return ", ".join(f"{part} {shown_bytes(size)}" for part, size in self.parts.items())


def host_phases(case: Case, *, kv_cache_bytes: int, widens: bool) -> tuple[HostPhase, ...]:
    """Return all phases of a case without GPUs, in the order of a run.

    `kv_cache_bytes` is the KV cache of a rank's engine. `widens` is true if the CPU lacks matrix
    products for 16-bit weights, see `patches/vllm/wide_linear.py`.
    """
    return tuple(_Planning(case, kv_cache_bytes, widens=widens).phases())


def received_of(case: Case) -> Bytes:
    """Return `[ranks]`: bytes that a hand-over brings each rank; it reads the rest in place."""
    if not case.has_engines:
        return np.zeros(case.train.world_size, dtype=np.int64)
    return placement_of(case).received_bytes(case.rollout.rank_map or range(case.train.world_size))


class _Planning:
    """Planner of one case. Arrays are `[world]`: of the actor's ranks and a critic's own."""

    def __init__(self, case: Case, kv_cache_bytes: int, *, widens: bool) -> None:
        self._case = case
        resident = resident_of(case)
        # Models on separate ranks use the world's numbering; the actor has the other ranks.
        separate = {rank for model in case.held for rank in model.ranks}
        self._world_size = max([len(resident) + len(separate), *(rank + 1 for rank in separate)])
        others = [rank for rank in range(self._world_size) if rank not in separate]
        self._actor = others[: len(resident)]
        bucket = np.full(len(self._actor), BUCKETS * case.engine.bucket_bytes, dtype=np.int64)
        if not case.has_servers:
            bucket = np.minimum(bucket, received_of(case))
        self._bucket = {"bucket": self._on(self._actor, bucket)}
        wide = widened_bytes(case.shape, case.rollout) if widens and case.has_engines else 0
        self._widened = {"widened weights": self._on(self._actor, wide)}
        self._engine = {
            "rollout weights": self._on(self._actor, resident),
            "KV cache": self._on(self._actor, kv_cache_bytes if case.has_engines else 0),
        }
        if case.engine.keeps_reference:
            weights = [held["weights"] for held in stage_state(case.actor)]
            self._engine["reference policy"] = self._of_ranks(case.actor, weights)
        self._scores: Parts = {}  # of a teacher
        if case.teachers:
            of_each = [self._teacher_weights(teacher) for teacher in case.teachers]
            self._engine[TEACHER_WEIGHTS] = np.sum(of_each, axis=0)
            scores = self._on(self._actor, score_bytes(case, case.actor))
            for teacher in case.teachers:
                if teacher.ranks:
                    scores += self._on(teacher.ranks, score_bytes(case, teacher))
            self._scores = {"teacher's scores": scores}
        self._exact = EXACT | {m.part_name(p) for m in case.held for p in m.training.exact}

    def phases(self) -> Iterator[HostPhase]:
        engine = self._case.engine
        first = self._state(with_moments=engine.loads_checkpoint)
        whole = self._state(with_moments=True)
        starting = {part: first[part] for part in first if part not in self._released_at_start}
        held = {**self._engine, **self._widened}
        copies = self._everywhere("copies", checkpoint_copies_bytes(self._case.models))
        kept = copies if self._case.actor.training.saves_in_background else {}
        held |= kept  # for the next save
        yield self._phase(RESUME if engine.loads_checkpoint else BUILD, first)
        if self._case.has_engines:
            yield self._phase(START, starting, self._engine)
            yield self._first_switch(first)
            yield self._phase(ROLLOUT, whole, held)
        for model in self._case.models:
            yield from self._passes(model, {**whole, **held, **self._scores})
        for teacher in self._case.scoring_teachers:
            used = teacher_activation_bytes(teacher, engine.sampled_tokens_in_all)
            activations = {"activations": self._of_ranks(teacher, used)}
            yield self._phase(SCORES, whole, held, self._scores, activations)
        if self._case.has_engines or self._case.has_servers:
            yield self._phase(HAND_OVER, whole, held, self._bucket)
        yield self._phase(SAVE, whole, held, copies)
        if engine.exports:
            file = self._everywhere("file being exported", exported_file_bytes(self._case))
            # The last hand-over drops the widened weights, and no generation follows.
            copies = kept if engine.exports_between else {}  # the last save frees them
            yield self._phase(EXPORT, whole, self._engine, copies, file)

    def _teacher_weights(self, teacher: TrainedModel) -> Bytes:
        """Return `[world]`: without devices, those that are swapped in are in host memory, too."""
        weights = [held["weights"] for held in stage_state(teacher)]
        head = teacher_head_bytes(self._case.actor)
        return self._of_ranks(teacher, weights) + self._of_ranks(self._case.actor, head)

    def _passes(self, model: TrainedModel, held: Parts) -> Iterator[HostPhase]:
        """Yield the forward pass and the update of a model."""
        names = (LOG_PROBS, TRAIN) if model.name == ACTOR else (VALUES, TRAIN_CRITIC)
        used = log_prob_activation_bytes(model)
        yield self._phase(names[0], held, {"activations": self._of_ranks(model, used)})
        used, largest = train_activation_bytes(model), largest_tensor(model)
        activations = {"activations": self._of_ranks(model, used)}
        update = max(GRADIENT_BYTES * largest, UPDATE_BYTES * largest - min(used))
        update_parts = self._everywhere("largest gradient or update", update)
        yield self._phase(names[1], held, activations, update_parts)

    def _first_switch(self, state: Parts) -> HostPhase:
        """Return the larger of transfer and canary, which widens weights; a resume has none."""
        transfer = self._phase(FIRST_SWITCH, state, self._engine, self._bucket)
        if self._case.engine.loads_checkpoint:
            return transfer
        canary = self._phase(FIRST_SWITCH, state, self._engine, self._widened)
        return max(transfer, canary, key=lambda phase: phase.total_bytes)

    @property
    def _released_at_start(self) -> set[str]:
        """Gradients that are dropped; other offloaded parts are in host memory anyway."""
        engine = self._case.engine
        if "gradients" not in engine.away_at_start or engine.keeps_gradients:
            return set()
        return {model.part_name("gradients") for model in self._case.models if not model.ranks}

    def _state(self, *, with_moments: bool) -> Parts:
        return {
            model.part_name(part): self._of_ranks(model, [held[part] for held in states])
            for model in self._case.models
            for states in [stage_state(model, with_moments=with_moments)]
            for part in states[0]
        }

    def _of_ranks(self, model: TrainedModel, of_stages: list[int]) -> Bytes:
        """Return `[world]`: sizes for a model that may have separate ranks."""
        return self._on(model.ranks or self._actor, model.of_ranks(of_stages))

    def _on(self, ranks: Sequence[int], sizes: Bytes | int) -> Bytes:
        """Return `[world]`: `sizes` on these ranks, 0 on the others."""
        spread = np.zeros(self._world_size, dtype=np.int64)
        spread[list(ranks)] = sizes
        return spread

    def _everywhere(self, part: str, num_bytes: int) -> Parts:
        return {part: np.full(self._world_size, num_bytes, dtype=np.int64)}

    def _phase(self, name: str, *parts: Parts) -> HostPhase:
        every = self._everywhere("processes", PROCESS_BYTES)
        for more in parts:
            every |= more
        per_node = self._case.machine.ranks_per_node
        firsts = np.arange(0, self._world_size, per_node)
        nodes = {part: np.add.reduceat(sizes, firsts) for part, sizes in every.items()}
        fullest = int(np.argmax(np.stack(list(nodes.values())).sum(axis=0)))
        held = {part: int(sizes[fullest]) for part, sizes in nodes.items() if sizes[fullest]}
        exact = sum(size for part, size in held.items() if part in self._exact)
        return HostPhase(name, held, exact)
