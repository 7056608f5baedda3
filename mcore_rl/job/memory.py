"""The check that a job fits the devices and the host memory of its machines, by the planner."""

from __future__ import annotations

from mcore_rl.config import RLConfig
from mcore_rl.job.facts import Facts, Source
from mcore_rl.planner.checks import check_device, check_host
from mcore_rl.planner.memory import memory_of, resident_of
from mcore_rl.planner.phases import Case
from mcore_rl.trainer.plan_inputs import (
    case_of_run,
    has_slow_products,
    trained_critic,
    with_teachers,
)


def planned_case(config: RLConfig, facts: Facts, device_bytes: int | None) -> Case | None:
    """Return the planner's case of a job that is laid out, on devices of that size or without.
    None if the planner does not know its optimizer."""
    actor, rollout, roles = facts.actor, facts.rollout, facts.roles
    assert actor and rollout and roles, "nothing was refused"
    critic = None if facts.critic is None else trained_critic(config, facts.critic, roles)
    model = (actor.shape, actor.layout, actor.layers)
    case = case_of_run(
        *(config, actor.values, model, rollout, critic),
        engine_ranks=roles.rollout,
        device_bytes=device_bytes,
    )
    return None if case is None else with_teachers(case, config, facts.teachers, roles)


def check_memory(config: RLConfig, facts: Facts, source: Source) -> tuple[str, ...]:
    """Return a line for each thing that may not fit the device or the host. UsageError: something
    surely does not fit."""
    if source.device_bytes is None and source.host_memory is None:
        return ()
    if facts.actor is None or facts.rollout is None or facts.roles is None:
        return ()
    size = source.device_bytes() if source.platform.cuda and source.device_bytes else None
    has_device = size is not None
    case = planned_case(config, facts, size)
    if case is None:
        return ()
    lines = check_device(case, scores_only=source.scores_only) if has_device else ()
    if source.host_memory is None or has_device != source.platform.cuda or source.scores_only:
        return lines
    if case.is_separate and not has_device:
        return lines  # machines may have ranks of both kinds, whose sum is not planned
    return lines + check_host(
        case,
        source.host_memory(),
        memory=memory_of(case, resident_of(case)) if has_device else None,
        kv_cache_bytes=kv_cache_bytes(config),
        widens=has_slow_products(config.trainer.precision),
    )


def kv_cache_bytes(config: RLConfig) -> int:
    """Return the KV cache of a rank without a device."""
    return int(config.engine.rollout_kv_cache_gib * (1 << 30))
