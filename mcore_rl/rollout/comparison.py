"""Which groups teach: one test for dynamic sampling, curricula and the order of mini-batches.

Shape legend: n samples; r rewards.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from mcore_rl.algorithms.estimators import select_informative_groups
from mcore_rl.algorithms.recipes import Algorithm
from mcore_rl.algorithms.registry import find_advantage_estimator
from mcore_rl.batching.table import SampleTable
from mcore_rl.batching.types import ScoredRollout
from mcore_rl.rewards.specs import RewardSpec


@dataclass(frozen=True, slots=True)
class GroupComparison:
    """Compares outcomes as the advantage estimator does, before penalties and a KL. Local.

    Example: `GroupComparison(recipe, spec.rewards, prompts.keys_of)`.
    """

    recipe: Algorithm
    rewards: RewardSpec
    # `Prompt.index` of samples, `[n]` -> `SourceSpec.key` of each; None: there are no sources
    keys_of: Callable[[np.ndarray], Sequence[str]] | None = None

    def clipped(self, rewards: np.ndarray) -> np.ndarray:
        """Return the rewards within --rl-reward-clip."""
        limit = self.recipe.reward_clip
        return rewards if limit is None else np.clip(rewards, -limit, limit)

    def parts(self, table: SampleTable) -> tuple[np.ndarray, np.ndarray]:
        """Return the rewards `[n, r]`, 0 for one that a sample does not have, and their weights."""
        keys = [""] * len(table) if self.keys_of is None else self.keys_of(table.prompts)
        of_samples = [self.rewards.weights_of(key) for key in keys]
        weights = [[of.get(name, 0.0) for of in of_samples] for name in table.parts]
        shape = len(table.parts), len(table)
        rewards = np.reshape(list(table.parts.values()), shape)
        return np.nan_to_num(rewards).T, np.reshape(weights, shape).T

    def informative(self, table: SampleTable, group_ids: np.ndarray) -> np.ndarray:
        """Return `[k]`, ascending: those of `group_ids`, `[n]`, in which valid samples differ: in
        one of their rewards if the estimator reads each by itself, else in their clipped sum."""
        columns = [self.clipped(table.rewards)]
        if find_advantage_estimator(self.recipe.advantage).needs_reward_parts:
            rewards, weights = self.parts(table)
            columns = list((rewards * weights).T)  # one of weight 0 has no effect
        valid = table.valid
        found = [select_informative_groups(each[valid], group_ids[valid]) for each in columns]
        return np.unique(np.concatenate([group_ids[:0], *found]))

    def differs(self, group: SampleTable) -> bool:
        """Return whether the responses to a prompt differ."""
        return len(self.informative(group, group.group_ids)) > 0

    def samples_differ(self, scored: Sequence[ScoredRollout]) -> bool:
        """Return whether the responses to a prompt differ."""
        return self.differs(SampleTable.of(scored))
