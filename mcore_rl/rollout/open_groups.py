"""Groups of responses, one per drawn prompt, from the draw to the rewards.

`OpenGroups` starts groups when its engine has room, and sends each response to the rewards as soon
as it ends. `groups` samples a step with it, `continuous` a run.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
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
from mcore_rl.rollout.comparison import Selection
from mcore_rl.rollout.conversations import Conversations, NextTurn, turns_of
from mcore_rl.rollout.dispatch import StepCounts
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

Select = Callable[[Sequence[ScoredRollout]], Selection]


@dataclass(frozen=True, slots=True)
class GroupDecision:
    """A TP group's decision about its groups, broadcast by its first rank.

    Example: `GroupDecision(taken=(96, 98), pending=(97,))`.
    """

    taken: tuple[int, ...] = ()  # draws that the step takes, or may fill up with
    pending: tuple[int, ...] = ()  # draws that resume in a later step
    # rewards of environments, by draw and index
    turns: Mapping[tuple[int, int], tuple[TurnReward, ...]] = field(default_factory=dict)


class OpenGroups(ABC):
    """The groups that an engine samples, on all ranks of its TP group.

    `open` maps draws to groups. `error` is an exception of the rewards, which ends the sampling.
    """

    def __init__(
        self,
        engine: SamplingEngine,
        plan: GroupPlan,
        prompt_of: Callable[[int], Prompt],
        *,
        is_first: bool,
        rewards: RewardStack | None,
        select: Select | None,
        at_once: int,
        waits: bool = False,
        conversations: Conversations | None = None,
    ) -> None:
        """`prompt_of` returns the prompt of one of the run's draws, on every rank. Only the first
        rank of a TP group has `rewards` and `conversations`. `select` decides on a group with its
        rewards; None: all are kept. At most `at_once` responses are sampled at a time. With `waits`
        the engine takes no step until all finished responses are rewarded, so that the result does
        not depend on the speed of rewards."""
        self.plan = plan
        self._engine, self._find_prompt, self._is_first = engine, prompt_of, is_first
        self._prompts: dict[int, Prompt] = {}  # of open groups, by draw
        self._rewards, self._select = rewards, select
        self._at_once, self._waits, self._conversations = at_once, waits, conversations
        self.open: dict[int, OpenGroup] = {}
        self.error: Exception | None = None
        self._counts = StepCounts()
        self._tickets: dict[int, int] = {}  # ticket of a reward -> request
        self._running: set[int] = set()
        self._starting: set[int] = set()  # samples whose environments are being created
        self._queue: deque[Request] = deque()

    # What a way to sample decides; on the first rank

    @abstractmethod
    def schedule(self, num_running: int) -> StreamActions:
        """Return the next actions; must not block."""

    @abstractmethod
    def _next_draw(self) -> int | None:
        """Return a draw whose group starts here; None: none may start now."""

    @abstractmethod
    def _finish_group(
        self, group: OpenGroup, *, is_kept: bool = True, is_valid: bool = True
    ) -> None:
        """Handle a group with all responses and, if groups are compared, all rewards."""

    def _fail(self, error: Exception) -> None:
        """Record an error, which all ranks raise after sampling."""
        self.error = error

    # Called by `run_stream`

    def finished(self, completion: Completion) -> None:
        """Store the new part of a response. If the response has ended, request its rewards."""
        draw, index = divmod(completion.number, self.plan.size)
        group = self._opened(draw)
        so_far = group.rollouts[index]
        if so_far is None:
            prompt = self._prompt_of(draw)
            if self.plan.has_environments:  # its environment may have changed the prompt
                prompt = replace(prompt, token_ids=completion.request.token_ids)
            so_far = new_rollout(prompt, index, self.plan.weight_version)
        rollout = extend_rollout(so_far, completion, self.plan.weight_version)
        self._running.discard(completion.number)
        self._counts.generated_tokens += len(completion.token_ids)
        if not self.plan.has_environments or not is_finished(rollout):
            self._store_response(group, rollout)
            return
        # A turn: its environment decides whether more follow.
        rollout = group.rollouts[index] = replace(rollout, finish_reason=UNFINISHED)
        if (kept := group.conversations.get(index)) is not None:  # it answers in a later step
            group.conversations[index] = replace(kept, unanswered=completion.finish_reason)
        elif self._conversations is not None:
            turn = rollout.response_token_ids[turn_start(rollout) :]
            completion = replace(completion, token_ids=turn)
            self._conversations.turn(completion, rollout, self._engine.text_of(turn))

    def dropped(self, request: Request, num_tokens: int) -> None:
        """Count the tokens of a dropped request, which are not trained on."""
        self._counts.generated_tokens += num_tokens
        if not self._is_first:
            return
        draw, index = divmod(request.number, self.plan.size)
        if index >= self.plan.num_samples_of(self.open[draw]):
            return
        so_far = self._response(self.open[draw], index)
        # Observed tokens count as part of the response, as in finished responses.
        prompt_and_response = len(so_far.prompt.token_ids) + len(so_far.response_token_ids)
        self._counts.left_tokens += len(request.token_ids) - prompt_and_response + num_tokens

    def between_steps(self, num_running: int = 0, step_seconds: float = 0.0) -> None:
        """Collect outcomes of rewards and continue conversations; on the first rank."""
        if self._rewards is None or self.error is not None:
            return
        try:
            if self._waits:
                self._rewards.wait()
            self._continue_conversations(num_running, step_seconds)
            for ticket, outcomes in sorted(self._rewards.finished(), key=itemgetter(0)):
                self._store_outcomes(self._tickets.pop(ticket), outcomes)
        except Exception as error:
            self._fail(error)

    # Internal; on the first rank

    def _new_requests(self, num_running: int) -> list[Request]:
        """Return queued requests, then those of new groups, up to the engine's room."""
        submit: list[Request] = []
        room = self._at_once - num_running
        while len(submit) < room and self._queue:
            submit.append(self._queue.popleft())
        while (
            len(submit) + len(self._starting) < room
            and self._has_room()
            and (draw := self._next_draw()) is not None
        ):
            submit += self._begin_group(draw)
        return submit

    def _after_an_error(self) -> StreamActions:
        """Return the actions that end the stream."""
        self._end_conversations(self._numbers())
        return StreamActions(drop=tuple(self._running))

    def _turns(self, draws: Iterable[int]) -> dict[tuple[int, int], tuple[TurnReward, ...]]:
        """Return the rewards of environments in groups of these draws."""
        return {
            (draw, index): rollout.turn_rewards
            for draw in draws
            for index, rollout in enumerate(self.open[draw].rollouts)
            if rollout is not None and rollout.turn_rewards
        }

    def partition(self, decision: GroupDecision) -> tuple[list[OpenGroup], list[OpenGroup]]:
        """Return the taken groups and the pending groups; on all ranks."""
        for draw in (*decision.taken, *decision.pending):
            self._opened(draw)  # if it has no token yet
        for draw in decision.taken:
            group = self.open[draw]
            for index in range(len(group.rollouts)):
                rollout, turns = self._response(group, index), decision.turns.get((draw, index), ())
                group.rollouts[index] = replace(rollout, turn_rewards=turns)
        return (
            [self.open[draw] for draw in decision.taken],
            [self.open[draw] for draw in decision.pending],
        )

    def _continue(self, group: OpenGroup) -> None:
        """Continue the responses of a group that have not ended, and request the rewards that
        others lack."""
        self._drop_outcomes_of_others(group)
        for index in range(len(group.rollouts)):
            rollout = self._response(group, index)
            if not is_finished(rollout):
                self._continue_response(group, index)
            elif self._rewards is not None and not self._has_rewards(group.outcomes.get(index)):
                group.outcomes.pop(index, None)
                self._tickets[self._rewards.begin(rollout)] = group.draw * self.plan.size + index
        if self._is_rewarded(group):
            self._compare(group)

    def _drop_outcomes_of_others(self, group: OpenGroup) -> None:
        """Drop the outcomes of a group that resumes unless its rewards are those of this run, and
        not others of the same names. Those without a source, as of environments, are the same."""
        if self._rewards is None or not group.outcomes:
            return
        try:
            now, then = self._rewards.find_sources(), group.reward_sources
        except Exception as error:
            self._fail(error)
            return
        if any(now.get(name) != then.get(name) for name in self._reward_names):
            group.outcomes.clear()

    def _has_rewards(self, outcomes: Mapping[str, Outcome] | None) -> bool:
        """Whether a response that resumes has all rewards; an earlier run may have had others."""
        return outcomes is not None and outcomes.keys() >= {*self._reward_names}

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
        return self._conversations is None or self._conversations.has_room(self.plan.size)

    def _begin_group(self, draw: int) -> list[Request]:
        """Return a new group's requests; none if environments have to be created first."""
        group = self._opened(draw)
        # The draw dispatched last need not have the highest number.
        num_draws = draw - self.plan.first_draw + 1
        self._counts.num_draws = max(self._counts.num_draws, num_draws)
        rollouts = [self._response(group, index) for index in range(len(group.rollouts))]
        if self._conversations is None:
            return [self.plan.request(draw, so_far) for so_far in rollouts]
        for so_far in rollouts:
            self._start_conversation(draw, so_far)
        return []

    def _prompt_of(self, draw: int) -> Prompt:
        if draw not in self._prompts:
            self._prompts[draw] = self._find_prompt(draw)
        return self._prompts[draw]

    def _opened(self, draw: int) -> OpenGroup:
        """Return the group of a draw, without responses if it is new."""
        if draw not in self.open:
            size = self.plan.size_of(self._prompt_of(draw))
            self.open[draw] = OpenGroup.new(draw, size)
        return self.open[draw]

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
        if not is_finished(rollout) or not self._is_first:
            return
        texts = [self._engine.text_of(turn) for turn in turns_of(rollout)]
        rollout = group.rollouts[index] = replace(rollout, text="\n".join(texts))
        if self._rewards is not None and self.error is None:
            self._tickets[self._rewards.begin(rollout)] = group.draw * self.plan.size + index
        if group.is_sampled and self._select is None:
            self._finish_group(group)

    def _response(self, group: OpenGroup, index: int) -> Rollout:
        rollout = group.rollouts[index]
        if rollout is None:
            rollout = new_rollout(self._prompt_of(group.draw), index, self.plan.weight_version)
        return rollout

    def _numbers(self, draws: Iterable[int] | None = None) -> set[int]:
        """Return the request numbers of all responses to these draws (default: all open draws)."""
        size = self.plan.size
        chosen = self.open if draws is None else draws
        return {draw * size + index for draw in chosen for index in range(size)}

    def _store_outcomes(self, number: int, outcomes: Mapping[str, Outcome]) -> None:
        draw, index = divmod(number, self.plan.size)
        group = self.open[draw]
        group.outcomes[index] = dict(outcomes)
        assert self._rewards is not None
        group.reward_sources = self._rewards.sources()
        if index in group.environment_outcomes:
            group.outcomes[index] = {**outcomes, ENVIRONMENT: group.environment_outcomes[index]}
        if self._is_rewarded(group):
            self._compare(group)

    def _is_rewarded(self, group: OpenGroup) -> bool:
        return self._select is not None and len(group.outcomes) == len(group.rollouts)

    def _compare(self, group: OpenGroup) -> None:
        assert self._rewards is not None and self._select is not None
        num_samples, responses = self.plan.num_samples_of(group), range(len(group.rollouts))
        weighed = self._rewards.weigh(
            [rollout for rollout in group.rollouts if rollout is not None],
            {name: [group.outcomes[n][name] for n in responses] for name in self._reward_names},
        )
        scored = with_baselines(weighed, [num_samples])[:num_samples]
        try:
            selection = self._select(scored)
        except UsageError as error:  # of the user's group filter
            self._fail(error)
            return
        group.dropped = selection.dropped
        self._finish_group(
            group,
            is_kept=selection.is_kept,
            is_valid=any(each.is_valid for each in scored),
        )
