"""Simulated runs: closed-form cases, and properties that hold for every workload."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mcore_rl.planner.comparison import GOOD_ENOUGH, Comparison, compare
from mcore_rl.planner.simulated_engines import STEPS_BETWEEN_SCHEDULES
from mcore_rl.planner.simulated_workload import EngineSpeed, Response, ResponseLengths, Workload
from mcore_rl.planner.simulation import (
    COLOCATED,
    OVERSAMPLE,
    PARTIAL,
    SEPARATE,
    Candidate,
    Simulated,
    Speeds,
    simulate,
)
from mcore_rl.rollout import stream

NO_PREFILL = 1e30  # tokens per second
EVEN = ResponseLengths(most=10**6, mean=100.0)


def workload(**changes: Any) -> Workload:
    """4 groups of 2 responses of 100 tokens."""
    settings: dict[str, Any] = {
        **{"groups_per_step": 4, "samples_per_group": 2, "prompt_tokens": 0.0, "lengths": EVEN},
        **changes,
    }
    return Workload(**settings)


def of_one_turn(*lengths: int) -> tuple[Response, ...]:
    return tuple(Response((length,)) for length in lengths)


def tokens_of(load: Workload, draw: int) -> float:
    """The tokens of a draw's responses."""
    found = load.lengths.of_draw(draw, load.samples_per_group, load.seed)
    return sum(each.num_tokens for each in found)


def speeds(step_seconds: float = 0.5, *, train_rate: float, prefill: float = NO_PREFILL) -> Speeds:
    """Engines whose step takes as long for any number of sequences."""
    return Speeds(EngineSpeed((1,), (step_seconds,), prefill), train_rate)


# Tokens of a thousandth, so that calls, which wait for a few tokens, take no time.
FINE = replace(EVEN, mean=100.0 * 1000)


def fine_speeds(*, train_rate: float, prefill: float = NO_PREFILL) -> Speeds:
    return speeds(0.5 / 1000, train_rate=train_rate * 1000, prefill=prefill)


def colocated(hand_over_seconds: float = 3.0, **changes: Any) -> Candidate:
    """4 ranks with 4 engines of 2 sequences each."""
    return replace(Candidate(COLOCATED, 4, 4, 4, 2, hand_over_seconds), **changes)


def separate(max_staleness: int, hand_over_seconds: float = 3.0, **changes: Any) -> Candidate:
    """2 trainers and 2 engines of 4 sequences each."""
    candidate = Candidate(SEPARATE, 4, 2, 2, 4, hand_over_seconds, max_staleness)
    return replace(candidate, **changes)


# ------------------------------------------------------------------------------- known seconds


def test_colocated_step_is_sampling_training_and_hand_over() -> None:
    # 100 tokens of 0.5 s; 800 tokens by 4 ranks of 10 per second; the switches.
    found = simulate(colocated(), workload(), speeds(train_rate=10.0))
    assert found.step_seconds == pytest.approx(50 + 20 + 3)
    assert found.samples_per_second == pytest.approx(8 / 73)
    assert found.tokens_per_second == pytest.approx(800 / 73)
    assert (found.trainer_idle, found.engine_idle) == pytest.approx((0.0, 0.0), abs=1e-9)
    assert (found.staleness_mean, found.staleness_max) == (0.0, 0)


def test_engine_with_less_room_samples_in_waves() -> None:
    found = simulate(colocated(most_running=1), workload(), speeds(train_rate=10.0))
    assert found.step_seconds == pytest.approx(2 * 50 + 20 + 3)


def test_prompts_are_computed_once_per_group_and_trained_on_per_sample() -> None:
    # Each engine has one group: 30 tokens at 10 per second. Trained are 8 x 130 tokens.
    found = simulate(
        colocated(), workload(prompt_tokens=30.0), speeds(train_rate=10.0, prefill=10.0)
    )
    assert found.step_seconds == pytest.approx(3 + 50 + 26 + 3)


