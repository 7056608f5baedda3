"""The check that a run fits its device, before a model is built.

The phases are the planner's. A run is refused if parts of exact size alone do not fit a device with
nothing reserved; formulas and reserves of the planner only lead to warnings.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mcore_rl.common.byte_sizes import shown_bytes
from mcore_rl.common.errors import UsageError
from mcore_rl.config import RLConfig
from mcore_rl.hybrid_engine.memory.offload import kinds_at_start, offload_kinds
from mcore_rl.job.layout import ranks_per_node
from mcore_rl.job.planner_settings import engine_settings, is_known_optimizer, train_settings
from mcore_rl.job.value_models import LaidOut
from mcore_rl.model.config_json import ModelShape
from mcore_rl.model.layout import PipelineLayers, RolloutLayout, TrainLayout
from mcore_rl.model.roles import CRITIC, Roles
from mcore_rl.planner.advice import Problem, problems_of
from mcore_rl.planner.memory import memory_of, resident_of
from mcore_rl.planner.models import TrainedModel
from mcore_rl.planner.phases import BUILD, CANARY, FIRST_SWITCH, NCCL, ROLLOUT, START, Case, Phase
from mcore_rl.planner.settings import (
    BATCHED_TOKENS,
    COMMUNICATOR_MB,
    GB,
    GPU_RESERVED_GB,
    MB,
    Machine,
    TrainSettings,
)

_MOST_REMEDIES = 3
# Phases of mcore_rl.verify, which updates nothing.
_SCORING = (BUILD, START, CANARY, FIRST_SWITCH, ROLLOUT)
_WITHOUT_LIMIT = 1 << 60


def check_device(case: Case, *, scores_only: bool = False) -> tuple[str, ...]:
    """Refuse a case with a phase that cannot fit `case.machine.gpu_bytes`.

    Returns a line for each phase that may not fit. UsageError names the phase, what it holds on its
    fullest rank, the missing bytes and remedies.
    """
    resident = resident_of(case)
    memory = memory_of(case, resident)
    phases = {p.name: p for p in memory.phases if not scores_only or p.name in _SCORING}
    for problem in problems_of(case, memory, resident, 0, surely=True):
        if problem.where in phases:
            raise _refusal(case, phases[problem.where], problem)
    return tuple(
        f"phase {phase.name} may lack {shown_bytes(phase.lacking_bytes)} of device memory on rank "
        f"{phase.rank}, by the planner's estimate: mcore-rl plan, with the same flags, shows of "
        "what and tries others"
        for phase in phases.values()
        if phase.lacking_bytes
    )


def _refusal(case: Case, phase: Phase, problem: Problem) -> UsageError:
    size = shown_bytes(case.machine.gpu_bytes)
    with_engine = phase.name in (START, ROLLOUT)
    engine = {"rollout weights", "activations", "KV cache"} if with_engine else set()
    held = [
        f"{part} {shown_bytes(num_bytes)}"
        for part, num_bytes in phase.parts.items()
        if num_bytes and part not in {*engine, NCCL}
    ]
    if with_engine:
        utilization = case.engine.gpu_memory_utilization
        share = f"vLLM's share {shown_bytes(case.share_bytes)}"
        held.append(f"{share} (--rl-rollout-gpu-memory-utilization {utilization:g})")
        weights = phase.parts["rollout weights"]
        if weights > case.share_bytes:
            held[-1] += f", of which its weights alone take {shown_bytes(weights)}"
    ways = [
        remedy.flags + ("" if not remedy.lacking_bytes else " (which is not enough by itself)")
        for remedy in problem.remedies[:_MOST_REMEDIES]
    ]
    return UsageError(
        f"phase {phase.name} does not fit a device of {size}: rank {phase.rank} would hold "
        f"{', '.join(held)}, and lacks {shown_bytes(problem.lacking_bytes)} at least",
        remedy=f"give {', or '.join(ways)}" if ways else "take more GPUs, or larger ones",
    )


def case_of_run(
    config: RLConfig,
    values: Mapping[str, Any],
    model: tuple[ModelShape, TrainLayout, PipelineLayers],
    rollout: RolloutLayout,
    critic: TrainedModel | None,
    *,
    device_bytes: int | None,
) -> Case | None:
    """Return the case of a run on devices of that size (None: without devices). `values` are
    Megatron's flags by destination, before Megatron validated them. Returns None if the planner
    does not know the optimizer."""
    if not is_known_optimizer(values):
        return None
    shape, train, layers = model
    return Case(
        shape=shape,
        train=train,
        layers=layers,
        rollout=rollout,
        training=training_of(config, values, train, layers),
        critic=critic,
        engine=engine_settings(
            config,
            values,
            shape,
            rollout,
            offloaded=offload_kinds(
                config.weight_sync.offload, values, has_cuda=device_bytes is not None
            ),
            away_at_start=kinds_at_start(values),
            batched_tokens=BATCHED_TOKENS,
        ),
        machine=Machine(
            ranks_per_node=ranks_per_node(config.engine, train.world_size),
            gpu_bytes=_WITHOUT_LIMIT if device_bytes is None else device_bytes,
            reserved_bytes=int(GPU_RESERVED_GB * GB),
            communicator_bytes=int(COMMUNICATOR_MB * MB),
            host_bytes=_WITHOUT_LIMIT,
            own_node_rate=1.0,
            other_nodes_rate=1.0,
        ),
    )


def training_of(
    config: RLConfig, values: Mapping[str, Any], train: TrainLayout, layers: PipelineLayers
) -> TrainSettings:
    """Return the planner's settings for the training of a model."""
    multiple = values.get("make_vocab_size_divisible_by")
    return train_settings(config, values, train, layers, vocabulary_multiple=multiple)


def trained_critic(config: RLConfig, critic: LaidOut, roles: Roles) -> TrainedModel:
    """Return the critic as a model of the plan."""
    return TrainedModel(
        name=CRITIC,
        shape=critic.shape,
        train=critic.layout,
        layers=critic.layers,
        training=training_of(config, critic.values, critic.layout, critic.layers),
        ranks=roles.critic,
    )
