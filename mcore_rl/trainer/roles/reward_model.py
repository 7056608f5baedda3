"""A reward model on Megatron: a checkpoint with a score head, in a layout of its own.

It reads the tokens that the policy read and wrote, so it must have the policy's vocabulary. The
score of a sample is that of its last token, as in `transformers`' models for sequence
classification with one label. `RewardModel` is the model on a rank, and a role
(`mcore_rl.trainer.roles.remote`); `ModelReward` asks that role, as reward `model` among the others.
"""

from __future__ import annotations

import argparse
import logging
import math
from typing import TextIO

import numpy as np
import torch
import torch.distributed as dist

from mcore_rl.batching.rows import MicroBatching
from mcore_rl.batching.table import SampleTable
from mcore_rl.common.agreement import agreed_in_world
from mcore_rl.flags.options import RLConfig
from mcore_rl.job.batches import micro_batching_of_args
from mcore_rl.job.spec import ValueModelSpec
from mcore_rl.megatron import adapter as megatron_adapter
from mcore_rl.megatron.hf_checkpoint import load_into_megatron
from mcore_rl.megatron.runner import ModelRunner
from mcore_rl.megatron.value_head import build_value_model
from mcore_rl.megatron.world import MegatronWorld, parsed_args
from mcore_rl.rewards.functions import REWARD_MODEL
from mcore_rl.rewards.parts import FailureLog
from mcore_rl.rewards.worker import Outcome
from mcore_rl.rollout.keeper import SampleKeeper
from mcore_rl.trainer.roles.remote import Role, Values
from mcore_rl.trainer.roles.samples import batch_of_rank, tensors_to_samples, told_of

logger = logging.getLogger(__name__)


class RewardModel:
    """The model on this rank's pipeline stage and TP shard, as its own layout has it."""

    def __init__(
        self, world: MegatronWorld, state: megatron_adapter.TrainState, batching: MicroBatching
    ) -> None:
        self.world, self._batching = world, batching
        with world:
            self.runner = ModelRunner(world.args, state, world.layout, batching)

    def scores(self, **tokens: torch.Tensor) -> Values:
        """`[n]` float64: what each sample's last token says. A call of the role, collective over
        the layout's ranks; `tokens` are those of `samples_to_tensors`."""
        table, tokens_of = tensors_to_samples(tokens)
        num_samples = len(table)
        if not num_samples:
            return {"scores": torch.empty(0, dtype=torch.float64)}
        if not self._batching.packed:  # rows must divide; what is said of the last ones is not used
            each = self.world.layout.dp_size * self._batching.micro_batch_size
            missing = -num_samples % (each * self._batching.count_multiple_of)
            rows = [*range(num_samples), *[num_samples - 1] * missing]
            table = table.take(rows)
            tokens_of = {number: tokens_of[row] for number, row in enumerate(rows)}
        batch = batch_of_rank(
            table,
            tokens_of,
            num_mini_batches=1,
            layout=self.world.layout,
            batching=self._batching,
            rank=dist.get_rank(),
        )
        with self.world:
            values = self.runner.evaluate(batch, num_outputs=1)[:, 0]
        found = torch.zeros(len(table), dtype=torch.float64)
        found[batch.sample_ids] = values[batch.lengths.cumsum(0) - 1].double()
        return {"scores": self.runner.global_sum(found)[:num_samples]}


def build_reward_model(
    spec: ValueModelSpec,
    config: RLConfig,
    actor_args: argparse.Namespace,
    *,
    log: TextIO | None = None,
) -> RewardModel:
    """Build the model through Megatron, without an optimizer, and fill it. Collective."""
    assert spec.tokens is not None, "its layout is of a command line"
    args = parsed_args(spec.tokens, spec.extra_args, actor_args, log=log)
    world, state, shards = build_value_model(
        spec.shape, spec.checkpoint, args, megatron_adapter.setup_without_optimizer, log=log
    )
    with world:
        num_bytes = agreed_in_world(lambda: load_into_megatron(spec.checkpoint, shards))
    logger.info("read %.1f MB of %s", num_bytes / 1e6, spec.checkpoint.folder)
    batching = micro_batching_of_args(config, spec.shape, world.layout, world.args)
    return RewardModel(world, state, batching)


class ModelReward:
    """Reward `model` among the others: what it made of each sample. All methods are collective over
    the actor's ranks."""

    def __init__(self, role: Role) -> None:
        self._role = role
        self._log = FailureLog(REWARD_MODEL)

    def scores(self, keeper: SampleKeeper, table: SampleTable) -> np.ndarray:
        """`[n]` float64, on every rank, of samples that `keeper` has."""
        told = told_of(keeper, table, self._role)
        return self._role.call("scores", **told)["scores"].numpy()

    def outcomes(self, keeper: SampleKeeper, table: SampleTable) -> list[Outcome]:
        """In their order; a score that is no number costs that sample its reward."""
        found = [
            Outcome(score)
            if math.isfinite(score)
            else Outcome(0.0, "no number", f"the reward model's score is {score}")
            for score in self.scores(keeper, table).tolist()
        ]
        if dist.get_rank() == 0:  # all ranks have found the same
            self._log.note(found)
        return found
