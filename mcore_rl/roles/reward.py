"""The reward model among the rewards: what those ask who score."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch.distributed as dist

from mcore_rl.batching.types import Rollout, ScoredRollout
from mcore_rl.rewards.functions import REWARD_MODEL
from mcore_rl.rewards.parts import FailureLog
from mcore_rl.rewards.worker import Outcome
from mcore_rl.roles.remote import Role
from mcore_rl.roles.samples import samples_to_tensors


class ModelReward:
    """Reward `model` among the others: what it made of each sample. All methods are collective over
    the actor's ranks."""

    def __init__(self, role: Role) -> None:
        self._role = role
        self._log = FailureLog(REWARD_MODEL)

    def scores(self, rollouts: Sequence[Rollout]) -> np.ndarray:
        """`[n]` float64, on every rank; all of them give the same rollouts."""
        samples = [ScoredRollout(rollout, reward=0.0) for rollout in rollouts]
        return self._role.call("scores", **samples_to_tensors(samples))["scores"].numpy()

    def outcomes(self, rollouts: Sequence[Rollout]) -> list[Outcome]:
        """In their order; a score that is no number costs that sample its reward."""
        found = [
            Outcome(score)
            if math.isfinite(score)
            else Outcome(0.0, "no number", f"the reward model's score is {score}")
            for score in self.scores(rollouts).tolist()
        ]
        if dist.get_rank() == 0:  # all ranks have found the same
            self._log.note(found)
        return found
