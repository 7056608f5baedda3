"""Groups of responses, one per drawn prompt, from the draw to the rewards.

`Scheduler` starts groups when its engine has room, and sends each response to the rewards as soon
as it ends. A step takes groups while others continue. Before the weights change, running requests
end with their next token (`pause`). They are submitted again from their tokens (`resume`), whose
keys and values the new weights compute. If the engine gives its memory to training in between,
groups wait as they do in a checkpoint (`release`).
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from operator import itemgetter

import numpy as np

from mcore_rl.batching.types import (
    UNFINISHED,
    Prompt,
    Rollout,
    ScoredRollout,
    TurnReward,
    with_baselines,
)
from mcore_rl.common.errors import UsageError
from mcore_rl.hybrid_engine.vllm.generation import Completion, Request, seed_of
from mcore_rl.hybrid_engine.vllm.sampling_engine import SamplingEngine
from mcore_rl.rewards.functions import ENVIRONMENT
from mcore_rl.rewards.stack import RewardStack
from mcore_rl.rewards.worker import Outcome
from mcore_rl.rollout.admission import Finished
from mcore_rl.rollout.bank import Bank, BankedGroup
from mcore_rl.rollout.comparison import Selection
from mcore_rl.rollout.conversations import Conversations, NextTurn, turns_of
from mcore_rl.rollout.draws import Draws
from mcore_rl.rollout.group_plan import NO_TOKENS, GroupPlan
from mcore_rl.rollout.segments import (
    KeptConversation,
    OpenGroup,
    extend_rollout,
    is_finished,
    new_rollout,
    turn_start,
)
from mcore_rl.rollout.stream import StreamActions
from mcore_rl.rollout.user_groups import Progress, UserGroups, is_of_user

logger = logging.getLogger(__name__)

Select = Callable[[Sequence[ScoredRollout]], Selection]


@dataclass(frozen=True, slots=True)
class HeldGroups:
    """Groups that a TP group has, broadcast by its first rank.

    Example: `HeldGroups(draws=(96, 98))`.
    """

    draws: tuple[int, ...]
    # rewards of environments, by draw and index
    turns: Mapping[tuple[int, int], tuple[TurnReward, ...]] = field(default_factory=dict)


class Scheduler:
    """The open groups of a TP group; on all its ranks, but decisions are made on the first.

    `open` maps draws to groups. `error` is an exception of the rewards, which ends the sampling.
    `until` is asked on the first rank, and stops it, too.
    """

    def __init__(
        self,
        engine: SamplingEngine,
        plan: GroupPlan,
        prompt_of: Callable[[int], Prompt],
        *,
        draws: Draws | None,
        rewards: RewardStack | None,
        select: Select | None,
        most_groups: int,
        conversations: Conversations | None = None,
        bank: Bank | None = None,
        banked: dict[int, BankedGroup] | None = None,
        user_groups: UserGroups | None = None,
        waits: bool = False,
    ) -> None:
        """`draws`, `rewards`, `conversations`, `bank`, `user_groups` and groups in `banked` are
        given on the first rank only, `prompt_of`, which returns the prompt of a draw, on every
        rank. `select` decides on a group with its rewards; None: all are kept. At most
        `most_groups` groups are being sampled here. Finished groups are written to the `bank`, if
        there is one. `banked` holds groups that an earlier process has finished; they finish when
        their draw starts. With `waits` the engine takes no step until all finished responses are
        rewarded, so that the result does not depend on the speed of rewards."""
        self.plan = plan
        self._engine, self._find_prompt = engine, prompt_of
        self._prompts: dict[int, Prompt] = {}  # of open groups, by draw
        self._draws, self._rewards, self._select = draws, rewards, select
        self._most_groups, self._waits, self._conversations = most_groups, waits, conversations
        self.open: dict[int, OpenGroup] = {}
        self.error: Exception | None = None
        self._num_generated = self._num_left = 0  # tokens since they were taken
        self._tickets: dict[int, int] = {}  # ticket of a reward -> request
        self._running: set[int] = set()
        self._starting: set[int] = set()  # samples whose environments are being created
        self._queue: deque[Request] = deque()
        self._submitted: dict[int, Request] = {}
        self._cut: list[int] = []  # numbers of responses that `pause` has ended
        self._sampled: set[int] = set()  # draws whose responses have all ended
        self._reported: set[int] = set()  # draws that have finished
        self._pauses = self._drops = False
        # Of waits in which nothing but rewards was missing here, since they were taken.
        self._wait_seconds = 0.0
        self._waits_since: float | None = None
        self.until: Callable[[], bool] = lambda: False
        self._user_groups = user_groups
        # The bank
        self._bank, self._banked = bank, banked or {}
        self._to_restore: list[OpenGroup] = []
        # Groups are appended while others are removed, which may take longer than a step.
        self._writer = ThreadPoolExecutor(1) if bank is not None else None
        self._trimmer = ThreadPoolExecutor(1) if bank is not None else None
        self._trims: deque[Future[None]] = deque()
        self._written: deque[tuple[Future[None], int, Finished]] = deque()
        self._has_disk_failed = False
        self._on_disk: set[int] = set()  # draws that are not written to the bank again

    # Between streams

    def pause(self, *, drops: bool = False) -> None:
        """Make the next stream end all running requests with their next token, or drop them."""
        self._pauses, self._drops = True, drops

    def resume(self, weight_version: int) -> None:
        """Submit in the next stream what `pause` has ended, with weights of this version."""
        self._pauses = False
        self.plan = replace(self.plan, weight_version=weight_version)
        again = []
        for number in self._cut:
            draw, index = divmod(number, self.plan.size)
            again.append(self._turn_request(draw, self._response(self.open[draw], index)))
        # A request without a token was dropped: it may hold an observation that no response has.
        again += [*self._submitted.values(), *self._queue]
        again += [] if self._user_groups is None else self._user_groups.again()
        self._queue = deque(self._renamed(request) for request in again)
        self._cut, self._submitted, self._running = [], {}, set()

    def _renamed(self, request: Request) -> Request:
        if not self.plan.keeps_kv or is_of_user(request.number):
            return request
        draw, index = divmod(request.number, self.plan.size)
        name = self.plan.cache_name(self._response(self.open[draw], index))
        return replace(request, cache_name=name)

    def release(self) -> None:
        """End all conversations, and wait for all rewards, after `pause`: what is open continues
        with `load`. On all ranks."""
        for draw, group in self.open.items():
            group.conversations = self.conversations_of(draw)
        self._end_conversations(self._numbers(self.open))
        if self._user_groups is not None:
            self._user_groups.forget(self.open)  # begin again
        self._to_restore.clear()
        self._queue.clear()
        self._submitted.clear()
        self._cut.clear()
        try:
            if self._rewards is not None and self.error is None:
                self._note_wait()
                self._rewards.wait()
        except Exception as error:
            self._fail(error)
        self.between_steps()

    def load(self, groups: Sequence[OpenGroup], *, is_resumed: bool) -> None:
        """Continue groups whose starts are recorded, after `release`, or, if `is_resumed`, of
        another process, whose rewards may be others or have failed."""
        for group in groups:
            self.open[group.draw] = group
            if len(group.outcomes) == self.plan.size:
                self._on_disk.add(group.draw)
            if self._draws is None or group.draw in self._reported:
                continue
            if is_resumed:
                self._drop_outcomes_of_others(group)
            self._continue(group)

    @property
    def has_reported_all(self) -> bool:
        """Whether all groups here have finished; on the first rank."""
        return len(self._reported) == len(self.open)

    def held(self, draws: Collection[int]) -> HeldGroups:
        """Return which of these draws are here; on the first rank."""
        here = sorted(self.open.keys() & set(draws))
        turns = {
            (draw, index): rollout.turn_rewards
            for draw in here
            for index, rollout in enumerate(self.open[draw].rollouts)
            if rollout is not None and rollout.turn_rewards
        }
        return HeldGroups(tuple(here), turns)

    def groups_of(self, held: HeldGroups) -> list[OpenGroup]:
        """Return the groups that the first rank has found to be here; on all ranks."""
        for draw in held.draws:
            group = self._opened(draw)
            for index in range(len(group.rollouts)):
                turns = held.turns.get((draw, index), ())
                group.rollouts[index] = replace(self._response(group, index), turn_rewards=turns)
        return [self.open[draw] for draw in held.draws]

    def forget(self, draws: Collection[int]) -> list[OpenGroup]:
        """Remove groups, with what is still running of them, and return them; on all ranks, while
        no request runs or for groups that have finished."""
        gone = [self.open.pop(draw) for draw in sorted(self.open.keys() & set(draws))]
        numbers = self._numbers(group.draw for group in gone)
        self._end_conversations(numbers)
        numbers |= set() if self._user_groups is None else self._user_groups.forget(draws)
        self._queue = deque(each for each in self._queue if each.number not in numbers)
        self._cut = [number for number in self._cut if number not in numbers]
        self._submitted = {n: each for n, each in self._submitted.items() if n not in numbers}
        self._to_restore = [each for each in self._to_restore if each.draw not in draws]
        self._sampled -= set(draws)
        self._reported -= set(draws)
        self._on_disk -= set(draws)
        for draw in draws:
            self._prompts.pop(draw, None)
            self._banked.pop(draw, None)  # another TP group has finished it
        return gone

    def take_wait_seconds(self) -> float:
        """Return the seconds since the last call in which nothing but rewards was missing here."""
        seconds, self._wait_seconds = self._wait_seconds, 0.0
        return seconds

    def take_num_tokens(self) -> tuple[int, int]:
        """Return the numbers of tokens that were generated, and of those that were dropped with
        their requests, since the last call."""
        counts = self._num_generated, self._num_left
        self._num_generated = self._num_left = 0
        return counts

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
        """Submit queued requests, then new groups, up to the engine's room, until `until`."""
        assert self._draws is not None, "not the first rank of its TP group"
        self._report_written()
        if self._pauses and self.error is None:
            numbers = tuple(sorted(self._running))
            return StreamActions(drop=numbers) if self._drops else StreamActions(end=numbers)
        if self.error is not None:
            self._end_conversations(self._numbers(self.open))
            return StreamActions(drop=tuple(self._running))
        if self.until():
            return StreamActions(stop=True)
        submit = self._new_requests(num_running)
        self._running |= {each.number for each in submit}
        self._submitted |= {each.number: each for each in submit}
        restore, self._to_restore = tuple(self._to_restore), []
        self._draws.flush()
        may_ask = self._conversations is not None and self._conversations.num_open > 0
        may_ask |= self._user_groups is not None and self._user_groups.num_open > 0
        is_last = self._draws.is_exhausted and not self._queue and not may_ask
        return StreamActions(tuple(submit), more=True, is_last=is_last, restore=restore)

    def restored(self, groups: Sequence[OpenGroup]) -> None:
        """Take over groups of the bank or of a user's function; on all ranks."""
        self.load(groups, is_resumed=True)

    def finished(self, completion: Completion) -> None:
        """Store the new part of a response. If the response has ended, request its rewards."""
        self._submitted.pop(completion.number, None)
        self._running.discard(completion.number)
        self._num_generated += len(completion.token_ids)
        if is_of_user(completion.number):
            self._finished_by_user(completion)
            return
        if completion.is_cut_short:
            self._cut.append(completion.number)
        draw, index = divmod(completion.number, self.plan.size)
        group = self._opened(draw)
        so_far = group.rollouts[index]
        if so_far is None:
            prompt = self._prompt_of(draw)
            if self.plan.has_environments:  # its environment may have changed the prompt
                prompt = replace(prompt, token_ids=completion.request.token_ids)
            so_far = new_rollout(prompt, index, self.plan.weight_version)
        rollout = extend_rollout(so_far, completion, self.plan.weight_version)
        if not self.plan.has_environments or not is_finished(rollout):
            self._store_response(group, rollout)
            return
        # A turn: its environment decides whether more follow.
        rollout = group.rollouts[index] = replace(rollout, finish_reason=UNFINISHED)
        if self._conversations is not None:
            turn = rollout.response_token_ids[turn_start(rollout) :]
            completion = replace(completion, token_ids=turn)
            self._conversations.turn(completion, rollout, self._engine.text_of(turn))

    def _finished_by_user(self, completion: Completion) -> None:
        """Continue a user's function, which runs on the first rank."""
        if self._user_groups is None:
            return
        if completion.is_cut_short:
            self._user_groups.cut(completion)
            return
        try:
            self._queue.extend(self._asked(self._user_groups.ended(completion, self.plan)))
        except UsageError as error:
            self._fail(error)

    def _asked(self, progress: Progress) -> Sequence[Request]:
        """Return the requests that follow in a user's function. All ranks get a complete group."""
        self._to_restore += [] if progress.group is None else [progress.group]
        return progress.requests

    def dropped(self, request: Request, num_tokens: int) -> None:
        """Count the tokens of a dropped request, which are not trained on."""
        self._running.discard(request.number)
        self._num_generated += num_tokens
        if is_of_user(request.number):
            self._num_left += num_tokens
            return
        draw, index = divmod(request.number, self.plan.size)
        if self._draws is None or index >= self.plan.num_samples_of(self.open[draw]):
            return
        so_far = self._response(self.open[draw], index)
        # Observed tokens count as part of the response, as in finished responses.
        prompt_and_response = len(so_far.prompt.token_ids) + len(so_far.response_token_ids)
        self._num_left += len(request.token_ids) - prompt_and_response + num_tokens

    def between_steps(self, num_running: int = 0, step_seconds: float = 0.0) -> None:
        """Collect outcomes of rewards and continue conversations; on the first rank."""
        if self._rewards is None or self.error is not None:
            return
        self._note_wait(num_running)
        try:
            if self._waits:
                self._rewards.wait()
            self._continue_conversations(num_running, step_seconds)
            for ticket, outcomes in sorted(self._rewards.finished(), key=itemgetter(0)):
                self._store_outcomes(self._tickets.pop(ticket), outcomes)
        except Exception as error:
            self._fail(error)
        self._note_wait(num_running)

    def _note_wait(self, num_running: int = 0) -> None:
        """Measure the wait since the last call if nothing else happened."""
        now = time.perf_counter()
        is_idle = not num_running and not self._queue and not self._starting
        if self._waits_since is not None and is_idle:
            self._wait_seconds += now - self._waits_since
        self._waits_since = now if is_idle and self._tickets else None

    # Internal; on the first rank

    def _new_requests(self, num_running: int) -> list[Request]:
        """Return queued requests, then those of new groups, up to the engine's room."""
        assert self._draws is not None
        submit: list[Request] = []
        room = self._engine.config.max_num_seqs - num_running
        while len(submit) < room and self._queue:
            submit.append(self._queue.popleft())
        while (
            len(submit) + len(self._starting) < room
            and self._has_room()
            and (draw := self._draws.next_draw()) is not None
        ):
            submit += self._begin_group(draw)
        return submit

    def _continue(self, group: OpenGroup) -> None:
        """Continue the responses of a group that have not ended, and request the rewards that
        others lack."""
        if self._user_groups is not None and not group.is_sampled:
            group.rollouts[:] = [None] * len(group.rollouts)
            group.outcomes.clear()
            self._queue.extend(self._begin_of_user(group.draw))
            return
        for index in range(len(group.rollouts)):
            rollout = self._response(group, index)
            if not is_finished(rollout):
                self._continue_response(group, index)
            elif index not in group.outcomes:
                self._begin_rewards(rollout, group.draw)
        self._note_sampled(group)
        self._finish_if_rewarded(group)

    def _drop_outcomes_of_others(self, group: OpenGroup) -> None:
        """Drop the outcomes of a group of another process unless its rewards are those of this run,
        and not others of the same names. Those without a source, as of environments, are the same.
        Drop those of a response that lacks a reward, or whose rewards have failed: whatever failed
        may be back."""
        if self._rewards is None or not group.outcomes:
            return
        try:
            now, then = self._rewards.find_sources(), group.reward_sources
        except Exception as error:
            self._fail(error)
            return
        if any(now.get(name) != then.get(name) for name in self._reward_names):
            group.outcomes.clear()
        for index, outcomes in [*group.outcomes.items()]:
            kinds = [outcomes[name].kind for name in self._reward_names if name in outcomes]
            if kinds != [None] * len(self._reward_names):
                del group.outcomes[index]

    @property
    def _reward_names(self) -> tuple[str, ...]:
        """The rewards that are known before a step takes a response."""
        assert self._rewards is not None
        return (*self._rewards.names, *([ENVIRONMENT] if self.plan.has_environments else []))

    def _continue_response(self, group: OpenGroup, index: int) -> None:
        """Continue a response that has not ended, or start it."""
        so_far = self._response(group, index)
        if self._conversations is None:
            self._queue.append(self.plan.request(group.draw, so_far))
        else:
            self._start_conversation(group.draw, so_far, group.conversations.pop(index, None))

    def _has_room(self) -> bool:
        if self._conversations is not None and not self._conversations.has_room(self.plan.size):
            return False
        return len(self.open) - len(self._sampled) < self._most_groups

    def _begin_group(self, draw: int) -> list[Request]:
        """Return a new group's requests; none if environments have to be created first, or if the
        bank has the group."""
        assert self._draws is not None
        self._draws.start(draw, self.plan.weight_version)
        banked = self._banked.pop(draw, None)
        if banked is not None and (restored := banked.read()) is not None:
            self._to_restore.append(restored)
            return []
        group = self._opened(draw)
        if self._user_groups is not None:
            return self._begin_of_user(draw)
        rollouts = [self._response(group, index) for index in range(len(group.rollouts))]
        if self._conversations is None:
            return [self.plan.request(draw, so_far) for so_far in rollouts]
        for so_far in rollouts:
            self._start_conversation(draw, so_far)
        return []

    def _begin_of_user(self, draw: int) -> list[Request]:
        """Return the first requests of a user's function."""
        assert self._user_groups is not None
        try:
            return list(
                self._asked(self._user_groups.begin(draw, self._prompt_of(draw), self.plan))
            )
        except UsageError as error:
            self._fail(error)
            return []

    def _prompt_of(self, draw: int) -> Prompt:
        if draw not in self._prompts:
            self._prompts[draw] = self._find_prompt(draw)
        return self._prompts[draw]

    def _opened(self, draw: int) -> OpenGroup:
        """Return the group of a draw, without responses if it is new."""
        if draw not in self.open:
            self.open[draw] = self.new_group(draw)
        return self.open[draw]

    def new_group(self, draw: int) -> OpenGroup:
        """Return a group without responses."""
        return OpenGroup.new(draw, self.plan.size_of(self._prompt_of(draw)))

    def _start_conversation(
        self, draw: int, so_far: Rollout, kept: KeptConversation | None = None
    ) -> None:
        assert self._conversations is not None
        index = so_far.sample_index
        number = draw * self.plan.size + index
        seed = seed_of(self.plan.seed_of_sample(draw, index), "environment")
        if kept is None:
            self._conversations.start(number, so_far, seed)
        else:
            turn = so_far.response_token_ids[turn_start(so_far) :]
            text = "" if kept.unanswered is None else self._engine.text_of(turn)
            self._conversations.restore(number, so_far, seed, kept, text)
        self._starting.add(number)

    def _continue_conversations(self, num_running: int, step_seconds: float) -> None:
        """Continue or finish the samples whose environments have answered."""
        if self._conversations is None:
            return
        for event in self._conversations.events(num_running + len(self._queue), step_seconds):
            draw, index = divmod(event.number, self.plan.size)
            self._starting.discard(event.number)
            group = self.open[draw]
            if isinstance(event, NextTurn):
                group.rollouts[index] = event.so_far
                self._queue.append(self._turn_request(draw, event.so_far, event.observed))
            else:
                group.environment_outcomes[index] = event.outcome
                self._store_response(group, event.rollout)

    def _turn_request(
        self, draw: int, so_far: Rollout, observed: np.ndarray = NO_TOKENS
    ) -> Request:
        """Build the request that begins a turn after `observed`, or continues it."""
        num_turn_tokens = 0
        if not len(observed):
            num_turn_tokens = len(so_far.response_token_ids) - turn_start(so_far)
        return self.plan.request(draw, so_far, observed, num_turn_tokens=num_turn_tokens)

    def conversations_of(self, draw: int) -> dict[int, KeptConversation]:
        """Return how open conversations of a group continue in another process, by index."""
        if self._conversations is None:
            return {}
        first = draw * self.plan.size
        kept = ((index, self._conversations.kept(first + index)) for index in range(self.plan.size))
        return {index: each for index, each in kept if each is not None}

    def _end_conversations(self, numbers: Iterable[int]) -> None:
        """End the environments of these requests."""
        if self._conversations is not None:
            self._conversations.end(numbers)
        self._starting -= set(numbers)

    def _store_response(self, group: OpenGroup, rollout: Rollout) -> None:
        """Store a response; if it is finished, decode it and request its rewards."""
        index = rollout.sample_index
        group.rollouts[index] = rollout
        if not is_finished(rollout) or self._draws is None:
            return
        texts = [self._engine.text_of(turn) for turn in turns_of(rollout)]
        rollout = group.rollouts[index] = replace(rollout, text="\n".join(texts))
        if self.error is None:
            self._begin_rewards(rollout, group.draw)
        self._note_sampled(group)

    def _begin_rewards(self, rollout: Rollout, draw: int) -> None:
        assert self._rewards is not None
        ticket = self._rewards.begin(rollout)
        self._tickets[ticket] = draw * self.plan.size + rollout.sample_index

    def _note_sampled(self, group: OpenGroup) -> None:
        if group.is_sampled:
            self._sampled.add(group.draw)

    def _response(self, group: OpenGroup, index: int) -> Rollout:
        rollout = group.rollouts[index]
        if rollout is None:
            rollout = new_rollout(self._prompt_of(group.draw), index, self.plan.weight_version)
        return rollout

    def _numbers(self, draws: Iterable[int]) -> set[int]:
        """Return the request numbers of all responses to these draws."""
        size = self.plan.size
        return {draw * size + index for draw in draws for index in range(size)}

    def _store_outcomes(self, number: int, outcomes: Mapping[str, Outcome]) -> None:
        draw, index = divmod(number, self.plan.size)
        if (group := self.open.get(draw)) is None:
            return  # it was dropped
        group.outcomes[index] = dict(outcomes)
        assert self._rewards is not None
        group.reward_sources = self._rewards.sources()
        if index in group.environment_outcomes:
            group.outcomes[index] = {**outcomes, ENVIRONMENT: group.environment_outcomes[index]}
        self._finish_if_rewarded(group)

    def _finish_if_rewarded(self, group: OpenGroup) -> None:
        if len(group.outcomes) < len(group.rollouts):
            return
        num_samples = self.plan.num_samples_of(group)
        selection, is_valid = Selection(True), True
        if self._select is not None:
            scored = self._scored(group)[:num_samples]
            is_valid = any(each.is_valid for each in scored)
            try:
                selection = self._select(scored)
            except UsageError as error:  # of the user's group filter
                self._fail(error)
                return
        group.dropped = selection.dropped
        reason = "" if group.dropped is None else group.dropped.reason
        finished = Finished(selection.is_kept, is_valid, num_samples, reason)
        if self._writer is None or self._bank is None or group.draw in self._on_disk:
            self._report(group.draw, finished)
            return
        written = self._writer.submit(self._bank.append, group)
        self._written.append((written, group.draw, finished))

    def _scored(self, group: OpenGroup) -> list[ScoredRollout]:
        assert self._rewards is not None
        responses = range(len(group.rollouts))
        weighed = self._rewards.weigh(
            [rollout for rollout in group.rollouts if rollout is not None],
            {name: [group.outcomes[n][name] for n in responses] for name in self._reward_names},
        )
        return with_baselines(weighed, [self.plan.num_samples_of(group)])

    def _report_written(self) -> None:
        """Report groups that are on the disk, or that the disk has rejected, and failed trims."""
        while self._trims and self._trims[0].done():
            self._end_write(self._trims.popleft())
        while self._written and self._written[0][0].done():
            written, draw, finished = self._written.popleft()
            self._end_write(written)
            self._report(draw, finished)

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

    def _report(self, draw: int, finished: Finished) -> None:
        assert self._draws is not None
        if draw in self.open:
            self._reported.add(draw)
            self._draws.finish(draw, finished)

    def _fail(self, error: Exception) -> None:
        """Record an error, which all ranks raise after sampling."""
        self.error = error
        if self._draws is not None:
            self._draws.stop_all()
