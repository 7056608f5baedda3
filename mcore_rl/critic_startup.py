"""The critic's command line, checkpoint and model: the actor's, with what `--rl-critic-*` changes.

Megatron sees a second command line: the user's flags, and behind them those that the critic has of
its own. Everything that is checked of the actor is checked of the critic.
"""

from __future__ import annotations

import argparse
import dataclasses
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import torch.distributed as dist

from mcore_rl import megatron_adapter
from mcore_rl.arguments import RLConfig, flag_of, given_values
from mcore_rl.checkpoint import HFCheckpoint, load_into_megatron, open_checkpoint
from mcore_rl.derived_flags import derive_flags
from mcore_rl.errors import UsageError
from mcore_rl.hf_config import ModelShape, read_model_shape, settings_without_flag
from mcore_rl.hybrid_engine.layout import TrainLayout
from mcore_rl.hybrid_engine.model_shards import ModelShards
from mcore_rl.hybrid_engine.plan import TensorInfo
from mcore_rl.layout_checks import check_batches, check_layout, check_stages
from mcore_rl.megatron_checks import check_megatron_accepts
from mcore_rl.megatron_world import MegatronWorld, changed_args, parsed_args
from mcore_rl.policy_model import make_actor_provider
from mcore_rl.value_model import make_critic_provider

logger = logging.getLogger(__name__)

HEAD = "score.weight"
# Field of RLConfig -> the flag of Megatron that it sets for the critic.
_MEGATRON_FLAGS = {
    "critic_tp_size": "--tensor-model-parallel-size",
    "critic_pp_size": "--pipeline-model-parallel-size",
    "critic_ep_size": "--expert-model-parallel-size",
    "critic_lr": "--lr",
    "critic_clip_grad": "--clip-grad",
}
_LAYOUT = ("critic_tp_size", "critic_pp_size", "critic_ep_size")


@dataclass(frozen=True, slots=True)
class CheckedCritic:
    """What the critic is made of, before Megatron starts."""

    shape: ModelShape  # with a value head
    checkpoint: HFCheckpoint  # without the head of a language model; with a value head, see below
    has_head: bool  # whether the folder has one; else it starts at zero
    layout: TrainLayout
    tokens: tuple[str, ...] | None  # for Megatron's parser; None: the actor's arguments, changed


def check_critic(
    config: RLConfig,
    actor: tuple[ModelShape, HFCheckpoint],
    given: Mapping[str, Any],
    tokens: Sequence[str],
    *,
    parser: argparse.ArgumentParser,
    world_size: int,
    has_cuda: bool,
) -> CheckedCritic | None:
    """The critic of a command line, or None if the algorithm has none.

    `given` and `tokens` are what the user set. UsageError as for the actor.
    """
    if not config.recipe.needs_critic:
        return None
    shape, checkpoint, has_head = _critic_checkpoint(config, *actor)
    own = [
        token
        for name, flag in _MEGATRON_FLAGS.items()
        if (value := getattr(config, name)) is not None
        for token in (flag, str(value))
    ]
    changed = {**given, **given_values(own, parser)}
    derived = derive_flags(shape, config, changed, parser=parser, has_cuda=has_cuda)
    values = {**given_values(derived.tokens, parser), **changed}
    try:
        layout = check_layout(shape, values, world_size)
        check_stages(shape, layout.pp_size, values)
        check_batches(config, layout, values)
        all_tokens = (*derived.tokens, *tokens, *own)
        check_megatron_accepts(all_tokens, shape)
    except UsageError as error:
        raise UsageError(f"of the critic: {error}") from error
    return CheckedCritic(shape, checkpoint, has_head, layout, all_tokens)


def check_critic_of_fork(
    config: RLConfig, actor: tuple[ModelShape, HFCheckpoint], layout: TrainLayout
) -> CheckedCritic | None:
    """The critic of a fork that has parsed the arguments itself: its layout is the actor's."""
    if not config.recipe.needs_critic:
        return None
    for name in _LAYOUT:
        if getattr(config, name) is not None:
            raise UsageError(
                f"{flag_of(name)} {getattr(config, name)} needs the command line, and arguments "
                "were parsed outside of mcore_rl; drop it, or start by -m mcore_rl.train"
            )
    shape, checkpoint, has_head = _critic_checkpoint(config, *actor)
    if (
        dataclasses.replace(shape, value_head=False, tied_embeddings=actor[0].tied_embeddings)
        != (actor[0])
    ):
        raise UsageError(
            f"--rl-critic-init {config.critic_init} is of another architecture than "
            f"{config.hf_checkpoint}, and arguments were parsed outside of mcore_rl; give one of "
            "the same, or start by -m mcore_rl.train"
        )
    return CheckedCritic(shape, checkpoint, has_head, layout, tokens=None)