def test_tools_and_rewards_are_waited_for() -> None:
    load = workload(lengths=replace(EVEN, turns=4), tool_seconds=7.0, reward_seconds=5.0)
    found = simulate(colocated(), load, speeds(train_rate=10.0))
    assert found.step_seconds == pytest.approx(50 + 3 * 7 + 5 + 20 + 3)
    assert found.trainer_idle == found.engine_idle == pytest.approx(26 / 99)


def test_recorded_turns_and_answers_of_tools_are_simulated() -> None:
    # The longest of 8 responses (each engine has 2) is known: all are equal. Trained are all
    # tokens; the two answers of 15 tokens are computed by prefill, 2 responses at once.
    lengths = ResponseLengths(most=10**6, recorded=(Response((10, 60, 30), 30),))
    load = workload(lengths=lengths, tool_seconds=7.0)
    found = simulate(colocated(), load, speeds(train_rate=10.0, prefill=10.0))
    assert found.step_seconds == pytest.approx(50 + 2 * 7 + 2 * 3 + 8 * 130 / 40 + 3)


def test_environments_start_before_their_responses() -> None:
    found = simulate(colocated(), workload(environment_seconds=4.0), speeds(train_rate=10.0))
    assert found.step_seconds == pytest.approx(4 + 50 + 20 + 3)


def test_answer_of_a_tool_waits_for_the_schedule_of_its_engine() -> None:
    """It arrives in the fourth step of the engine, or in the fifth, while another request runs."""
    after_tool, other = Response((2, 40)), Response((30,))
    lengths = ResponseLengths(most=100, recorded=(after_tool, other))
    seed = next(
        seed
        for seed in range(10**4)
        if [lengths.of_draw(draw, 1, seed)[0] for draw in range(2)] == [after_tool, other]
    )
    load = workload(groups_per_step=2, samples_per_group=1, lengths=lengths, seed=seed)
    candidate = Candidate(COLOCATED, 1, 1, 1, 8, 0.0)
    for tool_seconds, begins_at in ((0.7, 4), (1.2, 8)):
        found = simulate(
            candidate,
            replace(load, tool_seconds=tool_seconds),
            speeds(train_rate=math.inf),
            warm_up_steps=0,
            steps=1,
        )
        assert found.step_seconds == pytest.approx(0.5 * (begins_at + 40))


def test_engine_without_cache_of_prefixes_repeats_the_prefill() -> None:
    """Each engine has 2 responses to a prompt of 20 tokens; the tool answers with 10."""
    lengths = ResponseLengths(most=10**6, recorded=(Response((50, 50), 10),))
    load = workload(lengths=lengths, prompt_tokens=20.0)
    rates = speeds(train_rate=math.inf, prefill=10.0)
    cached = simulate(colocated(), load, rates).step_seconds
    engine = replace(rates.engine, repeated_rate=40.0)
    found = simulate(colocated(), load, replace(rates, engine=engine)).step_seconds
    # The second response repeats the prompt, both repeat it and the first turn after the tool.
    assert found - cached == pytest.approx((20 + 2 * (20 + 50)) / 40)


def test_recorded_response_is_cut_at_the_limit() -> None:
    response = Response((10, 60, 30), 30)
    assert response.cut(200) == response
    assert response.cut(100) == Response((10, 60), 15)
    assert response.cut(20) == Response((10,), 0)
    assert response.cut(5) == Response((5,), 0)


def test_duration_of_step_follows_number_of_running_sequences() -> None:
    # One engine, lengths 1, 2, 3, 4 of equal probability: each draw has its own seed.
    lengths = ResponseLengths(most=100, recorded=of_one_turn(10, 20, 30, 40))
    load = workload(groups_per_step=2, samples_per_group=3, lengths=lengths)
    engine = EngineSpeed((1, 3), (0.1, 0.3), NO_PREFILL)  # 0.1 s per sequence, also of 6
    candidate = Candidate(COLOCATED, 1, 1, 1, 6, 0.0)
    found = simulate(candidate, load, Speeds(engine, math.inf), warm_up_steps=0, steps=10)
    tokens = sum(tokens_of(load, draw) for draw in range(20))
    assert found.step_seconds == pytest.approx(0.1 * tokens / 10)


