"""Problems of a plan that does not fit, and flags that help: each is planned, none is guessed.

This module is pure: it imports neither Megatron nor vLLM nor torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from mcore_rl.common.errors import UsageError
from mcore_rl.hybrid_engine.plan.placement import Placement
from mcore_rl.model.layout import RolloutLayout
from mcore_rl.planner.memory import Memory, memory_of
from mcore_rl.planner.models import CRITIC_FLAGS, TrainedModel, following, in_layout
from mcore_rl.planner.phases import ROLLOUT, START, Case
from mcore_rl.planner.settings import MIB, Recompute, TrainSettings
from mcore_rl.planner.stages import stages_for

Bytes = npt.NDArray[np.int64]
HOST = "host memory"
_MOST = 5  # remedies per problem


@dataclass(frozen=True, slots=True)
class Remedy:
    """Flags that reduce a problem, and the bytes that are then still missing; 0: it fits."""

    flags: str
    lacking_bytes: int


@dataclass(frozen=True, slots=True)
class Problem:
    """A phase, or the host's memory, that does not fit."""

    where: str
    lacking_bytes: int
    remedies: tuple[Remedy, ...]


def problems_of(
    case: Case, memory: Memory, resident: Bytes, traffic_bytes: int, *, surely: bool = False
) -> list[Problem]:
    """Return everything that does not fit, with remedies; those that suffice alone come first. With
    `surely`, only phases whose parts of exact size alone do not fit."""
    found = []
    lacks = _surely_lacking if surely else _lacking
    for where, lacking in lacks(case, memory).items():
        if not lacking:
            continue
        remedies = []
        for flags, other in _candidates(case, memory, where):
            needed = resident
            if other.rollout != case.rollout:
                wider = Placement(other.shape, other.train, other.layers, other.rollout)
                needed = np.full_like(resident, wider.most_resident_bytes)
            # A change of layout may remove a phase.
            left = lacks(other, memory_of(other, needed, traffic_bytes)).get(where, 0)
            if left < lacking:
                remedies.append(Remedy(flags, left))
        found.append(Problem(where, lacking, tuple(_best(remedies)[:_MOST])))
    return found


def _best(remedies: list[Remedy]) -> list[Remedy]:
    """Sort by missing bytes, and drop remedies that only append flags without effect."""
    ordered: list[Remedy] = []
    for remedy in sorted(remedies, key=lambda remedy: remedy.lacking_bytes):
        before = ordered[-1] if ordered else None
        adds_nothing = (
            before is not None
            and remedy.lacking_bytes == before.lacking_bytes
            and remedy.flags.startswith(f"{before.flags} ")
        )
        if not adds_nothing:
            ordered.append(remedy)
    return ordered


def _lacking(case: Case, memory: Memory) -> dict[str, int]:
    host = max(0, memory.host_total_bytes - case.machine.host_bytes)
    return {phase.name: phase.lacking_bytes for phase in memory.phases} | {HOST: host}


def _surely_lacking(case: Case, memory: Memory) -> dict[str, int]:
    return {phase.name: phase.surely_lacking_bytes for phase in memory.phases}


def _candidates(case: Case, memory: Memory, where: str) -> Iterator[tuple[str, Case]]:
    if where == HOST:
        yield from _host(case)
        return
    # Flags of training do not reduce anything that is on the device with the engine.
    with_engine = where in (START, ROLLOUT)
    if with_engine or "rollout weights" in memory.phase(where).parts:
        yield from _engine(case, memory)
    else:
        yield from _training(case)
    if not with_engine:
        yield from _train_layouts(case)
        yield from _critic_layouts(case)


def _training(case: Case) -> Iterator[tuple[str, Case]]:
    now = case.training

    def having(**changes: object) -> Case:
        return _changed(case, lambda settings: replace(settings, **changes))  # type: ignore[arg-type]

    if not now.distributed_optimizer:
        yield "--use-distributed-optimizer", having(distributed_optimizer=True)
    if now.recompute.granularity != "full":
        flags = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
        yield flags, having(recompute=Recompute(granularity="full", method="uniform"))
    if now.packed_tokens >= 2 * now.positions:
        flags = f"--rl-max-tokens-per-microbatch {now.positions}"
        yield flags, _changed(case, _with_a_sample_at_a_time)
    elif now.micro_batch_size > 1:
        yield "--micro-batch-size 1", _changed(case, _with_a_sample_at_a_time)
    if now.chunk_tokens > 256:
        yield "--rl-log-prob-chunk-tokens 256", having(chunk_tokens=256)
    if now.gradient_bytes == 4 and now.weight_bytes == 2:
        yield "--grad-reduce-in-bf16", having(gradient_bytes=2)
    if now.optimizer_bytes == 12:
        flags = "--use-precision-aware-optimizer --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16"
        yield flags, having(optimizer_bytes=8)
    if not now.optimizer_host_share:
        yield "--optimizer-cpu-offload", having(optimizer_host_share=1.0)


def _changed(case: Case, change: Callable[[TrainSettings], TrainSettings]) -> Case:
    """Return the case with changed training settings, which a critic shares with the actor."""
    critic = case.critic
    if critic is not None:
        critic = replace(critic, training=change(critic.training))
    return replace(case, training=change(case.training), critic=critic)


def _with_a_sample_at_a_time(settings: TrainSettings) -> TrainSettings:
    samples = settings.packed_tokens // settings.positions or settings.micro_batch_size
    return replace(
        settings,
        micro_batch_size=1,
        packed_tokens=settings.positions if settings.packed_tokens else 0,
        num_micro_batches=settings.num_micro_batches * samples,
    )


