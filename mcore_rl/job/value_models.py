"""The checks of models with one number per token: a critic, a reward model.

Megatron gets a command line of its own for such a model: the user's flags, followed by those that
the role changes. The checks of the actor apply to it as well, by the same functions. In a fork,
which has parsed its arguments, it has the actor's layout.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mcore_rl.common.errors import UsageError
from mcore_rl.common.parameters import flag_of
from mcore_rl.common.platform import Platform
from mcore_rl.flags.derived import derive_flags, effective_of, for_megatron
from mcore_rl.flags.given import given_values
from mcore_rl.flags.options import RLConfig
from mcore_rl.flags.parser import ExtraArgs
from mcore_rl.flags.roles import CRITIC, DEGREE_FLAGS, REWARD, Roles
from mcore_rl.hybrid_engine.plan.moves import TensorInfo
from mcore_rl.job import preflight
from mcore_rl.job.layout import check_batches, check_layout, check_stages
from mcore_rl.job.reading import ReadShape
from mcore_rl.job.validation import check_megatron_accepts
from mcore_rl.megatron.hf_checkpoint import HFCheckpoint, check_tensors, open_checkpoint
from mcore_rl.model.config_json import ModelShape
from mcore_rl.model.layout import PipelineLayers, TrainLayout
from mcore_rl.rewards.functions import REWARD_MODEL

HEAD = "score.weight"


@dataclass(frozen=True, slots=True)
class ValueRole:
    """The names of such a model in flags and messages."""

    key: str  # of Roles
    name: str  # in messages
    init: str  # field of RLConfig: its folder
    megatron_flags: Mapping[str, str]  # field of RLConfig -> the flag of Megatron that it sets
    ranks: str  # field of RLConfig
    learns: bool

    def own_tokens(self, config: RLConfig) -> list[str]:
        """Return Megatron's flags for which the role has values of its own."""
        return [
            token
            for name, flag in self.megatron_flags.items()
            if (value := getattr(config, name)) is not None
            for token in (flag, str(value))
        ]


CRITIC_ROLE = ValueRole(
    key=CRITIC,
    name="critic",
    init="critic_init",
    megatron_flags={
        **{f"critic_{degree}": flag for degree, flag in DEGREE_FLAGS.items()},
        "critic_lr": "--lr",
        "critic_clip_grad": "--clip-grad",
    },
    ranks="critic_ranks",
    learns=True,
)
REWARD_ROLE = ValueRole(
    key=REWARD,
    name="reward model",
    init="reward_model",
    megatron_flags={f"reward_{degree}": flag for degree, flag in DEGREE_FLAGS.items()},
    ranks="reward_ranks",
    learns=False,
)


@dataclass(frozen=True, slots=True)
class Folder:
    """The initial weights of the model."""

    shape: ModelShape
    checkpoint: HFCheckpoint  # see ValueModelSpec
    has_head: bool


@dataclass(frozen=True, slots=True)
class LaidOut:
    """The model in its layout."""

    shape: ModelShape
    layout: TrainLayout
    layers: PipelineLayers
    values: Mapping[str, Any]  # Megatron's flags by destination, for this model
    tokens: tuple[str, ...] | None  # None: of a fork


def is_wanted(role: ValueRole, config: RLConfig) -> bool:
    """Return whether the job has such a model."""
    if role is CRITIC_ROLE:
        return config.recipe.needs_critic
    return config.reward_model is not None


def check_reward_model_flags(config: RLConfig) -> None:
    """Check that `--rl-reward` and the flags of the model are given together."""
    names = [name.strip() for name in config.rewards.split(",")]
    if REWARD_MODEL in names and config.reward_model is None:
        raise UsageError(
            f"names {REWARD_MODEL}, but --rl-reward-model is missing",
            flag=f"--rl-reward {config.rewards}",
            remedy="give the folder of a checkpoint with a score head",
        )
    for name in (REWARD_ROLE.init, *REWARD_ROLE.megatron_flags, REWARD_ROLE.ranks):
        value = getattr(config, name)
        if value is not None and REWARD_MODEL not in names:
            raise UsageError(
                f"has no effect, because --rl-reward {config.rewards} does not name {REWARD_MODEL}",
                flag=f"{flag_of(name)} {value}",
                remedy=f"add {REWARD_MODEL} to it or drop the flag",
            )