def test_long_response_holds_up_colocated_step() -> None:
    # A step of 32 responses has one of 1,000 tokens almost surely; all others have 100.
    lengths = ResponseLengths(most=10**6, recorded=of_one_turn(*[100] * 7, 1000))
    load = workload(groups_per_step=16, samples_per_group=2, lengths=lengths)
    candidate = Candidate(COLOCATED, 4, 4, 4, 8, 0.0)
    found = simulate(candidate, load, speeds(train_rate=math.inf))
    assert found.step_seconds == pytest.approx(500, rel=0.05)
    # An engine is busy until the end if it has such a response, or else for a tenth.
    with_one = 1 - (7 / 8) ** 8
    assert found.engine_idle == pytest.approx(0.9 * (1 - with_one), abs=0.05)


def test_synchronous_separate_step_is_the_sum() -> None:
    found = simulate(separate(0), workload(), speeds(train_rate=10.0))
    assert found.step_seconds == pytest.approx(50 + 40 + 3)
    assert found.trainer_idle == pytest.approx(50 / 93)
    assert found.engine_idle == pytest.approx(40 / 93)
    assert found.staleness_max == 0


@pytest.mark.parametrize(("train_rate", "slower"), [(8.0, 50), (10.0, 50), (4.0, 100)])
def test_separate_step_with_staleness_takes_as_long_as_slower_side(
    train_rate: float, slower: float
) -> None:
    """800 tokens by two trainers of `train_rate`: 50, 40 and 100 s; sampling takes 50 s."""
    found = simulate(separate(1), workload(lengths=FINE), fine_speeds(train_rate=train_rate))
    assert found.step_seconds == pytest.approx(slower + 3, rel=1e-3)
    idle = (slower - 400 / train_rate) / (slower + 3)
    assert found.trainer_idle == pytest.approx(idle, abs=1e-3)
    assert found.engine_idle == pytest.approx((slower - 50) / (slower + 3), abs=1e-3)


@pytest.mark.parametrize("max_staleness", [2, 4])
def test_samples_are_one_version_old_where_engines_wait_whatever_the_bound(
    max_staleness: int,
) -> None:
    """Training takes 100 s, sampling 50 s."""
    found = simulate(separate(max_staleness), workload(lengths=FINE), fine_speeds(train_rate=4.0))
    assert found.step_seconds == pytest.approx(103, rel=1e-3)
    assert (found.staleness_mean, found.staleness_max) == (1.0, 1)


def test_calls_are_answered_between_steps_of_engines() -> None:
    """One engine of 0.5 s a step, whose 8 responses of 100 tokens take longer than training."""
    candidate = Candidate(SEPARATE, 2, 1, 1, 8, 3.0, 1)
    found = simulate(candidate, workload(), speeds(train_rate=1000.0))
    # Calls do not stop the engine; trainers wait but for 3 of them and the tokens that are cut. The
    # second call comes 0.8 s after the first one is answered, the others at once.
    assert found.step_seconds == pytest.approx(50 + 3)
    calls = 3 * STEPS_BETWEEN_SCHEDULES * 0.5 - 0.8 + 0.5
    assert found.trainer_idle == pytest.approx((50 - 0.8 - calls) / 53)


def test_steps_between_calls_are_those_of_engines() -> None:
    assert STEPS_BETWEEN_SCHEDULES == stream.STEPS_BETWEEN_SCHEDULES


def test_update_recomputes_tokens_of_running_requests() -> None:
    # Engines are the slower side, and in the middle of 4 responses at each update: after 40 s of
    # training and, since the prefill delays them, at the same place in every step.
    load, rate = workload(lengths=FINE), 10.0
    free = simulate(separate(1), load, fine_speeds(train_rate=rate)).step_seconds
    slower = fine_speeds(train_rate=rate, prefill=100.0 * 1000)
    found = simulate(separate(1), load, slower).step_seconds
    # 40 s: 80 % of the tokens of each of the engine's 4 responses.
    assert found - free == pytest.approx(4 * 80 / 100, rel=0.01)


