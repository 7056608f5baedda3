"""A scripted engine, rewards that arrive in any order, and steps with them in one process."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mcore_rl.algorithms.registry import Drop
from mcore_rl.batching.types import Prompt, Rollout, ScoredRollout
from mcore_rl.common import objects
from mcore_rl.hybrid_engine.vllm.generation import Completion, Request, Sampling
from mcore_rl.rewards.parts import weighed
from mcore_rl.rewards.worker import Outcome
from mcore_rl.rollout.admission import StepDecision, StepEnd
from mcore_rl.rollout.comparison import Selection
from mcore_rl.rollout.draws import StepStart
from mcore_rl.rollout.group_plan import GroupPlan
from mcore_rl.rollout.group_sampler import GroupSampler, Rules
from mcore_rl.rollout.scheduler import Select
from mcore_rl.rollout.segments import OpenGroup
from mcore_rl.rollout.user_groups import UserGroups

ROOM = 6
SIZE = 3
MAX_TOKENS = 40
EQUAL = Drop("equal", refill=True)


class ScriptedEngine:
    """Adds a token to each request per step, until the response has `length_of` its number tokens.
    A token encodes the number of its request and the length of the sequence before it."""

    tp_rank = 0

    def __init__(self, length_of: Callable[[int], int]) -> None:
        self.config = SimpleNamespace(max_num_seqs=ROOM, dp_size=1, speculation=None)
        self.running: dict[int, tuple[Request, list[int]]] = {}
        self.ending: set[int] = set()
        self.submitted: list[Request] = []
        self.most_running = 0
        self.batches: list[tuple[int, ...]] = []  # numbers of the requests of each step
        self._length_of = length_of

    @contextmanager
    def generation(self) -> Iterator[Any]:
        yield self
        assert not self.running

    @property
    def num_running(self) -> int:
        return len(self.running)

    def submit(self, request: Request) -> None:
        assert request.number not in self.running
        self.running[request.number] = request, []
        self.submitted.append(request)
        self.most_running = max(self.most_running, len(self.running))

    def end_soon(self, numbers: Sequence[int]) -> None:
        self.drop([each for each in numbers if not self.running[each][1]])
        self.ending |= set(numbers) & self.running.keys()

    def drop(self, numbers: Sequence[int]) -> list[tuple[Request, int]]:
        dropped = [self.running.pop(number) for number in numbers if number in self.running]
        return [(request, len(tokens)) for request, tokens in dropped]

    def step(self) -> list[Completion]:
        found = []
        self.batches.append(tuple(self.running))
        for number, (request, tokens) in list(self.running.items()):
            tokens.append(token(number, len(request.token_ids) + len(tokens)))
            length = len(request.token_ids) - 1 + len(tokens)  # a prompt has one token
            is_stop = length == self._length_of(number)
            if is_stop or number in self.ending:
                del self.running[number]
                self.ending.discard(number)
                ids = np.array(tokens, np.int32)
                reason = "stop" if is_stop else "length"
                found.append(Completion(request, ids, log_probs_of(ids), reason))
        return found

    def of_first_rank(self, mine: Any) -> Any:
        return mine

    def any_rank(self, here: bool) -> bool:
        return here

    def text_of(self, token_ids: np.ndarray, *, with_special: bool = False) -> str:
        return str(token_ids.tolist())


def token(number: int, length: int) -> int:
    return 100 * number + length


def log_probs_of(ids: np.ndarray) -> np.ndarray:
    """Log-probs that tell the tokens they belong to."""
    return -ids.astype(np.float32) / 2**16


def number_of(rollout: Rollout) -> int:
    return int(rollout.response_token_ids[0]) // 100


class ScriptedRewards:
    """Rewards that arrive after a random number of polls, in any order."""

    names = ("length",)
    version = "1"  # of the code

    def __init__(
        self, reward: Callable[[int], float], *, fails_at: int = -1, seed: int = 1
    ) -> None:
        self._reward, self._fails_at = reward, fails_at
        self._open: list[tuple[int, Rollout]] = []
        self._random = random.Random(seed)
        self._is_waiting = False
        self.begun: list[int] = []

    def sources(self) -> dict[str, str]:
        return dict.fromkeys(self.names, self.version)

    find_sources = sources

    def begin(self, rollout: Rollout) -> int:
        self._open.append((len(self.begun), rollout))
        self.begun.append(number_of(rollout))
        return len(self.begun) - 1

    def finished(self) -> list[tuple[int, dict[str, Outcome]]]:
        if 0 <= self._fails_at <= len(self.begun):
            raise RuntimeError("the workers died")
        share, self._is_waiting = (2.0 if self._is_waiting else 0.3), False
        ready = [each for each in self._open if self._random.random() < share]
        self._open = [each for each in self._open if each not in ready]
        return [
            (ticket, {"length": Outcome(self._reward(number_of(rollout)))})
            for ticket, rollout in ready
        ]

    def wait(self) -> None:
        self._is_waiting = True

    def weigh(self, rollouts: Any, outcomes: Any) -> list[ScoredRollout]:
        return weighed(rollouts, outcomes, {"length": 1.0})


def plan(**changes: Any) -> GroupPlan:
    given = dict(num_samples=SIZE, sampling=Sampling(), seed=5, max_tokens=MAX_TOKENS)
    return GroupPlan(**{**given, **changes})


def prompt_of(draw: int) -> Prompt:
    return Prompt(100 + draw, "", "", np.array([draw], np.int32))


def differs(scored: Sequence[ScoredRollout]) -> bool:
    return len({sample.reward for sample in scored}) > 1


def select(scored: Sequence[ScoredRollout]) -> Selection:
    """Replace a group whose rewards do not differ, as a group filter."""
    return Selection(True) if differs(scored) else Selection(False, EQUAL)


def lengths(seed: int) -> Callable[[int], int]:
    return lambda number: random.Random(f"{seed} {number}").randint(1, 12)


class OtherRewards(ScriptedRewards):
    """The rewards of a run that resumes with others than before."""

    names = ("length", "other")

    def finished(self) -> list[tuple[int, dict[str, Outcome]]]:
        return [(t, {**by, "other": Outcome(1.0)}) for t, by in super().finished()]

    def weigh(self, rollouts: Any, outcomes: Any) -> list[ScoredRollout]:
        return weighed(rollouts, outcomes, {"length": 1.0, "other": 1.0})


class Step:
    """A step that has ended."""

    def __init__(
        self, sampler: GroupSampler, start: StepStart, decision: StepDecision, end: StepEnd
    ) -> None:
        self.start, self.decision, self.end = start, decision, end
        self.taken = sampler.groups_of(decision.taken)
        self.replaced = sampler.groups_of(decision.dropped)
        scheduler = sampler.scheduler
        scheduler.forget({*decision.taken, *decision.dropped})
        self.dropped = scheduler.forget(end.dropped)
        self.stale: list[OpenGroup] = []
        self.num_tokens = scheduler.take_num_tokens()


class Steps:
    """Consecutive steps of one engine that stops, without other ranks."""

    def __init__(
        self,
        rules: Rules,
        rewards: Any,
        *,
        engine: Any = None,
        seed: int = 0,
        next_draw: int = 40,
        version: int = 0,
        prompt_of: Callable[[int], Prompt] = prompt_of,
        conversations: Any = None,
        select: Select = select,
        continuing: Sequence[OpenGroup] = (),
        user_groups: UserGroups | None = None,
        **changes: Any,
    ) -> None:
        """The first step has version `version` + 1. `continuing` are groups of an earlier run,
        `changes` those of `plan`."""
        self.engine = engine or ScriptedEngine(lengths(seed))
        self.position, self.version, self._resumed = next_draw, version, list(continuing)
        self.rewards = rewards
        workers = SimpleNamespace(
            engine=self.engine,
            tp_group=0,
            num_tp_groups=1,
            is_leader=True,
            coordinator=0,
            is_coordinator=True,
            rewards=rewards,
            conversations=conversations,
            complete=lambda plan: plan,
        )
        self.sampler = GroupSampler(
            workers,  # type: ignore[arg-type]
            plan(**changes),
            prompt_of,
            rules,
            name="steps",
            next_draw=next_draw,
            groups={each.draw: each.oldest_version or version + 1 for each in continuing},
            select=None if rules.max_refills is None else select,
            user_groups=user_groups,
        )

    @property
    def pending(self) -> list[OpenGroup]:
        """The groups that continue in the next step."""
        return list(self.sampler.scheduler.open.values())

    def step(
        self, *, when_few_are_left: Callable[[], object] | None = None, **options: Any
    ) -> Step:
        """Begin a step with the groups that continue, sample it, and stop."""
        with one_rank():
            return self._step(when_few_are_left, **options)

    def _step(self, when_few_are_left: Callable[[], object] | None, **options: Any) -> Step:
        sampler = self.sampler
        self.version += 1
        start = sampler.begin_step(self.version, next_draw=self.position, **options)
        stale = sampler.scheduler.forget(start.stale)
        sampler.load(self.pending, start.restarted, is_resumed=False)
        sampler.load(self._resumed, is_resumed=True)
        self._resumed = []
        decision = sampler.sample(when_few_are_left=when_few_are_left)
        assert decision is not None
        end = sampler.end_step()
        self.position = sampler.next_draw(self.position, end)
        step = Step(sampler, start, decision, end)
        step.stale = stale
        return step


@contextmanager
def one_rank() -> Iterator[None]:
    """The collectives of a world of one rank."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(objects, "all_gather", lambda mine: [mine])
        patch.setattr(objects, "broadcast", lambda mine, source: mine)
        patch.setattr(objects, "barrier", lambda: None)
        yield