def read_value_shape(
    role: ValueRole, config: RLConfig, shape: ModelShape, read_shape: ReadShape
) -> ModelShape | None:
    """Read the shape, with a value head, from its own folder or the actor's; None if unwanted.

    `shape` is the actor's, whose vocabulary it must have.
    """
    if not is_wanted(role, config):
        return None
    own = shape if getattr(config, role.init) is None else read_shape(config, role.init)
    if own.vocab_size != shape.vocab_size:
        raise UsageError(
            f"has a vocabulary of {own.vocab_size}, the actor's is {shape.vocab_size}",
            flag=f"{flag_of(role.init)} {getattr(config, role.init)}",
            remedy="give a checkpoint with the actor's tokenizer",
        )
    return dataclasses.replace(own, value_head=True, tied_embeddings=False)


def read_critic_folder(
    config: RLConfig,
    own_shape: ModelShape | None,
    checkpoint: HFCheckpoint,
    read_shape: ReadShape,
) -> Folder | None:
    """Read the tensors of the critic's folder, or of the actor's `checkpoint`."""
    if own_shape is None:
        return None
    if config.critic_init is not None:
        checkpoint = _opened(CRITIC_ROLE, config, read_shape)
    return _folder(CRITIC_ROLE, own_shape, checkpoint)


def read_reward_folder(
    config: RLConfig, own_shape: ModelShape | None, read_shape: ReadShape
) -> Folder | None:
    """Read the tensors of the reward model's folder, which must have a head."""
    if own_shape is None:
        return None
    folder = _folder(REWARD_ROLE, own_shape, _opened(REWARD_ROLE, config, read_shape))
    if not folder.has_head:
        raise UsageError(
            f"has no {HEAD}, so it gives no score",
            flag=f"--rl-reward-model {config.reward_model}",
            remedy="give a checkpoint for sequence classification with one label",
        )
    return folder


def _opened(role: ValueRole, config: RLConfig, read_shape: ReadShape) -> HFCheckpoint:
    folder = Path(getattr(config, role.init))
    return open_checkpoint(folder, read_shape(config, role.init), flag=flag_of(role.init))


def _folder(role: ValueRole, own_shape: ModelShape, checkpoint: HFCheckpoint) -> Folder:
    head = checkpoint.tensors.get(HEAD)
    if head is not None and head.shape != (1, own_shape.hidden_size):
        raise UsageError(
            f"has {HEAD} of shape {list(head.shape)}, and a {role.name}'s is "
            f"[1, {own_shape.hidden_size}]",
            flag=f"{flag_of(role.init)} {checkpoint.folder}",
            remedy="give a reward model of one label",
        )
    tensors = {t: info for t, info in checkpoint.tensors.items() if t != "lm_head.weight"}
    tensors.setdefault(HEAD, TensorInfo((1, own_shape.hidden_size), "float32", 4))
    without_lm_head = dataclasses.replace(checkpoint, tensors=tensors)
    check_tensors(without_lm_head, own_shape, flag=flag_of(role.init))
    return Folder(own_shape, without_lm_head, head is not None)


def check_value_positions(role: ValueRole, config: RLConfig, own_shape: ModelShape | None) -> None:
    """Check that a complete sample fits a reward model; a critic's positions are the actor's."""
    longest = config.max_prompt_tokens + config.max_response_tokens
    if role is REWARD_ROLE and own_shape is not None and longest > own_shape.max_positions:
        raise UsageError(
            f"has {own_shape.max_positions} positions, and samples may have {longest} tokens",
            flag=f"{flag_of(role.init)} {config.reward_model}",
            remedy=f"lower --rl-max-prompt-tokens {config.max_prompt_tokens} or "
            f"--rl-max-response-tokens {config.max_response_tokens}",
        )


