"""The check that a job fits the devices and the host memory of its machines, by the planner."""

from __future__ import annotations

from mcore_rl.config import RLConfig
from mcore_rl.job.facts import Facts, Source
from mcore_rl.planner.checks import check_device, check_host
from mcore_rl.planner.memory import memory_of, resident_of
from mcore_rl.trainer.case import case_of_run, has_slow_products, trained_critic, with_teachers


def check_memory(config: RLConfig, facts: Facts, source: Source) -> tuple[str, ...]:
    """Return a line for each thing that may not fit the device or the host. UsageError: something
    surely does not fit."""
    actor, rollout, roles = facts.actor, facts.rollout, facts.roles
    if source.device_bytes is None and source.host_memory is None:
        return ()
    if actor is None or rollout is None or roles is None:
        return ()
    critic = None if facts.critic is None else trained_critic(config, facts.critic, roles)
    size = source.device_bytes() if source.platform.cuda and source.device_bytes else None
    has_device = size is not None
    model = (actor.shape, actor.layout, actor.layers)
    case = case_of_run(
        *(config, actor.values, model, rollout, critic),
        engine_ranks=roles.rollout,
        device_bytes=size,
    )
    if case is None:
        return ()
    case = with_teachers(case, config, facts.teachers, roles)
    lines = check_device(case, scores_only=source.scores_only) if has_device else ()
    if source.host_memory is None or has_device != source.platform.cuda or source.scores_only:
        return lines
    if case.is_apart and not has_device:
        return lines  # machines may have ranks of both kinds, whose sum is not planned
    return lines + check_host(
        case,
        source.host_memory(),
        memory=memory_of(case, resident_of(case)) if has_device else None,
        kv_cache_bytes=int(config.engine.rollout_kv_cache_gib * (1 << 30)),
        widens=has_slow_products(config.trainer.precision),
    )
