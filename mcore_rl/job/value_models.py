"""The checks of models besides the actor: a critic, a reward model, in part a teacher.

Megatron gets a command line of its own for such a model: the user's flags, followed by those that
the role changes. The checks of the actor apply to it as well, by the same functions. In a fork,
which has parsed its arguments, it has the actor's layout.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mcore_rl.common.errors import UsageError
from mcore_rl.common.platform import Platform
from mcore_rl.config import RLConfig
from mcore_rl.flags.derived import derive_flags, values_of, with_effect
from mcore_rl.flags.parsed_flags import given_values
from mcore_rl.job.layout import check_layout, check_stages
from mcore_rl.job.reading import ReadShape
from mcore_rl.megatron.hf_checkpoint import HFCheckpoint, check_tensors, open_checkpoint
from mcore_rl.model.config_json import ModelShape
from mcore_rl.model.roles import CRITIC, DEGREE_FLAGS, REWARD, Roles
from mcore_rl.model.tensors import VALUE_HEAD, TensorInfo
from mcore_rl.rewards.functions import REWARD_MODEL
from mcore_rl.spec import LaidOut


@dataclass(frozen=True, slots=True)
class ValueOptions:
    """The flags of a critic, a reward model or a teacher."""

    role: str  # of Roles
    name: str  # in messages
    init_flag: str
    init: str | None  # its folder; None: the actor's
    megatron_tokens: tuple[str, ...]  # Megatron's flags with values of its own
    learns: bool

    @property
    def shown(self) -> str:
        """The flag of its folder, as typed."""
        return f"{self.init_flag} {self.init}"


def critic_options(config: RLConfig) -> ValueOptions | None:
    """Return the flags of the critic; None if the algorithm has none."""
    if not config.recipe.needs_critic:
        return None
    options = config.critic
    sizes = (options.tp_size, options.pp_size, options.ep_size)
    degrees = dict(zip(DEGREE_FLAGS.values(), sizes, strict=True))
    tokens = _tokens_of({**degrees, "--lr": options.lr, "--clip-grad": options.clip_grad})
    return ValueOptions(CRITIC, "critic", "--rl-critic-init", options.init, tokens, learns=True)


def reward_options(config: RLConfig) -> ValueOptions | None:
    """Return the flags of the reward model; None if the job has none."""
    options = config.rewards
    if options.reward_model is None:
        return None
    sizes = (options.reward_tp_size, options.reward_pp_size, options.reward_ep_size)
    tokens = tokens_of_degrees(sizes)
    flag = "--rl-reward-model"
    return ValueOptions(REWARD, "reward model", flag, options.reward_model, tokens, learns=False)


def tokens_of_degrees(sizes: Sequence[int | None]) -> tuple[str, ...]:
    """Return Megatron's flags of a model's own parallel sizes, in the order of DEGREE_FLAGS."""
    return _tokens_of(dict(zip(DEGREE_FLAGS.values(), sizes, strict=True)))


def _tokens_of(values: Mapping[str, float | None]) -> tuple[str, ...]:
    given = {flag: value for flag, value in values.items() if value is not None}
    return tuple(token for flag, value in given.items() for token in (flag, str(value)))


@dataclass(frozen=True, slots=True)
class Folder:
    """The initial weights of the model."""

    shape: ModelShape
    checkpoint: HFCheckpoint  # see ValueModelSpec
    has_head: bool


def check_reward_model_flags(config: RLConfig) -> None:
    """Check that `--rl-reward` and the flags of the model are given together."""
    names = config.reward_names
    if REWARD_MODEL in names and config.rewards.reward_model is None:
        raise UsageError(
            f"names {REWARD_MODEL}, but --rl-reward-model is missing",
            flag=f"--rl-reward {','.join(names)}",
            remedy="give the folder of a checkpoint with a score head",
        )
    flags = {
        "--rl-reward-model": config.rewards.reward_model,
        "--rl-reward-tp-size": config.rewards.reward_tp_size,
        "--rl-reward-pp-size": config.rewards.reward_pp_size,
        "--rl-reward-ep-size": config.rewards.reward_ep_size,
        "--rl-reward-ranks": config.rewards.reward_ranks,
    }
    for flag, value in flags.items():
        if value is not None and REWARD_MODEL not in names:
            raise UsageError(
                f"has no effect, because --rl-reward {','.join(names)} does not name "
                f"{REWARD_MODEL}",
                flag=f"{flag} {value}",
                remedy=f"add {REWARD_MODEL} to it or drop the flag",
            )


def read_value_shape(options: ValueOptions, shape: ModelShape, read_shape: ReadShape) -> ModelShape:
    """Return the shape, with a value head, of its own folder or the actor's.

    `shape` is the actor's, whose vocabulary it must have.
    """
    own = shape if options.init is None else read_shape(options.init, options.init_flag)
    if own.vocab_size != shape.vocab_size:
        raise UsageError(
            f"has a vocabulary of {own.vocab_size}, the actor's is {shape.vocab_size}",
            flag=options.shown,
            remedy="give a checkpoint with the actor's tokenizer",
        )
    return dataclasses.replace(own, value_head=True, tied_embeddings=False)


def read_folder(
    options: ValueOptions,
    own_shape: ModelShape,
    actor: HFCheckpoint | None,
    read_shape: ReadShape,
) -> Folder:
    """Read the tensors of its folder, or of the actor's. A reward model must have a head."""
    if options.init is None:
        assert actor is not None, "the actor's folder was read"
        checkpoint = actor
    else:
        shape = read_shape(options.init, options.init_flag)  # with a language model's head
        checkpoint = open_checkpoint(Path(options.init), shape, flag=options.init_flag)
    head = checkpoint.tensors.get(VALUE_HEAD)
    if head is None and not options.learns:
        raise UsageError(
            f"has no {VALUE_HEAD}, so it gives no score",
            flag=options.shown,
            remedy="give a checkpoint for sequence classification with one label",
        )
    if head is not None and head.shape != (1, own_shape.hidden_size):
        raise UsageError(
            f"has {VALUE_HEAD} of shape {list(head.shape)}, and a {options.name}'s is "
            f"[1, {own_shape.hidden_size}]",
            flag=f"{options.init_flag} {checkpoint.folder}",
            remedy="give a reward model of one label",
        )
    tensors = {t: info for t, info in checkpoint.tensors.items() if t != "lm_head.weight"}
    tensors.setdefault(VALUE_HEAD, TensorInfo((1, own_shape.hidden_size), "float32", 4))
    without_lm_head = dataclasses.replace(checkpoint, tensors=tensors)
    check_tensors(without_lm_head, own_shape, flag=options.init_flag)
    return Folder(own_shape, without_lm_head, head is not None)


