"""Rollouts over all engines of a job.

TP groups of engines draw groups when they have room. An engine with data-parallel ranks has several
TP groups. All ranks of a TP group generate the same tokens; its first rank sends finished responses
to the rewards. At the end of a step all ranks gather one table of all samples, in the order of the
draws and without their tokens.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch.distributed as dist

from mcore_rl.algorithms.registry import Drop
from mcore_rl.batching.table import SampleTable, SampleTokens
from mcore_rl.batching.types import Prompt, Rollout, ScoredRollout, with_baselines
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
from mcore_rl.rollout.dispatch import (
    Counters,
    Dispatcher,
    LocalCounters,
    SamplingTarget,
    StepCounts,
)
from mcore_rl.rollout.group_plan import GroupPlan
from mcore_rl.rollout.groups import GroupScheduler
from mcore_rl.rollout.open_groups import Select
from mcore_rl.rollout.options import RolloutOptions
from mcore_rl.rollout.pending import EngineLimits, read_groups, write_groups
from mcore_rl.rollout.sample_store import SampleStore
from mcore_rl.rollout.segments import OpenGroup
from mcore_rl.rollout.stream import run_stream

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Resumed:
    """The pending groups of a TP group in a step, and the target of the step's new groups."""

    target: SamplingTarget
    groups: Sequence[OpenGroup] = ()
    stale: Sequence[OpenGroup] = ()  # dropped because of their age
    reserved: frozenset[int] = frozenset()  # draws of pending groups that must end in the step
    most_groups: int = 0  # largest number of pending groups in a TP group


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
        self._engine, self._layout, self._options = engine, layout, options
        self.max_turn_tokens = max_turn_tokens
        self.limits = EngineLimits(vocab_size, sample_store.routed)
        self._rank = dist.get_rank()
        self._is_scorer = layout.tp_rank(self._rank) == 0
        self.rewards = RewardStack(rewards)
        self._reward_names = [name for name in rewards.names if name != REWARD_MODEL]
        self.has_environments = conversations is not None
        self.conversations = conversations() if conversations and self._is_scorer else None
        self._reward_model, self._sample_store = reward_model, sample_store
        # Groups that this TP group's engine resumes in the next step; the same on all its ranks.
        self.pending: list[OpenGroup] = []
        self._pending_before = self.pending
        self._has_shown = False  # an example
        self._counters: Counters = LocalCounters()
        if layout.num_tp_groups > 1:
            # The store outlives a job that torchrun restarts.
            attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
            store = dist.distributed_c10d._get_default_store()
            self._counters = dist.PrefixStore(f"mcore_rl/dispatch/{attempt}", store)

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
        if self._engine.config.speculation is None:
            return {}
        counts_here = self._engine.take_draft_counts()
        counts = objects.all_gather(counts_here if self._is_scorer else DraftCounts())
        return sum(counts, DraftCounts()).metrics()

    def sample(
        self,
        plan: GroupPlan,
        target: SamplingTarget,
        prompt_of: Callable[[int], Prompt],
        *,
        key: str,
        select: Select | None = None,
        order_of: Callable[[int], tuple[int, ...]] | None = None,
        when_few_are_left: Callable[[], object] | None = None,
    ) -> GroupScheduler:
        """Sample this TP group's part of a step's groups and start their rewards; in rollout mode.

        `prompt_of` returns the prompt of one of the run's draws. `key` is unique to this call and
        the same on all ranks. `select` decides on a group with its rewards, if `target`
        compares groups. `order_of` returns `GroupPlan.order` for a number of first draws.
        """
        plan = dataclasses.replace(
            plan,
            has_environments=self.has_environments,
            max_turn_tokens=self.max_turn_tokens,
            keeps_kv=self._options.keeps_kv,
        )
        group, num_groups = self._layout.tp_group_index(self._rank), self._layout.num_tp_groups
        counters, numbering = self._counters, (0, 1)
        # The speed of rewards or engines decides which draws are batched together, and when.
        depends_on_speed = plan.keeps_unfinished or target.takes_first or select is not None
        splits_target = self._options.deterministic and depends_on_speed
        if splits_target:
            target = target.share(group, num_groups)
            counters, numbering, num_groups = LocalCounters(), (group, num_groups), 1
        resumed = self._resume(plan, target, alone=splits_target)
        target = resumed.target
        if order_of is not None and not splits_target:  # else each TP group numbers its own draws
            plan = dataclasses.replace(plan, order=order_of(target.num_started))
        dispatcher = Dispatcher(
            target,
            counters,
            key,
            round_robin=(group % num_groups, num_groups),
            num_round_robin=self._num_round_robin(resumed, plan.size, num_groups),
            numbering=numbering,
            # Those that this dispatcher's first draws need; sizes repeat after as many draws.
            places=Counter(plan.sizes[numbering[0] :: numbering[1]]),
        )
        groups = GroupScheduler(
            self._engine,
            plan,
            prompt_of,
            dispatcher=dispatcher if self._is_scorer else None,
            rewards=self.rewards if self._is_scorer else None,
            select=select,
            at_once=self._num_at_once(resumed, plan.size, num_groups),
            pending=resumed.groups,
            reserved=resumed.reserved,
            stale=resumed.stale,
            waits=splits_target and select is not None,
            conversations=self.conversations,
        )
        run_stream(self._engine, groups, when_few_are_left=when_few_are_left)
        return groups

    def _num_at_once(self, resumed: _Resumed, size: int, num_groups: int) -> int:
        """Return the number of responses that this TP group samples at a time."""
        share = math.ceil((resumed.target.num_pending + resumed.target.num_started) / num_groups)
        # A TP group without a share also calls its dispatcher once, which ends its stream.
        num_groups_at_once = max(1, share, len(resumed.groups))
        return min(self._engine.config.max_num_seqs, num_groups_at_once * size)

    def _num_round_robin(self, resumed: _Resumed, size: int, num_groups: int) -> int | None:
        """Return the number of new groups that every TP group begins with, next to its pending
        groups, which all begin now: at most its share. None with `--rl-deterministic`: all."""
        if self._options.deterministic:
            return None
        room, target = self._engine.config.max_num_seqs, resumed.target
        share = (target.num_pending + target.num_started) // num_groups
        num_new = min(room // size, share) - resumed.most_groups
        return min(max(0, num_new), target.num_started // num_groups)

    def _drop_stale(self, plan: GroupPlan) -> list[OpenGroup]:
        """Drop pending groups that are too old to resume, and return them. With
        `--rl-stale-rollouts finish` these groups had no place in the step in which they reached the
        limit."""
        limit = self._options.staleness_limit
        stale = [group for group in self.pending if self._age(plan, group) > limit]
        self.pending = [group for group in self.pending if self._age(plan, group) <= limit]
        return stale

    def _resume(self, plan: GroupPlan, target: SamplingTarget, *, alone: bool) -> _Resumed:
        """Return the pending groups of the step, and the target of the new groups next to them.
        `alone`: no other TP group samples for `target`."""
        if not plan.keeps_unfinished:
            return _Resumed(target)
        self._pending_before = self.pending
        stale = self._drop_stale(plan)
        ages_here = [(-self._age(plan, group), group.draw) for group in self.pending]
        ages_by_group = [ages_here]
        if not alone:
            ages_by_group = objects.all_gather(ages_here if self._is_scorer else [])
        ages = sorted(each for group in ages_by_group for each in group)
        must_end: list[int] = []
        if self._options.stale_rollouts == "finish":
            must_end = [draw for age, draw in ages if -age >= self._options.staleness_limit]
        reserved = frozenset(must_end[: target.num_groups])
        target = target.with_pending(num_pending=len(ages), num_reserved=len(reserved))
        return _Resumed(target, self.pending, stale, reserved, max(map(len, ages_by_group)))

    def _age(self, plan: GroupPlan, group: OpenGroup) -> int:
        """Count the versions between a group's oldest token and the current weights."""
        oldest = group.oldest_version
        return 0 if oldest is None else plan.weight_version - oldest

    def save_pending(self, folder: Path) -> None:
        """Write the groups that resume in the next step. Local."""
        if self._is_scorer and self._options.keeps_unfinished:
            write_groups(self.pending, folder, self._layout.tp_group_index(self._rank))

    def load_pending(
        self, folder: Path, prompt_of: Callable[[int], Prompt], fits: Callable[[OpenGroup], bool]
    ) -> None:
        """Load the checkpoint's unfinished groups that fit this run's settings. Local."""
        groups = read_groups(
            folder,
            prompt_of,
            tp_group=self._layout.tp_group_index(self._rank),
            num_tp_groups=self._layout.num_tp_groups,
            has_environments=self.has_environments,
            limits=self.limits,
        )
        fitting = [group for group in groups if fits(group)]
        if not self._options.keeps_unfinished:
            fitting = []
        if self._is_scorer and len(fitting) < len(groups):
            logger.warning(
                "[Resume] dropped %d unfinished groups: the number of samples per prompt or "
                "--rl-score-centering has changed, or this run has no --rl-partial-rollouts",
                len(groups) - len(fitting),
            )
        self.pending = fitting

    def undo(self) -> None:
        """Restore the groups that were pending before the last step, which will be repeated.
        Local."""
        self.pending = self._pending_before

    def settle(
        self,
        groups: GroupScheduler,
        waited: Callable[[float], object],
        *,
        select: Select | None = None,
    ) -> tuple[SampleTable, StepCounts]:
        """Wait for the remaining rewards. Return the table of the samples that the step takes from
        all TP groups, in the order of the draws, and the total counts. The samples are in the
        sample store.

        `waited` receives the seconds for which this rank was idle while others were still sampling,
        beyond the time that the slowest rank spent on rewards. `select` decides on the groups, if
        that was not done during sampling.
        """
        started = time.perf_counter()
        plan, counts, decision = groups.plan, StepCounts(), None
        if self._is_scorer:
            groups.wait()
            decision, counts = groups.decide(), groups.counts()
        taken, pending = groups.partition(self._engine.of_first_rank(decision))
        if plan.keeps_unfinished:
            self.pending = pending
        seconds = time.perf_counter() - started
        return self.score(
            plan, taken, counts, groups.error, seconds=seconds, waited=waited, select=select
        )

    def score(
        self,
        plan: GroupPlan,
        taken: Sequence[OpenGroup],
        counts: StepCounts,
        error: Exception | None,
        *,
        seconds: float,
        waited: Callable[[float], object],
        select: Select | None = None,
    ) -> tuple[SampleTable, StepCounts]:
        """Return the table of the samples of `taken` of all TP groups, in the order of the draws,
        and the total counts. `counts` are this TP group's, given on its first rank, like `error`,
        which all ranks raise. `seconds` is the time that this rank has waited for rewards; for
        `waited` and `select` see `settle`."""
        # Greedy responses last: only the samples are trained on.
        taken = sorted(taken, key=lambda group: group.draw)
        places = [(group, index) for group in taken for index in range(len(group.rollouts))]
        places.sort(key=lambda place: place[1] >= plan.num_samples_of(place[0]))
        rollouts = [group.rollouts[index] for group, index in places]
        outcomes: dict[str, list[Outcome]] = {}
        if self._is_scorer and error is None:
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
            seconds=seconds,
            counts=counts,
            waited=waited,
        )

    def _score(
        self,
        rollouts: Sequence[Rollout],
        draws: Sequence[int],
        sizes: Sequence[int],
        outcomes: dict[str, list[Outcome]],
        error: Exception | None,
        dropped: Sequence[Drop | None] | Select,
        *,
        seconds: float,
        counts: StepCounts,
        waited: Callable[[float], object],
    ) -> tuple[SampleTable, StepCounts]:
        """Return the table of all TP groups' samples. `sizes` are the samples of each group here,
        and `dropped` is what the group filter has decided on each, or decides it. In `rollouts`,
        greedy responses follow the samples."""
        first = self._sample_store.add([ScoredRollout(each, reward=0.0) for each in rollouts])
        if self._reward_model is not None:
            table, _ = self._join_tables(
                self._sample_store.table(first, draws), error, seconds, counts, waited
            )
            scores = self._reward_model(self._sample_store, table)
            here = np.flatnonzero(table.homes == self._sample_store.home)
            in_order = here[np.argsort(table.numbers[here])]
            outcomes[REWARD_MODEL] = [scores[row] for row in in_order]
            seconds, waited = 0.0, lambda seconds: None
        if self._is_scorer and error is None:
            scored = with_baselines(self.rewards.weigh(rollouts, outcomes), sizes)
            try:
                self._sample_store.set_rewards(first, _filtered(scored, sizes, dropped))
            except UsageError as failed:  # of the user's group filter
                error = failed
        samples = self._sample_store.table(first, draws[: sum(sizes)])
        return self._join_tables(samples, error, seconds, counts, waited)

    def _join_tables(
        self,
        table_here: SampleTable,
        error: Exception | None,
        seconds: float,
        counts: StepCounts,
        waited: Callable[[float], object],
    ) -> tuple[SampleTable, StepCounts]:
        """Join the tables of all TP groups, one rank of each, and sum their counts."""
        started = time.perf_counter()
        contributed = table_here if self._is_scorer else None
        contributions = objects.all_gather(
            (contributed, error, seconds, counts, self._sample_store.digest())
        )
        for rank, (_, other, *_) in enumerate(contributions):
            if other is not None:
                raise RuntimeError(f"scoring failed on rank {rank}: {other}") from other
        self._sample_store.require_agreement([digest for *_, digest in contributions])
        slowest = max(each for _, _, each, *_ in contributions)
        waited(max(0.0, time.perf_counter() - started + seconds - slowest))
        table = SampleTable.joined([each for each, *_ in contributions if each is not None])
        total = sum((each for *_, each, _ in contributions), StepCounts())
        return table.take(np.argsort(table.draws, kind="stable")), total

    def samples_of(self, table: SampleTable) -> list[ScoredRollout]:
        """Return the samples of `settle`'s table on rank 0, an empty list on the others."""
        return self._sample_store.on_first_rank(table, range(len(table)))

    def example(self) -> list[str] | None:
        """Return this step's first sample here as texts that the model reads and learns in turn, on
        rank 0, the first time; else None. Local."""
        if self._rank or self._has_shown or not (samples := self._sample_store.first(1)):
            return None
        self._has_shown = True
        tokens = SampleTokens.of(samples[0])
        edges = np.flatnonzero(np.diff(tokens.is_generated, prepend=False)).tolist()
        parts = np.split(tokens.token_ids, edges)
        return [self._engine.text_of(part, with_special=True) for part in parts]

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