def _train_layouts(case: Case) -> Iterator[tuple[str, Case]]:
    """Yield layouts with one degree doubled, where possible."""
    train, shape = case.train, case.shape
    with_ep = shape.experts and shape.experts.num_experts % (2 * train.ep_size) == 0
    changes = [
        *([{"ep_size": 2 * train.ep_size}] if with_ep else []),
        {"pp_size": 2 * train.pp_size},
    ]
    for change in changes:
        try:
            other = replace(train, **change)
            stages = stages_for(shape.num_layers, other.pp_size)
        except UsageError:
            continue
        if stages is None or case.training.num_micro_batches < 1:
            continue
        layers, flags = case.layers, f"--expert-model-parallel-size {other.ep_size}"
        training = case.training
        if other.pp_size != train.pp_size:
            samples = case.training.num_micro_batches * train.dp_size
            training = replace(training, num_micro_batches=max(1, samples // other.dp_size))
            layers = stages.layers
            flags = f"--pipeline-model-parallel-size {other.pp_size}{stages.flags}"
        critic = None
        if case.critic is not None:
            critic = following(case.critic, other, layers)
            if critic is None:
                continue
        rollout = case.rollout
        if other.ep_size != train.ep_size and rollout.expert_parallel:
            # Engines follow by default, so the flags state the planned degree explicitly.
            if rollout.ep_size == train.ep_size and case.engine.may_spread_experts:
                rollout = replace(rollout, dp_size=2 * rollout.dp_size, rank_map=())
            flags += f" --rl-rollout-ep-size {rollout.ep_size}"
        yield (
            flags,
            replace(
                case,
                train=other,
                layers=layers,
                rollout=rollout,
                training=training,
                critic=critic,
            ),
        )


def _critic_layouts(case: Case) -> Iterator[tuple[str, Case]]:
    """Yield layouts with one of the critic's degrees doubled."""
    critic = case.critic
    if critic is None:
        return
    for name, flag in CRITIC_FLAGS.items():
        size = 2 * getattr(critic.train, name)
        wider = _critic_with(critic, name, size)
        if wider is not None:
            yield f"{flag} {size}", replace(case, critic=wider)


def _critic_with(critic: TrainedModel, name: str, size: int) -> TrainedModel | None:
    """Return the critic with another degree; None if it does not divide model, world and batch."""
    shape, old = critic.shape, critic.train
    if name == "ep_size" and (shape.experts is None or shape.experts.num_experts % size):
        return None
    sizes = [shape.num_heads, shape.num_kv_heads, shape.ffn_hidden_size]
    if shape.experts and shape.experts.shared_hidden_size:
        sizes.append(shape.experts.shared_hidden_size)
    if name == "tp_size" and any(s % size for s in sizes):
        return None
    try:
        train = replace(old, **{name: size})
    except UsageError:
        return None
    return in_layout(critic, train)


def _engine(case: Case, memory: Memory) -> Iterator[tuple[str, Case]]:
    now = case.engine

    def having(**changes: object) -> Case:
        return replace(case, engine=replace(now, **changes))  # type: ignore[arg-type]

    # The share cannot exceed the memory that vLLM finds free.
    useful = math.floor(min(memory.kv_cache.useful_utilization, 0.99) * 100) / 100
    more = having(gpu_memory_utilization=useful)
    raised = f"--rl-rollout-gpu-memory-utilization {useful:g}"
    helps = 0 < useful != now.gpu_memory_utilization
    if helps:
        yield raised, more
    for kinds in (("gradients", "optimizer"), ("gradients", "optimizer", "parameters")):
        if not now.offloaded >= set(kinds):
            yield f"--rl-offload {','.join(kinds)}", having(offloaded=frozenset(kinds))
    if now.bucket_bytes > 64 * MIB:
        yield "--rl-reshard-bucket-mb 64", having(bucket_bytes=64 * MIB)
    for flags, wider in _wider_engines(case):
        yield flags, replace(case, rollout=wider)
        if helps:
            yield f"{flags} {raised}", replace(more, rollout=wider)


def _wider_engines(case: Case) -> Iterator[tuple[str, RolloutLayout]]:
    """Yield engines of 2, 4 and 8 times as many ranks: with more EP if possible, else more TP."""
    rollout, experts, world = case.rollout, case.shape.experts, case.rollout.world_size
    for factor in (2, 4, 8):
        if experts and case.engine.may_spread_experts:
            ep_size = factor * rollout.slots_per_engine
            if experts.num_experts % ep_size == 0 and world % ep_size == 0:
                dp_size = factor * rollout.dp_size
                wider = replace(rollout, expert_parallel=True, dp_size=dp_size, rank_map=())
                yield f"--rl-rollout-ep-size {ep_size}", wider
            continue
        tp_size = factor * rollout.tp_size
        inside = case.machine.ranks_per_node % tp_size == 0 and world % tp_size == 0
        if inside and case.shape.num_heads % tp_size == 0:
            wider = replace(rollout, tp_size=tp_size, rank_map=())
            yield f"--rl-rollout-tp-size {tp_size}", wider


def _host(case: Case) -> Iterator[tuple[str, Case]]:
    now = case.engine
    if now.delta:
        yield "drop --rl-reshard-delta", replace(case, engine=replace(now, delta=False))
    if now.keeps_reference:
        yield "--rl-kl-coef 0", replace(case, engine=replace(now, keeps_reference=False))
    if now.offloaded:
        yield "--rl-offload none", replace(case, engine=replace(now, offloaded=frozenset()))
