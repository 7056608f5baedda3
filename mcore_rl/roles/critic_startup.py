"""The critic's model and its checkpoints, beside the actor's."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TextIO

from mcore_rl.common.agreement import agreed_in_world
from mcore_rl.flags.derived import num_updates
from mcore_rl.flags.options import RLConfig
from mcore_rl.job.spec import ValueModelSpec
from mcore_rl.job.value_models import HEAD
from mcore_rl.megatron import adapter as megatron_adapter
from mcore_rl.megatron import saving as megatron_checkpoint
from mcore_rl.megatron.hf_checkpoint import load_into_megatron
from mcore_rl.megatron.shards import ModelShards
from mcore_rl.megatron.world import MegatronWorld, changed_args, parsed_args
from mcore_rl.resume.folders import critic_folder, iteration_name
from mcore_rl.resume.saver import write_checkpoint
from mcore_rl.resume.trainer_state import (
    TRAINER,
    TrainerState,
    load_trainer_state,
    trainer_writer,
)
from mcore_rl.roles.value_startup import build_value_model

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class BuiltCritic:
    """The critic's model and optimizer, in the world that it lives in."""

    world: MegatronWorld
    state: megatron_adapter.TrainState
    shards: ModelShards


class _Saved(Protocol):
    """What a checkpoint of the critic is made of."""

    world: MegatronWorld
    state: megatron_adapter.TrainState


def build_critic(
    spec: ValueModelSpec,
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
    if spec.tokens is None:
        own = {"lr": config.critic_lr, "clip_grad": config.critic_clip_grad}
        changes = {name: value for name, value in own.items() if value is not None}
        changes.update(_longer_schedule(config, actor_args))
        args = changed_args(actor_args, changes)
    else:
        args = parsed_args(spec.tokens, spec.extra_args, actor_args, log=log)
    _load_from_beside(args, actor_iteration)
    args.iteration = 0
    world, state, shards = build_value_model(spec, args, megatron_adapter.setup, provider, log=log)
    with world:
        if state.iteration == 0:
            if actor_args.finetune and critic_folder(Path(actor_args.load or "")).is_dir():
                logger.warning(
                    "--finetune takes the actor's weights alone: the critic starts from %s",
                    spec.checkpoint.folder,
                )
            elif actor_iteration:
                logger.warning(
                    "no critic lies beside the actor's checkpoint: it starts from %s",
                    spec.checkpoint.folder,
                )
            absent = frozenset() if spec.has_head else frozenset({HEAD})
            agreed_in_world(lambda: load_into_megatron(spec.checkpoint, shards, absent=absent))
            megatron_adapter.reload_main_params(state)
    return BuiltCritic(world, state, shards)


def _longer_schedule(config: RLConfig, actor_args: argparse.Namespace) -> dict[str, int]:
    """The critic of a fork learns in the actor's steps and in those that warm it up."""
    more = num_updates(config, of_critic=True) - num_updates(config, of_critic=False)
    lengths = {name: getattr(actor_args, name) for name in ("train_iters", "lr_decay_iters")}
    # Megatron has set the second to the first for the actor unless the user said otherwise.
    return {
        name: length + more for name, length in lengths.items() if length == lengths["train_iters"]
    }


def _load_from_beside(args: argparse.Namespace, actor_iteration: int) -> None:
    """Make `--load` and `--ckpt-step` those of the critic, or nothing."""
    saved = critic_folder(Path(args.load)) if args.load else None
    args.load, args.ckpt_step = None, None
    if saved is None or not saved.is_dir() or not actor_iteration:
        return
    if not (saved / iteration_name(actor_iteration)).is_dir():
        raise RuntimeError(
            f"the critic in {saved} is not of step {actor_iteration}, as the actor is; load a step "
            "of both with --ckpt-step"
        )
    args.load, args.ckpt_step = str(saved), actor_iteration


def save_critic(critic: _Saved, num_steps: int, checkpoints: Path) -> None:
    """Write a checkpoint of the critic, with its ranks' generators, beside the actor's. Collective
    over its ranks."""
    with critic.world as world:

        def write_model(saving: Path) -> None:
            megatron_checkpoint.save_checkpoint(world.args, critic.state, num_steps, saving)

        trainer = TrainerState(num_steps, world.layout.describe())
        write_checkpoint(
            critic_folder(checkpoints),
            num_steps,
            [write_model, trainer_writer(trainer)],
        )


def restore_random_states(critic: _Saved) -> None:
    """Those that a checkpoint of the critic has of this rank, if it has any. Collective."""
    args, layout = critic.world.args, critic.world.layout.describe()
    if args.load is None or args.no_load_rng:
        return
    trainer = Path(args.load) / iteration_name(args.ckpt_step) / TRAINER
    if trainer.is_dir():  # not where Megatron has written the checkpoint
        state, rng = load_trainer_state(trainer)
        if rng is not None and state.layout == layout:
            rng.restore()
