"""The reward model as those who score see it: on the actor's ranks in turn, or on its own."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist

from mcore_rl.batching.types import Rollout, ScoredRollout
from mcore_rl.common import objects
from mcore_rl.rewards.functions import REWARD_MODEL
from mcore_rl.rewards.parts import FailureLog
from mcore_rl.rewards.worker import Outcome
from mcore_rl.roles.bridge import Bridge, Message
from mcore_rl.roles.reward_model import RewardModel
from mcore_rl.roles.samples import samples_to_tensors, tensors_to_samples


class RewardModelRole(Protocol):
    """All methods are collective over the actor's ranks."""

    def scores(self, rollouts: Sequence[Rollout]) -> np.ndarray:
        """`[n]` float64, on every rank; all of them give the same rollouts."""

    def close(self) -> None:
        """Nothing is scored any more. Idempotent."""


class ColocatedRewardModel:
    """A reward model on the ranks of the actor, in turn with it, in its own layout."""

    def __init__(self, model: RewardModel) -> None:
        self.scores = model.scores

    def close(self) -> None:
        """Nothing waits for this one."""


class RemoteRewardModel:
    """The actor's side of a reward model on ranks of its own; `serve_reward_model` is the other."""

    def __init__(self, bridge: Bridge | None) -> None:
        """`bridge` on the actor's first rank only."""
        self._bridge = bridge
        self._is_closed = False

    def scores(self, rollouts: Sequence[Rollout]) -> np.ndarray:
        found: list[Any] = [None]
        if self._bridge is not None:
            samples = [ScoredRollout(rollout, reward=0.0) for rollout in rollouts]
            self._bridge.tell(Message("samples", tensors=samples_to_tensors(samples)))
            found = [self._bridge.hear_answer().tensors["scores"].numpy()]
        return objects.broadcast(found[0])

    def close(self) -> None:
        if self._bridge is not None and not self._is_closed:
            self._bridge.tell(Message("stop"))
        self._is_closed = True


def serve_reward_model(bridge: Bridge, build: Callable[[], RewardModel]) -> None:
    """Be a rank of the reward model until the actor closes it. Collective over its ranks."""
    model = build()
    while (message := bridge.hear()).name != "stop":
        rollouts = [sample.rollout for sample in tensors_to_samples(message.tensors)]
        scores = torch.from_numpy(model.scores(rollouts).copy())
        bridge.answer(Message("scores", tensors={"scores": scores}))


class ModelReward:
    """Reward `model` among the others: what it made of each sample."""

    def __init__(self, role: RewardModelRole) -> None:
        self._role = role
        self._log = FailureLog(REWARD_MODEL)

    def outcomes(self, rollouts: Sequence[Rollout]) -> list[Outcome]:
        """In their order; a score that is no number costs that sample its reward."""
        found = [
            Outcome(score)
            if math.isfinite(score)
            else Outcome(0.0, "no number", f"the reward model's score is {score}")
            for score in self._role.scores(rollouts).tolist()
        ]
        if dist.get_rank() == 0:  # all ranks have found the same
            self._log.note(found)
        return found

    def close(self) -> None:
        """End what waits for samples."""
        self._role.close()
