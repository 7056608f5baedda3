"""Groups from their draw to their rewards, in steps of a scripted engine that stops."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mcore_rl.batching.types import Prompt, ScoredRollout, with_baselines
from mcore_rl.rollout.group_sampler import Rules
from mcore_rl.rollout.segments import OpenGroup, new_rollout
from tests.unit.scripted_sampling import (
    MAX_TOKENS,
    ROOM,
    SIZE,
    OtherRewards,
    ScriptedEngine,
    ScriptedRewards,
    Step,
    Steps,
    lengths,
    log_probs_of,
    number_of,
    prompt_of,
    token,
)


def draws(groups: Sequence[OpenGroup]) -> list[int]:
    return [group.draw for group in groups]


def sampled(rules: Rules, rewards: ScriptedRewards, **options: Any) -> tuple[Step, ScriptedEngine]:
    """Sample one step."""
    steps = Steps(rules, rewards, **options)
    step = steps.step()
    assert not steps.engine.running
    return step, steps.engine


@pytest.mark.parametrize("seed", range(5))
def test_every_response_is_rewarded_and_the_engine_stays_full(seed: int) -> None:
    step, engine = sampled(Rules(7), ScriptedRewards(float), seed=seed)
    assert draws(step.taken) == list(range(40, 47)) and not step.dropped
    for group in step.taken:
        for index, rollout in enumerate(group.rollouts):
            assert rollout is not None and rollout.sample_index == index
            number = group.draw * SIZE + index
            assert rollout.prompt.index == 100 + group.draw and number_of(rollout) == number
            assert len(rollout.response_token_ids) == lengths(seed)(number)
            assert rollout.text == str(rollout.response_token_ids.tolist())
            assert group.outcomes[index]["length"].reward == number
    # A group starts while there is room, with all its responses.
    assert ROOM <= engine.most_running < ROOM + SIZE


@pytest.mark.parametrize("seed", range(5))
def test_uninformative_groups_are_replaced_during_sampling(seed: int) -> None:
    # All responses to draws 0, 1, 4 and 6 have the same reward.
    def reward(number: int) -> float:
        return 0.0 if number // SIZE - 40 in (0, 1, 4, 6) else float(number)

    step, _ = sampled(Rules(4, max_refills=5), ScriptedRewards(reward), seed=seed)
    assert draws(step.taken) == [42, 43, 45, 47]
    assert draws(step.replaced) == [40, 41, 44, 46]
    assert (step.end.next_draw, step.end.started, step.end.refills) == (48, 8, 4)


def test_batches_do_not_depend_on_the_speed_of_rewards_where_they_must_not() -> None:
    def reward(number: int) -> float:
        return 0.0 if number // SIZE % 2 else float(number)

    def batches(*, deterministic: bool) -> set[str]:
        rules = Rules(4, max_refills=3, deterministic=deterministic)
        runs = (sampled(rules, ScriptedRewards(reward, seed=seed))[1] for seed in range(8))
        return {str(engine.batches) for engine in runs}

    assert len(batches(deterministic=True)) == 1
    assert len(batches(deterministic=False)) > 1


def test_greedy_response_of_each_group_is_not_compared() -> None:
    def reward(number: int) -> float:
        return 1.0 if number % 4 == 3 else 0.0  # the greedy response has another reward

    step, _ = sampled(Rules(2, max_refills=1), ScriptedRewards(reward), with_greedy=True)
    assert step.end.started == 4  # the rewards of the samples do not differ
    assert [len(group.outcomes) for group in (*step.taken, *step.replaced)] == [4] * 4


@pytest.mark.parametrize("with_greedy", [False, True])
def test_groups_have_the_sizes_of_their_prompts(with_greedy: bool) -> None:
    own = {0: 2, 1: None, 2: 5}  # by draw modulo 3; None: SIZE

    def of_draw(draw: int) -> Prompt:
        return replace(prompt_of(draw), num_samples=own[draw % 3])

    step, engine = sampled(
        Rules(9),
        ScriptedRewards(float),
        prompt_of=of_draw,
        most_samples=5,
        with_greedy=with_greedy,
    )
    sizes = [own[draw % 3] or SIZE for draw in range(40, 49)]
    assert [len(group.rollouts) - with_greedy for group in step.taken] == sizes
    for group, size in zip(step.taken, sizes, strict=True):
        numbers = [number_of(each) for each in group.rollouts if each is not None]
        expected = [group.draw * (5 + with_greedy) + index for index in range(size + with_greedy)]
        assert numbers == expected
        assert [group.outcomes[n]["length"].reward for n in range(len(numbers))] == expected
        asked = sorted(each.number for each in engine.submitted if each.sampling.temperature == 0)
        assert not with_greedy or expected[-1] in asked
        assert len(asked) == with_greedy * 9


@pytest.mark.parametrize("extra", [0, 4])
@pytest.mark.parametrize("seed", range(3))
def test_groups_of_each_size_are_replaced_until_its_places_are_filled(
    seed: int, extra: int
) -> None:
    sizes = (2, 5, 2, 2)  # of draws 40 to 43, and of each four after them

    def reward(number: int) -> float:
        return 0.0 if number // 5 in (41, 45, 42) else float(number)

    steps = Steps(
        Rules(4, max_refills=9, extra_groups=extra),
        ScriptedRewards(reward, seed=seed),
        seed=seed,
        prompt_of=lambda draw: replace(prompt_of(draw), num_samples=sizes[draw % 4]),
        most_samples=5,
    )
    step = steps.step(sizes=sizes)
    assert sorted(len(group.rollouts) for group in step.taken) == [2, 2, 2, 5]
    assert not {41, 45, 42} & {*draws(step.taken)}
    if not extra:  # the fewest draws with a group of five that differs
        assert step.end.started == 10 and 49 in draws(step.taken)


def test_each_greedy_response_is_the_baseline_of_its_group() -> None:
    rollout = new_rollout(prompt_of(0), 0, 0)
    scored = [ScoredRollout(rollout, float(number)) for number in range(9)]
    found = with_baselines(scored, [2, 1, 3])
    assert [each.reward for each in found] == list(range(9))
    baselines = [None if each.baseline is None else each.baseline.reward for each in found]
    assert baselines == [6.0, 6.0, 7.0, 8.0, 8.0, 8.0, None, None, None]


def test_failing_rewards_end_the_step() -> None:
    steps = Steps(Rules(50), ScriptedRewards(float, fails_at=10))
    with pytest.raises(RuntimeError, match="sampling failed on rank 0: the workers died"):
        steps.step()
    assert len(steps.sampler.scheduler.open) < 20 and not steps.engine.running


@pytest.mark.parametrize(
    "rules", [Rules(4), Rules(4, max_refills=9), Rules(4, max_refills=9, deterministic=True)]
)
def test_waits_for_rewards_count_once_and_training_does_not(
    rules: Rules, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wait takes ten seconds here, and nothing else takes time but training."""
    now, waited = 0.0, 0.0
    monkeypatch.setattr(time, "perf_counter", lambda: now)
    monkeypatch.setattr(time, "sleep", lambda seconds: None)

    class Slow(ScriptedRewards):
        def wait(self) -> None:
            nonlocal now, waited
            super().wait()
            now += 10.0
            if not steps.engine.running and self._open:
                waited += 10.0

    steps = Steps(rules, Slow(lambda number: float(number % 2)), seed=3)
    for _ in range(4):
        steps.step()
        assert steps.sampler.scheduler.take_wait_seconds() == waited
        waited = 0.0
        now += 1000.0


