"""Search for other layouts of the same job, best first.

A layout is a candidate if its degrees divide world, model and batch, TP (of both sides) stays in a
node, and all phases fit. Candidates are ranked by the seconds of a step that depend on the layout,
by deliberately simple formulas:

    compute        6 (with full recomputation 8) x active parameters x tokens / (ranks x rate),
                   times 1 + (PP - 1) / (micro-batches x VPP) for the pipeline's bubble
    communication  TP's and EP's bytes in a layer's passes, at the rate of the links they cross
    hand-over      most bytes that a rank receives, at the rate between nodes
    rollout        response tokens x passes over the samples of a data-parallel rank x the time to
                   read the engine's weights and a half-full cache once from the device's memory

They rank layouts; they do not predict a step. This module is pure: it imports neither Megatron nor
vLLM nor torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

import numpy as np

from mcore_rl.common.errors import UsageError
from mcore_rl.hybrid_engine.plan.placement import Placement, choose_rank_map
from mcore_rl.model.config_json import ModelShape
from mcore_rl.model.layout import RolloutLayout, TrainLayout
from mcore_rl.model.tensors import active_parameters
from mcore_rl.planner.memory import Memory, memory_of
from mcore_rl.planner.models import TrainedModel, following
from mcore_rl.planner.phases import ROLLOUT, Case
from mcore_rl.planner.settings import Machine
from mcore_rl.planner.stages import Stages, stages_for

CRITERIA = (
    "ranked by the seconds of a step that depend on the layout: compute with the pipeline's "
    "bubble, TP and EP communication, hand-over, rollout; formulas in docs/using/planner.md"
)


@dataclass(frozen=True, slots=True)
class Rates:
    """A device's rates in the formulas."""

    flops: float  # per second, achieved in training
    memory_rate: float  # bytes per second


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
        at = self.case.rollout
        ep = f" EP{at.ep_size}" if self.case.shape.experts else ""
        return f"TP{at.tp_size}{ep}"


@dataclass(frozen=True, slots=True)
class Found:
    """The best candidates, and the number of layouts tried and fitting."""

    candidates: tuple[Candidate, ...]
    num_tried: int
    num_fitting: int