def test_partial_rollouts_do_not_wait_for_long_response() -> None:
    lengths = ResponseLengths(most=10**6, recorded=of_one_turn(*[100] * 15, 1000))
    load = workload(groups_per_step=16, lengths=lengths)
    candidate = Candidate(COLOCATED, 4, 4, 4, 16, 0.0)
    whole = simulate(candidate, load, speeds(train_rate=math.inf))
    candidate = replace(candidate, mode=PARTIAL, max_staleness=4)
    partial = simulate(candidate, load, speeds(train_rate=math.inf))
    assert whole.step_seconds > 1.5 * partial.step_seconds


def test_tools_that_have_not_answered_are_asked_again_in_the_next_step() -> None:
    """One of two groups is taken. The second one is with its tool whenever the other ends, until it
    is so old that the step waits for it."""
    fast, slow = Response((20,)), Response((4, 4))
    lengths = ResponseLengths(most=100, recorded=(fast, fast, fast, slow))
    expected = [fast, slow, fast, fast, fast, fast]
    seed = next(
        seed
        for seed in range(10**4)
        if [lengths.of_draw(draw, 1, seed)[0] for draw in range(6)] == expected
    )
    load = workload(groups_per_step=1, samples_per_group=1, lengths=lengths, seed=seed)
    load = replace(load, tool_seconds=30.0)
    candidate = Candidate(PARTIAL, 1, 1, 1, 8, 0.0, max_staleness=4)
    steps = 5
    found = simulate(candidate, load, speeds(train_rate=math.inf), warm_up_steps=0, steps=steps)
    assert found.trained == (0, 2, 3, 4, 1) and found.staleness_max == 4
    # Steps of 20 tokens; in the last one the tool answers, and 4 tokens follow.
    assert found.step_seconds == pytest.approx((4 * 10 + 30 + 2) / steps)


# ---------------------------------------------------------------------------------- properties


@st.composite
def runs(draw: st.DrawFn) -> tuple[Candidate, Workload, Speeds]:
    mode = draw(st.sampled_from([COLOCATED, PARTIAL, SEPARATE]))
    load = Workload(
        groups_per_step=draw(st.integers(1, 6)),
        samples_per_group=draw(st.integers(1, 4)),
        prompt_tokens=draw(st.sampled_from([0.0, 50.0])),
        lengths=ResponseLengths(
            2000, 100.0, draw(st.sampled_from([0.0, 0.5, 1.5])), turns=draw(st.integers(1, 3))
        ),
        tool_seconds=draw(st.sampled_from([0.0, 3.0])),
        reward_seconds=draw(st.sampled_from([0.0, 1.0, 30.0])),
        seed=draw(st.integers(0, 99)),
    )
    candidate = Candidate(
        mode,
        num_ranks=4,
        num_trainers=2 if mode == SEPARATE else 4,
        num_engines=draw(st.integers(1, 3)),
        most_running=draw(st.integers(1, 9)),
        hand_over_seconds=draw(st.sampled_from([0.0, 2.0])),
        max_staleness=0 if mode == COLOCATED else draw(st.integers(int(mode == PARTIAL), 4)),
    )
    engine = EngineSpeed((1, 4), (0.1, draw(st.sampled_from([0.1, 0.3]))), 1000.0)
    return candidate, load, Speeds(engine, draw(st.sampled_from([5.0, 50.0, math.inf])))


@settings(max_examples=150, deadline=None)
@given(runs())
def test_each_group_is_trained_once_and_in_time(run: tuple[Candidate, Workload, Speeds]) -> None:
    candidate, load, rates = run
    found = simulate(candidate, load, rates, warm_up_steps=0, steps=12)
    num = load.groups_per_step
    assert len(found.trained) == len(set(found.trained)) == 12 * num
    ahead = {COLOCATED: 0, PARTIAL: math.ceil(OVERSAMPLE * num) - num}.get(
        candidate.mode, candidate.max_staleness * num
    )
    for step in range(12):
        in_step = found.trained[step * num : (step + 1) * num]
        assert max(in_step) < (step + 1) * num + ahead
    assert found.staleness_max <= candidate.max_staleness
    assert 0 <= found.trainer_idle <= 1 and 0 <= found.engine_idle <= 1
    # No response is faster than its tokens.
    tokens = sum(tokens_of(load, draw) for draw in found.trained)
    most = candidate.num_engines * candidate.most_running
    assert found.step_seconds * 12 * most >= 0.1 * tokens * (1 - 1e-9)


