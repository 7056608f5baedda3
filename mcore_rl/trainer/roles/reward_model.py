"""A reward model on Megatron: a checkpoint with a score head, in a layout of its own.

It reads the tokens of prompts and responses, so it must have the policy's vocabulary. A sample's
score is its last token's, as in `transformers`' models for sequence classification with one label.
`RewardModel` is the model on a rank, and a role (`mcore_rl.trainer.roles.remote`); `ModelReward`
calls that role, as reward `model` among the others.
"""

from __future__ import annotations

import argparse
import logging
import math
from typing import TextIO, TypedDict

import numpy as np
import torch
import torch.distributed as dist

from mcore_rl.batching.assignment import Cuts, samples_of
from mcore_rl.batching.rows import MicroBatching
from mcore_rl.batching.sample_exchange import RowExchange, Shares
from mcore_rl.batching.table import SampleTable, rows_to_tokens
from mcore_rl.batching.train_batches import build_train_batch
from mcore_rl.common.agreement import agreed_in_world
from mcore_rl.config import RLConfig
from mcore_rl.megatron import adapter as megatron_adapter
from mcore_rl.megatron.hf_checkpoint import load_into_megatron
from mcore_rl.megatron.runner import ModelRunner
from mcore_rl.megatron.value_head import build_value_model
from mcore_rl.megatron.world import MegatronWorld, parsed_args
from mcore_rl.rewards.functions import REWARD_MODEL
from mcore_rl.rewards.parts import FailureLog
from mcore_rl.rewards.worker import Outcome
from mcore_rl.rollout.sample_store import SampleStore
from mcore_rl.spec import ValueModelSpec
from mcore_rl.trainer.roles.remote import Role
from mcore_rl.trainer.roles.samples import plan_epochs, table_to_tensors, tensors_to_table

logger = logging.getLogger(__name__)


class Divided(TypedDict):
    """Which rank gets which samples."""

    wanted: Shares


class Scores(TypedDict):
    """The value of each sample's last token."""

    scores: torch.Tensor  # [n] float64


class RewardModel:
    """The model on this rank's pipeline stage and TP shard, in its own layout."""

    def __init__(
        self, world: MegatronWorld, state: megatron_adapter.TrainState, batching: MicroBatching
    ) -> None:
        self.world, self._batching = world, batching
        # The samples to score; the last one is repeated if the number of rows must be divisible.
        self._num_samples = 0
        self._table = SampleTable.of_lengths(np.empty(0, np.int64), np.empty(0, np.int64))
        self._rows = np.empty(0, dtype=np.int64)  # the sample of each row of the table
        self._plan: list[Cuts] = []
        self._wanted = Shares((), ())
        with world:
            self.runner = ModelRunner(world.args, state, world.layout, batching)

    def divide(self, /, **numbers: torch.Tensor) -> Divided:
        """Return which rank gets which samples, at least one. `numbers` come from
        `table_to_tensors`. Like `scores` a call of the role, collective over the layout's ranks."""
        table = tensors_to_table(numbers)
        self._num_samples, rows = len(table), np.arange(len(table))
        if not self._batching.packed:  # rows must be divisible; scores of the repeats are unused
            each = self.world.layout.dp_size * self._batching.micro_batch_size
            missing = -len(table) % (each * self._batching.count_multiple_of)
            rows = np.concatenate([rows, np.full(missing, len(table) - 1)])
        self._table, self._rows = table.take(rows), rows
        (self._plan,) = plan_epochs(
            self._table,
            num_mini_batches=1,
            dp_size=self.world.layout.dp_size,
            batching=self._batching,
        )
        wanted = tuple(np.unique(rows[samples_of(cuts)]) for cuts in self._plan)
        self._wanted = Shares(wanted, self.world.layout.dp_ranks())
        return {"wanted": self._wanted}

    def scores(self, *, tokens: RowExchange) -> Scores:
        """Score all samples. `tokens` brings `[t, 5]`, the rows of `tokens_to_rows` for the samples
        that this rank gets."""
        rank = dist.get_rank()
        mine = self._wanted.of(rank)
        found = rows_to_tokens(tokens.rows, self._table.lengths[mine])
        of_sample = dict(zip(mine.tolist(), found, strict=True))
        cuts = self._plan[self.world.layout.dp_rank(rank)]
        tokens_of = {row: of_sample[self._rows[row]] for row in samples_of(cuts).tolist()}
        batch = build_train_batch(self._table, tokens_of, cuts)
        with self.world:
            values = self.runner.evaluate(batch, num_outputs=1)[:, 0]
        scores = torch.zeros(len(self._table), dtype=torch.float64)
        scores[batch.sample_ids] = values[batch.lengths.cumsum(0) - 1].double()
        return {"scores": self.runner.global_sum(scores)[: self._num_samples]}


def build_reward_model(
    spec: ValueModelSpec,
    config: RLConfig,
    actor_args: argparse.Namespace,
    *,
    log: TextIO | None = None,
) -> RewardModel:
    """Build the model through Megatron, without an optimizer, and fill it. Collective."""
    assert spec.tokens is not None, "a reward model has a command line of its own"
    args = parsed_args(spec.tokens, spec.extra_args, actor_args, log=log)
    world, state, shards = build_value_model(
        spec.shape,
        spec.checkpoint,
        args,
        megatron_adapter.setup_without_optimizer,
        requested_class=config.trainer.model_class,
        log=log,
    )
    with world:
        num_bytes = agreed_in_world(lambda: load_into_megatron(spec.checkpoint, shards))
    logger.info("read %.1f MB of %s", num_bytes / 1e6, spec.checkpoint.folder)
    batching = config.micro_batching(spec.shape, world.layout, vars(world.args))
    return RewardModel(world, state, batching)


class ModelReward:
    """The reward `model` among the others. All methods are collective over the actor's ranks."""

    def __init__(self, role: Role) -> None:
        self._role = role
        self._log = FailureLog(REWARD_MODEL)

    def scores(self, sample_store: SampleStore, table: SampleTable) -> np.ndarray:
        """Return `[n]` float64, on every rank, for samples in `sample_store`."""
        if not len(table):
            return np.empty(0)
        wanted = self._role.call(RewardModel.divide, **table_to_tensors(table))["wanted"]
        tokens = sample_store.row_exchange(table, wanted)
        scores: np.ndarray = self._role.call(RewardModel.scores, tokens=tokens)["scores"].numpy()
        return scores

    def outcomes(self, sample_store: SampleStore, table: SampleTable) -> list[Outcome]:
        """Return the outcomes in order; a sample whose score is not finite has no reward."""
        found = [
            Outcome(score)
            if math.isfinite(score)
            else Outcome(0.0, "no number", f"the reward model's score is {score}")
            for score in self.scores(sample_store, table).tolist()
        ]
        if dist.get_rank() == 0:  # all ranks have found the same
            self._log.note(found)
        return found
