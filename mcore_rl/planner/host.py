"""Host memory of a node without GPUs, phase by phase; models and engines are in host memory, too.

    build, resume      Megatron's models, as on a device
    start              the engine's weights and KV cache are added, and stay; gradients, which
                       are offloaded meanwhile, are released
    first switch       received data is added, and released; on a CPU without 16-bit matrix
                       products the first pass, the canary's or the rollout's, leaves a float32
                       copy of the engine's linear weights
    log-probs, train   a pass, as on a device
    save               the state, and copies of the data being written
    export             the state without widened weights, and the file being written

Without a GPU nothing is offloaded for rollout. The processes also count: the interpreter with
torch, Megatron and vLLM. This module is pure: it imports neither Megatron nor vLLM nor torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mcore_rl.planner.activations import log_prob_activation_bytes, train_activation_bytes
from mcore_rl.planner.memory import (
    checkpoint_copies_bytes,
    exported_file_bytes,
    largest_tensor,
    received_of,
    resident_of,
)
from mcore_rl.planner.models import ACTOR, TrainedModel, stage_state
from mcore_rl.planner.parameters import widened_bytes
from mcore_rl.planner.phases import (
    BUCKETS,
    BUILD,
    EXPORT,
    FIRST_SWITCH,
    HAND_OVER,
    LOG_PROBS,
    RESUME,
    ROLLOUT,
    START,
    TRAIN,
    TRAIN_CRITIC,
    VALUES,
    Case,
    part_name,
)

Bytes = npt.NDArray[np.int64]

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
    """A phase on the fullest node: part -> bytes of all its ranks together."""

    name: str
    parts: Mapping[str, int]
    exact_bytes: int  # of the parts whose size is exact

    @property
    def total_bytes(self) -> int:
        return sum(self.parts.values())


def host_phases(case: Case, *, kv_cache_bytes: int, widens: bool) -> tuple[HostPhase, ...]:
    """Return all phases of a case without GPUs, in the order of a run.

    `kv_cache_bytes` is the KV cache of a rank's engine. `widens` is true if the CPU lacks matrix
    products for 16-bit weights, see `patches/vllm/wide_linear.py`.
    """
    return tuple(_Planning(case, kv_cache_bytes, widens=widens).phases())


class _Planning:
    def __init__(self, case: Case, kv_cache_bytes: int, *, widens: bool) -> None:
        self._case = case
        resident, received = resident_of(case), received_of(case)
        # Models on separate ranks use the world's numbering; the actor has the other ranks.
        apart = {rank for model in case.models for rank in model.ranks}
        self._world_size = max([len(resident) + len(apart), *(rank + 1 for rank in apart)])
        others = [rank for rank in range(self._world_size) if rank not in apart]
        self._actor = others[: len(resident)]
        self._bucket = {
            "bucket": self._on(
                self._actor, np.minimum(BUCKETS * case.engine.bucket_bytes, received)
            )
        }
        wide = widened_bytes(case.shape, case.rollout) if widens else 0
        self._widened = {"widened weights": self._on(self._actor, np.full_like(resident, wide))}
        self._engine = {
            "rollout weights": self._on(self._actor, resident),
            "KV cache": self._on(self._actor, np.full_like(resident, kv_cache_bytes)),
        }
        if case.engine.keeps_reference:
            weights = [held["weights"] for held in stage_state(case.actor)]
            self._engine["reference policy"] = self._of_ranks(case.actor, weights)

    def phases(self) -> list[HostPhase]:
        case = self._case
        loads = case.engine.loads_checkpoint
        first = self._state(with_moments=loads)
        whole = self._state(with_moments=True)
        starting = {part: first[part] for part in first if part not in self._released_at_start}
        held = {**self._engine, **self._widened}
        found = [
            self._phase(RESUME if loads else BUILD, first),
            self._phase(START, starting, self._engine),
            self._first_switch(first),
            self._phase(ROLLOUT, whole, held),
        ]
        for model in case.models:
            settings = (model.shape, model.train, model.layers, model.training)
            for name, used in (
                (LOG_PROBS, log_prob_activation_bytes(*settings)),
                (TRAIN, train_activation_bytes(*settings)),
            ):
                if model.name != ACTOR:
                    name = VALUES if name == LOG_PROBS else TRAIN_CRITIC
                activations = {"activations": self._of_ranks(model, used)}
                if name in (TRAIN, TRAIN_CRITIC):
                    largest = largest_tensor(model)
                    update = max(GRADIENT_BYTES * largest, UPDATE_BYTES * largest - min(used))
                    activations |= self._everywhere("largest gradient or update", update)
                found.append(self._phase(name, whole, held, activations))
        copies = max(checkpoint_copies_bytes(model) for model in case.models)
        found.append(self._phase(HAND_OVER, whole, held, self._bucket))
        written = self._everywhere("copies", copies)
        found.append(self._phase(SAVE, whole, held, written))
        if case.engine.exports:
            file = self._everywhere("file being exported", exported_file_bytes(case))
            # The last hand-over drops the widened weights, and no generation follows.
            found.append(self._phase(EXPORT, whole, self._engine, file))
        return found

    def _first_switch(self, state: dict[str, Bytes]) -> HostPhase:
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
        return {part_name(model, "gradients") for model in self._case.models if not model.ranks}

    def _state(self, *, with_moments: bool) -> dict[str, Bytes]:
        return {
            part_name(model, part): self._of_ranks(model, [held[part] for held in states])
            for model in self._case.models
            for states in [stage_state(model, with_moments=with_moments)]
            for part in states[0]
        }

    def _of_ranks(self, model: TrainedModel, of_stages: list[int]) -> Bytes:
        """Return `[world]`: sizes for a model that may have separate ranks."""
        return self._on(model.ranks or self._actor, model.of_ranks(of_stages))

    def _on(self, ranks: Sequence[int], sizes: Bytes) -> Bytes:
        """Return `[world]`: `sizes` on these ranks, 0 on the others."""
        found = np.zeros(self._world_size, dtype=np.int64)
        found[list(ranks)] = sizes
        return found

    def _everywhere(self, part: str, num_bytes: int) -> dict[str, Bytes]:
        return {part: np.full(self._world_size, num_bytes, dtype=np.int64)}

    def _phase(self, name: str, *parts: Mapping[str, Bytes]) -> HostPhase:
        every = {
            k: v
            for held in (self._everywhere("processes", PROCESS_BYTES), *parts)
            for k, v in held.items()
        }
        per_node = self._case.machine.ranks_per_node
        nodes = range(0, self._world_size, per_node)
        totals = [sum(int(v[n : n + per_node].sum()) for v in every.values()) for n in nodes]
        at = nodes[int(np.argmax(totals))]
        held = {part: int(v[at : at + per_node].sum()) for part, v in every.items()}
        exact = EXACT | {part_name(m, p) for m in self._case.models for p in m.training.exact}
        return HostPhase(
            name,
            {part: size for part, size in held.items() if size},
            sum(size for part, size in held.items() if part in exact),
        )
