"""Command line, checkpoint and model of what gives a number per token: a critic, a reward model.

Megatron sees a command line of its own for such a model: the user's flags, and behind them those
that the role changes. Everything that is checked of the actor is checked of it.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import torch.distributed as dist

from mcore_rl.common.errors import UsageError
from mcore_rl.common.platform import Platform
from mcore_rl.flags.derived import derive_flags
from mcore_rl.flags.given import given_values
from mcore_rl.flags.options import ExtraArgs, RLConfig, add_rl_args, flag_of
from mcore_rl.hybrid_engine.plan.moves import TensorInfo
from mcore_rl.job.layout import check_batches, check_layout, check_stages
from mcore_rl.job.validation import check_megatron_accepts
from mcore_rl.megatron import adapter as megatron_adapter
from mcore_rl.megatron.hf_checkpoint import HFCheckpoint, open_checkpoint
from mcore_rl.megatron.policy_head import make_actor_provider
from mcore_rl.megatron.shards import ModelShards
from mcore_rl.megatron.value_head import make_critic_provider
from mcore_rl.megatron.world import MegatronWorld
from mcore_rl.model.config_json import ModelShape, read_model_shape, settings_without_flag
from mcore_rl.model.layout import TrainLayout
from mcore_rl.roles.world import world_of_size

HEAD = "score.weight"


@dataclass(frozen=True, slots=True)
class ValueRole:
    """How the flags speak of such a model."""

    name: str  # in messages
    init: str  # field of RLConfig: its folder
    megatron_flags: Mapping[str, str]  # field of RLConfig -> the flag of Megatron that it sets
    learns: bool


@dataclass(frozen=True, slots=True)
class CheckedValueModel:
    """What it is made of, before Megatron starts."""

    shape: ModelShape  # with a value head
    checkpoint: HFCheckpoint  # without the head of a language model; with a value head, see below
    has_head: bool  # whether the folder has one; else it starts at zero
    layout: TrainLayout
    tokens: tuple[str, ...] | None  # for Megatron's parser; None: the actor's arguments, changed
    extra_args: ExtraArgs = add_rl_args  # of that parser


def check_value_model(
    role: ValueRole,
    config: RLConfig,
    actor: tuple[ModelShape, HFCheckpoint],
    given: Mapping[str, Any],
    tokens: Sequence[str],
    *,
    parser: argparse.ArgumentParser,
    extra_args: ExtraArgs,
    world_size: int,
    platform: Platform,
) -> CheckedValueModel:
    """`given` and `tokens` are what the user set, `world_size` counts the role's ranks.

    UsageError as for the actor.
    """
    shape, checkpoint, has_head = value_checkpoint(role, config, *actor)
    own = [
        token
        for name, flag in role.megatron_flags.items()
        if (value := getattr(config, name)) is not None
        for token in (flag, str(value))
    ]
    changed = {**given, **given_values(own, parser)}
    derived = derive_flags(shape, config, changed, parser=parser, platform=platform)
    values = {**given_values(derived.tokens, parser), **changed}
    try:
        layout = check_layout(shape, values, world_size)
        check_stages(shape, layout.pp_size, values)
        if role.learns:
            check_batches(config, layout, values)
        all_tokens = (*derived.tokens, *tokens, *own)
        with world_of_size(world_size):
            check_megatron_accepts(all_tokens, shape, extra_args=extra_args)
    except UsageError as error:
        raise UsageError(f"of the {role.name}: {error}") from error
    return CheckedValueModel(shape, checkpoint, has_head, layout, all_tokens, extra_args)


def check_value_model_of_fork(
    role: ValueRole,
    config: RLConfig,
    actor: tuple[ModelShape, HFCheckpoint],
    layout: TrainLayout,
    *,
    refused: Sequence[str],
) -> CheckedValueModel:
    """That of a fork that has parsed the arguments itself: its layout is the actor's.

    `refused` are the fields of RLConfig that need a command line.
    """
    for name in refused:
        if getattr(config, name) is not None:
            raise UsageError(
                f"{flag_of(name)} {getattr(config, name)} needs the command line, and arguments "
                "were parsed outside of mcore_rl; drop it, or start by mcore_rl.initialize"
            )
    shape, checkpoint, has_head = value_checkpoint(role, config, *actor)
    if (
        dataclasses.replace(shape, value_head=False, tied_embeddings=actor[0].tied_embeddings)
        != (actor[0])
    ):
        raise UsageError(
            f"{flag_of(role.init)} {getattr(config, role.init)} is of another architecture than "
            f"{config.hf_checkpoint}, and arguments were parsed outside of mcore_rl; give one of "
            "the same, or start by mcore_rl.initialize"
        )
    return CheckedValueModel(shape, checkpoint, has_head, layout, tokens=None)


def build_value_model(
    checked: CheckedValueModel,
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
    for name, value in settings_without_flag(checked.shape).items():
        setattr(args, name, value)
    with megatron_adapter.megatron_output_to(log):
        world = MegatronWorld(args)
        with world:
            base = provider or make_actor_provider(args, checked.shape)
            state = setup(make_critic_provider(base))
            shards = ModelShards(
                state.chunks,
                checked.shape,
                world.layout,
                dist.get_rank(),
                dict(checked.checkpoint.tensors),
            )
    return world, state, shards


def value_checkpoint(
    role: ValueRole, config: RLConfig, actor_shape: ModelShape, actor_checkpoint: HFCheckpoint
) -> tuple[ModelShape, HFCheckpoint, bool]:
    """Shape and tensors of the role's folder, or of the actor's; whether it has a value head."""
    shape, checkpoint = actor_shape, actor_checkpoint
    flag, folder = flag_of(role.init), getattr(config, role.init)
    if folder is not None:
        shape = read_model_shape(Path(folder), flag=flag)
        checkpoint = open_checkpoint(Path(folder), shape, flag=flag)
        if shape.vocab_size != actor_shape.vocab_size:
            raise UsageError(
                f"{flag} {folder} has a vocabulary of {shape.vocab_size}, the actor's "
                f"is {actor_shape.vocab_size}; give a checkpoint with the actor's tokenizer"
            )
    head = checkpoint.tensors.get(HEAD)
    if head is not None and head.shape != (1, shape.hidden_size):
        raise UsageError(
            f"{flag} {checkpoint.folder} has {HEAD} of shape {list(head.shape)}, and a "
            f"{role.name}'s is [1, {shape.hidden_size}]; give a reward model of one label"
        )
    tensors = {t: info for t, info in checkpoint.tensors.items() if t != "lm_head.weight"}
    tensors.setdefault(HEAD, TensorInfo((1, shape.hidden_size), "float32", 4))
    shape = dataclasses.replace(shape, value_head=True, tied_embeddings=False)
    return shape, dataclasses.replace(checkpoint, tensors=tensors), head is not None
