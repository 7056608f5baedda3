"""The model of what gives a number per token: a critic, a reward model."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any, TextIO

import torch.distributed as dist

from mcore_rl.job.spec import ValueModelSpec
from mcore_rl.megatron import adapter as megatron_adapter
from mcore_rl.megatron.policy_head import make_actor_provider
from mcore_rl.megatron.shards import ModelShards
from mcore_rl.megatron.value_head import make_critic_provider
from mcore_rl.megatron.world import MegatronWorld
from mcore_rl.model.config_json import settings_without_flag


def build_value_model(
    spec: ValueModelSpec,
    args: argparse.Namespace,
    setup: Callable[[Any], megatron_adapter.TrainState],
    provider: Callable[..., Any] | None = None,
    *,
    log: TextIO | None = None,
) -> tuple[MegatronWorld, megatron_adapter.TrainState, ModelShards]:
    """The model in a world of its own, its weights not read yet. Collective.

    `args` are Megatron's for it, `setup` builds with or without an optimizer, `provider` is a
    fork's own.
    """
    for name, value in settings_without_flag(spec.shape).items():
        setattr(args, name, value)
    with megatron_adapter.megatron_output_to(log):
        world = MegatronWorld(args)
        with world:
            base = provider or make_actor_provider(args, spec.shape)
            state = setup(make_critic_provider(base))
            shards = ModelShards(
                state.chunks,
                spec.shape,
                world.layout,
                dist.get_rank(),
                dict(spec.checkpoint.tensors),
            )
    return world, state, shards
