"""What a start decides that is not in the command line."""

from __future__ import annotations

import os
from collections.abc import Iterator

from mcore_rl.flags.classes import notes
from mcore_rl.hybrid_engine.plan.placement import Placement
from mcore_rl.job import engines
from mcore_rl.job.facts import Facts, Source
from mcore_rl.job.layout import note_on_experts, own_all_reduce_obstacle
from mcore_rl.megatron import adapter as megatron_adapter


def start_notes(facts: Facts, source: Source) -> Iterator[str]:
    """Describe the decisions for a job of which nothing was refused."""
    config, derived, checkpoint = facts.config, facts.derived, facts.checkpoint
    actor, rollout = facts.actor, facts.rollout
    assert config and derived and checkpoint and actor and rollout, "none was refused"
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
    parser = megatron_adapter.make_parser()  # without a fork's flags
    yield from notes(facts.given, parser, unread=derived.unread)
    if config.rollout.apart is None and config.has_engines:
        placement = Placement(actor.shape, actor.layout, actor.layers, rollout)
        yield from note_on_experts(config.engine, placement)
    yield from engines.notes_on_sampling_ahead(config, rollout)
    obstacle = own_all_reduce_obstacle(config.engine, rollout, os.environ)
    if source.platform.cuda and config.has_engines and obstacle is not None:
        yield f"engines reduce by NCCL, without vLLM's own all-reduce: {obstacle.found}"
    if checkpoint.mtp:
        drafts = config.engine.speculate.startswith("mtp")
        yield (
            f"the checkpoint's multi-token-prediction layers ({len(checkpoint.mtp)} tensors) "
            "are not trained: they are exported as they are"
            f"{', and draft for the engines' if drafts else ''}"
        )
