"""A reward model on Megatron: a checkpoint with a score head, in a layout of its own.

It reads the tokens that the policy read and wrote, so it must have the policy's vocabulary. The
score of a sample is that of its last token, as in `transformers`' models for sequence
classification with one label.
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TextIO

import numpy as np
import torch
import torch.distributed as dist

from mcore_rl.batching.micro_batching import MicroBatching
from mcore_rl.batching.train_batches import num_tokens
from mcore_rl.common.agreement import agreed_in_world
from mcore_rl.common.errors import UsageError
from mcore_rl.common.platform import Platform
from mcore_rl.flags.options import DEGREE_FLAGS, ExtraArgs, RLConfig, flag_of
from mcore_rl.megatron import adapter as megatron_adapter
from mcore_rl.megatron.hf_checkpoint import HFCheckpoint, load_into_megatron
from mcore_rl.megatron.runner import ModelRunner
from mcore_rl.megatron.world import MegatronWorld, parsed_args
from mcore_rl.model.config_json import ModelShape
from mcore_rl.rewards.functions import REWARD_MODEL
from mcore_rl.roles.remote import Values
from mcore_rl.roles.samples import batch_of_rank, tensors_to_samples
from mcore_rl.roles.value_startup import (
    HEAD,
    CheckedValueModel,
    ValueRole,
    build_value_model,
    check_value_model,
)

logger = logging.getLogger(__name__)

_ROLE = ValueRole(
    name="reward model",
    init="reward_model",
    megatron_flags={f"reward_{degree}": flag for degree, flag in DEGREE_FLAGS.items()},
    learns=False,
)
_FLAGS = ("reward_model", *_ROLE.megatron_flags, "reward_ranks")


def check_reward_model(
    config: RLConfig,
    actor: tuple[ModelShape, HFCheckpoint],
    given: Mapping[str, Any],
    tokens: Sequence[str],
    *,
    parser: argparse.ArgumentParser,
    extra_args: ExtraArgs,
    world_size: int,
    platform: Platform,
) -> CheckedValueModel | None:
    """The reward model of a command line, or None if no reward is one; see `check_value_model`.

    `check_reward_model_flags` comes before.
    """
    if config.reward_model is None:
        return None
    checked = check_value_model(
        _ROLE,
        config,
        actor,
        given,
        tokens,
        parser=parser,
        extra_args=extra_args,
        world_size=world_size,
        platform=platform,
    )
    if not checked.has_head:
        raise UsageError(
            f"--rl-reward-model {config.reward_model} has no {HEAD}, so it gives no score; give a "
            "checkpoint for sequence classification with one label"
        )
    longest = config.max_prompt_tokens + config.max_response_tokens
    if longest > checked.shape.max_positions:
        raise UsageError(
            f"--rl-reward-model {config.reward_model} has {checked.shape.max_positions} positions, "
            f"and samples may have {longest} tokens; lower --rl-max-prompt-tokens "
            f"{config.max_prompt_tokens} or --rl-max-response-tokens {config.max_response_tokens}"
        )
    return checked


def check_reward_model_flags(config: RLConfig) -> None:
    """`--rl-reward` and the flags of the model belong together; UsageError if they do not."""
    names = [name.strip() for name in config.reward.split(",")]
    if REWARD_MODEL in names and config.reward_model is None:
        raise UsageError(
            f"--rl-reward {config.reward} names {REWARD_MODEL}, but --rl-reward-model is missing; "
            "give the folder of a checkpoint with a score head"
        )
    for name in _FLAGS:
        value = getattr(config, name)
        if value is not None and REWARD_MODEL not in names:
            raise UsageError(
                f"{flag_of(name)} {value} has no effect, because --rl-reward "
                f"{config.reward} does not name {REWARD_MODEL}; add {REWARD_MODEL} to it or drop "
                "the flag"
            )


class RewardModel:
    """The model on this rank's pipeline stage and TP shard, as its own layout has it: a role of
    `mcore_rl.roles.remote`."""

    def __init__(
        self, world: MegatronWorld, state: megatron_adapter.TrainState, batching: MicroBatching
    ) -> None:
        self.world, self._batching = world, batching
        with world:
            self.runner = ModelRunner(world.args, state, world.layout, batching, _no_keywords)

    def scores(self, **tokens: torch.Tensor) -> Values:
        """`[n]` float64: what each sample's last token says. A call of the role, collective over
        the layout's ranks; `tokens` are those of `samples_to_tensors`."""
        samples = tensors_to_samples(tokens)
        num_samples = len(samples)
        if not samples:
            return {"scores": torch.empty(0, dtype=torch.float64)}
        if not self._batching.packed:  # rows must divide; what is said of the last ones is not used
            each = self.world.layout.dp_size * self._batching.micro_batch_size
            samples += samples[-1:] * (-len(samples) % (each * self._batching.count_multiple_of))
        batch = batch_of_rank(
            samples,
            np.array([num_tokens(sample) for sample in samples], dtype=np.int64),
            num_mini_batches=1,
            layout=self.world.layout,
            batching=self._batching,
            rank=dist.get_rank(),
        )
        with self.world:
            values = self.runner.evaluate(batch, num_outputs=1)[:, 0]
        found = torch.zeros(len(samples), dtype=torch.float64)
        found[batch.sample_ids] = values[batch.lengths.cumsum(0) - 1].double()
        return {"scores": self.runner.global_sum(found)[:num_samples]}


def build_reward_model(
    checked: CheckedValueModel,
    actor_args: argparse.Namespace,
    make_batching: Callable[[MegatronWorld], MicroBatching],
    *,
    log: TextIO | None = None,
) -> RewardModel:
    """Build the model through Megatron, without an optimizer, and fill it. Collective."""
    assert checked.tokens is not None, "its layout is of a command line"
    args = parsed_args(checked.tokens, checked.extra_args, actor_args, log=log)
    world, state, shards = build_value_model(
        checked, args, megatron_adapter.setup_without_optimizer, log=log
    )
    with world:
        num_bytes = agreed_in_world(lambda: load_into_megatron(checked.checkpoint, shards))
    logger.info("read %.1f MB of %s", num_bytes / 1e6, checked.checkpoint.folder)
    return RewardModel(world, state, make_batching(world))


def _no_keywords(rows: object) -> dict[str, object]:
    return {}
