"""Groups of responses, one to each prompt that is drawn, from the draw to their rewards.

A conductor of `stream`: draws prompts as its engine has room, hands each response to the rewards as
soon as it ends, and tells the deal what became of a group.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from mcore_rl.batching.types import Prompt, Rollout, ScoredRollout
from mcore_rl.hybrid_engine.vllm.engine import VLLMEngine
from mcore_rl.hybrid_engine.vllm.generation import Completion, Request, Sampling, seed_of
from mcore_rl.rewards.stack import RewardStack
from mcore_rl.rewards.worker import Outcome
from mcore_rl.rollout.dealing import Deal
from mcore_rl.rollout.stream import Orders

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

    @property
    def size(self) -> int:
        """Responses to a prompt."""
        return self.num_samples + self.with_greedy

    def is_greedy(self, number: int) -> bool:
        """Whether a request of this number is the one at temperature 0."""
        return number % self.size >= self.num_samples

    def requests(self, draw: int, prompt: Prompt) -> list[Request]:
        """Those of the step's draw number `draw`."""
        greedy = Sampling(temperature=0.0)
        seed = seed_of(self.seed, "draw", self.first_draw + draw)
        return [
            Request(
                number=draw * self.size + index,
                token_ids=prompt.token_ids,
                max_tokens=self.max_tokens,
                sampling=self.sampling if index < self.num_samples else greedy,
                seed=seed_of(seed, index),
                with_routes=self.with_routes and index < self.num_samples,
            )
            for index in range(self.size)
        ]


@dataclass(slots=True)
class Sampled:
    """What a TP group has sampled in a step; on all of its ranks, rewards on the first alone.

    By the number of the request: its draw x `GroupPlan.size` + its place among the responses.
    """

    rollouts: dict[int, Rollout] = field(default_factory=dict)
    outcomes: dict[int, Mapping[str, Outcome]] = field(default_factory=dict)
    error: Exception | None = None  # of the rewards, to be told to all ranks


class Groups:
    """Conducts an engine through its part of a step's draws."""

    def __init__(
        self,
        engine: VLLMEngine,
        plan: GroupPlan,
        prompt_of: Callable[[int], Prompt],
        *,
        deal: Deal | None,
        rewards: RewardStack | None,
        differs: Differs | None,
    ) -> None:
        """`prompt_of` gives the prompt of a draw of the step, on every rank. `deal` and `rewards`
        are there on the first rank of a TP group. `differs` says of a group what the deal wants to
        know; None: nothing."""
        self.plan = plan
        self._engine, self._prompt_of = engine, prompt_of
        self._deal, self._rewards, self._differs = deal, rewards, differs
        self._tickets: dict[int, int] = {}  # of the rewards -> request
        self._missing: dict[int, int] = {}  # draw -> responses without rewards
        self.sampled = Sampled()

    @property
    def last(self) -> int:
        """The highest draw that was given here, -1 without any."""
        return -1 if self._deal is None else self._deal.last

    def orders(self, num_running: int) -> Orders:
        """More groups, as many as the engine has room for."""
        assert self._deal is not None, "not the first rank of its TP group"
        if self.sampled.error is not None:
            return Orders(drop=tuple(self._unfinished()))
        submit: list[Request] = []
        room = self._engine.config.max_num_seqs - num_running
        while len(submit) < room and (draw := self._deal.next()) is not None:
            self._missing[draw] = self.plan.size
            submit += self.plan.requests(draw, self._prompt_of(draw))
        return Orders(tuple(submit), more=not self._deal.is_over)

    def finished(self, completion: Completion) -> None:
        """The response is kept, and is on its way to its rewards."""
        draw, index = divmod(completion.number, self.plan.size)
        rollout = self._engine.rollout(
            self._prompt_of(draw), index, completion, self.plan.weight_version
        )
        self.sampled.rollouts[completion.number] = rollout
        if self._rewards is not None and self.sampled.error is None:
            self._tickets[self._rewards.begin(rollout)] = completion.number

    def between_steps(self) -> None:
        """Takes what is rewarded, and has the rest go on; on the first rank."""
        if self._rewards is None or self.sampled.error is not None:
            return
        try:
            for ticket, outcomes in self._rewards.finished():
                self._rewarded(self._tickets.pop(ticket), outcomes)
        except Exception as error:  # told to all ranks, which raise together
            self.sampled.error = error

    def wait(self) -> None:
        """Until all that was sampled is rewarded."""
        try:
            if self._rewards is not None and self.sampled.error is None:
                self._rewards.wait()
        except Exception as error:
            self.sampled.error = error
        self.between_steps()

    def _rewarded(self, number: int, outcomes: Mapping[str, Outcome]) -> None:
        self.sampled.outcomes[number] = outcomes
        draw = number // self.plan.size
        self._missing[draw] -= 1
        if self._missing[draw] or self._differs is None:
            return
        assert self._deal is not None and self._rewards is not None
        numbers = range(draw * self.plan.size, draw * self.plan.size + self.plan.num_samples)
        scored = self._rewards.weigh(
            [self.sampled.rollouts[each] for each in numbers],
            {
                name: [self.sampled.outcomes[each][name] for each in numbers]
                for name in self._rewards.names
            },
        )
        self._deal.finished(
            differs=self._differs(scored), is_valid=any(each.is_valid for each in scored)
        )

    def _unfinished(self) -> list[int]:
        first = [draw * self.plan.size for draw in self._missing]
        every = [number + index for number in first for index in range(self.plan.size)]
        return [number for number in every if number not in self.sampled.rollouts]