def _critic_checkpoint(
    config: RLConfig, actor_shape: ModelShape, actor_checkpoint: HFCheckpoint
) -> tuple[ModelShape, HFCheckpoint, bool]:
    shape, checkpoint = actor_shape, actor_checkpoint
    if config.critic_init is not None:
        folder = Path(config.critic_init)
        shape = read_model_shape(folder, flag="--rl-critic-init")
        checkpoint = open_checkpoint(folder, shape, flag="--rl-critic-init")
        if shape.vocab_size != actor_shape.vocab_size:
            raise UsageError(
                f"--rl-critic-init {folder} has a vocabulary of {shape.vocab_size}, the actor's "
                f"is {actor_shape.vocab_size}; give a checkpoint with the actor's tokenizer"
            )
    head = checkpoint.tensors.get(HEAD)
    if head is not None and head.shape != (1, shape.hidden_size):
        raise UsageError(
            f"--rl-critic-init {checkpoint.folder} has {HEAD} of shape {list(head.shape)}, and a "
            f"critic's is [1, {shape.hidden_size}]; give a reward model of one label"
        )
    tensors = {t: info for t, info in checkpoint.tensors.items() if t != "lm_head.weight"}
    tensors.setdefault(HEAD, TensorInfo((1, shape.hidden_size), "float32", 4))
    shape = dataclasses.replace(shape, value_head=True, tied_embeddings=False)
    return shape, dataclasses.replace(checkpoint, tensors=tensors), head is not None


@dataclass(frozen=True, slots=True)
class BuiltCritic:
    """The critic's model and optimizer, in the world that it lives in."""

    world: MegatronWorld
    state: megatron_adapter.TrainState
    shards: ModelShards


def build_critic(
    checked: CheckedCritic,
    config: RLConfig,
    actor_args: argparse.Namespace,
    provider: Callable[..., Any] | None = None,
    *,
    actor_iteration: int = 0,
    log: TextIO | None = None,
) -> BuiltCritic:
    """Build the critic through Megatron and fill it. Collective.

    A Megatron checkpoint below `--load`, in its folder `critic`, wins over the Hugging Face one.
    RuntimeError: it is of another step than `actor_iteration`, that of the actor's.
    """
    if checked.tokens is None:
        own = {"lr": config.critic_lr, "clip_grad": config.critic_clip_grad}
        changes = {name: value for name, value in own.items() if value is not None}
        args = changed_args(actor_args, changes)
    else:
        args = parsed_args(checked.tokens, actor_args, log=log)
    for name, value in settings_without_flag(checked.shape).items():
        setattr(args, name, value)
    saved = critic_folder(Path(args.load)) if args.load else None
    args.load = str(saved) if saved is not None and saved.is_dir() else None
    args.iteration = 0
    with megatron_adapter.megatron_output_to(log):
        world = MegatronWorld(args)
    with world:
        make = make_critic_provider(provider or make_actor_provider(args, checked.shape))
        with megatron_adapter.megatron_output_to(log):
            state = megatron_adapter.setup(make)
        shards = ModelShards(
            state.chunks,
            checked.shape,
            world.layout,
            dist.get_rank(),
            dict(checked.checkpoint.tensors),
        )
        if args.load is not None and state.iteration != actor_iteration:
            raise RuntimeError(
                f"the critic in {args.load} is of step {state.iteration}, the actor of step "
                f"{actor_iteration}: the run ended between the two saves; load an earlier step of "
                "both with --ckpt-step"
            )
        if state.iteration == 0:
            if actor_iteration:
                logger.warning(
                    "no critic lies beside the actor's checkpoint: it starts from %s",
                    checked.checkpoint.folder,
                )
            absent = frozenset() if checked.has_head else frozenset({HEAD})
            load_into_megatron(checked.checkpoint, shards, absent=absent)
            megatron_adapter.reload_main_params(state)
    return BuiltCritic(world, state, shards)


def save_critic(critic: BuiltCritic, num_steps: int, checkpoints: Path) -> None:
    """Write a Megatron checkpoint of the critic beside the actor's. Collective."""
    with critic.world as world:
        folder = critic_folder(checkpoints)
        megatron_adapter.save_checkpoint(world.args, critic.state, num_steps, folder)


def critic_folder(checkpoints: Path) -> Path:
    """Where the critic's Megatron checkpoints are, below those of the actor."""
    return checkpoints / "critic"
