"""Problems of a plan that does not fit, and flags that help: each is planned, none is guessed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from mcore_rl.common.errors import UsageError
from mcore_rl.model.layout import RolloutLayout, TrainLayout
from mcore_rl.planner.layouts import (
    Stages,
    in_layout,
    most_resident_bytes,
    rollout_layouts,
    tp_divides,
    train_layouts,
    with_train_layout,
    with_training,
)
from mcore_rl.planner.memory import Memory, memory_of
from mcore_rl.planner.models import Bytes
from mcore_rl.planner.phases import ROLLOUT, START, UPDATE, Case
from mcore_rl.planner.settings import MIB, Recompute, TrainSettings

HOST = "host memory"
# Degrees in which a critic may differ from the actor, and their flags.
CRITIC_FLAGS = {
    "tp_size": "--rl-critic-tp-size",
    "pp_size": "--rl-critic-pp-size",
    "ep_size": "--rl-critic-ep-size",
}
_MOST = 5  # remedies per problem


@dataclass(frozen=True, slots=True)
class Remedy:
    """Flags that reduce a problem, and the bytes that are then still missing; 0: it fits.

    Example: Remedy("--pipeline-model-parallel-size 4", lacking_bytes=2_500_000_000)
    """

    flags: str
    lacking_bytes: int


@dataclass(frozen=True, slots=True)
class Problem:
    """A phase, or the host's memory, that does not fit."""

    where: str
    lacking_bytes: int
    remedies: tuple[Remedy, ...]


Change = tuple[str, Case]  # flags, and the case with them


def problems_of(
    case: Case, memory: Memory, resident: Bytes, traffic_bytes: int, *, surely: bool = False
) -> list[Problem]:
    """Return everything that does not fit, with remedies; those that suffice alone come first. With
    `surely`, only phases whose parts of exact size alone do not fit."""
    problems = []
    lacks = _surely_lacking if surely else _lacking
    for where, lacking in lacks(case, memory).items():
        if not lacking:
            continue
        remedies = []
        for flags, other in _changes(case, memory, where):
            needed = resident
            if other.rollout != case.rollout:
                needed = most_resident_bytes(other, other.rollout)
            # A change of layout may remove a phase.
            left = lacks(other, memory_of(other, needed, traffic_bytes)).get(where, 0)
            if left < lacking:
                remedies.append(Remedy(flags, left))
        problems.append(Problem(where, lacking, tuple(_best(remedies)[:_MOST])))
    return problems


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


def _changes(case: Case, memory: Memory, where: str) -> Iterator[Change]:
    """Yield the changes of one or two flags that may help there."""
    if where == HOST:
        yield from _on_host(case)
        return
    # Flags of training do not reduce anything that is on the device with the engine.
    with_engine = where in (START, ROLLOUT, UPDATE)
    if with_engine or "rollout weights" in memory.phase(where).parts:
        yield from _of_engine(case, memory)
    else:
        yield from _of_training(case)
    if not with_engine:
        yield from _train_layouts(case)
        yield from _critic_layouts(case)


def _of_training(case: Case) -> Iterator[Change]:
    """Yield changes of what is on the device while the engine sleeps. Other models share the
    actor's training settings."""
    engine = case.engine
    if engine.graph_bytes and not engine.offloads_graphs:
        offloads = replace(engine, offloads_graphs=True)
        yield "--rl-rollout-offload-cuda-graphs", replace(case, engine=offloads)
    for flags, change in savings_of_training(case.training):
        yield flags, with_training(case, change)


def savings_of_training(
    now: TrainSettings,
) -> Iterator[tuple[str, Callable[[TrainSettings], TrainSettings]]]:
    """Yield flags, and the function from settings to settings with them."""
    if not now.distributed_optimizer:
        yield "--use-distributed-optimizer", lambda it: replace(it, distributed_optimizer=True)
    if now.recompute.granularity != "full":
        full = Recompute(granularity="full", method="uniform")
        flags = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
        yield flags, lambda it: replace(it, recompute=full)
    if now.packed_tokens >= 2 * now.positions:
        yield f"--rl-max-tokens-per-microbatch {now.positions}", _with_a_sample_at_a_time
    elif now.micro_batch_size > 1:
        yield "--micro-batch-size 1", _with_a_sample_at_a_time
    if now.chunk_tokens > 256:
        yield "--rl-log-prob-chunk-tokens 256", lambda it: replace(it, chunk_tokens=256)
    if now.gradient_bytes == 4 and now.weight_bytes == 2:
        yield "--grad-reduce-in-bf16", lambda it: replace(it, gradient_bytes=2)
    if now.optimizer_bytes == 12:
        flags = "--use-precision-aware-optimizer --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16"
        yield (
            flags,
            lambda it: replace(it, optimizer_bytes=8, moment_bytes=4, saved_in_pieces=False),
        )
    if not now.optimizer_host_share:
        # Megatron's optimizer for it is a form of the other one.
        flags = "--optimizer-cpu-offload"
        if now.optimizer_bytes == 12:
            flags += " --use-precision-aware-optimizer"
        yield flags, lambda it: replace(it, optimizer_host_share=1.0, saved_in_pieces=False)


