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

from mcore_rl.batching.sample_exchange import RowExchange
from mcore_rl.batching.table import SampleTable
from mcore_rl.config import RLConfig
from mcore_rl.rewards.functions import REWARD_MODEL
from mcore_rl.rewards.parts import FailureLog
from mcore_rl.rewards.worker import Outcome
from mcore_rl.rollout.sample_store import SampleStore
from mcore_rl.spec import ValueModelSpec
from mcore_rl.trainer.roles.forward import ForwardModel, build_forward_parts
from mcore_rl.trainer.roles.remote import Role
from mcore_rl.trainer.roles.samples import table_to_tensors

logger = logging.getLogger(__name__)


class Scores(TypedDict):
    """The value of each sample's last token."""

    scores: torch.Tensor  # [n] float64


class RewardModel(ForwardModel):
    """The model on this rank's pipeline stage and TP shard, in its own layout."""

    def scores(self, *, tokens: RowExchange) -> Scores:
        """Score all samples. `tokens` brings `[t, 5]`, the rows of `tokens_to_rows` for the samples
        that this rank gets. A call of the role, collective over the layout's ranks."""
        batch = self.received(tokens)
        with self.world:
            values = self.runner.evaluate(batch, num_outputs=1)
        scores = torch.zeros(len(self._table), dtype=torch.float64)
        scores[batch.sample_ids] = values[batch.lengths.cumsum(0) - 1, 0].double()
        return {"scores": self.runner.global_sum(scores)[: self._num_samples]}


def build_reward_model(
    spec: ValueModelSpec,
    config: RLConfig,
    actor_args: argparse.Namespace,
    *,
    log: TextIO | None = None,
) -> RewardModel:
    """Build the model through Megatron, without an optimizer, and fill it. Collective."""
    return RewardModel(*build_forward_parts(spec, config, actor_args, log=log))


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
        outcomes = [
            Outcome(score)
            if math.isfinite(score)
            else Outcome(0.0, "not finite", f"the reward model's score is {score}")
            for score in self.scores(sample_store, table).tolist()
        ]
        if dist.get_rank() == 0:  # all ranks have found the same
            self._log.note(outcomes)
        return outcomes