def search(case: Case, rates: Rates, *, samples: int, mini_batches: int, top: int) -> Found:
    """Try all layouts of `case`'s job.

    A step trains on `samples` in `mini_batches`. The hand-over is first ranked by its lower bound;
    the best `top` layouts get a rank map, and are ranked by the bytes then received.
    """
    tried = fitting = 0
    found: list[Candidate] = []
    rollouts = list(_rollouts(case))
    resident = {r: _resident(case, r) for r in rollouts}
    for train, stages in _trains(case.shape, case.train.world_size, case.machine.ranks_per_node):
        here = _training(case, train, stages, samples // mini_batches)
        if here is None:
            continue
        for rollout in rollouts:
            tried += 1
            other = replace(here, rollout=rollout)
            memory = memory_of(other, np.full(train.world_size, resident[rollout]))
            if any(phase.lacking_bytes for phase in memory.phases):
                continue
            if memory.host_total_bytes > case.machine.host_bytes:
                continue
            fitting += 1
            received = _least_received(other, resident[rollout])
            found.append(_candidate(other, memory, stages, received, rates, samples, mini_batches))
    found.sort(key=_order)
    best = [_with_rank_map(c, rates, samples, mini_batches) for c in found[:top]]
    return Found(tuple(sorted(best, key=_order)), tried, fitting)


def _order(candidate: Candidate) -> tuple[float, int, str]:
    return candidate.seconds.total, candidate.peak_bytes, candidate.flags


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def _trains(
    shape: ModelShape, world: int, ranks_per_node: int
) -> Iterator[tuple[TrainLayout, Stages]]:
    """Yield every training layout, with its stages."""
    experts = shape.experts
    ep_sizes = _divisors(experts.num_experts) if experts else [1]
    for tp, pp in product(_divisors(ranks_per_node), _divisors(world)):
        stages = stages_for(shape.num_layers, pp)
        if stages is None or world % (tp * pp) or not _tp_divides(shape, tp, dense=True):
            continue
        for ep, etp in product(ep_sizes, sorted({1, tp}) if experts else [tp]):
            if experts and experts.hidden_size % etp:
                continue
            try:
                yield TrainLayout(world, tp, pp, 1, ep, etp), stages
            except UsageError:
                continue


def _rollouts(case: Case) -> Iterator[RolloutLayout]:
    """Yield every layout of engines: with experts sharded over TP' x DP', or without EP."""
    shape, world = case.shape, case.train.world_size
    experts = shape.experts
    for tp in _divisors(case.machine.ranks_per_node):
        if world % tp or not _tp_divides(shape, tp, dense=False):
            continue
        if experts is None or experts.hidden_size % tp == 0:
            yield RolloutLayout(world, tp, False)
        for ep in _divisors(experts.num_experts) if experts else []:
            if ep > 1 and ep % tp == 0 and world % ep == 0:
                backend = case.rollout.all2all_backend
                yield RolloutLayout(world, tp, True, ep // tp, all2all_backend=backend)


def _tp_divides(shape: ModelShape, tp: int, *, dense: bool) -> bool:
    """Return whether TP divides heads and widths; in rollout it may replicate key/value heads."""
    sizes = [shape.num_heads]
    if dense or shape.num_kv_heads >= tp:
        sizes.append(shape.num_kv_heads)
    elif tp % shape.num_kv_heads:
        return False
    if not all(shape.is_moe_layer):
        sizes.append(shape.ffn_hidden_size)
    if shape.experts and shape.experts.shared_hidden_size:
        sizes.append(shape.experts.shared_hidden_size)
    return all(size % tp == 0 for size in sizes)


def _training(case: Case, train: TrainLayout, stages: Stages, mini_batch: int) -> Case | None:
    """Return the case, with its critic, in another training layout; None if it cannot be."""
    parts = train.dp_size * case.training.micro_batch_size
    if mini_batch % parts:
        return None
    training = replace(
        case.training,
        num_micro_batches=case.training.micro_batches_of(mini_batch, train.dp_size),
        sequence_parallel=train.tp_size > 1,
    )
    critic = None
    if case.critic is not None:
        critic = following(case.critic, train, stages.layers)
        if critic is None:
            return None
    return replace(case, train=train, layers=stages.layers, training=training, critic=critic)


def _resident(case: Case, rollout: RolloutLayout) -> int:
    """Return the resident bytes of the fullest slot."""
    return Placement(case.shape, case.train, case.layers, rollout).most_resident_bytes


def _least_received(case: Case, resident: int) -> int:
    """Estimate R_min of the rank that holds least: what it needs minus the part that it holds.

    For ranking only: it is exact for nested layouts of equal layers.
    """
    train, rollout = case.train, case.rollout
    per_stage = min(sum(map(len, stage)) for stage in case.layers) / case.shape.num_layers
    wider = max(1.0, train.tp_size / rollout.tp_size)
    experts = max(1.0, train.ep_size * train.etp_size / max(rollout.ep_size, rollout.tp_size))
    return int(resident * (1 - per_stage / (experts if case.shape.experts else wider)))


def _candidate(
    case: Case,
    memory: Memory,
    stages: Stages,
    received: int,
    rates: Rates,
    samples: int,
    mini_batches: int,
) -> Candidate:
    return Candidate(
        case=case,
        flags=_flags(case, stages),
        seconds=_seconds(case, memory, received, rates, samples, mini_batches),
        received_bytes_max=received,
        peak_bytes=max(
            phase.total_bytes - phase.parts.get("KV cache", 0) for phase in memory.phases
        ),
        kv_cache_tokens=memory.kv_cache.tokens,
    )


def _with_rank_map(
    candidate: Candidate, rates: Rates, samples: int, mini_batches: int
) -> Candidate:
    """Return the candidate with its real rank map and received bytes, instead of an estimate."""
    case = candidate.case
    placement = Placement(case.shape, case.train, case.layers, case.rollout)
    rank_map = choose_rank_map(placement, ranks_per_node=case.machine.ranks_per_node)
    received = int(placement.received_bytes(rank_map).max())
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
    flags += f" --rl-rollout-tp-size {rollout.tp_size}"
    if experts:
        ep = f" --rl-rollout-ep-size {rollout.ep_size}"
        flags += ep if rollout.expert_parallel else " --rl-rollout-no-expert-parallel"
    return flags


def _seconds(
    case: Case, memory: Memory, received: int, rates: Rates, samples: int, mini_batches: int
) -> Seconds:
    return Seconds(
        compute=sum(_compute(model, rates, samples) for model in case.models),
        communication=sum(_communication(model, case.machine, samples) for model in case.models),
        hand_over=received / case.machine.other_nodes_rate,
        rollout=_rollout_seconds(case, memory, rates, samples),
    )


def _compute(model: TrainedModel, rates: Rates, samples: int) -> float:
    """Return the seconds of a step in a model's matrix products, with the pipeline's bubble."""
    train, training = model.train, model.training
    full = training.recompute.granularity == "full"
    vp_size = len(model.layers[0])
    bubble = (train.pp_size - 1) / (training.num_micro_batches * vp_size)
    tokens = samples * training.positions
    flops = (8 if full else 6) * active_parameters(model.shape) * tokens
    return flops / (train.world_size * rates.flops) * (1 + bubble)


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


def _rollout_seconds(case: Case, memory: Memory, rates: Rates, samples: int) -> float:
    rollout, engine = case.rollout, case.engine
    share = math.ceil(samples / rollout.num_tp_groups)  # of one data-parallel rank
    cached = memory.kv_cache.tokens // engine.max_model_tokens
    at_once = max(1, min(engine.max_num_seqs, cached, share))
    waves = math.ceil(share / at_once)
    weights = memory.phase(ROLLOUT).parts["rollout weights"]
    cache = at_once * engine.max_model_tokens / 2 * case.kv_bytes_per_token
    return waves * engine.max_response_tokens * (weights + cache) / rates.memory_rate