def _with_a_sample_at_a_time(settings: TrainSettings) -> TrainSettings:
    samples = settings.packed_tokens // settings.positions or settings.micro_batch_size
    return replace(
        settings,
        micro_batch_size=1,
        packed_tokens=settings.positions if settings.packed_tokens else 0,
        num_micro_batches=settings.num_micro_batches * samples,
        num_demonstration_micro_batches=settings.num_demonstration_micro_batches * samples,
    )


def _train_layouts(case: Case) -> Iterator[Change]:
    """Yield layouts with EP or PP doubled, where possible."""
    train, engine, rollout = case.train, case.engine, case.rollout
    ep_sizes = [2 * train.ep_size] if case.shape.experts else []
    for layout, _ in _layouts_near(case, [train.pp_size], ep_sizes):
        other = with_train_layout(case, layout, case.layers)
        if other is None:
            continue
        flags = f"--expert-model-parallel-size {layout.ep_size}"
        if rollout.expert_parallel and not case.is_separate:
            # Engines follow by default, so the flags state the planned degree explicitly.
            if rollout.ep_size == train.ep_size and engine.may_spread_experts:
                wider = replace(rollout, dp_size=2 * rollout.dp_size, rank_map=())
                other = replace(other, rollout=wider)
            flags += f" --rl-rollout-ep-size {other.rollout.ep_size}"
        yield flags, other
    for layout, stages in _layouts_near(case, [2 * train.pp_size], [train.ep_size]):
        other = with_train_layout(case, layout, stages.layers)
        if other is not None:
            yield f"--pipeline-model-parallel-size {layout.pp_size}{stages.flags}", other


def _layouts_near(
    case: Case, pp_sizes: list[int], ep_sizes: list[int]
) -> Iterator[tuple[TrainLayout, Stages]]:
    """Yield the layouts that differ from the current one in PP or EP only."""
    train = case.train
    return train_layouts(
        case.shape,
        train.world_size,
        tp_sizes=[train.tp_size],
        pp_sizes=pp_sizes,
        ep_sizes=ep_sizes,
        etp_size=train.etp_size,
        cp_size=train.cp_size,
    )


def _critic_layouts(case: Case) -> Iterator[Change]:
    """Yield layouts with one of the critic's degrees doubled, where possible."""
    critic = case.critic
    if critic is None:
        return
    old, experts = critic.train, critic.shape.experts
    doubled = {"tp_size": 2 * old.tp_size, "pp_size": 2 * old.pp_size}
    if experts and experts.num_experts % (2 * old.ep_size) == 0:
        doubled["ep_size"] = 2 * old.ep_size
    for degree, size in doubled.items():
        try:
            train = replace(old, **{degree: size})
        except UsageError:
            continue
        wider = in_layout(critic, train) if tp_divides(critic.shape, train.tp_size) else None
        if wider is not None:
            yield f"{CRITIC_FLAGS[degree]} {size}", replace(case, critic=wider)


def _of_engine(case: Case, memory: Memory) -> Iterator[Change]:
    """Yield changes of the engine's share, of what leaves the device, and wider engines."""
    now = case.engine
    # The share cannot exceed the memory that vLLM finds free.
    useful = math.floor(min(memory.kv_cache.useful_utilization, 0.99) * 100) / 100
    more = replace(case, engine=replace(now, gpu_memory_utilization=useful))
    raised = f"--rl-rollout-gpu-memory-utilization {useful:g}"
    helps = 0 < useful != now.gpu_memory_utilization
    if helps:
        yield raised, more
    for kinds in (("gradients", "optimizer"), ("gradients", "optimizer", "parameters")):
        if not now.offloaded >= set(kinds):
            away = replace(now, offloaded=frozenset(kinds))
            yield f"--rl-offload {','.join(kinds)}", replace(case, engine=away)
    if now.bucket_bytes > 64 * MIB:
        smaller = replace(now, bucket_bytes=64 * MIB)
        yield "--rl-reshard-bucket-mb 64", replace(case, engine=smaller)
    for flags, wider in _wider_engines(case):
        yield flags, replace(case, rollout=wider)
        if helps:
            yield f"{flags} {raised}", replace(more, rollout=wider)


def _wider_engines(case: Case) -> Iterator[tuple[str, RolloutLayout]]:
    """Yield engines of 2, 4 and 8 times as many ranks: with more EP if possible, else more TP."""
    rollout = case.rollout
    more_ep = case.shape.experts is not None and case.engine.may_spread_experts
    possible = {
        (r.tp_size, r.expert_parallel, r.slots_per_engine): r for r in rollout_layouts(case)
    }
    for factor in (2, 4, 8):
        slots = factor * rollout.slots_per_engine
        tp_size = rollout.tp_size if more_ep else factor * rollout.tp_size
        wider = possible.get((tp_size, more_ep, slots))
        if wider is not None:
            yield f"--rl-rollout-{'ep' if more_ep else 'tp'}-size {slots}", wider


def _on_host(case: Case) -> Iterator[Change]:
    now = case.engine
    if now.delta:
        yield "drop --rl-reshard-delta", replace(case, engine=replace(now, delta=False))
    if now.keeps_reference:
        yield "--rl-kl-coef 0", replace(case, engine=replace(now, keeps_reference=False))
    if now.offloaded:
        yield "--rl-offload none", replace(case, engine=replace(now, offloaded=frozenset()))