def check_positions(options: ValueOptions, config: RLConfig, own_shape: ModelShape) -> None:
    """Check that a complete sample fits a model that only scores; a critic has the actor's
    positions."""
    longest = config.data.max_prompt_tokens + config.rollout.max_response_tokens
    if not options.learns and longest > own_shape.max_positions:
        raise UsageError(
            f"has {own_shape.max_positions} positions, and samples may have {longest} tokens",
            flag=options.shown,
            remedy=f"lower --rl-max-prompt-tokens {config.data.max_prompt_tokens} or "
            f"--rl-max-response-tokens {config.rollout.max_response_tokens}",
        )


def lay_out(
    options: ValueOptions,
    config: RLConfig,
    own_shape: ModelShape,
    given: Mapping[str, Any],
    tokens: Sequence[str],
    *,
    parser: argparse.ArgumentParser,
    roles: Roles,
    platform: Platform,
) -> LaidOut:
    """Lay the model out by the user's flags, `given` and `tokens`, and then the role's own."""
    own = options.megatron_tokens
    changed = {**given, **given_values(own, parser)}
    derived = derive_flags(own_shape, config, changed, parser=parser, platform=platform)
    values = values_of(derived, changed, parser)
    layout = check_layout(own_shape, values, len(roles.ranks(options.role)))
    layers = check_stages(own_shape, layout.pp_size, values)
    users = with_effect(derived, [*tokens, *own], parser)
    return LaidOut(own_shape, layout, layers, values, (*derived.tokens, *users))


def lay_out_in_fork(options: ValueOptions, own_shape: ModelShape, actor: LaidOut) -> LaidOut:
    """Lay the model out as the actor, of the same architecture: a fork has one set of arguments."""
    as_actor = dataclasses.replace(
        own_shape, value_head=False, tied_embeddings=actor.shape.tied_embeddings
    )
    if as_actor != actor.shape:
        raise UsageError(
            "is of another architecture than --rl-hf-checkpoint, and arguments were parsed "
            "outside of mcore_rl",
            flag=options.shown,
            remedy="give one of the same, or start by mcore_rl.initialize",
        )
    return dataclasses.replace(actor, shape=own_shape)
