"""Search for other layouts of the same job, best first.

A layout is a candidate if its degrees divide world, model and batch, TP (of both sides) stays in a
node, and all phases fit. Candidates are ranked by the seconds of a step, see `step_seconds`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from mcore_rl.hybrid_engine.plan.placement import choose_rank_map
from mcore_rl.planner.defaults import PASSES, with_utilization
from mcore_rl.planner.layouts import (
    Stages,
    divisors,
    most_resident_bytes,
    rollout_layouts,
    train_layouts,
    with_train_layout,
)
from mcore_rl.planner.memory import Memory, adapters_of, memory_of, placement_of, resident_of
from mcore_rl.planner.phases import Case
from mcore_rl.planner.step_seconds import Seconds, Step, seconds_of_step

CRITERIA = (
    "ranked by the seconds of a step: compute with the pipeline's bubble, TP and EP communication, "
    "hand-over, offload, rollout; formulas in docs/using/planner.md"
)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A layout that fits."""

    case: Case
    flags: str
    seconds: Seconds
    received_bytes_max: int
    peak_bytes: int
    kv_cache_tokens: int

    @property
    def train_name(self) -> str:
        at = self.case.train
        etp = f" ETP{at.etp_size}" if at.etp_size > 1 and self.case.shape.experts else ""
        ep = f" EP{at.ep_size}" if self.case.shape.experts else ""
        return f"TP{at.tp_size} PP{at.pp_size}{ep}{etp}"

    @property
    def rollout_name(self) -> str:
        if not self.case.has_engines:
            return "none"
        at = self.case.rollout
        ep = f" EP{at.ep_size}" if self.case.shape.experts else ""
        return f"TP{at.tp_size}{ep}"


@dataclass(frozen=True, slots=True)
class Found:
    """The best candidates, and the number of layouts tried and fitting."""

    candidates: tuple[Candidate, ...]
    num_tried: int
    num_fitting: int


def search(case: Case, step: Step, *, top: int, chooses_share: bool = False) -> Found:
    """Try all layouts of `case`'s job.

    They are ranked by the lower bound of the hand-over; then the best `top` get a rank map, and are
    ranked by the bytes then received. With `chooses_share` vLLM's share of a device is the largest
    useful one of each layout.
    """
    tried = 0
    candidates: list[Candidate] = []
    rollouts = {case.rollout: resident_of(case)}
    if case.has_engines:
        rollouts = {r: most_resident_bytes(case, r) for r in rollout_layouts(case)}
    for other, stages in _in_train_layouts(case, step.samples // step.mini_batches):
        may_fit = True
        for rollout, resident in rollouts.items():
            tried += 1
            if not may_fit:
                continue
            placed = replace(other, rollout=rollout)
            memory = memory_of(placed, resident)
            # Passes hold nothing of the engine.
            may_fit = not any(p.lacking_bytes for p in memory.phases if p.name in PASSES)
            if may_fit and chooses_share and case.has_engines:
                placed = with_utilization(placed, memory)
                memory = memory_of(placed, resident)
            if any(phase.lacking_bytes for phase in memory.phases):
                continue
            if memory.host_total_bytes > case.machine.host_bytes:
                continue
            received = _least_received(placed, int(resident[0]))
            candidates.append(_candidate(placed, memory, stages, received, step))
    candidates.sort(key=_order)
    best = candidates[:top]
    if case.has_engines:
        best = sorted(map(_with_rank_map, best), key=_order)
    return Found(tuple(best), tried, len(candidates))


def _order(candidate: Candidate) -> tuple[float, int, str]:
    return candidate.seconds.total, candidate.peak_bytes, candidate.flags


def _in_train_layouts(case: Case, mini_batch: int) -> Iterator[tuple[Case, Stages]]:
    """Yield the case in every training layout among which a mini-batch of samples divides."""
    shape, training, world_size = case.shape, case.training, case.train.world_size
    for train, stages in train_layouts(
        shape,
        world_size,
        tp_sizes=divisors(case.machine.ranks_per_node),
        pp_sizes=divisors(world_size),
        ep_sizes=divisors(shape.experts.num_experts) if shape.experts else [1],
    ):
        other = with_train_layout(case, train, stages.layers)
        if other is None or mini_batch % (train.dp_size * training.micro_batch_size):
            continue
        count = training.micro_batches_of(mini_batch, train.dp_size)
        yield replace(other, training=replace(other.training, num_micro_batches=count)), stages


def _least_received(case: Case, resident: int) -> int:
    """Estimate R_min of the rank that holds least: what it needs minus the part that it holds.

    For ranking only: it is exact for nested layouts of equal layers. Adapters are taken as nothing.
    """
    if not case.has_engines or case.engine.loads_adapters:
        return 0
    train, rollout = case.train, case.rollout
    per_stage = min(sum(map(len, stage)) for stage in case.layers) / case.shape.num_layers
    wider = max(1.0, train.tp_size / rollout.tp_size)
    experts = max(1.0, train.ep_size * train.etp_size / max(rollout.ep_size, rollout.tp_size))
    return int(resident * (1 - per_stage / (experts if case.shape.experts else wider)))


def _candidate(case: Case, memory: Memory, stages: Stages, received: int, step: Step) -> Candidate:
    return Candidate(
        case=case,
        flags=_flags(case, stages),
        seconds=seconds_of_step(case, memory, step, received / case.machine.other_nodes_rate),
        received_bytes_max=received,
        peak_bytes=max(
            phase.total_bytes - phase.parts.get("KV cache", 0) for phase in memory.phases
        ),
        kv_cache_tokens=memory.kv_cache.tokens,
    )


def _with_rank_map(candidate: Candidate) -> Candidate:
    """Return the candidate with its real rank map and received bytes, instead of an estimate."""
    case = candidate.case
    placement = placement_of(case)
    rank_map = choose_rank_map(placement, ranks_per_node=case.machine.ranks_per_node)
    moved = adapters_of(case) or placement
    received = int(moved.received_bytes(rank_map).max())
    seconds = replace(candidate.seconds, hand_over=received / case.machine.other_nodes_rate)
    case = replace(case, rollout=replace(case.rollout, rank_map=rank_map))
    return replace(candidate, case=case, seconds=seconds, received_bytes_max=received)


def _flags(case: Case, stages: Stages) -> str:
    train, rollout, experts = case.train, case.rollout, case.shape.experts
    flags = (
        f"--tensor-model-parallel-size {train.tp_size} "
        f"--pipeline-model-parallel-size {train.pp_size}{stages.flags}"
    )
    if experts:
        flags += (
            f" --expert-model-parallel-size {train.ep_size} "
            f"--expert-tensor-parallel-size {train.etp_size}"
        )
    if not case.has_engines:
        return flags
    flags += f" --rl-rollout-tp-size {rollout.tp_size}"
    if experts:
        ep = f" --rl-rollout-ep-size {rollout.ep_size}"
        flags += ep if rollout.expert_parallel else " --rl-rollout-no-expert-parallel"
    return flags