def test_draws_start_in_the_given_order() -> None:
    steps = Steps(Rules(6), ScriptedRewards(float))
    step = steps.step(order_of=lambda count: (3, 0, 2, 1))
    begun = list(dict.fromkeys(request.number // SIZE - 40 for request in steps.engine.submitted))
    assert begun == [3, 0, 2, 1, 4, 5] and draws(step.taken) == list(range(40, 46))


@pytest.mark.parametrize("seed", range(5))
def test_oversampling_takes_the_groups_that_finish_first(seed: int) -> None:
    step, engine = sampled(Rules(4, extra_groups=4), ScriptedRewards(float), seed=seed)
    assert len(step.taken) == 4
    assert step.end.started == len(step.dropped) + 4
    everything = [*step.taken, *step.dropped]
    finished_at = {
        group.draw: max(lengths(seed)(group.draw * SIZE + index) for index in range(SIZE))
        for group in everything
    }
    first = [draw for draw in draws(everything) if draw < 42]  # started at once
    assert all(
        draw in draws(step.taken)
        for draw in first
        if finished_at[draw] < min(finished_at[other] for other in finished_at if other != draw)
    )
    # All that was generated is counted, also what was dropped with its request.
    num_tokens = sum(group.num_tokens(SIZE) for group in everything)
    generated, dropped = step.num_tokens
    assert generated == num_tokens + dropped == sum(map(len, engine.batches))


def test_prefetch_is_called_once_no_request_will_come_and_few_are_running() -> None:
    engine = ScriptedEngine(lambda number: 3 if number % SIZE else number // SIZE - 30)
    steps = Steps(Rules(4), ScriptedRewards(float), engine=engine)
    running: list[int] = []
    steps.step(when_few_are_left=lambda: running.append(engine.num_running))
    assert running == [1]  # of at most a quarter of ROOM
    assert len(engine.submitted) == 4 * SIZE


@settings(max_examples=60, deadline=None)
@given(
    num_groups=st.integers(1, 6),
    share=st.floats(0.01, 1.0),
    limit=st.integers(1, 4),
    seed=st.integers(0, 1000),
)
def test_pending_groups_resume_within_the_staleness_limit(
    num_groups: int, share: float, limit: int, seed: int
) -> None:
    extra = math.ceil(num_groups * limit * share)
    rewards = ScriptedRewards(float)
    run = Steps(Rules(num_groups, limit, extra), rewards, seed=seed)
    trained: list[OpenGroup] = []
    started = 0
    for _ in range(8):
        step = run.step()
        started += step.end.started
        trained += step.taken
        assert len(step.taken) == num_groups
        assert step.end.pending == len(run.pending)
        assert started == len(trained) + len(run.pending)
        for group in step.taken:
            assert len(group.outcomes) == SIZE and group.is_sampled
            oldest = group.oldest_version
            assert oldest is not None and run.version - oldest <= limit
    assert len({*draws(trained), *draws(run.pending)}) == started
    assert len(set(rewards.begun)) == len(rewards.begun)
    for group in trained:
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


def test_stale_groups_are_dropped_if_no_step_waits_for_them() -> None:
    engine = ScriptedEngine(lambda number: 39 if number // SIZE == 40 else 2)
    rules = Rules(2, max_staleness=1, extra_groups=2, drops_stale=True)
    run = Steps(rules, ScriptedRewards(float), engine=engine)
    taken = [draws(run.step().taken), draws(run.step().taken)]
    assert all(40 not in each for each in taken) and 40 in draws(run.pending)
    step = run.step()
    assert draws(step.stale) == [40] and step.stale[0].num_tokens(SIZE) > 0
    assert len(step.taken) == 2


def test_uninformative_groups_are_replaced_in_partial_rollouts() -> None:
    def reward(number: int) -> float:
        return 0.0 if number // SIZE % 3 == 0 else float(number)

    run = Steps(Rules(4, 2, 2, max_refills=9), ScriptedRewards(reward), seed=3)
    started = left = 0
    for _ in range(6):
        step = run.step()
        assert len(step.taken) == 4 and all(group.draw % 3 for group in step.taken)
        started += step.end.started
        left += len(step.taken) + len(step.replaced) + len(step.dropped)
    assert started == left + len(run.pending)


@pytest.mark.parametrize("compares", [False, True])
@pytest.mark.parametrize(
    ("before", "now"), [(ScriptedRewards, OtherRewards), (OtherRewards, ScriptedRewards)]
)
def test_unfinished_responses_get_the_rewards_that_a_resumed_run_has_added(
    before: type[ScriptedRewards], now: type[ScriptedRewards], compares: bool
) -> None:
    rules = Rules(2, 9, 2, max_refills=9 if compares else None)
    first = Steps(rules, before(float), seed=1)
    first.step()
    pending = first.pending
    ended = {g.draw * SIZE + n for g in pending for n in g.outcomes}
    assert any(0 < len(group.outcomes) < SIZE for group in pending)
    run = Steps(
        replace(rules, groups_per_step=len(pending)),
        now(float),
        seed=1,
        next_draw=first.position,
        version=first.version,
        continuing=pending,
    )
    for _ in range(3):
        for group in run.step().taken:
            assert all(each.keys() >= {*now.names} for each in group.outcomes.values())
    # What has all rewards is not asked for again.
    begun = {*run.rewards.begun}
    assert ended & begun == (ended if now is OtherRewards else set())


def test_resumed_response_has_its_own_random_stream() -> None:
    run = Steps(Rules(2, 9, 2), ScriptedRewards(float), seed=1)
    run.step()
    continuing = {
        group.draw * SIZE + index: rollout
        for group in run.pending
        for index, rollout in enumerate(group.rollouts)
        if rollout is not None and rollout.finish_reason == "unfinished"
    }
    assert continuing
    num_before = len(run.engine.submitted)
    run.step()
    again = {request.number: request for request in run.engine.submitted[num_before:]}
    seeds = set()
    for number, rollout in continuing.items():
        request = again[number]
        expected = [*rollout.prompt.token_ids, *rollout.response_token_ids]
        assert request.token_ids.tolist() == expected
        assert request.max_tokens == MAX_TOKENS - len(rollout.response_token_ids)
        restarted = new_rollout(rollout.prompt, rollout.sample_index, 1)
        plan = run.sampler.scheduler.plan
        seeds |= {request.seed, plan.request(number // SIZE, restarted).seed}
    assert len(seeds) == 2 * len(continuing)
