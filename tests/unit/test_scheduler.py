"""Groups that outlive steps and weights, on scripted engines whose weights change at any moment."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mcore_rl.rewards.worker import Outcome
from mcore_rl.rollout import conversations as conversations_module
from mcore_rl.rollout import scheduler as scheduler_module
from mcore_rl.rollout import stream as stream_module
from mcore_rl.rollout.sampling_state import read_groups, write_groups
from mcore_rl.rollout.segments import OpenGroup, turn_start
from tests.unit.continuous_run import (
    MOST_PER_TURN,
    NUM_GROUPS,
    Bank,
    LateWriter,
    Pool,
    Run,
    check_draws,
    check_rollouts,
    generated,
    long_lengths,
)
from tests.unit.scripted_sampling import (
    EQUAL,
    SIZE,
    OtherRewards,
    ScriptedRewards,
    log_probs_of,
    prompt_of,
    token,
)

NUM_STEPS = 6


@pytest.fixture(autouse=True)
def no_clocks_and_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """All runs depend on their seeds alone."""
    monkeypatch.setattr(scheduler_module, "ThreadPoolExecutor", LateWriter)
    monkeypatch.setattr(stream_module.time, "sleep", lambda seconds: None)
    monkeypatch.setattr(
        conversations_module, "EnvironmentPool", lambda spec: Pool(random.Random(1))
    )


@pytest.mark.parametrize("seed", range(12))
def test_every_draw_is_trained_once_with_unbroken_responses(seed: int) -> None:
    most, compares = 1 + seed % 3, seed % 2 == 1
    rewards = (lambda: ScriptedRewards(lambda n: float(n % 5 == 0))) if compares else None
    more = {} if rewards is None else {"rewards": rewards}
    run = Run(seed, num_engines=1 + seed % 3, most=most, compares=compares, **more)
    for version in range(1, NUM_STEPS + 1):
        run.step(version)
    check_rollouts(run)
    for _, group in run.trained.values():
        for index, rollout in enumerate(group.rollouts):
            number = group.draw * SIZE + index
            expected = [token(number, 1 + at) for at in range(long_lengths(seed)(number))]
            assert rollout is not None and rollout.response_token_ids.tolist() == expected
            assert np.array_equal(rollout.rollout_log_probs, log_probs_of(np.array(expected)))
    check_draws(run)
    run.close()
    mixed = [
        len(set(r.token_versions.tolist())) > 1 for _, g in run.trained.values() for r in g.rollouts
    ]
    assert any(mixed)
    assert (len(run.dropped) > 0) == compares
    counts = run.admission.counts()
    assert counts.reasons == ({"equal": counts.uninformative} if compares else {})
    left = [group.dropped for _, group in run.trained.values()]
    assert {*left} <= {None, EQUAL}  # once no refill is left


@pytest.mark.parametrize("seed", range(6))
def test_turns_continue_in_their_conversation_and_no_observation_is_lost(seed: int) -> None:
    run = Run(seed, num_engines=1 + seed % 2, turns=True)
    for engine in run.engines:
        engine._length_of = lambda number: -1  # a turn ends by its length
    for version in range(1, NUM_STEPS + 1):
        run.step(version)
    check_rollouts(run)
    check_conversations(run)
    check_draws(run)
    run.close()


def check_conversations(run: Run) -> None:
    """Each response has all its turns, each of which came to its environment as a whole."""
    for _, group in run.trained.values():
        for rollout in group.rollouts:
            assert rollout is not None
            num_turns = 1 + (100 + group.draw) % 3
            kinds = np.split(generated(rollout), np.flatnonzero(np.diff(generated(rollout))) + 1)
            expected = [MOST_PER_TURN, 2] * num_turns  # an observation has two words
            assert [len(part) for part in kinds] == expected[:-1]
            observed = rollout.response_token_ids[~generated(rollout)].tolist()
            assert observed == [9000 + n for turn in range(1, num_turns) for n in (1, turn)]
            assert [turn.reward for turn in rollout.turn_rewards] == [1.0] * num_turns
            number = group.draw * SIZE + rollout.sample_index
            for at in np.flatnonzero(generated(rollout)):
                assert rollout.response_token_ids[at] == token(number, 1 + at)
    seen = [
        len(each.token_ids) for pool in run.pools for all in pool.turns.values() for each in all
    ]
    assert set(seen) == {MOST_PER_TURN}


def test_a_resumed_run_continues_open_conversations(tmp_path: Path) -> None:
    kinds = Counter[str]()
    for seed in range(12):
        first = Run(seed, turns=True, most=3)
        first.engines[0]._length_of = lambda number: -1
        for version in range(1, 4):
            first.step(version)
        first.pause()
        first.begin_step(4)
        left = iter(range(3 * seed))
        first.sample(0, lambda left=left: next(left, None) is None)
        if seed % 2:
            first.pause()  # ends requests, some within their turn
        first.draws[0].flush()
        first.draws[0].flush()  # reads what the first has sent
        scheduler, outstanding = first.schedulers[0], first.admission.outstanding
        next_draw = first.admission.limit
        saved = [
            replace(group, conversations=scheduler.conversations_of(draw))
            for draw, group in scheduler.open.items()
            if draw in outstanding
        ]
        write_groups(saved, tmp_path, 0)
        if seed % 2:
            first.schedulers[0].resume(4)
        first.train()  # saving ends no conversation
        check_conversations(first)
        first.close()
        groups = read_groups(
            tmp_path, prompt_of, tp_group=0, num_tp_groups=1, has_environments=True
        )
        for group in groups:
            for index, kept in group.conversations.items():
                rollout = group.rollouts[index]
                assert rollout is not None
                is_within = turn_start(rollout) < len(rollout.response_token_ids)
                if kept.unanswered is not None:
                    kinds["unanswered"] += 1
                elif is_within:
                    kinds["within a turn"] += 1
                else:
                    kinds["observed" if len(kept.observed) else "started"] += 1
        missing = outstanding.keys() - {group.draw for group in groups}
        groups += [OpenGroup.new(draw, SIZE) for draw in sorted(missing)]
        second = Run(seed, turns=True, most=3, groups=outstanding, next_draw=next_draw)
        second.engines[0]._length_of = lambda number: -1
        num_kept = sum(len(group.conversations) for group in groups)
        second.begin_step(4)
        second.schedulers[0].load(groups, is_resumed=True)
        second.train()
        for version in range(5, 8):
            second.step(version)
        assert len(second.pools[0].restored) == num_kept
        check_conversations(second)
        assert outstanding.keys() <= {*second.trained, *second.dropped}
        second.close()
    assert {"unanswered", "within a turn", "observed", "started"} == kinds.keys(), kinds


def test_groups_without_a_comparison_need_no_reward_before_they_are_taken() -> None:
    """As where a model on ranks of its own gives the reward: it is called by the step."""

    class NoReward(ScriptedRewards):
        names = ()

        def finished(self) -> list[tuple[int, dict[str, Outcome]]]:
            return [(ticket, {}) for ticket, _ in super().finished()]

        def weigh(self, rollouts: Any, outcomes: Any) -> Any:
            raise AssertionError("the model's outcomes are not known")

    run = Run(3, rewards=lambda: NoReward(float))
    run.step(1)
    assert len(run.trained) == NUM_GROUPS
    run.close()


def test_a_failing_disk_is_named_once_and_does_not_end_the_run(
    caplog: pytest.LogCaptureFixture,
) -> None:
    calls = [0]

    def fails() -> bool:
        calls[0] += 1
        return calls[0] < 5

    run = Run(4, banks=[Bank(fails)])
    for version in range(1, 5):
        run.step(version)
    run.schedulers[0].forget_banked(list(run.trained))
    (said,) = caplog.messages
    assert "No space left on device" in said and "the run continues" in said
    assert calls[0] > 5 and len(run.trained) == 4 * NUM_GROUPS
    check_draws(run)
    calls[0] = 0
    run.schedulers[0].forget_banked([0])  # a read-only one
    assert len(caplog.messages) == 1
    run.close()


def test_an_error_of_the_bank_that_is_not_the_disk_s_ends_the_run() -> None:
    class Broken(Bank):
        def append(self, group: OpenGroup) -> None:
            raise ValueError("a bug")

    run = Run(4, banks=[Broken()])
    with pytest.raises(ValueError, match="a bug"):
        run.step(1)
    run.close()


@pytest.mark.parametrize("pauses", [False, True])
def test_an_error_of_the_rewards_ends_sampling(pauses: bool) -> None:
    run = Run(5, rewards=lambda: ScriptedRewards(float, fails_at=4))
    run.begin_step(1)
    with pytest.raises(RuntimeError, match="the workers died"):
        run.train()
        while True:
            run.pause() if pauses else run.sample_a_little()
            run.schedulers[0].resume(1)
    assert not run.engines[0].running
    run.close()


@pytest.mark.parametrize("seed", range(4))
def test_banked_groups_are_not_sampled_again(seed: int) -> None:
    """A run that was killed after its third step resumes from the first."""
    first = Run(seed)
    first.step(1)
    outstanding, limit = dict(first.admission.outstanding), first.admission.limit
    first.step(2)
    first.step(3)
    first.pause()
    first.close()
    bank = first.banks[0]
    lost = {draw for draw, (version, _) in first.trained.items() if version > 1}
    banked = {d: group for d, group in bank.groups.items() if d in outstanding or d >= limit}
    assert lost <= banked.keys()

    size = {draw: OpenGroup.new(draw, SIZE) for draw in outstanding}
    second = Run(
        seed,
        groups=outstanding,
        next_draw=limit,
        banked={draw: group for draw, group in banked.items() if draw >= limit},
    )
    second.begin_step(2)
    second.schedulers[0].load(
        [banked.get(draw, size[draw]) for draw in sorted(outstanding)], is_resumed=True
    )
    second.train()
    for version in (3, 4):
        second.step(version)
    sampled = {each.number // SIZE for each in second.engines[0].submitted}
    assert sampled.isdisjoint(banked)
    once = {draw for draw, (version, _) in first.trained.items() if version == 1}
    assert once.isdisjoint(second.trained) and lost <= second.trained.keys()
    for draw in lost:
        before, now = (run.trained[draw][1].rollouts for run in (first, second))
        for a, b in zip(before, now, strict=True):
            assert np.array_equal(a.response_token_ids, b.response_token_ids)
    assert lost.isdisjoint(second.banks[0].groups)  # nor written again
    second.close()


def test_banked_groups_that_start_elsewhere_are_forgotten_and_unreadable_ones_sampled() -> None:
    first = Run(2)
    for version in range(1, 4):
        first.step(version)
    first.close()
    banked = {draw: group for draw, (_, group) in first.trained.items()}
    unread = min(banked)
    second = Run(2, num_engines=2, banked={**banked, unread: None})
    for version in range(1, 4):
        second.step(version)
    trained = second.trained.keys() & banked
    assert len(trained) > NUM_GROUPS and unread in trained
    sampled = {each.number // SIZE for engine in second.engines for each in engine.submitted}
    assert unread in sampled and sampled.isdisjoint(banked.keys() - {unread})
    for scheduler in second.schedulers:
        assert trained.isdisjoint(scheduler._banked)
    second.close()


@pytest.mark.parametrize("turns", [False, True])
def test_stale_groups_are_dropped_with_what_they_have_in_flight(turns: bool) -> None:
    run = Run(8, most=1, drops_stale=True, turns=turns)
    engine = run.engines[0]
    if not turns:
        engine._length_of = lambda number: 2 if number // SIZE % 4 else 39
    cut = set()
    for version in range(1, 3 * NUM_STEPS + 1):
        run.pause()
        scheduler = run.schedulers[0]
        open_ones = () if scheduler._conversations is None else scheduler._conversations._episodes
        numbers = {*scheduler._cut, *scheduler._submitted, *open_ones}
        in_flight = {number // SIZE for number in numbers}
        before = set(run.dropped)
        run.begin_step(version)
        cut |= in_flight & (run.dropped - before)
        run.train()
        run.sample_a_little()
    assert run.dropped and cut
    if not turns:
        assert all(draw % 4 == 0 for draw in run.dropped)
    check_rollouts(run)
    check_draws(run)
    run.close()


def groups_left(**options: Any) -> dict[int, OpenGroup]:
    """The groups of a run that ended before it trained on them."""
    run = Run(3, **options)
    run.step(1)
    run.sample(0, lambda: len(run.banks[0].groups) >= 2 * NUM_GROUPS)
    run.pause()
    run.close()
    return {d: g for d, g in run.banks[0].groups.items() if d not in run.trained}


def trained_on_two_of(groups: dict[int, OpenGroup], **options: Any) -> tuple[Run, int, int]:
    """A resumed run that has trained on two groups without sampling them again: one that was held,
    and one of the bank."""
    held, banked = sorted(groups)[:2]
    run = Run(3, groups={held: 1}, next_draw=banked, banked={banked: groups[banked]}, **options)
    run.begin_step(2)
    run.schedulers[0].load([groups[held]], is_resumed=True)
    run.train()
    run.step(3)
    assert not {held, banked} & {each.number // SIZE for each in run.engines[0].submitted}
    return run, held, banked


def test_failed_rewards_of_a_resumed_run_are_asked_for_again() -> None:
    groups = groups_left()
    for group in groups.values():
        group.outcomes[1] = {"length": Outcome(0.0, "raised", "the judge is away")}
    second, held, banked = trained_on_two_of(groups)
    for draw in (held, banked):
        rewards = [second.trained[draw][1].outcomes[index] for index in range(SIZE)]
        assert [each["length"].kind for each in rewards] == [None] * SIZE
    begun = sorted(second.schedulers[0]._rewards.begun)  # type: ignore[union-attr]
    assert {held * SIZE + 1, banked * SIZE + 1} <= set(begun)
    assert not {held * SIZE, banked * SIZE} & set(begun)
    second.close()


class ChangedRewards(ScriptedRewards):
    """Rewards of the same names, whose code has changed."""

    version = "2"


@pytest.mark.parametrize("now", [ChangedRewards, ScriptedRewards])
def test_groups_of_a_resumed_run_are_graded_again_if_the_code_of_rewards_has_changed(
    now: type[ScriptedRewards],
) -> None:
    groups = groups_left()
    second, held, banked = trained_on_two_of(groups, rewards=lambda: now(lambda number: -1.0))
    for draw in (held, banked):
        outcomes = second.trained[draw][1].outcomes.values()
        assert {each["length"].reward == -1.0 for each in outcomes} == {now is ChangedRewards}
        assert second.trained[draw][1].reward_sources == {"length": now.version}
    second.close()


def test_prompts_of_groups_that_have_left_are_let_go() -> None:
    run = Run(8, most=1, drops_stale=True)
    run.engines[0]._length_of = lambda number: 2 if number // SIZE % 4 else 39
    for version in range(1, 2 * NUM_STEPS):
        run.step(version)
        scheduler = run.schedulers[0]
        assert scheduler._prompts.keys() <= scheduler.open.keys()
    assert run.trained and run.dropped
    run.close()


def test_sampling_continues_while_groups_are_removed_from_the_bank() -> None:
    run = Run(4)
    for version in range(1, 4):
        run.step(version)
    scheduler, bank = run.schedulers[0], run.banks[0]
    scheduler.forget_banked(run.trained)
    assert run.trained.keys() <= bank.groups.keys()  # the writer is late, and not waited for
    while run.trained.keys() & bank.groups.keys():
        run.sample_a_little()
    undone = sorted(bank.groups)[:1]
    scheduler.forget_banked(undone, waits=True)
    assert not bank.groups.keys() & {*undone}
    scheduler.forget_banked(bank.groups.keys())
    run.close()
    assert not bank.groups


@pytest.mark.parametrize("compares", [False, True])
def test_groups_of_a_resumed_run_with_other_rewards_get_these(compares: bool) -> None:
    groups = groups_left(compares=compares)
    second, held, banked = trained_on_two_of(
        groups, compares=compares, rewards=lambda: OtherRewards(float)
    )
    for draw in (held, banked):
        outcomes = second.trained[draw][1].outcomes.values()
        assert all(each.keys() == {"length", "other"} for each in outcomes)
    second.close()
