"""Rollouts over all engines of a job.

TP groups of engines draw groups when they have room. An engine with data-parallel ranks has several
TP groups. All ranks of a TP group generate the same tokens; its first rank sends finished responses
to the rewards. At the end of a step all ranks gather one table of all samples, in the order of the
draws and without their tokens.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np
import torch.distributed as dist

from mcore_rl.algorithms.registry import Drop
from mcore_rl.batching.table import SampleTable, SampleTokens
from mcore_rl.batching.types import Rollout, ScoredRollout, with_baselines
from mcore_rl.common import objects
from mcore_rl.common.errors import UsageError
from mcore_rl.hybrid_engine.vllm.drafter import DraftCounts
from mcore_rl.hybrid_engine.vllm.sampling_engine import SamplingEngine
from mcore_rl.model.layout import RolloutLayout
from mcore_rl.rewards.functions import REWARD_MODEL
from mcore_rl.rewards.specs import RewardSpec
from mcore_rl.rewards.stack import RewardStack
from mcore_rl.rewards.worker import Outcome
from mcore_rl.rollout.conversations import Conversations
from mcore_rl.rollout.group_encoding import EngineLimits
from mcore_rl.rollout.group_plan import GroupPlan
from mcore_rl.rollout.options import RolloutOptions
from mcore_rl.rollout.sample_store import SampleStore
from mcore_rl.rollout.sampling_state import StepCounts
from mcore_rl.rollout.scheduler import Select
from mcore_rl.rollout.segments import OpenGroup


class RolloutWorkers:
    """This rank's part in sampling and scoring. Collective, except for `close` and local
    methods."""

    def __init__(
        self,
        engine: SamplingEngine,
        layout: RolloutLayout,
        options: RolloutOptions,
        rewards: RewardSpec,
        sample_store: SampleStore,
        reward_model: Callable[[SampleStore, SampleTable], list[Outcome]] | None = None,
        conversations: Callable[[], Conversations] | None = None,
        max_turn_tokens: int | None = None,
        vocab_size: int = EngineLimits().vocab_size,
    ) -> None:
        """`reward_model` scores the samples in `sample_store`, collectively. `conversations`
        creates a TP group's conversations, if samples have environments. `vocab_size` is the
        model's."""
        self.engine, self._options = engine, options
        self._max_turn_tokens = max_turn_tokens
        self.limits = EngineLimits(vocab_size, sample_store.routed)
        self._rank = dist.get_rank()
        self.tp_group, self.num_tp_groups = layout.tp_group_index(self._rank), layout.num_tp_groups
        self.is_leader = layout.tp_rank(self._rank) == 0  # the first rank of its TP group
        self.coordinator = layout.rank(0)  # the first rank of the first TP group
        self.is_coordinator = self._rank == self.coordinator
        self.rewards = RewardStack(rewards)
        self._reward_names = [name for name in rewards.names if name != REWARD_MODEL]
        self.has_environments = conversations is not None
        self.conversations = conversations() if conversations and self.is_leader else None
        self._reward_model, self.sample_store = reward_model, sample_store
        self._has_shown = False  # an example

    @property
    def compares(self) -> bool:
        """Whether groups can be compared during sampling, as all their rewards are known by
        then."""
        return self._reward_model is None

    def draft_metrics(self) -> dict[str, float]:
        """Return the metrics of all engines' drafts since the last call; empty without
        --rl-speculate.

        The ranks of a TP group have the same counts, so only its first rank contributes.
        """
        if self.engine.config.speculation is None:
            return {}
        counts_here = self.engine.take_draft_counts()
        counts = objects.all_gather(counts_here if self.is_leader else DraftCounts())
        return sum(counts, DraftCounts()).metrics()

    def complete(self, plan: GroupPlan) -> GroupPlan:
        """Add to a plan what is the same for all of them. Local."""
        return dataclasses.replace(
            plan,
            has_environments=self.has_environments,
            max_turn_tokens=self._max_turn_tokens,
            keeps_kv=self._options.keeps_kv,
        )

    def score(
        self,
        plan: GroupPlan,
        taken: Sequence[OpenGroup],
        counts: StepCounts,
        error: Exception | None = None,
        *,
        select: Select | None = None,
    ) -> tuple[SampleTable, StepCounts]:
        """Return the table of the samples of `taken` of all TP groups, in the order of the draws,
        and the total counts. The samples are in the sample store. `counts` are this TP group's,
        given on its first rank, like `error`, which all ranks raise. `select` decides on the
        groups, if that was not done during sampling."""
        # Greedy responses last: only the samples are trained on.
        taken = sorted(taken, key=lambda group: group.draw)
        places = [(group, index) for group in taken for index in range(len(group.rollouts))]
        places.sort(key=lambda place: place[1] >= plan.num_samples_of(place[0]))
        rollouts = [group.rollouts[index] for group, index in places]
        outcomes: dict[str, list[Outcome]] = {}
        if self.is_leader and error is None:
            outcomes_by_sample = [group.outcomes[index] for group, index in places]
            outcomes = {
                name: [each[name] for each in outcomes_by_sample] for name in self._reward_names
            }
        return self._score(
            [each for each in rollouts if each is not None],
            [group.draw for group, _ in places],
            [plan.num_samples_of(group) for group in taken],
            outcomes,
            error,
            [group.dropped for group in taken] if select is None else select,
            counts,
        )

    def _score(
        self,
        rollouts: Sequence[Rollout],
        draws: Sequence[int],
        sizes: Sequence[int],
        outcomes: dict[str, list[Outcome]],
        error: Exception | None,
        dropped: Sequence[Drop | None] | Select,
        counts: StepCounts,
    ) -> tuple[SampleTable, StepCounts]:
        """Return the table of all TP groups' samples. `sizes` are the samples of each group here,
        and `dropped` is what the group filter has decided on each, or decides it. In `rollouts`,
        greedy responses follow the samples."""
        first = self.sample_store.add([ScoredRollout(each, reward=0.0) for each in rollouts])
        if self._reward_model is not None:
            table, _ = self._join_tables(self.sample_store.table(first, draws), error, counts)
            scores = self._reward_model(self.sample_store, table)
            here = np.flatnonzero(table.homes == self.sample_store.home)
            in_order = here[np.argsort(table.numbers[here])]
            outcomes[REWARD_MODEL] = [scores[row] for row in in_order]
        if self.is_leader and error is None:
            scored = with_baselines(self.rewards.weigh(rollouts, outcomes), sizes)
            try:
                self.sample_store.set_rewards(first, _filtered(scored, sizes, dropped))
            except UsageError as failed:  # of the user's group filter
                error = failed
        samples = self.sample_store.table(first, draws[: sum(sizes)])
        return self._join_tables(samples, error, counts)

    def _join_tables(
        self, table_here: SampleTable, error: Exception | None, counts: StepCounts
    ) -> tuple[SampleTable, StepCounts]:
        """Join the tables of all TP groups, one rank of each, and sum their counts."""
        contributed = table_here if self.is_leader else None
        contributions = objects.all_gather((contributed, error, counts, self.sample_store.digest()))
        for rank, (_, other, *_) in enumerate(contributions):
            if other is not None:
                raise RuntimeError(f"scoring failed on rank {rank}: {other}") from other
        self.sample_store.require_agreement([digest for *_, digest in contributions])
        table = SampleTable.joined([each for each, *_ in contributions if each is not None])
        total = sum((each for *_, each, _ in contributions), StepCounts())
        return table.take(np.argsort(table.draws, kind="stable")), total

    def samples_of(self, table: SampleTable) -> list[ScoredRollout]:
        """Return the samples of `score`'s table on rank 0, an empty list on the others."""
        return self.sample_store.on_first_rank(table, range(len(table)))

    def example(self) -> list[str] | None:
        """Return this step's first sample here as texts that the model reads and learns in turn, on
        rank 0, the first time; else None. Local."""
        if self._rank or self._has_shown or not (samples := self.sample_store.first(1)):
            return None
        self._has_shown = True
        tokens = SampleTokens.of(samples[0])
        edges = np.flatnonzero(np.diff(tokens.is_generated, prepend=False)).tolist()
        parts = np.split(tokens.token_ids, edges)
        return [self.engine.text_of(part, with_special=True) for part in parts]

    def close(self) -> None:
        """End the processes of rewards and environments of this rank."""
        self.rewards.close()
        if self.conversations is not None:
            self.conversations.close()


def _filtered(
    scored: Sequence[ScoredRollout], sizes: Sequence[int], dropped: Sequence[Drop | None] | Select
) -> list[ScoredRollout]:
    """Return the samples of groups of these sizes, which the group filter has decided on or, as a
    function, decides on now, and what follows them."""
    ends = np.cumsum(sizes, dtype=int).tolist()
    filtered: list[ScoredRollout] = []
    for number, (end, size) in enumerate(zip(ends, sizes, strict=True)):
        group = scored[end - size : end]
        drop = dropped(group).dropped if callable(dropped) else dropped[number]
        filtered += group if drop is None else [dataclasses.replace(s, dropped=drop) for s in group]
    return [*filtered, *scored[len(filtered) :]]
