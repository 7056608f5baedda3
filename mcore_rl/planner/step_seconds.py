"""Seconds of a step by deliberately simple formulas, all samples taken at full length.

    compute        6 (with full recomputation 8) x PP x active parameters of the largest stage x
                   tokens / (ranks x rate), times 1 + (PP - 1) / (micro-batches x VPP) for the
                   pipeline's bubble, and 15 % more for each doubling of PP, since stages wait for
                   micro-batches that differ; the last stage has the output layer
    communication  TP's and EP's bytes in a layer's passes, at the rate of the links they cross
    hand-over      most bytes that a rank receives or sends, at the rate of the links
    offload        bytes that leave the device for rollout and return, at the host's rate
    rollout        response tokens x passes over the samples of a data-parallel rank x an engine's
                   step: the time to read its weights and a half-full cache once, or to compute all
                   sequences, whichever is longer

They rank layouts and show what a step's time goes into; they do not predict a step. Launches,
prefill, rewards, log-probs before the update and waits for the longest response are not in them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from mcore_rl.model.tensors import active_parameters, most_active_parameters
from mcore_rl.planner.memory import OFFLOADED, Memory
from mcore_rl.planner.models import TrainedModel
from mcore_rl.planner.phases import ROLLOUT, Case
from mcore_rl.planner.settings import Machine

_WAITS = 0.15  # an assumption
# Pinned host memory and a device, of one rank and one direction: an assumption.
HOST_RATE = 45e9


@dataclass(frozen=True, slots=True)
class Step:
    """A step and the rates of a device, as the formulas take them."""

    samples: int
    mini_batches: int
    flops: float  # of a device per second, achieved in training
    memory_rate: float  # of a device, bytes per second


@dataclass(frozen=True, slots=True)
class Seconds:
    """The seconds of one step by part."""

    compute: float
    communication: float
    hand_over: float
    rollout: float
    offload: float

    @property
    def total(self) -> float:
        return self.compute + self.communication + self.hand_over + self.rollout + self.offload


def seconds_of_step(case: Case, memory: Memory, step: Step, hand_over: float) -> Seconds:
    """Return the seconds of a step; `hand_over` are those of a hand-over."""
    return Seconds(
        compute=sum(_compute(model, step) for model in case.models),
        communication=sum(_communication(m, case.machine, step.samples) for m in case.models),
        hand_over=hand_over,
        rollout=_rollout_seconds(case, memory, step),
        offload=_offload_seconds(case, memory),
    )


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
    of_a_token = engine_step_seconds(case, memory, step, at_once, engine.max_model_tokens / 2)
    return waves * engine.max_response_tokens * of_a_token


def engine_step_seconds(
    case: Case, memory: Memory, step: Step, running: int, context_tokens: float
) -> float:
    """Return the seconds of an engine's step, in which it reads its weights and the keys and values
    of all running sequences, or computes 2 x active parameters for each of them."""
    weights = memory.phase(ROLLOUT).parts["rollout weights"]
    cache = running * context_tokens * case.kv_bytes_per_token
    return max((weights + cache) / step.memory_rate, running / token_rate(case, step))


def token_rate(case: Case, step: Step) -> float:
    """Return the tokens per second that a TP group of an engine computes at most."""
    return case.rollout.tp_size * step.flops / (2 * active_parameters(case.shape))


def _offload_seconds(case: Case, memory: Memory) -> float:
    """Return the seconds in which a rank's state leaves the device and returns."""
    ranks = min(case.machine.ranks_per_node, case.train.world_size)
    moved = sum(size for name, size in memory.host_bytes.items() if OFFLOADED in name)
    return 2 * moved / ranks / HOST_RATE
