"""Groups from their draw to their rewards, on an engine that answers as the test says."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mcore_rl.batching.types import Prompt, Rollout, ScoredRollout
from mcore_rl.hybrid_engine.vllm.generation import Completion, Request, Sampling
from mcore_rl.rewards.parts import weighed
from mcore_rl.rewards.worker import Outcome
from mcore_rl.rollout.dealing import Deal, LocalCounters, Wanted
from mcore_rl.rollout.groups import GroupPlan, Groups
from mcore_rl.rollout.stream import run_stream

ROOM = 6


class ScriptedEngine:
    """A request ends in one of the next steps, drawn at random; its answer is its number."""

    tp_rank = 0

    def __init__(self, seed: int = 0) -> None:
        self.config = SimpleNamespace(max_num_seqs=ROOM, dp_size=1)
        self.running: dict[int, Request] = {}
        self.most_running = 0
        self._random = random.Random(seed)

    @contextmanager
    def generation(self) -> Iterator[Any]:
        yield self
        assert not self.running

    @property
    def num_running(self) -> int:
        return len(self.running)

    def submit(self, request: Request) -> None:
        assert request.number not in self.running
        self.running[request.number] = request
        self.most_running = max(self.most_running, len(self.running))

    def end_soon(self, numbers: Sequence[int]) -> None:
        assert not numbers

    def drop(self, numbers: Sequence[int] = ()) -> None:
        for number in numbers:
            self.running.pop(number, None)

    def step(self) -> list[Completion]:
        ending = [number for number in self.running if self._random.random() < 0.3]
        for number in ending:
            del self.running[number]
        ids, log_probs = np.zeros(1, np.int32), np.zeros(1, np.float32)
        return [Completion(number, ids + number, log_probs, "stop") for number in ending]

    def of_first_rank(self, mine: Any) -> Any:
        return mine

    def any_rank(self, here: bool) -> bool:
        return here

    def rollout(self, prompt: Prompt, index: int, found: Completion, version: int) -> Rollout:
        ids, log_probs = found.token_ids, found.log_probs
        return Rollout(prompt, index, "", ids, log_probs, found.finish_reason, version)


class ScriptedRewards:
    """The reward of a response comes some looks after it was handed over, others' before it."""

    names = ("length",)

    def __init__(self, reward: Callable[[int], float], *, fails_at: int = -1) -> None:
        self._reward, self._fails_at = reward, fails_at
        self._open: list[tuple[int, Rollout]] = []
        self._random = random.Random(1)
        self.num_begun = 0

    def begin(self, rollout: Rollout) -> int:
        self._open.append((self.num_begun, rollout))
        self.num_begun += 1
        return self.num_begun - 1

    def finished(self, share: float = 0.3) -> list[tuple[int, dict[str, Outcome]]]:
        if 0 <= self._fails_at <= self.num_begun:
            raise RuntimeError("the workers died")
        ready = [each for each in self._open if self._random.random() < share]
        self._open = [each for each in self._open if each not in ready]
        return [
            (ticket, {"length": Outcome(self._reward(int(rollout.response_token_ids[0])))})
            for ticket, rollout in ready
        ]

    def wait(self) -> None:
        now, self.finished = self.finished(share=2.0), lambda: now  # type: ignore[method-assign]

    def weigh(self, rollouts: Any, outcomes: Any) -> list[ScoredRollout]:
        return weighed(rollouts, outcomes, {"length": 1.0})


def plan(**changes: Any) -> GroupPlan:
    given = dict(num_samples=3, sampling=Sampling(), max_tokens=9, seed=5, first_draw=40)
    return GroupPlan(**{**given, "weight_version": 2, **changes})


def prompt_of(draw: int) -> Prompt:
    return Prompt(100 + draw, "", "", np.array([draw], np.int32))


def sampled(
    wanted: Wanted, rewards: ScriptedRewards, *, seed: int = 0, **changes: Any
) -> tuple[Groups, ScriptedEngine]:
    engine = ScriptedEngine(seed)

    def differs(scored: Sequence[ScoredRollout]) -> bool:
        return len({sample.reward for sample in scored}) > 1

    groups = Groups(
        engine,  # type: ignore[arg-type]
        plan(**changes),
        prompt_of,
        deal=Deal(wanted, LocalCounters(), "step"),
        rewards=rewards,  # type: ignore[arg-type]
        differs=differs if wanted.compares else None,
    )
    run_stream(engine, groups)  # type: ignore[arg-type]
    groups.wait()
    return groups, engine


@pytest.mark.parametrize("seed", range(5))
def test_every_response_is_rewarded_and_the_engine_is_kept_busy(seed: int) -> None:
    groups, engine = sampled(Wanted.of(7), ScriptedRewards(float), seed=seed)
    assert sorted(groups.sampled.rollouts) == list(range(21)) == sorted(groups.sampled.outcomes)
    for number, rollout in groups.sampled.rollouts.items():
        assert rollout.prompt.index == 100 + number // 3 and rollout.sample_index == number % 3
        assert groups.sampled.outcomes[number]["length"].reward == number
    # A group begins as long as there is room, and goes in whole.
    assert ROOM <= engine.most_running < ROOM + 3


@pytest.mark.parametrize("seed", range(5))
def test_groups_that_teach_nothing_are_replaced_while_others_run(seed: int) -> None:
    # Of draws 0, 1, 4 and 6 all responses are worth the same.
    def reward(number: int) -> float:
        return 0.0 if number // 3 in (0, 1, 4, 6) else float(number)

    groups, _ = sampled(Wanted.of(4, max_refills=5), ScriptedRewards(reward), seed=seed)
    assert groups.last == 7  # 2, 3, 5 and 7 are the four
    assert sorted(groups.sampled.outcomes) == list(range(24))


def test_one_greedy_response_goes_with_each_group_and_is_not_compared() -> None:
    def reward(number: int) -> float:
        return 1.0 if number % 4 == 3 else 0.0  # the greedy one is worth more

    wanted = Wanted.of(2, max_refills=1)
    groups, _ = sampled(wanted, ScriptedRewards(reward), with_greedy=True)
    assert groups.last == 3  # no group has a difference of its own
    assert len(groups.sampled.outcomes) == 4 * 4
    assert [groups.plan.is_greedy(number) for number in range(5)] == [False] * 3 + [True, False]


def test_rewards_that_die_end_the_step_at_once_and_are_told() -> None:
    groups, _ = sampled(Wanted.of(50), ScriptedRewards(float, fails_at=10))
    assert str(groups.sampled.error) == "the workers died"
    assert len(groups.sampled.rollouts) < 60