@settings(max_examples=30, deadline=None)
@given(runs())
def test_simulation_is_deterministic(run: tuple[Candidate, Workload, Speeds]) -> None:
    assert simulate(*run) == simulate(*run)


# ------------------------------------------------------------------------------ recommendation

MEASURED = EngineSpeed((1, 64, 256), (0.010, 0.014, 0.026), 40_000.0)


def ways(most_running: int, splits: tuple[int, ...]) -> list[Candidate]:
    """All ways to use 64 ranks with engines of TP2."""
    found = [
        Candidate(PARTIAL if ahead else COLOCATED, 64, 64, 32, most_running, 4.0, ahead)
        for ahead in (0, 1, 4)
    ]
    for trainers in splits:
        engines = (64 - trainers) // 2
        found += [
            Candidate(SEPARATE, 64, trainers, engines, most_running, 1.0, ahead)
            for ahead in (0, 1, 2, 4)
        ]
    return found


def test_colocated_is_recommended_for_short_even_answers_and_tight_memory() -> None:
    """The optimizer leaves no split but one, and the KV cache is full with few sequences."""
    load = Workload(
        groups_per_step=128,
        samples_per_group=8,
        prompt_tokens=200.0,
        lengths=ResponseLengths(512, 128.0, 0.05),
    )
    found = compare(ways(16, (56,)), load, Speeds(MEASURED, 2000.0))
    assert found.best.candidate.mode == COLOCATED
    assert found.recommendation.startswith("Take colocated: ")


def test_separate_is_recommended_for_tools_and_long_tails() -> None:
    load = Workload(
        groups_per_step=32,
        samples_per_group=8,
        prompt_tokens=300.0,
        lengths=ResponseLengths(8192, 1000.0, 1.0, turns=3),
        tool_seconds=1.0,
    )
    found = compare(ways(256, (32, 48)), load, Speeds(MEASURED, 2000.0))
    best = found.best
    assert best.candidate.mode == SEPARATE and best.candidate.max_staleness > 0
    assert f"--rl-rollout-ranks {best.candidate.num_trainers}-63" in found.recommendation
    assert f"--rl-max-staleness {best.candidate.max_staleness}" in found.recommendation


def test_simplest_way_that_is_good_enough_is_recommended() -> None:
    def row(candidate: Candidate, rate: float) -> Simulated:
        return Simulated(candidate, rate, rate, 1.0, 0.0, 0.0, 0.0, 0, ())

    fast, faster = separate(1), separate(4)
    rows = (row(faster, 10.0), row(fast, 10 * GOOD_ENOUGH), row(colocated(), 9.0))
    assert Comparison(rows).best.candidate == fast
    assert Comparison((*rows, row(colocated(), 9.6))).best.candidate == colocated()


def test_recommendation_says_that_no_split_fits() -> None:
    found = compare([colocated()], workload(), speeds(train_rate=1.0), left_out=("too large",))
    assert "no division of the ranks fits" in found.recommendation


def test_measured_seconds_are_interpolated_and_continued() -> None:
    table = EngineSpeed((2, 4, 8), (1.0, 2.0, 6.0), 1.0).table(10)
    assert table == pytest.approx([1.0, 1.0, 1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0])


def test_lengths_have_the_given_mean_and_limit() -> None:
    lengths = ResponseLengths(most=4000, mean=500.0, sigma=1.0)
    drawn = [n.num_tokens for draw in range(2000) for n in lengths.of_draw(draw, 8, seed=3)]
    assert min(drawn) >= 1 and max(drawn) == 4000
    assert sum(drawn) / len(drawn) == pytest.approx(500, rel=0.05)  # cutting costs 2 %
    assert lengths.of_draw(7, 8, seed=3) == lengths.of_draw(7, 8, seed=3)
