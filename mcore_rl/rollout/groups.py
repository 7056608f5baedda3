"""Groups of responses, one to each prompt that is drawn, from the draw to their rewards.

A conductor of `stream`: draws prompts as its engine has room, hands each response to the rewards as
soon as it ends, and tells the deal what became of a group. Where a step takes the groups that
finish first, what still runs then is stopped: it is dropped, or goes on in a later step from the
tokens that it has.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cache
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
from mcore_rl.hybrid_engine.vllm.engine import VLLMEngine
from mcore_rl.hybrid_engine.vllm.generation import Completion, Request, Sampling, seed_of
from mcore_rl.rewards.functions import ENVIRONMENT
from mcore_rl.rewards.stack import RewardStack
from mcore_rl.rewards.worker import Outcome
from mcore_rl.rollout.conversations import Conversations, Next, turns_of
from mcore_rl.rollout.dealing import Deal
from mcore_rl.rollout.segments import OpenGroup, begun, extended, is_finished
from mcore_rl.rollout.stream import Orders

_NOTHING = np.empty(0, dtype=np.int32)
Differs = Callable[[Sequence[ScoredRollout]], bool]


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """How every prompt of a step is answered."""

    num_samples: int
    sampling: Sampling
    max_tokens: int
    seed: int  # of the run
    first_draw: int  # what the run has drawn before this step
    weight_version: int
    with_routes: bool = False
    with_greedy: bool = False  # one more response, at temperature 0
    keeps: bool = False  # what is stopped goes on in a later step
    order: tuple[int, ...] = ()  # of the step's first draws; the others as they are counted
    converses: bool = False  # samples have environments, and several turns
    max_turn_tokens: int | None = None  # None: what is left of `max_tokens`
    keeps_kv: bool = False  # of what goes on after an update

    @property
    def size(self) -> int:
        """Responses to a prompt."""
        return self.num_samples + self.with_greedy

    def is_greedy(self, number: int) -> bool:
        """Whether a request of this number is the one at temperature 0."""
        return number % self.size >= self.num_samples

    def draw(self, count: int) -> int:
        """The run's number of the draw that the step counts as `count`."""
        return self.first_draw + (self.order[count] if count < len(self.order) else count)

    def seed_of_sample(self, draw: int, index: int) -> int:
        """It depends on the run's seed, the draw and the place: not on step nor engine."""
        return seed_of(seed_of(self.seed, "draw", draw), index)

    def request(self, draw: int, so_far: Rollout, observed: np.ndarray = _NOTHING) -> Request:
        """To begin a response, or to go on with it, behind what was observed.

        Its random stream is the sample's, of its own for each number of tokens that there are.
        """
        index = so_far.sample_index
        num_tokens = len(so_far.response_token_ids) + len(observed)
        seed = self.seed_of_sample(draw, index)
        is_sample = index < self.num_samples
        left = self.max_tokens - num_tokens
        return Request(
            number=draw * self.size + index,
            token_ids=np.concatenate(
                [so_far.prompt.token_ids, so_far.response_token_ids, observed], dtype=np.int32
            ),
            max_tokens=left if self.max_turn_tokens is None else min(left, self.max_turn_tokens),
            sampling=self.sampling
            if is_sample
            else Sampling(temperature=0.0, stop=self.sampling.stop),
            seed=seed_of(seed, "after", num_tokens) if num_tokens else seed,
            with_routes=self.with_routes and is_sample,
            cache_name=self._cache_name(so_far) if self.keeps_kv else "",
            num_own=0 if len(observed) else _num_generated_last(so_far),
        )

    def _cache_name(self, so_far: Rollout) -> str:
        """The version that a response was begun with: what goes on finds its own keys and values,
        and nothing that begins finds those of earlier weights."""
        oldest = so_far.oldest_version if len(so_far.response_token_ids) else self.weight_version
        return f"version {oldest}"


def _num_generated_last(rollout: Rollout) -> int:
    """Tokens at the end of a response that were sampled."""
    if rollout.is_generated is None:
        return len(rollout.response_token_ids)
    others = np.flatnonzero(~rollout.is_generated)
    return len(rollout.is_generated) - (int(others[-1]) + 1 if len(others) else 0)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What becomes of a TP group's groups; told by its first rank to the others."""

    taken: tuple[int, ...] = ()  # draws that the step takes, or may fill up with
    pending: tuple[int, ...] = ()  # that go on in a later step
    # What environments have paid, by draw and place.
    turns: Mapping[tuple[int, int], tuple[TurnReward, ...]] = field(default_factory=dict)


