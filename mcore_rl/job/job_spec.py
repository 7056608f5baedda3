"""The `JobSpec` of a job after all checks, with notes on what they have decided."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

from mcore_rl.config import RLConfig
from mcore_rl.flags.classes import notes
from mcore_rl.flags.derived import DerivedFlags, values_of
from mcore_rl.flags.parsed_flags import as_config
from mcore_rl.hybrid_engine.options import ranks_per_node
from mcore_rl.hybrid_engine.plan.placement import Placement
from mcore_rl.job import engines, reading
from mcore_rl.job.facts import Facts, Source
from mcore_rl.job.layout import note_on_experts, own_all_reduce_obstacle
from mcore_rl.job.lora import note_on_adapters
from mcore_rl.megatron import adapter as megatron_adapter
from mcore_rl.model.layout import RolloutLayout
from mcore_rl.spec import JobSpec, LaidOut, TeacherSpec, ValueModelSpec


def spec_of(
    facts: Facts,
    source: Source,
    critic: ValueModelSpec | None,
    reward_model: ValueModelSpec | None,
    teachers: Sequence[TeacherSpec | None],
    memory_notes: tuple[str, ...],
) -> JobSpec:
    """Return the job; no check has refused anything."""
    config, derived, actor, rollout = facts.config, facts.derived, facts.actor, facts.rollout
    assert config and facts.rewards and facts.checkpoint and facts.roles, "none was refused"
    assert derived and actor and rollout, "none was refused"
    num_mtp_layers = facts.given.get("mtp_num_layers") or 0
    tokens = actor.tokens or ()
    flags = values_of(derived, facts.given, facts.parser)
    return JobSpec(
        config=config,
        rewards=facts.rewards,
        environment=facts.environment,
        shape=actor.shape,
        checkpoint=facts.checkpoint.with_mtp_trained(actor.shape, num_mtp_layers),
        roles=facts.roles,
        train_layout=actor.layout,
        layers=actor.layers,
        rollout_layout=rollout,
        ranks_per_node=ranks_per_node(config.engine, facts.roles.world_size),
        tokens=tokens,
        chosen=source.chosen,
        given=as_config(tokens[len(derived.tokens) :], facts.parser),
        flags=reading.flags_of(flags, facts.parser),
        notes=(*_notes(facts, source, config, derived, actor, rollout), *memory_notes),
        save=facts.given.get("save"),
        save_interval=facts.given.get("save_interval"),
        critic=critic,
        reward_model=reward_model,
        teachers=tuple(each for each in teachers if each is not None),
        trust_remote_code=bool(facts.given.get("trust_remote_code")),
        lora=None if source.scores_only else facts.lora,
    )


def _notes(
    facts: Facts,
    source: Source,
    config: RLConfig,
    derived: DerivedFlags,
    actor: LaidOut,
    rollout: RolloutLayout,
) -> Iterator[str]:
    """Describe what a start decides that is not in the command line."""
    if derived.architecture:
        yield f"derived from config.json: {' '.join(derived.architecture)}"
    if facts.model_class is not None:
        chosen = facts.model_class.describe()
        yield f"models, unless a model_provider builds them, are a {chosen}"
    if derived.machine:
        lacks = source.platform.lacks
        why = f"no {lacks} here, so " if lacks else ""
        yield f"{why}Megatron runs with: {' '.join(derived.machine)}"
    if derived.defaults:
        yield f"defaults for RL: {' '.join(derived.defaults)}"
    if source.chosen:
        yield f"chosen by the plan, and kept if they are given: {' '.join(source.chosen)}"
    parser = megatron_adapter.make_parser()  # without a fork's flags
    yield from notes(facts.given, parser, unread=derived.unread)
    if config.has_engines:
        placement = Placement(actor.shape, actor.layout, actor.layers, rollout)
        if config.rollout.separate is None:
            yield from note_on_experts(config.engine, placement)
        if facts.lora is not None:
            yield from note_on_adapters(config, facts.lora, placement)
    yield from engines.notes_on_sampling_ahead(config, rollout)
    obstacle = own_all_reduce_obstacle(config.engine, rollout, os.environ)
    if source.platform.cuda and config.has_engines and obstacle is not None:
        yield f"engines reduce by NCCL, without vLLM's own all-reduce: {obstacle.found}"
    if facts.checkpoint is not None and facts.checkpoint.mtp:
        drafts = config.engine.speculate.startswith("mtp")
        yield (
            f"the checkpoint's multi-token-prediction layers ({len(facts.checkpoint.mtp)} tensors) "
            "are not trained: they are exported as they are"
            f"{', and draft for the engines' if drafts else ''}"
        )
