"""The groups of a step: an engine's part of its draws and of the groups that are pending.

`GroupScheduler` reports complete groups to the `Dispatcher`. A step that takes the groups that
finish first stops the others. A stopped group is dropped, or resumes in a later step from its
tokens.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace

from mcore_rl.batching.types import Prompt
from mcore_rl.hybrid_engine.vllm.sampling_engine import SamplingEngine
from mcore_rl.rewards.stack import RewardStack
from mcore_rl.rollout.conversations import Conversations
from mcore_rl.rollout.dispatch import Dispatcher, StepCounts
from mcore_rl.rollout.group_plan import GroupPlan
from mcore_rl.rollout.open_groups import GroupDecision, OpenGroups, Select
from mcore_rl.rollout.segments import OpenGroup
from mcore_rl.rollout.stream import StreamActions


class GroupScheduler(OpenGroups):
    """Schedules an engine's part of a step: its draws and its pending groups.

    `error` is an exception of the rewards, which all ranks raise in `settle`.
    """

    def __init__(
        self,
        engine: SamplingEngine,
        plan: GroupPlan,
        prompt_of: Callable[[int], Prompt],
        *,
        dispatcher: Dispatcher | None,
        rewards: RewardStack | None,
        select: Select | None,
        at_once: int,
        pending: Sequence[OpenGroup] = (),
        reserved: frozenset[int] = frozenset(),
        stale: Sequence[OpenGroup] = (),
        waits: bool = False,
        conversations: Conversations | None = None,
    ) -> None:
        """Only the first rank of a TP group has a `dispatcher`. Of `pending`, the draws in
        `reserved` are sampled to their end and taken; where groups are selected, only if they are
        kept. `stale` groups have been dropped already. The other arguments are those of
        `OpenGroups`."""
        super().__init__(
            engine,
            plan,
            prompt_of,
            is_first=dispatcher is not None,
            rewards=rewards,
            select=select,
            at_once=at_once,
            waits=waits,
            conversations=conversations,
        )
        self._dispatcher, self._reserved = dispatcher, reserved
        self.open |= {group.draw: group for group in pending}
        self._counts = StepCounts(
            stale=len(stale),
            left_samples=sum(map(plan.num_samples_of, stale)),
            left_tokens=sum(group.num_tokens(plan.num_samples_of(group)) for group in stale),
        )
        self._finish_ranks: dict[int, int] = {}  # order in which groups finished, by draw
        self._is_ending = False
        if dispatcher is not None:
            self._resume(pending)

    # Called by `run_stream`

    def schedule(self, num_running: int) -> StreamActions:
        """Submit queued requests, then new groups, up to the engine's room. Once the step has
        enough groups, stop the others."""
        assert self._dispatcher is not None, "not the first rank of its TP group"
        if self.error is not None:
            return self._after_an_error()
        submit = self._new_requests(num_running)
        unneeded = self._unneeded_requests()
        submit = [each for each in submit if each.number not in unneeded]
        self._running |= {each.number for each in submit}
        stopped = tuple(sorted(unneeded & self._running))
        more = (
            bool(self._queue)
            or (self._conversations is not None and self._conversations.num_open > 0)
            or not self._dispatcher.is_exhausted
            or self._dispatcher.is_undecided
        )
        # Other engines may have sampled enough while long responses run here.
        may_end = self._dispatcher.takes_first and not self._is_ending
        if self.plan.keeps_unfinished:
            return StreamActions(tuple(submit), end=stopped, more=more, may_end=may_end)
        self._running -= set(stopped)
        return StreamActions(tuple(submit), drop=stopped, more=more, may_end=may_end)

    def restored(self, groups: Sequence[OpenGroup]) -> None:
        """Not called: a step has no bank."""

    # After the stream

    def wait(self) -> None:
        """Wait until every sampled response is rewarded."""
        try:
            if self._rewards is not None and self.error is None:
                self._rewards.wait()
        except Exception as error:
            self._fail(error)
        self.between_steps()

    def decide(self) -> GroupDecision:
        """Return which groups the step takes and which stay pending; after `wait`, on the first
        rank."""
        if self.error is not None:
            return GroupDecision()
        taken = self._taken_draws()
        others = sorted(self.open.keys() - taken)
        pending = tuple(others) if self.plan.keeps_unfinished else ()
        return GroupDecision(tuple(sorted(taken)), pending, self._turns(taken))

    def counts(self) -> StepCounts:
        """Return the counts of this TP group; on its first rank, after `wait`."""
        assert self._dispatcher is not None
        taken = self._taken_draws()
        left = [group for draw, group in self.open.items() if draw not in taken]
        num_samples_of = self.plan.num_samples_of
        left_tokens = sum(group.num_tokens(num_samples_of(group)) for group in left)
        return replace(
            self._counts,
            started=self._dispatcher.num_dispatched,
            refills=self._dispatcher.num_refills,
            dropped=self._counts.stale + (0 if self.plan.keeps_unfinished else len(left)),
            pending=len(left) if self.plan.keeps_unfinished else 0,
            left_samples=self._counts.left_samples + sum(map(num_samples_of, left)),
            left_tokens=self._counts.left_tokens + left_tokens,
        )

    # Internal; on the first rank

    def _next_draw(self) -> int | None:
        assert self._dispatcher is not None
        count = self._dispatcher.next_draw()
        return None if count is None else self.plan.draw(count)

    def _fail(self, error: Exception) -> None:
        super()._fail(error)
        if self._dispatcher is not None:
            self._dispatcher.fail()

    def _resume(self, pending: Sequence[OpenGroup]) -> None:
        """Queue the requests of pending groups, first those of groups that must end in this
        step."""
        for group in sorted(pending, key=lambda each: each.draw not in self._reserved):
            self._continue(group)
            if group.is_sampled and self._select is None:
                self._finish_group(group)

    def _unneeded_requests(self) -> set[int]:
        """Return the requests that the step no longer needs, running or not; once per step."""
        assert self._dispatcher is not None
        if self._is_ending or not self._dispatcher.takes_first or not self._dispatcher.has_enough():
            return set()
        self._is_ending = True
        needed = self._numbers(self._reserved)
        self._queue = deque(each for each in self._queue if each.number in needed)
        unneeded = self._numbers() - needed
        if self.plan.keeps_unfinished:
            for draw in self.open.keys() - self._reserved:
                self.open[draw].conversations = self.conversations_of(draw)
        self._end_conversations(unneeded)
        return unneeded

    def _finish_group(
        self, group: OpenGroup, *, is_kept: bool = True, is_valid: bool = True
    ) -> None:
        assert self._dispatcher is not None
        self._finish_ranks[group.draw] = self._dispatcher.record_group(
            size=self.plan.num_samples_of(group),
            differs=is_kept,
            is_valid=is_valid,
            is_reserved=group.draw in self._reserved,
        )

    def _taken_draws(self) -> set[int]:
        """Return the draws that the step takes; after `wait`, when every place is settled."""
        assert self._dispatcher is not None
        size_of = {draw: self.plan.num_samples_of(self.open[draw]) for draw in self._finish_ranks}
        places = {size: self._dispatcher.places(size) for size in set(size_of.values())}
        return {d for d, rank in self._finish_ranks.items() if rank <= places[size_of[d]]}
