"""Which groups a step learns from: one test for dynamic sampling, curricula and the order of
mini-batches, and the user's group filter.

Shape legend: n samples; r rewards.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from mcore_rl.algorithms.estimators import select_informative_groups
from mcore_rl.algorithms.recipes import Algorithm
from mcore_rl.algorithms.registry import Drop, find_advantage_estimator, find_group_filter
from mcore_rl.batching.table import SampleTable
from mcore_rl.batching.types import ScoredRollout
from mcore_rl.rewards.specs import RewardSpec


@dataclass(frozen=True, slots=True)
class Selection:
    """Whether a group has a place in its step, and whether it is trained on.

    Example: another group is sampled in its place: `Selection(False, Drop("short", refill=True))`.
    """

    is_kept: bool  # False: replaced while refills are left
    dropped: Drop | None = None  # by the group filter


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
        differing = [select_informative_groups(each[valid], group_ids[valid]) for each in columns]
        return np.unique(np.concatenate([group_ids[:0], *differing]))

    def differs(self, group: SampleTable) -> bool:
        """Return whether the responses to a prompt differ."""
        return len(self.informative(group, group.group_ids)) > 0

    def select(self, scored: Sequence[ScoredRollout]) -> Selection:
        """Decide on the samples of a prompt with all their rewards. The group filter is asked about
        groups that dynamic sampling keeps and that have a valid sample. Raises UsageError if it
        fails."""
        name = self.recipe.group_filter
        if self.recipe.dynamic_sampling and not self.differs(SampleTable.of(scored)):
            return Selection(False)
        if name is None or not any(sample.is_valid for sample in scored):
            return Selection(True)
        parameters = self.recipe.group_filter_parameters
        dropped = find_group_filter(name).decision(scored, parameters)
        return Selection(dropped is None or not dropped.refill, dropped)

    def is_kept(self, group: SampleTable) -> bool:
        """Return `Selection.is_kept` of a group for which it has been decided."""
        dropped = group.dropped[0]
        if dropped is not None:
            return not dropped.refill
        return not self.recipe.dynamic_sampling or self.differs(group)

    def filtered(self, tables: Sequence[SampleTable]) -> dict[str, float]:
        """Return the number of groups in tables that the group filter drops, by metric."""
        if self.recipe.group_filter is None:
            return {}
        counts = Counter(
            table.dropped[row].reason
            for table in tables
            for row in np.unique(table.group_ids, return_index=True)[1]
            if table.dropped[row] is not None
        )
        reasons = find_group_filter(self.recipe.group_filter).reasons
        return {f"rollout/filtered/{reason}": float(counts[reason]) for reason in reasons}
