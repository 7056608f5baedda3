"""Groups from their draw to their rewards, on a scripted engine."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mcore_rl.algorithms.registry import Drop
from mcore_rl.batching.types import Prompt, Rollout, ScoredRollout, with_baselines
from mcore_rl.hybrid_engine.vllm.generation import Completion, Request, Sampling
from mcore_rl.rewards.parts import weighed
from mcore_rl.rewards.worker import Outcome
from mcore_rl.rollout.comparison import Selection
from mcore_rl.rollout.dispatch import Counters, Dispatcher, LocalCounters, SamplingTarget
from mcore_rl.rollout.group_plan import GroupPlan
from mcore_rl.rollout.groups import GroupScheduler
from mcore_rl.rollout.segments import OpenGroup, new_rollout
from mcore_rl.rollout.stream import run_stream

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
    given = dict(num_samples=SIZE, sampling=Sampling(), seed=5, first_draw=40)
    return GroupPlan(**{**given, "max_tokens": MAX_TOKENS, "weight_version": 2, **changes})


def prompt_of(draw: int) -> Prompt:
    return Prompt(100 + draw, "", "", np.array([draw], np.int32))


def differs(scored: Sequence[ScoredRollout]) -> bool:
    return len({sample.reward for sample in scored}) > 1


def select(scored: Sequence[ScoredRollout]) -> Selection:
    """Replace a group whose rewards do not differ, as a group filter."""
    return Selection(True) if differs(scored) else Selection(False, EQUAL)


def lengths(seed: int) -> Callable[[int], int]:
    return lambda number: random.Random(f"{seed} {number}").randint(1, 12)


def sampled(
    target: SamplingTarget,
    rewards: ScriptedRewards,
    *,
    seed: int = 0,
    counters: Counters | None = None,
    pending: Sequence[OpenGroup] = (),
    reserved: frozenset[int] = frozenset(),
    at_once: int = ROOM,
    waits: bool = False,
    prompt_of: Callable[[int], Prompt] = prompt_of,
    **changes: Any,
) -> tuple[GroupScheduler, ScriptedEngine]:
    engine = ScriptedEngine(lengths(seed))
    groups = GroupScheduler(
        engine,  # type: ignore[arg-type]
        plan(**changes),
        prompt_of,
        dispatcher=Dispatcher(
            target,
            counters or LocalCounters(),
            "step",
            places=Counter(changes.get("sizes", ())),
        ),
        rewards=rewards,  # type: ignore[arg-type]
        select=select if target.compares else None,
        at_once=at_once,
        pending=pending,
        reserved=reserved,
        waits=waits,
    )
    run_stream(engine, groups)  # type: ignore[arg-type]
    groups.wait()
    return groups, engine


def draws(groups: Sequence[OpenGroup]) -> list[int]:
    return [group.draw for group in groups]


@pytest.mark.parametrize("seed", range(5))
def test_every_response_is_rewarded_and_the_engine_stays_full(seed: int) -> None:
    groups, engine = sampled(SamplingTarget.of(7), ScriptedRewards(float), seed=seed)
    taken, pending = groups.partition(groups.decide())
    assert draws(taken) == list(range(40, 47)) and not pending
    for group in taken:
        for index, rollout in enumerate(group.rollouts):
            assert rollout is not None and rollout.sample_index == index
            number = group.draw * SIZE + index
            assert rollout.prompt.index == 100 + group.draw and number_of(rollout) == number
            assert len(rollout.response_token_ids) == lengths(seed)(number)
            assert rollout.text == str(rollout.response_token_ids.tolist())
            assert group.outcomes[index]["length"].reward == number
    # A group starts while there is room, with all its responses.
    assert ROOM <= engine.most_running < ROOM + SIZE


def test_engine_runs_at_most_its_share() -> None:
    groups, engine = sampled(SamplingTarget.of(7), ScriptedRewards(float), at_once=SIZE)
    assert len(groups.decide().taken) == 7 and SIZE <= engine.most_running < 2 * SIZE


@pytest.mark.parametrize("seed", range(5))
def test_uninformative_groups_are_replaced_during_sampling(seed: int) -> None:
    # All responses to draws 0, 1, 4 and 6 have the same reward.
    def reward(number: int) -> float:
        return 0.0 if number // SIZE - 40 in (0, 1, 4, 6) else float(number)

    groups, _ = sampled(SamplingTarget.of(4, max_refills=5), ScriptedRewards(reward), seed=seed)
    assert groups.counts().num_draws == 8  # the rewards of 2, 3, 5 and 7 differ
    assert groups.decide().taken == tuple(range(40, 48))


def test_batches_do_not_depend_on_the_speed_of_rewards_with_waits() -> None:
    def reward(number: int) -> float:
        return 0.0 if number // SIZE % 2 else float(number)

    def batches(*, waits: bool) -> set[str]:
        target = SamplingTarget.of(4, max_refills=3)
        runs = (
            sampled(target, ScriptedRewards(reward, seed=seed), waits=waits)[1] for seed in range(8)
        )
        return {str(engine.batches) for engine in runs}

    assert len(batches(waits=True)) == 1
    assert len(batches(waits=False)) > 1


def test_greedy_response_of_each_group_is_not_compared() -> None:
    def reward(number: int) -> float:
        return 1.0 if number % 4 == 3 else 0.0  # the greedy response has another reward

    target = SamplingTarget.of(2, max_refills=1)
    groups, _ = sampled(target, ScriptedRewards(reward), with_greedy=True)
    assert groups.counts().num_draws == 4  # the rewards of the samples do not differ
    assert [len(group.outcomes) for group in groups.open.values()] == [4] * 4


@pytest.mark.parametrize("with_greedy", [False, True])
def test_groups_have_the_sizes_of_their_prompts(with_greedy: bool) -> None:
    own = {0: 2, 1: None, 2: 5}  # by draw modulo 3; None: SIZE

    def of_draw(draw: int) -> Prompt:
        return replace(prompt_of(draw), num_samples=own[draw % 3])

    groups, engine = sampled(
        SamplingTarget.of(9),
        ScriptedRewards(float),
        prompt_of=of_draw,
        most_samples=5,
        with_greedy=with_greedy,
    )
    taken, _ = groups.partition(groups.decide())
    sizes = [own[draw % 3] or SIZE for draw in range(40, 49)]
    assert [len(group.rollouts) - with_greedy for group in taken] == sizes
    assert [groups.plan.num_samples_of(group) for group in taken] == sizes
    for group, size in zip(taken, sizes, strict=True):
        numbers = [number_of(each) for each in group.rollouts if each is not None]
        expected = [group.draw * (5 + with_greedy) + index for index in range(size + with_greedy)]
        assert numbers == expected
        assert [group.outcomes[n]["length"].reward for n in range(len(numbers))] == expected
        asked = sorted(each.number for each in engine.submitted if each.sampling.temperature == 0)
        assert not with_greedy or expected[-1] in asked
        assert len(asked) == with_greedy * 9
    assert groups.counts().num_draws == 9


@pytest.mark.parametrize("oversample", [1.0, 2.0])
@pytest.mark.parametrize("seed", range(3))
def test_groups_of_each_size_are_replaced_until_its_places_are_filled(
    seed: int, oversample: float
) -> None:
    sizes = (2, 5, 2, 2)  # of draws 40 to 43, and of each four after them

    def reward(number: int) -> float:
        return 0.0 if number // 5 in (41, 45, 42) else float(number)

    groups, _ = sampled(
        SamplingTarget.of(4, max_refills=9, oversample=oversample),
        ScriptedRewards(reward, seed=seed),
        seed=seed,
        prompt_of=lambda draw: replace(prompt_of(draw), num_samples=sizes[draw % 4]),
        most_samples=5,
        sizes=sizes,
    )
    taken, _ = groups.partition(groups.decide())
    differing = [group for group in taken if group.draw not in (41, 45, 42)]
    if oversample == 1.0:  # the fewest draws with a group of five that differs; all are taken
        assert draws(taken) == list(range(40, 50)) and groups.counts().num_draws == 10
    else:
        assert sorted(len(group.rollouts) for group in differing) == [2, 2, 2, 5]
        assert {group.draw % 4 for group in differing if len(group.rollouts) == 5} == {1}


def test_each_greedy_response_is_the_baseline_of_its_group() -> None:
    rollout = new_rollout(prompt_of(0), 0, 0)
    scored = [ScoredRollout(rollout, float(number)) for number in range(9)]
    found = with_baselines(scored, [2, 1, 3])
    assert [each.reward for each in found] == list(range(9))
    baselines = [None if each.baseline is None else each.baseline.reward for each in found]
    assert baselines == [6.0, 6.0, 7.0, 8.0, 8.0, 8.0, None, None, None]


def test_failing_rewards_end_the_step() -> None:
    groups, _ = sampled(SamplingTarget.of(50), ScriptedRewards(float, fails_at=10))
    assert str(groups.error) == "the workers died"
    assert len(groups.open) < 20 and not groups.decide().taken


def test_draws_follow_the_given_order() -> None:
    order = (3, 0, 2, 1)
    groups, engine = sampled(SamplingTarget.of(6), ScriptedRewards(float), order=order)
    begun = list(dict.fromkeys(request.number // SIZE - 40 for request in engine.submitted))
    assert begun == [3, 0, 2, 1, 4, 5] and groups.decide().taken == tuple(range(40, 46))


@pytest.mark.parametrize("seed", range(5))
def test_oversampling_takes_the_groups_that_finish_first(seed: int) -> None:
    target = SamplingTarget.of(4, oversample=2.0)
    groups, engine = sampled(target, ScriptedRewards(float), seed=seed)
    taken, pending = groups.partition(groups.decide())
    assert len(taken) == 4 and not pending and not engine.running
    counts = groups.counts()
    assert counts.started == counts.dropped + 4
    finished_at = {
        draw: max(lengths(seed)(draw * SIZE + index) for index in range(SIZE))
        for draw in groups.open
    }
    first = [draw for draw in groups.open if draw < 42]  # started at once
    assert all(
        draw in groups.decide().taken
        for draw in first
        if finished_at[draw] < min(finished_at[other] for other in groups.open if other != draw)
    )
    left = [group for draw, group in groups.open.items() if draw not in draws(taken)]
    assert counts.left_samples == SIZE * len(left)


def test_long_response_ends_soon_after_other_engines_have_enough() -> None:
    """Here a short group ends and a long one runs on; another engine then samples the second of the
    two groups that the step takes."""
    counters, target = LocalCounters(), SamplingTarget.of(2, oversample=1.5)
    engine = ScriptedEngine(lambda number: 2 if number // SIZE == 40 else MAX_TOKENS)
    here, there = (
        Dispatcher(target, counters, "step", round_robin=(part, 2), num_round_robin=2 - part)
        for part in range(2)
    )
    groups = GroupScheduler(
        engine,  # type: ignore[arg-type]
        plan(keeps_unfinished=True),
        prompt_of,
        dispatcher=here,
        rewards=ScriptedRewards(float),  # type: ignore[arg-type]
        select=None,
        at_once=2 * SIZE,
    )
    step = engine.step

    def step_and_record() -> list[Completion]:
        if len(engine.batches) == 5:
            there.record_group()
        return step()

    engine.step = step_and_record  # type: ignore[method-assign]
    run_stream(engine, groups)  # type: ignore[arg-type]
    assert 6 <= len(engine.batches) <= 10
    assert groups.decide().taken == (40,) and groups.decide().pending == (42,)


@dataclass
class Run:
    """Consecutive steps of one engine."""

    target: SamplingTarget
    limit: int  # staleness limit, in versions
    seed: int
    reward: Callable[[int], float] = float
    pending: list[OpenGroup] = field(default_factory=list)
    position: int = 0
    version: int = 0
    started: int = 0
    dropped: int = 0
    trained: list[OpenGroup] = field(default_factory=list)
    rewards: ScriptedRewards | None = None

    def step(self) -> list[OpenGroup]:
        self.version += 1
        must_end = [each.draw for each in self.pending if self._age(each) >= self.limit]
        reserved = frozenset(must_end[: self.target.num_groups])
        target = self.target.with_pending(num_pending=len(self.pending), num_reserved=len(reserved))
        self.rewards = self.rewards or ScriptedRewards(self.reward)
        groups, engine = sampled(
            target,
            self.rewards,
            seed=self.seed,
            pending=self.pending,
            reserved=reserved,
            keeps_unfinished=True,
            first_draw=self.position,
            weight_version=self.version,
        )
        assert not engine.running
        counts = groups.counts()
        taken, self.pending = groups.partition(groups.decide())
        self.position += counts.num_draws
        self.started += counts.started
        self.dropped += counts.dropped
        self.trained += taken
        return taken

    def _age(self, group: OpenGroup) -> int:
        oldest = group.oldest_version
        return 0 if oldest is None else self.version - oldest


@settings(max_examples=60, deadline=None)
@given(
    num_groups=st.integers(1, 6),
    oversample=st.floats(1.2, 2.0),
    limit=st.integers(1, 4),
    seed=st.integers(0, 1000),
)
def test_pending_groups_resume_within_the_staleness_limit(
    num_groups: int, oversample: float, limit: int, seed: int
) -> None:
    run = Run(SamplingTarget.of(num_groups, oversample=oversample), limit, seed)
    for _ in range(8):
        taken = run.step()
        assert len(taken) == num_groups
        assert run.started == len(run.trained) + len(run.pending)
        for group in taken:
            assert len(group.outcomes) == SIZE and group.is_sampled
            oldest = group.oldest_version
            assert oldest is not None and run.version - oldest <= limit
    assert len(set(draws(run.trained)) | set(draws(run.pending))) == run.started
    assert run.rewards is not None and len(set(run.rewards.begun)) == len(run.rewards.begun)
    for group in run.trained:
        for index, rollout in enumerate(group.rollouts):
            assert rollout is not None
            number = group.draw * SIZE + index
            # As if sampled at once: each token encodes the length before it.
            length = lengths(seed)(number)
            expected = [token(number, at + 1) for at in range(length)]
            assert rollout.response_token_ids.tolist() == expected
            assert np.array_equal(rollout.rollout_log_probs, log_probs_of(np.array(expected)))
            versions = rollout.token_versions
            assert len(versions) == length and (np.diff(versions) >= 0).all()
            assert rollout.weight_version == versions[-1]
            assert rollout.oldest_version == versions[0]


def test_uninformative_groups_are_replaced_in_partial_rollouts() -> None:
    def reward(number: int) -> float:
        return 0.0 if number // SIZE % 3 == 0 else float(number)

    run = Run(SamplingTarget.of(4, max_refills=9, oversample=1.5), 2, 3, reward)
    for _ in range(6):
        useful = [each for each in run.step() if each.draw % 3]
        assert len(useful) == 4
    assert run.started == len(run.trained) + len(run.pending)


class OtherRewards(ScriptedRewards):
    """The rewards of a run that resumes with others than before."""

    names = ("length", "other")

    def finished(self) -> list[tuple[int, dict[str, Outcome]]]:
        return [(t, {**by, "other": Outcome(1.0)}) for t, by in super().finished()]

    def weigh(self, rollouts: Any, outcomes: Any) -> list[ScoredRollout]:
        return weighed(rollouts, outcomes, {"length": 1.0, "other": 1.0})


@pytest.mark.parametrize("compares", [False, True])
@pytest.mark.parametrize(
    ("before", "now"), [(ScriptedRewards, OtherRewards), (OtherRewards, ScriptedRewards)]
)
def test_pending_responses_get_the_rewards_that_a_resumed_run_has_added(
    before: type[ScriptedRewards], now: type[ScriptedRewards], compares: bool
) -> None:
    target = SamplingTarget.of(2, oversample=2.0, max_refills=9 if compares else None)
    run = Run(target, 9, seed=1, rewards=before(float))
    run.step()
    ended = {g.draw * SIZE + n for g in run.pending for n in g.outcomes}
    assert any(0 < len(group.outcomes) < SIZE for group in run.pending)
    run.target, run.rewards = replace(target, num_groups=len(run.pending)), now(float)
    for _ in range(3):
        for group in run.step():
            assert all(each.keys() >= {*now.names} for each in group.outcomes.values())
    # What has all rewards is not asked for again.
    assert ended & {*run.rewards.begun} == (ended if now is OtherRewards else set())


def test_resumed_response_has_its_own_random_stream() -> None:
    run = Run(SamplingTarget.of(2, oversample=2.0), 9, seed=1)
    run.step()
    continuing = {
        group.draw * SIZE + index: rollout
        for group in run.pending
        for index, rollout in enumerate(group.rollouts)
        if rollout is not None and rollout.finish_reason == "unfinished"
    }
    assert continuing
    groups, engine = sampled(
        run.target.with_pending(num_pending=len(run.pending), num_reserved=0),
        ScriptedRewards(float),
        seed=1,
        pending=run.pending,
        keeps_unfinished=True,
        weight_version=2,
    )
    again = {request.number: request for request in engine.submitted}
    seeds = set()
    for number, rollout in continuing.items():
        request = again[number]
        expected = [*rollout.prompt.token_ids, *rollout.response_token_ids]
        assert request.token_ids.tolist() == expected
        assert request.max_tokens == MAX_TOKENS - len(rollout.response_token_ids)
        seeds |= {request.seed, groups.plan.request(number // SIZE, restarted(rollout)).seed}
    assert len(seeds) == 2 * len(continuing)


def restarted(rollout: Rollout) -> Rollout:
    from mcore_rl.rollout.segments import new_rollout

    return new_rollout(rollout.prompt, rollout.sample_index, 1)
