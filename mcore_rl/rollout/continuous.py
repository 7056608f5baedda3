"""Groups of an engine that samples ahead: they outlive steps and weights.

A step takes groups while others continue.
Before the weights change, running requests end with their next token (`pause`). They are submitted
again from their tokens (`resume`), whose keys and values the new weights compute.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

from mcore_rl.batching.types import Prompt, ScoredRollout
from mcore_rl.hybrid_engine.vllm.generation import Completion, Request
from mcore_rl.hybrid_engine.vllm.sampling_engine import SamplingEngine
from mcore_rl.rewards.stack import RewardStack
from mcore_rl.rewards.worker import Outcome
from mcore_rl.rollout.bank import Bank, BankedGroup
from mcore_rl.rollout.comparison import Selection
from mcore_rl.rollout.conversations import Conversations
from mcore_rl.rollout.group_plan import GroupPlan
from mcore_rl.rollout.open_groups import GroupDecision, OpenGroups, Select
from mcore_rl.rollout.segments import OpenGroup
from mcore_rl.rollout.shared_draws import SharedDraws
from mcore_rl.rollout.stream import StreamActions

logger = logging.getLogger(__name__)


class ContinuousScheduler(OpenGroups):
    """The open groups of a TP group; on all its ranks, but decisions are made on the first."""

    def __init__(
        self,
        engine: SamplingEngine,
        plan: GroupPlan,
        prompt_of: Callable[[int], Prompt],
        *,
        draws: SharedDraws | None,
        bank: Bank | None,
        rewards: RewardStack | None,
        select: Select | None,
        most_groups: int,
        conversations: Conversations | None = None,
        banked: dict[int, BankedGroup],
    ) -> None:
        """`draws`, `bank`, `rewards`, `conversations` and groups in `banked` are given on the first
        rank only. At most `most_groups` groups are being sampled here. `banked` holds groups that
        an earlier process has finished; they finish when their draw starts."""
        super().__init__(
            engine,
            plan,
            prompt_of,
            is_first=draws is not None,
            rewards=rewards,
            select=_keep if select is None else select,
            at_once=engine.config.max_num_seqs,
            conversations=conversations,
        )
        self._draws, self._bank, self._banked = draws, bank, banked
        self._compares = select is not None
        self._most_groups = most_groups
        self._submitted: dict[int, Request] = {}
        self._cut: list[int] = []  # numbers of responses that `pause` has ended
        self._to_restore: list[OpenGroup] = []
        # Groups are appended while others are removed, which may take longer than a step.
        self._writer = ThreadPoolExecutor(1) if bank is not None else None
        self._trimmer = ThreadPoolExecutor(1) if bank is not None else None
        self._trims: deque[Future[None]] = deque()
        self._written: deque[tuple[Future[None], int, bool]] = deque()
        self._has_disk_failed = False
        self._finished: set[int] = set()  # draws
        self._on_disk: set[int] = set()  # draws that are not written to the bank again
        self._is_pausing = False
        self.until: Callable[[], bool] = lambda: False

    # Between streams

    def pause(self) -> None:
        """Make the next stream end all running requests with their next token."""
        self._is_pausing = True

    def resume(self, weight_version: int) -> None:
        """Submit in the next stream what `pause` has ended, with weights of this version."""
        self._is_pausing = False
        self.plan = replace(self.plan, weight_version=weight_version)
        again = []
        for number in self._cut:
            draw, index = divmod(number, self.plan.size)
            again.append(self._turn_request(draw, self._response(self.open[draw], index)))
        # A request without a token was dropped: it may hold an observation that no response has.
        again += [*self._submitted.values(), *self._queue]
        self._queue = deque(self._renamed(request) for request in again)
        self._cut, self._submitted, self._running = [], {}, set()

    def _renamed(self, request: Request) -> Request:
        if not self.plan.keeps_kv:
            return request
        draw, index = divmod(request.number, self.plan.size)
        name = self.plan.cache_name(self._response(self.open[draw], index))
        return replace(request, cache_name=name)

    def load(self, groups: Sequence[OpenGroup]) -> None:
        """Continue groups of a resumed run, whose starts are recorded."""
        for group in groups:
            self.open[group.draw] = group
            if len(group.outcomes) == self.plan.size:
                self._on_disk.add(group.draw)
            if self._draws is not None:
                self._continue(group)

    def take(self, draws: Collection[int]) -> GroupDecision:
        """Return which of these draws are here; on the first rank."""
        here = sorted(self.open.keys() & set(draws))
        return GroupDecision(tuple(here), turns=self._turns(here))

    def forget(self, draws: Collection[int]) -> list[OpenGroup]:
        """Remove groups, with what is still running of them, and return them; on all ranks, while
        no request runs or for groups that have finished."""
        gone = [self.open.pop(draw) for draw in sorted(self.open.keys() & set(draws))]
        numbers = {
            group.draw * self.plan.size + index for group in gone for index in range(self.plan.size)
        }
        self._end_conversations(numbers)
        self._queue = deque(each for each in self._queue if each.number not in numbers)
        self._cut = [number for number in self._cut if number not in numbers]
        self._submitted = {n: each for n, each in self._submitted.items() if n not in numbers}
        self._finished -= set(draws)
        self._on_disk -= set(draws)
        for draw in draws:
            self._prompts.pop(draw, None)
            self._banked.pop(draw, None)  # another TP group has finished it
        return gone

    @property
    def num_sampling(self) -> int:
        """The number of groups here that have not all responses and rewards."""
        return len(self.open) - len(self._finished)

    def take_generated_tokens(self) -> int:
        """Return the number of tokens generated since the last call."""
        count, self._counts.generated_tokens = self._counts.generated_tokens, 0
        return count

    def forget_banked(self, draws: Collection[int], *, waits: bool = False) -> None:
        """Remove groups from the bank; `waits` for the disk if asked to. Groups that a failing disk
        keeps are removed, or ignored, when the run resumes."""
        if self._trimmer is not None and self._bank is not None and draws:
            self._trims.append(self._trimmer.submit(self._bank.forget, frozenset(draws)))
        while waits and self._trims:
            self._end_write(self._trims.popleft())

    def close(self) -> None:
        """Wait for groups that are being written to the bank, or removed from it."""
        if self._writer is not None and self._trimmer is not None:
            self._writer.shutdown()
            self._trimmer.shutdown()
            self.forget_banked((), waits=True)

    # Called by `step_engine`

    def schedule(self, num_running: int) -> StreamActions:
        assert self._draws is not None, "not the first rank of its TP group"
        self._report_written()
        if self._is_pausing and self.error is None:
            return StreamActions(end=tuple(sorted(self._running)))
        if self.until():
            return StreamActions(stop=True)
        if self.error is not None:
            return self._after_an_error()
        submit = self._new_requests(num_running)
        self._running |= {each.number for each in submit}
        self._submitted |= {each.number: each for each in submit}
        restore, self._to_restore = tuple(self._to_restore), []
        self._draws.flush()
        return StreamActions(tuple(submit), more=True, restore=restore)

    def finished(self, completion: Completion) -> None:
        self._submitted.pop(completion.number, None)
        if completion.is_cut_short:
            self._cut.append(completion.number)
        super().finished(completion)

    def restored(self, groups: Sequence[OpenGroup]) -> None:
        for group in groups:
            self.open[group.draw] = group
            self._on_disk.add(group.draw)
            if self._draws is not None:
                self._continue(group)

    # Internal

    def _next_draw(self) -> int | None:
        assert self._draws is not None
        return self._draws.next_draw()

    def _has_room(self) -> bool:
        return super()._has_room() and self.num_sampling < self._most_groups

    def _begin_group(self, draw: int) -> list[Request]:
        assert self._draws is not None
        self._draws.start(draw, self.plan.weight_version)
        banked = self._banked.pop(draw, None)
        if banked is not None and (group := banked.read()) is not None:
            self._to_restore.append(group)
            return []
        return super()._begin_group(draw)

    def _has_rewards(self, outcomes: Mapping[str, Outcome] | None) -> bool:
        if outcomes is None or not super()._has_rewards(outcomes):
            return False
        # Whatever failed may be back.
        return all(outcomes[name].kind is None for name in self._reward_names)

    def _compare(self, group: OpenGroup) -> None:
        if self._compares:
            super()._compare(group)
        else:
            self._finish_group(group)

    def _store_outcomes(self, number: int, outcomes: Mapping[str, Outcome]) -> None:
        if number // self.plan.size in self.open:  # else it was dropped
            super()._store_outcomes(number, outcomes)

    def _finish_group(
        self, group: OpenGroup, *, is_kept: bool = True, is_valid: bool = True
    ) -> None:
        self._finished.add(group.draw)
        if self._writer is None or self._bank is None or group.draw in self._on_disk:
            self._report(group.draw, is_kept)
            return
        written = self._writer.submit(self._bank.append, group)
        self._written.append((written, group.draw, is_kept))

    def _report_written(self) -> None:
        """Report groups that are on the disk, or that the disk has rejected, and failed trims."""
        while self._trims and self._trims[0].done():
            self._end_write(self._trims.popleft())
        while self._written and self._written[0][0].done():
            written, draw, is_kept = self._written.popleft()
            self._end_write(written)
            self._report(draw, is_kept)

    def _end_write(self, written: Future[None]) -> None:
        """Wait for a write of the bank. Without the bank, a kill loses groups that no checkpoint
        has, and nothing else: a failing disk does not end the run."""
        try:
            written.result()
        except OSError as error:
            if not self._has_disk_failed:
                logger.error(
                    "[Bank] finished groups cannot be written or removed (%s): the run continues, "
                    "but if it is killed before a checkpoint, they may be sampled again",
                    error,
                )
            self._has_disk_failed = True

    def _report(self, draw: int, is_kept: bool) -> None:
        assert self._draws is not None
        if (group := self.open.get(draw)) is not None:
            reason = "" if group.dropped is None else group.dropped.reason
            self._draws.finish(draw, is_informative=is_kept, reason=reason)


def _keep(scored: Sequence[ScoredRollout]) -> Selection:
    return Selection(True)
