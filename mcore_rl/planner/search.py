"""Search for other layouts of the same job, best first.

A layout is a candidate if its degrees divide world, model and batch, TP (of both sides) stays in a
node, and all phases fit. Candidates are ranked by the seconds of a step that depend on the layout,
by deliberately simple formulas:

    compute        6 (with full recomputation 8) x PP x active parameters of the largest stage x
                   tokens / (ranks x rate), times 1 + (PP - 1) / (micro-batches x VPP) for the
                   pipeline's bubble, and 15 % more for each doubling of PP, since stages wait for
                   micro-batches that differ; the last stage has the output layer
    communication  TP's and EP's bytes in a layer's passes, at the rate of the links they cross
    hand-over      most bytes that a rank receives, at the rate between nodes
    rollout        response tokens x passes over the samples of a data-parallel rank x the time to
                   read the engine's weights and a half-full cache once from the device's memory

They rank layouts; they do not predict a step.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from mcore_rl.hybrid_engine.plan.placement import choose_rank_map
from mcore_rl.model.tensors import most_active_parameters
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
from mcore_rl.planner.models import TrainedModel
from mcore_rl.planner.phases import ROLLOUT, Case
from mcore_rl.planner.settings import Machine

CRITERIA = (
    "ranked by the seconds of a step that depend on the layout: compute with the pipeline's "
    "bubble, TP and EP communication, hand-over, rollout; formulas in docs/using/planner.md"
)


_WAITS = 0.15  # an assumption


@dataclass(frozen=True, slots=True)
class Step:
    """A step and the rates of a device, as the formulas take them."""

    samples: int
    mini_batches: int
    flops: float  # of a device per second, achieved in training
    memory_rate: float  # of a device, bytes per second


@dataclass(frozen=True, slots=True)
class Seconds:
    """The seconds of one step that depend on the layout."""

    compute: float
    communication: float
    hand_over: float
    rollout: float

    @property
    def total(self) -> float:
        return self.compute + self.communication + self.hand_over + self.rollout


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
    machine = case.machine
    return Candidate(
        case=case,
        flags=_flags(case, stages),
        seconds=Seconds(
            compute=sum(_compute(model, step) for model in case.models),
            communication=sum(_communication(m, machine, step.samples) for m in case.models),
            hand_over=received / machine.other_nodes_rate,
            rollout=_rollout_seconds(case, memory, step),
        ),
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


def _compute(model: TrainedModel, step: Step) -> float:
    """Return the seconds of a step in a model's matrix products, with the pipeline's bubble and its
    wait for the largest stage."""
    train, training = model.train, model.training
    full = training.recompute.granularity == "full"
    vp_size = len(model.layers[0])
    bubble = (train.pp_size - 1) / (training.num_micro_batches * vp_size)
    tokens = step.samples * training.positions
    parameters = train.pp_size * most_active_parameters(model.shape, model.layers)
    flops = (8 if full else 6) * parameters * tokens
    waits = 1 + _WAITS * math.log2(train.pp_size)
    return flops / (train.world_size * step.flops) * (1 + bubble) * waits


def _communication(model: TrainedModel, machine: Machine, samples: int) -> float:
    """Return the seconds of a step in TP's and EP's collectives, without overlap.

    A rank has `tokens / DP` tokens in the layers of its stage. In each pass over a layer TP moves
    their hidden states four times (all-gather and reduce-scatter, in attention and in the MLP). A
    copy per chosen expert goes to its EP rank and back, and from there to all that share it.
    """
    train, shape, training = model.train, model.shape, model.training
    passes = 4 if training.recompute.granularity == "full" else 3
    tokens = samples * training.positions
    layers = max(sum(map(len, stage)) for stage in model.layers)
    hidden = training.weight_bytes * shape.hidden_size * tokens / train.dp_size
    dense = 4 * hidden * (train.tp_size - 1) / train.tp_size / machine.own_node_rate
    if not shape.experts:
        return layers * passes * dense
    inside = train.ep_size * train.etp_size <= machine.ranks_per_node
    rate = machine.own_node_rate if inside else machine.other_nodes_rate
    per_copy = (train.ep_size - 1) / train.ep_size / rate
    per_copy += (train.etp_size - 1) / machine.own_node_rate
    copies = 2 * shape.experts.topk * hidden / train.tp_size
    routed = copies * per_copy * sum(shape.is_moe_layer) / shape.num_layers
    return layers * passes * (dense + routed)


def _rollout_seconds(case: Case, memory: Memory, step: Step) -> float:
    if not case.has_engines:
        return 0.0
    rollout, engine = case.rollout, case.engine
    share = math.ceil(step.samples / rollout.num_tp_groups)  # of one data-parallel rank
    cached = memory.kv_cache.num_bytes // case.sample_bytes
    at_once = max(1, min(engine.max_num_seqs, cached, share))
    waves = math.ceil(share / at_once)
    weights = memory.phase(ROLLOUT).parts["rollout weights"]
    cache = at_once * engine.max_model_tokens / 2 * case.kv_bytes_per_token
    return waves * engine.max_response_tokens * (weights + cache) / step.memory_rate