def lay_out(
    role: ValueRole,
    config: RLConfig,
    own_shape: ModelShape | None,
    given: Mapping[str, Any],
    tokens: Sequence[str],
    *,
    parser: argparse.ArgumentParser,
    roles: Roles,
    platform: Platform,
) -> LaidOut | None:
    """Lay the model out by the user's flags, `given` and `tokens`, and then the role's own."""
    if own_shape is None:
        return None
    own = role.own_tokens(config)
    changed = {**given, **given_values(own, parser)}
    with said_of(role):
        derived = derive_flags(own_shape, config, changed, parser=parser, platform=platform)
        values = {**given_values(derived.tokens, parser), **effective_of(changed, derived.unread)}
        layout = check_layout(own_shape, values, len(roles.ranks(role.key)))
        layers = check_stages(own_shape, layout.pp_size, values)
    return LaidOut(
        own_shape, layout, layers, values, for_megatron(derived, [*tokens, *own], parser)
    )


def lay_out_in_fork(
    role: ValueRole,
    config: RLConfig,
    own_shape: ModelShape | None,
    shape: ModelShape,
    layout: TrainLayout,
    layers: PipelineLayers,
    values: Mapping[str, Any],
) -> LaidOut | None:
    """Lay the model out as the actor, of the same architecture: a fork has one set of arguments."""
    if own_shape is None:
        return None
    as_actor = dataclasses.replace(
        own_shape, value_head=False, tied_embeddings=shape.tied_embeddings
    )
    if as_actor != shape:
        raise UsageError(
            f"is of another architecture than {config.hf_checkpoint}, and arguments were parsed "
            "outside of mcore_rl",
            flag=f"{flag_of(role.init)} {getattr(config, role.init)}",
            remedy="give one of the same, or start by mcore_rl.initialize",
        )
    return LaidOut(own_shape, layout, layers, values, None)


def check_value_batches(role: ValueRole, config: RLConfig, own_laid_out: LaidOut | None) -> None:
    """Check batches as for the actor, if the model is trained and has a layout of its own."""
    if own_laid_out is not None and role.learns:
        with said_of(role):
            check_batches(config, own_laid_out.layout, own_laid_out.values)


def check_value_balancing(role: ValueRole, config: RLConfig, own_laid_out: LaidOut | None) -> None:
    """Check the load balancing of its own experts as for the actor, if the model is trained."""
    if own_laid_out is None or not role.learns:
        return
    with said_of(role):
        preflight.check_balancing(config, own_laid_out.values)


def check_value_biases(
    role: ValueRole, own_folder: Folder | None, own_laid_out: LaidOut | None
) -> None:
    """Check, as for the actor, that biases that its updates change are float32 in its folder."""
    if own_folder is not None and own_laid_out is not None and role.learns:
        with said_of(role):
            preflight.check_biases(own_folder.checkpoint, own_laid_out.shape, own_laid_out.values)


def check_value_accepted(
    role: ValueRole, own_laid_out: LaidOut | None, extra_args: ExtraArgs
) -> None:
    """Run Megatron's own validation; a fork's arguments have passed it."""
    if own_laid_out is not None and own_laid_out.tokens is not None:
        with said_of(role):
            check_megatron_accepts(
                own_laid_out.tokens,
                own_laid_out.shape,
                world_size=own_laid_out.layout.world_size,
                extra_args=extra_args,
            )


@contextlib.contextmanager
def said_of(role: ValueRole) -> Iterator[None]:
    """Name the role's model in every UsageError raised inside."""
    try:
        yield
    except UsageError as error:
        raise error.of_role(f"the {role.name}") from error