@dataclass(slots=True)
class Tally:
    """What one TP group, or all of them, have done in a step."""

    num_draws: int = 0  # of the step, counted from its first
    started: int = 0
    refills: int = 0  # of these, in the place of groups that do not differ
    stale: int = 0  # of those before, dropped at once for their age
    dropped: int = 0  # these and others
    pending: int = 0
    generated_tokens: int = 0
    left_samples: int = 0  # of groups that were dropped or are pending
    left_tokens: int = 0  # of these so far

    def __add__(self, other: Tally) -> Tally:
        counts = {f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)}
        return replace(Tally(**counts), num_draws=max(self.num_draws, other.num_draws))


class Groups:
    """Conducts an engine through its part of a step's draws, and of what earlier steps have left.

    `open` has the groups by their draw; `error` what the rewards have raised, which is to be told
    to all ranks.
    """

    def __init__(
        self,
        engine: VLLMEngine,
        plan: GroupPlan,
        prompt_of: Callable[[int], Prompt],
        *,
        deal: Deal | None,
        rewards: RewardStack | None,
        differs: Differs | None,
        at_once: int,
        pending: Sequence[OpenGroup] = (),
        reserved: frozenset[int] = frozenset(),
        stale: Sequence[OpenGroup] = (),
        waits: bool = False,
        conversations: Conversations | None = None,
    ) -> None:
        """`prompt_of` gives the prompt of a draw of the run, on every rank. `deal`, `rewards` and
        `conversations` are there on the first rank of a TP group. `differs` says of a group what
        the deal wants to know; None: nothing. `at_once` responses are sampled at a time. Of
        `pending` the draws in `reserved` are sampled to their end and taken, if they differ where
        groups are compared; the `stale` others have been dropped. `waits`: no step of the engine
        before all that has ended is rewarded, so that the rewards' speed decides nothing."""
        self.plan = plan
        self._engine, self._prompt_of = engine, cache(prompt_of)
        self._deal, self._rewards, self._differs = deal, rewards, differs
        self._at_once, self._reserved, self._waits = at_once, reserved, waits
        self._conversations = conversations
        self.open = {group.draw: group for group in pending}
        self.error: Exception | None = None
        self._tally = Tally(
            stale=len(stale),
            left_samples=len(stale) * plan.num_samples,
            left_tokens=sum(group.num_tokens(plan.num_samples) for group in stale),
        )
        self._tickets: dict[int, int] = {}  # of the rewards -> request
        self._ranks: dict[int, int] = {}  # of groups that have finished, by draw
        self._running: set[int] = set()
        self._starting: set[int] = set()  # whose environment is being made
        self._queue: deque[Request] = deque()
        self._is_ending = False
        if deal is not None:
            self._go_on(pending)

    # The stream's conductor

    def orders(self, num_running: int) -> Orders:
        """What waits, and more groups, as many as the engine has room for; once the step has enough
        groups, that the others end."""
        assert self._deal is not None, "not the first rank of its TP group"
        if self.error is not None:
            self._leave(self._numbers())
            return Orders(drop=tuple(self._running))
        submit: list[Request] = []
        room = self._at_once - num_running
        while len(submit) < room and self._queue:
            submit.append(self._queue.popleft())
        while (
            len(submit) + len(self._starting) < room
            and self._may_begin()
            and (count := self._deal.next()) is not None
        ):
            submit += self._begin(self.plan.draw(count))
        unneeded = self._ended()
        submit = [each for each in submit if each.number not in unneeded]
        self._running |= {each.number for each in submit}
        stopped = tuple(sorted(unneeded & self._running))
        more = bool(self._queue) or self._num_conversations > 0 or not self._deal.is_over
        more = more or self._deal.is_undecided
        if self.plan.keeps:
            return Orders(tuple(submit), end=stopped, more=more)
        self._running -= set(stopped)
        return Orders(tuple(submit), drop=stopped, more=more)

    def finished(self, completion: Completion) -> None:
        """More of a response is kept, or if that was all, it is on its way to its rewards."""
        draw, index = divmod(completion.number, self.plan.size)
        group = self.open.setdefault(draw, OpenGroup.new(draw, self.plan.size))
        so_far = group.rollouts[index]
        if so_far is None:
            prompt = self._prompt_of(draw)
            if self.plan.converses:  # its environment may have begun with something else
                prompt = replace(prompt, token_ids=completion.request.token_ids)
            so_far = begun(prompt, index, self.plan.weight_version)
        rollout = extended(so_far, completion, self.plan.weight_version)
        self._running.discard(completion.number)
        self._tally.generated_tokens += len(completion.token_ids)
        if not self.plan.converses or not is_finished(rollout):
            self._keep(group, rollout)
            return
        # A turn: whether others follow is known where its environment is asked.
        rollout = group.rollouts[index] = replace(rollout, finish_reason=UNFINISHED)
        if self._conversations is not None:
            text = self._engine.text_of(completion.token_ids)
            self._conversations.turn(completion, rollout, text)

    def dropped(self, request: Request, num_tokens: int) -> None:
        """What it had is counted, though nothing is learned from it."""
        self._tally.generated_tokens += num_tokens
        if self._deal is None or self.plan.is_greedy(request.number):
            return
        draw, index = divmod(request.number, self.plan.size)
        so_far = self._so_far(self.open[draw], index)
        # What was observed counts as part of the response, as in those that ended.
        prompt_and_response = len(so_far.prompt.token_ids) + len(so_far.response_token_ids)
        self._tally.left_tokens += len(request.token_ids) - prompt_and_response + num_tokens

    def between_steps(self, num_running: int = 0, step_seconds: float = 0.0) -> None:
        """Takes what is rewarded, and has the rest go on; on the first rank."""
        if self._rewards is None or self.error is not None:
            return
        try:
            if self._waits:
                self._rewards.wait()
            self._converse(num_running, step_seconds)
            for ticket, outcomes in sorted(self._rewards.finished(), key=itemgetter(0)):
                self._rewarded(self._tickets.pop(ticket), outcomes)
        except Exception as error:
            self._fail(error)

    # After it

    def wait(self) -> None:
        """Until all that was sampled is rewarded."""
        try:
            if self._rewards is not None and self.error is None:
                self._rewards.wait()
        except Exception as error:
            self._fail(error)
        self.between_steps()

    def verdict(self) -> Verdict:
        """After `wait`, on the first rank."""
        if self.error is not None:
            return Verdict()
        others = sorted(self.open.keys() - self._taken())
        turns = {
            (draw, index): rollout.turn_rewards
            for draw in self._taken()
            for index, rollout in enumerate(self.open[draw].rollouts)
            if rollout is not None and rollout.turn_rewards
        }
        pending = tuple(others) if self.plan.keeps else ()
        return Verdict(tuple(sorted(self._taken())), pending, turns)

    def parted(self, verdict: Verdict) -> tuple[list[OpenGroup], list[OpenGroup]]:
        """The groups that are taken, and those that are pending; on all ranks."""
        for draw in (*verdict.taken, *verdict.pending):
            self.open.setdefault(draw, OpenGroup.new(draw, self.plan.size))  # none had a token
        for draw in verdict.taken:
            group = self.open[draw]
            for index in range(self.plan.size):
                rollout, turns = self._so_far(group, index), verdict.turns.get((draw, index), ())
                group.rollouts[index] = replace(rollout, turn_rewards=turns)
        return (
            [self.open[draw] for draw in verdict.taken],
            [self.open[draw] for draw in verdict.pending],
        )

    def tally(self) -> Tally:
        """The counts of this TP group; on its first rank, after `wait`."""
        assert self._deal is not None
        taken = self._taken()
        left = [group for draw, group in self.open.items() if draw not in taken]
        left_tokens = sum(group.num_tokens(self.plan.num_samples) for group in left)
        return replace(
            self._tally,
            started=self._deal.num_given,
            refills=self._deal.num_refills,
            dropped=self._tally.stale + (0 if self.plan.keeps else len(left)),
            pending=len(left) if self.plan.keeps else 0,
            left_samples=self._tally.left_samples + len(left) * self.plan.num_samples,
            left_tokens=self._tally.left_tokens + left_tokens,
        )

    # Inside; on the first rank

    def _fail(self, error: Exception) -> None:
        """It is told to all ranks once they have sampled, and they raise together."""
        self.error = error
        if self._deal is not None:
            self._deal.fail()

    def _go_on(self, pending: Sequence[OpenGroup]) -> None:
        """With what earlier steps have left: what must end in this one before the rest."""
        for group in sorted(pending, key=lambda each: each.draw not in self._reserved):
            for index, rollout in enumerate(group.rollouts):
                if rollout is None or not is_finished(rollout):
                    self._queue.append(self.plan.request(group.draw, self._so_far(group, index)))
            if group.is_sampled and self._differs is None:
                self._take(group)
            elif self._is_rewarded(group):
                self._compare(group)

    @property
    def _num_conversations(self) -> int:
        return 0 if self._conversations is None else self._conversations.num_open

    def _may_begin(self) -> bool:
        return self._conversations is None or self._conversations.has_room(self.plan.size)

    def _begin(self, draw: int) -> list[Request]:
        """The requests of a new group; where it has environments first, they come later."""
        group = self.open[draw] = OpenGroup.new(draw, self.plan.size)
        # Not the count of draws: the last that is dealt need not be the last of the file.
        num_draws = draw - self.plan.first_draw + 1
        self._tally.num_draws = max(self._tally.num_draws, num_draws)
        begun = [self._so_far(group, index) for index in range(self.plan.size)]
        if self._conversations is None:
            return [self.plan.request(draw, so_far) for so_far in begun]
        for index, so_far in enumerate(begun):
            number, seed = draw * self.plan.size + index, self.plan.seed_of_sample(draw, index)
            self._conversations.start(number, so_far, seed_of(seed, "environment"))
            self._starting.add(number)
        return []

    def _converse(self, num_running: int, step_seconds: float) -> None:
        """Has samples go on whose environments have answered, or end."""
        if self._conversations is None:
            return
        for event in self._conversations.events(num_running + len(self._queue), step_seconds):
            draw, index = divmod(event.number, self.plan.size)
            self._starting.discard(event.number)
            group = self.open[draw]
            if isinstance(event, Next):
                group.rollouts[index] = event.so_far
                self._queue.append(self.plan.request(draw, event.so_far, event.observed))
            else:
                group.paid[index] = event.outcome
                self._keep(group, event.rollout)

    def _leave(self, numbers: Iterable[int]) -> None:
        """No environment of these is wanted any more."""
        if self._conversations is not None:
            self._conversations.end(numbers)
        self._starting -= set(numbers)

    def _keep(self, group: OpenGroup, rollout: Rollout) -> None:
        """What there is of a response; if it is finished, for its rewards."""
        index = rollout.sample_index
        if is_finished(rollout) and self._deal is not None:
            texts = [self._engine.text_of(turn) for turn in turns_of(rollout)]
            rollout = replace(rollout, text="\n".join(texts))
        group.rollouts[index] = rollout
        if is_finished(rollout) and self._deal is not None:
            self._reward(group, index)

    def _so_far(self, group: OpenGroup, index: int) -> Rollout:
        found = group.rollouts[index]
        if found is None:
            found = begun(self._prompt_of(group.draw), index, self.plan.weight_version)
        return found

    def _ended(self) -> set[int]:
        """Requests that the step no longer needs, whether they run or not; told once."""
        assert self._deal is not None
        if self._is_ending or not self._deal.takes_first or not self._deal.has_enough():
            return set()
        self._is_ending = True
        needed = self._numbers(self._reserved)
        self._queue = deque(each for each in self._queue if each.number in needed)
        unneeded = self._numbers() - needed
        self._leave(unneeded)
        return unneeded

    def _numbers(self, draws: Iterable[int] | None = None) -> set[int]:
        """Request numbers of all responses to these draws; default: to all open ones."""
        size = self.plan.size
        chosen = self.open if draws is None else draws
        return {draw * size + index for draw in chosen for index in range(size)}

    def _reward(self, group: OpenGroup, index: int) -> None:
        rollout = group.rollouts[index]
        assert rollout is not None
        if self._rewards is not None and self.error is None:
            self._tickets[self._rewards.begin(rollout)] = group.draw * self.plan.size + index
        if group.is_sampled and self._differs is None:
            self._take(group)

    def _rewarded(self, number: int, outcomes: Mapping[str, Outcome]) -> None:
        draw, index = divmod(number, self.plan.size)
        group = self.open[draw]
        paid = {ENVIRONMENT: group.paid[index]} if index in group.paid else {}
        group.outcomes[index] = {**outcomes, **paid}
        if self._is_rewarded(group):
            self._compare(group)

    def _is_rewarded(self, group: OpenGroup) -> bool:
        return self._differs is not None and len(group.outcomes) == self.plan.size

    def _compare(self, group: OpenGroup) -> None:
        assert self._rewards is not None and self._differs is not None
        num_samples, responses = self.plan.num_samples, range(self.plan.size)
        weighed = self._rewards.weigh(
            [rollout for rollout in group.rollouts if rollout is not None],
            {name: [group.outcomes[n][name] for n in responses] for name in group.outcomes[0]},
        )
        scored = with_baselines(weighed, num_samples)[:num_samples]
        self._take(
            group,
            differs=self._differs(scored),
            is_valid=any(each.is_valid for each in scored),
        )

    def _take(self, group: OpenGroup, *, differs: bool = True, is_valid: bool = True) -> None:
        assert self._deal is not None
        self._ranks[group.draw] = self._deal.finished(
            differs=differs, is_valid=is_valid, is_reserved=group.draw in self._reserved
        )

    def _taken(self) -> set[int]:
        """Draws that the step takes; after `wait`, when no place is open any more."""
        assert self._deal is not None
        places = self._deal.places
        return {draw for draw, rank in self._ranks.items() if rank <= places}
